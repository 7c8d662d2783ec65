"""Gradients that travel in a smaller dtype, and chains of collectives that build on each other.

Loaded by ``wire_dtype=`` and ``ddp_lite.peer``. A comm hook of several collectives uses ``Chain``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.buckets import Bucket
from ddp_lite.ranks import asynchronous
from ddp_lite.reduce import Averager, Gradients, Reduction, Waitable, pack, with_zeros


class Queued:
    """Work on a CUDA stream of its own, as one waitable. It keeps the tensors that the work uses.

    Args:
        stream: where the work is queued, after this object is made: queueing it may fail half-way.
        tensors: memory of other streams that the work uses.

    Attributes:
        event: the point after the work on the stream, once all of it has been queued.
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

    Each stage starts one collective (or only computes) and returns a waitable for it, on which the
    next stage waits. On CUDA the whole chain is queued at once, on one stream for all chains, so it
    overlaps with backward. On CPU the first stage starts at once and the rest run inside ``wait``.

    Args:
        stages: functions.
        tensors: memory used by the stages that was not allocated inside them.
        device: of the tensors.
    """

    def __init__(
        self,
        stages: Sequence[Callable[[], Waitable | None]],
        tensors: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        self._rest: Sequence[Callable[[], Waitable | None]] = ()
        if device.type != "cuda":
            self._started, self._rest = stages[0](), stages[1:]
            return
        side = _side_stream(device)
        self._started = queued = Queued(side, tensors)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for stage in stages:
                if (work := stage()) is not None:
                    work.wait()
            queued.event = side.record_event()

    def wait(self) -> None:
        """Runs the stages that are left and returns when the last result may be used."""
        if self._started is not None:
            self._started.wait()
        for stage in self._rest:
            if (work := stage()) is not None:
                work.wait()
        self._rest = ()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Of all chains on a device, so that they run in the order in which they are made."""
    return torch.cuda.Stream(device)


class OnWire:
    """Sends the gradients in another dtype and converts the average back.

    On CUDA both conversions run on a stream of their own, beside the backward pass, and the flat
    tensor is freed as soon as it has been converted back.

    Args:
        dtype: travels between the ranks.

    Raises:
        ValueError: ``dtype`` is not a floating-point dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"wire_dtype must be a floating-point dtype, but got {dtype!r}. Use one such as "
                "torch.bfloat16"
            )
        self._dtype = dtype

    def __call__(
        self, average: Averager, bucket: Bucket, gradients: Gradients, messages: Sequence[Tensor]
    ) -> Reduction:
        """See ``ddp_lite.reduce.Way``."""
        targets = with_zeros(bucket.parameters, gradients)
        views: list[Tensor] = []

        def send() -> Waitable:
            flat = bucket.parameters[0].new_empty(bucket.padded_numel, dtype=self._dtype)
            views.extend(pack(bucket, targets, flat))
            work = average_on_wire(flat, average)
            return Reduction((work, average(messages)), ()) if messages else work

        def receive() -> None:
            torch._foreach_copy_(targets, views)
            views.clear()

        return Reduction((Chain([send, receive], targets, bucket.device),), targets)

    def __str__(self) -> str:
        return f"flattened and sent as {str(self._dtype).removeprefix('torch.')}"


def average_on_wire(flat: Tensor, average: Averager) -> Waitable:
    """Starts averaging ``flat`` in place, with sums in float32.

    An all-reduce of bfloat16 among N ranks rounds up to N - 1 times. Here every value is rounded
    twice whatever N is: once when it is sent, and once when the float32 sum is sent back. Each rank
    collects everyone's copy of its own 1/N of the tensor, sums it in float32, and the averages are
    gathered. The bytes sent are those of a ring all-reduce, 2·(N-1)/N of the tensor.

    Args:
        flat: one-dimensional, any floating dtype, length a multiple of the number of ranks.
        average: gives the ranks, and counts.
    """
    world_size, communicator = average.ranks.size, average.ranks.communicator
    if world_size <= 2:
        # A sum of two terms is rounded once in either case; one collective is enough.
        return average([flat])
    average.count(flat.nbytes)
    average.count(flat.nbytes)
    received = torch.empty_like(flat)

    def exchange() -> Any:
        options = asynchronous(dist.AllToAllOptions())
        return communicator.alltoall_base(received, flat, [], [], options)

    def sum_and_gather() -> Any:
        from torch._C._distributed_c10d import AllgatherOptions

        mine = received.view(world_size, -1).float().mean(dim=0).to(flat.dtype)
        return communicator._allgather_base(flat, mine, asynchronous(AllgatherOptions()))

    return Chain([exchange, sum_and_gather], [flat, received], flat.device)
