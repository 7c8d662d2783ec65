"""Parameters in shards: the same training as averaged replicas, bit for bit in fp32."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fully_sharded_models import (
    MODELS,
    OPTIMIZERS,
    loss_of,
    net,
    poison,
    replicas,
)
from ranks import run_ranks
from shard_optim import FullyShardedDataParallel


def assert_resting(model):
    for name, param in model.named_parameters():
        if param.grad is not None:
            assert param.grad.shape == param.shape, name
            assert param.grad.dtype == param.dtype, name
    for unit in model.units:
        for param, shard in zip(unit.params, unit.shard_views, strict=True):
            assert param.data_ptr() == shard.data_ptr()
            assert param.ndim == 1


def train(model, steps, rank, optimizer="adamw"):
    poison(model)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        assert_resting(model)
        optimizer.step()


def assert_equal(model, expected, *, exact=True):
    found = model.full_parameters()
    assert list(found) == [name for name, _ in expected.named_parameters()]
    for name, param in expected.named_parameters():
        if exact:
            assert torch.equal(found[name], param), f"{name}: {(found[name] - param).abs().max()}"
        else:
            # Three or more summands are added in another order.
            torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)


def check_training(rank, world_size, name, optimizer, settings):
    expected = replicas(4, rank, optimizer, **MODELS[name])
    model = FullyShardedDataParallel(net(seed=rank, **MODELS[name]), **settings)
    train(model, 4, rank, optimizer)
    assert_equal(model, expected, exact=world_size <= 2)


def check_mesh(rank, world_size):
    """A device mesh of one dimension."""
    expected = replicas(2, rank)
    mesh = init_device_mesh("cpu", (world_size,))
    model = FullyShardedDataParallel(net(seed=rank), process_group=mesh)
    assert model.process_group is mesh.get_group()
    train(model, 2, rank)
    assert_equal(model, expected)


def check_subgroup(rank, world_size):
    """The last two of three ranks train, numbered 0 and 1 in their group."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    expected = net()
    optimizer = OPTIMIZERS["adamw"](expected.parameters())
    for step in range(2):
        optimizer.zero_grad()
        loss_of(expected, step, rank).backward()
        for param in expected.parameters():
            dist.all_reduce(param.grad, op=dist.ReduceOp.AVG, group=group)
        optimizer.step()
    model = FullyShardedDataParallel(net(seed=rank - 1), process_group=group)
    assert model.module.head.weight.numel() == 11 * 8 // 2
    train(model, 2, rank)
    assert_equal(model, expected)


def test_a_subgroup():
    run_ranks(check_subgroup, 3)


CHECKS = [
    *((name, check_training, (name, "adamw", {})) for name in MODELS),
    ("sgd", check_training, ("plain", "sgd", {})),
    ("one-dimensional mesh", check_mesh, ()),
    ("prefetch 2", check_training, ("plain", "adamw", {"prefetch": 2})),
    *(
        (f"{name}, kept", check_training, (name, "adamw", {"reshard_after_forward": False}))
        for name in ("tied", "frozen", "not re-entrant")
    ),
]


@pytest.mark.parametrize("name", [name for name, _, _ in CHECKS])
def test_on_two_ranks(errors_on_two_ranks, name):
    assert not errors_on_two_ranks[name], errors_on_two_ranks[name]


def check_several(rank, world_size):
    for name in MODELS:
        check_training(rank, world_size, name, "adamw, large eps", {})


@pytest.mark.parametrize("world_size", [1, 3, pytest.param(4, marks=pytest.mark.nightly)])
def test_world_sizes(world_size):
    run_ranks(check_several, world_size)
