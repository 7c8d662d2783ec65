"""The fixture ``benchmark_step``, in runs of pytest of its own, on a clock that the steps move."""

import itertools
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401
import yaml
from markdown_it import MarkdownIt

# pytester forgets modules that an inner run imports first; these cannot be imported twice.
from bench_harness import environment, stats, timing  # noqa: F401
from bench_harness.compare import compare
from bench_harness.store import Store

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[1] / "docs" / "pytest.md"


class Clock:
    """Stands in for the module ``time``: a step takes what it says that it takes."""

    def __init__(self) -> None:
        self.now = 0
        self.jitter = itertools.cycle([0.998, 1.001, 1.0, 0.999, 1.002])

    def perf_counter_ns(self) -> int:
        return self.now

    def spend(self, milliseconds: float) -> None:
        self.now += round(milliseconds * next(self.jitter) * 1e6)


TEST = """
from bench_harness import timing

def test_step(benchmark_step):
    summary = benchmark_step(lambda: timing.time.spend({milliseconds}), device="cpu")
    assert summary["n"] == 30
"""


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time", Clock())


def run(
    pytester: pytest.Pytester, milliseconds: float, *options: str, test: str = TEST
) -> pytest.RunResult:
    pytester.makepyfile(test_it=test.format(milliseconds=milliseconds))
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)


def saved(pytester: pytest.Pytester, milliseconds: float = 10.0) -> str:
    run(pytester, milliseconds, "--benchmark-step-save", "main").assert_outcomes(passed=1)
    return "main"


def test_measures_without_a_baseline(pytester: pytest.Pytester) -> None:
    result = run(pytester, 10.0)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_it.py::test_step: 10 ms (*"])


@pytest.mark.parametrize(
    ("milliseconds", "outcome", "line"),
    [
        (10.01, {"passed": 1}, "*10.01 ms against 10 ms, 1.001 times*: not slower"),
        (8.0, {"passed": 1}, "*8 ms against 10 ms, 0.800 times*: not slower"),
        (12.0, {"failed": 1}, "*12 ms against 10 ms, 1.200 times*slower*"),
    ],
)
def test_verdicts(
    pytester: pytest.Pytester, milliseconds: float, outcome: dict[str, int], line: str
) -> None:
    main = saved(pytester)
    result = run(pytester, milliseconds, "--benchmark-step-compare", main)
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines([line])


def test_tolerance_moves_the_limit(pytester: pytest.Pytester) -> None:
    options = ["--benchmark-step-compare", saved(pytester), "--benchmark-step-tolerance"]
    run(pytester, 11.0, *options, "20").assert_outcomes(passed=1)
    run(pytester, 11.0, *options, "5").assert_outcomes(failed=1)
    result = run(pytester, 11.0, *options, "-1")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*--benchmark-step-tolerance must be at least 0, but got -1*"])


def test_few_samples_cannot_tell_and_pass(pytester: pytest.Pytester) -> None:
    few = TEST.replace('device="cpu"', 'device="cpu", samples=3').replace("== 30", "== 3")
    run(pytester, 10.0, "--benchmark-step-save", "main", test=few).assert_outcomes(passed=1)
    result = run(pytester, 12.0, "--benchmark-step-compare", "main", test=few)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*cannot tell; * samples would probably tell"])


def test_saved_folders_are_runs_that_the_command_compares(pytester: pytest.Pytester) -> None:
    main = saved(pytester)
    options = ["--benchmark-step-save", "mine", "--benchmark-step-compare", main]
    run(pytester, 12.0, *options).assert_outcomes(failed=1)
    [found] = compare(Store(pytester.path / main), Store(pytester.path / "mine"))
    assert found.verdict == "slower"
    assert found.label == "test_it.py::test_step"


def test_a_new_test_passes(pytester: pytest.Pytester) -> None:
    main = saved(pytester)
    renamed = TEST.replace("test_step", "test_new")
    result = run(pytester, 10.0, "--benchmark-step-compare", main, test=renamed)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_new: not in the baseline"])


def test_other_hardware_is_refused(pytester: pytest.Pytester) -> None:
    main = saved(pytester)
    results = pytester.path / main / "results.jsonl"
    [identity] = {row["environment"] for row in Store(pytester.path / main).load().rows}
    results.write_text(results.read_text().replace(identity, "0" * len(identity)))
    result = run(pytester, 10.0, "--benchmark-step-compare", main)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*the baseline must be measured on the same hardware*"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--benchmark-step-compare", "none"], "*that --benchmark-step-save has written*none*"),
        (
            ["--benchmark-step-compare", "main", "--benchmark-step-save", "./main"],
            "*must name different folders*",
        ),
    ],
)
def test_wrong_folders(pytester: pytest.Pytester, options: list[str], message: str) -> None:
    saved(pytester)
    result = run(pytester, 10.0, *options)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([message])


def test_two_steps_of_a_test_need_names(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        10.0,
        test="""
from bench_harness import timing

def step():
    timing.time.spend({milliseconds})

def test_named(benchmark_step):
    benchmark_step(step, device="cpu", name="forward")
    benchmark_step(step, device="cpu", name="backward")

def test_unnamed(benchmark_step):
    benchmark_step(step, device="cpu")
    benchmark_step(step, device="cpu")
""",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*name must be another*, but got '' twice*"])
    result.stdout.fnmatch_lines(["*test_named forward: 10 ms*", "*test_named backward: 10 ms*"])


def test_a_worker_of_xdist_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("def pytest_configure(config):\n    config.workerinput = {}\n")
    result = run(pytester, 10.0, "-p", "no:xdist")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*Run these tests without -n*"])


def test_plugin_imports_only_pytest(pytester: pytest.Pytester) -> None:
    program = (
        "import sys, bench_harness.pytest_plugin as plugin\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'heavy'\n"
    )
    assert pytester.run(sys.executable, "-c", program).ret == 0


def test_the_workflow_of_the_page_is_yaml_with_what_it_needs() -> None:
    fences = [
        token
        for token in MarkdownIt("commonmark").parse(PAGE.read_text())
        if token.type == "fence" and "pull_request" in token.content
    ]
    [fence] = fences
    workflow = yaml.safe_load(fence.content)
    [job] = workflow["jobs"].values()
    assert job["permissions"] == {"contents": "read", "pull-requests": "write"}
    commands = "\n".join(step.get("run", "") for step in job["steps"])
    for option in ("--benchmark-step-save", "--benchmark-step-compare"):
        assert option in commands
    assert "bench-harness compare" in commands
    assert "${{" not in commands, "text of a pull request must not become part of a command"
