"""A case that is stopped keeps the rows of its finished rounds, and they pass for nothing more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tools.pages import rows as published

from bench_harness import experiments, options, process, report, rounds, runner
from bench_harness.compare import ComparisonError, compare
from bench_harness.core import Case, Row
from bench_harness.process import Outcome
from bench_harness.progress import ConsoleReporter
from bench_harness.store import Store, kept_rounds

Bench = Callable[..., subprocess.CompletedProcess[str]]


class Stopper:
    """A run's listener that calls a function when the case says that it is at a certain place."""

    def __init__(self, at: str, stop: Callable[[], None]) -> None:
        self.at, self.stop, self.said = at, stop, list[str]()
        self.outcomes: list[Outcome] = []

    def case_started(self, case: Case) -> None: ...

    def case_progress(self, text: str) -> None:
        self.said.append(text)
        if text.startswith(self.at):
            self.stop()

    def case_finished(self, case: Case, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def ctrl_c() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the limit of the running case pass at once, however fast this machine is."""
    later = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0], sleep=time.sleep)
    monkeypatch.setattr(process, "time", clock)

    def passes() -> None:
        later[0] = 1e6

    return passes


def kill_rank_1() -> None:
    """Ends the last rank of the running case, as a machine without memory would."""
    below = psutil.Process().children(recursive=True)
    parents = {child.ppid() for child in below}
    leaves = [child for child in below if child.pid not in parents]
    max(leaves, key=lambda child: (child.create_time(), child.pid)).kill()


def measure(cases: list[Case], store: Store, listener: Stopper) -> None:
    left = [item.case for item in runner.plan(cases, store) if not item.finished]
    runner.run(left, store, listener, invocation={"command": "test"})


def toy_case(**values: Any) -> Case:
    (case,) = experiments.get("toy").cases(kinds=("rounds",), **values)
    return case


def goes_on(store: Store) -> None:
    """Lets the toy's second round end."""
    (store.folder / "go-on").touch()


@pytest.fixture
def store(installed: Path, tmp_path: Path) -> Store:
    return Store(tmp_path / "run")


def lines(store: Store) -> list[Row]:
    return [json.loads(line) for line in store.results.read_text().splitlines()]


IDENTITY: Row = {
    "experiment": "toy",
    "case_key": "k",
    "label": "toy k",
    "environment": "e",
    "commit": None,
    "started": "2026-01-01T00:00:00+00:00",
    "config": {},
}
ROWS = [{"variant": "plain", "samples_ms": [1.0]}, {"variant": "double", "samples_ms": [2.0]}]


def left_by_a_killed_run(store: Store) -> Path:
    folder = store.folder / "artifacts" / "k"
    rounds.prepare(folder, IDENTITY)
    rounds.hand_over(folder, ROWS, finished=1, asked=3)
    rounds.hand_over(folder, ROWS, finished=2, asked=3)
    return folder


def test_what_a_killed_run_left_is_read_at_once_and_moved_by_the_next_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folder = left_by_a_killed_run(store)
    loaded = store.load()
    assert [row["variant"] for row in loaded.rows] == ["plain", "double"]
    for row in loaded.rows:
        assert (row["status"], row["finished_rounds"], row["case_rows"]) == ("partial", 2, 2)
        assert row["error"] == "stopped after 2 of at least 3 rounds"
        assert row["seconds"] > 0
    assert store.finished("e") == set()
    with store.open_for_writing():
        assert not folder.exists()
    assert store.load() == loaded
    assert len(lines(store)) == 2
    with store.open_for_writing() as writer:
        final = {**IDENTITY, "started": "later", "status": "ok", "error": None, "seconds": 1.0}
        writer.append([{**final, "detail": None, **ROWS[0]}])
    assert [row["status"] for row in store.load().rows] == ["ok"]


def test_rows_that_were_stored_before_the_run_was_killed_are_not_doubled(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folder = left_by_a_killed_run(store)
    with store.open_for_writing() as writer:
        left_by_a_killed_run(store)
        done = {**IDENTITY, "status": "ok", "error": None, "detail": None, "seconds": 1.0}
        writer.append([{**done, "started": "later", **row} for row in ROWS])
    with store.open_for_writing():
        assert not folder.exists()
    assert len(lines(store)) == 4
    assert [row["status"] for row in store.load().rows] == ["ok", "ok"]


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"rows": 1}', b'{"rows": [{}]}', b"\xff{"])
def test_a_damaged_file_of_rounds_is_as_good_as_none(tmp_path: Path, damage: bytes) -> None:
    folder = left_by_a_killed_run(Store(tmp_path))
    (folder / "rounds.json").write_bytes(damage)
    assert kept_rounds(folder) == []
    with Store(tmp_path).open_for_writing():
        assert not folder.exists()


def test_nothing_is_kept_without_a_run_or_without_a_variant(tmp_path: Path) -> None:
    rounds.hand_over(tmp_path, ROWS, finished=1, asked=2)
    assert list(tmp_path.iterdir()) == []
    rounds.prepare(tmp_path, IDENTITY)
    ended = {"status": "skipped", "error": "not here"}
    rounds.hand_over(tmp_path, [{"variant": "plain", "ended": ended}], finished=1, asked=2)
    rounds.hand_over(tmp_path, [{"variant": "x", "a": float("nan")}], finished=1, asked=2)
    assert kept_rounds(tmp_path) == []


@pytest.mark.parametrize("how", ["limit", "Ctrl-C"])
def test_a_case_stopped_in_its_second_round_keeps_the_first(
    store: Store, limit: Callable[[], None], how: str
) -> None:
    listener = Stopper("round 2", limit if how == "limit" else ctrl_c)
    if how == "limit":
        measure([toy_case()], store, listener)
        (outcome,) = listener.outcomes
        assert outcome.status == "partial"
        why = "stopped after 1 of at least 2 rounds: still running after 200 s; killed"
        assert outcome.error == why
        assert not (store.folder / "artifacts").exists()
    else:
        with pytest.raises(KeyboardInterrupt):
            measure([toy_case()], store, listener)
        why = "stopped after 1 of at least 2 rounds"
    partial = store.load().rows
    found = [(row["variant"], row["status"], len(row.get("samples_ms", []))) for row in partial]
    assert found == [("plain", "partial", 6), ("double", "partial", 6), ("left out", "skipped", 0)]
    assert [row["error"] for row in partial] == [why, why, "not here"]
    assert not any("go-on" in row or "ended" in row for row in partial)

    goes_on(store)
    measure([toy_case()], store, Stopper("never", ctrl_c))
    rows = store.load().rows
    assert [len(row.get("samples_ms", [])) for row in rows] == [12, 12, 0]
    assert [row["status"] for row in rows] == ["ok", "ok", "skipped"]
    assert not any("finished_rounds" in row for row in rows)
    assert len(lines(store)) == 6, "the partial rows stay in the file, as every attempt does"
    assert not (store.folder / "artifacts").exists()


@pytest.mark.parametrize("how", ["limit", "Ctrl-C"])
def test_a_case_stopped_in_its_first_round_ends_as_any_other(
    store: Store, limit: Callable[[], None], how: str
) -> None:
    case = toy_case(seconds=600.0)
    listener = Stopper("round 1", limit if how == "limit" else ctrl_c)
    if how == "limit":
        measure([case], store, listener)
        (row,) = store.load().rows
        assert (row["status"], row["error"]) == ("timeout", "still running after 200 s; killed")
        assert "variant" not in row
    else:
        with pytest.raises(KeyboardInterrupt):
            measure([case], store, listener)
        assert store.load().rows == []
    assert not (store.folder / "artifacts").exists()


def test_partial_rows_are_shown_as_such_and_neither_compared_nor_published(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["toy", "--kinds", "rounds", "--output", "out"]

    def stop(self: ConsoleReporter, text: str) -> None:
        if text == "round 2":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ConsoleReporter, "case_progress", stop)
        stopped = bench(*arguments)
    assert stopped.returncode == 130
    assert "Stopped: 0 of 1 case kept in out." in stopped.stdout
    said = "Partial rows of toy rounds 0: stopped after 1 of at least 2 rounds; "
    assert said + "bench-harness report out shows them." in stopped.stdout
    assert bench("report", "out").returncode == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert '<td class="partial">partial</td>' in page
    assert "1 of 1 case did not finish, the first: toy rounds 0." in page
    assert "rounds.json" not in page
    assert "to run" in bench(*arguments, "--dry-run").stdout

    stopped = "cases must be complete, but got toy rounds 0, stopped after 1 of"
    with pytest.raises(published.PublishedError, match=stopped):
        published.publish([Store(tmp_path / "out")], tmp_path / "rows.jsonl")
    assert not (tmp_path / "rows.jsonl").exists()
    refused = bench("compare", "out", "out")
    assert refused.returncode == 2
    assert "(4 rows of stopped cases were left out)" in refused.stderr

    goes_on(Store(tmp_path / "out"))
    assert bench(*arguments).returncode == 0
    assert published.publish([Store(tmp_path / "out")], tmp_path / "rows.jsonl") == 1
    assert bench("compare", "out", "out").returncode == 0


def test_a_run_that_is_killed_keeps_finished_rounds(
    command_line: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    command, environment = command_line
    store = Store(tmp_path / "out")
    with subprocess.Popen(
        [*command, "toy", "--kinds", "rounds", "--output", "out"],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as run:
        try:
            deadline = time.monotonic() + 200
            while not store.load().rows and run.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            os.kill(run.pid, signal.SIGKILL)
    assert [row["status"] for row in store.load().rows] == ["partial", "partial", "skipped"]


def training(**more: Any) -> Case:
    """Rounds without end of two variants of a tiny model."""
    experiment = experiments.get("train-step")
    shape = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    subject = {"sizes": ["custom"], "batches": [2], "sequences": [16], **shape}
    turns = {"rounds": 100_000, "blocks": 2, "calls": 1, "warmup": 1, "interval": 0}
    wanted = subject | turns | {"variants": ["flat"], "device": "cpu", "world_size": 2} | more
    (case,) = experiment.cases(**options.build(experiment, wanted))
    return case


@pytest.mark.parametrize("how", ["limit", "Ctrl-C", "a rank dies"])
def test_a_training_case_keeps_the_rounds_that_all_ranks_finished(
    store: Store, limit: Callable[[], None], how: str
) -> None:
    case = training()
    stops = {"limit": limit, "Ctrl-C": ctrl_c, "a rank dies": kill_rank_1}
    listener = Stopper("rank 0: round 3", stops[how])
    if how == "Ctrl-C":
        with pytest.raises(KeyboardInterrupt):
            measure([case], store, listener)
    else:
        measure([case], store, listener)
        assert listener.outcomes[0].status == "partial"
        why = "killed" if how == "limit" else "rank 1 "  # whichever rank is seen to fail first
        assert why in (listener.outcomes[0].error or "")
    said = listener.said
    assert said.index("rank 0: proof: FlatDDP") < said.index("rank 0: round 1: no communication")
    rows = store.load().rows
    assert [row["variant"] for row in rows] == ["no communication", "FlatDDP"]
    finished = rows[0]["finished_rounds"]
    assert finished >= 2  # a round or two may end before it does
    for row in rows:
        assert row["status"] == "partial"
        assert f"stopped after {finished} of at least 100000 rounds" in row["error"]
        assert len(row["samples_ms"]) == len(row["host_ms"]) == 2 * finished
        assert len(row["samples_fastest_rank_ms"]) == 2 * finished, "of all ranks"
        assert len(row["memory"]) == 4
    assert rows[1]["weight_error"] < 1e-2, "proven before it was timed"
    assert [item.finished for item in runner.plan([case], store)] == [False]

    (section,) = report.build(store).sections
    assert section.problems == []
    assert (section.count("partial"), section.figures) == (1, [])
    (steps,) = section.tables
    assert list(steps.frame["finished rounds (count)"]) == [finished] * 2
    assert list(steps.frame["status"]) == ["partial"] * 2
    assert list(steps.frame["samples (count)"]) == [2 * finished] * 2
    assert "of the finished rounds alone" in steps.note
    with pytest.raises(published.PublishedError, match="cases must be complete, but got train-st"):
        published.publish([store], store.folder / "rows.jsonl")
    with pytest.raises(ComparisonError, match="rows of stopped cases were left out"):
        compare(store, store)


def test_a_training_case_stopped_in_its_first_round_has_no_rows(
    store: Store, limit: Callable[[], None]
) -> None:
    measure([training(blocks=10**6)], store, Stopper("rank 0: round 1", limit))
    (row,) = store.load().rows
    assert (row["status"], row["error"]) == ("timeout", "still running after 900 s; killed")
    assert "samples_ms" not in row
