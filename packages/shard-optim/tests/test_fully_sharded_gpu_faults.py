"""A rank of a sharded model is lost over NCCL, and while GPUs copy to each other.

NCCL's kernels spin until the lost rank comes, and the host does not wait for them: torch's watchdog
ends the process some time after the group's timeout. TORCH_NCCL_BLOCKING_WAIT makes the host wait,
and then the error says what failed.
"""

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks, set_collective_timeout
from shard_optim import FullyShardedDataParallel, load, save

WIDTH, STEPS, SAVE_EVERY, FAULTY_STEP = 64, 6, 2, 3
# Seconds after which the survivor's group gives up, within which it must have said so, and that a
# run may take: ranks start afresh, and import torch from a disk that may be cold.
COLLECTIVE_TIMEOUT, BOUND, PATIENCE = 6, 60, 240

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(3 * PATIENCE)]

ANYWHERE = (
    "the (all-gather of parameters|reduce-scatter of gradients|"
    "all-reduce of small parameters' gradients)"
)


def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def stop(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(*_args, **_kwargs):
    raise ArithmeticError("only this rank fails")


FAULTS = {"die": die, "stop": stop, "fail": fail}


def make(rank, over):
    """The same weights on every rank; no layer whose gradient is summed in any order."""
    device = torch.device("cuda", rank)
    torch.manual_seed(0)
    with device:
        module = nn.Sequential(
            *(
                nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU())
                for _ in range(5)
            )
        )
    communication = None
    if over == "copies":
        from ddp_lite.peer import PeerCopies, PeerMemory  # which shard-optim does not require

        patience = timedelta(seconds=COLLECTIVE_TIMEOUT)
        communication = PeerCopies(PeerMemory(dist.group.WORLD, buffer_mb=1, timeout=patience))
    return FullyShardedDataParallel(module, communication=communication)


def lose_a_rank(rank, world_size, folder, over, where, fault):
    """Trains until the last rank is lost; notes how long the other one takes to notice."""
    begin = Path(folder) / f"begin-{rank}"
    try:
        run(rank, world_size, folder, over, where, fault)
    except Exception:
        seconds = time.monotonic() - float(begin.read_text())
        (Path(folder) / f"seconds-{rank}").write_text(str(seconds))
        raise


def run(rank, world_size, folder, over, where=None, fault=None, start_again=False):
    """Trains; the last rank is lost. With ``start_again``, from the newest checkpoint."""
    model = make(rank, over)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = 0
    if start_again:
        first = max(int(path.parent.name) for path in Path(folder).glob("*/.metadata"))
        load(f"{folder}/{first}", model, optimizer)
    for step in range(first, STEPS):
        if step == FAULTY_STEP and where is not None:
            torch.cuda.synchronize()
            set_collective_timeout(COLLECTIVE_TIMEOUT)
            (Path(folder) / f"begin-{rank}").write_text(str(time.monotonic()))
            if rank == world_size - 1:
                if where == "forward":
                    model.module[2].register_forward_hook(FAULTS[fault])
                elif where == "backward":
                    model.module[2][1].register_full_backward_hook(FAULTS[fault])
                else:
                    torch.optim.AdamW.step = FAULTS[fault]
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(16, WIDTH, generator=generator).to(model.device)
        model(inputs).square().mean().backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0 and not start_again:
            save(f"{folder}/{step + 1}", model, optimizer)
    return [value.tolist() for value in model.full_parameters().values()]


@pytest.fixture(scope="module", params=["nccl", "copies"])
def over(request):
    return request.param


@pytest.fixture(scope="module")
def uninterrupted(over, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("whole"))
    return run_ranks(run, 2, folder, over, backend="nccl", timeout=PATIENCE)[0].value


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("where", "what"),
    [("forward", ANYWHERE), ("backward", ANYWHERE), ("step", "saving a checkpoint")],
)
def test_restart_after_a_fault(where, fault, what, over, uninterrupted, tmp_path, monkeypatch):
    """The other rank raises a named error in bounded time; the next start loses no bit."""
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    arguments = (str(tmp_path), over, where, fault)
    survivor, faulty = run_ranks(
        lose_a_rank, 2, *arguments, backend="nccl", timeout=PATIENCE, check=False
    )
    assert survivor.error is not None
    assert re.search(rf"CollectiveError: .*{what}", survivor.error), survivor.error
    assert float((tmp_path / "seconds-0").read_text()) < BOUND
    if fault == "fail":
        assert "ArithmeticError: only this rank fails" in faulty.error
    else:
        assert faulty.exitcode == -signal.SIGKILL
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT")
    for outcome in run_ranks(
        run, 2, str(tmp_path), over, None, None, True, backend="nccl", timeout=PATIENCE
    ):
        assert outcome.value == uninterrupted
