"""Side task: the work and the cost of a step. Created by the first call of ``stats``."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
            between device events around the wait, on CPU wall-clock time of the wait; not a number
            for a step that was recorded in a CUDA graph.
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
        self._device = device
        self._marks: list[Any] = []  # of the wait's begin and end: seconds, on CUDA events
        self._before = (0, 0)
        self._started_in_backward = 0
        self._last: tuple[Sequence[Bucket], Sequence[Any], dict[str, int]] | None = None

    def last(self) -> SynchronizationStats | None:
        """The last step; None before the first. On CUDA the host waits for it."""
        if self._last is None:
            return None
        buckets, marks, counts = self._last
        return SynchronizationStats(
            reductions=len(buckets),
            group_bytes=tuple(bucket.nbytes for bucket in buckets),
            group_parameters=tuple(bucket.names for bucket in buckets),
            exposed_wait_ms=_milliseconds(*marks),
            **counts,
        )

    def begin(self, engine: Engine) -> None:
        """Remembers the counts before the step."""
        self._before = (engine.average.collectives, engine.average.bytes)

    def backward_ended(self, engine: Engine) -> None:
        """Reductions that start from here on do not overlap with backward."""
        self._started_in_backward = len(engine.started)
        self._marks = [self._mark()]

    def averaged(self, engine: Engine) -> None:
        """The wait is over; keeps the parts of the result."""
        self._marks.append(self._mark())
        collectives, nbytes = self._before
        counts = {
            "step": engine.ranks.step,
            "collectives": engine.average.collectives - collectives,
            "bytes": engine.average.bytes - nbytes,
            "started_in_backward": self._started_in_backward,
        }
        self._last = engine.started, self._marks, counts

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():  # a graph's waits have no clock
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _milliseconds(begin: Any, end: Any) -> float:
    """The time between two marks; on CUDA the host waits until it is over."""
    if begin is None or end is None:
        return math.nan
    if isinstance(begin, float):
        return float(end - begin) * 1e3
    end.synchronize()
    return float(begin.elapsed_time(end))
