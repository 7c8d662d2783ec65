"""The ways in which the gradients of one bucket are averaged.

A reduction is one bucket's gradients on their way; a reducer starts it. There are three ways to
carry the gradients, with the memory traffic that each costs for N bytes of them:

- ``InPlaceReduction``: the collective works on the gradients where autograd put them. Nothing
  is copied and nothing is allocated.
- ``FlatReduction``: one copy into a flat tensor, and the gradients become views of it (2N). The
  flat tensor is allocated when the bucket is complete and replaces the gradients, so both exist
  for one bucket at a time only.
- ``WireReduction``: one converting copy into a flat tensor of a smaller dtype and one back, on a
  stream of their own.

A gradient that is missing on this rank takes part as zeros. A comm hook averages in its own way,
which ``ByHook`` fits in here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.buckets import Bucket, ParameterSpec
from ddp_lite.collectives import Averager, Both, Chain, Completed, SideStream, Waitable


class Reduction(Protocol):
    """The gradients of one bucket on their way."""

    def wait(self) -> Sequence[Tensor]:
        """The averages in the bucket's order, when they may be used (as for a ``Waitable``)."""


class InPlaceReduction:
    """Averages each gradient where it lies, all in one coalesced collective.

    Args:
        bucket: the parameters.
        gradients: theirs on this rank; None where there is none.
        average: starts the collective.
        messages: tensors of the same dtype that travel along.
    """

    def __init__(
        self,
        bucket: Bucket,
        gradients: Sequence[Tensor | None],
        average: Averager,
        messages: Sequence[Tensor],
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
        nbytes = bucket.nbytes
        if messages:
            values += messages
            nbytes += sum(message.nbytes for message in messages)
        self._work = average(values, nbytes)

    def wait(self) -> Sequence[Tensor]:
        """The averaged gradients, in the bucket's order."""
        self._work.wait()
        for gradient, value in self._copies:
            gradient.copy_(value)
        return self._gradients


class FlatReduction:
    """Averages a flat copy of the gradients, which become views of it.

    Args:
        work: what averages the flat tensor.
        views: of it, one per parameter, as ``pack`` returns them.
    """

    def __init__(self, work: Waitable, views: Sequence[Tensor]) -> None:
        self._work, self._views = work, views

    def wait(self) -> Sequence[Tensor]:
        """The averaged gradients, as views of the flat tensor, in the bucket's order."""
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
            views.extend(pack(bucket, gradients, flat))
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


class Reducer(Protocol):
    """One of the ways to average a bucket.

    Attributes:
        how: what happens to the gradients, in words.
    """

    how: str

    def __call__(
        self, bucket: Bucket, gradients: Sequence[Tensor | None], messages: Sequence[Tensor]
    ) -> Reduction:
        """Starts averaging the gradients of a bucket, and messages of their dtype in place."""


class InPlace:
    """Reduces the gradients where they are."""

    how = "coalesced in place"

    def __init__(self, average: Averager) -> None:
        self._average = average

    def __call__(
        self, bucket: Bucket, gradients: Sequence[Tensor | None], messages: Sequence[Tensor]
    ) -> Reduction:
        """Starts one coalesced collective."""
        return InPlaceReduction(bucket, gradients, self._average, messages)


class Copied:
    """Reduces a flat copy, ``bucket.flat``."""

    how = "copied into a flat tensor"

    def __init__(self, average: Averager) -> None:
        self._average = average

    def __call__(
        self, bucket: Bucket, gradients: Sequence[Tensor | None], messages: Sequence[Tensor]
    ) -> Reduction:
        """Copies the bucket and starts one collective."""
        bucket.flat = flat = bucket.parameters[0].new_empty(bucket.numel)
        views = pack(bucket, gradients, flat)
        return FlatReduction(self._average([flat, *messages]), views)


class OnWire:
    """Reduces a flat copy in another dtype; messages travel on their own.

    Args:
        average: for two ranks, and for messages.
        dtype: what travels.
    """

    def __init__(self, average: Averager, dtype: torch.dtype) -> None:
        self.how = f"flattened and sent as {str(dtype).removeprefix('torch.')}"
        self._average, self._dtype = average, dtype
        self._side = SideStream()

    def __call__(
        self, bucket: Bucket, gradients: Sequence[Tensor | None], messages: Sequence[Tensor]
    ) -> Reduction:
        """Starts the chain of conversion, collectives, and conversion back."""

        def start(flat: Tensor) -> Waitable:
            sent = average_on_wire(flat, self._average)
            return Both(sent, self._average(messages)) if messages else sent

        stream = self._side.on(bucket.device)
        return WireReduction(bucket, gradients, start, self._dtype, stream)


@runtime_checkable
class GradientHook(Protocol):
    """A comm hook that takes the gradients where autograd put them, not in a flat tensor."""

    def reduce_gradients(self, bucket: Bucket, gradients: Sequence[Tensor | None]) -> Reduction:
        """Starts averaging the gradients of a complete bucket; None stands for zeros."""


CommHook = Callable[[Tensor, Bucket], Waitable] | GradientHook


class ByHook:
    """Hands the bucket to a comm hook; messages travel on their own."""

    how = "handed to the comm hook"

    def __init__(self, average: Averager, hook: CommHook) -> None:
        self._average, self._hook = average, hook

    def __call__(
        self, bucket: Bucket, gradients: Sequence[Tensor | None], messages: Sequence[Tensor]
    ) -> Reduction:
        """Calls the hook, with the gradients or with a flat copy, ``bucket.flat``."""
        average, hook = self._average, self._hook
        average.collectives += 1
        if isinstance(hook, GradientHook):
            average.bytes += bucket.nbytes
            reduction = hook.reduce_gradients(bucket, gradients)
        else:
            bucket.flat = flat = bucket.parameters[0].new_empty(bucket.padded_numel)
            average.bytes += flat.nbytes
            views = pack(bucket, gradients, flat)
            reduction = FlatReduction(hook(flat, bucket), views)
        return _WithMessages(reduction, average(messages) if messages else Completed())


class _WithMessages:
    def __init__(self, reduction: Reduction, messages: Waitable) -> None:
        self._reduction, self._messages = reduction, messages

    def wait(self) -> Sequence[Tensor]:
        gradients = self._reduction.wait()
        self._messages.wait()
        return gradients


def average_on_wire(flat: Tensor, average: Averager) -> Waitable:
    """Starts averaging ``flat`` in place with float32 sums, in a dtype that is smaller on the wire.

    An all-reduce of bfloat16 among N ranks rounds up to N - 1 times. Here every value is rounded
    twice whatever N is: once when it is sent, and once when the float32 sum is sent back. Each rank
    collects everyone's copy of its own 1/N of the tensor, sums it in float32, and the averages are
    gathered. The bytes sent are those of a ring all-reduce, 2·(N-1)/N of the tensor.

    Args:
        flat: one-dimensional, any floating dtype, length a multiple of the world size.
        average: gives the group, and counts.
    """
    world_size, group = average.world_size, average.group
    if world_size <= 2:
        # A sum of two terms is rounded once in either case; one collective is enough.
        return average([flat])
    average.collectives += 2
    average.bytes += 2 * flat.nbytes
    received = torch.empty_like(flat)

    def exchange() -> Waitable:
        work: Waitable | None = dist.all_to_all_single(received, flat, group=group, async_op=True)
        assert work is not None
        return work

    def sum_and_gather() -> Waitable:
        mine = received.view(world_size, -1).float().mean(dim=0).to(flat.dtype)
        work: Waitable | None = dist.all_gather_into_tensor(flat, mine, group=group, async_op=True)
        assert work is not None
        return work

    return Chain([exchange, sum_and_gather], flat.device)


@dataclass(frozen=True, kw_only=True)
class Transport:
    """The choice of a reducer, as a user makes it; see ``BucketedDDP`` for the fields.

    Raises:
        ValueError: a ``wire_dtype`` that is not floating-point, or both of the last two.
    """

    copy: bool
    wire_dtype: torch.dtype | None
    comm_hook: CommHook | None

    def __post_init__(self) -> None:
        if self.wire_dtype is not None and not self.wire_dtype.is_floating_point:
            raise ValueError(
                f"wire_dtype must be a floating-point dtype, but got {self.wire_dtype}. Use one "
                "such as torch.bfloat16"
            )
        if self.wire_dtype is not None and self.comm_hook is not None:
            raise ValueError(
                "wire_dtype and comm_hook exclude each other, but got both. Convert inside the "
                "hook (see ddp_lite.hooks)"
            )

    @property
    def settings(self) -> dict[str, str]:
        """What ranks must agree on, in words."""
        hook = self.comm_hook
        kind = hook if isinstance(hook, type | FunctionType) else type(hook)
        return {
            "copy": str(self.copy),
            "wire_dtype": str(self.wire_dtype),
            "comm_hook": f"{kind.__qualname__} {getattr(hook, 'settings', '')}",
        }

    def check(self, specs: Sequence[ParameterSpec]) -> None:
        """Refuses parameters whose gradients cannot be carried.

        Raises:
            ValueError: a complex parameter meets a ``wire_dtype``.
        """
        for spec in specs:
            if self.wire_dtype is not None and spec.dtype.is_complex:
                raise ValueError(
                    f"wire_dtype can carry real gradients only, but {spec.name} is {spec.dtype}; "
                    "leave wire_dtype out or freeze the parameter"
                )

    def reducer(self, average: Averager) -> Reducer:
        """What reduces each bucket."""
        if self.comm_hook is not None:
            return ByHook(average, self.comm_hook)
        if self.wire_dtype is not None:
            return OnWire(average, self.wire_dtype)
        return Copied(average) if self.copy else InPlace(average)


def pack(bucket: Bucket, gradients: Sequence[Tensor | None], flat: Tensor) -> list[Tensor]:
    """Copies gradients, zeros for None, one after the other; returns a view of each.

    Args:
        bucket: the parameters.
        gradients: theirs on this rank; None where there is none.
        flat: where to. What lies past the gradients is set to zero.
    """
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
