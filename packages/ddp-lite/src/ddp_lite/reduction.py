"""Gradients of a few parameters on their way through one reduction.

Three ways to carry them, with the memory traffic each costs for N bytes of gradients:

- ``InPlaceReduction``: the collective works on the gradients where autograd put them. Nothing
  is copied and nothing is allocated.
- ``FlatReduction``: one copy into a flat tensor, and the gradients become views of it (2N). The
  flat tensor is allocated when the bucket is complete and replaces the gradients, so both exist
  for one bucket at a time only.
- ``WireReduction``: one converting copy into a flat tensor of a smaller dtype and one back, on a
  stream of their own.

A gradient that is missing on this rank takes part as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ddp_lite.buckets import Bucket
from ddp_lite.collectives import Chain, Waitable

Average = Callable[[Sequence[Tensor], int], Waitable]


class Reduction(Protocol):
    """The gradients of one bucket on their way."""

    def wait(self) -> Sequence[Tensor]:
        """The averages in the bucket's order, when they may be used (as for a ``Waitable``)."""


class InPlaceReduction:
    """Averages each gradient where it lies, all in one coalesced collective.

    Args:
        bucket: the parameters.
        gradients: theirs on this rank; None where there is none.
        average: starts the collective, from the tensors and their size in bytes.
        extra: tensors of the same dtype that travel along.
    """

    def __init__(
        self,
        bucket: Bucket,
        gradients: Sequence[Tensor | None],
        average: Average,
        extra: Sequence[Tensor] = (),
    ) -> None:
        self._gradients = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(bucket.parameters, gradients, strict=True)
        ]
        # Collectives need contiguous memory; a strided gradient travels as a copy.
        values = [g if g.is_contiguous() else g.contiguous() for g in self._gradients]
        self._copies = [
            (gradient, value)
            for gradient, value in zip(self._gradients, values, strict=True)
            if gradient is not value
        ]
        nbytes = bucket.nbytes + sum(tensor.nbytes for tensor in extra)
        self._work = average([*values, *extra], nbytes)

    def wait(self) -> Sequence[Tensor]:
        """The averaged gradients, in the bucket's order."""
        self._work.wait()
        for gradient, value in self._copies:
            gradient.copy_(value)
        return self._gradients


class FlatReduction:
    """Copies the gradients into one flat tensor and reduces that.

    Args:
        bucket: the parameters.
        gradients: theirs on this rank; None where there is none.
        start: starts the reduction of the flat tensor, in place.
        flat: where to; None allocates exactly the room that the gradients need. What lies past
            the gradients is set to zero.
    """

    def __init__(
        self,
        bucket: Bucket,
        gradients: Sequence[Tensor | None],
        start: Callable[[Tensor], Waitable],
        flat: Tensor | None = None,
    ) -> None:
        if flat is None:
            flat = bucket.parameters[0].new_empty(bucket.numel)
        self._views = _pack(bucket, gradients, flat)
        self._work = start(flat)

    def wait(self) -> Sequence[Tensor]:
        """The reduced gradients, as views of the flat tensor, in the bucket's order."""
        self._work.wait()
        return self._views


class WireReduction:
    """Sends the gradients in another dtype and converts the average back.

    On CUDA both conversions run on ``stream``, beside the backward pass, and what travels is
    freed as soon as it has been converted back.

    Args:
        bucket: the parameters.
        gradients: theirs on this rank; None where there is none.
        start: starts averaging a flat tensor of ``bucket.padded_numel`` elements, in place.
        dtype: what travels.
        stream: for CUDA, one for all buckets.
    """

    def __init__(
        self,
        bucket: Bucket,
        gradients: Sequence[Tensor | None],
        start: Callable[[Tensor], Waitable],
        dtype: torch.dtype,
        stream: torch.cuda.Stream | None,
    ) -> None:
        targets = [
            torch.empty_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(bucket.parameters, gradients, strict=True)
        ]
        views: list[Tensor] = []

        def send() -> Waitable:
            flat = bucket.parameters[0].new_empty(bucket.padded_numel, dtype=dtype)
            views.extend(_pack(bucket, gradients, flat))
            return start(flat)

        def receive() -> None:
            torch._foreach_copy_(targets, views)
            views.clear()

        self._gradients = targets
        self._work = Chain([send, receive], bucket.device, stream)

    def wait(self) -> Sequence[Tensor]:
        """The averaged gradients in their own dtype, in the bucket's order."""
        self._work.wait()
        return self._gradients


class WithExtra:
    """A reduction, and a collective on something else that its group waits for."""

    def __init__(self, reduction: Reduction, extra: Waitable) -> None:
        self._reduction, self._extra = reduction, extra

    def wait(self) -> Sequence[Tensor]:
        """The reduction's gradients, when both are done."""
        gradients = self._reduction.wait()
        self._extra.wait()
        return gradients


def _pack(bucket: Bucket, gradients: Sequence[Tensor | None], flat: Tensor) -> list[Tensor]:
    """Copies gradients, zeros for None, one after the other; returns a view of each."""
    if flat.numel() > bucket.numel:
        flat[bucket.numel :].zero_()
    pieces = flat[: bucket.numel].split([parameter.numel() for parameter in bucket.parameters])
    views = [
        piece.view(parameter.shape)
        for piece, parameter in zip(pieces, bucket.parameters, strict=True)
    ]
    targets, sources = [], []
    for view, gradient in zip(views, gradients, strict=True):
        if gradient is None:
            view.zero_()
        else:
            targets.append(view)
            sources.append(gradient)
    if targets:
        torch._foreach_copy_(targets, sources)
    return views
