"""What a report holds, made from a run folder alone: no device, nothing measured again."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bench_harness import environment, experiments
from bench_harness.core import Figure, JsonValue, Row, Table
from bench_harness.environment import measured_on
from bench_harness.experiments import Experiment
from bench_harness.report.frame import to_frame
from bench_harness.report.headlines import headlines, on_cpu, tiles
from bench_harness.store import ARTIFACTS, Store, StoreError

if TYPE_CHECKING:
    import pandas as pd

_Shown = TypeVar("_Shown")

#: What is measured comes first, then what is calculated or explained, then experiments of others.
_FIRST = (
    *("train-step", "model", "memory", "profile", "attention", "allreduce"),
    "accounting",
)

#: Damaged lines and cases that a report names one by one.
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class Section:
    """One experiment's part of the report.

    Attributes:
        cases: how each ended: what its rows say of it, ``status`` ("error" or "timeout" if one of
            its variants ended so), ``error`` with the variant's name, ``warnings``, as of a slowed
            GPU, and ``artifacts``, the files that it left, relative to the run folder.
        problems: tables or pictures that could not be made, and why.
    """

    name: str
    summary: str
    cases: list[Row]
    tables: list[Table]
    figures: list[Figure]
    problems: list[str]

    def count(self, *statuses: str) -> int:
        """Cases with one of the statuses."""
        return sum(case["status"] in statuses for case in self.cases)

    @property
    def seconds(self) -> float:
        """Wall time of all cases."""
        return sum(float(case["seconds"]) for case in self.cases)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything a report shows.

    Attributes:
        runs: the invocations that wrote into the folder (``run.json``).
        environments: by id; more than one means that rows must not be compared across them.
        commits: of the measured code, in order of appearance.
        notes: about the data itself, as damaged lines.
        headlines: what matters most, in sentences.
        tiles: name, value and remark of what stands largest on the page.
        on_cpu: whether times are those of a CPU, which show that things work, not how fast.
    """

    name: str
    runs: list[Row]
    environments: dict[str, Row]
    commits: list[str]
    sections: list[Section]
    notes: list[str]
    headlines: list[str]
    tiles: list[tuple[str, str, str]]
    on_cpu: bool

    @property
    def title(self) -> str:
        """What was measured: the one case, or the experiments."""
        labels = [case["label"] for section in self.sections for case in section.cases]
        return labels[0] if len(labels) == 1 else ", ".join(each.name for each in self.sections)

    @property
    def machines(self) -> list[str]:
        """What was measured on: hardware and versions, one line per environment."""
        return [measured_on(environment) for environment in self.environments.values()]

    @property
    def counts(self) -> Counter[str]:
        """Cases by status."""
        return Counter(case["status"] for section in self.sections for case in section.cases)


def build(store: Store) -> Report:
    """Makes a report from a run folder.

    Raises:
        StoreError: there are no rows, or they cannot be read.
    """
    store.check_is_run()
    loaded = store.load()
    if not loaded.rows:
        raise StoreError(
            f"{store.results} must hold a complete case, but got none. Let a case of the run end."
        )
    by_name: dict[str, list[Row]] = {}
    for row in loaded.rows:
        by_name.setdefault(row["experiment"], []).append(row)
    order = sorted(by_name, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    environments = store.environments()
    return Report(
        name=store.folder.resolve().name,
        runs=store.runs(),
        environments=environments,
        commits=list(dict.fromkeys(row["commit"] for row in loaded.rows if row["commit"])),
        sections=[_section(name, by_name[name], store.folder) for name in order],
        notes=_notes(store, loaded.damaged, environments),
        headlines=headlines(loaded.rows),
        tiles=tiles(loaded.rows),
        on_cpu=on_cpu(loaded.rows),
    )


def _notes(store: Store, damaged: Mapping[int, str], environments: Mapping[str, Row]) -> list[str]:
    notes = [
        f"{store.results.name} line {number} is damaged and was left out: {wrong}."
        for number, wrong in list(damaged.items())[:_NAMED]
    ]
    if len(damaged) > _NAMED:
        notes.append(f"{len(damaged) - _NAMED} more lines are damaged and were left out.")
    if damaged:
        notes.append("The same command measures what is missing again.")
    if len(environments) > 1:
        notes.append(
            f"The rows come from {len(environments)} environments: compare only rows of the same."
        )
    return notes


def _section(name: str, rows: list[Row], folder: Path) -> Section:
    tables: list[Table] = []
    figures: list[Figure] = []
    problems: list[str] = []
    try:
        experiment = experiments.get(name)
    except ValueError:
        summary = "rows of an experiment that is not installed here"
    else:
        summary = experiment.summary
        tables, figures, problems = _show(experiment, rows)
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row["case_key"], []).append(row)
    return Section(
        name=name,
        summary=summary,
        cases=[_line(own, folder) for own in by_case.values()],
        tables=tables,
        figures=figures,
        problems=problems,
    )


def _show(experiment: Experiment, rows: list[Row]) -> tuple[list[Table], list[Figure], list[str]]:
    """Tables and pictures. One that fails is reported, and the others are still shown."""
    problems: list[str] = []
    tables = _made(experiment.tables, rows, "tables", problems)
    figures = _made(experiment.figures, rows, "pictures", problems)
    return tables, figures, problems


def _made(
    make: Callable[[pd.DataFrame], list[_Shown]], rows: list[Row], what: str, problems: list[str]
) -> list[_Shown]:
    """Calls ``make`` with all rows; if that fails, with those of the cases for which it succeeds.

    Args:
        problems: gets a text for what was left out.
    """
    try:
        return make(to_frame(rows))
    except Exception as error:  # noqa: BLE001 - shown in the report
        problem = f"{what}: {where(error)}"
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row["case_key"], []).append(row)
    good: list[Row] = []
    bad: list[str] = []
    for own in by_case.values():
        try:
            # Others hold nothing that could be shown alone.
            if own[0]["status"] == "ok":
                make(to_frame(own))
            good += own
        except Exception:  # noqa: BLE001 - the first error is shown
            bad.append(own[0]["label"])
    made: list[_Shown] = []
    if good and bad:
        with contextlib.suppress(Exception):
            made = make(to_frame(good))
            problem += f". Left out: {', '.join(bad[:_NAMED])}{', …' * (len(bad) > _NAMED)}"
    problems.append(problem)
    return made


def where(error: Exception) -> str:
    """An error in one line, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    return f"{text} ({frame.name}, line {frame.lineno})"


def _line(rows: list[Row], folder: Path) -> Row:
    row = rows[0]
    statuses = [each["status"] for each in rows]
    order = ("error", "timeout", "ok")
    # Without a variant the error is the case's own, and its only row.
    errors = [
        f"{each['variant']} {each['status']}: {each['error']}"
        if "variant" in each
        else each["error"]
        for each in rows
        if each["error"] is not None
    ]
    files = sorted(Store(folder).subfolder(ARTIFACTS, row["case_key"]).glob("*"))
    left = [file for file in files if not file.is_symlink()]
    return {
        **{name: row[name] for name in ("experiment", "label", "seconds", "detail", "environment")},
        "status": next((each for each in order if each in statuses), statuses[0]),
        "error": "; ".join(dict.fromkeys(errors)) or None,
        "warnings": _warnings(row.get("machine_before"), row.get("machine_after")),
        "artifacts": [file.relative_to(folder).as_posix() for file in left],
    }


def _warnings(before: JsonValue, after: JsonValue) -> list[str]:
    if before is None or after is None:
        return []
    return [f"GPU slowed down: {reason}" for reason in environment.throttled(before, after)]
