"""What else happens in a step, beside the gradients' way: one observer each.

- ``MissingGradients``: what a parameter without a gradient means, and how ranks agree on it.
- ``Join``: ranks with different numbers of batches.
- ``StepStats``: what a step did and what it cost.

Whether all ranks make the same step is ``consistency.py``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.arrivals import ABSENT
from ddp_lite.buckets import Bucket
from ddp_lite.collectives import Averager, all_gather_json
from ddp_lite.errors import missing_gradients
from ddp_lite.step import Observer, Step

Policy = Literal["skip-if-all", "zeros", "error"]
_POLICIES = ("skip-if-all", "zeros", "error")
AverageOver = Literal["active", "world"]
_COUNT = "the count of ranks that have a batch"


class MissingGradients(Observer):
    """Carries out one of the policies for parameters without a gradient.

    Who has which gradient travels with the last bucket, so agreeing costs no collective.

    Args:
        policy: ``"skip-if-all"``: a parameter without a gradient on this rank counts as zeros, and
            if no rank has a gradient, ``grad`` stays None everywhere. ``"zeros"``: it counts as
            zeros always. ``"error"``: every rank raises.

    Raises:
        ValueError: an unknown policy.
    """

    def __init__(self, policy: Policy) -> None:
        if policy not in _POLICIES:
            raise ValueError(
                f"missing_gradients must be one of {_POLICIES}, but got {policy!r}. Choose one of "
                "them"
            )
        self._policy = policy
        self._absent: set[int] = set()  # parameters without a gradient on this rank
        self._presence: Tensor | None = None  # mean over the ranks of who has which gradient

    def reset(self, step: Step) -> None:
        """Forgets the last step."""
        self._absent, self._presence = set(), None

    def gradients_taken(
        self, step: Step, bucket: Bucket, gradients: Sequence[Tensor | None], again: bool
    ) -> None:
        """Notes which parameters got no gradient; under "error", from this step's backward."""
        if self._policy == "error":
            marks = step.arrivals.marks
            absent = [index for index in bucket.indices if marks[index] == ABSENT]
        else:
            pairs = zip(bucket.indices, gradients, strict=True)
            absent = [index for index, gradient in pairs if gradient is None]
        if again:
            self._absent -= set(bucket.indices) - set(absent)
        elif absent:
            self._absent.update(absent)

    def message(self, step: Step, dtype: torch.dtype, again: bool) -> Tensor | None:
        """1 for each parameter that has a gradient on this rank, else 0."""
        if self._policy == "zeros":
            return None
        count, device = len(step.specs), step.device
        if self._absent:
            present = [float(index not in self._absent) for index in range(count)]
            self._presence = torch.tensor(present, dtype=dtype, device=device)
        else:
            self._presence = torch.ones(count, dtype=dtype, device=device)
        return self._presence

    def averaged(self, step: Step) -> None:
        """Raises, or takes zeros back where no rank had a gradient.

        Raises:
            MissingGradientError: policy "error", on every rank.
        """
        if self._presence is None:
            return
        if self._policy == "error":
            if float(self._presence.float().min()) < 1 - 0.5 / step.group.size():
                with step.naming_failures_of("the exchange of missing gradients' names"):
                    absent = [step.specs[index].name for index in sorted(self._absent)]
                    names = all_gather_json(absent, step.group)
                raise missing_gradients(names, step.number + 1)
        elif self._absent:
            anywhere = self._presence.tolist()
            for index in self._absent:
                if anywhere[index] == 0:
                    step.parameters[index].grad = None


class Join(Observer):
    """Lets ranks train on different numbers of batches.

    Every step begins with one small all-reduce in which each rank says whether it has a batch. A
    rank that has left its loop answers no, contributes zeros to the reductions of the others, and
    runs the caller's optimizer step on the averages, so that weights and optimizer state stay equal
    everywhere. When all answer no, all leave.

    Args:
        average_over: "active" divides gradients by the number of ranks with a batch, "world" by
            the number of all ranks.

    Raises:
        ValueError: ``average_over`` is neither.
    """

    def __init__(self, average_over: AverageOver) -> None:
        if average_over not in ("active", "world"):
            raise ValueError(
                f"average_over must be 'active' or 'world', but got {average_over!r}. Choose one"
            )
        self._rescale = average_over == "active"
        self._active: Tensor | None = None

    def forward_begins(self, step: Step) -> None:
        """Says that this rank has a batch, once a step."""
        if self._active is None:
            with step.naming_failures_of(_COUNT):
                self._active = self._count(1.0, step)

    def shadow(
        self, step: Step, finish: Callable[[], None], shadow_step: Callable[[], object]
    ) -> None:
        """Takes part, without a batch, in the steps of the ranks that still have one.

        Args:
            step: the wrapper's.
            finish: makes a step.
            shadow_step: called after each one.
        """
        while self._others_have_batches(step):
            for parameter in step.parameters:
                parameter.grad = None
            step.arrivals.excuse_all()
            finish()
            shadow_step()

    def averaged(self, step: Step) -> None:
        """Turns averages over all ranks into averages over the ranks with a batch."""
        gradients = [p.grad for p in step.parameters if p.grad is not None]
        if self._active is not None and self._rescale and gradients:
            torch._foreach_mul_(gradients, step.group.size() / self._active)
        self._active = None

    def _others_have_batches(self, step: Step) -> bool:
        with step.naming_failures_of(_COUNT):
            self._active = self._count(0.0, step)
            return self._active.item() > 0

    def _count(self, mine: float, step: Step) -> Tensor:
        count = torch.tensor(mine, device=step.device)
        dist.all_reduce(count, group=step.group)
        return count


@dataclass(frozen=True, kw_only=True)
class SynchronizationStats:
    """One synchronised step.

    Attributes:
        step: number of the step, the first is 1.
        collectives: collectives started for it; a call of a comm hook counts as one.
        bytes: payload handed to them by this rank.
        reductions: groups of parameters reduced.
        started_in_backward: how many of them were started before backward ended.
        group_bytes: size of each group's gradients, in the order of reduction.
        group_parameters: names in each group, in the same order.
        exposed_wait_ms: time for which the step stood still waiting for communication: on CUDA
            between device events around the wait, on CPU wall-clock time of the wait.
    """

    step: int
    collectives: int
    bytes: int
    reductions: int
    started_in_backward: int
    group_bytes: tuple[int, ...]
    group_parameters: tuple[tuple[str, ...], ...]
    exposed_wait_ms: float


class StepStats(Observer):
    """Counts and times each step; puts the result together only when it is asked for.

    Args:
        average: counts collectives and bytes.
        device: on whose clock waits are measured.
    """

    def __init__(self, average: Averager, device: torch.device) -> None:
        self._average = average
        self._timer = WaitTimer(device)
        self._before = (0, 0)
        self._started_in_backward = 0
        self._last: Callable[[], SynchronizationStats] | None = None

    def last(self) -> SynchronizationStats | None:
        """The last step; None before the first. On CUDA the host waits for it."""
        return None if self._last is None else self._last()

    def reset(self, step: Step) -> None:
        """Remembers the counts before the step."""
        self._before = (self._average.collectives, self._average.bytes)

    def backward_ended(self, step: Step) -> None:
        """What starts from here on is not overlapped."""
        self._started_in_backward = len(step.started)
        self._timer.start()

    def averaged(self, step: Step) -> None:
        """The wait is over."""
        self._timer.stop()

    def ended(self, step: Step) -> None:
        """Keeps what the statistics are made of."""
        collectives, nbytes = self._before
        self._last = functools.partial(
            _statistics,
            step.started,
            self._timer,
            step=step.number,
            collectives=self._average.collectives - collectives,
            bytes=self._average.bytes - nbytes,
            started_in_backward=self._started_in_backward,
        )


def _statistics(buckets: Sequence[Bucket], timer: WaitTimer, **counts: int) -> SynchronizationStats:
    return SynchronizationStats(
        reductions=len(buckets),
        group_bytes=tuple(bucket.nbytes for bucket in buckets),
        group_parameters=tuple(bucket.names for bucket in buckets),
        exposed_wait_ms=timer.milliseconds(),
        **counts,
    )


class WaitTimer:
    """Measures a wait on the device's own clock, without making the host wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._device = device
        self._seconds = [0.0, 0.0]
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        """Marks the beginning of the wait."""
        self._mark(0)

    def stop(self) -> None:
        """Marks its end."""
        self._mark(1)

    def milliseconds(self) -> float:
        """The last wait's length; on CUDA the host waits until it is over."""
        if not self._events:
            begin, end = self._seconds
            return (end - begin) * 1e3
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1]))

    def _mark(self, slot: int) -> None:
        if not self._on_device:
            self._seconds[slot] = time.perf_counter()
        elif not torch.cuda.is_current_stream_capturing():  # a graph's waits have no clock
            if not self._events:
                self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[slot].record(torch.cuda.current_stream(self._device))
