"""A rank killed in the middle of a step, a save or a load: a named error in bounded time, and a
restart from the last checkpoint that ends where an uninterrupted run does."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from ranks import run_ranks
from shard_optim import CollectiveError, ShardedOptimizer, checkpoint_files, load, mesh, save
from shard_optim import state as saved_state
from shard_optim.buckets import Bucket
from whole_state import load_whole_optimizer, whole_optimizer

STEPS, SAVE_EVERY, KILLED_STEP = 8, 2, 5

# Another world size sums the gradients of the same batch in another order (fp32).
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

# A survivor learns of a rank's death from the broken connection: the process group's own timeout is
# longer than the ranks may run.
FAULTS = {"check": False, "collective_timeout": 600}


def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = ShardedOptimizer(
        model.named_parameters(),
        torch.optim.AdamW,
        lr=0.05,
        bucket_size_mb=0.0003,
        reduce_gradients=True,
        overlap="next-forward",
    )
    optimizer.attach(model)
    return model, optimizer


def save_pair(model, optimizer, folder, step):
    """The parameters first: the checkpoint of the optimizer is what makes the pair complete."""
    if optimizer.rank == 0:
        torch.save(model.state_dict(), f"{folder}/model-{step}.pt")
    save(f"{folder}/{step}", optimizer=optimizer)


def resume(model, optimizer, folder):
    """Loads the last complete pair; returns its step."""
    step = max(int(path.parent.name) for path in Path(folder).glob("*/.metadata"))
    model.load_state_dict(torch.load(f"{folder}/model-{step}.pt", weights_only=True))
    load(f"{folder}/{step}", optimizer=optimizer)
    return step


def arm(model, where):
    """Makes this rank die when it gets there."""
    if where == "backward":
        model[2].weight.register_hook(die)  # later layers are being reduced already
    elif where == "gather":
        Bucket.launch_gather = die
    elif where == "save":
        checkpoint_files.write_file = die


def run(rank, world_size, folder, where=None, start_again=False):
    model, optimizer = make()
    first = resume(model, optimizer, folder) if start_again else 0
    for step in range(first, STEPS):
        if step == KILLED_STEP and rank == 1:
            arm(model, where)
        batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        mine = batch.chunk(world_size)[rank]
        optimizer.zero_grad()
        model(mine).square().mean().backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0 and not start_again:
            save_pair(model, optimizer, folder, step + 1)
    return [value.tolist() for value in model.state_dict().values()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return run_ranks(run, 2, str(tmp_path_factory.mktemp("whole")))[0].value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("backward", "the reduce-scatter of gradients"),
        ("gather", "the all-gather of updated parameters"),
        ("save", "saving a checkpoint"),
    ],
)
def test_restart_after_a_kill(where, what, tmp_path, uninterrupted):
    survivor, killed = run_ranks(run, 2, str(tmp_path), where, **FAULTS)
    assert killed.exitcode == -signal.SIGKILL
    assert survivor.error is not None
    assert re.search(rf"CollectiveError: .*{what}", survivor.error), survivor.error

    for outcome in run_ranks(run, 2, str(tmp_path), None, True):
        assert outcome.value == uninterrupted
    for outcome in run_ranks(run, 3, str(tmp_path), None, True):
        for mine, expected in zip(outcome.value, uninterrupted, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(expected), **CLOSE)


def load_and_die(rank, world_size, folder, kind):
    model, optimizer = make()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    save(folder, optimizer=optimizer)
    full = whole_optimizer(optimizer)
    before = str(optimizer.state_dict())
    if rank == 1 and kind == "checkpoint":
        saved_state.read_elements = die
    elif rank == 1:
        mesh.Mesh.broadcast = die
    with pytest.raises(CollectiveError) as caught:
        load(folder, optimizer=optimizer) if kind == "checkpoint" else load_whole_optimizer(
            optimizer, full
        )
    assert str(optimizer.state_dict()) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "what"),
    [("checkpoint", "loading a checkpoint"), ("full state", "distributing state|exchange")],
)
def test_a_rank_killed_while_loading(kind, what, tmp_path):
    survivor, killed = run_ranks(load_and_die, 2, str(tmp_path / "saved"), kind, **FAULTS)
    assert killed.exitcode == -signal.SIGKILL
    assert survivor.ok, survivor.error
    assert re.search(what, survivor.value), survivor.value
