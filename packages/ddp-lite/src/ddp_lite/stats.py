"""What one synchronisation did and what it cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddp_lite.buckets import Bucket


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


def stats_of(buckets: Sequence[Bucket], timer: WaitTimer, **counts: int) -> SynchronizationStats:
    """Puts together what is known of a step: its buckets in order, its waits, and its counts."""
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

    def _mark(self, place: int) -> None:
        if not self._on_device:
            self._seconds[place] = time.perf_counter()
        elif not torch.cuda.is_current_stream_capturing():  # a graph's waits have no clock
            if not self._events:
                self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[place].record(torch.cuda.current_stream(self._device))
