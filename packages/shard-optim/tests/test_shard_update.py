"""Shards updated as one tensor: the same bits as apart, whoever lacks a gradient and whatever is
loaded."""

import copy

import pytest
import torch
from torch import nn

from ranks import run_ranks
from shard_optim import ShardedOptimizer, load, save, shard_update
from shard_optim.buckets import Bucket
from whole_state import load_whole_optimizer, whole_optimizer

CLASSES = {
    "Adadelta": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.1},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {"weight_decay": 0.1},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 0.01, "momentum": 0.9},
}


def build():
    """Multiples of four, so that neighbours touch; one number; a matrix in another memory order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 12))
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    model.append(nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last))
    return model


def give_gradients(models, step, missing=()):
    """The same on all ranks, so that their average over two is exact."""
    for model in models:
        generator = torch.Generator().manual_seed(step)
        for name, p in model.named_parameters():
            drawn = torch.randn(p.shape, generator=generator)
            p.grad = None if name in missing else torch.empty_like(p).copy_(drawn)


def sharded(model, name="AdamW", **overrides):
    settings = {"bucket_size_mb": 0.0005, "reduce_gradients": True} | overrides
    cls = getattr(torch.optim, name)
    return ShardedOptimizer(model.parameters(), cls, **settings, **CLASSES[name])


def fused_of(optimizer):
    return [each for group in optimizer.local.step_groups for each in group.all_fused()]


def assert_same(models):
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b), f"{name} differs by {(a - b).abs().max()}"


def check_class(rank, world_size, name):
    """A parameter without gradients from the start, and one that lacks one in the middle."""
    models = build(), build()
    plain = getattr(torch.optim, name)(models[0].parameters(), **CLASSES[name])
    optimizer = sharded(models[1], name)
    for step in range(8):
        give_gradients(models, step, ("1.bias", "2.weight") if step == 4 else ("1.bias",))
        plain.step()
        optimizer.step()
        assert_same(models)
    full = whole_optimizer(optimizer)
    if rank == 0:
        expected = plain.state_dict()["state"]
        assert set(full["state"]) == set(expected)
        for index, state in expected.items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(full["state"][index][key]), value), (index, key)


def check_split(rank, world_size):
    model = build()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, reduce_gradients=True)
    together = fused_of(optimizer)
    assert any(len(each.shards) > 1 for each in together)
    give_gradients([model], 0)
    optimizer.step()
    assert len(fused_of(optimizer)) == len(together)
    give_gradients([model], 1, ("0.bias", "2.bias"))
    optimizer.step()
    assert len(fused_of(optimizer)) > len(together)
    steps = {
        name: optimizer.state[p]["step"].item()
        for name, p in model.named_parameters()
        if p in optimizer.state
    }
    assert set(steps.values()) <= {1.0, 2.0}
    assert all(step == 1 + (name not in ("0.bias", "2.bias")) for name, step in steps.items())

    groups = [{"params": [p]} for p in build().parameters()]
    apart = ShardedOptimizer(groups, torch.optim.AdamW, reduce_gradients=True)
    assert all(len(each.shards) == 1 for each in fused_of(apart))


def check_masters(rank, world_size):
    """bf16 parameters with fp32 masters, against the same arithmetic done by hand."""
    model = build().to(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    plain = torch.optim.AdamW(masters, **CLASSES["AdamW"])
    optimizer = sharded(model, master_dtype=torch.float32)
    assert any(len(each.shards) > 1 for each in fused_of(optimizer))
    for step in range(6):
        give_gradients([model], step, ("1.bias",) if step == 3 else ())
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        plain.step()
        optimizer.step()
        for p, master in zip(model.parameters(), masters, strict=True):
            assert torch.equal(p, master.to(torch.bfloat16))
    full = whole_optimizer(optimizer)
    if rank == 0:
        for index, master in enumerate(masters):
            assert torch.equal(full["state"][index]["master_param"], master)


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, once for each group that has parameters."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            if group["params"]:
                group["calls"] = group.get("calls", 0) + 1


def check_step_groups(rank, world_size, reduce_gradients):
    """Many step groups: the same bits, one count, any parameter group in any of them, loadable."""
    before, shard_update.MIN_STEP_GROUP_BYTES = shard_update.MIN_STEP_GROUP_BYTES, 1
    try:
        models = build(), build()

        def groups(model):
            matrices = [p for p in model.parameters() if p.ndim == 2]
            return [
                {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.02},
                {"params": matrices, "momentum": 0.5},
            ]

        settings = {"bucket_size_mb": 0.0001, "reduce_gradients": reduce_gradients, "lr": 0.1}
        plain = Counting(groups(models[0]), lr=0.1)
        optimizer = ShardedOptimizer(groups(models[1]), Counting, **settings)
        assert len(optimizer.local.step_groups) > 2
        launched = []
        for step in range(6):
            if step == 3:
                for model, o in zip(models, (plain, optimizer), strict=True):
                    o.add_param_group({"params": [model[3].weight], "lr": 0.5})
            for group in (*plain.param_groups, *optimizer.param_groups):
                group["lr"] *= 0.9
            give_gradients(models, step)
            plain.step()
            optimizer.step()
            assert_same(models)
        calls = [group["calls"] for group in optimizer.param_groups]
        assert calls == [group["calls"] for group in plain.param_groups] == [6, 6, 3]

        full = whole_optimizer(optimizer)
        again = copy.deepcopy(models[1])
        resumed = ShardedOptimizer(groups(again), Counting, **settings)
        resumed.add_param_group({"params": [again[3].weight]})
        load_whole_optimizer(resumed, full)
        launch = Bucket.launch_gather

        def record(bucket):
            launched.append(bucket)
            launch(bucket)

        Bucket.launch_gather = record
        give_gradients([*models, again], 6)
        for o in (plain, optimizer, resumed):
            launched.clear()
            o.step()
        Bucket.launch_gather = launch
        assert launched == resumed.buckets  # in the order in which forward reads them
        assert_same(models)
        assert_same((models[0], again))
    finally:
        shard_update.MIN_STEP_GROUP_BYTES = before


def check_loading(rank, world_size, folder):
    """Loaded state is joined where shards are fused, and parts them where steps differ."""
    models = build(), build()
    plain = torch.optim.AdamW(models[0].parameters(), **CLASSES["AdamW"])
    for step in range(3):
        give_gradients(models[:1], step, ("1.bias",) if step == 2 else ())
        plain.step()
    models[1].load_state_dict(models[0].state_dict())
    straight = sharded(models[1])
    load_whole_optimizer(straight, plain.state_dict() if rank == 0 else None)
    own = copy.deepcopy(straight.state_dict())
    save(folder, optimizer=straight)
    resumed = [copy.deepcopy(models[1]) for _ in range(2)]
    loaders = [sharded(model) for model in resumed]
    loaders[0].load_state_dict(own)
    load(folder, optimizer=loaders[1])
    for step in range(3, 6):
        give_gradients([*models, *resumed], step)
        for optimizer in (plain, straight, *loaders):
            optimizer.step()
    for model in (models[1], *resumed):
        assert_same((models[0], model))

    joined = sharded(build())
    fresh = torch.optim.AdamW(models[0].parameters(), **CLASSES["AdamW"])
    give_gradients(models[:1], 0)
    fresh.step()
    before = len(fused_of(joined))
    load_whole_optimizer(joined, fresh.state_dict() if rank == 0 else None)
    assert len(fused_of(joined)) == before


CHECKS = [
    *((f"bitwise {name}", check_class, (name,)) for name in CLASSES),
    ("fused shards part where gradients are missing", check_split, ()),
    ("master copies", check_masters, ()),
    ("many step groups, averaged gradients", check_step_groups, (False,)),
    ("many step groups, reduced gradients", check_step_groups, (True,)),
]


@pytest.mark.parametrize("check", [name for name, _, _ in CHECKS])
def test_on_two_ranks(check, errors_on_two_ranks):
    assert not errors_on_two_ranks[check], errors_on_two_ranks[check]


def test_loading_on_two_ranks(tmp_path):
    run_ranks(check_loading, 2, str(tmp_path / "checkpoint"))
