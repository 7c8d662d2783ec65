"""Checkpoints: one rank's shard, the full state in the plain optimizer's form, and refusals."""

import copy
import io

import pytest
import torch
from torch import nn

from ranks import run_ranks
from shard_optim import ShardedOptimizer, load, save
from whole_state import load_whole_optimizer, whole_optimizer

CLASSES = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}, "flat"),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "flat"),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}, "whole"),
}


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    model.append(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))
    return model


def groups(model):
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1], "lr": 0.02},
        {"params": [p for p in model.parameters() if p.ndim <= 1]},
    ]


def sharded(model, name):
    cls, kwargs, partition = CLASSES[name]
    return ShardedOptimizer(
        groups(model), cls, partition=partition, bucket_size_mb=0.0002, **kwargs
    )


def plain(model, name):
    cls, kwargs, _ = CLASSES[name]
    return cls(groups(model), **kwargs)


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        optimizer.step()


def assert_same_state(ours, theirs):
    assert ours["param_groups"] == theirs["param_groups"]
    assert set(ours["state"]) == set(theirs["state"])
    for index, state in theirs["state"].items():
        assert set(ours["state"][index]) == set(state)
        for key, value in state.items():
            mine = ours["state"][index][key]
            if isinstance(value, torch.Tensor):
                assert mine.shape == value.shape
                assert mine.dtype == value.dtype
                assert mine.device.type == "cpu"
                assert torch.equal(mine, value), (index, key)
            else:
                assert mine == value


def check_folder(rank, world_size, folder):
    """State of whole parameters that has other shapes than these, through a folder."""
    model, other = build(), build()
    optimizer = sharded(model, "Adafactor")
    train(model, optimizer, range(2))
    save(folder, model, optimizer)
    resumed = sharded(other, "Adafactor")
    load(folder, other, resumed)
    for trained in ((model, optimizer), (other, resumed)):
        train(*trained, range(2, 4))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_folder_with_state_of_other_shapes(tmp_path):
    run_ranks(check_folder, 2, str(tmp_path / "saved"))


def check_full(rank, world_size, name):
    """Plain for 3 steps -> sharded for 3 -> plain for 3: as if plain throughout."""
    reference, resumed = build(), build()
    straight = plain(reference, name)
    first = plain(resumed, name)
    train(reference, straight, range(3))
    train(resumed, first, range(3))

    middle = sharded(resumed, name)
    load_whole_optimizer(middle, first.state_dict() if rank == 0 else None)
    train(reference, straight, range(3, 6))
    train(resumed, middle, range(3, 6))
    full = whole_optimizer(middle)
    assert (full is not None) == (rank == 0)
    if full is not None:
        assert_same_state(full, straight.state_dict())
        buffer = io.BytesIO()
        torch.save(full, buffer)
        buffer.seek(0)
        last = plain(copy.deepcopy(resumed), name)
        last.load_state_dict(torch.load(buffer, weights_only=True))
    for a, b in zip(reference.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def check_all_classes(rank, world_size):
    for name in CLASSES:
        check_full(rank, world_size, name)


def test_full_state_is_the_plain_optimizers_on_three_ranks():
    run_ranks(check_all_classes, 3)


def check_own(rank, world_size):
    model = build()
    optimizer = sharded(model, "AdamW")
    train(model, optimizer, range(3))
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    train(model, optimizer, range(3, 5))

    other = build()
    resumed = sharded(other, "AdamW")
    resumed.param_groups[0]["lr"] = 0.5
    loaded = torch.load(buffer, weights_only=True)
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    assert resumed.param_groups[0]["lr"] == 0.02
    train(other, resumed, range(3, 5))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)

    before = copy.deepcopy(resumed.state_dict())
    loaded["optimizer"]["shard"]["rank"] += 1
    with pytest.raises(
        ValueError, match=r"rank \d it is the part of rank \d of 2.\n.* full_state\(\)"
    ):
        resumed.load_state_dict(loaded["optimizer"])
    assert str(before) == str(resumed.state_dict())


def check_refusals(rank, world_size):
    model = build()
    optimizer = sharded(model, "AdamW")
    train(model, optimizer, range(2))
    good = whole_optimizer(optimizer)
    before = copy.deepcopy(optimizer.state_dict())

    def refused(message, change):
        wrong = None
        if rank == 0:
            wrong = copy.deepcopy(good)
            wrong = change(wrong) or wrong
        with pytest.raises(ValueError, match=message):
            load_whole_optimizer(optimizer, wrong)
        assert str(before) == str(optimizer.state_dict())

    refused("must hold 'state' and 'param_groups', but got list", lambda d: [1])
    refused("the number of groups is 1 in it, here 2", lambda d: d["param_groups"].pop() and None)
    refused(
        "parameters of group 0 is 2 in it, here 3",
        lambda d: d["param_groups"][0]["params"].pop() and None,
    )
    refused(
        "the set of hyperparameters of group 0 is",
        lambda d: d["param_groups"][0].pop("betas") and None,
    )
    refused(
        "decoupled_weight_decay of group 0 is False in it, here True",
        lambda d: d["param_groups"][0].update(decoupled_weight_decay=False),
    )
    refused(
        r"'exp_avg' of parameter 0 .* has shape \(2, 2\), expected \(7, 5\)",
        lambda d: d["state"][0].update(exp_avg=torch.zeros(2, 2)),
    )
    refused("in none of its groups", lambda d: d["state"].update({99: {}}))


def check_masters(rank, world_size):
    model = nn.Linear(6, 5).to(torch.bfloat16)
    settings = {"lr": 1e-4, "master_dtype": torch.float32}
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, **settings)

    def steps(m, o, numbers):
        for number in numbers:
            for p in m.parameters():
                p.grad = torch.full_like(p, 1.0 + number)
            o.step()

    steps(model, optimizer, range(3))
    other = copy.deepcopy(model)
    resumed = ShardedOptimizer(other.parameters(), torch.optim.AdamW, **settings)
    full = whole_optimizer(optimizer)
    assert full is None or full["state"][0]["master_param"].dtype == torch.float32
    load_whole_optimizer(resumed, full)
    steps(model, optimizer, range(3, 9))
    steps(other, resumed, range(3, 9))
    ours, theirs = whole_optimizer(optimizer), whole_optimizer(resumed)
    if rank == 0:
        for index, state in ours["state"].items():
            assert all(torch.equal(v, theirs["state"][index][k]) for k, v in state.items())


def check_order(rank, world_size, folder):
    """Parameters of one shape in another order are told apart by their names in the model."""

    def optimizer_of(model, order):
        params = list(model.parameters())
        return ShardedOptimizer([params[i] for i in order], torch.optim.AdamW, lr=0.1)

    def equal():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    model = equal()
    optimizer = optimizer_of(model, range(6))
    train(model, optimizer, range(2))
    save(folder, model, optimizer)
    other = equal()
    words = r"name of parameter 0.* is 0\.weight in it, here 2\.weight"
    with pytest.raises(ValueError, match=words):
        load(folder, other, optimizer_of(other, (4, 5, 2, 3, 0, 1)))
    resumed = optimizer_of(other, range(6))
    load(folder, other, resumed)
    load(folder, optimizer=resumed)
    assert str(resumed.local.states()) == str(optimizer.local.states())


def test_another_order_of_parameters(tmp_path):
    run_ranks(check_order, 2, str(tmp_path / "saved"))


CHECKS = [
    *((f"full state of {name} is the plain one's", check_full, (name,)) for name in CLASSES),
    ("own shard round trip", check_own, ()),
    ("other checkpoints are refused and nothing changes", check_refusals, ()),
    ("master copies are saved", check_masters, ()),
]


@pytest.mark.parametrize("check", [name for name, _, _ in CHECKS])
def test_on_two_ranks(check, errors_on_two_ranks):
    assert not errors_on_two_ranks[check], errors_on_two_ranks[check]
