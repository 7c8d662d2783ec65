"""Everything that is sent over a process group, and what "waiting" means for each device.

What averages gradients is asynchronous and returns something with ``wait()``. On CUDA, waiting
makes the current stream wait and returns at once; on CPU it blocks the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.ranks import backend_for

_BACKENDS_WITH_AVG = frozenset({"nccl", "gloo", "fake"})


class Waitable(Protocol):
    """Anything that can be waited for: a collective in flight or a chain of them."""

    def wait(self) -> object:
        """Returns when the result may be used (on CUDA: by work queued on the current stream)."""


class Completed:
    """A result that is there already."""

    def wait(self) -> None:
        """Returns at once."""


def require_floating(dtype: object, argument: str) -> None:
    """Refuses what is no dtype that gradients can travel in.

    Args:
        dtype: what a user gave.
        argument: its name.

    Raises:
        ValueError: naming both.
    """
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"{argument} must be a floating-point dtype, but got {dtype!r}. Use one such as "
            "torch.bfloat16"
        )


class Averager:
    """Averages tensors over a group, in place, in one collective per call.

    ``ReduceOp.AVG`` is used where the backend has it, SUM and a multiplication elsewhere. One
    rank averages nothing: tensors stay bitwise as they are and nothing is sent. float16 is
    divided by about √N before and by the rest after the sum, so that neither a large sum
    overflows nor a small term vanishes; the first factor is a power of two and thus exact.

    Args:
        group: the ranks to average over.
        device: where the tensors live.

    Attributes:
        collectives: number started so far.
        bytes: payload handed to them so far.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.world_size = group.size()
        self.collectives = 0
        self.bytes = 0
        has_avg = backend_for(group, device) in _BACKENDS_WITH_AVG
        self._plain = dist.ReduceOp(dist.ReduceOp.AVG if has_avg else dist.ReduceOp.SUM)
        self._sum = dist.ReduceOp(dist.ReduceOp.SUM)
        self._scale_after = None if has_avg else 1.0 / self.world_size

    def describe(self, dtypes: Iterable[torch.dtype]) -> str:
        """The reductions used for some dtypes, in words."""
        return ", ".join(
            f"{self._describe(dtype)} in {str(dtype).removeprefix('torch.')}"
            for dtype in sorted(set(dtypes), key=str)
        )

    def _describe(self, dtype: torch.dtype) -> str:
        if self.world_size == 1:
            return "none (one rank)"
        if dtype == torch.float16:
            return f"SUM of values/{self._half_divisor()}, then scaled"
        return "AVG" if self._scale_after is None else "SUM, then scaled"

    def __call__(self, tensors: Sequence[Tensor], nbytes: int | None = None) -> Waitable:
        """Starts averaging contiguous tensors of one dtype in place.

        Args:
            tensors: at least one; complex ones are averaged as pairs of reals (a real one may be
                among them).
            nbytes: size of all, for the count; None asks the tensors, which takes longer.
        """
        if self.world_size == 1:
            return Completed()
        values = list(tensors)
        dtype = values[0].dtype
        operation, after = self._plain, self._scale_after
        if dtype.is_complex:
            values = [torch.view_as_real(t) if t.is_complex() else t for t in values]
        elif dtype == torch.float16:
            before = self._half_divisor()
            torch._foreach_mul_(values, 1.0 / before)
            operation, after = self._sum, before / self.world_size
        self.collectives += 1
        self.bytes += sum(value.nbytes for value in values) if nbytes is None else nbytes
        work = _start_all_reduce(self.group, values, operation)
        return work if after is None or after == 1.0 else _Scaled(work, values, after)

    def _half_divisor(self) -> int:
        return 1 << math.ceil(math.log2(self.world_size) / 2)


class _Scaled:
    def __init__(self, work: Waitable, values: list[Tensor], factor: float) -> None:
        self._work, self._values, self._factor = work, values, factor

    def wait(self) -> None:
        self._work.wait()
        values, self._values = self._values, []  # waiting twice scales once
        if values:
            torch._foreach_mul_(values, self._factor)


def _start_all_reduce(
    group: dist.ProcessGroup, values: list[Tensor], operation: dist.ReduceOp
) -> Waitable:
    # The group's own methods: dist.all_reduce re-checks its arguments on every call, and
    # dist._coalescing_manager leaves the group unusable if a call inside it raises.
    if len(values) == 1:
        single = dist.AllreduceOptions()
        single.reduceOp = operation
        single.asyncOp = True
        return group.allreduce(values, single)
    several = dist.AllreduceCoalescedOptions()
    several.reduceOp = operation
    several.asyncOp = True
    return group.allreduce_coalesced(values, several)


class Both:
    """Two collectives that do not depend on each other, as one waitable."""

    def __init__(self, first: Waitable, second: Waitable) -> None:
        self._first, self._second = first, second

    def wait(self) -> None:
        """Waits for both."""
        self._first.wait()
        self._second.wait()


class SideStream:
    """One CUDA stream for many chains, so that they run in the order in which they are made."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def on(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream on ``device``; None on CPU."""
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream


class Queued:
    """Work on a CUDA stream of its own, as one waitable. It keeps the tensors that the work uses.

    Args:
        stream: where the work is queued, after this object is made: queueing it may fail half-way.
        tensors: what it uses of other streams' memory.

    Attributes:
        event: when all of it has been queued, what comes after it on the stream.
    """

    def __init__(self, stream: torch.cuda.Stream, tensors: Sequence[Tensor]) -> None:
        self._stream, self._tensors = stream, tensors
        self.event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """The current stream waits, not the host."""
        assert self.event is not None
        torch.cuda.current_stream().wait_event(self.event)
        self._tensors = ()

    def __del__(self) -> None:
        """Keeps the tensors' memory from others until the work has ended, if nobody waited."""
        for tensor in self._tensors:
            tensor.record_stream(self._stream)


class Chain:
    """Collectives that build on each other, as one waitable.

    Each stage starts one collective (or only computes) and returns what to wait for before the
    next stage. On CUDA the whole chain is queued at once on a stream of its own, so it overlaps
    with backward. On CPU the first stage starts at once and the rest run inside ``wait``.

    Args:
        stages: functions.
        tensors: what they use of memory that was not allocated inside them.
        device: of the tensors.
        stream: on CUDA, for the whole chain; None for a new one.
    """

    def __init__(
        self,
        stages: Sequence[Callable[[], Waitable | None]],
        tensors: Sequence[Tensor],
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._queued: Queued | None = None
        self._rest: list[Callable[[], Waitable | None]] = []
        self._first: Waitable | None = None
        if device.type != "cuda":
            first, *self._rest = stages
            self._first = first()
            return
        side = stream if stream is not None else torch.cuda.Stream(device)
        self._queued = Queued(side, tensors)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for stage in stages:
                if (work := stage()) is not None:
                    work.wait()
            self._queued.event = side.record_event()

    def wait(self) -> None:
        """Runs what is left and returns when the last stage's result may be used."""
        if self._queued is not None:
            self._queued.wait()
            return
        if self._first is not None:
            self._first.wait()
        for stage in self._rest:
            if (work := stage()) is not None:
                work.wait()
        self._rest = []
