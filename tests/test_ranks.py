"""The launcher itself: values come back, failures are named, hangs end."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from processes import all_end
from ranks import RanksFailed, run_case, run_ranks


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


def peer_has_ended(rank: int, world_size: int, raises: bool) -> bool:
    """On rank 0: whether the process of rank 1 has ended, some time after its function has."""
    pids = torch.tensor([0, 0])
    pids[rank] = os.getpid()
    dist.all_reduce(pids)
    if rank == 1 and raises:
        raise ValueError("planted")
    return rank == 0 and all_end([int(pids[1])], within_s=30 if raises else 1)


def stop_on_rank_1(rank: int, world_size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return rank


def die_on_rank_1(rank: int, world_size: int) -> None:
    dist.barrier()  # a rank that dies while another is still connecting makes that one fail
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def warn(rank: int, world_size: int) -> str:
    dist.barrier()  # as above
    warnings.warn(f"planted on rank {rank}", UserWarning, stacklevel=1)
    return "not an error"


def test_values_come_back_in_rank_order() -> None:
    assert [outcome.value for outcome in run_ranks(total, 3, 10)] == [33.0, 33.0, 33.0]


def test_traceback_reaches_the_test() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 (.|\n)*ValueError: planted"):
        run_ranks(raise_on_rank_1, 2)


def test_a_warning_in_a_rank_is_an_error() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 (.|\n)*UserWarning: planted on rank 1"):
        run_ranks(warn, 2)


@pytest.mark.filterwarnings("ignore:planted")
def test_a_mark_of_the_test_excepts_a_warning_in_its_ranks_too() -> None:
    assert [outcome.value for outcome in run_ranks(warn, 2)] == ["not an error"] * 2


def test_a_stopped_rank_ends_when_the_others_have() -> None:
    healthy, stopped = run_ranks(stop_on_rank_1, 2, check=False)
    assert (healthy.value, healthy.ok) == (0, True)
    assert stopped.error == "stopped by SIGSTOP; killed"
    assert stopped.seconds < 30


def test_hang_ends_at_the_timeout() -> None:
    where = r"rank 0 .* still running after 2 s; killed\n(.|\n)* in hang_on_rank_0"
    with pytest.raises(RanksFailed, match=where):
        run_ranks(hang_on_rank_0, 2, timeout=2)  # it would sleep longer than a test may take


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_ranks_that_returned_wait_for_the_others(raises: bool) -> None:
    outcomes = run_ranks(peer_has_ended, 2, raises, check=False)
    assert outcomes[0].ok, outcomes[0].error
    assert outcomes[1].ok != raises
    assert outcomes[0].value == raises


def test_signal_is_reported() -> None:
    outcomes = run_ranks(die_on_rank_1, 2, check=False)
    assert outcomes[0].ok
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert "died" in (outcomes[1].error or "")


CASES = ("first", "second", "third")


def all_but_the_second(rank: int, world_size: int, case: str) -> str:
    if (rank, case) == (1, "second"):
        raise ValueError("planted")
    return f"{case} on rank {rank}, process {os.getpid()}"


def test_cases_share_a_start_and_a_failure_names_its_case() -> None:
    first = run_case(all_but_the_second, 2, CASES, "first")
    assert [value.partition(",")[0] for value in first] == ["first on rank 0", "first on rank 1"]
    with pytest.raises(RanksFailed, match=r"rank 1:\n(.*\n)*ValueError: planted"):
        run_case(all_but_the_second, 2, CASES, "second")
    with pytest.raises(
        RanksFailed, match=r"rank 1 never got to this case: case \('second',\) failed"
    ):
        run_case(all_but_the_second, 2, CASES, "third")
    assert run_case(all_but_the_second, 2, CASES, "first") == first
