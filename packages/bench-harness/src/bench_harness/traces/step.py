"""Where the time of one recorded step goes, on a rank and over all ranks.

Every moment of a step belongs to exactly one part of :data:`PARTS`. On a GPU a moment at which
several kernels run counts for the first of them, so the parts add up to the step, communication is
what nothing else hides, and the rest is the time in which the GPU had nothing to do because the
host had launched nothing. On a CPU the parts are the operators' own times.

``shard_optim.FullyShardedDataParallel`` and torch's FSDP2 gather the parameters of a unit, such as
a Transformer block, before the unit computes. Both mark in a profiler's trace where the host
launches a gather and where it makes the computation wait for it. On a GPU the first kernel after
that wait can start once three things are there: the gathered parameters, the stream (the kernel
before must have ended), and the kernel itself (the host must have launched it). A gather is late by
the time from the last of the other two to its own end. On a CPU the host itself waits, so a gather
is late by the duration of that wait.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from bench_harness.core import Row
from bench_harness.traces.intervals import Interval, clip, total
from bench_harness.traces.timeline import timeline
from bench_harness.traces.trace import Event, Trace, kind, within

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
    """How many :func:`gathers` a rank had, how many were late, by how much, and the latest."""
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


PRODUCTS, ATTENTION, OPTIMIZER = "matrix products", "attention", "optimizer"
LOSS, ELEMENTWISE, COPIES = "loss", "norms and elementwise", "copies"
COMMUNICATION, IDLE = "communication, exposed", "idle, waiting for the host"
#: In the order in which they are drawn; the first of those that run at a moment counts.
PARTS = (PRODUCTS, ATTENTION, OPTIMIZER, LOSS, ELEMENTWISE, COPIES, COMMUNICATION, IDLE)

#: Ranges of the host that say what the kernels launched inside them are for. torch records the
#: first around every optimizer's step, basics-model the others.
_RANGES = {"Optimizer.step#": OPTIMIZER, "attention.": ATTENTION, "loss": LOSS}

_Ranges: TypeAlias = Mapping[str, Callable[[Event | None], bool]]


def waterfall(trace: Trace, window: Interval) -> dict[str, float]:
    """Milliseconds of each of :data:`PARTS` in one step; together they are the window."""
    ranges = {
        part: within(span for span in trace.ranges if span.name.startswith(prefix))
        for prefix, part in _RANGES.items()
    }
    begin, end = window
    if not trace.on_device:
        return _own_times(trace, ranges, window)
    spans: dict[str, list[Interval]] = defaultdict(list)
    for event in trace.compute:
        if begin <= event.start_ns < end:
            spans[_part(event.name, trace.host(event), ranges)].append(event.interval)
    for event in trace.copies:
        # Copies between devices are an exchange by copy engines.
        spans[COMMUNICATION if "PtoP" in event.name else COPIES].append(event.interval)
    spans[COMMUNICATION] += [event.interval for event in trace.communication]
    covered: list[Interval] = []
    times = {}
    for part in PARTS[:-1]:
        before = total(covered)
        covered += clip(spans[part], window)
        times[part] = (total(covered) - before) / 1e6
    return times | {IDLE: (end - begin - total(covered)) / 1e6}


def _own_times(trace: Trace, ranges: _Ranges, window: Interval) -> dict[str, float]:
    times = dict.fromkeys(PARTS, 0.0)
    for event in trace.operators:
        if window[0] <= event.start_ns < window[1]:
            times[_part(event.name, event, ranges)] += event.self_ns / 1e6
    found = trace.overlap(window)
    times[COMMUNICATION] += found.exposed_ns / 1e6
    times[IDLE] = max((window[1] - window[0]) / 1e6 - sum(times.values()), 0.0)
    return times


def _part(name: str, host: Event | None, ranges: _Ranges) -> str:
    """The part that a kernel or operator belongs to; ``host`` is the call that launched it."""
    inside = {part for part, is_within in ranges.items() if is_within(host)}
    # One launch replays a whole recorded step: kernels of torch's and of shard_optim's AdamW.
    if OPTIMIZER in inside or "FusedAdam" in name or name == "adamw_kernel":
        return OPTIMIZER
    by_name = {"matmul": PRODUCTS, "fused attention": ATTENTION}.get(kind(name))
    if by_name is not None:
        return by_name
    return next((part for part in (ATTENTION, LOSS) if part in inside), ELEMENTWISE)


def of_rank(trace: Trace, window: Interval, spans: str) -> Row:
    """What one rank's trace says of a step, for :func:`over_ranks`; ``spans`` names its spans."""
    found = trace.overlap(window)
    waited_for = gathers(trace, window)
    return {
        "communication_ms": found.communication_ns / 1e6,
        "exposed_ms": found.exposed_ns / 1e6,
        "hidden_ms": found.hidden_ns / 1e6,
        "idle_ms": found.idle_ns / 1e6,
        "overlap_ratio": found.ratio,
        "spans": spans,
        "timeline": {
            **timeline(trace, window, [gather["late_ns"] for gather in waited_for]),
            "begin_ns": window[0],
        },
        **summary(waited_for),
        "waterfall": waterfall(trace, window),
    }


def over_ranks(ranks: Sequence[Mapping[str, Any]]) -> Row:
    """Communication in a step: largest and least over ranks, and the timelines of all ranks.

    NCCL's kernels spin while they wait for other ranks. The rank whose communication is exposed
    least waits least, so its timeline, which a picture draws, shows what the exchange itself takes.
    """
    row: Row = {}
    for name in ("communication_ms", "exposed_ms", "hidden_ms", "idle_ms"):
        values = [rank[name] for rank in ranks]
        row |= {name: max(values), f"{name.removesuffix('_ms')}_min_ms": min(values)}
    drawn = min(range(len(ranks)), key=lambda rank: float(ranks[rank]["exposed_ms"]))
    names = ("overlap_ratio", "spans", "waterfall")
    counts = ("gathers", "late_gathers", "late_ms")
    kept = {name: ranks[drawn][name] for name in (*names, *counts) if name in ranks[drawn]}
    if "gathers" in kept:
        longest = max(range(len(ranks)), key=lambda rank: float(ranks[rank]["late_ms"]))
        kept["late_max_ms"] = ranks[longest]["late_ms"]
        kept["latest_gathers"] = [
            {"rank": longest, **gather} for gather in ranks[longest]["latest_gathers"]
        ]
    shown = [dict(rank["timeline"]) for rank in ranks]
    begins = [rank.pop("begin_ns") for rank in shown]
    # Clocks of one machine agree; recordings whose clocks do not agree begin together.
    agree = max(begins) - min(begins) <= max(rank["window_ns"] for rank in shown)
    for rank, begin in zip(shown, begins, strict=True):
        rank["offset_ns"] = begin - min(begins) if agree else 0
    return {**row, **kept, "drawn_rank": drawn, "timeline": {"drawn": drawn, "ranks": shown}}
