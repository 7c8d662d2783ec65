"""Which gathers of sharded parameters came late, and how long the computation waited for each.

``shard_optim.FullyShardedDataParallel`` and torch's FSDP2 gather the parameters of a unit, such as
a Transformer block, before the unit computes. Both mark in a profiler's trace where the host
launches a gather and where it makes the computation wait for it.

On a GPU the first kernel after that wait can start once three things are there: the gathered
parameters, the stream (the kernel before must have ended), and the kernel itself (the host must
have launched it). A gather is late by the time from the last of the other two to its own end. On
a CPU the host itself waits, so a gather is late by the duration of that wait.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from bench_harness.core import Row
from bench_harness.traces.intervals import Interval
from bench_harness.traces.trace import Event, Trace

_LAUNCH = re.compile(r"(?:shard_optim::|FSDP::)all_gather(?: \((.*)\))?")
_WAIT = re.compile(r"(?:shard_optim::wait_for_all_gather|FSDP::all_gather_copy_out)(?: \((.*)\))?")
#: Shorter waits are what it takes to notice that a gather has ended.
_NOTICED_MS = 0.01
#: How many gathers a table lists by name.
_LISTED = 5
ROOT = "(root)"


def gathers(trace: Trace, window: Interval) -> list[Row]:
    """The gathers that computation was to wait for inside a window, in the order of those waits.

    Returns:
        ``unit``; ``gather_ms``, the time of the gather's kernels (None on a CPU); ``late_ms``; and
        ``late_ns``, the interval in which nothing else held up the computation.
    """
    launches, waits = _ranges(trace, _LAUNCH), _ranges(trace, _WAIT)
    kernels = _launched_in(launches, trace.communication, trace)
    waiting = _first_after(waits, trace)
    found: list[Row] = []
    for wait in waits:
        begin, end = wait.interval
        unit = _unit(wait, _WAIT)
        span: Interval | None = None
        if trace.on_device:
            own = [each for each in launches if _unit(each, _LAUNCH) == unit]
            position = bisect.bisect_right([each.start_ns for each in own], begin) - 1
            span = kernels.get(own[position]) if position >= 0 else None
            free = waiting.get(wait)
            if span is None or free is None:
                continue
            begin, end = free, max(free, span[1])
        if not window[0] <= end < window[1]:
            continue
        found.append(
            {
                "unit": unit,
                "gather_ms": None if span is None else (span[1] - span[0]) / 1e6,
                "late_ms": (end - begin) / 1e6,
                "late_ns": [begin, end],
            }
        )
    return found


def summary(found: Sequence[Row]) -> Row:
    """How many gathers there were, how many were late, by how much together, and the latest.

    Args:
        found: :func:`gathers` of one rank.

    Returns:
        Columns of a row; nothing without gathers.
    """
    if not found:
        return {}
    late = [
        {"number": number, **{name: each[name] for name in ("unit", "gather_ms", "late_ms")}}
        for number, each in enumerate(found)
        if each["late_ms"] > _NOTICED_MS
    ]
    return {
        "gathers": len(found),
        "late_gathers": len(late),
        "late_ms": sum(each["late_ms"] for each in late),
        "latest_gathers": sorted(late, key=lambda each: -each["late_ms"])[:_LISTED],
    }


def _ranges(trace: Trace, name: re.Pattern[str]) -> list[Event]:
    named = (each for each in trace.ranges if name.fullmatch(each.name))
    return sorted(named, key=lambda each: each.start_ns)


def _unit(event: Event, name: re.Pattern[str]) -> str:
    match = name.fullmatch(event.name)
    return (match[1] if match else None) or ROOT


def _launched_in(
    ranges: Sequence[Event], kernels: Iterable[Event], trace: Trace
) -> dict[Event, Interval]:
    """From the start to the end of the kernels that the host launched inside each range."""
    by_thread: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for each in ranges:
        by_thread[each.thread].append(each)
    starts = {thread: [each.start_ns for each in own] for thread, own in by_thread.items()}
    found: dict[Event, Interval] = {}
    for kernel in kernels:
        host = trace.host(kernel)
        if host is None or host.thread not in starts:
            continue
        position = bisect.bisect_right(starts[host.thread], host.start_ns) - 1
        if position < 0 or host.start_ns >= by_thread[host.thread][position].end_ns:
            continue
        own = by_thread[host.thread][position]
        start, end = found.get(own, kernel.interval)
        found[own] = min(start, kernel.start_ns), max(end, kernel.end_ns)
    return found


def _first_after(waits: Sequence[Event], trace: Trace) -> dict[Event, int]:
    """When the first kernel that the host launched after each wait could have started without it.

    Its stream was free from the end of the kernel before, and the kernel was there from its launch.
    """
    launched: dict[Any, list[tuple[int, Event]]] = defaultdict(list)
    streams: dict[Any, list[Event]] = defaultdict(list)
    for kernel in trace.compute:
        streams[kernel.thread].append(kernel)
        host = trace.host(kernel)
        if host is not None:
            launched[host.thread].append((host.start_ns, kernel))
    for one in launched.values():
        one.sort(key=lambda pair: pair[0])
    for line in streams.values():
        line.sort(key=lambda kernel: kernel.start_ns)
    found: dict[Event, int] = {}
    for wait in waits:
        own = launched.get(wait.thread, [])
        position = bisect.bisect_left(own, wait.start_ns, key=lambda pair: pair[0])
        if position == len(own):
            continue
        launch, kernel = own[position]
        line = streams[kernel.thread]
        before = bisect.bisect_left(line, kernel.start_ns, key=lambda each: each.start_ns) - 1
        found[wait] = max(launch, line[before].end_ns if before >= 0 else launch)
    return found
