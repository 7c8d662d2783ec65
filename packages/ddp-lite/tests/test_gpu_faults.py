"""A rank is lost under NCCL: the other names it in bounded time, if its host waits.

NCCL's kernels spin until the lost rank comes, and the host does not wait for them: torch's watchdog
ends the process some time after the group's timeout. TORCH_NCCL_BLOCKING_WAIT makes the host wait,
and then the wrapper says what happened.
"""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lite import BucketedDDP, PeerFailureError
from ddp_lite.peer import PeerCopies, PeerCopyAverage, PeerMemory
from ranks import run_ranks

pytestmark = pytest.mark.multi_gpu

COLLECTIVE_TIMEOUT = 4.0
COPY_TIMEOUT = 6.0  # more than ranks differ by in their first step, which loads libraries
# the hung collective, the peer probe's 2 s, and ranks that start afresh
BOUND = COLLECTIVE_TIMEOUT + 2.0 + 20.0


def lose_rank_1(rank: int, world_size: int, how: signal.Signals) -> str:
    device = torch.device("cuda", rank)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    wrapped = BucketedDDP(model, 0.3)
    pid_of_rank_1 = wrapped._ranks._pids[1]

    def step(lost: bool) -> None:
        hidden = model[1](model[0](torch.ones(8, 256, device=device)))
        if lost:
            hidden.register_hook(lambda _: os.kill(os.getpid(), how))
        model[3](model[2](hidden)).sum().backward()
        wrapped.finish_gradient_synchronization()

    try:
        step(lost=False)
        torch.cuda.synchronize()
        step(lost=rank == 1)
        torch.cuda.synchronize()
    except PeerFailureError as error:
        return str(error)
    finally:
        if rank == 0 and how == signal.SIGSTOP:  # nothing else ends a stopped process
            os.kill(pid_of_rank_1, signal.SIGKILL)
    return "finished"


@pytest.mark.parametrize(
    ("how", "words"), [(signal.SIGKILL, "has exited"), (signal.SIGSTOP, "is stopped")]
)
def test_a_host_that_waits_names_the_lost_rank(
    how: signal.Signals, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    survivor, _ = run_ranks(
        lose_rank_1,
        2,
        how,
        backend="nccl",
        timeout=BOUND,
        collective_timeout=COLLECTIVE_TIMEOUT,
        check=False,
    )
    assert survivor.error is None, survivor.error
    message = survivor.value
    assert "on rank 0 in step 2" in message, message
    assert "rank 1" in message, message
    assert words in message, message


def lose_rank_1_in_copies(rank: int, world_size: int, how: signal.Signals) -> str:
    device = torch.device("cuda", rank)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    group = dist.group.WORLD
    assert group is not None
    memory = PeerMemory(group, buffer_mb=1, timeout=timedelta(seconds=COPY_TIMEOUT))
    wrapped = BucketedDDP(model, 0.3, comm_hook=PeerCopyAverage(memory))
    pid_of_rank_1 = wrapped._ranks._pids[1]

    def backward(lost: bool) -> None:
        hidden = model[1](model[0](torch.ones(8, 256, device=device)))
        if lost:
            hidden.register_hook(lambda _: os.kill(os.getpid(), how))
        model[3](model[2](hidden)).sum().backward()

    try:
        backward(lost=False)
        torch.cuda.synchronize()
        backward(lost=rank == 1)
        time.sleep(COPY_TIMEOUT + 4)  # the watch's time, and the peer probe
        assert memory.stream is not None
        memory.stream.synchronize()  # copies wait no longer; a collective of NCCL still does
        backward(lost=False)
    except PeerFailureError as error:
        return str(error)
    finally:
        # A collective of NCCL waits for the lost rank, and the end of the process for it.
        dist.distributed_c10d._abort_process_group()
        if rank == 0 and how == signal.SIGSTOP:  # nothing else ends a stopped process
            os.kill(pid_of_rank_1, signal.SIGKILL)
    return "finished"


@pytest.mark.parametrize(
    ("how", "words"), [(signal.SIGKILL, "has exited"), (signal.SIGSTOP, "is stopped")]
)
def test_copies_name_the_lost_rank(how: signal.Signals, words: str) -> None:
    """By themselves: the host need not wait for the GPU."""
    survivor, _ = run_ranks(
        lose_rank_1_in_copies, 2, how, backend="nccl", timeout=90.0, check=False
    )
    assert survivor.error is None, survivor.error
    assert "an exchange between GPUs failed on rank 0" in survivor.value, survivor.value
    assert "rank 1" in survivor.value, survivor.value
    assert words in survivor.value, survivor.value


def lose_rank_1_in_replays(rank: int, world_size: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    memory = PeerMemory(group, buffer_mb=1, timeout=timedelta(seconds=COPY_TIMEOUT))
    copies, tensor = PeerCopies(memory), torch.ones(1000, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        copies.average([tensor]).wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            copies.average([tensor]).wait()
        for _ in range(3):
            graph.replay()
        assert not bool(tensor.isnan().any())
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            graph.replay()
            time.sleep(COPY_TIMEOUT + 4)  # the watch's time, and the peer probe
            torch.cuda.synchronize()  # nothing waits any more, and the GPU can still be used
            assert bool(tensor.isnan().any()), "an average without a rank looks like a result"
            memory.watch()
        except PeerFailureError as error:
            return str(error)
    return "finished"


def test_replays_name_the_lost_rank() -> None:
    survivor, _ = run_ranks(lose_rank_1_in_replays, 2, backend="nccl", timeout=90.0, check=False)
    assert survivor.error is None, survivor.error
    assert "an exchange between GPUs failed on rank 0" in survivor.value, survivor.value
    assert "rank 1" in survivor.value, survivor.value
    assert "has exited" in survivor.value, survivor.value
