"""Comparing two runs: a verdict with an interval, and refusals."""

from __future__ import annotations

import json
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench_harness.compare import ComparisonError, compare, verdict
from bench_harness.store import Store, StoreError

Bench = Callable[..., subprocess.CompletedProcess[str]]


def store(
    folder: Path, times: dict[str, float], *, environment: str = "e", samples: int = 20
) -> Store:
    """A run with one case per name whose samples scatter by 1 % around a time."""
    noise = np.random.default_rng(len(times) + samples).normal(1.0, 0.01, samples)
    run = Store(folder)
    with run.open_for_writing() as writer:
        for name, time in times.items():
            row = {
                "case_key": name,
                "experiment": "toy",
                "label": f"toy {name}",
                "status": "ok",
                "environment": environment,
                "started": "t0",
                "commit": None,
                "seconds": 1.0,
                "config": {},
                "error": None,
                "detail": None,
                "variant": "plain fp32",
                "phase": "plain step",
                "samples_ms": list(time * noise),
            }
            writer.append([row, {**row, "phase": "forward"}])
    return run


def test_verdicts_follow_the_interval(tmp_path: Path) -> None:
    a = store(tmp_path / "a", {"one": 10.0, "two": 10.0, "three": 10.0, "four": 10.0})
    b = store(tmp_path / "b", {"one": 8.0, "two": 13.0, "three": 10.05, "five": 1.0})
    found = compare(a, b)
    assert [(each.label, each.verdict) for each in found[::2]] == [
        ("toy one", "faster"),
        ("toy two", "slower"),
        ("toy three", "same"),
    ]
    assert [each.variant for each in found[:2]] == ["plain fp32 step", "plain fp32 forward"]
    first = found[0]
    assert first.low is not None
    assert first.high is not None
    assert first.low <= first.ratio <= first.high
    assert first.ratio == pytest.approx(0.8, rel=0.01)


def test_a_run_is_the_same_as_itself(tmp_path: Path) -> None:
    a = store(tmp_path / "a", {"one": 10.0})
    assert {each.verdict for each in compare(a, a)} == {"same"}


def test_two_samples_decide_nothing(tmp_path: Path) -> None:
    a = store(tmp_path / "a", {"one": 10.0}, samples=2)
    b = store(tmp_path / "b", {"one": 20.0}, samples=2)
    found = compare(a, b)
    assert {(each.verdict, each.low, each.samples_needed) for each in found} == {
        ("cannot tell", None, 5)
    }


def measured(folder: Path, samples: list[float]) -> Store:
    """A run of one row with these samples."""
    run = store(folder, {"one": 1.0}, samples=len(samples))
    line = json.loads(run.results.read_text().splitlines()[0])
    run.results.write_text(json.dumps({**line, "case_rows": 1, "samples_ms": samples}) + "\n")
    return run


@pytest.mark.parametrize(
    ("first", "second", "needed"),
    [
        # Five samples of the same code, of which one run had to share its machine.
        ([1.0, 1.3, 1.1, 1.2, 1.0], [1.1, 30.0, 24.9, 1.0, 31.0], None),
        # Medians 20 % apart, and as much overlap as steady samples can have.
        ([10.0, 10.1, 10.2, 12.0, 10.0, 10.1], [10.0, 12.0, 12.1, 12.0, 12.1, 10.1], range(7, 99)),
        # Steady and apart, but so few that chance does the same in one of ten.
        ([10.0, 10.1, 10.0], [12.0, 12.1, 12.0], range(5, 6)),
    ],
)
def test_unstable_or_overlapping_samples_cannot_tell(
    bench: Bench, tmp_path: Path, first: list[float], second: list[float], needed: range | None
) -> None:
    a, b = measured(tmp_path / "a", first), measured(tmp_path / "b", second)
    (found,) = compare(a, b)
    assert found.verdict == "cannot tell"
    if needed is not None:
        assert found.samples_needed in needed
        shown = bench("compare", "a", "b").stdout
        assert "needs: so many samples in each run would probably tell" in shown
        assert str(found.samples_needed) in shown.split()
    assert bench("compare", "a", "b", "--fail-on", "slower").returncode == 0


def test_the_number_of_samples_asked_for_decides(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)

    def run(name: str, center: float, count: int) -> Store:
        return measured(tmp_path / name, list(rng.normal(center, 0.05 * center, count)))

    (few,) = compare(run("a", 10.0, 8), run("b", 10.9, 8))
    assert few.verdict == "cannot tell"
    assert few.samples_needed is not None
    count = 2 * few.samples_needed
    (many,) = compare(run("c", 10.0, count), run("d", 10.9, count))
    assert many.verdict == "slower"


def test_millions_of_samples_need_little_memory(tmp_path: Path) -> None:
    from bench_harness.stats import ratio_interval, summarize

    samples = np.random.default_rng(0).normal(10.0, 0.1, 200_000)
    tracemalloc.start()
    ratio, low, high = ratio_interval(samples * 1.1, samples)
    summary = summarize(samples)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 400 << 20
    assert low is not None
    assert high is not None
    assert 1.0995 < low < ratio < high < 1.1005
    # A median's standard error is 1.2533 σ / √n; the interval is 3.92 of them wide.
    width = summary["ci_high"] - summary["ci_low"]
    assert width == pytest.approx(3.92 * 1.2533 * 0.1 / 200_000**0.5, rel=0.15)


@pytest.mark.parametrize(
    ("fail_on", "code"),
    [("slower", 1), ("slower:20", 1), ("slower:40", 0), ("slower:0", 1), (None, 0)],
)
def test_a_slower_row_fails_where_asked(
    bench: Bench, tmp_path: Path, fail_on: str | None, code: int
) -> None:
    store(tmp_path / "a", {"one": 10.0, "two": 10.0})
    store(tmp_path / "b", {"one": 13.0, "two": 9.0})
    options = [] if fail_on is None else ["--fail-on", fail_on]
    assert bench("compare", "a", "b", *options).returncode == code


def test_a_comparison_is_printed_for_machines_and_for_pull_requests(
    bench: Bench, tmp_path: Path
) -> None:
    store(tmp_path / "a", {"one": 10.0, "two": 10.0})
    store(tmp_path / "b", {"one": 13.0, "two": 10.0})
    found = json.loads(bench("compare", "a", "b", "--json").stdout)
    assert [each["verdict"] for each in found] == ["slower", "slower", "same", "same"]
    text = bench("compare", "a", "b", "--markdown").stdout
    assert text.startswith("2 same, 2 slower\n\n| case |")
    assert "toy two" not in text
    assert bench("compare", "a", "a", "--markdown").stdout == "4 same\n"


@pytest.mark.parametrize("text", ["faster", "slower:much", "slower:-1", "slower:nan"])
def test_an_unknown_limit_is_one_line(bench: Bench, tmp_path: Path, text: str) -> None:
    store(tmp_path / "a", {"one": 10.0})
    done = bench("compare", "a", "a", "--fail-on", text)
    assert done.returncode == 2
    assert "--fail-on must be slower or slower:PERCENT" in done.stderr


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.80, 0.94, "faster"),
        (0.80, 0.96, "cannot tell"),
        (0.96, 1.04, "same"),
        (0.96, 1.06, "cannot tell"),
        (1.06, 1.10, "slower"),
        (0.50, 2.00, "cannot tell"),
        (None, None, "cannot tell"),
    ],
)
def test_the_tolerance_surrounds_one(low: float, high: float, expected: str) -> None:
    assert verdict(low, high, 0.05) == expected


def test_different_hardware_is_refused_or_marked(tmp_path: Path) -> None:
    a = store(tmp_path / "a", {"one": 10.0})
    b = store(tmp_path / "b", {"one": 5.0}, environment="other")
    with pytest.raises(ComparisonError, match=r"different ones for 2 of 2\. Add --across-hardware"):
        compare(a, b)
    found = compare(a, b, across_hardware=True)
    assert [(each.verdict, each.same_hardware) for each in found] == [("faster", False)] * 2


def test_runs_without_a_common_case_are_refused(tmp_path: Path) -> None:
    a, b = store(tmp_path / "a", {"one": 1.0}), store(tmp_path / "b", {"two": 1.0})
    with pytest.raises(ComparisonError, match="must have a case in common"):
        compare(a, b)
    with pytest.raises(StoreError, match="must be a run folder"):
        compare(a, Store(tmp_path / "c"))
