"""What else happens in a step, beside the gradients' way: one observer each.

- ``MissingGradients``: what a parameter without a gradient means, and how ranks agree on it.
- ``Join``: ranks with different numbers of batches.
- ``SameStep``: whether all ranks make the same step, from the same weights.
- ``StepStats``: what a step did and what it cost.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lite.arrivals import ABSENT
from ddp_lite.buckets import Bucket
from ddp_lite.collectives import Averager
from ddp_lite.errors import MissingGradientError
from ddp_lite.ranks import finish, name_ranks
from ddp_lite.step import Observer, Step

Policy = Literal["skip-if-all", "zeros", "error"]
_POLICIES = ("skip-if-all", "zeros", "error")
AverageOver = Literal["active", "world"]
_COUNT = "the count of ranks that have a batch"
# 128 elements are compared in 8 steps of a model with 32 parameters or fewer.
_PARAMETERS, _ELEMENTS = 4, 4
_COUNT_BITS = 8
_BITS = torch.arange(32, dtype=torch.int32)


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
                    names = step.ranks.gather(absent)
                raise missing_gradients(names, step.number + 1)
        elif self._absent:
            anywhere = self._presence.tolist()
            for index in self._absent:
                if anywhere[index] == 0:
                    step.parameters[index].grad = None


def missing_gradients(names_by_rank: Sequence[Sequence[str]], step: int) -> MissingGradientError:
    """The error for parameters that got no gradient, the same on every rank.

    Args:
        names_by_rank: for each rank, the parameters that got none there.
        step: the step in which they did not.
    """
    ranks_by_name: dict[str, list[int]] = {}
    for rank, names in enumerate(names_by_rank):
        for name in names:
            ranks_by_name.setdefault(name, []).append(rank)
    shown = "; ".join(f"{name} on {name_ranks(ranks)}" for name, ranks in ranks_by_name.items())
    return MissingGradientError(
        "with missing_gradients='error' every trainable parameter must get a gradient on every "
        f"rank, but in step {step} these got none: {shown}. Use them in the loss, freeze them "
        "with requires_grad_(False), or choose missing_gradients='skip-if-all' or 'zeros'"
    )


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
        finish(dist.all_reduce(count, group=step.group, async_op=True))
        return count


class SameStep(Observer):
    """Sends and compares the bits, and raises on every rank where they differ.

    Args:
        device: of the parameters. On CUDA a difference is raised one step later, so that the host
            does not wait for the step that it has just queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._check: StepCheck | None = None
        self._message: Tensor | None = None

    def reset(self, step: Step) -> None:
        """Forgets the last message, and looks at the parameters if they have become others."""
        self._message = None
        if self._check is None or self._check.parameters is not step.parameters:
            self._check = StepCheck(step.parameters, self._device)

    def message(self, step: Step, dtype: torch.dtype, again: bool) -> Tensor | None:
        """The bits of this rank."""
        assert self._check is not None
        self._message = self._check.message(step.number, again, dtype)
        return self._message

    def messages_averaged(self, step: Step) -> None:
        """Compares. On CPU it raises here."""
        assert self._check is not None
        assert self._message is not None
        self._check.read(self._message)
        if self._device.type != "cuda":
            self._require_equal_steps(step)

    def backward_ended(self, step: Step) -> None:
        """On CUDA, raises what the step before found."""
        if self._device.type == "cuda":
            self._require_equal_steps(step)

    def _require_equal_steps(self, step: Step) -> None:
        if self._check is not None and self._check.ranks_differ():
            report = self._check.describe([spec.name for spec in step.specs])
            raise step.ranks.disagreement(report)


class StepCheck:
    """Finds out whether all ranks make the same synchronisation from the same weights, by bits.

    A rank that runs a backward more than the others, skips one, or whose optimizer did something
    else trains on, one synchronisation apart, and nothing fails. So every rank sends a few bits
    with the last reduction of a step: the number of the synchronisation, and some elements of some
    parameters.

    Averaging must not blur them, whatever the dtype and the number of ranks. Every bit b therefore
    travels as the pair (b, 1 - b). Where a rank sent 0, the average is exactly 0 if all ranks sent
    0, and positive if any rank sent 1; and two ranks that differ both have such a place. So either
    no rank finds a difference, or every rank that differs from another does, at the same reduction.

    Args:
        parameters: the trainable ones, in an order that all ranks share.
        device: of the parameters.

    Attributes:
        parameters: as given.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self.parameters = parameters
        self._bits = _BITS.to(device)
        counts = torch.arange(2**_COUNT_BITS, dtype=torch.int32)
        # Rows of a table on the device: a number from the host would be a copy of its own.
        self._counts = ((counts.unsqueeze(1) >> _BITS[:_COUNT_BITS]) & 1).to(device)
        self._sent_zero: Tensor | None = None
        self._flag: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._unread: Tensor | None = None  # on CUDA, what ``ranks_differ`` has not looked at
        self._number = 0

    def message(self, number: int, again: bool, dtype: torch.dtype) -> Tensor:
        """What this rank sends: zeros and ones.

        Args:
            number: synchronisations that were finished before this one.
            again: whether the last reduction of this synchronisation is made a second time.
            dtype: real.

        Returns:
            Shape (2, bits), to be averaged in place.
        """
        self._number = number
        with torch.no_grad():
            values = torch.cat([p.float() for p in self._sample(number)]).view(torch.int32)
            bits = (values.unsqueeze(1) >> self._bits) & 1
            count = self._counts[(2 * number + again) % 2**_COUNT_BITS]
            own = torch.cat([count, bits.view(-1)]).to(dtype)
            message = torch.stack([own, 1 - own])
            self._sent_zero = message.flip(0)
        return message

    def read(self, averaged: Tensor) -> None:
        """Compares the average with what was sent; on CUDA the host does not wait for it."""
        assert self._sent_zero is not None
        found = (averaged * self._sent_zero).sum()
        if averaged.device.type != "cuda":
            self._flag = found
        elif not torch.cuda.is_current_stream_capturing():
            if self._event is None:
                self._event = torch.cuda.Event()
                self._flag = torch.zeros((), pin_memory=True)
            assert self._flag is not None
            self._unread = found if self._unread is None else self._unread + found
            self._flag.copy_(self._unread, non_blocking=True)
            self._event.record(torch.cuda.current_stream(averaged.device))

    def ranks_differ(self) -> bool:
        """Whether a ``read`` since the last call found a difference. On CUDA the host waits for it.

        While a CUDA graph is captured, when the host cannot wait, nothing is looked at.
        """
        if self._event is not None:
            if torch.cuda.is_current_stream_capturing():
                return False
            self._event.synchronize()
            self._unread = None
        flag = self._flag
        return flag is not None and bool(flag.item() > 0)

    def describe(self, names: Sequence[str]) -> str:
        """What this rank sent last, in words; the weights may have been updated since."""
        shown = ", ".join(
            f"{names[index]} begins with {first[0].item():.9g}"
            for index, first in zip(
                self._indices(self._number), self._sample(self._number), strict=True
            )
        )
        return f"it is making synchronisation {self._number + 1} and its {shown}"

    def _indices(self, number: int) -> list[int]:
        count = len(self.parameters)
        return [(_PARAMETERS * number + i) % count for i in range(min(_PARAMETERS, count))]

    def _sample(self, number: int) -> list[Tensor]:
        """The first elements in memory of some parameters, other ones in every step."""
        found = []
        for index in self._indices(number):
            parameter = self.parameters[index].detach()
            if parameter.is_complex():
                parameter = torch.view_as_real(parameter)
            length = min(_ELEMENTS, parameter.numel()) if parameter.is_contiguous() else 1
            found.append(parameter.as_strided((length,), (1,)))
        return found


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
