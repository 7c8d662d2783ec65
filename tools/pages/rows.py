"""Published rows: one file per published table, which needs no run folder beside it.

A line is one case: what identifies it, the hardware and versions it was measured with, and its
rows with their samples. What a row would repeat stands once. :func:`publish` makes such a file from
run folders, and :mod:`tools.pages.fill` reads it. A file whose name ends in ``.gz`` is compressed,
which makes many samples a fifth of the size; of the thousands that a short call has, every n-th is
published.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench_harness import environment
from bench_harness.core import Case, Row
from bench_harness.environment import measured_on
from bench_harness.store import Store, replace_file

#: Columns of a case, the same in all of its rows. The label is also in the configuration.
_CASE = ("experiment", "case_key", "label", "environment", "commit", "started", "seconds", "config")
#: What a published row leaves to its case, or out: the machine's state, tracebacks, second clocks,
#: and of each sample all but its time and the GPU's clock.
_LEFT_OUT = (
    *(*_CASE, "schema", "case_rows", "machine_before", "machine_after", "detail"),
    *("samples_device_ms", "samples_fastest_rank_ms", "samples_power_w", "samples_temperature_c"),
)
#: Significant digits of a published number: finer than what two samples ever share.
_DIGITS = 6
#: Samples of a published row: so many give each quantile that pages show.
_MOST_SAMPLES = 500


def publish(stores: Iterable[Store], target: Path, only: Sequence[str] = ()) -> int:
    """Writes the rows of runs into one file, and returns the number of its cases.

    Args:
        only: keep cases of these experiments, or with one of these texts in their label.

    Raises:
        StoreError: a run cannot be read, or the file cannot be written.
        ValueError: nothing is left to write.
    """
    lines = []
    for store in stores:
        store.check_is_run()
        environments = store.environments()
        cases: dict[str, list[Row]] = {}
        for row in store.load().rows:
            if not only or any(text == row["experiment"] or text in row["label"] for text in only):
                cases.setdefault(row["case_key"], []).append(row)
        lines += [case_line(rows, environments) for rows in cases.values()]
    if not lines:
        raise ValueError(
            f"cases must be in the runs, but got none for {', '.join(only) or 'any name'}. List "
            "them with report."
        )
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    content = "".join(encoder.encode(line) + "\n" for line in lines).encode()
    # Without the time of day, so that equal rows give equal files.
    replace_file(target, gzip.compress(content, mtime=0) if target.suffix == ".gz" else content)
    return len(lines)


def case_line(rows: Sequence[Row], environments: Mapping[str, Any]) -> Row:
    """One line of a published file: a case and its rows."""
    about = {name: rows[0][name] for name in _CASE if rows[0].get(name) is not None}
    config = {name: value for name, value in about["config"].items() if name != "label"}
    environment = environments.get(rows[0]["environment"], {})
    kept = [{k: v for k, v in row.items() if k not in _LEFT_OUT and v is not None} for row in rows]
    own = json.loads(json.dumps(kept), parse_float=lambda text: float(f"{float(text):.{_DIGITS}g}"))
    own = [{k: v for k, v in row.items() if (k, v) != ("status", "ok")} for row in own]
    for row in own:
        row |= {k: _spread(v) for k, v in row.items() if k.startswith("samples_")}
    shared = {
        name: value
        for name, value in own[0].items()
        if len(own) > 1 and all(name in row and row[name] == value for row in own)
    }
    line = {**about, "config": config, "measured_on": measured_on(environment)}
    if shared:  # stands once
        line["shared"] = shared
    return {**line, "rows": [{k: v for k, v in row.items() if k not in shared} for row in own]}


def _spread(samples: list[Any]) -> list[Any]:
    """Every n-th, so that at most _MOST_SAMPLES remain, from all the time of measuring."""
    return samples[:: max(1, -(-len(samples) // _MOST_SAMPLES))]


def read(file: Path) -> list[Row]:
    """The rows of a published file, each with what stands once per case.

    Raises:
        ValueError: the file is missing, or a line is not a case.
    """
    try:
        content = file.read_bytes()
        lines = (gzip.decompress(content) if file.suffix == ".gz" else content).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"rows must be a readable file, but got {file} ({error}). Measure it again and publish "
            "it, or remove the block."
        ) from None
    found: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            case = json.loads(line)
            rows, shared = case.pop("rows"), case.pop("shared", {})
            found += [{"status": "ok", "error": None, **case, **shared, **row} for row in rows]
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(
                f"{file} line {number} must be a case with its rows, but got {line[:40]!r}. "
                "Publish the run again."
            ) from None
    return found


def circumstances(rows: Iterable[Row]) -> list[str]:
    """Hardware, versions and commits of rows, one line per machine."""
    machines: dict[str, dict[str, None]] = {}
    for row in rows:
        marks = machines.setdefault(row["measured_on"], {})
        if commit := row.get("commit"):
            marks[f", commit {commit[:12]}" + " with changes" * commit.endswith("-dirty")] = None
    return [machine + "".join(marks) for machine, marks in machines.items()]


def measure(case: Case, run: Callable[[Case], list[Row]], target: Path) -> None:
    """Runs a case of the repository's own, and writes its rows.

    Raises:
        CaseSkipped: this machine lacks something that it needs.
    """
    started = datetime.now(UTC)
    rows = run(case)
    described = environment.describe() | {"torch": environment.describe_torch()}
    git = described["git"] or {"commit": "unknown", "dirty": False}
    identity = environment.fingerprint(described)
    about: Row = {
        "experiment": case.experiment,
        "case_key": case.key,
        "label": case.label,
        "environment": identity,
        "commit": git["commit"] + "-dirty" * git["dirty"],
        "started": started.isoformat(),
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 3),
        "config": dict(case.config),
    }
    line = case_line([{**about, **row} for row in rows], {identity: described})
    replace_file(target, (json.dumps(line, ensure_ascii=False) + "\n").encode())
