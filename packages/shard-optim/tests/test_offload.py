"""Optimizer state in host memory: the same bits, state dicts and checkpoints as on the device."""

import copy

import pytest
import torch
from torch import nn

from ranks import run_ranks
from shard_optim import FullyShardedDataParallel, ShardedOptimizer, full_state, load, save
from shard_optim.accounting import rank_memory
from shard_optim.offload import offloaded
from whole_state import load_whole_optimizer, whole_optimizer

CLASSES = {
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adam": {"amsgrad": True, "fused": True},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {"weight_decay": 0.1},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
}


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 12))
    model.append(nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last))
    return model


def groups(model):
    return [
        {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.02},
        {"params": [p for p in model.parameters() if p.ndim > 1]},
    ]


def give_gradients(models, step, missing=()):
    """The same for every model."""
    for model in models:
        generator = torch.Generator().manual_seed(step)
        for name, p in model.named_parameters():
            drawn = torch.randn(p.shape, generator=generator)
            p.grad = None if name in missing else torch.empty_like(p).copy_(drawn)


def assert_same(first, second):
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), f"{name} differs by {(a - b).abs().max()}"


def assert_same_state(first, second):
    groups = [
        [{key: value for key, value in group.items() if key != "shard"} for group in groups]
        for groups in (first["param_groups"], second["param_groups"])
    ]
    assert groups[0] == groups[1]
    assert set(first["state"]) == set(second["state"])
    for number, state in first["state"].items():
        assert set(state) == set(second["state"][number])
        for key, value in state.items():
            other = second["state"][number][key]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other)), (number, key)


@pytest.mark.parametrize("name", CLASSES)
def test_the_same_bits_as_the_plain_class(name):
    """Small chunks, a parameter without a gradient in one step, a schedule, resumed runs."""
    models = [build() for _ in range(4)]
    cls, settings = getattr(torch.optim, name), CLASSES[name]
    plain = cls(groups(models[0]), **settings)
    offloading_cls = offloaded(cls, chunk_size_mb=2e-4)
    optimizers = [plain, offloading_cls(groups(models[1]), **settings)]
    for step in range(6):
        if step == 3:  # each loads the state of the other
            for model in models[2:]:
                model.load_state_dict(models[0].state_dict())
            optimizers += [
                offloading_cls(groups(models[2]), **settings),
                cls(groups(models[3]), **settings),
            ]
            optimizers[2].load_state_dict(copy.deepcopy(plain.state_dict()))
            optimizers[3].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
        give_gradients(models, step, ("2.weight",) if step == 2 else ())
        for optimizer in optimizers:
            optimizer.param_groups[1]["lr"] *= 0.9
            optimizer.step()
    for model, optimizer in zip(models[1:], optimizers[1:], strict=True):
        assert_same(models[0], model)
        assert_same_state(plain.state_dict(), optimizer.state_dict())


class Recording(torch.optim.AdamW):
    """Remembers what it was given in each step: bytes of parameters, and their state."""

    seen: list = []  # noqa: RUF012 - emptied by the test

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        states = [dict(self.state[p]) for p in params if p in self.state]
        Recording.seen.append((sum(p.nbytes for p in params), states))
        return super().step(closure)


def test_state_visits_the_device_a_chunk_at_a_time():
    """Between steps it rests in the same memory; in a step, few parameters have copies of it."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    optimizer = offloaded(Recording, chunk_size_mb=600 / 2**20)(model.parameters())
    give_gradients([model], 0)
    optimizer.step()
    resting = {p: state["exp_avg"] for p, state in optimizer.state.items()}
    Recording.seen.clear()
    optimizer.step()
    assert len(Recording.seen) == 3
    assert all(nbytes <= 600 for nbytes, _ in Recording.seen)
    assert all(optimizer.state[p]["exp_avg"] is tensor for p, tensor in resting.items())
    lent = [state["exp_avg"] for _, states in Recording.seen for state in states]
    assert len(lent) == 12
    assert not {id(tensor) for tensor in lent} & {id(tensor) for tensor in resting.values()}


class Failing(torch.optim.AdamW):
    fails = False

    def step(self, closure=None):
        super().step(closure)
        if Failing.fails:
            raise RuntimeError("out of luck")


def test_a_step_that_raises_leaves_state_in_host_memory(monkeypatch):
    model = build()
    optimizer = offloaded(Failing)(model.parameters())
    give_gradients([model], 0)
    optimizer.step()
    resting = {p: state["exp_avg"] for p, state in optimizer.state.items()}
    monkeypatch.setattr(Failing, "fails", True)
    with pytest.raises(RuntimeError, match="out of luck"):
        optimizer.step()
    assert all(optimizer.state[p]["exp_avg"] is tensor for p, tensor in resting.items())


def test_what_cannot_be_combined_is_refused():
    params = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match=r"capturable must be False .* Leave capturable out"):
        ShardedOptimizer(params, torch.optim.AdamW, offload_state=True, capturable=True)
    with pytest.raises(ValueError, match="but got LBFGS, which does not"):
        ShardedOptimizer(params, torch.optim.LBFGS, offload_state=True)
    optimizer = offloaded(torch.optim.AdamW)(params)
    elsewhere = nn.Parameter(torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match="one optimizer for each device"):
        optimizer.add_param_group({"params": [elsewhere]})
    assert len(optimizer.param_groups) == 1


def test_accounting():
    memory = rank_memory(1000, world_size=4, stage=3, offloaded_chunk=10)
    assert (memory.optimizer_state, memory.host_state) == (2 * 8 * 10, 8 * 250)
    assert memory.total == 4 * 250 + 4 * 250 + 2 * 8 * 10
    assert rank_memory(1000, world_size=4, stage=3, offloaded_chunk=200).optimizer_state == 8 * 250
    assert rank_memory(1000, world_size=4, stage=3).host_state == 0


def check_sharded(folder, rank, settings):
    """Sharded with and without offloading; each loads what the other has saved."""
    models = [build().to(settings.pop("dtype", torch.float32)) for _ in range(1)]
    models += [copy.deepcopy(models[0]) for _ in range(3)]

    def make(model, offload_state):
        return ShardedOptimizer(
            groups(model),
            torch.optim.AdamW,
            bucket_size_mb=5e-4,
            offload_state=offload_state,
            weight_decay=0.1,
            **settings,
        )

    optimizers = [make(models[0], False), make(models[1], True)]
    for step in range(5):
        if step == 3:
            for model in models[2:]:
                model.load_state_dict(models[0].state_dict())
            optimizers += [make(models[2], True), make(models[3], False)]
            save(folder, optimizer=optimizers[0])
            load(folder, optimizer=optimizers[2])
            load_whole_optimizer(optimizers[3], whole_optimizer(optimizers[1]))
        if step == 4:
            load_whole_optimizer(optimizers[2], whole_optimizer(optimizers[1]))
        give_gradients(models, step, ("0.bias",) if step == 1 else ())
        for optimizer in optimizers:
            optimizer.step()
    full = [whole_optimizer(optimizer) for optimizer in optimizers]
    for model, found in zip(models[1:], full[1:], strict=True):
        assert_same(models[0], model)
        if rank == 0:
            assert_same_state(full[0], found)


def check_fully_sharded(folder, rank):
    """Over the shards of a model; each loads what the other has saved."""

    def make(offload):
        torch.manual_seed(0)
        blocks = (nn.Linear(8, 8, bias=number % 2 == 0) for number in range(4))
        model = FullyShardedDataParallel(nn.Sequential(*blocks))
        if offload:
            return model, ShardedOptimizer(
                model.parameters(), torch.optim.AdamW, offload_state=True, lr=0.1
            )
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(pairs, steps):
        for step in steps:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
            for model, optimizer in pairs:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()

    pairs = [make(False), make(True)]
    train(pairs, range(3))
    for (model, optimizer), other in zip(pairs[:2], (True, False), strict=True):
        save(f"{folder}-{other}", model, optimizer)
        pairs.append(make(other))
        load(f"{folder}-{other}", *pairs[-1])
    train(pairs, range(3, 5))
    for model, optimizer in pairs[1:]:
        assert_same(pairs[0][0], model)
        ours, theirs = full_state(*pairs[0]), full_state(model, optimizer)
        if rank == 0:
            assert_same_state(ours["optimizer"], theirs["optimizer"])


def check_all(rank, world_size, folder):
    check_sharded(f"{folder}/1", rank, {})
    check_sharded(f"{folder}/2", rank, {"reduce_gradients": True})
    masters = {"master_dtype": torch.float32, "dtype": torch.bfloat16}
    check_sharded(f"{folder}/masters", rank, {"reduce_gradients": True, **masters})
    check_sharded(f"{folder}/whole", rank, {"partition": "whole"})
    check_fully_sharded(f"{folder}/3", rank)


def test_on_two_ranks(tmp_path):
    run_ranks(check_all, 2, str(tmp_path))
