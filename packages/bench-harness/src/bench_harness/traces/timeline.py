"""A recorded step as compact arrays: every span with its name, in a lane of its rank and stream.

All times are integer nanoseconds from the start of the window, so that a page draws them and a row
keeps them without loss.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from bench_harness.core import Row
from bench_harness.traces.intervals import Interval, clip
from bench_harness.traces.trace import MARK, PHASE, Event, Trace, kind, short_name, within

#: Kinds of work that a name can have, by the numbers in ``work``.
WORK = ("matmul", "fused attention", "other", "communication", "copy")
#: Operators of the host that hold a matrix product, where only the outermost ones are shown.
_PRODUCT = re.compile(r"^aten::(linear|matmul|einsum|conv\dd|convolution)$")
#: A replayed CUDA graph gives nearly every block a stream of its own, where nobody finds anything.
_MOST_STREAMS = 12
#: Start, end and the position of the name.
_Span = tuple[int, int, int]


def timeline(trace: Trace, window: Interval, late: Sequence[Sequence[int]] = ()) -> Row:
    """One rank's part of a timeline, as a row keeps it.

    Args:
        late: intervals in which the computation waited for a late gather.

    Returns:
        ``window_ns`` and ``exposed_ns``; ``names`` and, for each of them, ``work``, a position in
        :data:`WORK`; ``lanes``, each with a ``name`` and ``spans``, which lists the gap before,
        the duration and the position of the name of one span after the other; ``phases``, each a
        name, start and end; and ``late``, starts and ends.
    """
    begin, finish = window
    names: dict[tuple[str, str], int] = {}
    streams: dict[tuple[int, int], list[_Span]] = {}
    for events, work in ((trace.compute, ""), (trace.communication, "communication")):
        _collect(events, work, window, names, streams)
    _collect(trace.copies, "copy", window, names, streams)
    kinds = [kind_of_work for _, kind_of_work in names]
    rows = [
        (f"stream {stream}" if trace.on_device else f"thread {number}", spans)
        for number, ((_, stream), spans) in enumerate(sorted(streams.items()), start=1)
    ]
    if len(rows) > _MOST_STREAMS:
        rows = _by_work((span for _, spans in rows for span in spans), kinds)
    lanes = [(name, lane) for name, spans in rows for lane in _apart(spans)]
    return {
        "window_ns": finish - begin,
        "exposed_ns": trace.overlap(window).exposed_ns,
        "names": [name for name, _ in names],
        "work": [WORK.index(each) for each in kinds],
        "lanes": [{"name": name, "spans": _flat(spans)} for name, spans in lanes],
        "phases": _phases(trace, window),
        "late": [[s - begin, e - begin] for s, e in clip(((s, e) for s, e in late), window)],
    }


def _collect(
    events: Iterable[Event],
    work: str,
    window: Interval,
    names: dict[tuple[str, str], int],
    streams: dict[tuple[int, int], list[_Span]],
) -> None:
    """Adds the spans of events inside the window to their streams, and their names."""
    known: dict[str, int] = {}
    for event in events:
        if event.end_ns <= window[0] or event.start_ns >= window[1]:
            continue
        if event.name not in known:
            own = "matmul" if _PRODUCT.search(event.name) else kind(event.name)
            what = short_name(event.name), work or own
            known[event.name] = names.setdefault(what, len(names))
        start = max(event.start_ns, window[0]) - window[0]
        end = min(event.end_ns, window[1]) - window[0]
        streams.setdefault(event.thread, []).append((start, end, known[event.name]))


def _by_work(spans: Iterable[_Span], kinds: Sequence[str]) -> list[tuple[str, list[_Span]]]:
    """What computes, what communicates, and what copies; ``kinds`` are those of the names."""
    lanes: dict[str, list[_Span]] = {"compute": [], "transfer": [], "copy": []}
    for span in spans:
        lane = {"communication": "transfer", "copy": "copy"}.get(kinds[span[2]], "compute")
        lanes[lane].append(span)
    return list(lanes.items())


def _apart(spans: list[_Span]) -> list[list[_Span]]:
    """As many lanes as it takes for no two spans of one to overlap."""
    lanes: list[list[_Span]] = []
    for span in sorted(spans):
        free = next((lane for lane in lanes if lane[-1][1] <= span[0]), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _flat(spans: Sequence[_Span]) -> list[int]:
    before, flat = 0, list[int]()
    for start, end, name in spans:
        flat += (start - before, end - start, name)
        before = end
    return flat


def _phases(trace: Trace, window: Interval) -> list[list[str | int]]:
    """Where forward, backward and the optimizer were: by synchronised windows, or else by launches.

    Marks say what was launched meanwhile. Without them, torch records the optimizer's step and
    every node that autograd runs; what the host launched outside both, before a backward, is
    forward. Kernels of a replayed CUDA graph have no phase: one launch replays all of them.
    """
    begin, finish = window
    runs: list[tuple[str, int, int]] = []
    for each in sorted(trace.ranges, key=lambda each: (each.start_ns, -each.end_ns)):
        inside = begin <= each.start_ns and each.end_ns <= finish and each.interval != window
        again = runs and each.end_ns <= runs[-1][2]  # as both a range of torch and of NVTX
        if each.name.startswith(PHASE) and inside and not again:
            runs.append((each.name.removeprefix(PHASE), each.start_ns, each.end_ns))
    runs = runs or _launched(trace, window)
    return [[name, start - begin, end - begin] for name, start, end in runs]


def _launched(trace: Trace, window: Interval) -> list[tuple[str, int, int]]:
    optimizer = within(r for r in trace.ranges if r.name.startswith("Optimizer.step#"))
    backward = within(trace.backward)
    marks = [r for r in trace.ranges if r.name.startswith(MARK)]

    def phase_of(host: Event) -> str | None:
        if marks:  # of the main thread, while autograd launches from another
            own = (m for m in marks if m.start_ns <= host.start_ns < m.end_ns)
            return next((m.name.removeprefix(MARK) for m in own), None)
        return "optimizer" if optimizer(host) else "backward" if backward(host) else "forward"

    inside = [e for e in trace.compute if window[0] <= e.start_ns < window[1]]
    launches = ((trace.host(event), event) for event in inside)
    ordered = [(host, e) for host, e in launches if host is not None and "Graph" not in host.name]
    runs: list[tuple[str, int, int]] = []
    after_backward = not (trace.backward or marks)
    for host, event in sorted(ordered, key=lambda pair: pair[0].start_ns):
        name = phase_of(host)
        if name is None or (name == "forward" and after_backward):
            continue
        after_backward = name == "backward"
        if runs and runs[-1][0] == name:
            runs[-1] = name, min(runs[-1][1], event.start_ns), max(runs[-1][2], event.end_ns)
        else:
            runs.append((name, event.start_ns, event.end_ns))
    return runs
