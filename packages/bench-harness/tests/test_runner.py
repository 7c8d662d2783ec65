"""Planning and running cases: rows of every status, artifacts, resume by configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench_harness import experiments, runner
from bench_harness.core import Case, Row
from bench_harness.process import Outcome
from bench_harness.store import Store


class Listener:
    """Remembers what a run told."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.said: list[str] = []
        self.finished: list[tuple[str, str]] = []

    def case_started(self, case: Case) -> None:
        self.started.append(case.label)

    def case_progress(self, text: str) -> None:
        self.said.append(text)

    def case_finished(self, case: Case, outcome: Outcome) -> None:
        self.finished.append((case.label, outcome.status))


@pytest.fixture
def store(installed: Path, tmp_path: Path) -> Store:
    return Store(tmp_path / "run")


def toy_cases(*kinds: str, **options: object) -> list[Case]:
    return experiments.get("toy").cases(kinds=kinds, **options)


def run(cases: list[Case], store: Store, timeout_s: float | None = None) -> Listener:
    listener = Listener()
    left = [item.case for item in runner.plan(cases, store) if not item.finished]
    runner.run(left, store, listener, invocation={"command": "toy"}, timeout_s=timeout_s)
    return listener


def by_label(store: Store) -> dict[str, Row]:
    return {row["label"]: row for row in store.load().rows}


def test_every_end_of_a_case_is_a_row_and_the_others_go_on(store: Store) -> None:
    cases = toy_cases("raises", "oom", "exits", "killed", "skips", "reserved", "nan", "empty", "ok")
    listener = run(cases, store)
    rows = by_label(store)
    assert {label: row["status"] for label, row in rows.items()} == dict(listener.finished)
    assert [row["status"] for row in rows.values()] == [
        *("error", "oom", "error", "error", "skipped", "error", "error", "error", "ok")
    ]
    assert rows["toy raises 0"]["error"] == "ValueError: this case raises"
    assert "words before the end" in rows["toy raises 0"]["detail"]
    assert "SIGKILL" in rows["toy killed 0"]["error"]
    assert "must not use the names ['status']" in rows["toy reserved 0"]["error"]
    assert "at least one row" in rows["toy empty 0"]["error"]
    assert "value of a row must be JSON, without NaN, but got nan" in rows["toy nan 0"]["error"]
    assert "being ok" in listener.said


def test_a_measured_row_says_what_where_when_and_how(store: Store) -> None:
    case = toy_cases("ok")[0]
    run([case], store)
    plain, double = store.load().rows
    assert (plain["variant"], double["variant"]) == ("plain", "double")
    assert plain["pid"] == double["pid"]  # compared variants share one process
    assert plain["in_bad_fork"] is False
    assert plain["case_key"] == case.key
    assert plain["config"] == dict(case.config)
    assert plain["samples_ms"] == [1.0, 1.01, 1.02, 1.0, 1.01, 1.01]
    assert plain["machine_before"].keys() == plain["machine_after"].keys()
    environments = store.environments()
    assert environments[plain["environment"]]["torch"]["torch"].startswith("2.")
    (invocation,) = store.runs()
    assert invocation["command"] == "toy"
    assert not (store.folder / "artifacts").exists()


def test_timed_rows_say_what_the_timer_itself_takes(store: Store) -> None:
    sleep = experiments.get("attention").cases(
        head_dims=(8,),
        sequences=(16,),
        rep_ms=2,
        max_seconds=0.5,
        variants=("naive",),
        device="cpu",
    )
    run([*sleep, *toy_cases("ok")], store)
    rows = store.load().rows
    assert all(row["timer_overhead_ms"] > 0 for row in rows if row["experiment"] == "attention")
    assert all("timer_overhead_ms" not in row for row in rows if row["experiment"] == "toy")


def test_a_hanging_case_is_ended_and_recorded(store: Store) -> None:
    run(toy_cases("hangs", "ok"), store)
    rows = by_label(store)
    assert rows["toy hangs 0"]["status"] == "timeout"
    assert rows["toy ok 0"]["status"] == "ok"


def test_only_unfinished_cases_run_again(store: Store) -> None:
    cases = toy_cases("ok", "raises", "oom", "skips")
    assert [item.finished for item in runner.plan(cases, store)] == [False] * 4
    assert len(run(cases, store).started) == 4
    again = runner.plan(cases, store)
    assert [item.finished for item in again] == [True, False, True, True]
    assert all(item.seconds is not None for item in again)
    assert run(cases, store).started == ["toy raises 0"]
    assert len(store.load().rows) == 5
    assert len(store.runs()) == 2


def test_another_machine_measures_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = toy_cases("ok")
    run(cases, store)
    monkeypatch.setattr(runner.environment, "fingerprint", lambda description: "elsewhere")
    assert [item.finished for item in runner.plan(cases, store)] == [False]


def test_artifacts_stay_in_the_folder_of_their_case(store: Store) -> None:
    case = toy_cases("artifact")[0]
    run([case], store)
    assert (store.folder / "artifacts" / case.key / "trace.txt").read_text() == "kept"


def test_a_case_given_twice_is_planned_once(store: Store) -> None:
    assert len(runner.plan([*toy_cases("ok"), *toy_cases("ok")], store)) == 1


def test_the_key_depends_on_the_configuration_alone() -> None:
    case = Case(experiment="toy", config={"a": 1, "b": [1, 2], "label": "one"})
    same = Case(experiment="toy", config={"b": [1, 2], "a": 1}, timeout_s=5)
    assert case.key == same.key
    assert case.label == "one"
    assert same.label == "toy b=[1, 2] a=1"
    others = [
        Case(experiment="other", config=same.config),
        Case(experiment="toy", config={"a": 1, "b": [2, 1]}),
        Case(experiment="toy", config={"a": 1.5, "b": [1, 2]}),
    ]
    assert len({case.key, *(other.key for other in others)}) == 4
    with pytest.raises(ValueError, match="JSON"):
        _ = Case(experiment="toy", config={"a": float("nan")}).key
