"""Two levels: parameters sharded over two ranks, and replicated over two such pairs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fully_sharded_models import OPTIMIZERS, loss_of, net, poison
from ranks import run_ranks
from shard_optim import FullyShardedDataParallel, load, save
from whole_state import load_whole_model, whole_model

STEPS = 3


def replicas(mesh, rank, steps, **settings):
    """Whole models whose gradients are averaged in the same order: inside a pair, then across."""
    model = net(**settings)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            for level in (1, 0):
                dist.all_reduce(param.grad, op=dist.ReduceOp.AVG, group=mesh.get_group(level))
        optimizer.step()
    return model


def train(model, optimizer, rank, steps):
    poison(model)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()


def assert_same(model, expected):
    found = model.full_parameters()
    for name, param in expected.named_parameters():
        assert torch.equal(found[name], param), name


def check_two_levels(rank, world_size, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for settings, how in (
        ({}, {}),
        ({"tied": True}, {"reshard_after_forward": False}),
        ({"how": "not re-entrant"}, {}),
    ):
        expected = replicas(mesh, rank, STEPS, **settings)
        model = FullyShardedDataParallel(net(seed=rank, **settings), process_group=mesh, **how)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        shard = model.module.blocks[0].up.weight
        assert shard.numel() == 13 * 8 // 2
        train(model, optimizer, rank, range(STEPS))
        assert_same(model, expected)
        everywhere = [torch.empty_like(shard) for _ in range(2)]
        dist.all_gather(everywhere, shard.detach(), group=mesh.get_group(0))
        assert torch.equal(*everywhere)

    # Checkpoints: the same folder for two levels of ranks and for one.
    save(f"{folder}/two", model, optimizer)
    with pytest.raises(FileExistsError, match="Save to a new folder"):
        save(f"{folder}/two", model, optimizer)
    flat = FullyShardedDataParallel(net(seed=rank))
    flat_optimizer = torch.optim.AdamW(flat.parameters())
    load(f"{folder}/two", flat, flat_optimizer)
    assert_same(flat, expected)
    save(f"{folder}/one", flat, flat_optimizer)
    again = FullyShardedDataParallel(net(seed=rank), process_group=mesh)
    again_optimizer = torch.optim.AdamW(again.parameters())
    load(f"{folder}/one", again, again_optimizer)
    for a, b in ((model, optimizer), (again, again_optimizer)):
        train(a, b, rank, [STEPS])
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )

    # The same in the background, over a group of all ranks.
    background = dist.new_group(backend="gloo")
    save(f"{folder}/background", again, again_optimizer, background_group=background).result()
    loaded = FullyShardedDataParallel(net(seed=rank))
    loaded_optimizer = torch.optim.AdamW(loaded.parameters())
    load(f"{folder}/background", loaded, loaded_optimizer)
    found = loaded.full_parameters()
    for name, value in again.full_parameters().items():
        assert torch.equal(found[name], value), name
    step_of = [next(iter(o.state.values()))["step"] for o in (again_optimizer, loaded_optimizer)]
    assert step_of == [STEPS + 1] * 2
    pairs = [dist.new_group(pair, backend="gloo") for pair in ([0, 1], [2, 3])]
    with pytest.raises(ValueError, match="ranks of the model's group or mesh, in their order"):
        save(f"{folder}/pair", again, background_group=pairs[rank // 2])

    # A whole state dict, from the first rank to all.
    whole = whole_model(again)
    assert (whole is None) == (rank != 0)
    other = FullyShardedDataParallel(net(seed=7), process_group=mesh)
    load_whole_model(other, whole)
    assert all(
        torch.equal(a, b) for a, b in zip(other.parameters(), again.parameters(), strict=True)
    )

    # Parameters frozen on one pair only.
    other.module.blocks[0 if rank < 2 else 1].up.weight.requires_grad_(False)
    with pytest.raises(
        RuntimeError, match=r"rank \d: froze blocks\.0\.up\.weight; rank \d: froze blocks\.1\.up"
    ):
        loss_of(other, 0, rank).backward()

    # Models that differ between pairs only, and too many dimensions.
    different = nn.Linear(4, 4 if rank < 2 else 5)
    with pytest.raises(RuntimeError, match=r"ranks 2, 3: parameter weight \(5, 4\)"):
        FullyShardedDataParallel(different, process_group=mesh)
    deep = init_device_mesh("cpu", (1, 2, 2))
    with pytest.raises(ValueError, match="one dimension, or of two"):
        FullyShardedDataParallel(net(), process_group=deep)


def test_two_pairs(tmp_path):
    run_ranks(check_two_levels, 4, str(tmp_path))
