"""One run from its cases to its report: where it is stored, what is left, what is shown."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_harness import experiments, runner, terminal
from bench_harness.core import Case
from bench_harness.runner import Planned
from bench_harness.store import Store
from bench_harness.terminal import ConsoleReporter

if TYPE_CHECKING:
    from rich.console import Console

#: Where runs without ``--output`` go, under the current directory.
RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to run.

    Attributes:
        name: of the experiment or preset; names the default folder.
        cases: all of them, before ``only``.
        options: experiments and their complete options, for the record.
        command: as typed, for the record.
        preset: that the cases are from, as typed; None for those of one experiment.
        output: the run folder; None chooses one (see :func:`choose_folder`).
        only: keep cases of these experiments or with one of these texts in their label.
        timeout_s: replaces each case's own.
    """

    name: str
    cases: Sequence[Case]
    options: Sequence[tuple[str, Mapping[str, Any]]]
    command: Sequence[str]
    preset: str | None = None
    output: Path | None = None
    only: Sequence[str] = ()
    timeout_s: float | None = None


def select(cases: Iterable[Case], only: Sequence[str]) -> list[Case]:
    """The cases that one of the texts names, by experiment or by part of the label.

    Raises:
        ValueError: a text names no case; the message lists the experiments.
    """
    cases = list(cases)
    for text in only:
        if not any(_names(text, case) for case in cases):
            present = ", ".join(dict.fromkeys(case.experiment for case in cases))
            raise ValueError(
                f"--only must name one of the experiments {present} or a part of a case's label, "
                f"but got {text!r}"
            )
    return [case for case in cases if not only or any(_names(text, case) for text in only)]


def _names(text: str, case: Case) -> bool:
    return text == case.experiment or (text not in experiments.names() and text in case.label)


def choose_folder(name: str, cases: Sequence[Case]) -> tuple[Path, Store | None]:
    """``runs/NAME-NN``: the latest one if it is an unfinished run of the same cases, else a new
    one. So the same command resumes what was interrupted, and repeats what was finished.

    Returns:
        The folder, and the latest run of that name.
    """
    numbered = {
        int(match[1]): folder
        for folder in RUNS.glob(f"{name}-*")
        if (match := re.fullmatch(rf"{re.escape(name)}-(\d+)", folder.name))
    }
    latest = max(numbered, default=0)
    store = Store(numbered[latest]) if latest else None
    if store is not None:
        runs = store.runs()
        same = bool(runs) and set(runs[-1].get("cases", [])) == {case.key for case in cases}
        if same and not all(item.finished for item in runner.plan(cases, store)):
            return store.folder, store
    return RUNS / f"{name}-{latest + 1:02d}", store


def _planned(request: Request) -> tuple[Path, list[Planned]]:
    """The folder of a run, and its cases with what is known of them."""
    cases, before = select(request.cases, request.only), None
    folder = request.output
    if folder is None:
        folder, before = choose_folder(request.name, cases)
    return folder, runner.plan(cases, Store(folder), before)


def dry_run(request: Request, console: Console, *, as_json: bool = False) -> None:
    """Lists the cases, their status and expected time, for people or as JSON; creates nothing."""
    folder, planned = _planned(request)
    for place, item in enumerate(planned):
        if not item.finished:
            missing = experiments.get(item.case.experiment).missing(item.case)
            planned[place] = replace(item, missing=missing)
    if not as_json:
        terminal.plan(planned, folder, console, request.preset)
        return
    listed = [
        {"experiment": item.case.experiment, "label": item.case.label, "finished": item.finished}
        | {"missing": item.missing, "expected_seconds": item.seconds}
        for item in planned
    ]
    print(json.dumps({"folder": str(folder), "cases": listed}, allow_nan=False))


def measure(request: Request, console: Console, *, tables: bool, as_json: bool = False) -> bool:
    """Measures what is left, writes the report and prints it as :func:`write_report` does.

    Returns:
        Whether every case of the request has a result.

    Raises:
        ValueError: ``only`` names nothing.
        StoreError: the folder cannot be used.
        KeyboardInterrupt: after saying how to resume.
    """
    folder, planned = _planned(request)
    cases, store = [item.case for item in planned], Store(folder)
    keys = {case.key for case in cases}
    terminal.start(planned, folder, console)
    invocation = {
        "command": shlex.join(["bench-harness", *request.command]),
        "options": [[name, dict(values)] for name, values in request.options],
        "cases": [case.key for case in cases],
    }
    left = [item.case for item in planned if not item.finished]
    try:
        with ConsoleReporter(console, planned, request.preset) as reporter:
            runner.run(left, store, reporter, invocation=invocation, timeout_s=request.timeout_s)
    except KeyboardInterrupt:
        terminal.interrupted(runner.plan(cases, store), folder, console)
        raise
    write_report(store, console, tables=tables, as_json=as_json)
    failed = ("error", "timeout")
    return not any(row["status"] in failed for row in store.load().rows if row["case_key"] in keys)


def write_report(store: Store, console: Console, *, tables: bool, as_json: bool = False) -> None:
    """Rebuilds the report of a run folder and prints its summary.

    Args:
        tables: also print the experiments' tables.
        as_json: also print cases and tables as one JSON object, to standard output.

    Raises:
        StoreError: nothing to report, or the folder cannot be written.
    """
    from bench_harness import report

    with console.status("Writing the report"):
        built = report.build(store)
        page = report.write(built, store.folder)
    if tables:
        terminal.tables((each for part in built.sections for each in part.tables), console)
    terminal.summary(built, page, console)
    if as_json:
        print(json.dumps(report.as_json(built, page), allow_nan=False))
