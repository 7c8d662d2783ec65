"""Reads recordings of any program, whose kind is told by the content of the file.

torch.profiler's Chrome-format traces, and Nsight Systems' reports and their SQLite exports.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench_harness.core import Row
from bench_harness.traces import kineto, nsight
from bench_harness.traces.intervals import Interval
from bench_harness.traces.step import of_rank
from bench_harness.traces.trace import KernelTotal, Trace, kernel_totals

#: How torch.profiler marks the steps of its schedule.
_STEP = "ProfilerStep#"
_READ = (
    "a torch.profiler trace (.json, .json.gz), or a report or export of Nsight Systems "
    "(.nsys-rep, .sqlite)"
)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One rank's recording.

    Attributes:
        name: of the file, and of the GPU where a file holds several.
        tool: that recorded it.
        spans: what the kernel table counts.
        kernels: totals, longest first.
        steps: how many steps the recording says it holds; 1 if it says nothing.
        communication: as :func:`bench_harness.traces.step.of_rank` says it; empty where the
            recording holds no times.
    """

    name: str
    tool: str
    spans: str
    kernels: list[KernelTotal]
    steps: int = 1
    communication: Row = field(default_factory=dict)


def load(path: Path) -> list[Recording]:
    """Reads a file; one recording per GPU that it holds.

    Raises:
        ValueError: the file cannot be read, or is of another tool or version; one line.
    """
    if not path.is_file():
        raise ValueError(f"FILE must be {_READ}, but got {path}, which is no file. Correct it.")
    try:
        if path.suffix == ".nsys-rep":
            return _exported(path)
        if path.read_bytes()[:16].startswith(b"SQLite format 3"):
            return _nsight(path, path.name)
        return _json(path)
    except nsight.NsightError as error:
        raise ValueError(f"{path}: {error}") from None
    except sqlite3.Error as error:
        raise ValueError(
            f"FILE must be an export of Nsight Systems "
            f"{'.'.join(map(str, nsight.MINIMUM_VERSION))} or newer, but got {path}: {error}. "
            "Export it again with nsys export --type=sqlite."
        ) from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        if str(error).startswith("FILE must"):
            raise
        raise ValueError(
            f"FILE must be {_READ}, but got {path}, which cannot be read as one: "
            f"{type(error).__name__}. Record it again."
        ) from None


def _exported(path: Path) -> list[Recording]:
    """A report of Nsight Systems, by way of an export that ``nsys`` makes."""
    if shutil.which("nsys") is None:
        raise ValueError(
            f"FILE must be exported where nsys is missing, but got {path}. Run nsys export "
            f"--type=sqlite {path.name} where it was recorded."
        )
    with tempfile.TemporaryDirectory(prefix="bench-trace-") as folder:
        return _nsight(nsight.export(path, Path(folder) / "export.sqlite"), path.name)


def _nsight(path: Path, name: str) -> list[Recording]:
    devices = nsight.devices(path)
    if len(devices) < 2:
        return [_timed(nsight.load(path), name, "Nsight Systems")]
    return [
        _timed(nsight.load(path, device), f"{name} GPU {device}", "Nsight Systems")
        for device in devices
    ]


def _json(path: Path) -> list[Recording]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    events = content.get("traceEvents") if isinstance(content, Mapping) else None
    if not isinstance(events, list):
        raise ValueError(f"FILE must be {_READ}, but got {path}, which is other JSON. Correct it.")
    categories = {event.get("cat") for event in events if isinstance(event, Mapping)}
    if not categories & {"kernel", "cpu_op"}:
        raise ValueError(
            f"FILE must hold kernels or operators of torch.profiler, but got {path}, a Chrome "
            "trace of another tool. Record it with torch.profiler.profile and "
            "export_chrome_trace."
        )
    rank = content.get("distributedInfo", {}).get("rank")
    name = path.name if rank is None else f"{path.name} rank {rank}"
    return [_timed(kineto.load(path), name, "torch.profiler")]


def _timed(trace: Trace, name: str, tool: str) -> Recording:
    """A recording of a trace: sums over the whole of it."""
    busy = [event.interval for event in [*trace.compute, *trace.communication]]
    if not busy:
        raise ValueError(
            f"FILE must hold kernels or operators, but got {name}, which has none. Record while "
            "the model runs."
        )
    steps = sum(each.name.startswith(_STEP) for each in trace.ranges)
    window: Interval = min(start for start, _ in busy), max(end for _, end in busy)
    spans = "GPU kernels" if trace.on_device else "host operators (CPU)"
    return Recording(
        name=name,
        tool=tool,
        spans=spans,
        kernels=kernel_totals(trace, [window]),
        steps=max(1, steps),
        communication={
            "window_ms": (window[1] - window[0]) / 1e6,
            **of_rank(trace, window, spans),
        },
    )


def tables(recordings: Sequence[Recording], *, most: int = 15) -> dict[str, list[Row]]:
    """Tables by title: time per recording, work by kind, the longest kernels, late gathers.

    Args:
        most: how many kernels of each recording are listed.
    """
    timed = [each for each in recordings if each.communication]
    made: dict[str, list[Row]] = {"Time": [_time(each) for each in timed]}
    made["Work"] = [
        {
            "recording": each.name,
            **{
                f"{work} (%)": round(100 * sum(k.share for k in each.kernels if k.kind == work), 1)
                for work in ("matmul", "fused attention", "communication", "other")
            },
            "kernels (count)": sum(kernel.count for kernel in each.kernels),
        }
        for each in recordings
    ]
    made["Longest kernels"] = [
        {
            "recording": each.name,
            "kernel": kernel.name,
            "work": kernel.kind,
            "runs (count)": kernel.count,
            "total (ms)": round(kernel.total_ns / 1e6, 6),
            "share (%)": round(100 * kernel.share, 1),
        }
        for each in recordings
        for kernel in each.kernels[:most]
    ]
    gathered = [each for each in timed if "gathers" in each.communication]
    made["Gathers"] = [
        {
            "recording": each.name,
            "gathers (count)": each.communication["gathers"],
            "late (count)": each.communication["late_gathers"],
            "computation waited (ms)": round(each.communication["late_ms"], 6),
        }
        for each in gathered
    ]
    made["Latest gathers"] = [
        {
            "recording": each.name,
            "gather (number)": late["number"],
            "unit": late["unit"],
            "gather itself (ms)": late["gather_ms"],
            "late by (ms)": round(late["late_ms"], 6),
        }
        for each in gathered
        for late in each.communication["latest_gathers"]
    ]
    return {title: rows for title, rows in made.items() if rows}


def _time(recording: Recording) -> Row:
    found, steps = recording.communication, recording.steps
    computing = found["window_ms"] - found["exposed_ms"] - found["idle_ms"]
    ratio = found["overlap_ratio"]
    return {
        "recording": recording.name,
        "tool": recording.tool,
        "spans": recording.spans,
        "steps (count)": steps,
        "per step (ms)": round(found["window_ms"] / steps, 6),
        "computing (ms)": round(computing / steps, 6),
        "communication (ms)": round(found["communication_ms"] / steps, 6),
        "exposed (ms)": round(found["exposed_ms"] / steps, 6),
        "hidden (%)": None if ratio is None else round(100 * ratio, 1),
        "idle (ms)": round(found["idle_ms"] / steps, 6),
    }
