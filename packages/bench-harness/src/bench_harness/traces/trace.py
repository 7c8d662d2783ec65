"""A profiler's trace, whichever tool recorded it, and what can be computed from it.

Phases are host windows with the device synchronised at both ends, so every kernel that a phase
caused lies inside it in time. That attributes backward rightly: autograd launches its kernels from
a thread of its own, where ranges pushed by the training thread do not exist.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench_harness.core import Row
from bench_harness.traces.intervals import Interval, Overlap, overlap, union

if TYPE_CHECKING:
    import torch

#: Prefix of the ranges that mark phases.
PHASE = "phase:"
#: Prefix of the ranges that say what the host launches meanwhile.
MARK = "mark:"

#: Kernels and operators that multiply matrices. cuBLAS names its own gemm, xmma, nvjet or cutlass.
_MATMUL = re.compile(
    r"gemm|gemv|xmma|nvjet|cutlass|cublas|splitK|^aten::(mm|addmm|bmm|baddbmm|_scaled_mm)$", re.I
)
#: Fused attention does both kinds of work in one kernel, so it is neither.
_FUSED_ATTENTION = re.compile(
    r"flash|fmha|attention|sdpa"
    # Kernels of flashattn-triton.
    r"|^hopper_(forward|backward)_kernel|^(wide_backward|backward_256|packed_tiles)_kernel"
    r"|^(key|query|bias|sinks)_pass_kernel|^(pre|post)process_kernel",
    re.I,
)

#: Templates that run an operation given as their argument, which is what tells them apart.
_CARRIER = re.compile(r"elementwise_kernel|reduce_kernel|multi_tensor_apply_kernel|Kernel2$")
#: Of those arguments: what carries the operation further, and what is the operation.
_SCAFFOLD = re.compile(r"gpu_kernel_impl|^(Binary|BUnary|AUnary|Unary)Functor$")
_OPERATION = re.compile(r"kernel|functor|ops$|gemm", re.I)


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
    """Kernels, ranges and launches of one rank's trace.

    Attributes:
        on_device: whether ``compute`` and ``communication`` are GPU kernels or host spans.
        compute: kernels (GPU), or outermost operators (CPU).
        operators: units of the kernel tables: kernels (GPU), or every operator (CPU).
        copies: device memory copies and fills.
        ranges: user ranges of the host, phases included.
        backward: nodes that autograd ran, as spans of the host.
        launches: correlation → host call that launched it.
    """

    on_device: bool
    compute: list[Event] = field(default_factory=list)
    communication: list[Event] = field(default_factory=list)
    operators: list[Event] = field(default_factory=list)
    copies: list[Event] = field(default_factory=list)
    ranges: list[Event] = field(default_factory=list)
    backward: list[Event] = field(default_factory=list)
    launches: dict[int, Event] = field(default_factory=dict)

    def phases(self, name: str) -> list[Interval]:
        """The windows of :func:`phase`, in order; one that torch and NVTX both name counts once."""
        return union(r.interval for r in self.ranges if r.name == PHASE + name)

    def host(self, event: Event) -> Event | None:
        """The host's call that launched a kernel, as far as it is known; on a CPU the operator."""
        return self.launches.get(event.correlation or -1) if self.on_device else event

    def overlap(self, window: Interval) -> Overlap:
        """Computation against communication inside a window."""
        return overlap(
            (event.interval for event in self.compute),
            (event.interval for event in self.communication),
            window,
        )


@contextmanager
def phase(name: str, device: torch.device) -> Iterator[None]:
    """A named window with the device idle at both ends; also an NVTX range on CUDA."""
    from bench_harness.timing import synchronize

    synchronize(device)
    with _named(PHASE + name, device):
        yield
        synchronize(device)


def mark(name: str, device: torch.device) -> AbstractContextManager[None]:
    """What any thread launches meanwhile belongs to that phase; nothing is waited for.

    For recorders that see neither autograd's nodes nor torch's own ranges, as Nsight Systems.
    """
    return _named(MARK + name, device)


@contextmanager
def _named(name: str, device: torch.device) -> Iterator[None]:
    import torch

    with torch.profiler.record_function(name):
        if device.type == "cuda":
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.cuda.nvtx.range_pop()


def is_communication(kernel: str) -> bool:
    """Whether a kernel's name is one of NCCL's, or a signal of ddp-lite's or torch's copies."""
    name = kernel.lower()
    return name.startswith(("nccl", "signal_kernel")) or "symmetric_memory::" in name


def kind(name: str) -> str:
    """What a kernel or operator does: communication, fused attention, matmul, or other."""
    if is_communication(name):
        return "communication"
    if _FUSED_ATTENTION.search(name):
        return "fused attention"
    return "matmul" if _MATMUL.search(name) else "other"


def short_name(kernel: str) -> str:
    """A kernel's name without namespaces, types and arguments, as a table can show it.

    Templates that run any operation are named with theirs: ``elementwise_kernel: silu_kernel``.
    """
    kernel = re.sub(r"_warpsize\w+_execute_kernel__5x_cublas$", "", kernel)
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::|^void ", "", kernel)
    own = re.split(r"[<(]", plain, maxsplit=1)[0]
    if own == kernel:
        return kernel  # an operator, or C linkage
    own = own.rpartition("::")[2]
    if not _CARRIER.search(own):
        return own
    for name in re.findall(r"\w+", plain.partition(own)[2]):
        if _OPERATION.search(name) and not _SCAFFOLD.search(name):
            return name if own == "Kernel2" else f"{own}: {name}"
    return own


def kernel_totals(trace: Trace, windows: Sequence[Interval]) -> list[Row]:
    """All runs of each kernel, or operator, inside the windows, longest first.

    On a CPU the times are operators' own, nested operators left out.

    Returns:
        ``kernel``, ``work`` (:func:`kind`), ``count``, ``total_ms``, and ``share`` of all in %.
    """
    counts: dict[str, int] = defaultdict(int)
    totals: dict[str, int] = defaultdict(int)
    for event in trace.operators:
        if any(start <= event.start_ns < end for start, end in windows):
            counts[event.name] += 1
            totals[event.name] += event.self_ns
    everything = sum(totals.values()) or 1
    return [
        {"kernel": name, "work": kind(name), "count": counts[name]}
        | {"total_ms": totals[name] / 1e6, "share": 100 * totals[name] / everything}
        for name in sorted(totals, key=lambda name: -totals[name])
    ]


def within(ranges: Iterable[Event]) -> Callable[[Event | None], bool]:
    """Tells whether something on the host begins while one of the ranges is open on its thread."""
    by_thread: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    for each in ranges:
        by_thread[each.thread].append(each.interval)
    opened = {thread: union(intervals) for thread, intervals in by_thread.items()}

    def is_within(host: Event | None) -> bool:
        own = [] if host is None else opened.get(host.thread, [])
        if host is None or not own:
            return False
        position = bisect.bisect_right(own, host.start_ns, key=lambda span: span[0]) - 1
        return position >= 0 and host.start_ns < own[position][1]

    return is_within


def time_inside(
    trace: Trace, range_name: str, windows: Sequence[Interval] | None = None
) -> dict[str, int]:
    """Nanoseconds of kernels launched inside a user range, by :func:`kind`.

    Args:
        windows: count only ranges that begin inside these; all by default.

    A kernel belongs to the range that was open, on the launching thread, when the host launched
    it; on a CPU the operator itself must lie in the range.
    """
    inside = within(
        span
        for span in trace.ranges
        if span.name == range_name
        and (windows is None or any(start <= span.start_ns < end for start, end in windows))
    )
    totals: dict[str, int] = defaultdict(int)
    for event in trace.operators:
        if inside(trace.host(event)):
            totals[kind(event.name)] += event.self_ns
    return dict(totals)
