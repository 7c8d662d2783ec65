"""Runs cases one after another, each in its own process, and stores the rows of each at once."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench_harness import environment, experiments, process
from bench_harness.core import Case, CaseSkipped, JsonValue, Progress, Row
from bench_harness.process import Outcome
from bench_harness.store import ARTIFACTS, ENVIRONMENTS, RESERVED, RUN, Store, Writer

#: Key under which an experiment's row says that this variant alone was skipped or failed:
#: ``{"status": "skipped", "error": "why"}``.
ENDED = "ended"


class Reporter(Protocol):
    """Receives the events of a run, for example to show them."""

    def case_started(self, case: Case) -> None:
        """A case begins."""

    def case_progress(self, text: str) -> None:
        """The running case says something."""

    def case_finished(self, case: Case, outcome: Outcome) -> None:
        """A case has ended and its rows are stored."""


@dataclass(frozen=True)
class Planned:
    """A case of a run and what is known about it before it runs.

    Attributes:
        finished: whether the folder already holds its result.
        seconds: how long it took before, or by calculation; None if nothing is known.
        calculated: whether ``seconds`` are, because the case has not run before.
        missing: what this machine lacks for it, so that it will be skipped; None if nothing is
            known. Looked up for a dry run only.
    """

    case: Case
    finished: bool
    seconds: float | None
    missing: str | None = None
    calculated: bool = False


def plan(cases: Iterable[Case], store: Store, before: Store | None = None) -> list[Planned]:
    """Which of the cases this machine still has to measure, without measuring anything.

    A case given twice is planned once.

    Args:
        before: an earlier run, in which the cases may have taken as long.

    Raises:
        StoreError: the folder holds results that cannot be read.
    """
    identity = environment.fingerprint(environment.describe())
    finished = store.finished(identity)
    rows = [row for each in filter(None, (before, store)) for row in each.load().rows]
    past = {r["case_key"]: float(r["seconds"]) for r in rows if r["environment"] == identity}
    unique = {case.key: case for case in cases}
    return [
        Planned(case, key in finished, past[key])
        if key in past
        else Planned(case, key in finished, _expected_s(case), calculated=True)
        for key, case in unique.items()
    ]


def _expected_s(case: Case) -> float | None:
    """What a case takes by calculation: its work, on a CPU as much slower as the load says, and the
    time in which sampling may go on."""
    work = experiments.get(case.experiment).work_s(case)
    if work is None:
        return None
    on_cpu = case.config.get("device", "cpu") == "cpu"
    sampling = float(case.config.get("max_seconds", 0.0)) * bool(case.config.get("interval"))
    return min(work * (environment.busy() if on_cpu else 1.0) + sampling, case.timeout_s)


def run(
    cases: Sequence[Case],
    store: Store,
    reporter: Reporter,
    *,
    invocation: Mapping[str, JsonValue],
    timeout_s: float | None = None,
) -> None:
    """Measures the cases; whatever happens, the rows of those that finished are stored.

    Args:
        cases: those still to be measured (see :func:`plan`).
        invocation: what ``run.json`` keeps about this run: the command and its options.
        timeout_s: replaces each case's own.

    Raises:
        StoreError: the folder cannot be written.
        KeyboardInterrupt: the running case is killed first.
    """
    with store.open_for_writing() as writer:
        if cases:  # while torch is imported there, the rest is looked up here
            process.start_server()
        description = environment.describe()
        identity = environment.fingerprint(description)
        _record_run(store, writer, invocation, identity, description)
        for case in cases:
            reporter.case_started(case)
            about = {
                "experiment": case.experiment,
                "case_key": case.key,
                "label": case.label,
                "environment": identity,
                "commit": _commit(description),
                "started": _now(),
                "config": dict(case.config),
            }
            with _folder(case, store) as folder:
                outcome = process.call(
                    run_case,
                    case,
                    timeout_s=timeout_s or case.timeout_s,
                    folder=folder,
                    on_progress=reporter.case_progress,
                )
                writer.append(_rows(outcome, about))
            reporter.case_finished(case, outcome)


def ended_variants(outcome: Outcome) -> list[str]:
    """Which variants of a case that went on were skipped or failed, and why: one line for each."""
    if outcome.status != "ok":
        return []
    texts = (
        f"{row['variant']} {row[ENDED]['status']}: {row[ENDED]['error']}"
        for row in outcome.value["rows"]
        if ENDED in row
    )
    return list(dict.fromkeys(texts))  # of several lengths, each reason once


@contextlib.contextmanager
def _folder(case: Case, store: Store) -> Iterator[Path]:
    """The folder in which a case runs; it stays if the case leaves anything in it."""
    folder = store.subfolder(ARTIFACTS, case.key).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
            folder.parent.rmdir()


def run_case(case: Case, progress: Progress) -> JsonValue:
    """Measures one case, in its process: its rows, and the machine before and after.

    Raises:
        CaseSkipped: this machine lacks something that it needs.
        ValueError: the experiment gives no rows, or one that uses a name of :data:`RESERVED`.
    """
    experiment = experiments.get(case.experiment)
    if (why := experiment.missing(case)) is not None:
        raise CaseSkipped(why)
    before = environment.snapshot()
    rows = experiment.run(case, progress)
    if not rows:
        raise ValueError(f"{case.experiment} must return at least one row, but got none")
    for row in rows:
        if reserved := sorted(RESERVED & row.keys()):
            raise ValueError(f"rows must not use the names {reserved}, but got {sorted(row)}")
        for name, value in row.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                text = f"{name} of a row must be JSON, without NaN, but got {value!r:.80}"
                raise ValueError(text) from None
    _add_timer_overhead(rows, case)
    return {"rows": rows, "machine_before": before, "machine_after": environment.snapshot()}


def _add_timer_overhead(rows: list[Row], case: Case) -> None:
    """Adds to every timed row the time that is measured for a step that does nothing."""
    timed = [row for row in rows if row.get("samples_ms") and "timer_overhead_ms" not in row]
    if timed and case.config.get("device") in ("cpu", "cuda"):
        import torch

        from bench_harness.timing import timer_overhead_ms

        overhead = timer_overhead_ms(torch.device(case.config["device"]))
        for row in timed:
            row["timer_overhead_ms"] = overhead


def _rows(outcome: Outcome, about: Row) -> list[Row]:
    identity = {
        **about,
        "status": outcome.status,
        "error": outcome.error,
        "detail": outcome.detail,
        "seconds": round(outcome.seconds, 3),
    }
    if outcome.status != "ok":
        return [identity]
    first, *others = (
        {**identity, **row.get(ENDED, {}), **{k: v for k, v in row.items() if k != ENDED}}
        for row in outcome.value["rows"]
    )
    machine = {name: outcome.value[name] for name in ("machine_before", "machine_after")}
    return [{**first, **machine}, *others]  # the state of the machine belongs to the case


def _record_run(
    store: Store,
    writer: Writer,
    invocation: Mapping[str, JsonValue],
    identity: str,
    description: Row,
) -> None:
    runs = store.runs()
    entry = {"started": _now(), "environment": identity, "commit": _commit(description)}
    writer.write_json(RUN, [*runs, {**invocation, **entry}])
    environments = store.environments()
    if "torch" not in environments.get(identity, {}):
        try:
            described = process.asked(_describe_torch, timeout_s=300.0)
        except (ValueError, TimeoutError) as error:
            described = {"error": str(error)}
        environments[identity] = {**description, "torch": described}
        writer.write_json(ENVIRONMENTS, environments)


def _describe_torch(progress: Progress) -> JsonValue:
    return environment.describe_torch()


def _commit(description: Row) -> str | None:
    """The commit, marked where the tree differs from it."""
    git = description["git"]
    return None if git is None else git["commit"] + "-dirty" * git["dirty"]


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat()
