"""Where the time of one recorded step goes, on a rank and over all ranks.

Every moment of a step belongs to exactly one part of :data:`PARTS`. On a GPU a moment at which
several kernels run counts for the first of them, so the parts add up to the step, communication is
what nothing else hides, and the rest is the time in which the GPU had nothing to do because the
host had launched nothing. On a CPU the parts are the operators' own times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from bench_harness.core import Row
from bench_harness.traces.gathers import gathers, summary
from bench_harness.traces.intervals import Interval, clip, total
from bench_harness.traces.timeline import timeline
from bench_harness.traces.trace import Event, Trace, kind, within

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
    """Milliseconds of each of :data:`PARTS` in one step; together they are the window.

    Args:
        window: the step, with the device idle at both ends.
    """
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
    if OPTIMIZER in inside or "FusedAdam" in name:  # one launch replays a whole recorded step
        return OPTIMIZER
    by_name = {"matmul": PRODUCTS, "fused attention": ATTENTION}.get(kind(name))
    if by_name is not None:
        return by_name
    return next((part for part in (ATTENTION, LOSS) if part in inside), ELEMENTWISE)


def of_rank(trace: Trace, window: Interval, spans: str) -> Row:
    """What one rank's trace says of a step, for :func:`over_ranks`.

    Args:
        spans: what the trace's spans are, as a table says it.
    """
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

    Args:
        ranks: :func:`of_rank` of every rank.
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
