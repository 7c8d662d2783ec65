"""A rank of a sharded model dies, stops or raises: a named error in bounded time on the others, and
a restart from the last checkpoint that ends where an uninterrupted run does."""

import functools
import os
import re
import resource
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_lite.peer import PeerCopies
from fully_sharded_models import OPTIMIZERS, loss_of, net
from process_memory import ProcessMemory
from ranks import run_ranks, set_collective_timeout
from shard_optim import FullyShardedDataParallel, checkpoint_files, load, save
from shard_optim import state as saved_state
from shard_optim.communication import CollectiveError, GroupCollectives

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
    if where == "gather":
        GroupCollectives.all_gather = PeerCopies.all_gather = fault
    elif where == "forward":
        model.module.blocks[2].register_forward_hook(fault)
    elif where == "backward":
        model.module.blocks[2].down.register_full_backward_hook(fault)
    elif where == "step":
        torch.optim.AdamW.step = fault
    elif where == "save":
        checkpoint_files.write_file = fault
    else:
        saved_state.read_elements = fault


def run(rank, world_size, folder, where=None, fault=None, start_again=False, over="gloo"):
    """Trains; the last rank fails. With ``start_again``, from the newest checkpoint."""
    communication = None
    if over == "copies":
        memory = ProcessMemory(Path(folder) / f"memory-{start_again}", 1024)
        communication = PeerCopies(memory)
    model = FullyShardedDataParallel(net(seed=rank, depth=3), communication=communication)
    optimizer = OPTIMIZERS["adamw"](model.parameters())

    def arm_the_last():
        set_collective_timeout(COLLECTIVE_TIMEOUT)
        if rank == world_size - 1:
            arm(model, where, {"die": die, "stop": stop, "fail": fail}[fault])

    first = 0
    if start_again:
        if where == "load":
            arm_the_last()
        first = max(int(path.parent.name) for path in Path(folder).glob("*/.metadata"))
        load(f"{folder}/{first}", model, optimizer)
    for step in range(first, STEPS):
        if step == FAULTY_STEP and where:
            arm_the_last()
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0 and not start_again:
            save(f"{folder}/{step + 1}", model, optimizer)
    return [value.tolist() for value in model.full_parameters().values()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The weights, by the number of ranks and what they communicate over; each is trained once."""

    @functools.cache
    def trained(world_size, over):
        folder = str(tmp_path_factory.mktemp("whole"))
        return run_ranks(run, world_size, folder, None, None, False, over)[0].value

    return trained


GATHER = "the all-gather of parameters"
FAULTS = [
    ("gather", GATHER),
    ("forward", GATHER),
    ("backward", IN_BACKWARD),
    ("step", "saving a checkpoint"),  # the next thing that needs all ranks
    ("save", "saving a checkpoint"),
    ("load", "loading a checkpoint"),
]


def cases():
    """By default the rank dies in every place and raises in some; a stopped one is waited for."""
    for where, what in FAULTS:
        for fault in ("die", "fail", "stop"):
            slow = fault == "stop" or (fault == "fail" and where in ("forward", "step", "load"))
            marks = pytest.mark.nightly if slow else ()
            yield pytest.param(where, fault, what, 2, "gloo", marks=marks, id=f"{where}-{fault}-2")
    yield pytest.param("backward", "die", IN_BACKWARD, 3, "gloo", id="backward-die-3")
    for where, what in FAULTS[3:5]:
        marks, name = pytest.mark.nightly, f"{where}-stop-3"
        yield pytest.param(where, "stop", what, 3, "gloo", marks=marks, id=name)
    # The memory that ranks copy to and from; test_fully_sharded_gpu_faults.py has that of GPUs.
    for where, what in FAULTS[:3]:
        for fault in ("die", "fail", "stop"):
            by_default = (where, fault) in (("gather", "fail"), ("backward", "die"))
            marks = () if by_default else pytest.mark.nightly
            name = f"{where}-{fault}-copies"
            yield pytest.param(where, fault, what, 2, "copies", marks=marks, id=name)


@pytest.mark.slow
@pytest.mark.parametrize(("where", "fault", "what", "world_size", "over"), list(cases()))
def test_restart_after_a_fault(where, fault, what, world_size, over, tmp_path, uninterrupted):
    """Every other rank raises a named error in bounded time; the next start loses no bit."""
    folder = str(tmp_path)
    if where == "load":  # of what a run that was interrupted before has left
        run_ranks(run, world_size, folder, "step", "fail", check=False, timeout=BOUND)
    *survivors, faulty = run_ranks(
        run,
        world_size,
        folder,
        where,
        fault,
        where == "load",
        over,
        check=False,
        timeout=BOUND,
    )
    for survivor in survivors:
        assert survivor.error is not None
        assert survivor.seconds < BOUND
        assert re.search(rf"CollectiveError: .*{what}", survivor.error), survivor.error
    if fault == "fail":
        assert "ArithmeticError: only this rank fails" in faulty.error
    else:
        assert faulty.exitcode == -signal.SIGKILL
    for outcome in run_ranks(run, world_size, folder, None, None, True, over):
        assert outcome.value == uninterrupted(world_size, over)


def save_in_the_background(rank, world_size, folder, dies):
    model = FullyShardedDataParallel(net(seed=rank))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_TIMEOUT))
    for step in range(2):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dies and step == 1 and rank == 1:
            arm(model, "save", die)
        save(f"{folder}/{step}", model, optimizer, background_group=group).result()
    return


def test_a_rank_that_dies_while_it_saves_in_the_background(tmp_path):
    """``result()`` says so on the other one; the checkpoint before is whole, this one is none."""
    healthy, dead = run_ranks(
        save_in_the_background, 2, str(tmp_path), True, check=False, timeout=BOUND
    )
    assert dead.exitcode == -signal.SIGKILL
    assert re.search("CollectiveError: .*saving a checkpoint", healthy.error), healthy.error
    assert [path.parent.name for path in tmp_path.glob("*/.metadata")] == ["0"]
    run_ranks(load_the_first, 2, str(tmp_path))


def save_on_a_full_disk(rank, world_size, folder):
    model = FullyShardedDataParallel(net(seed=rank))
    save(f"{folder}/0", model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    with pytest.raises(
        CollectiveError, match=r"saving a checkpoint, but some failed: rank 1: OSError: .*too large"
    ):
        save(f"{folder}/1", model)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    before = model.full_parameters()
    load(f"{folder}/0", model)
    save(f"{folder}/2", model)
    for name, value in model.full_parameters().items():
        assert torch.equal(value, before[name]), name


def test_a_full_disk_is_named_on_every_rank(tmp_path):
    """Every rank goes on afterwards; the checkpoint before is whole."""
    run_ranks(save_on_a_full_disk, 2, str(tmp_path))
    assert sorted(path.parent.name for path in tmp_path.glob("*/.metadata")) == ["0", "2"]


def load_the_first(rank, world_size, folder):
    model = FullyShardedDataParallel(net(seed=rank))
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    load(f"{folder}/0", model, optimizer)
    assert next(iter(optimizer.state.values()))["step"] == 1
    with pytest.raises(FileNotFoundError, match="which a save writes last"):
        load(f"{folder}/1", model, optimizer)


def freeze_differently(rank, _world_size, small):
    """Each rank another parameter of one size: without a comparison, they would be averaged."""
    model = FullyShardedDataParallel(net())
    loss_of(model, 0, rank).backward()
    before = [param.grad.clone() for param in model.parameters()]
    block = model.module.blocks[1]
    first, second = (block.norm.weight, block.norm.bias) if small else (block.up, block.down)
    (second if rank else first).requires_grad_(False)
    names = ("norm.weight", "norm.bias") if small else ("up.weight", "down.weight")
    expected = rf"rank 0: froze blocks\.1\.{names[0]}; rank 1: froze blocks\.1\.{names[1]}\n"
    with pytest.raises(RuntimeError, match=expected):
        loss_of(model, 1, rank).backward()
    for frozen in (True, False):  # alike on both ranks, it works
        block.requires_grad_(not frozen)
        loss_of(model, 1, rank).backward()
    for param in model.parameters():
        param.grad = None
    loss_of(model, 0, rank).backward()
    for param, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.grad, grad)


@pytest.mark.parametrize("small", [False, True])
def test_ranks_that_freeze_different_parameters(small):
    run_ranks(freeze_differently, 2, small)


def freeze_on_one_rank(rank, _world_size, frozen):
    model = FullyShardedDataParallel(net(frozen=frozen))
    loss_of(model, 0, rank).backward()
    set_collective_timeout(3)
    if rank == 1:
        model.module.blocks[1].up.weight.requires_grad_(frozen)
    loss_of(model, 1, rank).backward()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_parameter_that_one_rank_freezes_is_named_on_all(frozen):
    """The rank that froze it waits for the other, which waits in a gather; both time out."""
    outcomes = run_ranks(freeze_on_one_rank, 2, frozen, check=False, timeout=BOUND)
    what = f"{'unfroze' if frozen else 'froze'} blocks.1.up.weight"
    errors = [outcome.error for outcome in outcomes]
    assert "CollectiveError: " in errors[0]
    assert f"rank 1 says: it {what}, and waits for every rank to do so" in errors[0]
    assert f"RuntimeError: requires_grad must be changed alike on every rank, but rank 1 {what}, "
    assert "and rank 0 changed nothing. Change requires_grad" in errors[1]


def leave_out_a_block(rank, _world_size):
    model = FullyShardedDataParallel(net())
    loss_of(model, 0, rank).backward()
    set_collective_timeout(3)
    if rank == 1:
        model.module.blocks = model.module.blocks[:-1]
    loss_of(model, 1, rank).backward()


def test_a_rank_that_calls_fewer_units_ends_all():
    """The first gather that does not meet another one of the same unit is named on both ranks."""
    outcomes = run_ranks(leave_out_a_block, 2, check=False, timeout=BOUND)
    for outcome in outcomes:
        assert "StepMismatchError" in outcome.error
        assert "it is about to run the all-gather of parameters (blocks.4." in outcome.error
