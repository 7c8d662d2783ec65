"""``ddp_lite.ranks``, which ddp-lite and shard-optim are built on."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from ddp_lite import PeerFailureError, StepMismatchError, SynchronizationError
from ddp_lite.ranks import Ranks, all_reduce, name_ranks, shortened
from ranks import run_ranks, set_collective_timeout

CPU = torch.device("cpu")


def messages(rank: int, world_size: int) -> None:
    ranks = Ranks(dist.group.WORLD, CPU, "Test")
    assert ranks.gather({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
    tensors = [torch.full((3,), float(rank)), torch.full((2, 2), rank), torch.full((1,), rank * 1j)]
    ranks.overwrite_with_rank_0(tensors)
    assert all(tensor.abs().sum() == 0 for tensor in tensors)


def test_messages_reach_every_rank() -> None:
    run_ranks(messages, 2)


class LostPeerError(PeerFailureError):
    """A package's own error."""


def fails(rank: int, world_size: int) -> str:
    ranks = Ranks(dist.group.WORLD, CPU, "Test", error=LostPeerError)
    ranks.gather({})  # before it, the other rank may still be connecting
    ranks.step = 7
    if rank == 1:
        os._exit(1)

    def reduce() -> None:
        all_reduce(ranks.communicator, torch.ones(2), dist.ReduceOp.SUM)

    with pytest.raises(LostPeerError, match=r"the sum failed on rank 0 in step 7 after") as raised:
        ranks.call("the sum", reduce)
    assert isinstance(raised.value.__cause__, RuntimeError)
    return str(raised.value)


def test_a_failed_call_names_itself_and_the_lost_rank_with_the_packages_error() -> None:
    survivor, _ = run_ranks(fails, 2, check=False)
    assert "rank 1 (pid" in survivor.value, survivor
    assert "has exited" in survivor.value, survivor


def other_errors(rank: int, world_size: int) -> None:
    ranks = Ranks(dist.group.WORLD, CPU, "Test")

    def out_of_memory() -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError, match="full"):
        ranks.call("the sum", out_of_memory)
    with pytest.raises(ZeroDivisionError):
        ranks.call("the sum", lambda: 1 // 0)
    assert ranks.call("the sum", lambda a, b: a + b, 1, 2) == 3
    assert ranks.together("the sum", lambda a, b: a + b, 1, 2) == 3


def test_errors_of_no_back_end_stay_themselves() -> None:
    run_ranks(other_errors, 2)


def strays(rank: int, world_size: int) -> None:
    """The sizes differ, which on one group would end a process by SIGABRT."""
    ranks = Ranks(dist.group.WORLD, CPU, "Test")

    def total(size: int) -> None:
        all_reduce(ranks.control, torch.ones(size), dist.ReduceOp.SUM)

    ranks.together("the sum of two", total, 2)
    what, size = (("the sum of two", 2), ("the sum of a thousand", 1000))[rank]
    with pytest.raises(StepMismatchError, match=rf"rank {rank} it is about to run {what}") as told:
        ranks.together(what, total, size)
    assert ("a thousand", "two")[rank] in str(told.value).split("says:")[1]


def test_ranks_that_call_different_things_are_told_so() -> None:
    run_ranks(strays, 2)


def forked(rank: int, world_size: int) -> None:
    ranks = Ranks(dist.group.WORLD, CPU, "Test")
    child = os.fork()
    if child == 0:
        try:
            ranks.call("the sum", lambda: None)
        except SynchronizationError as error:
            os._exit(0 if "was forked from it" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_is_no_rank() -> None:
    run_ranks(forked, 2)


def late(rank: int, world_size: int) -> None:
    """The timeout is changed after construction, as programs do after a long start."""
    ranks = Ranks(dist.group.WORLD, CPU, "Test")
    assert ranks.absentees("here") == []
    set_collective_timeout(1)
    if rank == 1:
        assert ranks.gather("the last message") == ["", "the last message"]
        time.sleep(5)
        return
    ranks.gather("")
    assert ranks.absentees("still here") == [1]
    for communicator in (ranks.communicator, ranks.control):
        begin = time.monotonic()
        with pytest.raises(PeerFailureError, match="the sum failed on rank 0 in step 0 after 1"):
            ranks.call("the sum", all_reduce, communicator, torch.ones(2), dist.ReduceOp.SUM)
        assert time.monotonic() - begin < 10


def test_the_groups_timeout_holds_also_when_it_is_changed() -> None:
    run_ranks(late, 2)


def test_words() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(list(range(18))).endswith("14, 15 and 2 more")
    assert shortened(list("abcdefghij")) == "a, b, c, d, e, f, g, h, 2 more"
