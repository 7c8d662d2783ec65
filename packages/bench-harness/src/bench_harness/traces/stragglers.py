"""Which rank arrives last at which collective, from one profiled step of every rank.

A collective ends on all ranks at about the same time, because it needs all of them: NCCL's kernel
spins, and gloo's call blocks, from a rank's own arrival until the others have come. So the rank
whose span is shortest has arrived last, and a longer span of another rank has waited for as long as
it is longer. That compares durations only: clocks of several machines need not agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from bench_harness.core import Row
from bench_harness.traces.intervals import Interval
from bench_harness.traces.trace import Event, Trace, is_communication, short_name

#: How many collectives a row lists by name.
_LISTED = 5


def arrivals(trace: Trace, window: Interval) -> list[Row]:
    """The collectives of one rank that begin inside a window, in the order of their start.

    Returns:
        ``name`` and ``duration_ns`` of each.
    """
    begin, end = window
    spans = sorted(
        (
            event
            for event in trace.communication
            if begin <= event.start_ns < end and _waits(event, trace)
        ),
        key=lambda event: event.start_ns,
    )
    return [
        {"name": short_name(event.name), "duration_ns": event.end_ns - event.start_ns}
        for event in spans
    ]


def _waits(event: Event, trace: Trace) -> bool:
    """Whether a span lasts until all ranks are there; copies between GPUs and sums do not."""
    return not trace.on_device or is_communication(event.name) or "barrier" in event.name


def stragglers(ranks: Sequence[Sequence[Row]]) -> Row:
    """Who arrived last, and who waited how long.

    The k-th collective of a name on one rank is the k-th of that name on every other.

    Args:
        ranks: :func:`arrivals` of every rank.

    Returns:
        ``stragglers``, one entry per rank: at how many collectives it was ``last``, how long others
        waited for it (``waited_for_ms``, the longest wait of each collective) and how long it
        ``waited_ms`` itself; and ``latest``, the collectives with the longest waits, numbered as on
        rank 0. Nothing for a single rank, or where ranks saw different collectives.
    """
    matched = _matched(ranks) if len(ranks) > 1 else []
    if not matched:
        return {}
    entries: list[Row] = [
        {"rank": rank, "last": 0, "waited_for_ms": 0.0, "waited_ms": 0.0}
        for rank in range(len(ranks))
    ]
    waits: list[Row] = []
    for number, name, durations in matched:
        least = min(durations)
        last = durations.index(least)
        wait_ms = (max(durations) - least) / 1e6
        entries[last]["last"] += 1
        entries[last]["waited_for_ms"] += wait_ms
        for entry, duration in zip(entries, durations, strict=True):
            entry["waited_ms"] += (duration - least) / 1e6
        waits.append({"number": number, "name": name, "last_rank": last, "wait_ms": wait_ms})
    waits.sort(key=lambda wait: -wait["wait_ms"])
    return {"stragglers": entries, "latest": waits[:_LISTED]}


def _matched(ranks: Sequence[Sequence[Row]]) -> list[tuple[int, str, list[int]]]:
    """Number, name and every rank's duration of each collective; none if ranks do not match."""
    by_name: list[dict[str, list[tuple[int, int]]]] = []
    for spans in ranks:
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, span in enumerate(spans):
            found[span["name"]].append((number, span["duration_ns"]))
        by_name.append(found)
    counts = [{name: len(spans) for name, spans in found.items()} for found in by_name]
    if any(count != counts[0] for count in counts):
        return []
    return [
        (number, name, [found[name][position][1] for found in by_name])
        for name, spans in by_name[0].items()
        for position, (number, _) in enumerate(spans)
    ]
