"""Averaging between two GPUs with copy engines: no NCCL kernel competes with the backward pass.

NCCL's thread blocks hold SMs for as long as a reduction runs, waiting for the slower rank
included, and matrix products that were tuned for all SMs become slower by much more than their
share. Here the transfers are plain copies between the two GPUs, which need no SM. Each rank
averages half of every bucket::

    barrier     both have this bucket's gradients, and nobody reads last step's averages
    push        my gradients of the peer's half go to the peer's memory       (copy engine)
    barrier     both have the other's gradients of their own half
    average     my half: what arrived and my own gradients                    (one kernel)
    push        my averages go to the peer                                    (copy engine)
    barrier     both have all averages

Barriers are kernels of one small thread block. The averages live in symmetric memory, which
stays allocated: one flat copy of the gradients beside those that autograd produces. Multicast is
not used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.buckets import Bucket
from ddp_lite.collectives import Chain, Waitable, backend_for

_BARRIER_TIMEOUT_MS = 120_000  # a peer that never comes ends in a CUDA error
# Gradients are freed when so many further buckets have been started, so that at most this many
# buckets' gradients exist twice.
_BUCKETS_IN_FLIGHT = 3


class PeerCopyAverage:
    """A gradient hook for exactly two CUDA ranks with peer access. Keep one per wrapper.

    The average is a + (b - a)/2, made by one rank and copied to the other, so both have the same
    bits; they may differ from NCCL's in the last place.

    Args:
        group: the wrapper's process group.

    Raises:
        ValueError: the group has not two ranks, or does not serve CUDA.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if group.size() != 2 or backend_for(group, torch.device("cuda")) is None:
            raise ValueError(
                "copying between peers needs a group of two CUDA ranks, but got "
                f"{group.size()} ranks with {dist.get_backend_config(group)!r}"
            )
        self._group = group
        self._stream: torch.cuda.Stream | None = None
        self._exchanges: dict[tuple[int, ...], HalfExchange] = {}
        self._in_flight: deque[Chain] = deque()

    def reduce_gradients(self, bucket: Bucket, gradients: Sequence[Tensor | None]) -> PeerReduction:
        """Starts averaging; collective the first time that it sees a bucket."""
        if bucket.indices not in self._exchanges:
            self._exchanges[bucket.indices] = self._share_memory(bucket)
        exchange = self._exchanges[bucket.indices]
        if self._stream is None:
            self._stream = torch.cuda.Stream(bucket.device)
        while len(self._in_flight) >= _BUCKETS_IN_FLIGHT:
            self._in_flight.popleft().wait()  # frees the gradients that it has read
        chain = Chain(exchange.stages(gradients), bucket.device, self._stream)
        self._in_flight.append(chain)
        bucket.flat = exchange.flat
        return PeerReduction(chain, exchange.views)

    def _share_memory(self, bucket: Bucket) -> HalfExchange:
        from torch.distributed import _symmetric_memory

        flat = _symmetric_memory.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        handle = _symmetric_memory.rendezvous(flat, self._group)
        me = self._group.rank()
        theirs = handle.get_buffer(1 - me, (bucket.numel,), bucket.dtype)

        def barrier() -> None:
            handle.barrier(channel=0, timeout_ms=_BARRIER_TIMEOUT_MS)

        return HalfExchange(bucket, me, flat, theirs, barrier)


class PeerReduction:
    """One bucket on its way; see ``ddp_lite.reduction``."""

    def __init__(self, work: Waitable, views: Sequence[Tensor]) -> None:
        self._work, self._views = work, views

    def wait(self) -> Sequence[Tensor]:
        """The averaged gradients, as views of the flat tensor, in the bucket's order."""
        self._work.wait()
        return self._views


class HalfExchange:
    """What two ranks do to average one bucket, each its own half.

    Args:
        bucket: the parameters.
        rank: 0 averages the first half, 1 the second.
        flat: this rank's memory for the averages, ``bucket.numel`` elements.
        theirs: the other rank's, mapped here.
        barrier: returns (on CUDA: lets the stream go on) when both ranks have called it.

    Attributes:
        flat: as given.
        views: the averages, shaped as the parameters.
    """

    def __init__(
        self,
        bucket: Bucket,
        rank: int,
        flat: Tensor,
        theirs: Tensor,
        barrier: Callable[[], None],
    ) -> None:
        self.flat = flat
        self.views = [
            flat[span].view(parameter.shape)
            for span, parameter in zip(bucket.slices, bucket.parameters, strict=True)
        ]
        self._parameters = bucket.parameters
        self._barrier = barrier
        half = bucket.numel // 2
        mine = slice(0, half) if rank == 0 else slice(half, bucket.numel)
        other = slice(half, bucket.numel) if rank == 0 else slice(0, half)
        self._my_half, self._their_copy = flat[mine], theirs[mine]
        self._kept = _pieces(bucket, mine, flat)
        self._pushed = _pieces(bucket, other, theirs)

    def stages(self, gradients: Sequence[Tensor | None]) -> list[Callable[[], None]]:
        """The steps of a ``Chain`` that averages ``gradients`` into ``views``."""
        values = [
            self._readable(gradient, parameter)
            for gradient, parameter in zip(gradients, self._parameters, strict=True)
        ]

        def exchange() -> None:
            self._barrier()
            for place, part, target in self._pushed:
                target.copy_(values[place][part])
            self._barrier()

        def average() -> None:
            if self._kept:
                targets = [target for _, _, target in self._kept]
                own = [values[place][part] for place, part, _ in self._kept]
                torch._foreach_lerp_(targets, own, 0.5)
            self._their_copy.copy_(self._my_half)
            self._barrier()

        return [exchange, average]

    def _readable(self, gradient: Tensor | None, parameter: Tensor) -> Tensor:
        """The gradient, flat, outside the memory that the peer is going to write to."""
        if gradient is None:
            return parameter.new_zeros(parameter.numel())
        value = gradient.reshape(-1)
        begin = self.flat.data_ptr()
        if begin <= value.data_ptr() < begin + self.flat.nbytes:
            return value.clone()
        return value


def _pieces(bucket: Bucket, region: slice, memory: Tensor) -> list[tuple[int, slice, Tensor]]:
    """The parts of parameters in a region: (place in the bucket, part of it, view of memory)."""
    found = []
    for place, span in enumerate(bucket.slices):
        begin, end = max(span.start, region.start), min(span.stop, region.stop)
        if begin < end:
            part = slice(begin - span.start, end - span.start)
            found.append((place, part, memory[begin:end]))
    return found
