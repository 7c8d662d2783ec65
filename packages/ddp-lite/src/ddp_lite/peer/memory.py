"""Memory of this GPU that the other GPUs of the host can write to and read, and signals between.

The memory is torch's symmetric memory; NVLink multicast is not used. Signals are kernels of one
small thread block (``signals.py``). A thread of the host lets those end that wait for a lost rank,
and finds out which one that is (``watch.py``).
"""

from __future__ import annotations

import importlib.util
import socket
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.bucket_sizes import bytes_from_mb
from ddp_lite.peer.schedule import ALIGNMENT_BYTES, SLOTS, Recordings, rows_in_slot
from ddp_lite.peer.watch import Watch
from ddp_lite.ranks import MEBIBYTE, Ranks, all_gather_json, backend_for

LARGEST_GROUP = 8
NEEDS = (
    f"copies between GPUs need 2 to {LARGEST_GROUP} CUDA ranks on GPUs of one host with peer access"
)
_BUFFER_MB = 512.0
# Before NCCL gives up, whose abort waits for all kernels.
_SECONDS_BEFORE_NCCL = 0.5


class SharedMemory(Protocol):
    """What ``PeerCopies`` needs of the memory that ranks share.

    Attributes:
        group: the ranks.
        device: where the memory of this rank lies.
        stream: on CUDA, what all copies and signals are queued on.
        row_bytes: room of one row.
    """

    group: dist.ProcessGroup
    device: torch.device
    stream: torch.cuda.Stream | None
    row_bytes: int

    def next_slot(self) -> int:
        """The number of the slot that the next window uses."""

    def slot(self, rank: int, number: int, dtype: torch.dtype) -> Tensor:
        """A slot of ``rank``'s memory, mapped here, shape (rows, elements in ``row_bytes``)."""

    def barrier(self) -> None:
        """Waits for all ranks (on CUDA, the stream does)."""

    def stagger(self) -> None:
        """Signals rank - 1 and waits for the signal of rank + 1."""

    def follow(self, start: torch.cuda.Event) -> None:
        """On CUDA, an exchange begins: ``stream``, the current one here, waits for ``start``.

        It waits for all ranks too, where the exchange may use a slot that peers still read.

        Raises:
            PeerFailureError: an earlier exchange did not finish in time.
        """


class PeerMemory:
    """Symmetric memory of the GPUs of one host. Collective to build.

    Exchanges can be recorded in CUDA graphs, whose capture must have the error mode
    ``"thread_local"``. Every rank must replay equally often, after waiting for the exchanges
    before.

    Args:
        group: 2 to 8 CUDA ranks on GPUs of one host with peer access to each other.
        buffer_mb: MB (1024² bytes) of memory on each GPU. Longer messages travel in parts.
            ``torch.cuda.memory_allocated`` does not count this memory.
        timeout: how long an exchange may wait for other ranks. Then a ``PeerFailureError`` that
            names the lost ones is logged, and raised by the next exchange; the GPU goes on without
            them, with NaN for what it would have received. None, and at most: the group's own
            timeout, less half a second (a tenth of it, if that is shorter).

    Attributes:
        group, device, stream, row_bytes, barrier, stagger: see ``SharedMemory``.
        nbytes: symmetric memory on this GPU, in bytes.

    Raises:
        ValueError: on every rank, if there is no group, or it cannot do this; the message says why.
        torch.OutOfMemoryError: on every rank, if a GPU has not enough free memory.
        RuntimeError: on every rank, if the processes cannot share GPU memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        buffer_mb: float = _BUFFER_MB,
        timeout: timedelta | None = None,
    ) -> None:
        if (reason := obstacle(group)) is not None:
            raise ValueError(
                f'{NEEDS}, but got {reason}. Use NCCL: comm_hook="collectives" in BucketedDDP, '
                "no communication= in shard-optim"
            )
        self._share(group, buffer_mb, timeout)

    @classmethod
    def without_asking(cls, group: dist.ProcessGroup) -> PeerMemory:
        """The same as ``PeerMemory(group)``, where ``obstacle`` was asked and found none."""
        memory = cls.__new__(cls)
        memory._share(group, _BUFFER_MB, None)
        return memory

    def _share(self, group: dist.ProcessGroup, buffer_mb: float, timeout: timedelta | None) -> None:
        nbytes = bytes_from_mb(buffer_mb, "buffer_mb")
        rows = SLOTS * rows_in_slot(group.size())
        if nbytes is None or nbytes < rows * ALIGNMENT_BYTES:
            raise ValueError(
                f"buffer_mb must be at least {rows * ALIGNMENT_BYTES / MEBIBYTE:.3g} MB for "
                f"{group.size()} ranks, but got {buffer_mb}. Leave it out for {_BUFFER_MB:.0f} MB"
            )
        self.group = group
        self.device = torch.device("cuda", torch.cuda.current_device())
        # Its few kernels come first where they wait for SMs: peers wait for what they produce.
        self.stream: torch.cuda.Stream | None = torch.cuda.Stream(self.device, priority=-1)
        self.row_bytes = nbytes // rows // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self.nbytes = rows * self.row_bytes
        self._windows = 0
        self._recordings = Recordings()
        self._rank, self._world_size = group.rank(), group.size()
        of_group = group._get_backend(self.device).options._timeout.total_seconds()
        seconds = of_group - min(_SECONDS_BEFORE_NCCL, of_group / 10)
        if timeout is not None:
            seconds = min(seconds, timeout.total_seconds())
        from ddp_lite.peer.signals import Signals  # needs Triton: ``obstacle`` has asked for it

        handle, self._peers = self._allocate()
        signals = Signals(handle, self._peers[self._rank])
        self._watch = Watch(signals, Ranks(group, self.device, "PeerMemory"), seconds)
        self.barrier, self.stagger = signals.barrier, signals.stagger
        with torch.cuda.stream(self.stream):  # loads the kernels, which a recording cannot do
            self.barrier()
            self.stagger()

    def _allocate(self) -> tuple[Any, list[Tensor]]:
        """Torch's handle of the memory, which has the signals; each rank's memory, mapped here."""
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        memory, problem, nbytes = None, "", self.nbytes
        if torch.cuda.mem_get_info(self.device)[0] < 2 * nbytes:
            torch.cuda.empty_cache()  # freed blocks that torch keeps, which the driver cannot use
        free = torch.cuda.mem_get_info(self.device)[0]
        try:
            # Not ``_symmetric_memory.empty``, whose memory may come from a pool, at an offset.
            memory = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, self.device)
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]  # CUDA's errors may go on with a trace
            problem = f"rank {self._rank} has {free / MEBIBYTE:,.0f} MB free ({first_line})"
        problems = [each for each in all_gather_json(problem, self.group) if each]
        if problems or memory is None:
            raise torch.OutOfMemoryError(
                f"every GPU must have {nbytes / MEBIBYTE:,.0f} MB free for buffer_mb, but "
                f"{'; '.join(problems)}. Pass a smaller buffer_mb, or use NCCL"
            )
        handle, mapped = None, []
        try:
            handle = _symmetric_memory.rendezvous(memory, self.group)
            mapped = [
                memory if rank == self._rank else handle.get_buffer(rank, (nbytes,), torch.uint8)
                for rank in range(self._world_size)
            ]
        except RuntimeError as error:  # a container may forbid what processes share memory by
            first_line = str(error).partition("\n")[0]
            problem = f"rank {self._rank} could not: {first_line}"
        problems = [each for each in all_gather_json(problem, self.group) if each]
        if problems or handle is None:
            raise RuntimeError(
                "the processes of the ranks must be able to share GPU memory, but "
                f"{'; '.join(problems)}. Use NCCL"
            )
        return handle, mapped

    def next_slot(self) -> int:
        """See ``SharedMemory``."""
        self._windows += 1
        return self._windows % SLOTS

    def slot(self, rank: int, number: int, dtype: torch.dtype) -> Tensor:
        """See ``SharedMemory``."""
        rows = rows_in_slot(self._world_size)
        slots = self._peers[rank].view(dtype).view(SLOTS, rows, self.row_bytes // dtype.itemsize)
        return slots[number]

    def follow(self, start: torch.cuda.Event) -> None:
        """See ``SharedMemory``."""
        assert self.stream is not None
        self._watch.check()
        # A stream that joins a recording by waiting belongs to it until the recording ends.
        joined = torch.cuda.is_current_stream_capturing()
        self.stream.wait_event(start)
        recording = torch.cuda.is_current_stream_capturing()
        if self._recordings.begin(recording=recording, first=not joined):
            self.barrier()

    def watch(self) -> None:
        """After the replay of a CUDA graph, which does not come by here.

        Raises:
            PeerFailureError: an earlier exchange did not finish in time.
        """
        self._watch.check()


def obstacle(group: dist.ProcessGroup, device: torch.device | None = None) -> str | None:
    """What keeps the ranks of a group from copying between their GPUs, in words. Collective.

    Nothing is sent where the group alone answers; elsewhere one message of each rank is.

    Args:
        group: the ranks.
        device: the GPU that this rank's messages are on; None for the current one.

    Returns:
        The same on every rank; None if nothing does.

    Raises:
        ValueError: ``group`` is None, as ``dist.group.WORLD`` is before it exists.
    """
    if group is None:
        raise ValueError(
            "group must be a process group, but got None, which dist.group.WORLD is before "
            "torch.distributed.init_process_group(). Call that first"
        )
    world_size = group.size()
    if not 2 <= world_size <= LARGEST_GROUP:
        return f"a group of {world_size}"
    if backend_for(group, torch.device("cuda")) is None:
        return f"{world_size} ranks with {dist.get_backend_config(group)!r}, which is not for CUDA"
    everyone = all_gather_json([socket.gethostname(), *_gpus(device)], group)
    hosts = sorted({host for host, *_ in everyone})
    if len(hosts) > 1:
        return (
            f"ranks on {len(hosts)} hosts ({', '.join(hosts)}), inside each of which "
            "examples/hierarchical_average.py can copy"
        )
    for rank, (_, problem, *_) in enumerate(everyone):
        if problem:
            return f"rank {rank} {problem}"
    gpus = [gpu for *_, gpu, _ in everyone]
    if len(set(gpus)) < world_size:
        return f"{world_size} ranks on {len(set(gpus))} GPUs"
    for rank, (*_, gpu, reachable) in enumerate(everyone):
        for peer, other in enumerate(gpus):
            if other != gpu and other not in reachable:
                return f"rank {rank} without access to the GPU of rank {peer}"
    return None


def _gpus(device: torch.device | None) -> tuple[str, str, list[str]]:
    """What is wrong with this rank's GPU, its name, and the names of those that it can reach."""
    if not torch.cuda.is_available():
        return "without a GPU", "", []
    if importlib.util.find_spec("triton") is None:
        return "without Triton", "", []
    mine = torch.cuda.current_device()
    if device is not None and device.index != mine:
        return f"with messages on {device} while cuda:{mine} is current", "", []
    # A rank that cannot see a peer's GPU cannot reach it either.
    visible = [index for index in range(torch.cuda.device_count()) if index != mine]
    reachable = [index for index in visible if torch.cuda.can_device_access_peer(mine, index)]
    return "", _uuid(mine), [_uuid(index) for index in reachable]


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
