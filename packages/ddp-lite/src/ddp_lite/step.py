"""One synchronisation, from its first gradient to its last average: what all wrappers share.

A wrapper decides when each bucket moves and how it is averaged. Every bucket passes through the
same three calls::

    with step.taking(bucket) as (gradients, messages):  ``parameter.grad`` is None from here on
        step.in_flight[bucket] = ...                    the wrapper's own reduction
    with step.waiting(bucket) as reduction:
        averages = reduction.wait()
    step.put_back(bucket, averages)                     ``parameter.grad`` is the average

While a reduction is in flight the gradient belongs to it and ``parameter.grad`` is None. A second
contribution to the same parameter, from another backward or from a re-entrant checkpoint,
therefore never races with the first: it is averaged on its own and added at the end.

Everything else that has to happen in a step is an ``Observer`` of these events, and no wrapper
knows of it: parameters without a gradient, ranks that are out of step, ranks without a batch,
statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lite.arrivals import Arrivals, EndOfBackward, TrainableParameters
from ddp_lite.buckets import Bucket, ParameterSpec, make_buckets
from ddp_lite.errors import MissingGradientError, UnfinishedSynchronizationError
from ddp_lite.ranks import Ranks

if TYPE_CHECKING:
    from ddp_lite.base import DataParallelBase
    from ddp_lite.reduction import Reduction


class Observer:
    """Sees every step of a wrapper from outside. Each method is an event, in this order."""

    def reset(self, step: Step) -> None:
        """A step is about to begin, or the last one was given up."""

    def forward_begins(self, step: Step) -> None:
        """A forward pass begins whose gradients will be synchronised."""

    def gradients_taken(
        self, step: Step, bucket: Bucket, gradients: Sequence[Tensor | None], again: bool
    ) -> None:
        """A bucket's gradients are about to be reduced.

        Args:
            step: the step.
            bucket: the parameters.
            gradients: theirs on this rank; None where there is none.
            again: the bucket was reduced in this step already and got more gradient since.
        """

    def message(self, step: Step, dtype: torch.dtype, again: bool) -> Tensor | None:
        """What to average over the ranks together with the last bucket, at no extra collective.

        Args:
            step: the step.
            dtype: real, that of the message.
            again: the last bucket is reduced a second time in this step.

        Returns:
            A tensor, which is averaged in place, or None.
        """
        return None

    def messages_averaged(self, step: Step) -> None:
        """The tensors that ``message`` returned hold their averages."""

    def backward_ended(self, step: Step) -> None:
        """Nothing more will arrive; reductions that are left start after this."""

    def averaged(self, step: Step) -> None:
        """All averages are in place."""

    def ended(self, step: Step) -> None:
        """The step is over, and ``step.number`` counts it."""


class Step:
    """The step that a wrapper is making, and what it makes it with.

    Args:
        wrapper: its class.
        group: the ranks.
        device: of the parameters.
        auto_finish: whether the end of a backward ends the step.
        observers: are told of each event in this order.

    Attributes:
        ranks: name failures of collectives, and count the steps.
        specs: the trainable parameters, described.
        parameters: the same ones, themselves.
        arrivals: which of their gradients have arrived.
        end_of_backward: calls the wrapper when a backward ends, if it should be called.
        buckets: the parameters that travel together, in the order of reduction.
        in_flight: reductions under way.
        started: buckets whose gradients were taken, in this order.
    """

    def __init__(
        self,
        wrapper: type,
        group: dist.ProcessGroup,
        device: torch.device,
        auto_finish: bool,
        observers: Sequence[Observer],
    ) -> None:
        self.wrapper, self.group, self.device = wrapper.__name__, group, device
        self.ranks = Ranks(group, device, self.wrapper)
        self.observers: list[Observer] = []
        self.observers_of_gradients: list[Observer] = []
        for observer in observers:
            self.observe(observer)
        self.specs: list[ParameterSpec] = []
        self.parameters: list[nn.Parameter] = []
        self.arrivals: Arrivals
        self.auto_finish = auto_finish
        self.end_of_backward = EndOfBackward(auto_finish)
        self.buckets: list[Bucket] = []
        self.in_flight: dict[Bucket, Reduction] = {}
        self.started: list[Bucket] = []

    def observe(self, observer: Observer) -> None:
        """Tells ``observer`` of each event from here on, after the others."""
        self.observers.append(observer)
        # This event happens once per bucket, so those that ignore it are not called.
        if type(observer).gradients_taken != Observer.gradients_taken:
            self.observers_of_gradients.append(observer)

    @property
    def number(self) -> int:
        """Synchronised steps completed; -1 while the wrapper is constructed."""
        return self.ranks.step - 1

    # -- its parameters and its end ----------------------------------------------------------

    def adopt(self, trainable: TrainableParameters, owner: DataParallelBase) -> None:
        """Synchronises these parameters from here on, in the buckets that ``owner`` plans."""
        self.arrivals = trainable.adopt(owner)
        self.specs, self.parameters = trainable.specs, trainable.parameters
        self.plan(owner._plan(self.specs) if self.specs else [])

    def plan(self, plan: Sequence[tuple[int, ...]]) -> None:
        """Makes buckets of groups of parameter indices, in the order of reduction."""
        self.buckets = make_buckets(plan, self.specs, self.parameters, self.group)
        self.arrivals.plan(plan)
        self.reset()

    def reset(self) -> None:
        """Back to the state before a backward."""
        self.arrivals.reset()
        self.end_of_backward.forget()
        self.in_flight = {}
        self.started = []
        for observer in self.observers:
            observer.reset(self)

    def require_finished(self) -> None:
        """Raises if a backward produced gradients that were never synchronised."""
        arrivals = self.arrivals
        if arrivals.begun and not arrivals.accumulating:
            raise unfinished(arrivals.count(), self.group.rank(), self.number, self.auto_finish)

    def forward_begins(self) -> None:
        """Tells the observers."""
        for observer in self.observers:
            observer.forward_begins(self)

    def finish(self, backward_ended: Callable[[], None]) -> None:
        """Makes what is left of the step; ``backward_ended`` is the wrapper's part of it."""
        with torch.no_grad():
            for observer in self.observers:
                observer.backward_ended(self)
            backward_ended()
            try:
                for observer in self.observers:
                    observer.averaged(self)
            except MissingGradientError:  # on every rank, so that all may go on
                self.reset()
                raise
        self.ranks.step += 1
        for observer in self.observers:
            observer.ended(self)
        self.reset()

    def give_up(self) -> None:
        """Lets go of all gradients under way. On CUDA the current stream waits for them."""
        if self.device.type == "cuda":
            for reduction in self.in_flight.values():
                reduction.wait()
        for bucket in self.buckets:
            bucket.release()
        self.reset()

    # -- one bucket --------------------------------------------------------------------------

    def taking(self, bucket: Bucket, again: bool = False) -> _Taking:
        """Context in which a bucket's reduction is started; it names what fails.

        Args:
            bucket: whose gradients to take.
            again: it was reduced in this step already and got more gradient since.

        Returns:
            Yields (gradients, messages): the gradients, which are no longer in ``parameter.grad``,
            with None where this rank has none; and observers' tensors, which have to be averaged
            in place together with them.
        """
        return _Taking(self, bucket, again)

    def waiting(self, bucket: Bucket) -> _Waiting:
        """Context in which a bucket's reduction, which it yields, is waited for."""
        return _Waiting(self, bucket)

    def put_back(self, bucket: Bucket, averages: Sequence[Tensor]) -> None:
        """Makes the averages the gradients, or adds them to what has arrived since."""
        if bucket is self.buckets[-1]:
            for observer in self.observers:
                observer.messages_averaged(self)
        for parameter, average in zip(bucket.parameters, averages, strict=True):
            if parameter.grad is None:
                parameter.grad = average
            else:
                parameter.grad.add_(average)

    def not_started(self) -> list[Bucket]:
        """The buckets that were not complete during backward."""
        return self.buckets[self.arrivals.next :]

    def late(self) -> list[Bucket]:
        """The buckets that got more gradient after they had been started."""
        return [self.buckets[index] for index in sorted(self.arrivals.late)]

    def _messages(self, dtype: torch.dtype, again: bool) -> list[Tensor]:
        real = dtype.to_real() if dtype.is_complex else dtype
        found = [observer.message(self, real, again) for observer in self.observers]
        return [message for message in found if message is not None]

    # -- errors ------------------------------------------------------------------------------

    def naming_failures_of(self, what: str) -> _Naming:
        """Context for a collective that is no bucket's, described by ``what``."""
        return _Naming(self, what)

    def raise_named(self, what: str, begin: float, error: BaseException | None) -> None:
        """Raises the backend's error with names; others stay themselves, like lack of memory.

        Args:
            what: the collective, in words.
            begin: when it began, by ``time.monotonic()``.
            error: None does nothing.
        """
        if not isinstance(error, RuntimeError):
            return
        self.ranks.raise_named(what, begin, error)


class _Naming:
    """Names a collective that is no bucket's if it fails."""

    def __init__(self, step: Step, what: str) -> None:
        self._step, self._what = step, what

    def __enter__(self) -> None:
        self._begin = time.monotonic()

    def __exit__(
        self, _kind: object, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._step.raise_named(self._what, self._begin, error)


class _Taking:
    """Takes a bucket's gradients, and names its reduction if it cannot be started."""

    __slots__ = ("_again", "_begin", "_bucket", "_gradients", "_step")

    def __init__(self, step: Step, bucket: Bucket, again: bool) -> None:
        self._step, self._bucket, self._again = step, bucket, again

    def __enter__(self) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        step, bucket, again = self._step, self._bucket, self._again
        gradients = self._gradients = [parameter.grad for parameter in bucket.parameters]
        for observer in step.observers_of_gradients:
            observer.gradients_taken(step, bucket, gradients, again)
        for parameter in bucket.parameters:
            parameter.grad = None
        step.started.append(bucket)
        messages = step._messages(bucket.dtype, again) if bucket is step.buckets[-1] else ()
        self._begin = time.monotonic()
        return gradients, messages

    def __exit__(
        self, _kind: object, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError):
            self._refuse_sparse()
            self._step.raise_named(self._bucket.describe(), self._begin, error)

    def _refuse_sparse(self) -> None:
        for name, gradient in zip(self._bucket.names, self._gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise ValueError(
                    f"gradients must be dense, but {name} got a {gradient.layout} gradient in "
                    f"step {self._step.number + 1}. Build its layer with sparse=False."
                )


class _Waiting:
    """Names a bucket's reduction if it fails while it is waited for."""

    __slots__ = ("_begin", "_bucket", "_step")

    def __init__(self, step: Step, bucket: Bucket) -> None:
        self._step, self._bucket = step, bucket

    def __enter__(self) -> Reduction:
        self._begin = time.monotonic()
        return self._step.in_flight.pop(self._bucket)

    def __exit__(
        self, _kind: object, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._step.raise_named(self._bucket.describe(), self._begin, error)


def unfinished(
    arrived: int, rank: int, step: int, auto_finish: bool
) -> UnfinishedSynchronizationError:
    """The error for a backward whose gradients were never synchronised.

    Args:
        arrived: number of parameters whose gradients it produced.
        rank: where.
        step: the last one that was synchronised.
        auto_finish: whether the wrapper finishes by itself.
    """
    remedy = (
        "That backward raised an error. To go on without it, call detach() and wrap the module "
        "again, on all ranks"
        if auto_finish
        else "Call finish_gradient_synchronization() after backward, or use no_sync() or "
        "auto_finish=True"
    )
    return UnfinishedSynchronizationError(
        f"every backward must be finished before the next forward, but after step {step} a "
        f"backward produced gradients of {arrived} parameters on rank {rank} that were never "
        f"synchronised, so an optimizer step would make the ranks differ. {remedy}"
    )
