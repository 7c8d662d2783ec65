"""How keys travel round a ring, and how their gradients come back: by messages, or by copies.

At step s of a pass, a rank uses the keys and values of the rank s before it, and the rank s behind
it those of this rank. Messages go by NCCL or gloo. NCCL's kernels take multiprocessors that the
attention kernel, which fills the GPU, then waits for. Between GPUs of one host, ranks copy out of
each other's memory instead: copy engines do that beside any kernel.
"""

from __future__ import annotations

import contextlib
import math
import socket
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashattn_triton.context_parallel.communication import UnderWay, lost_ranks_named, on_wire

#: Gradients that can be waiting for the rank that copies them: while one step's are copied, the
#: next one's are summed.
SLOTS = 2
_ALIGNMENT = 256  # bytes
_Moving = UnderWay[Sequence[Tensor]]


class Transfers:
    """One pass over the ring, by messages. All ranks make the same calls.

    ``own``: keys and values of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, own: tuple[Tensor, Tensor]) -> None:
        self.own = own
        self._group, self._rank, self._size = group, group.rank(), group.size()

    def fetch(self, step: int, rows: int, *, is_read: bool) -> _Moving:
        """Keys and values of the rank ``step`` before this one.

        Args:
            step: 1 to the number of ranks - 1.
            rows: that the other rank has; 0 if it sends nothing.
            is_read: whether the rank ``step`` behind this one needs those of this rank.
        """
        received = [x.new_empty(rows, *x.shape[1:]) for x in self.own]
        return self._exchange(self.own if is_read else (), step, received)

    def give_back(self, step: int, sums: tuple[Tensor, Tensor], *, is_read: bool) -> _Moving:
        """Returns gradients of this step to their rank.

        Brings those that the rank ``step`` behind this one has, if it read this rank's keys. What
        was brought in the step before has been waited for.
        """
        rows = len(self.own[0]) if is_read else 0
        received = [x.new_empty(rows, *x.shape[1:], dtype=torch.float32) for x in self.own]
        return self._exchange(sums, -step, received)

    def zeros(self, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """For the gradients of what was fetched in this step, fp32."""
        k, v = (x.new_zeros(rows, *x.shape[1:], dtype=torch.float32) for x in self.own)
        return k, v

    def _exchange(self, sent: Sequence[Tensor], ahead: int, received: list[Tensor]) -> _Moving:
        """Sends to the rank ``ahead`` of this one, and receives from the rank as far behind.

        Keys and values go ahead; gradients go back, which is a negative number.
        """
        target, source = ((self._rank + step) % self._size for step in (ahead, -ahead))
        sent = [on_wire(self._group, x) for x in sent]
        arriving = [on_wire(self._group, x) for x in received]
        operations = [
            dist.P2POp(operation, x, dist.get_global_rank(self._group, peer), self._group)
            for operation, tensors, peer in (
                (dist.isend, sent, target), (dist.irecv, arriving, source)
            )
            for x in tensors
            if x.numel()
        ]  # fmt: skip

        def finish() -> Sequence[Tensor]:
            return [x.to(y.device) for x, y in zip(arriving, received, strict=True)]

        return UnderWay(
            self._group,
            f"the exchange of keys, values or gradients with ranks {target} and {source}",
            lambda: dist.batch_isend_irecv(operations) if operations else [],
            finish,
            sent,
        )


class Copies(Transfers):
    """Copies out of the memory of other ranks, on a stream beside the current one.

    Every rank's memory has its keys and values, which no rank writes during a pass, and slots for
    gradients that wait for their rank. Ranks meet before they write what others may still be
    reading, and before they read what others have written. They meet on the current stream: on
    another one, NCCL's kernel would hold a multiprocessor of the attention kernel until the last
    rank has come, which may be when that rank's own attention kernel has left it one.
    """

    def __init__(
        self, memory: PeerMemory, group: dist.ProcessGroup, own: tuple[Tensor, Tensor], rows: int
    ) -> None:
        super().__init__(group, own)
        self._memory, self._rows = memory, rows
        memory.meet(group)  # every rank has waited for the copies of the pass before
        for target, x in zip(self._views(self._rank, len(own[0])), own, strict=True):
            target.copy_(x)
        memory.meet(group)

    @staticmethod
    def nbytes(own: tuple[Tensor, Tensor], rows: int, slots: int) -> int:
        """Memory of a rank, with slots for gradients of up to ``rows`` tokens."""
        keys = sum(_aligned(rows * x[0].numel() * x.element_size()) for x in own)
        return keys + slots * sum(_aligned(rows * x[0].numel() * 4) for x in own)

    def zeros(self, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """In this rank's memory, where their rank reads them."""
        k, v = self._views(self._rank, rows, step)
        return k.zero_(), v.zero_()

    def _exchange(self, sent: Sequence[Tensor], ahead: int, received: list[Tensor]) -> _Moving:
        rank, rows = (self._rank - ahead) % self._size, len(received[0])
        if ahead < 0:
            self._memory.meet(self._group)
        sources = self._views(rank, rows, -ahead if ahead < 0 else None)
        what = f"the copy of {'gradients' if ahead < 0 else 'keys and values'} of rank {rank}"
        return UnderWay(
            self._group, what, lambda: [self._memory.copy(received, sources)], lambda: received,
            sources,
        )  # fmt: skip

    def _views(self, rank: int, rows: int, step: int | None = None) -> list[Tensor]:
        """Keys and values in the memory of ``rank``, or the gradients of a step for its reader."""
        at = 0 if step is None else self.nbytes(self.own, self._rows, (step - 1) % SLOTS)
        found = []
        for x in self.own:
            dtype = x.dtype if step is None else torch.float32
            found.append(self._memory.view(rank, at, (rows, *x.shape[1:]), dtype))
            at += _aligned(self._rows * x[0].numel() * dtype.itemsize)
        return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


# -- memory of each rank's GPU that all ranks of a group can read, where they share a host ---------

# They go with their groups.
_memories: weakref.WeakKeyDictionary[dist.ProcessGroup, PeerMemory] = weakref.WeakKeyDictionary()
# Of recorded CUDA graphs, which hold addresses.
_recorded: list[object] = []
_GROWTH = 1.25
_NOT_BEFORE = "no such call was made before the CUDA graph"


class PeerMemory:
    """Memory of a group's ranks, made once and grown. Collective to build and to grow.

    Attributes:
        obstacle: what keeps the ranks from reading each other's memory, in words, the same on all
            ranks; None if nothing does.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self.obstacle = _obstacle(group, device)
        self._mapped: list[Tensor] = []
        self._handle: Any = None  # keeps the mapping
        self._token = torch.zeros(1, device=device)

    @property
    def nbytes(self) -> int:
        """On each rank, in bytes."""
        return len(self._mapped[0]) if self._mapped else 0

    def view(self, rank: int, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor in the memory of a rank, from byte ``at`` on."""
        nbytes = math.prod(shape) * dtype.itemsize
        return self._mapped[rank][at : at + nbytes].view(dtype).view(shape)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.cuda.Event:
        """Queues copies behind the work of the current stream, and beside what comes there next.

        The event's ``wait`` makes the current stream wait for them.
        """
        # A range in a profiler's trace, because copies by themselves do not say what for. It costs
        # microseconds without a profiler too.
        traced: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if torch._C._autograd._profiler_enabled():
            traced = torch.profiler.record_function("flashattn_triton::exchange")
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), traced:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def meet(self, group: dist.ProcessGroup) -> None:
        """The current stream waits until those of all ranks have come here."""
        with lost_ranks_named(group, "the meeting of ranks before copies"):
            dist.all_reduce(self._token, group=group)

    def grow(self, group: dist.ProcessGroup, nbytes: int) -> None:
        """To at least so many bytes, or sets ``obstacle`` on every rank if one cannot have them."""
        nbytes = max(nbytes, int(_GROWTH * self.nbytes))
        torch.cuda.synchronize(self.device)
        self._all_have(group, "")  # no rank is reading any more
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        self._mapped, self._handle, problem = [], None, ""
        if torch.cuda.mem_get_info(self.device)[0] < 2 * nbytes:
            torch.cuda.empty_cache()  # freed blocks that torch keeps, which the driver cannot use
        memory = None
        try:
            # Not ``_symmetric_memory.empty``, whose memory may come from a pool, at an offset.
            memory = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, self.device)
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
        self._all_have(group, problem)
        if self.obstacle is not None or memory is None:
            return
        try:
            self._handle = handle = _symmetric_memory.rendezvous(memory, group)
            self._mapped = [
                memory if rank == group.rank() else handle.get_buffer(rank, (nbytes,), torch.uint8)
                for rank in range(group.size())
            ]
        except RuntimeError as error:  # a container may forbid what processes share memory by
            problem = str(error).partition("\n")[0]
        self._all_have(group, problem)

    def _all_have(self, group: dist.ProcessGroup, problem: str) -> None:
        problems: list[Any] = [None] * group.size()
        dist.all_gather_object(problems, problem, group=group)
        found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        if found:
            self.obstacle = "; ".join(found)


def memory_for(group: dist.ProcessGroup, device: torch.device, nbytes: int = 0) -> PeerMemory | str:
    """So much memory on every rank, or why there is none, in words. Collective.

    While a CUDA graph is recorded there is what was made before.
    """
    found = _memories.get(group)
    is_recording = torch.cuda.is_current_stream_capturing()
    if found is None:
        if is_recording:
            return _NOT_BEFORE
        found = _memories[group] = PeerMemory(group, device)
    if found.obstacle is None and found.nbytes < nbytes and not is_recording:
        found.grow(group, nbytes)
    if found.obstacle is not None:
        return found.obstacle
    if found.nbytes < nbytes:
        return _NOT_BEFORE
    if is_recording:
        _recorded.append((found._mapped, found._handle))
    return found


def in_words(group: dist.ProcessGroup, device: torch.device) -> str:
    """How a ring communicates that may choose. Communicates nothing."""
    found = _memories.get(group)
    if device.type != "cuda":
        return "by messages, which are for all devices"
    if found is None:
        return "by copies between GPUs, if the first call finds that possible"
    return f"by messages: {found.obstacle}" if found.obstacle else "by copies between GPUs"


def _obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """What keeps the ranks from reading each other's memory, in words. Collective."""
    indices = [index for index in range(torch.cuda.device_count()) if index != device.index]
    reached = [index for index in indices if torch.cuda.can_device_access_peer(device, index)]
    own = (socket.gethostname(), _uuid(device.index), [_uuid(index) for index in reached])
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, own, group=group)
    if len({host for host, _, _ in everyone}) > 1:
        return "the ranks are on several hosts"
    gpus = [gpu for _, gpu, _ in everyone]
    if len(set(gpus)) < len(gpus):
        return "ranks share a GPU"
    for rank, (_, gpu, reachable) in enumerate(everyone):
        if set(gpus) - {gpu} - set(reachable):
            return f"rank {rank} cannot read the memory of all other ranks' GPUs"
    return None


def _uuid(index: int | None) -> str:
    return str(torch.cuda.get_device_properties(index or 0).uuid)
