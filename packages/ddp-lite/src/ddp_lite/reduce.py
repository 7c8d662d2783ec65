"""The ways in which one bucket's gradients are averaged.

A *way* is called as ``way(average, bucket, gradients, messages)``. It starts the average and
returns a ``Reduction``, whose ``wait()`` returns the averages. Memory traffic for N bytes of
gradients:

- ``InPlace``: the collective works on the gradients where autograd put them. Nothing is copied.
- ``FlatCopy``: one copy into a flat tensor, and the gradients become views of it (2N).
- ``wire.OnWire``: one converting copy into a flat tensor of a smaller dtype and one back.
- ``hooks.ByHook``: a function or object of the user's averages.

A gradient that is missing on this rank takes part as zeros. ``messages`` are small tensors of the
bucket's dtype that are averaged along with it. On CUDA, waiting makes the current stream wait and
returns at once; on CPU it blocks the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.buckets import Bucket
from ddp_lite.ranks import Ranks, backend_for

Gradients = Sequence[Tensor | None]

_BACKENDS_WITH_AVG = frozenset({"nccl", "gloo", "fake"})


# -- waiting -----------------------------------------------------------------------------------


class Waitable(Protocol):
    """A collective in flight, or several."""

    def wait(self) -> object:
        """Returns when the result may be used (on CUDA: by work queued on the current stream)."""


class Reduction:
    """One bucket's gradients while some collectives are averaging them.

    Args:
        works: collectives to wait for, in this order.
        averages: the tensors that hold the averages then.
        then: the rest of the work, which is called once.
    """

    __slots__ = ("_averages", "_then", "_works")

    def __init__(
        self,
        works: Sequence[Waitable],
        averages: Sequence[Tensor],
        then: Callable[[], object] | None = None,
    ) -> None:
        self._works, self._averages, self._then = works, averages, then

    def wait(self) -> Sequence[Tensor]:
        """Returns the averages in the bucket's order, when they may be used (see ``Waitable``)."""
        for work in self._works:
            work.wait()
        if self._then is not None:
            self._then()
            self._then = None
        return self._averages


# -- the collective ----------------------------------------------------------------------------


class Averager:
    """Averages tensors over the ranks, in place, in one collective per call.

    ``ReduceOp.AVG`` is used where the backend has it, SUM and a multiplication elsewhere. One
    rank averages nothing: tensors stay bitwise as they are and nothing is sent. float16 is
    divided by about √N before and by the rest after the sum, so that neither a large sum
    overflows nor a small term vanishes; the first factor is a power of two and thus exact.

    Args:
        ranks: to average over.

    Attributes:
        ranks: as given.
        collectives: number started so far.
        bytes: payload handed to them so far.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.collectives = 0
        self.bytes = 0
        has_avg = backend_for(ranks.group, ranks.device) in _BACKENDS_WITH_AVG
        self._plain = dist.ReduceOp(dist.ReduceOp.AVG if has_avg else dist.ReduceOp.SUM)
        self._sum = dist.ReduceOp(dist.ReduceOp.SUM)
        self._scale_after = None if has_avg else 1.0 / ranks.size

    def __call__(self, tensors: Sequence[Tensor], nbytes: int | None = None) -> Waitable:
        """Starts averaging contiguous tensors of one dtype in place.

        Args:
            tensors: at least one; complex ones are averaged as pairs of reals (a real one may be
                among them).
            nbytes: size of all, for the count; None asks the tensors, which takes longer.
        """
        if self.ranks.size == 1:
            return Reduction((), ())
        values = list(tensors)
        dtype = values[0].dtype
        operation, after = self._plain, self._scale_after
        if dtype.is_complex:
            values = [torch.view_as_real(t) if t.is_complex() else t for t in values]
        elif dtype == torch.float16:
            before = 1 << math.ceil(math.log2(self.ranks.size) / 2)
            torch._foreach_mul_(values, 1.0 / before)
            operation, after = self._sum, before / self.ranks.size
        self.count(sum(value.nbytes for value in values) if nbytes is None else nbytes)
        # Methods of the communicator: dist.all_reduce re-checks its arguments on every call, and
        # dist._coalescing_manager leaves the group unusable if a call inside it raises.
        communicator, one = self.ranks.communicator, len(values) == 1
        options = dist.AllreduceOptions() if one else dist.AllreduceCoalescedOptions()
        options.reduceOp, options.asyncOp = operation, True
        start = communicator.allreduce if one else communicator.allreduce_coalesced
        work: Waitable = start(values, options)
        if after is None or after == 1.0:
            return work
        return Reduction((work,), (), partial(torch._foreach_mul_, values, after))

    def count(self, nbytes: int) -> None:
        """Counts a collective that was started elsewhere."""
        self.collectives += 1
        self.bytes += nbytes


# -- the ways ----------------------------------------------------------------------------------


class Way(Protocol):
    """Starts averaging a bucket; ``str()`` describes it."""

    def __call__(
        self, average: Averager, bucket: Bucket, gradients: Gradients, messages: Sequence[Tensor], /
    ) -> Reduction:
        """Starts averaging ``gradients`` (None stands for zeros), and ``messages`` in place."""


class InPlace:
    """Averages all gradients of the bucket where they lie, in one coalesced collective."""

    def __call__(
        self, average: Averager, bucket: Bucket, gradients: Gradients, messages: Sequence[Tensor]
    ) -> Reduction:
        """See ``Way``."""
        own, values, copy_back = contiguous(bucket, gradients)
        nbytes = bucket.nbytes + sum(message.nbytes for message in messages)
        return Reduction((average([*values, *messages], nbytes),), own, copy_back)

    def __str__(self) -> str:
        return "coalesced in place"


class FlatCopy:
    """Averages a flat copy, of which the gradients become views.

    The flat tensor is allocated when the bucket is complete and replaces the gradients, so both
    exist for one bucket at a time only.

    Args:
        keep: keep the flat tensor as ``bucket.flat`` until the bucket's next reduction.
    """

    def __init__(self, keep: bool = False) -> None:
        self._keep = keep

    def __call__(
        self, average: Averager, bucket: Bucket, gradients: Gradients, messages: Sequence[Tensor]
    ) -> Reduction:
        """See ``Way``."""
        flat = bucket.parameters[0].new_empty(bucket.numel, dtype=bucket.dtype)
        if self._keep:
            bucket.flat = flat
        views = pack(bucket, gradients, flat)
        return Reduction((average([flat, *messages]),), views)

    def __str__(self) -> str:
        return "copied into a flat tensor"


# -- memory ------------------------------------------------------------------------------------


def contiguous(
    bucket: Bucket, gradients: Gradients
) -> tuple[Sequence[Tensor], Sequence[Tensor], Callable[[], object] | None]:
    """Gradients as collectives need them.

    Args:
        bucket: the parameters.
        gradients: theirs on this rank; None where there is none.

    Returns:
        The gradients with zeros for None, contiguous tensors with the same values, and, if any had
        to be copied, what copies them back.
    """
    try:
        if all(map(Tensor.is_contiguous, gradients)):  # type: ignore[arg-type] # None raises
            return gradients, gradients, None  # type: ignore[return-value]
    except TypeError:
        pass
    own = with_zeros(bucket.parameters, gradients)
    values = [gradient.contiguous() for gradient in own]
    copied = [(one, other) for one, other in zip(own, values, strict=True) if one is not other]
    if not copied:
        return own, values, None
    targets, sources = map(list, zip(*copied, strict=True))
    return own, values, partial(torch._foreach_copy_, targets, sources)


def pack(bucket: Bucket, gradients: Gradients, flat: Tensor) -> list[Tensor]:
    """Copies gradients, zeros for None, one after the other; returns a view of each.

    Args:
        bucket: the parameters.
        gradients: theirs on this rank; None where there is none.
        flat: the target. Elements past the gradients are set to zero.
    """
    if flat.numel() > bucket.numel:
        flat[bucket.numel :].zero_()
    pieces = flat[: bucket.numel].split([parameter.numel() for parameter in bucket.parameters])
    views = [
        piece.view(parameter.shape)
        for piece, parameter in zip(pieces, bucket.parameters, strict=True)
    ]
    torch._foreach_copy_(views, with_zeros(bucket.parameters, gradients))
    return views


def with_zeros(parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> list[Tensor]:
    """The gradients of the parameters, and zeros for those that have none."""
    pairs = zip(parameters, gradients, strict=True)
    return [torch.zeros_like(p, dtype=p.grad_dtype) if g is None else g for p, g in pairs]
