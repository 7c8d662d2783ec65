"""Exact interval arithmetic for overlap, in integer nanoseconds.

For one rank and one step window, with P the union of compute intervals and C the union of
communication intervals, both clipped to the window:

    exposed = |P ∪ C| - |P|      communication with nothing computed meanwhile
    hidden  = |C| - exposed      communication under computation
    idle    = window - |P ∪ C|   neither
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Half-open: begins at the first nanosecond, ends before the second.
Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as sorted, disjoint, non-touching, non-empty intervals.

    Raises:
        ValueError: an interval ends before it begins.
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end < start:
            raise ValueError(f"an interval must not end before it begins, but got {(start, end)}")
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts of the intervals that lie inside the window."""
    begin, finish = window
    return [
        (max(start, begin), min(end, finish))
        for start, end in intervals
        if max(start, begin) < min(end, finish)
    ]


def total(intervals: Iterable[Interval]) -> int:
    """Nanoseconds covered at least once."""
    return sum(end - start for start, end in union(intervals))


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Where one rank's time went inside one window; all in nanoseconds.

    Attributes:
        compute_ns: |P|.
        communication_ns: |C|. Communication kernels spin while they wait for peers, so this holds
            waiting too.
        ratio: hidden / communication; None without communication.
    """

    window_ns: int
    compute_ns: int
    communication_ns: int
    exposed_ns: int
    hidden_ns: int
    idle_ns: int

    @property
    def ratio(self) -> float | None:
        """The hidden share of the communication."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else None


def overlap(
    compute: Iterable[Interval], communication: Iterable[Interval], window: Interval
) -> Overlap:
    """The overlap of computation and communication inside a window."""
    computing = union(clip(compute, window))
    communicating = union(clip(communication, window))
    busy = total([*computing, *communicating])
    exposed = busy - total(computing)
    return Overlap(
        window_ns=window[1] - window[0],
        compute_ns=total(computing),
        communication_ns=total(communicating),
        exposed_ns=exposed,
        hidden_ns=total(communicating) - exposed,
        idle_ns=window[1] - window[0] - busy,
    )
