"""Which cases a run takes, and which folder: resumed while unfinished, new once finished."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench_harness import experiments, runner, session
from bench_harness.core import Case
from bench_harness.process import Outcome
from bench_harness.runner import Planned
from bench_harness.terminal import ConsoleReporter, RemainingTime, duration


def case(name: str, experiment: str = "toy") -> Case:
    config = {"name": name, "label": f"{experiment} {name}"}
    return Case(experiment=experiment, config=config)


def test_only_names_experiments_or_parts_of_labels() -> None:
    cases = [case("small"), case("large"), case("small", "other")]
    assert session.select(cases, []) == cases
    assert session.select(cases, ["small"]) == [cases[0], cases[2]]
    assert session.select(cases, ["other", "large"]) == cases[1:]
    with pytest.raises(ValueError, match=r"experiments toy, other or .* but got 'medium'"):
        session.select(cases, ["large", "medium"])


def test_the_same_command_resumes_then_repeats(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    console = Console(file=io.StringIO(), width=80)
    toy = experiments.get("toy")

    def run(*kinds: str) -> bool:
        request = session.Request(name="toy", cases=toy.cases(kinds=kinds), options=[], command=[])
        return session.measure(request, console, tables=True)

    assert run("ok") is True
    assert run("ok") is True  # finished, so measured again beside the first
    assert run("raises", "ok") is False  # other cases: a run of its own
    assert run("raises", "ok") is False  # unfinished: the same folder
    assert sorted(folder.name for folder in Path("runs").iterdir()) == [
        "toy-01",
        "toy-02",
        "toy-03",
    ]
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 of 2 cases left" in output
    assert all(len(line) <= 80 for line in output.splitlines())


def test_what_a_case_takes_is_known_before_its_first_run(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("psutil.getloadavg", lambda: (0.0, 0.0, 0.0))
    file = io.StringIO()
    quick = experiments.get("allreduce").cases(device="cpu", world_sizes=(2,), max_seconds=3.0)
    toy = experiments.get("toy").cases(kinds=("ok",))

    def dry_run(cases: list[Case]) -> str:
        request = session.Request(name="mine", cases=cases, options=[], command=[])
        session.dry_run(request, Console(file=file, width=80))
        return file.getvalue().splitlines()[-1]

    # 5 seconds of measurements, and 8 for torch and the report.
    assert "1 of 1 case to run, about 13.0 s by calculation, into runs/mine-01" in dry_run(quick)
    monkeypatch.setattr("psutil.getloadavg", lambda: (1e3, 0.0, 0.0))
    assert "by calculation (the CPU is busy), into" in dry_run(quick)
    assert "at most" in dry_run(toy), "nothing is known of an experiment that does not say"
    request = session.Request(name="mine", cases=toy, options=[], command=[])
    assert session.measure(request, Console(file=io.StringIO(), width=80), tables=False)
    assert "by calculation" not in dry_run(toy)
    assert "to run, about " in dry_run(toy), "as the run before"


SMALL: dict[str, Any] = {"sizes": ("small",), "device": "cpu"}
TWO_RANKS: dict[str, Any] = {"world_sizes": (2,), "variants": ("flat", "bucketed"), "device": "cpu"}
CUSTOM: dict[str, Any] = {
    "sizes": ("custom",),
    "d_model": 256,
    "d_ff": 1024,
    "num_layers": 4,
    "num_heads": 4,
}


@pytest.mark.parametrize(
    ("name", "options", "took"),
    [
        ("memory", {**SMALL, "sequences": (128,), "modes": ("forward",)}, 1.8),
        ("memory", {**SMALL, "sequences": (128,), "modes": ("step",)}, 4.1),
        ("memory", {**SMALL, "sequences": (512,), "modes": ("forward",)}, 4.0),
        ("memory", {**SMALL, "sequences": (512,), "modes": ("step",)}, 11.4),
        ("memory", {**CUSTOM, "device": "cpu", "sequences": (128,), "modes": ("step",)}, 0.7),
        ("profile", {**SMALL, "sequences": (128,)}, 13.9),
        ("profile", {**SMALL, "sequences": (512,)}, 87.4),
        ("profile", {**CUSTOM, "device": "cpu", "sequences": (128,)}, 1.6),
        ("train-step", {**CUSTOM, **TWO_RANKS, "sequences": (64,)}, 45.0),
        (
            "train-step",
            {**SMALL, **TWO_RANKS, "batches": (1,), "sequences": (64,)}
            | {"rounds": 1, "blocks": 2, "calls": 1, "warmup": 1, "interval": 0.0},
            30.0,
        ),
    ],
)
def test_what_cases_take_on_a_cpu_is_known_within_a_factor_of_two(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], took: float
) -> None:
    """As measured on two cores; of training steps, half of what two busy programs needed."""
    monkeypatch.setattr("psutil.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    precisions = {"precisions": ("fp32",)} if name == "memory" else {}
    (found,) = experiments.get(name).cases(**{**options, **precisions})
    seconds = runner._expected_s(found)
    print(f"{seconds:.1f} s expected, {took} s taken")
    assert seconds is not None
    assert 0.5 * took <= seconds <= 2 * took


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (65, "1 min 05 s"), (7800, "2 h 10 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_remaining_time_learns_from_the_cases_that_ran() -> None:
    cases = [case("a"), case("b"), case("c", "other"), case("d")]
    known = [10.0, None, None, None]
    planned = [Planned(each, False, s) for each, s in zip(cases, known, strict=True)]
    remaining = RemainingTime(planned)
    assert remaining.seconds() == 40.0  # unknown ones count as typical
    remaining.finished(cases[1], 2.0)
    assert remaining.seconds() == 10.0 + 2.0 + (10.0 + 2.0 + 2.0) / 3
    assert RemainingTime([Planned(cases[1], False, None)]).seconds() is None
    assert RemainingTime([Planned(cases[1], True, None)]).seconds() == 0.0


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_are_cut_on_a_terminal_and_whole_in_a_file(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=terminal, color_system=None)
    long = case("x" * 100)
    with ConsoleReporter(console, [Planned(long, False, None)]) as reporter:
        reporter.case_started(long)
        reporter.case_progress("half way")
        outcome = Outcome(status="error", error="it broke", seconds=1.25)
        reporter.case_finished(long, outcome)
    assert "error" in file.getvalue()
    assert "it broke" in file.getvalue()
    assert ("x" * 100 in file.getvalue()) is not terminal


def test_the_bar_moves_inside_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time that the case took before."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    planned = [Planned(case("a"), False, 10.0), Planned(case("b"), False, 20.0)]
    with ConsoleReporter(Console(file=io.StringIO(), width=80), planned) as reporter:
        reporter.case_started(case("a"))
        now[0] += 4
        reporter.case_progress("round 2")
        (task,) = reporter._live.tasks
        assert task.completed == pytest.approx(0.4)
        assert task.fields["left"] == "4.0 s elapsed, about 26.0 s left"
        now[0] += 96
        reporter.case_progress("round 3")
        assert task.completed == pytest.approx(0.99), "a case that takes longer is not done"
        reporter.case_finished(case("a"), Outcome(status="ok", value={"rows": []}, seconds=100.0))
        assert task.completed == 1
        assert task.fields["left"].endswith("about 20.0 s left")


def test_a_variant_that_was_not_measured_is_named_below_its_case() -> None:
    file = io.StringIO()
    skipped = {"variant": "b", "ended": {"status": "skipped", "error": "b must be installed"}}
    value: Any = {"rows": [{"variant": "a", "samples_ms": [1.0]}, skipped]}
    with ConsoleReporter(Console(file=file, width=80), [Planned(case("x"), False, None)]) as shown:
        shown.case_finished(case("x"), Outcome(status="ok", value=value, seconds=1.0))
    first, second = file.getvalue().splitlines()
    assert first.split()[:2] == ["[1/1]", "ok"]
    assert first.endswith(" without 1 variant")
    assert second.strip() == "b skipped: b must be installed"


@pytest.mark.parametrize("terminal", [True, False])
def test_each_rank_has_a_line_on_a_terminal_and_none_in_a_log(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=terminal, color_system=None)
    with ConsoleReporter(console, [Planned(case("a"), False, None)]) as reporter:
        reporter.case_started(case("a"))
        reporter.case_progress("starting 2 ranks")
        reporter.case_progress("rank 1: round 1")
        reporter.case_progress("rank 0: round 1")
        reporter.case_progress("rank 1: turn 2")
        reporter._live.refresh()
        shown = [line.strip() for line in file.getvalue().splitlines()]
        at_once = [line for line in shown if "rank" in line][-2:]
        reporter.case_finished(case("a"), Outcome(status="ok", value={"rows": []}, seconds=1.0))
    if terminal:
        first, second = at_once
        assert first.endswith("rank 0: round 1")
        assert second.endswith("rank 1: turn 2")
    else:
        assert "rank" not in file.getvalue()
