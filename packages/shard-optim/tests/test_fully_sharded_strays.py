"""The fault suite of sharded models: one rank strays, and every rank raises an error that says so.

Weights are compared after every step by their hashes. A fault may end in two ways only: every rank
raises in bounded time, or all ranks hold the same weights. None may hang, and none may be aborted.
"""

import hashlib
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fully_sharded_models import loss_of, net
from ranks import run_ranks, set_collective_timeout
from shard_optim import FullyShardedDataParallel, full_state, load_full_state, save

STEPS, FAULTY_STEP = 5, 2
TIMEOUT_S, BOUND_S = 4, 60

Fault = Callable[[FullyShardedDataParallel, torch.optim.Optimizer], object]


def skip_units(model, _optimizer):
    """From now on two blocks are left out."""
    blocks = model.module.blocks
    model.module.forward = lambda x: model.module.head(
        blocks[4](blocks[3](blocks[0](model.module.embed(x))))
    )


def swap_units(model, _optimizer):
    """From now on two blocks change places, of which one is larger."""
    blocks = model.module.blocks
    order = (blocks[2], blocks[1], blocks[0], blocks[3], blocks[4])

    def forward(x):
        x = model.module.embed(x)
        for block in order:
            x = block(x)
        return model.module.head(x)

    model.module.forward = forward


def call_a_unit_twice(model, _optimizer):
    block = model.module.blocks[1]
    model.module.blocks.insert(3, block)


def remove_units(model, _optimizer):
    del model.module.blocks[1:3]


def replace_small(model, _optimizer):
    norm = model.module.blocks[1].norm
    norm.weight = nn.Parameter(torch.randn(8))


def replace_a_number(model, _optimizer):
    model.module.scale = nn.Parameter(torch.ones(1))


def replace_sharded(model, _optimizer):
    up = model.module.blocks[1].up
    up.weight = nn.Parameter(torch.randn(13, 8))


def add_a_module(model, _optimizer):
    model.module.more = nn.Linear(4, 4)


def add_a_buffer(model, _optimizer):
    model.module.register_buffer("more", torch.zeros(3))


def evaluate(model, _optimizer):
    with torch.no_grad():
        loss_of(model, 0, 0)


def forward_once_more(model, _optimizer):
    loss_of(model, 0, 0)


def train_once_more(model, optimizer):
    loss_of(model, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_parameters(model, _optimizer):
    model.full_parameters()


def whole_state(model, optimizer):
    full_state(model, optimizer)


def load_whole(model, optimizer):
    load_full_state({"model": net(seed=3).state_dict()}, model)


def load_own(model, _optimizer):
    model.load_state_dict(net(seed=3).state_dict())


def load_optimizer(_model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def save_alone(model, optimizer):
    save("/nonexistent/nowhere", model, optimizer)


def clip_alone(model, _optimizer):
    model.clip_grad_norm_(1.0)


def step_once_more(_model, optimizer):
    optimizer.step()


def other_rate(_model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.3


def freeze(model, _optimizer):
    model.module.blocks[1].up.weight.requires_grad_(False)


def barrier(_model, _optimizer):
    dist.barrier()


def leave(_model, _optimizer):
    raise ArithmeticError("only this rank fails")


# What one rank does before a step, and what its error and those of the others must say.
FAULTS: dict[str, tuple[Fault, str, str]] = {
    "skips units": (skip_units, r"all-gather of parameters \(blocks", r"all-gather of parameters"),
    "swaps units": (swap_units, r"all-gather of parameters \(blocks", r"all-gather of parameters"),
    "calls a unit twice": (call_a_unit_twice, "StepMismatchError", "StepMismatchError"),
    "removes units": (remove_units, "StepMismatchError", "all-gather of parameters"),
    "replaces a small parameter": (
        replace_small,
        r"ModelMismatchError: .*blocks\.1\.norm\.weight was replaced",
        r"says: blocks\.1\.norm\.weight was replaced",
    ),
    "replaces a parameter of one number": (
        replace_a_number,
        r"ModelMismatchError: .*scale was replaced",
        r"says: scale was replaced",
    ),
    "replaces a sharded parameter": (
        replace_sharded,
        r"ModelMismatchError: .*blocks\.1\.up\.weight was replaced",
        r"says: blocks\.1\.up\.weight was replaced",
    ),
    "adds a module": (add_a_module, r"more\.weight was added", r"says: more\.weight was added"),
    "adds a buffer": (add_a_buffer, r"made more \(3,\)", r"made more \(3,\)"),
    "evaluates": (evaluate, "for a forward without gradients", "for a forward without gradients"),
    "runs forward once more": (forward_once_more, "StepMismatchError", "StepMismatchError"),
    "trains once more": (train_once_more, "StepMismatchError", "StepMismatchError"),
    "gathers parameters": (whole_parameters, "all-gather of embed", "all-gather of embed"),
    "collects whole state": (whole_state, "state descriptions", "state descriptions"),
    "loads whole state": (load_whole, "exchange of what is loaded", "exchange of what is loaded"),
    "loads a model": (load_own, "of what the ranks load", "of what the ranks load"),
    "loads an optimizer": (load_optimizer, "of what the ranks load", "of what the ranks load"),
    "saves": (save_alone, "saving a checkpoint", "saving a checkpoint"),
    "clips": (clip_alone, "all-reduce of the gradient norm", "all-reduce of the gradient norm"),
    "steps once more": (step_once_more, "StepMismatchError", "stepped AdamW.*stepped AdamW"),
    "takes another learning rate": (other_rate, r"lr=0\.3", r"lr=0\.3"),
    "freezes a parameter": (freeze, r"froze blocks\.1\.up\.weight", "froze blocks"),
    "fails": (leave, "ArithmeticError: only this rank fails", "CollectiveError"),
}


def hashes(model):
    """Of this rank's small parameters, and of the whole ones that its shards are part of."""
    return {
        name: hashlib.sha256(value.numpy().tobytes()).hexdigest()
        for name, value in model.full_parameters().items()
    }


def train(rank, world_size, fault):
    module = net(odd=True)
    module.scale = nn.Parameter(torch.ones(1))  # equal numbers are not the same parameter
    model = FullyShardedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    steps = []
    for step in range(STEPS):
        if step == FAULTY_STEP:
            set_collective_timeout(TIMEOUT_S)
            if rank == world_size - 1:
                FAULTS[fault][0](model, optimizer)
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(hashes(model))
    return steps


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(4, marks=pytest.mark.nightly)], ids=lambda size: f"{size} ranks"
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_strays(fault, world_size):
    """Every rank raises; the faulty one says what it did, the others that it did."""
    outcomes = run_ranks(train, world_size, fault, check=False, timeout=BOUND_S)
    _, own, others = FAULTS[fault]
    for outcome in outcomes:
        assert not outcome.killed, f"{outcome.rank} hung"
        assert not outcome.died, f"{outcome.rank} was ended by signal {outcome.exitcode}"
        assert outcome.error is not None, f"{outcome.rank} trained on: {outcome.value}"
    *innocent, faulty = outcomes
    assert re.search(own, faulty.error), faulty.error
    for outcome in innocent:
        assert re.search(others, outcome.error), outcome.error
