"""Times steps on CPU and CUDA: every sample kept, wall clock and device events side by side.

The wall clock around a synchronised step is the figure users feel; device events leave out the
launch of the first kernel and the wake-up after the last one. Where the two differ, the step is
bound by the host.

As pyperf and hyperfine do, sampling goes on past the least number of samples until the 95 %
interval of every median is narrow enough to quote, but not for ever: a busy machine may never be
steady.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from bench_harness import environment
from bench_harness.core import Config, Row, option

if TYPE_CHECKING:
    import torch

Step = Callable[[], object]
_Each = TypeVar("_Each")


@dataclass
class Samples:
    """The samples of one variant, in the order in which they were taken.

    Attributes:
        wall_ms: milliseconds per call by the host's clock, device synchronised at both ends.
        device_ms: milliseconds per call between two CUDA events; empty on a CPU.
        first_ms: the very first call of the process (compilation, allocation, autotuning), wall
            clock; None if it was not measured.
        gpu: clock (``sm_clock_mhz``), power and temperature of the GPU right after each sample, as
            far as its driver tells them; empty on a CPU.
    """

    wall_ms: list[float] = field(default_factory=list)
    device_ms: list[float] = field(default_factory=list)
    first_ms: float | None = None
    gpu: dict[str, list[float]] = field(default_factory=dict)

    def row(self) -> Row:
        """These samples as columns of a result row, to a nanosecond, which no clock here beats."""
        columns: Row = {"samples_ms": [round(sample, 6) for sample in self.wall_ms]}
        if self.device_ms:
            columns["samples_device_ms"] = [round(sample, 6) for sample in self.device_ms]
        if self.first_ms is not None:
            columns["first_ms"] = self.first_ms
        return columns | {f"samples_{name}": values for name, values in self.gpu.items()}

    def note_gpu(self, device: torch.device, samples: int = 1) -> None:
        """Keeps what the driver says of the GPU now, for the latest ``samples``."""
        for name, value in environment.gpu_now(device).items():
            self.gpu.setdefault(name, []).extend([value] * samples)

    def extend(self, other: Samples) -> None:
        """Adds the samples of another turn; the first call is not theirs."""
        self.wall_ms += other.wall_ms
        self.device_ms += other.device_ms
        for name, values in other.gpu.items():
            self.gpu.setdefault(name, []).extend(values)


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished everything queued; nothing to do on a CPU."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


@contextmanager
def record_sample(samples: Samples, device: torch.device, *, calls: int = 1) -> Iterator[None]:
    """Adds the time of the ``with`` block, divided by ``calls``, to ``samples``.

    The device is synchronised before the first clock reading and before the last one. A block
    that raises adds nothing.
    """
    if device.type != "cuda":
        start = time.perf_counter_ns()
        yield
        samples.wall_ms.append((time.perf_counter_ns() - start) / 1e6 / calls)
        return

    import torch

    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start = time.perf_counter_ns()
    begin.record(torch.cuda.current_stream(device))
    yield
    end.record(torch.cuda.current_stream(device))
    torch.cuda.synchronize(device)
    samples.wall_ms.append((time.perf_counter_ns() - start) / 1e6 / calls)
    samples.device_ms.append(begin.elapsed_time(end) / calls)
    samples.note_gpu(device)


def measure(
    step: Step, *, device: torch.device, warmup: int, samples: int, calls: int = 1
) -> Samples:
    """Times one callable.

    Args:
        warmup: calls before any sample. The first of them is kept as ``first_ms``; with 0 the first
            sample contains it.
        calls: steps per sample without a synchronisation between them, which makes short steps
            measurable.

    Raises:
        ValueError: a count is out of range.
    """
    for name, value, least in (("warmup", warmup, 0), ("samples", samples, 1), ("calls", calls, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, but got {value}")
    first, found = Samples(), Samples()
    for _ in range(warmup):
        with record_sample(first, device):
            step()
    for _ in range(samples):
        with record_sample(found, device, calls=calls):
            for _ in range(calls):
                step()
    found.first_ms = first.wall_ms[0] if warmup else None
    return found


def timer_overhead_ms(device: torch.device, samples: int = 50) -> float:
    """The median time, in milliseconds, that this module reports for a step that does nothing."""
    readings = measure(lambda: None, device=device, warmup=5, samples=samples).wall_ms
    return sorted(readings)[len(readings) // 2]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of every experiment that takes samples until they are enough."""

    interval: float = option(
        2.0,
        "Sample until the 95 % interval is at most this far from the median (%); 0: only the least "
        "number of samples.",
    )
    max_seconds: float = option(10.0, "Seconds that a case may go on sampling for that.")


def in_turns(
    everyone: Callable[[], Iterable[_Each]],
    config: Config,
    readings: Callable[[], Iterable[Sequence[float]]],
    *,
    least: int = 1,
    parts: int = 1,
    agreed: Callable[[bool], bool] = bool,
) -> Iterator[tuple[int, list[_Each]]]:
    """Rounds in which everyone has a turn: the number of each, and everyone in its order, to and
    fro, so that drift meets all alike.

    Further rounds follow until every interval is narrow, or no time is left.

    Args:
        everyone: asked anew in each round.
        config: of a case, with :class:`SamplingOptions`; without them the least is enough.
        readings: the samples so far.
        least: rounds, after which the time limit begins.
        parts: how many such loops share the seconds of the case.
        agreed: makes this process's decision to stop everybody's.
    """
    width, end = float(config.get("interval", 0.0)) / 100, math.inf
    for number in itertools.count():
        order = list(everyone())
        yield number, order[::-1] if number % 2 else order
        if number + 1 < least:
            continue
        if number + 1 == least:
            end = time.monotonic() + float(config.get("max_seconds", 0.0)) / parts
        late = not width or time.monotonic() >= end
        if agreed(late or all(narrow(each, width) for each in readings() if each)):
            return


def narrow(samples: Sequence[float], width: float) -> bool:
    """Whether the 95 % interval of the median lies within ± ``width``, a share of the median."""
    import numpy as np

    from bench_harness.stats import interval

    (low, high), median = interval(np.asarray(samples, np.float64)), statistics.median(samples)
    if low is None or high is None:
        return False
    return max(high - median, median - low) <= width * median
