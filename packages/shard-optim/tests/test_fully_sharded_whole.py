"""Optimizers that need whole matrices over parameters in shards: equal to unsharded training."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fully_sharded_models import average_gradients, loss_of, net
from ranks import run_ranks
from shard_optim import FullyShardedDataParallel, ShardedOptimizer, load, save
from shard_optim.bucket_plan import assign_owners
from shard_optim.fully_sharded.whole_matrix import orthogonalization_cost
from whole_state import load_whole_optimizer, whole_optimizer

MUON = functools.partial(torch.optim.Muon, lr=0.05, momentum=0.9)


def matrices_of(model):
    """The matrices of the blocks."""
    return [
        p for name, p in model.named_parameters() if name.endswith(("up.weight", "down.weight"))
    ]


def others_of(model):
    inside = {id(param) for param in matrices_of(model)}
    return [param for param in model.parameters() if id(param) not in inside]


def trained_replicas(rank, steps, **settings):
    model = net(**settings)
    optimizers = [MUON(matrices_of(model)), torch.optim.AdamW(others_of(model), lr=0.05)]
    for step in range(steps):
        model.zero_grad()
        loss_of(model, step, rank).backward()
        average_gradients(model)
        for optimizer in optimizers:
            optimizer.step()
    return model


def sharded(offload_state=False, **settings):
    model = FullyShardedDataParallel(net(**settings))
    muon = ShardedOptimizer(
        matrices_of(model),
        torch.optim.Muon,
        partition="whole",
        offload_state=offload_state,
        lr=0.05,
        momentum=0.9,
    )
    return model, muon, torch.optim.AdamW(others_of(model), lr=0.05)


def train(model, optimizers, rank, steps):
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_equal(model, expected, exact):
    found = model.full_parameters()
    for name, param in expected.named_parameters():
        if exact:
            assert torch.equal(found[name], param), name
        else:  # gradients of three ranks are added in another order; Muon computes in bf16
            torch.testing.assert_close(found[name], param.detach(), rtol=2e-2, atol=2e-3)


def check_training(rank, world_size, folder):
    for settings, offload_state in (({}, True), ({"frozen": True}, False)):
        expected = trained_replicas(rank, 4, **settings)
        model, *optimizers = sharded(offload_state, **settings)
        train(model, optimizers, rank, range(4))
        assert_equal(model, expected, exact=world_size == 2)
    local = optimizers[0].local
    owned = [param for param in matrices_of(model) if local.updated(param) is not None]
    assert set(optimizers[0].state) <= set(owned)
    for param, state in optimizers[0].state.items():
        assert state["momentum_buffer"].shape == local.place_of(param).size

    # Another process continues, with its own number of ranks.
    expected = trained_replicas(rank, 4)
    model, *optimizers = sharded()
    if world_size == 2:
        train(model, optimizers, rank, range(2))
        for number, optimizer in enumerate(optimizers):
            save(f"{folder}/{number}", model, optimizer)
    model, *optimizers = sharded()
    for number, optimizer in enumerate(optimizers):
        load(f"{folder}/{number}", model, optimizer)
    if world_size == 2:
        train(model, optimizers, rank, range(2, 4))
        assert_equal(model, expected, exact=True)

    with pytest.raises(ValueError, match="must be sharded parameters of the model"):
        ShardedOptimizer(model.parameters(), torch.optim.Muon, partition="whole")
    with pytest.raises(ValueError, match="master_dtype must be left out over the parameters of a"):
        ShardedOptimizer(matrices_of(model), torch.optim.AdamW, master_dtype=torch.float32)
    with pytest.raises(RuntimeError, match="must be given to the constructor where"):
        optimizers[0].add_param_group({"params": matrices_of(sharded()[0])})
    with pytest.raises(ValueError, match="parameters of one FullyShardedDataParallel, but got one"):
        ShardedOptimizer([*matrices_of(model), *matrices_of(sharded()[0])], torch.optim.AdamW)


def check_full_state(rank, world_size):
    """The owners' state becomes that of a plain optimizer, and plain state goes to the owners."""
    expected, plain = trained_replicas(rank, 2), net()
    reference = MUON(matrices_of(plain))
    model, muon, adamw = sharded()
    train(model, (muon, adamw), rank, range(2))
    full, weights = whole_optimizer(muon), model.full_parameters()
    assert (full is None) == (rank > 0)
    plain.load_state_dict(expected.state_dict())
    if full is not None:
        assert set(full["state"]) == set(range(len(matrices_of(plain))))
        reference.load_state_dict(full)
    model, fresh, _ = sharded()
    model.load_state_dict(weights)
    load_whole_optimizer(fresh, full)
    owned = [param for param in matrices_of(model) if fresh.local.updated(param) is not None]
    assert set(fresh.state) == set(owned)
    gradients = [torch.full_like(param, 0.5) for param in matrices_of(plain)]
    for param, gradient in zip(matrices_of(plain), gradients, strict=True):
        param.grad = gradient
    for param in matrices_of(model):
        param.grad = torch.full_like(param, 0.5)
    fresh.step()
    if rank == 0:
        reference.step()
    found = model.full_parameters()
    if rank == 0:
        for name, param in plain.named_parameters():
            if name.endswith(("up.weight", "down.weight")):
                assert torch.equal(found[name], param), name


def check_order_of_parameters(rank, world_size):
    """Every rank lists the matrices in another order."""
    expected = trained_replicas(rank, 2)
    model = FullyShardedDataParallel(net())
    matrices = matrices_of(model)
    if rank:
        matrices[1:] = matrices[:0:-1]
    muon = ShardedOptimizer(matrices, torch.optim.Muon, partition="whole", lr=0.05, momentum=0.9)
    train(model, [muon, torch.optim.AdamW(others_of(model), lr=0.05)], rank, range(2))
    assert_equal(model, expected, exact=True)


class Counting(torch.optim.Optimizer):
    """SGD with a rate of 1 / steps, which it counts in its groups unless they are empty."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if group["params"]:
                group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["count"])


def check_counts_in_groups(rank, world_size):
    """Steps are counted once, whatever the number of matrices, and by ranks that own none."""
    expected = net()
    plain = Counting(matrices_of(expected), lr=0.1)
    for step in range(3):
        plain.zero_grad()
        loss_of(expected, step, rank).backward()
        average_gradients(expected)
        plain.step()
    for offload_state in (False, True):
        model = FullyShardedDataParallel(net())
        first, *rest = matrices_of(model)
        counting = ShardedOptimizer(
            [{"params": [first]}, {"params": rest}],
            Counting,
            partition="whole",
            offload_state=offload_state,
            lr=0.1,
        )
        train(model, [counting], rank, range(3))
        assert [group["count"] for group in counting.param_groups] == [3, 3]
        counting.zero_grad()
        counting.step()
        assert [group["count"] for group in counting.param_groups] == [4, 4]
        assert_equal(model, expected, exact=True)


def test_counts_in_groups():
    run_ranks(check_counts_in_groups, 2)


def test_the_order_of_parameters_does_not_matter():
    run_ranks(check_order_of_parameters, 2)


def test_full_optimizer_state():
    run_ranks(check_full_state, 2)


def test_two_ranks_then_three(tmp_path):
    for world_size in (2, 3):
        run_ranks(check_training, world_size, str(tmp_path))


def test_owners_are_balanced_by_cost():
    """A block of a 2-billion-parameter model, 48 times: the dearest matrices do not meet."""
    shapes = [torch.Size(s) for s in [(1600, 1600)] * 4 + [(6400, 1600)] * 3] * 48
    costs = [orthogonalization_cost(shape) for shape in shapes]
    for world_size in (2, 4, 8):
        owned = assign_owners(costs, [0] * world_size)
        loads = [sum(costs[position] for position in mine) for mine in owned]
        assert sorted(position for mine in owned for position in mine) == list(range(len(costs)))
        assert max(loads) < 1.03 * sum(loads) / world_size


class Bytes(TorchDispatchMode):
    """What this rank sends in all-to-alls."""

    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "alltoall_base" in func.name():
            self.sent.append(args[1].nbytes)
        return func(*args, **(kwargs or {}))


def test_bytes_and_calls_of_a_step():
    """Three times this rank's shards, in two calls for each round of one matrix per rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model, muon, _ = sharded()
        loss_of(model, 0, 0).backward()
        with Bytes() as calls:
            muon.step()
    finally:
        dist.destroy_process_group()
    matrices = matrices_of(model)
    assert len(calls.sent) == 2 * len(matrices) / 2
    assert sum(calls.sent) == 3 * sum(param.nbytes for param in matrices)
