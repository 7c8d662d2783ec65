"""The content of a report, made from a run folder alone: no device, nothing measured again.

The sentences that stand first say what did not finish, who is fastest, and what to doubt. The
fastest variant of an experiment's last timed case is compared with the fastest one of PyTorch's
own, or else with the second, by the rule of :mod:`bench_harness.verdict`. So a sentence says
whether it is sure. What scatters or drifts too much to quote is counted, never quoted.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench_harness import experiments
from bench_harness.core import Figure, Row, Table, in_one_line, plural
from bench_harness.display.cells import quantity
from bench_harness.display.row_tables import steady
from bench_harness.environment import measured_on, throttled
from bench_harness.report.frame import to_frame
from bench_harness.stats import summarize, with_summary
from bench_harness.store import ARTIFACTS, Store, StoreError
from bench_harness.verdict import judge

_Shown = TypeVar("_Shown")

#: What is measured comes first, then what is calculated or explained, then experiments of others.
_FIRST = ("train-step", "model", "memory", "profile", "attention", "allreduce", "accounting")

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
        wrong = [f": line {n} is damaged, {why}" for n, why in loaded.damaged.items()]
        remedy = "Correct the rows, or measure again." if wrong else "Let a case of the run end."
        text = f"{store.results} must hold a complete case, but got none{''.join(wrong[:2])}"
        raise StoreError(f"{text}. {remedy}")
    by_name = _by("experiment", loaded.rows)
    order = sorted(by_name, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    environments = store.environments()
    notes = _notes(store, loaded.damaged, environments)
    return Report(
        name=store.folder.resolve().name,
        runs=store.runs(),
        environments=environments,
        commits=list(dict.fromkeys(row["commit"] for row in loaded.rows if row["commit"])),
        sections=[_section(name, by_name[name], store.folder) for name in order],
        headlines=_made(headlines, loaded.rows, "headlines", notes),
        tiles=_made(tiles, loaded.rows, "figures", notes),
        notes=notes,
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
        tables = _made(lambda own: experiment.tables(to_frame(own)), rows, "tables", problems)
        figures = _made(lambda own: experiment.figures(to_frame(own)), rows, "pictures", problems)
    return Section(
        name=name,
        summary=summary,
        cases=[_line(own, folder) for own in _by("case_key", rows).values()],
        tables=tables,
        figures=figures,
        problems=problems,
    )


def _by(name: str, rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows by what a column holds, in order of appearance."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return found


def _made(
    make: Callable[[list[Row]], list[_Shown]], rows: list[Row], what: str, problems: list[str]
) -> list[_Shown]:
    """Calls ``make`` with all rows; if that fails, with those of cases for which it succeeds."""
    try:
        return make(rows)
    except Exception as error:  # noqa: BLE001 - shown in the report
        problem = f"{what}: {where(error)}"
    good: list[Row] = []
    bad: list[str] = []
    for own in _by("case_key", rows).values():
        try:
            # Others hold nothing that could be shown alone.
            if own[0]["status"] == "ok":
                make(own)
            good += own
        except Exception:  # noqa: BLE001 - the first error is shown
            bad.append(own[0]["label"])
    made: list[_Shown] = []
    if good and bad:
        with contextlib.suppress(Exception):
            made = make(good)
            problem += f". Left out: {', '.join(bad[:_NAMED])}{', …' * (len(bad) > _NAMED)}"
    problems.append(problem)
    return made


def where(error: Exception) -> str:
    """An error in one line, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{in_one_line(error)} ({frame.name}, line {frame.lineno})"


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
    machine = [row.get(f"machine_{when}") or {} for when in ("before", "after")]
    return {
        **{name: row[name] for name in ("experiment", "label", "seconds", "detail", "environment")},
        "status": next((each for each in order if each in statuses), statuses[0]),
        "error": "; ".join(dict.fromkeys(errors)) or None,
        "warnings": [f"GPU slowed down: {reason}" for reason in throttled(*machine)],
        "artifacts": [file.relative_to(folder).as_posix() for file in left],
    }


#: Statuses of cases that did not finish.
_STOPPED = ("error", "timeout", "oom")
#: How names of variants begin that are PyTorch's own; and those that only bound the others.
_PYTORCH = ("torch", "sdpa", "FSDP2")
_BOUND = "no communication"
#: What an experiment proves of each variant before it is timed.
_PROVEN = {
    "attention": "attention agrees with its definition in fp32 ({what})",
    "train-step": "training on {ranks} ranks ends with the weights of plain averaging ({what})",
}


def headlines(rows: Iterable[Row]) -> list[str]:
    """The sentences, the most important first.

    Timings of later experiments stand before others, and those that are sure before those that are
    not: the first sentence can be quoted if there is one that can. Where several experiments ran on
    a CPU, it says what they have shown instead.
    """
    every = list(rows)
    latest = list(reversed(_by("experiment", every).values()))
    timings = [timing for own in latest if (timing := _fastest(own)) is not None]
    timings.sort(key=lambda timing: not timing[0])
    found = [_unfinished(every), _shown(every), *(text for _, text in timings)]
    found += map(_peak, latest)
    return [text for text in [*found, _unstable(every)] if text is not None]


def tiles(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
    """What a page shows largest, each with its name and a remark: the time of a step, throughput,
    peak memory, and what costs most. Only what the rows hold."""
    done = [row for row in rows if row["status"] == "ok"]
    steps = [row for row in done if row.get("samples_ms") and row.get("phase", "step") == "step"]
    steps = [row for row in steps if row["experiment"] in ("train-step", "model")]
    steps = [row for row in steps if row["experiment"] == steps[-1]["experiment"]]
    found: list[tuple[str, str, str]] = []
    step = min(
        (row for row in steps if not str(row.get("variant")).startswith(_BOUND)),
        key=lambda row: statistics.median(row["samples_ms"]),
        default=None,
    )
    if step is not None:
        name = str(step.get("variant", ""))
        found.append(("step", _ms(step), f"{name}{_interval(step)}"))
        if step.get("tokens"):
            tokens = step["tokens"] * step["config"].get("world_size", 1)  # of all ranks
            seconds = statistics.median(step["samples_ms"]) / 1e3
            found.append(("throughput", f"{tokens / seconds:,.0f} tokens/s", name))
    peaks = [(float(row["peak_bytes"]), str(row["phase"])) for row in done if "peak_bytes" in row]
    peaks += [(row["peak_gib"] * 2**30, row["variant"]) for row in steps if row.get("peak_gib")]
    if peaks:
        most, where = max(peaks)
        found.append(("peak memory", quantity(most, "B"), where))
    kernels = [row for row in done if row.get("kind") == "kernel" and "total_ms" in row]
    if kernels:
        top = max(kernels, key=lambda each: float(each["total_ms"]))
        share = f"{top['share']:.0f} % of {top['phase']}"
        found.append(("largest cost", share, top["kernel"][:60]))
    return found


def on_cpu(rows: Iterable[Row]) -> bool:
    """Whether any of the timed figures is from a CPU."""
    return any(row.get("samples_ms") and row["config"].get("device") == "cpu" for row in rows)


def _unfinished(rows: list[Row]) -> str | None:
    ended = {row["case_key"] for row in rows if row["status"] in _STOPPED}
    cases = {row["case_key"] for row in rows}
    if not ended:
        return None
    which = [row["label"] for row in rows if row["case_key"] in ended]
    return f"{len(ended)} of {plural(len(cases), 'case')} did not finish, the first: {which[0]}."


def _shown(rows: list[Row]) -> str | None:
    """What several experiments on a CPU have proven: not how fast anything is."""
    done = [row for row in rows if row["status"] == "ok"]
    cases = {row["case_key"] for row in done}
    if not on_cpu(done) or len(_by("experiment", done)) == 1:
        return None
    proofs = []
    for name, own in _by("experiment", done).items():
        variants = {row["variant"] for row in own if "variant" in row} - {_BOUND}
        if name in _PROVEN and variants:
            ranks = max(row["config"].get("world_size") or 1 for row in own)
            what = plural(len(variants), "variant")
            proofs.append(_PROVEN[name].format(what=what, ranks=ranks))
    if not proofs:
        return None
    return (
        f"{plural(len(cases), 'case')} worked on this CPU: {', and '.join(proofs)}. "
        "Only a GPU tells how fast they are."
    )


def _fastest(rows: list[Row]) -> tuple[bool, str] | None:
    """The fastest variant of the last timed case and phase: whether it is sure, and a sentence."""
    timed = [
        row
        for row in rows
        if row["status"] == "ok" and row.get("samples_ms") and isinstance(row.get("variant"), str)
    ]
    if not timed:
        return None
    last = timed[-1]
    about = ("case_key", "phase", "sequence", "feature", "size_bytes")
    what = {name: last.get(name) for name in about}
    cell = [row for row in timed if all(row.get(name) == value for name, value in what.items())]
    cell = [row for row in cell if not row["variant"].startswith(_BOUND)] or cell
    first, *others = sorted(cell, key=lambda row: statistics.median(row["samples_ms"]))
    done = f" for {last['phase']}" if isinstance(last.get("phase"), str) else ""
    where = f" ({last['label']})."
    unstable = summarize(first["samples_ms"])["unstable"]
    takes = f"{first['variant']} takes {_ms(first)}{done}"
    pytorch = [row for row in others if row["variant"].startswith(_PYTORCH)]
    if not others:
        how = f"{_interval(first)}, unsteady{_cause(rows)}" if unstable else ""
        return not unstable, takes + how + where
    other: Mapping[str, object] = (pytorch or others)[0]
    verdict = judge(other["samples_ms"], first["samples_ms"])  # type: ignore[arg-type]
    if unstable:  # a figure that scatters is not quoted, but the verdict stands
        names = {"A": str(other["variant"]), "B": str(first["variant"])}
        why = "".join(f", {reason}" for reason in verdict.reasons[:1])
        why = re.sub(r"\b[AB]\b", lambda match: names[match[0]], why)
        sentence = f"{first['variant']}{done} beside {other['variant']}: {verdict}{why}"
        return False, sentence + _cause(rows) + where
    beside = f", {verdict.ratio:.2f} of {other['variant']}"
    is_known = verdict.direction != "cannot tell"
    how = str(verdict) if is_known else "cannot tell them apart"
    return is_known and verdict.sure, takes + beside + f": {how}" + where


def _interval(row: Row) -> str:
    """The 95 % interval of a row's median."""
    found = summarize(row["samples_ms"])
    low, high = found["ci_low"], found["ci_high"]
    if low is None or high is None:
        return ""
    return f" [{quantity(low, 'ms')}, {quantity(high, 'ms')}]"


def _cause(rows: list[Row]) -> str:
    """What probably made samples scatter, where a case says so, and the cure."""
    both = [(row.get("machine_before") or {}, row.get("machine_after") or {}) for row in rows]
    if reasons := {reason for states in both for reason in throttled(*states)}:
        return f"; the GPU was slowed down ({', '.join(sorted(reasons))}), so run again later"
    states = [
        row.get("machine_after") or {} for row in rows if row["config"].get("device") == "cpu"
    ]
    loads = [(each["load_1min"], each["cpus"]) for each in states if each.get("cpus")]
    load, cpus = max(loads, default=(0.0, 1))
    if load <= 1.5 * cpus:
        return ""
    return f"; load {load:.1f} on {plural(cpus, 'core')}, so run again when it is idle"


def _ms(row: Row) -> str:
    return quantity(statistics.median(row["samples_ms"]), "ms")


def _peak(rows: list[Row]) -> str | None:
    """The phase in which memory peaks, of rows that weigh phases."""
    phases = [
        row
        for row in rows
        if row["status"] == "ok" and row.get("kind") == "phase" and "peak_bytes" in row
    ]
    if not phases:
        return None
    top = max(phases, key=lambda row: float(row["peak_bytes"]))
    return (
        f"Memory peaks at {quantity(top['peak_bytes'], 'B')}, in the phase {top['phase']} "
        f"({top['label']})."
    )


def _unstable(rows: list[Row]) -> str | None:
    timed = [row for row in rows if row["status"] == "ok" and row.get("samples_ms")]
    if not timed:
        return None
    shaky = int((~steady(with_summary(to_frame(timed)))).sum())
    if not shaky:
        return None
    return (
        f"{shaky} of {plural(len(timed), 'timed figure')} scatter or drift too much to quote, or "
        f"are too short for the timer, and take part in no ratio{_cause(timed)}."
    )
