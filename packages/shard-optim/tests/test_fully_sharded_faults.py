"""A rank of a sharded model dies, stops or raises: a named error in bounded time on the others, and
a restart from the last checkpoint that ends where an uninterrupted run does."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from fully_sharded_models import OPTIMIZERS, loss_of, net
from ranks import run_ranks, set_collective_timeout
from shard_optim import FullyShardedDataParallel, load_fully_sharded, save_fully_sharded

STEPS, SAVE_EVERY, FAULTY_STEP = 6, 2, 3

# The survivor's process group gives up after this many seconds, counted from the fault: connecting
# and the imports of the first save take longer on a machine whose cores are busy.
COLLECTIVE_TIMEOUT, BOUND = 10, 100

IN_BACKWARD = "the (all-gather of parameters|reduce-scatter of gradients)"


def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def stop(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(*_args, **_kwargs):
    raise ArithmeticError("only this rank fails")


def arm(model, where, fault):
    """Makes this rank fail when it gets there."""
    if where == "forward":
        model.module.blocks[2].register_forward_hook(fault)
    elif where == "backward":
        model.module.blocks[2].down.register_full_backward_hook(fault)
    elif where == "step":
        torch.optim.AdamW.step = fault
    else:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        FileSystemWriter.write_data = fault


def run(rank, world_size, folder, where=None, fault=None, start_again=False):
    model = FullyShardedDataParallel(net(seed=rank))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    first = 0
    if start_again:
        first = max(int(path.parent.name) for path in Path(folder).glob("*/.metadata"))
        load_fully_sharded(model, optimizer, f"{folder}/{first}")
    for step in range(first, STEPS):
        if step == FAULTY_STEP and where:
            set_collective_timeout(COLLECTIVE_TIMEOUT)
            if rank == 1:
                arm(model, where, {"die": die, "stop": stop, "fail": fail}[fault])
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0 and not start_again:
            save_fully_sharded(model, optimizer, f"{folder}/{step + 1}")
    return [value.tolist() for value in model.full_parameters().values()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return run_ranks(run, 2, str(tmp_path_factory.mktemp("whole")))[0].value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "fault", "what"),
    [
        ("forward", "die", "the all-gather of parameters"),
        pytest.param("forward", "stop", "the all-gather of parameters", marks=pytest.mark.nightly),
        ("forward", "fail", "the all-gather of parameters"),
        ("backward", "die", IN_BACKWARD),
        pytest.param("backward", "fail", IN_BACKWARD, marks=pytest.mark.nightly),
        ("step", "die", "saving a checkpoint"),
        ("save", "die", "saving a checkpoint"),
        pytest.param("save", "fail", "saving a checkpoint", marks=pytest.mark.nightly),
    ],
)
def test_restart_after_a_fault(where, fault, what, tmp_path, uninterrupted):
    survivor, faulty = run_ranks(
        run,
        2,
        str(tmp_path),
        where,
        fault,
        check=False,
        timeout=BOUND,
    )
    assert survivor.error is not None
    assert survivor.seconds < BOUND
    assert re.search(rf"CollectiveError: .*{what}", survivor.error), survivor.error
    if fault == "fail":
        assert "ArithmeticError: only this rank fails" in faulty.error
    for outcome in run_ranks(run, 2, str(tmp_path), None, None, True):
        assert outcome.value == uninterrupted


def leave_out_a_block(rank, _world_size):
    model = FullyShardedDataParallel(net())
    loss_of(model, 0, rank).backward()
    set_collective_timeout(3)
    if rank == 1:
        model.module.blocks = model.module.blocks[:-1]
    loss_of(model, 1, rank).backward()


def test_a_rank_that_calls_fewer_units_ends_all():
    """Gathers then meet reduce-scatters, or nothing; both ranks wait for the timeout at most."""
    outcomes = run_ranks(leave_out_a_block, 2, check=False, timeout=BOUND)
    for outcome in outcomes:
        assert "CollectiveError" in outcome.error
        assert "must take part in the" in outcome.error


def die_while_loading(rank, _world_size, folder, dying):
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    model = FullyShardedDataParallel(net(seed=rank))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    if dying:
        if rank == 1:
            FileSystemReader.read_data = die
    else:
        loss_of(model, 0, rank).backward()
        optimizer.step()
        save_fully_sharded(model, optimizer, folder)
        model = FullyShardedDataParallel(net(seed=rank + 2))
        optimizer = OPTIMIZERS["adamw"](model.parameters())
    load_fully_sharded(model, optimizer, folder)
    return [value.tolist() for value in model.full_parameters().values()]


def test_a_rank_that_dies_while_loading(tmp_path):
    """The other one says so at once; the checkpoint is whole, and the next start loads it."""
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(die_while_loading, 2, folder, False)
    healthy, dead = run_ranks(
        die_while_loading,
        2,
        folder,
        True,
        check=False,
        timeout=BOUND,
        collective_timeout=6 * BOUND,  # what ends the other one is its broken connection
    )
    assert dead.exitcode == -signal.SIGKILL
    assert "CollectiveError" in healthy.error
    assert "loading a checkpoint" in healthy.error
    assert saved[0].value == saved[1].value
