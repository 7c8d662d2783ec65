"""What one synchronisation did and what it cost."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


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


class WaitTimer:
    """Measures a wait on the device's own clock, without making the host wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._device = device
        self._marks: list[torch.cuda.Event | float] = []

    def start(self) -> None:
        """Marks the beginning of the wait."""
        self._marks = []
        self._mark()

    def stop(self) -> None:
        """Marks its end."""
        self._mark()

    def milliseconds(self) -> float:
        """The last wait's length; on CUDA the host waits until it is over."""
        if len(self._marks) < 2:
            return 0.0
        begin, end = self._marks
        if isinstance(begin, float) or isinstance(end, float):
            assert isinstance(begin, float)
            assert isinstance(end, float)
            return (end - begin) * 1e3
        end.synchronize()
        return float(begin.elapsed_time(end))

    def _mark(self) -> None:
        if not self._on_device:
            self._marks.append(time.perf_counter())
        elif not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
