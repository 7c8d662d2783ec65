"""Records and reads traces of ``torch.profiler``.

On a GPU the kernels themselves are read; communication is the kernels whose names start with
``nccl``, copies between GPUs and their signals, and everything else that ddp-lite and
flashattn-triton launch for an exchange by copies: the kernels that sum, except those that a CUDA
graph replays. On a CPU there are only host spans: computation is the outermost ATen operators,
communication the spans that gloo records around each collective.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_harness.traces.intervals import Interval
from bench_harness.traces.trace import Event, Trace, is_communication, within

if TYPE_CHECKING:
    import torch


#: Names of the host's ranges around what is launched for an exchange by copies.
_EXCHANGES = ("ddp_lite::exchange", "flashattn_triton::exchange")
#: How torch names what autograd runs for one node of the graph.
_BACKWARD = "autograd::engine::evaluate_function"


@contextmanager
def recording(path: Path, device: torch.device, *, memory: bool = False) -> Iterator[None]:
    """Profiles the ``with`` block, on a CPU with allocations if asked; writes a Chrome trace."""
    from torch.autograd.profiler import profile

    # What torch.profiler.profile wraps. Used directly it writes the trace as recorded; the wrapper
    # would first build a tree of Python objects from it, which takes longer than small steps.
    profiler = profile(
        use_device="cuda" if device.type == "cuda" else None, use_kineto=True, profile_memory=memory
    )
    with profiler:
        yield
    # The trace holds the path it is written to, and a trace is passed on.
    profiler.export_chrome_trace(os.path.relpath(path))


def load(path: Path) -> Trace:
    """Reads a Chrome-format trace that ``torch.profiler`` exported, plain or gzip-compressed.

    Raises:
        ValueError: the file holds no trace events.
    """
    held = content(path)
    events = held.get("traceEvents") if isinstance(held, dict) else None
    if not events:
        raise ValueError(
            f"a trace must hold traceEvents, but got none in {path}. Export it with torch.profiler."
        )
    by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and "dur" in event:
            by_category[event.get("cat", "")].append(event)
    ranges = [_event(e) for e in by_category["user_annotation"]]
    backward = [_event(e) for e in by_category["cpu_op"] if str(e["name"]).startswith(_BACKWARD)]
    launches = {
        event.correlation: event
        for category in ("cuda_runtime", "cuda_driver")
        for event in map(_event, by_category[category])
        if event.correlation is not None
    }
    host: dict[str, Any] = {"ranges": ranges, "backward": backward, "launches": launches}
    if by_category["kernel"]:
        kernels = [_event(e) for e in by_category["kernel"]]
        copies = [_event(e) for c in ("gpu_memcpy", "gpu_memset") for e in by_category[c]]
        exchanges = within(each for each in ranges if each.name.startswith(_EXCHANGES))
        moved = {number for number, launch in launches.items() if exchanges(launch)}

        def moves(event: Event) -> bool:
            between_gpus = is_communication(event.name) or "PtoP" in event.name
            return between_gpus or event.correlation in moved

        return Trace(
            on_device=True,
            compute=[k for k in kernels if not moves(k)],
            communication=[event for event in [*kernels, *copies] if moves(event)],
            operators=kernels,
            copies=[c for c in copies if not moves(c)],
            **host,
        )
    spans = [r for r in ranges if r.name.startswith("gloo:")]
    workers = {span.thread for span in spans}
    operators, outermost = _nested(
        [
            _event(e)
            for e in by_category["cpu_op"]
            if e["name"].startswith("aten::") and (e["pid"], e["tid"]) not in workers
        ]
    )
    return Trace(
        on_device=False, compute=outermost, communication=spans, operators=operators, **host
    )


def trimmed(path: Path, target: Path, windows: Sequence[Interval]) -> None:
    """Writes the events that touch the windows to a gzip-compressed trace, ``.json.gz``."""
    held = content(path)
    kept = []
    for event in held["traceEvents"]:
        if "ts" in event and event.get("ph") != "M":
            start, end = span(event)
            if not any(start < finish and begin < max(end, start + 1) for begin, finish in windows):
                continue
        kept.append(event)
    held["traceEvents"] = kept
    with gzip.open(target, "wt", encoding="utf-8") as file:
        json.dump(held, file, default=float)


def content(path: Path) -> Any:
    """The JSON of a trace, plain or gzip-compressed."""
    # Decimal keeps the three digits after the microsecond exact, whatever the clock's origin.
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return json.load(file, parse_float=Decimal)


def span(event: Mapping[str, Any]) -> Interval:
    """Start and end of an event in nanoseconds."""
    start = int(event["ts"] * 1000)
    return start, start + int(event.get("dur", 0) * 1000)


def _event(event: dict[str, Any]) -> Event:
    start, end = span(event)
    return Event(
        name=str(event["name"]),
        start_ns=start,
        end_ns=end,
        thread=(event["pid"], event["tid"]),
        self_ns=end - start,
        correlation=event.get("args", {}).get("correlation"),
    )


def _nested(events: list[Event]) -> tuple[list[Event], list[Event]]:
    """Every operator with its own time, and the outermost ones, by how spans nest on a thread."""
    inner: dict[int, int] = defaultdict(int)
    outermost: list[Event] = []
    ordered = sorted(events, key=lambda e: (e.thread, e.start_ns, -e.end_ns))
    stack: list[int] = []
    for index, event in enumerate(ordered):
        while stack and (
            ordered[stack[-1]].thread != event.thread or ordered[stack[-1]].end_ns <= event.start_ns
        ):
            stack.pop()
        if stack:
            inner[stack[-1]] += event.end_ns - event.start_ns
        else:
            outermost.append(event)
        stack.append(index)
    own = [
        dataclasses.replace(event, self_ns=max(0, event.self_ns - inner[index]))
        for index, event in enumerate(ordered)
    ]
    return own, outermost
