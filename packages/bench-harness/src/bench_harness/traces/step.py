"""Communication in one recorded step: what a rank's trace says, and what all ranks say together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench_harness.core import Row
from bench_harness.traces.gathers import gathers, summary
from bench_harness.traces.intervals import Interval
from bench_harness.traces.timeline import timeline
from bench_harness.traces.trace import Trace
from bench_harness.traces.waterfall import waterfall


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
