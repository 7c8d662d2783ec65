"""Compares two runs, row by row, and says which cases only one of them has.

:mod:`bench_harness.verdict` judges the samples of a row. This module pairs the rows, collects what
else differs between the two runs (environment, clock, throttling, a control), and decides whether a
gate (``--fail-on``) closes. A gate closes too on a case that only one run has: a benchmark that no
longer runs must not pass.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from bench_harness.core import TOLERANCE, Case, Row, plural
from bench_harness.environment import compared, throttled
from bench_harness.store import RESERVED, Loaded, Store, is_number
from bench_harness.verdict import Verdict, judge

#: Relative difference of clocks, and of controls, from which a row is not sure.
CONTROL = 0.03
#: Measured on each row's own device, and not touched by a change of the code that is compared.
CONTROLS = {"ceiling_tflop_s": "matrix products", "bandwidth_gb_s": "memory bandwidth"}
#: Numbers beside the samples that tell what changed in a row.
SIGNS = {
    "host_ms": "Python (ms)",
    "peak_gib": "peak (GiB)",
    "device_allocations": "allocations",
    "optimizer_ms": "optimizer (ms)",
    "compilations": "compilations",
}
#: A row's text that says which backend or kernel really ran; two rows that differ in nothing else
#: are the same row, which changed.
RAN = "ran"
#: Text that describes a row and tells it from no other: a wrapper's own account of itself, how its
#: profile was taken, and where its recording lies.
TOLD = ("explained", "spans", "report")
#: Kernels whose change is named.
KERNELS = 3


#: A row's case, and the texts that tell it from others of the case.
_Identity: TypeAlias = tuple[str, tuple[str, ...]]
#: A machine before and after a case.
_Machine: TypeAlias = tuple[Row, Row]


class ComparisonError(ValueError):
    """The runs cannot be compared; the text says why, in one line."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row measured in both runs.

    Attributes:
        variant: what tells the row from others of its case, as far as the label does not say it.
        median_a, median_b: milliseconds.
        verdict: B beside A.
        changed: what else differs, as ``peak (GiB) 31.7 → 39.7``.
        same_environment: whether both rows come from the same hardware and libraries.
        parts: milliseconds of A and B in each part of one profiled step, if both have one.
    """

    experiment: str
    label: str
    variant: str
    median_a: float
    median_b: float
    verdict: Verdict
    changed: tuple[str, ...]
    same_environment: bool
    parts: dict[str, tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Comparisons:
    """Two runs side by side.

    Attributes:
        rows: what both have measured.
        only_a, only_b: cases and rows that one run alone has measured, and why, if it is known.
        environment: fields of the environment that differ, with both values.
        kernels: the profiled kernels whose time changed most, with both times.
        runs: a line about each run: commit, date, samples.
        timelines: recorded steps that both runs hold, by run and row; as rows hold them.
    """

    rows: list[Comparison]
    only_a: list[str]
    only_b: list[str]
    environment: list[str]
    kernels: list[str]
    runs: tuple[str, str]
    timelines: dict[str, Any]

    def as_json(self) -> Row:
        """All of it but the timelines, as ``--json`` prints it."""
        rows = []
        for each in self.rows:
            judged = asdict(each.verdict)
            direction = judged.pop("direction")
            rows.append({**vars(each), **judged, "verdict": direction})
        kept = {name: value for name, value in vars(self).items() if name != "timelines"}
        return {**kept, "rows": rows}


@dataclass(frozen=True, kw_only=True)
class Gate:
    """``--fail-on``: when a comparison fails a build.

    Attributes:
        beyond: the slow-down that it lets pass, a share of A's time.
        unsure: whether rows that may be slower by more than that fail it, too.
    """

    beyond: float
    unsure: bool

    @classmethod
    def parse(cls, text: str) -> Gate:
        """``slower``, ``slower:PERCENT``, or one of them with ``,unsure``.

        Raises:
            ValueError: it is something else.
        """
        first, *others = (part.strip() for part in text.split(","))
        name, _, percent = first.partition(":")
        try:
            value = float(percent) / 100 if percent else TOLERANCE
        except ValueError:
            value = -1.0
        if name != "slower" or not 0 <= value < math.inf or others not in ([], ["unsure"]):
            raise ValueError(
                "--fail-on must be slower or slower:PERCENT with a percentage of at least 0, and "
                f"may end with ,unsure, but got {text!r}. Write slower:5 or slower,unsure."
            )
        return cls(beyond=value, unsure=bool(others))

    def failures(self, found: Comparisons) -> list[str]:
        """Why the gate closes, a phrase for each kind of failure; empty if it stays open."""
        slower = [each for each in found.rows if each.verdict.slower_by(self.beyond)]
        unsure = [
            each
            for each in found.rows
            if each not in slower and each.verdict.may_be_slower_by(self.beyond)
        ]
        alone = len(found.only_a) + len(found.only_b)
        kinds = {
            f"{plural(len(slower), 'row')} slower": len(slower),
            f"{plural(len(unsure), 'row')} not sure": len(unsure) if self.unsure else 0,
            f"{plural(alone, 'case')} in one run alone": alone,
        }
        return [text for text, count in kinds.items() if count]


def compare(
    run_a: Store, run_b: Store, *, tolerance: float = TOLERANCE, across_hardware: bool = False
) -> Comparisons:
    """Every row with samples that both runs hold, and what only one of them holds.

    Args:
        tolerance: relative difference that still counts as the same.
        across_hardware: compare rows of different environments too; none of them is sure.

    Raises:
        ComparisonError: the runs share no row, hold rows of different environments, or the same
            measurement, as a run and its copy do.
        StoreError: a run cannot be read.
    """
    for run in (run_a, run_b):
        run.check_is_run()
    loaded = [_current(run) for run in (run_a, run_b)]
    rows_a, rows_b = (_measured(each.rows) for each in loaded)
    shared = [identity for identity in rows_a if identity in rows_b]
    if not shared:
        damaged = sum(len(each.damaged) for each in loaded)
        what = "a case" if rows_a and rows_b else "samples of a case"
        raise ComparisonError(
            f"{run_a.folder} and {run_b.folder} must have {what} in common, but got none"
            f"{f' ({damaged} damaged lines were left out)' * (damaged > 0)}. Run both with the "
            "same options."
        )
    copies = sum(rows_a[i]["started"] == rows_b[i]["started"] for i in shared)
    if copies:
        raise ComparisonError(
            f"A and B must be two measurements, but got the same one for {copies} of "
            f"{len(shared)} rows. Measure B into a folder of its own."
        )
    pairs = {(rows_a[i]["environment"], rows_b[i]["environment"]) for i in shared}
    known = {**run_a.environments(), **run_b.environments()}
    differences = list(
        dict.fromkeys(
            text
            for a, b in sorted(pairs)
            for text in _differences(known.get(a), known.get(b), a, b)
        )
    )
    if differences and not across_hardware:
        different = sum(rows_a[i]["environment"] != rows_b[i]["environment"] for i in shared)
        raise ComparisonError(
            "rows must come from the same hardware and libraries, but got different ones for "
            f"{different} of {len(shared)}: {'; '.join(differences)}. Add --across-hardware to "
            "compare and mark them."
        )
    machines = [_machines(each.rows) for each in loaded]
    return Comparisons(
        rows=[
            _comparison(rows_a[i], rows_b[i], i, tolerance, [each.get(i[0]) for each in machines])
            for i in shared
        ],
        only_a=_alone(loaded[0].rows, loaded[1].rows),
        only_b=_alone(loaded[1].rows, loaded[0].rows),
        environment=differences,
        kernels=_kernels(loaded[0].rows, loaded[1].rows, tolerance),
        runs=(_about(rows_a, loaded[0]), _about(rows_b, loaded[1])),
        timelines=_timelines(loaded[0].rows, loaded[1].rows),
    )


def _comparison(
    a: Row, b: Row, identity: _Identity, tolerance: float, machines: Sequence[_Machine | None]
) -> Comparison:
    same = a["environment"] == b["environment"]
    doubts = [] if same else ["another environment"]
    doubts += _controls(a, b)
    if machines[0] is not None and machines[1] is not None:
        doubts += _machine_doubts(machines[0], machines[1])
    found = judge(a["samples_ms"], b["samples_ms"], tolerance=tolerance, doubts=doubts)
    return Comparison(
        experiment=a["experiment"],
        label=a["label"],
        variant=_described(identity[1], a["label"]),
        median_a=statistics.median(a["samples_ms"]),
        median_b=statistics.median(b["samples_ms"]),
        verdict=found,
        changed=tuple(_changed(a, b, tolerance)),
        same_environment=same,
        parts=_parts(a, b),
    )


def _controls(a: Row, b: Row) -> list[str]:
    """What the device itself did faster or slower, which no change of the code explains.

    On a CPU the controls scatter more than what is compared, so there are none.
    """
    found: list[str] = []
    if a["config"].get("device") == "cpu":
        return found
    for name, title in CONTROLS.items():
        if _positive(a.get(name)) and _positive(b.get(name)):
            ratio = a[name] / b[name]
            if abs(ratio - 1) > CONTROL:
                found.append(f"control: {title} {100 * (ratio - 1):+.0f} % in time")
    return found


def _machine_doubts(a: _Machine, b: _Machine) -> list[str]:
    """Throttling, and another clock; each argument is the machine before and after a case."""
    found = []
    for name, (before, after) in (("A", a), ("B", b)):
        if reasons := throttled(before, after):
            found.append(f"{name} was throttled ({', '.join(reasons)})")
    clock_a, clock_b = (_clock(each) for each in (a, b))
    if clock_a and clock_b and abs(clock_b / clock_a - 1) > CONTROL:
        found.append(f"clock {clock_a:.0f} → {clock_b:.0f} MHz")
    return found


def _clock(machine: _Machine) -> float | None:
    """The slowest GPU's clock right after the case, before which the GPU may have been idle."""
    clocks = [gpu.get("sm_clock_mhz") for gpu in machine[1].get("gpus", [])]
    return min((float(clock) for clock in clocks if _positive(clock)), default=None)


def _machines(rows: Sequence[Row]) -> dict[str, _Machine]:
    """The machine before and after each case."""
    return {
        _case(row): (row["machine_before"], row["machine_after"])
        for row in rows
        if row.get("machine_before") and row.get("machine_after")
    }


def _changed(a: Row, b: Row, tolerance: float) -> list[str]:
    found = []
    if a.get(RAN) != b.get(RAN):
        found.append(f"ran {a.get(RAN, 'unknown')} → {b.get(RAN, 'unknown')}")
    for name, title in SIGNS.items():
        old, new = (_figure(row.get(name)) for row in (a, b))
        if old is not None and new is not None and abs(new - old) > tolerance * abs(old):
            found.append(f"{title} {old:.4g} → {new:.4g}")
    return found


def _kernels(a: Sequence[Row], b: Sequence[Row], tolerance: float) -> list[str]:
    """The kernels of profiled steps that changed by more than the tolerance, the most first."""

    def times(rows: Sequence[Row]) -> dict[tuple[str, str, str], float]:
        return {
            (_case(row), str(row.get("phase", "")), row["kernel"]): row["total_ms"]
            for row in rows
            if isinstance(row.get("kernel"), str) and is_number(row.get("total_ms"))
        }

    before, after = times(a), times(b)
    changes = {
        key: (old, after.get(key, 0.0))
        for key, old in before.items()
        if abs(after.get(key, 0.0) - old) > tolerance * old
    }
    changes |= {key: (0.0, new) for key, new in after.items() if key not in before}
    largest = sorted(changes, key=lambda key: -abs(changes[key][1] - changes[key][0]))
    return [
        f"{key[2]} ({key[1]}) {changes[key][0]:.4g} → {changes[key][1]:.4g} ms"
        for key in (largest[:KERNELS] if before and after else [])
    ]


def _parts(a: Row, b: Row) -> dict[str, tuple[float, float]]:
    old, new = (row.get("waterfall") for row in (a, b))
    if not isinstance(old, dict) or not isinstance(new, dict):
        return {}
    times = {part: (old.get(part, 0.0), new.get(part, 0.0)) for part in {**old, **new}}
    return {part: pair for part, pair in times.items() if all(map(is_number, pair)) and any(pair)}


def _timelines(a: Sequence[Row], b: Sequence[Row]) -> dict[str, Any]:
    """Steps of the same row, one below the other."""
    held = [
        {(_case(row), _texts(row)): row for row in rows if row.get("timeline")} for rows in (a, b)
    ]
    # The timeline of the experiment memory is of bytes.
    shared = [i for i in held[0] if i in held[1] and held[0][i]["experiment"] != "memory"]
    labels = {held[0][identity]["label"] for identity in shared}
    found = {}
    for identity in shared:
        label = held[0][identity]["label"]
        name = _described(identity[1], label)
        name = f"{label}: {name}" if len(labels) > 1 or not name else name
        for run, rows in zip("AB", held, strict=True):
            found[f"{run}: {name}"] = rows[identity]["timeline"]
    return found


def _figure(value: Any) -> float | None:
    """A number, or the median of a list of them."""
    if isinstance(value, list) and value and all(map(is_number, value)):
        return float(statistics.median(value))
    return float(value) if is_number(value) else None


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _differences(
    a: Mapping[str, Any] | None, b: Mapping[str, Any] | None, id_a: str, id_b: str
) -> list[str]:
    """The fields in which two environments differ, with both values."""
    if id_a == id_b:
        return []
    flat_a, flat_b = (_flat(each or {}) for each in (a, b))
    found = [
        f"{name} {flat_a.get(name, 'unknown')} → {flat_b.get(name, 'unknown')}"
        for name in dict.fromkeys([*flat_a, *flat_b])
        if flat_a.get(name) != flat_b.get(name)
    ]
    return found if found and a and b else [f"environment {id_a} → {id_b}"]


def _flat(environment: Mapping[str, Any]) -> dict[str, str]:
    """The fields that make two timings comparable, each with its value as text."""
    found: dict[str, str] = {}
    for name, value in compared(environment).items():
        if isinstance(value, dict):
            found |= {key: json.dumps(item) for key, item in value.items()}
        else:
            found[name] = json.dumps(value)
    return {name: text.strip('"') for name, text in found.items()}


def _alone(rows: Sequence[Row], others: Sequence[Row]) -> list[str]:
    """Cases that are ``ok`` in ``rows`` and not in ``others``, and rows that their cases lack."""
    measured_there = _measured(others)
    there = {_case(row): row for row in others}
    found: dict[str, None] = {}  # in order, each once
    for row in rows:
        other = there.get(_case(row))
        if row["status"] == "ok" and (other is None or other["status"] != "ok"):
            why = "" if other is None else f" (there: {other['status']})"
            found[f"{row['experiment']}: {row['label']}{why}"] = None
    for identity, row in _measured(rows).items():
        other = there.get(identity[0])
        if other is not None and other["status"] == "ok" and identity not in measured_there:
            variant = _described(identity[1], row["label"])
            found[f"{row['experiment']}: {row['label']}: {variant}"] = None
    return list(found)


def _about(rows: Mapping[_Identity, Row], loaded: Loaded) -> str:
    """A run in one line: commits, first start, number of samples, and lines that were left out."""
    commits = dict.fromkeys((row["commit"] or "no commit")[:8] for row in rows.values())
    started = min(row["started"] for row in rows.values())[:16].replace("T", " ")
    counts = [len(row["samples_ms"]) for row in rows.values()]
    low, high = min(counts), max(counts)
    samples = plural(low, "sample") if low == high else f"{low} to {high} samples"
    damaged = f", without {plural(len(loaded.damaged), 'damaged line')}" * bool(loaded.damaged)
    return f"{', '.join(commits)}, {started}, {samples} a row{damaged}"


def cells_of(each: Comparison) -> tuple[str, ...]:
    """Name, times, difference, its interval and the verdict of a row."""
    verdict, ends = each.verdict, ""
    if verdict.low is not None and verdict.high is not None:
        ends = f"[{percent(verdict.low)}, {percent(verdict.high)}]"
    times = f"{each.median_a:.4g} → {each.median_b:.4g} ms"
    return each.variant or "all", times, f"{percent(verdict.ratio)} %", ends, str(verdict)


def percent(ratio: float) -> str:
    """A ratio as a difference in per cent, with plus or minus and without the unit."""
    change = 100 * (ratio - 1)
    text = f"{change:+.1f}" if abs(change) < 99.95 else f"{change:+.0f}"
    return text.replace("-", "\N{MINUS SIGN}")


def _current(run: Store) -> Loaded:
    """What a run holds: of a case whose code was edited, what the last command asked for."""
    loaded, runs = run.load(), run.runs()
    asked = set(runs[-1].get("cases", ()) if runs else ())
    latest: dict[str, str] = {}
    for row in sorted(loaded.rows, key=lambda row: row["case_key"] in asked):
        latest[_case(row)] = row["case_key"]
    return Loaded([r for r in loaded.rows if latest[_case(r)] == r["case_key"]], loaded.damaged)


def _measured(rows: Sequence[Row]) -> dict[_Identity, Row]:
    """Rows with samples, by case and by what tells them from the other rows of the case: their
    own text values, as ``("compiled bf16", "forward")``."""
    return {
        (_case(row), _texts(row)): row
        for row in rows
        if row["status"] == "ok" and row.get("samples_ms")
    }


def _case(row: Row) -> str:
    """The key of the row's case, whatever the user's code was then: an edited model is compared
    with what it was before."""
    config = {name: value for name, value in row["config"].items() if name != "user_code"}
    if config == row["config"]:
        return str(row["case_key"])
    return Case(experiment=row["experiment"], config=config).key


def _texts(row: Row) -> tuple[str, ...]:
    apart = RESERVED | {RAN, *TOLD}
    return tuple(v for n, v in row.items() if n not in apart and isinstance(v, str))


def _described(texts: tuple[str, ...], label: str) -> str:
    """The words of the values, each once, without those of the case's label."""
    words = dict.fromkeys(" ".join(texts).split())
    return " ".join(word for word in words if word not in label.split())
