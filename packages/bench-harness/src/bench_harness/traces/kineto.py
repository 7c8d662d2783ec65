"""Records and reads traces of ``torch.profiler``.

Phases are host windows with the device synchronised at both ends, so every kernel that a phase
caused lies inside it in time. That attributes backward rightly: autograd launches its kernels from
a thread of its own, where ranges pushed by the training thread do not exist.

On a GPU the kernels themselves are read; communication is the kernels whose names start with
``nccl``. On a CPU there are only host spans: computation is the outermost ATen operators,
communication the spans that gloo records around each collective.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_harness.traces.intervals import Interval, Overlap, overlap

if TYPE_CHECKING:
    import torch

_PHASE = "phase:"

#: Kernels and operators that multiply matrices. cuBLAS names its own gemm, xmma, nvjet or cutlass.
_MATMUL = re.compile(
    r"gemm|gemv|xmma|nvjet|cutlass|cublas|splitK|^aten::(mm|addmm|bmm|baddbmm|_scaled_mm)$", re.I
)
#: Fused attention does both kinds of work in one kernel, so it is neither.
_FUSED_ATTENTION = re.compile(r"flash|fmha|attention|sdpa", re.I)


@dataclass(frozen=True)
class Event:
    """One span of a trace; times in integer nanoseconds.

    Attributes:
        self_ns: duration without nested operators; for kernels the duration.
        correlation: links a kernel to the host call that launched it; None for host spans.
    """

    name: str
    start_ns: int
    end_ns: int
    thread: tuple[int, int]
    self_ns: int
    correlation: int | None = None

    @property
    def interval(self) -> Interval:
        """Start and end."""
        return self.start_ns, self.end_ns


@dataclass(frozen=True)
class Trace:
    """What is used of a trace.

    Attributes:
        on_device: whether ``compute`` and ``communication`` are GPU kernels or host spans.
        compute: kernels (GPU), or outermost operators (CPU).
        operators: units of the kernel tables: kernels (GPU), or every operator (CPU).
        copies: device memory copies and fills.
        ranges: user ranges of the host, phases included.
        launches: correlation → host call that launched it.
    """

    on_device: bool
    compute: list[Event] = field(default_factory=list)
    communication: list[Event] = field(default_factory=list)
    operators: list[Event] = field(default_factory=list)
    copies: list[Event] = field(default_factory=list)
    ranges: list[Event] = field(default_factory=list)
    launches: dict[int, Event] = field(default_factory=dict)

    def phases(self, name: str) -> list[Interval]:
        """The windows recorded by :func:`phase` under ``name``, in order."""
        return sorted(r.interval for r in self.ranges if r.name == _PHASE + name)

    def overlap(self, window: Interval) -> Overlap:
        """Computation against communication inside a window."""
        return overlap(
            (event.interval for event in self.compute),
            (event.interval for event in self.communication),
            window,
        )


@contextmanager
def recording(path: Path, device: torch.device) -> Iterator[None]:
    """Profiles the ``with`` block and writes the Chrome-format trace to ``path``."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # acc_events only silences a warning about cycles, of which there is one.
    with profile(activities=activities, acc_events=True) as profiler:
        yield
    profiler.export_chrome_trace(str(path))


@contextmanager
def phase(name: str, device: torch.device) -> Iterator[None]:
    """A named window with the device idle at both ends; also an NVTX range on CUDA."""
    import torch

    from bench_harness.timing import synchronize

    synchronize(device)
    with torch.profiler.record_function(_PHASE + name):
        if device.type == "cuda":
            torch.cuda.nvtx.range_push(name)
        try:
            yield
            synchronize(device)
        finally:
            if device.type == "cuda":
                torch.cuda.nvtx.range_pop()


def load(path: Path) -> Trace:
    """Reads a Chrome-format trace that ``torch.profiler`` exported.

    Raises:
        ValueError: the file holds no trace events.
    """
    # Decimal keeps the three digits after the microsecond exact, whatever the clock's origin.
    content = json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not events:
        raise ValueError(f"a trace must hold traceEvents; {path} holds none")
    by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and "dur" in event:
            by_category[event.get("cat", "")].append(event)
    ranges = [_event(e) for e in by_category["user_annotation"]]
    launches = {
        event.correlation: event
        for category in ("cuda_runtime", "cuda_driver")
        for event in map(_event, by_category[category])
        if event.correlation is not None
    }
    if by_category["kernel"]:
        kernels = [_event(e) for e in by_category["kernel"]]
        return Trace(
            on_device=True,
            compute=[k for k in kernels if not is_communication(k.name)],
            communication=[k for k in kernels if is_communication(k.name)],
            operators=kernels,
            copies=[_event(e) for c in ("gpu_memcpy", "gpu_memset") for e in by_category[c]],
            ranges=ranges,
            launches=launches,
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
        on_device=False,
        compute=outermost,
        communication=spans,
        operators=operators,
        ranges=ranges,
        launches=launches,
    )


def is_communication(kernel: str) -> bool:
    """Whether a kernel's name is one of NCCL's."""
    return kernel.lower().startswith("nccl")


def kind(name: str) -> str:
    """What a kernel or operator does: communication, fused attention, matmul, or other."""
    if is_communication(name):
        return "communication"
    if _FUSED_ATTENTION.search(name):
        return "fused attention"
    return "matmul" if _MATMUL.search(name) else "other"


@dataclass(frozen=True, kw_only=True)
class KernelTotal:
    """All runs of one kernel (or operator) inside some windows."""

    name: str
    kind: str
    count: int
    total_ns: int
    share: float


def kernel_totals(trace: Trace, windows: Sequence[Interval]) -> list[KernelTotal]:
    """Cumulative time per kernel inside the windows, longest first.

    On a CPU the times are operators' own, nested operators left out.
    """
    counts: dict[str, int] = defaultdict(int)
    totals: dict[str, int] = defaultdict(int)
    for event in trace.operators:
        if any(start <= event.start_ns < end for start, end in windows):
            counts[event.name] += 1
            totals[event.name] += event.self_ns
    everything = sum(totals.values()) or 1
    return [
        KernelTotal(
            name=name,
            kind=kind(name),
            count=counts[name],
            total_ns=totals[name],
            share=totals[name] / everything,
        )
        for name in sorted(totals, key=lambda name: -totals[name])
    ]


def time_inside(trace: Trace, range_name: str) -> dict[str, int]:
    """Nanoseconds of kernels launched inside a user range, by :func:`kind`.

    A kernel belongs to the range that was open, on the launching thread, when the host launched
    it; on a CPU the operator itself must lie in the range.
    """
    spans: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    for span in trace.ranges:
        if span.name == range_name:
            spans[span.thread].append(span.interval)
    totals: dict[str, int] = defaultdict(int)
    for event in trace.operators:
        host = event if not trace.on_device else trace.launches.get(event.correlation or -1)
        if host is None:
            continue
        if any(start <= host.start_ns < end for start, end in spans[host.thread]):
            totals[kind(event.name)] += event.self_ns
    return dict(totals)


def trimmed(path: Path, target: Path, windows: Sequence[Interval]) -> None:
    """Writes the events that touch the windows to a smaller trace that Perfetto still opens."""
    content = json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
    kept = []
    for event in content["traceEvents"]:
        if "ts" in event and event.get("ph") != "M":
            start, end = _span(event)
            if not any(start < finish and begin < max(end, start + 1) for begin, finish in windows):
                continue
        kept.append(event)
    content["traceEvents"] = kept
    target.write_text(json.dumps(content, default=float), encoding="utf-8")


def _span(event: dict[str, Any]) -> Interval:
    start = int(event["ts"] * 1000)
    return start, start + int(event.get("dur", 0) * 1000)


def _event(event: dict[str, Any]) -> Event:
    start, end = _span(event)
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
    import dataclasses

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
