"""The ways in which the gradients of one bucket are averaged.

A reduction is one bucket's gradients on their way; ``Transport`` starts the one that a user chose.
There are three, with the memory traffic that each costs for N bytes of gradients:

- ``InPlaceReduction``: the collective works on the gradients where autograd put them. Nothing
  is copied and nothing is allocated.
- ``FlatReduction``: one copy into a flat tensor, and the gradients become views of it (2N). The
  flat tensor is allocated when the bucket is complete and replaces the gradients, so both exist
  for one bucket at a time only.
- ``WireReduction``: one converting copy into a flat tensor of a smaller dtype and one back, on a
  stream of their own.

A gradient that is missing on this rank takes part as zeros. A comm hook averages in its own way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.buckets import Bucket, ParameterSpec
from ddp_lite.collectives import Averager, Both, Chain, SideStream, Waitable, require_floating
from ddp_lite.host_limit import HostLimit
from ddp_lite.peer.hook import SMALLEST_MESSAGE_BYTES, Communication, chosen_hook
from ddp_lite.step import Step


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
        self._copies: Sequence[tuple[Tensor, Tensor]] = ()
        if any(map(operator.is_not, values, self._gradients)):
            self._copies = tuple(zip(self._gradients, values, strict=True))
        nbytes = bucket.nbytes
        if messages:
            values += messages
            nbytes += sum(message.nbytes for message in messages)
        self._work = average(values, nbytes)

    def wait(self) -> Sequence[Tensor]:
        """The averaged gradients, in the bucket's order."""
        self._work.wait()
        for gradient, value in self._copies:
            if gradient is not value:
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
        self._work = Chain([send, receive], targets, bucket.device, stream)

    def wait(self) -> Sequence[Tensor]:
        """The averaged gradients in their own dtype, in the bucket's order."""
        self._work.wait()
        return self._gradients


@runtime_checkable
class GradientHook(Protocol):
    """A comm hook that takes the gradients where autograd put them, not in a flat tensor."""

    def reduce_gradients(self, bucket: Bucket, gradients: Sequence[Tensor | None]) -> Reduction:
        """Starts averaging the gradients of a complete bucket; None stands for zeros."""


CommHook = Callable[[Tensor, Bucket], Waitable] | GradientHook


class Transport:
    """How buckets travel, as a user of ``BucketedDDP`` chooses.

    Args:
        copy: in a flat copy.
        wire_dtype: in a flat copy of this dtype.
        comm_hook: as this function averages them, or by the name of what averages them.

    Attributes:
        name: "auto" or "collectives"; None where a hook of the user averages.
        host_limit: has collectives take the place of the copies that "auto" has led to, while the
            hosts limit the steps; None where nothing does.

    Raises:
        ValueError: a ``wire_dtype`` that is not floating-point, or a hook besides it; something
            else than a hook or one of the names.
    """

    def __init__(
        self,
        copy: bool,
        wire_dtype: torch.dtype | None,
        comm_hook: CommHook | Literal["auto", "collectives"] | None,
    ) -> None:
        self._copy, self._wire_dtype = copy, wire_dtype
        self._flat_hook: Callable[[Tensor, Bucket], Waitable] | None = None
        self._gradient_hook: GradientHook | None = None
        self._side = SideStream()
        self.name: str | None = None
        self._choice: Communication | None = None  # for a name, and why
        self.host_limit: HostLimit | None = None
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._settled = False
        if wire_dtype is not None:
            require_floating(wire_dtype, "wire_dtype")
        if comm_hook is None or isinstance(comm_hook, str):
            self.name = "collectives" if comm_hook is None else comm_hook
            if self.name not in ("auto", "collectives"):
                raise ValueError(
                    f'comm_hook must be "auto", "collectives" or a hook, but got {comm_hook!r}. '
                    "See ddp_lite.hooks and ddp_lite.peer for hooks"
                )
            reason = "there is nothing to average" if self.name == "auto" else "as comm_hook asks"
            self._choice = Communication(name="collectives", reason=reason)
        elif wire_dtype is not None:
            raise ValueError(
                "wire_dtype and a comm hook exclude each other, but got both. Convert inside the "
                "hook (see ddp_lite.hooks)"
            )
        elif isinstance(comm_hook, GradientHook):
            self._gradient_hook = comm_hook
        elif callable(comm_hook):
            self._flat_hook = comm_hook
        else:
            raise ValueError(
                'comm_hook must be "auto", "collectives" or a hook, but got '
                f"{type(comm_hook).__name__}. A hook can be called with (flat, bucket), or has "
                "reduce_gradients(bucket, gradients); see ddp_lite.hooks"
            )

    def choose(self, step: Step, message_bytes: int) -> None:
        """For "auto": takes copies between GPUs if they are possible and worth it.

        Collective for messages that are large enough, and then once: later calls change nothing.

        Args:
            step: whose gradients travel. If copies are chosen, ``host_limit`` observes it.
            message_bytes: size of the buckets that most of the gradients travel in.
        """
        if self.name != "auto" or self._settled:
            return
        if self._copy:
            reason = "copy=True asks for one flat tensor, and copies leave gradients where they are"
            self._choice = Communication(name="collectives", reason=reason)
            return
        self._gradient_hook, self._choice = chosen_hook(
            step.group, message_bytes, step.device, self._wire_dtype
        )
        self._settled = message_bytes >= SMALLEST_MESSAGE_BYTES  # what is left does not change
        # Changing over changes the last bits of averages, so deterministic programs always copy.
        if self._gradient_hook is not None and not self._deterministic:
            self.host_limit = HostLimit(step.device)
            step.observe(self.host_limit)

    def release(self) -> None:
        """Lets go of the memory that was shared for an automatic choice."""
        if self.name is not None:
            self._gradient_hook = None

    def start(
        self,
        average: Averager,
        bucket: Bucket,
        gradients: Sequence[Tensor | None],
        messages: Sequence[Tensor],
    ) -> Reduction:
        """Starts averaging a bucket's gradients, and ``messages`` in place.

        Args:
            average: over the ranks; counts what is sent.
            bucket: the parameters. A flat copy becomes its ``flat``.
            gradients: theirs on this rank; None where there is none.
            messages: of the bucket's dtype. Without a hook and a ``wire_dtype`` they travel in the
                same collective.
        """
        limit, hook = self.host_limit, self._gradient_hook
        if limit is not None and limit.asks_for_collectives:
            hook = None
        if self._wire_dtype is not None and hook is None:

            def send(flat: Tensor) -> Waitable:
                return _and(average_on_wire(flat, average), messages, average)

            stream = self._side.on(bucket.device)
            return WireReduction(bucket, gradients, send, self._wire_dtype, stream)
        if hook is not None:
            average.collectives += 1
            average.bytes += bucket.nbytes
            reduction = hook.reduce_gradients(bucket, gradients)
            return _WithMessages(reduction, average(messages)) if messages else reduction
        if self._flat_hook is not None:
            bucket.flat = flat = bucket.parameters[0].new_empty(bucket.padded_numel)
            views = pack(bucket, gradients, flat)
            average.collectives += 1
            average.bytes += flat.nbytes
            return FlatReduction(_and(self._flat_hook(flat, bucket), messages, average), views)
        if self._copy:
            bucket.flat = flat = bucket.parameters[0].new_empty(bucket.numel)
            views = pack(bucket, gradients, flat)
            return FlatReduction(average([flat, *messages]), views)
        return InPlaceReduction(bucket, gradients, average, messages)

    def check(self, specs: Sequence[ParameterSpec]) -> None:
        """Refuses parameters whose gradients cannot be carried.

        Raises:
            ValueError: a complex parameter meets a ``wire_dtype``.
        """
        for spec in specs:
            if self._wire_dtype is not None and spec.dtype.is_complex:
                raise ValueError(
                    f"wire_dtype can carry real gradients only, but {spec.name} is {spec.dtype}. "
                    "Leave wire_dtype out or freeze the parameter."
                )

    @property
    def settings(self) -> dict[str, str]:
        """What ranks must agree on, in words."""
        name = self.name
        if name is None:
            hook = self._flat_hook if self._gradient_hook is None else self._gradient_hook
            kind = hook if isinstance(hook, type | FunctionType) else type(hook)
            name = f"{kind.__qualname__} {getattr(hook, 'settings', '')}"
        elif name == "auto" and self._deterministic:
            name = "auto, with deterministic algorithms"
        return {"copy": str(self._copy), "wire_dtype": str(self._wire_dtype), "comm_hook": name}

    def __str__(self) -> str:
        chosen = "" if self._choice is None else f" ({self._choice})"
        return self._words() + chosen

    def _words(self) -> str:
        copied = self._choice is not None and self._choice.name == "peer-copy"
        if self.host_limit is not None and self.host_limit.found:
            return "averaged by collectives while the hosts limit the steps, else copied"
        if self._wire_dtype is not None:
            how = "copied between GPUs" if copied else "flattened and sent"
            return f"{how} as {str(self._wire_dtype).removeprefix('torch.')}"
        if copied:
            return "copied between GPUs"
        if self._gradient_hook is not None or self._flat_hook is not None:
            return "handed to the comm hook"
        return "copied into a flat tensor" if self._copy else "coalesced in place"


class _WithMessages:
    def __init__(self, reduction: Reduction, messages: Waitable) -> None:
        self._reduction, self._messages = reduction, messages

    def wait(self) -> Sequence[Tensor]:
        gradients = self._reduction.wait()
        self._messages.wait()
        return gradients


def _and(work: Waitable, messages: Sequence[Tensor], average: Averager) -> Waitable:
    return Both(work, average(messages)) if messages else work


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

    return Chain([exchange, sum_and_gather], [flat, received], flat.device)


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
