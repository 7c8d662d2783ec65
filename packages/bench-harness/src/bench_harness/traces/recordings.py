"""Reads recordings of any program, whose kind is told by the content of the file.

torch.profiler's Chrome-format traces, and Nsight Systems' reports and their SQLite exports.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench_harness.core import Column, Row, Table
from bench_harness.display import row_tables
from bench_harness.traces import kineto, nsight
from bench_harness.traces.intervals import Interval
from bench_harness.traces.step import of_rank, over_ranks
from bench_harness.traces.trace import Trace, kernel_totals

#: Kinds of work by their columns.
_WORK = {"matmul": "matmul", "fused": "fused attention", "moved": "communication", "other": "other"}
_COLUMNS = row_tables.Columns(
    Column("steps", "steps", "count"),
    Column("step_ms", "per step", "ms"),
    Column("hidden", "hidden", "%"),
    *(Column(key, work, "%") for key, work in _WORK.items()),
    Column("kernels", "kernels", "count"),
    Column("share", "share", "%"),
)

#: How torch.profiler marks the steps of its schedule.
_STEP = "ProfilerStep#"
_READ = (
    "a torch.profiler trace (.json, .json.gz), or a report or export of Nsight Systems "
    "(.nsys-rep, .sqlite)"
)


def load(path: Path) -> list[Row]:
    """Reads a file; one recording per GPU that it holds.

    Returns:
        Of each its name (``recording``), ``tool``, ``steps`` (1 if it says nothing), ``window_ms``,
        its ``kernels``, and what :func:`bench_harness.traces.step.over_ranks` says.

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


def _exported(path: Path) -> list[Row]:
    """A report of Nsight Systems, by way of an export that ``nsys`` makes."""
    if shutil.which("nsys") is None:
        raise ValueError(
            f"FILE must be exported where nsys is missing, but got {path}. Run nsys export "
            f"--type=sqlite {path.name} where it was recorded."
        )
    with tempfile.TemporaryDirectory(prefix="bench-trace-") as folder:
        return _nsight(nsight.export(path, Path(folder) / "export.sqlite"), path.name)


def _nsight(path: Path, name: str) -> list[Row]:
    devices = nsight.devices(path)
    if len(devices) < 2:
        return [_timed(nsight.load(path), name, "Nsight Systems")]
    return [
        _timed(nsight.load(path, device), f"{name} GPU {device}", "Nsight Systems")
        for device in devices
    ]


def _json(path: Path) -> list[Row]:
    content = kineto.content(path)
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


def _timed(trace: Trace, name: str, tool: str) -> Row:
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
    return {
        "recording": name,
        "tool": tool,
        "steps": max(1, steps),
        "window_ms": (window[1] - window[0]) / 1e6,
        "kernels": kernel_totals(trace, [window]),
        **over_ranks([of_rank(trace, window, spans)]),
    }


def tables(recordings: Sequence[Row], *, most: int = 15) -> list[Table]:
    """Time per recording, work by kind, the longest kernels, late gathers.

    Args:
        most: how many kernels of each recording are listed.
    """
    import pandas as pd

    every = pd.DataFrame(_summary(each) for each in recordings)
    listed = [{**each, "kernels": each["kernels"][:most]} for each in recordings]
    kernels = row_tables.entries(pd.DataFrame(listed), "kernels", "recording")
    time = "tool spans steps step_ms computing_ms communication_ms exposed_ms hidden idle_ms"
    made = [
        _COLUMNS.table("Time", every, f"recording {time}"),
        _COLUMNS.table("Work", every, f"recording {' '.join(_WORK)} kernels"),
        _COLUMNS.table("Longest kernels", kernels, "recording kernel work count total_ms share"),
    ]
    if "gathers" in every:
        gathered = every[every["gathers"].notna()]
        latest = row_tables.entries(gathered, "latest_gathers", "recording")
        made += [
            _COLUMNS.table("Gathers", gathered, "recording gathers late_gathers late_ms"),
            _COLUMNS.table(
                "Latest gathers",
                latest,
                "recording number unit gather_ms late_ms",
                headings={"late_ms": "late by (ms)"},
            ),
        ]
    return [table for table in made if len(table.frame)]


def _summary(recording: Row) -> Row:
    """What a recording says of one of its steps, on average, and of its gathers."""
    steps, kernels = recording["steps"], recording["kernels"]
    times = {name: recording[name] for name in ("communication_ms", "exposed_ms", "idle_ms")}
    times["step_ms"] = recording["window_ms"]
    times["computing_ms"] = times["step_ms"] - times["exposed_ms"] - times["idle_ms"]
    ratio = recording["overlap_ratio"]
    return {
        **recording,
        **{name: time / steps for name, time in times.items()},
        **{
            key: sum(kernel["share"] for kernel in kernels if kernel["work"] == work)
            for key, work in _WORK.items()
        },
        "hidden": None if ratio is None else 100 * ratio,
        "kernels": sum(kernel["count"] for kernel in kernels),
    }
