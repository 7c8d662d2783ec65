"""Follows every allocation of a recording: how long it lived, in which phase, from which line.

Two recordings are read: the history that CUDA's caching allocator keeps, and, on a CPU, the memory
events of ``torch.profiler``.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench_harness.core import Row
from bench_harness.traces import kineto
from bench_harness.traces.trace import PHASE

#: Points of a stored timeline; each keeps the highest moment of its stretch.
_POINTS = 400


@dataclass(frozen=True)
class MemoryEvent:
    """One allocation (``nbytes`` > 0) or release (< 0).

    Attributes:
        time_ns: on any clock that all events share.
        source: the line or operator that allocated; empty for a release.
        stack: lines, or operators on a CPU, that led there, innermost first; torch's own left out.
    """

    time_ns: int
    nbytes: int
    address: int
    phase: str
    source: str
    stack: tuple[str, ...] = ()


#: Name of the stretches between phases.
NO_PHASE = ""
#: The first of two recorded steps, which makes the optimizer's state.
FIRST = "first step"


class Allocation(NamedTuple):
    """A block of memory from its allocation to its release.

    Attributes:
        event: its allocation.
        first, last: indices of the events that allocated and released it; ``last`` is None if it
            outlived the recording.
    """

    event: MemoryEvent
    first: int
    last: int | None


def follow(events: Sequence[MemoryEvent]) -> list[Allocation]:
    """Pairs allocations with releases; releases of blocks from before the recording are ignored."""
    open_blocks: dict[int, tuple[MemoryEvent, int]] = {}
    found: list[Allocation] = []
    for index, event in enumerate(events):
        if event.nbytes > 0:
            open_blocks[event.address] = (event, index)
        elif event.address in open_blocks:
            found.append(Allocation(*open_blocks.pop(event.address), index))
    found += [Allocation(*began, None) for began in open_blocks.values()]
    return sorted(found, key=lambda block: block.first)


def allocated_after(events: Sequence[MemoryEvent], blocks: Iterable[Allocation]) -> list[int]:
    """Bytes in use after each event, of the blocks given."""
    changes = [0] * (len(events) + 1)
    for block in blocks:
        changes[block.first] += block.event.nbytes
        if block.last is not None:
            changes[block.last] -= block.event.nbytes
    total, totals = 0, []
    for change in changes[:-1]:
        total += change
        totals.append(total)
    return totals


def peaks(events: Sequence[MemoryEvent], phases: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Per phase, the most bytes in use at once and those in use at its end."""
    totals = allocated_after(events, follow(events))
    result = {}
    for phase in phases:
        inside = [
            total for event, total in zip(events, totals, strict=True) if event.phase == phase
        ]
        if inside:
            result[phase] = (max(inside), inside[-1])
    return result


def timeline(events: Sequence[MemoryEvent], phases: Sequence[str]) -> Row:
    """Bytes in use over time, by the phase that allocated them, thinned without losing peaks."""
    blocks = follow(events)
    series = {
        phase: allocated_after(events, [b for b in blocks if b.event.phase == phase])
        for phase in phases
    }
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    stretch = max(1, -(-len(events) // _POINTS))
    kept = [
        max(range(start, min(start + stretch, len(events))), key=totals.__getitem__)
        for start in range(0, len(events), stretch)
    ]
    begin = events[0].time_ns if events else 0
    return {
        "time_ms": [(events[index].time_ns - begin) / 1e6 for index in kept],
        "bytes": {phase: [values[index] for index in kept] for phase, values in series.items()},
        "phase_starts_ms": {
            phase: (next(event.time_ns for event in events if event.phase == phase) - begin) / 1e6
            for phase in phases
            if any(event.phase == phase for event in events)
        },
    }


def largest(events: Sequence[MemoryEvent], count: int) -> list[Row]:
    """The largest kinds of allocation (same size, source and phase), largest block first.

    The stack is that of most of their blocks.
    """
    groups: dict[tuple[int, str, str], Counter[tuple[str, ...]]] = defaultdict(Counter)
    for each, *_ in follow(events):
        groups[each.nbytes, each.phase, each.source][each.stack] += 1
    ordered = sorted(groups.items(), key=lambda item: (-item[0][0], -item[1].total()))
    return [
        {"block_bytes": nbytes, "phase": phase, "source": source, "blocks": stacks.total()}
        | {"stack": list(stacks.most_common(1)[0][0])}
        for (nbytes, phase, source), stacks in ordered[:count]
    ]


def from_cuda_history(
    entries: Sequence[Mapping[str, Any]], boundaries: Sequence[tuple[str, int]], outermost: str = ""
) -> list[MemoryEvent]:
    """Events of the caching allocator's history.

    Args:
        entries: one device's list in ``device_traces`` of a snapshot.
        boundaries: phase names, each with the number of entries there were when it began;
            ``NO_PHASE`` where what follows is not looked at, such as the release of everything.
        outermost: the function where stacks end; what called it is of no interest.
    """
    starts = [start for _, start in boundaries]
    events = []
    for index, entry in enumerate(entries):
        # "free_requested" is when the program lets go; completion may wait for streams.
        sign = {"alloc": 1, "free_requested": -1}.get(entry["action"])
        position = bisect.bisect_right(starts, index) - 1
        if sign is None or position < 0 or boundaries[position][0] == NO_PHASE:
            continue
        events.append(
            MemoryEvent(
                time_ns=int(entry.get("time_us", index)) * 1000,
                nbytes=sign * int(entry["size"]),
                address=int(entry["addr"]),
                phase=boundaries[position][0],
                source=_source_line(entry.get("frames", ())) if sign > 0 else "",
                stack=_stack(entry.get("frames", ()), outermost) if sign > 0 else (),
            )
        )
    return events


def from_profile(path: Path) -> list[MemoryEvent]:
    """Memory events of a trace that ``torch.profiler`` exported with ``profile_memory=True``."""
    spans: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    phases: list[tuple[int, int, str]] = []
    moments = []
    for event in kineto.content(path)["traceEvents"]:
        if "ts" not in event:
            continue
        start, end = kineto.span(event)
        if event["name"] == "[memory]":
            moments.append((start, event))
        elif event.get("cat") in ("cpu_op", "user_annotation"):
            name = str(event["name"])
            if name.startswith(PHASE):
                phases.append((start, end, name.removeprefix(PHASE)))
            else:
                spans[event["pid"], event["tid"]].append((start, end, name))
    for found in spans.values():
        found.sort()
    events = []
    for start, event in sorted(moments, key=lambda moment: moment[0]):
        phase = next((name for begin, end, name in phases if begin <= start < end), None)
        if phase is not None:
            names = _enclosing(spans[event["pid"], event["tid"]], start)
            events.append(
                MemoryEvent(
                    time_ns=start,
                    nbytes=int(event["args"]["Bytes"]),
                    address=int(event["args"]["Addr"]),
                    phase=phase,
                    source=" › ".join(dict.fromkeys([*names[:1], *names[-1:]])),
                    stack=tuple(reversed(names)),
                )
            )
    return events


def _source_line(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame outside torch, and the innermost one inside for what it did there."""
    python = [f for f in frames if str(f["filename"]).endswith(".py")]
    frame = next(iter(_own(python) or python), None)
    if frame is None:
        return "backward (started by the autograd engine)"
    return f"{Path(str(frame['filename'])).name}:{frame['line']} {frame['name']}"


def _stack(frames: Sequence[Mapping[str, Any]], outermost: str) -> tuple[str, ...]:
    """The frames outside torch up to the outermost function, each with its package."""
    own = _own([f for f in frames if str(f["filename"]).endswith(".py")])
    names = [frame["name"] for frame in own]
    own = own[: names.index(outermost) + 1] if outermost in names else own
    return tuple(
        f"{'/'.join(Path(str(f['filename'])).parts[-2:])}:{f['line']} {f['name']}" for f in own
    )


def _own(frames: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [frame for frame in frames if "/torch/" not in str(frame["filename"])]


def _enclosing(spans: list[tuple[int, int, str]], moment: int) -> list[str]:
    """Names of the spans open at a moment, outermost first."""
    position = bisect.bisect_right(spans, (moment, 1 << 62, ""))
    # Operators nest a few levels deep; a bounded look back finds all that are still open.
    return [name for start, end, name in spans[max(0, position - 400) : position] if moment < end]
