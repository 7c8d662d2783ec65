"""Comparing two runs: a verdict with an interval, and refusals."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench_harness.compare import ComparisonError, Comparisons, Gate, compare
from bench_harness.store import Store, StoreError
from bench_harness.verdict import judge

Bench = Callable[..., subprocess.CompletedProcess[str]]


def store(
    folder: Path,
    times: dict[str, float],
    *,
    environment: str = "e",
    samples: int = 20,
    **more: object,
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
                "started": f"in {folder.name}",
                "commit": None,
                "seconds": 1.0,
                "config": {},
                "error": None,
                "detail": None,
                "variant": "plain fp32",
                "phase": "plain step",
                "samples_ms": list(time * noise),
                **more,
            }
            writer.append([row, {**row, "phase": "forward"}])
    return run


def found_rows(found: Comparisons) -> list[tuple[str, str]]:
    return [(each.label, str(each.verdict)) for each in found.rows]


def test_verdicts_follow_the_interval(tmp_path: Path) -> None:
    a = store(tmp_path / "a", {"one": 10.0, "two": 10.0, "three": 10.0, "four": 10.0})
    b = store(tmp_path / "b", {"one": 8.0, "two": 13.0, "three": 10.05, "five": 1.0})
    found = compare(a, b)
    assert found_rows(found)[::2] == [
        ("toy one", "faster, sure"),
        ("toy two", "slower, sure"),
        ("toy three", "same, sure"),
    ]
    assert [each.variant for each in found.rows[:2]] == ["plain fp32 step", "plain fp32 forward"]
    first = found.rows[0].verdict
    assert first.low is not None
    assert first.high is not None
    assert first.low <= first.ratio <= first.high
    assert first.ratio == pytest.approx(0.8, rel=0.01)


def test_a_case_of_one_run_alone_is_named_and_closes_the_gate(bench: Bench, tmp_path: Path) -> None:
    a = store(tmp_path / "a", {"one": 10.0, "four": 10.0})
    b = store(tmp_path / "b", {"one": 10.0, "five": 1.0})
    found = compare(a, b)
    assert (found.only_a, found.only_b) == (["toy: toy four"], ["toy: toy five"])
    done = bench("compare", "a", "b", "--fail-on", "slower")
    assert done.returncode == 1
    assert "Only A has toy: toy four" in done.stdout
    assert "Gate: FAIL, 2 cases in one run alone" in done.stdout
    assert bench("compare", "a", "b").returncode == 0


def test_a_case_that_failed_in_one_run_is_named_with_how(bench: Bench, tmp_path: Path) -> None:
    store(tmp_path / "a", {"one": 10.0, "two": 10.0})
    b = store(tmp_path / "b", {"one": 10.0, "two": 10.0})
    lines = [json.loads(line) for line in b.results.read_text().splitlines()]
    failed = {**lines[2], "status": "oom", "case_rows": 1, "samples_ms": None}
    b.results.write_text("".join(json.dumps(line) + "\n" for line in [*lines[:2], failed]))
    done = bench("compare", "a", "b", "--fail-on", "slower")
    assert done.returncode == 1
    assert "Only A has toy: toy two (there: oom)" in done.stdout


def test_a_row_that_its_case_lacks_in_the_other_run_is_named(tmp_path: Path) -> None:
    a, b = (store(tmp_path / name, {"one": 10.0}) for name in ("a", "b"))
    line = json.loads(b.results.read_text().splitlines()[0])
    b.results.write_text(json.dumps({**line, "case_rows": 1}) + "\n")
    found = compare(a, b)
    assert (found.only_a, found.only_b) == (["toy: toy one: plain fp32 forward"], [])
    assert Gate.parse("slower").failures(found) == ["1 case in one run alone"]


def test_equal_samples_are_the_same(tmp_path: Path) -> None:
    a, b = (store(tmp_path / name, {"one": 10.0}) for name in "ab")
    assert {str(each.verdict) for each in compare(a, b).rows} == {"same, sure"}


def test_a_run_beside_itself_or_its_copy_passes_no_gate(bench: Bench, tmp_path: Path) -> None:
    """As where a cached baseline lies in the output folder, and nothing is left to measure."""
    a = store(tmp_path / "a", {"one": 10.0, "two": 10.0})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    more = store(tmp_path / "more", {"three": 10.0}).results
    with (tmp_path / "b" / "results.jsonl").open("a") as file:
        file.write(more.read_text())
    for other in ("a", "b", "./a/"):
        done = bench("compare", "a", other, "--fail-on", "slower")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(
            "bench-harness: A and B must be two measurements, but got the same one for 4 of 4 rows."
        )
    with (tmp_path / "a" / "results.jsonl").open("a") as file:
        file.write(store(tmp_path / "again", {"three": 11.0}).results.read_text())
    with pytest.raises(ComparisonError, match="the same one for 4 of 6 rows"):
        compare(a, Store(tmp_path / "b"))


def test_two_samples_decide_nothing_below_twofold(bench: Bench, tmp_path: Path) -> None:
    a = store(tmp_path / "a", {"one": 10.0}, samples=2)
    b = store(tmp_path / "b", {"one": 20.0}, samples=2)
    for each in compare(a, b).rows:
        verdict = each.verdict
        assert (verdict.direction, verdict.low, verdict.samples_needed) == ("cannot tell", None, 5)
        assert verdict.reasons == ("A has 2 samples", "B has 2 samples")
    assert bench("compare", "a", "b", "--fail-on", "slower").returncode == 0
    assert bench("compare", "a", "b", "--fail-on", "slower,unsure").returncode == 1
    for count in (1, 2):
        slow = judge([10.0, 10.1][:count], [30.0, 31.0][:count])
        assert str(slow) == "slower, unsteady"
        assert slow.slower_by(1.5)
        assert not slow.slower_by(2.1)


def test_an_edit_that_was_taken_back_is_not_what_is_compared(bench: Bench, tmp_path: Path) -> None:
    """The slow code was measured first; the command that followed the fast one asks for it again,
    and finds it finished. A gate must not judge the fast one instead."""
    a = store(tmp_path / "a", {"one": 10.0}, config={"user_code": 0})
    b, slow = Store(tmp_path / "b"), {"case_key": "slow", "config": {"user_code": 1}}
    store(b.folder, {"one": 20.0}, **slow)
    store(b.folder, {"one": 10.0}, case_key="fast", config={"user_code": 2}, started="later")
    assert found_rows(compare(a, b)) == [("toy one", "same, sure")] * 2, (
        "the last that was measured"
    )
    (b.folder / "run.json").write_text('[{"started": "", "command": "", "cases": ["slow"]}]')
    assert found_rows(compare(a, b)) == [("toy one", "slower, sure")] * 2
    assert bench("compare", "a", "b", "--fail-on", "slower").returncode == 1


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
        # Apart, but by less than either scatters: chance does the same in one of ten.
        ([10.0, 10.1, 11.0], [12.0, 12.1, 13.2], range(5, 99)),
    ],
)
def test_unstable_or_overlapping_samples_cannot_tell(
    bench: Bench, tmp_path: Path, first: list[float], second: list[float], needed: range | None
) -> None:
    a, b = measured(tmp_path / "a", first), measured(tmp_path / "b", second)
    (found,) = compare(a, b).rows
    assert found.verdict.direction == "cannot tell"
    assert found.verdict.reasons
    if needed is not None:
        assert found.verdict.samples_needed in needed
        shown = bench("compare", "a", "b").stdout
        assert f"About {found.verdict.samples_needed} samples in each run" in shown
    assert bench("compare", "a", "b", "--fail-on", "slower").returncode == 0
    assert bench("compare", "a", "b", "--fail-on", "slower,unsure").returncode == 1


def clock_step(milliseconds: float) -> list[float]:
    """Forty samples, of which the second half is 10 % slower."""
    return [milliseconds * (1 + 0.1 * (i >= 20) + 0.001 * (i % 5)) for i in range(40)]


def test_samples_that_are_three_times_as_slow_close_the_gate_however_they_drift(
    bench: Bench, tmp_path: Path
) -> None:
    a, b = measured(tmp_path / "a", clock_step(10.0)), measured(tmp_path / "b", clock_step(30.0))
    (found,) = compare(a, b).rows
    assert str(found.verdict) == "slower, unsteady"
    assert found.verdict.reasons == ("A drifts by +10 %", "B drifts by +10 %")
    done = bench("compare", "a", "b", "--fail-on", "slower")
    assert done.returncode == 1
    assert "Gate: FAIL, 1 row slower" in done.stdout
    assert "Not sure: A drifts by +10 %" in done.stdout
    assert bench("compare", "b", "a", "--fail-on", "slower,unsure").returncode == 0


def test_a_difference_that_drift_explains_is_no_direction() -> None:
    found = judge(clock_step(10.0), clock_step(10.8))
    assert str(found) == "cannot tell"
    assert found.samples_needed is None, "more samples of a machine that drifts do not help"


def test_few_samples_that_lie_far_apart_have_a_direction_that_is_not_sure() -> None:
    found = judge([10.0, 10.1, 10.0], [12.0, 12.1, 12.0])
    assert str(found) == "slower, unsteady"
    assert found.reasons == ("A has 3 samples", "B has 3 samples")
    assert found.slower_by(0.05)


def test_no_outlier_hides_samples_that_are_twice_as_slow_in_every_case() -> None:
    found = judge([0.05, 0.05, 0.06, 0.05, 2.0, 0.05], [100.0, 101.0, 100.0, 100.0, 150.0, 100.0])
    assert found.direction == "slower"
    assert not found.sure
    assert found.slower_by(4.0)


def test_a_small_steady_difference_is_a_verdict_that_the_gate_lets_pass() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(10.0, 0.05, 40).tolist(), rng.normal(10.2, 0.05, 40).tolist()
    found = judge(a, b)
    assert str(found) == "slower, sure"
    assert found.slower_by(0.01)
    assert not found.slower_by(0.05)
    assert not found.may_be_slower_by(0.05)
    assert str(judge(b, a)) == "faster, sure"


NOISE = {
    "1 %": lambda rng: 10 * np.exp(0.01 * rng.standard_normal(20)),
    "15 %": lambda rng: 10 * np.exp(0.15 * rng.standard_normal(20)),
    "outliers": lambda rng: (
        10 * np.exp(0.03 * rng.standard_normal(20)) * np.where(rng.random(20) < 0.1, 2, 1)
    ),
}


def wandering(rng: np.random.Generator, count: int) -> list[float]:
    """Samples of a machine whose level wanders by 10 %, slowly (autoregressive, 0.95)."""
    level, found = float(rng.standard_normal()), []
    for _ in range(count):
        level = 0.95 * level + (1 - 0.95**2) ** 0.5 * float(rng.standard_normal())
        found.append(10 * float(np.exp(0.1 * level)))
    return found


@pytest.mark.parametrize(("count", "directions"), [(5, 15), (20, 5), (60, 5)])
def test_a_machine_that_wanders_decides_no_build(count: int, directions: int) -> None:
    """Without the rule, two of three pairs of five samples had a direction."""
    rng = np.random.default_rng(11)
    found = [judge(wandering(rng, count), wandering(rng, count)) for _ in range(60)]
    assert sum(each.direction in ("faster", "slower") for each in found) <= directions
    assert sum(each.slower_by(0.05) for each in found) <= 5
    slow = judge(wandering(rng, 60), [3 * sample for sample in wandering(rng, 60)])
    assert slow.slower_by(0.05), "three times as slow is beyond any wander"


def test_samples_that_resemble_their_neighbours_count_as_fewer() -> None:
    from bench_harness.verdict import effective

    rng = np.random.default_rng(12)
    assert effective(rng.standard_normal(100).tolist()) == 100
    assert effective(wandering(rng, 400)) < 40
    waves = [10 + np.sin(i / 3) for i in range(60)]
    (reason,) = {each for each in judge(waves, [10.0] * 60).reasons if "count" in each}
    assert re.fullmatch(r"A wanders, so its 60 samples count as \d", reason)


@pytest.mark.parametrize("noise", NOISE)
def test_equal_code_seldom_has_a_direction_and_never_closes_the_gate(noise: str) -> None:
    """The rate is the rank test's; tools/verdict_errors.py has more noises and counts."""
    rng = np.random.default_rng(7)
    found = [judge(NOISE[noise](rng).tolist(), NOISE[noise](rng).tolist()) for _ in range(100)]
    assert sum(each.direction in ("faster", "slower") for each in found) <= 4
    assert sum(each.slower_by(0.05) for each in found) <= 1


@pytest.mark.parametrize("noise", ["1 %", "outliers"])
def test_a_slow_down_is_seldom_missed(noise: str) -> None:
    rng = np.random.default_rng(8)
    found = [
        judge(NOISE[noise](rng).tolist(), (1.2 * NOISE[noise](rng)).tolist()) for _ in range(40)
    ]
    assert sum(each.slower_by(0.05) for each in found) >= 36


def test_another_clock_throttling_and_controls_leave_nothing_sure(tmp_path: Path) -> None:
    def machine(clock: int, *reasons: str) -> dict[str, object]:
        return {"gpus": [{"sm_clock_mhz": clock, "throttle_reasons": list(reasons)}]}

    before = {"machine_before": machine(345), "machine_after": machine(1980)}
    after = {"machine_before": machine(1980), "machine_after": machine(1410, "power limit")}
    a = store(tmp_path / "a", {"one": 10.0}, **before, ceiling_tflop_s=700.0, peak_gib=10.0)
    b = store(tmp_path / "b", {"one": 13.0}, **after, ceiling_tflop_s=500.0, peak_gib=20.0)
    found = compare(a, b).rows[0]
    assert str(found.verdict) == "slower, unsteady"
    assert found.verdict.reasons == (
        "control: matrix products +40 % in time",
        "B was throttled (power limit)",
        "clock 1980 → 1410 MHz",
    )
    assert found.changed == ("peak (GiB) 10 → 20",)


def test_what_really_ran_is_named_where_it_changed(tmp_path: Path) -> None:
    a = store(tmp_path / "a", {"one": 10.0}, ran="cudnn")
    b = store(tmp_path / "b", {"one": 13.0}, ran="math")
    assert compare(a, b).rows[0].changed == ("ran cudnn → math",)


def test_kernels_that_changed_are_named_by_time(tmp_path: Path) -> None:
    def run(name: str, time: float) -> Store:
        made = store(tmp_path / name, {"one": 10.0})
        line = json.loads(made.results.read_text().splitlines()[0])
        rows = [line, {**line, "phase": "backward", "kernel": "gemm", "total_ms": time,
                       "samples_ms": None}]  # fmt: skip
        made.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return made

    assert compare(run("a", 2.0), run("b", 5.0)).kernels == ["gemm (backward) 2 → 5 ms"]
    assert compare(run("c", 2.0), run("d", 2.01)).kernels == []


def test_a_page_shows_the_verdict_what_changed_and_both_timelines(
    bench: Bench, rank: object, tmp_path: Path
) -> None:
    """The row with the largest sure difference is the title; a wrapper's own account of itself
    tells no row from another."""

    def run(name: str, time: float, own: str) -> None:
        timeline = {"drawn": 0, "ranks": [rank]}
        parts = {"matrix products": 4.0, "<b>copies</b>": time - 4.0}
        own_words = {"variant": "plain <i>fp32</i>", "explained": own}
        times = {"one": time, "two": 10.0}
        store(tmp_path / name, times, **own_words, timeline=timeline, waterfall=parts)

    run("a", 10.0, "old words")
    run("b", 8.0, "new words")
    done = bench("compare", "a", "b", "--page", "page.html", "--json", "--fail-on", "slower")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert [row["verdict"] for row in found["rows"]] == ["faster", "faster", "same", "same"]
    assert found["rows"][0]["parts"]["matrix products"] == [4.0, 4.0]
    assert "timelines" not in found
    page = (tmp_path / "page.html").read_text()
    assert "<h1>B is 20.0 % faster, sure: 9.959 → 7.967 ms for plain &lt;i&gt;fp32" in page
    assert "<dd>&lt;b&gt;copies&lt;/b&gt;<small>6 → 4 ms</small>" in page
    assert "<dd>4<small>2 faster, sure, 2 same, sure</small>" in page
    assert "<dd>passes<small>" in page
    held = re.search(r'<script type="application/json">(.*)</script>', page)
    assert held is not None
    lines = json.loads(held[1])
    assert len(lines) == 8
    assert next(iter(lines)) == "A: toy one: plain <i>fp32</i> step"
    assert page.count("<i>fp32") == page.count("<b>copies") == 0


def test_a_page_says_what_nobody_can_tell_and_leaves_out_a_wrong_timeline(
    bench: Bench, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        store(tmp_path / name, {"one": 10.0}, samples=2, timeline={"ranks": [3]})
    done = bench("compare", "a", "b", "--page", "page.html", "--fail-on", "slower,unsure")
    assert done.returncode == 1
    page = (tmp_path / "page.html").read_text()
    assert "<h1>Cannot tell whether B is faster or slower than A: " in page
    assert "Could not be shown: timeline must hold the ranks of a step" in page
    assert "<dd>fails<small>2 rows not sure" in page
    for name in ("c", "d"):
        store(tmp_path / name, {"one": 10.0})
    assert bench("compare", "c", "d", "--page", "page.html").returncode == 0
    assert "<h1>B takes as long as A: 10" in (tmp_path / "page.html").read_text()


def test_the_number_of_samples_asked_for_decides(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)

    def run(center: float, count: int) -> list[float]:
        return rng.normal(center, 0.05 * center, count).tolist()

    few = judge(run(10.0, 8), run(10.4, 8))
    assert str(few) == "cannot tell"
    assert few.samples_needed is not None
    count = 4 * few.samples_needed
    assert str(judge(run(10.0, count), run(10.4, count))) == "slower, sure"


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
    found = json.loads(bench("compare", "a", "b", "--json", "--fail-on", "slower").stdout)
    assert [each["verdict"] for each in found["rows"]] == ["slower", "slower", "same", "same"]
    assert {each["sure"] for each in found["rows"]} == {True}
    assert (found["only_a"], found["gate"]) == ([], ["2 rows slower"])
    text = bench("compare", "a", "b", "--markdown").stdout
    assert text.startswith("2 same, sure, 2 slower, sure\n\n| case |")
    assert "toy two" not in text
    store(tmp_path / "c", {"one": 10.0, "two": 10.0})
    assert bench("compare", "a", "c", "--markdown").stdout == "4 same, sure\n"


def test_the_terminal_shows_a_label_once_and_a_line_for_each_row(
    bench: Bench, tmp_path: Path
) -> None:
    store(tmp_path / "a", {"one": 10.0, "two": 10.0})
    store(tmp_path / "b", {"one": 13.0, "two": 0.4})
    lines = bench("compare", "a", "b").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if "toy one" in line] == ["toy: toy one"]
    assert sum("slower, sure" in line for line in lines) == 2 + 1
    (step,) = [line for line in lines if "step" in line and "slower" in line]
    assert step.split()[:3] == ["plain", "fp32", "step"]
    assert "+30.0 % [+2" in step


@pytest.mark.parametrize(
    "text",
    ["faster", "slower:much", "slower:-1", "slower:nan", "slower,sure", "unsure", "slower:inf"],
)
def test_an_unknown_limit_is_one_line(bench: Bench, tmp_path: Path, text: str) -> None:
    store(tmp_path / "a", {"one": 10.0})
    done = bench("compare", "a", "a", "--fail-on", text)
    assert done.returncode == 2
    assert "--fail-on must be slower or slower:PERCENT" in done.stderr


def test_different_hardware_is_refused_or_marked(bench: Bench, tmp_path: Path) -> None:
    a = store(tmp_path / "a", {"one": 10.0})
    b = store(tmp_path / "b", {"one": 5.0}, environment="other")
    known = {"cpu": "x", "packages": {"torch": "2.11"}, "gpus": []}
    (tmp_path / "a" / "env.json").write_text(json.dumps({"e": {**known, "torch_threads": 2}}))
    (tmp_path / "b" / "env.json").write_text(json.dumps({"other": {**known, "torch_threads": 1}}))
    with pytest.raises(
        ComparisonError, match=r"ones for 2 of 2: torch_threads 2 → 1\. Add --across-hardware"
    ):
        compare(a, b)
    assert bench("compare", "a", "b", "--fail-on", "slower").returncode == 2
    found = compare(a, b, across_hardware=True)
    assert found.environment == ["torch_threads 2 → 1"]
    assert [(str(each.verdict), each.same_environment) for each in found.rows] == [
        ("faster, unsteady", False)
    ] * 2
    shown = bench("compare", "a", "b", "--across-hardware").stdout
    assert "The environments differ: torch_threads 2 → 1" in shown
    assert "Not sure: another environment" in shown


def test_environments_that_no_file_describes_differ_by_their_ids(tmp_path: Path) -> None:
    a = store(tmp_path / "a", {"one": 10.0})
    b = store(tmp_path / "b", {"one": 5.0}, environment="other")
    with pytest.raises(ComparisonError, match="environment e → other"):
        compare(a, b)


def test_runs_without_samples_are_refused(bench: Bench) -> None:
    assert bench("accounting", "--sizes", "small", "--output", "a").returncode == 0
    assert "a and a must have samples of a case in common" in bench("compare", "a", "a").stderr


def test_runs_without_a_common_case_are_refused(tmp_path: Path) -> None:
    a, b = store(tmp_path / "a", {"one": 1.0}), store(tmp_path / "b", {"two": 1.0})
    with pytest.raises(ComparisonError, match="must have a case in common"):
        compare(a, b)
    with pytest.raises(StoreError, match="must be a run folder"):
        compare(a, Store(tmp_path / "c"))


@pytest.mark.parametrize("count", [3, 5, 9])
def test_few_steady_samples_show_a_fifth(count: int) -> None:
    rng = np.random.default_rng(5)

    def steady(median: float) -> list[float]:
        return [float(each) for each in median * np.exp(0.01 * rng.standard_normal(count))]

    found = [judge(steady(10), steady(12)) for _ in range(30)]
    assert sum(each.slower_by(0.05) for each in found) >= 28
