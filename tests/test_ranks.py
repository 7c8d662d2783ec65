"""The launcher itself: values come back, failures are named, hangs end."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import RanksFailed, run_ranks


def total(rank: int, world_size: int, offset: int) -> float:
    tensor = torch.tensor([float(rank + offset)])
    dist.all_reduce(tensor)
    return tensor.item()


def raise_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("planted")


def hang_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(600)


def peer_after_its_return(rank: int, world_size: int, raises: bool) -> str:
    """On rank 0: the state of rank 1's process a second after its function ended ("" if gone)."""
    pids = torch.tensor([0, 0])
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    if rank == 1 and raises:
        raise ValueError("planted")
    if rank == 0:
        time.sleep(1)
        stat = Path(f"/proc/{int(pids[1])}/stat")
        return stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else ""
    return ""


def die_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_values_come_back_in_rank_order() -> None:
    assert [outcome.value for outcome in run_ranks(total, 3, 10)] == [33.0, 33.0, 33.0]


def test_traceback_reaches_the_test() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 (.|\n)*ValueError: planted"):
        run_ranks(raise_on_rank_1, 2)


def test_hang_ends_at_the_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 0 .* still running"):
        run_ranks(hang_on_rank_0, 2, timeout=2)
    assert time.monotonic() - start < 40


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_ranks_that_returned_wait_for_the_others(raises: bool) -> None:
    outcomes = run_ranks(peer_after_its_return, 2, raises, check=False)
    assert outcomes[0].ok, outcomes[0].error
    assert outcomes[1].ok != raises
    assert (outcomes[0].value in ("", "Z")) == raises


def test_signal_is_reported() -> None:
    outcomes = run_ranks(die_on_rank_1, 2, check=False)
    assert outcomes[0].ok
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert "died" in (outcomes[1].error or "")
