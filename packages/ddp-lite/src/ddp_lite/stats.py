"""Side task: the work and the cost of a step. Loaded by the first call of ``stats``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ddp_lite.buckets import Bucket
from ddp_lite.engine import Engine, SideTask


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


class StepStats(SideTask):
    """Counts and times each step; puts the result together only when it is asked for.

    Args:
        device: on whose clock waits are measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._timer = WaitTimer(device)
        self._before = (0, 0)
        self._started_in_backward = 0
        self._last: Callable[[], SynchronizationStats] | None = None

    def last(self) -> SynchronizationStats | None:
        """The last step; None before the first. On CUDA the host waits for it."""
        return None if self._last is None else self._last()

    def begin(self, engine: Engine) -> None:
        """Remembers the counts before the step."""
        self._before = (engine.average.collectives, engine.average.bytes)

    def backward_ended(self, engine: Engine) -> None:
        """Reductions that start from here on do not overlap with backward."""
        self._started_in_backward = len(engine.started)
        self._timer.start()

    def averaged(self, engine: Engine) -> None:
        """The wait is over; keeps the parts of the result."""
        self._timer.stop()
        collectives, nbytes = self._before
        self._last = functools.partial(
            _statistics,
            engine.started,
            self._timer,
            step=engine.ranks.step,
            collectives=engine.average.collectives - collectives,
            bytes=engine.average.bytes - nbytes,
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
