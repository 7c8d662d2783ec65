"""pytest plug-in: the fixture ``benchmark_step`` guards the time of a training step in CI.

    def test_step_time(benchmark_step):
        model = build()
        benchmark_step(lambda: model(batch).sum().backward())

    pytest --benchmark-step-save runs/main                                      # the baseline
    pytest --benchmark-step-save runs/mine --benchmark-step-compare runs/main   # fails if slower

Times and statistics are those of bench-harness, and the folders are run folders, so
``bench-harness compare runs/main runs/mine --markdown`` reads them too. Nothing but pytest is
imported until a test asks for the fixture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from bench_harness.case import Row
    from bench_harness.compare import Comparison
    from bench_harness.stats import Summary
    from bench_harness.store import Store, Writer

EXPERIMENT = "pytest"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("benchmark-step", "step times, measured by bench-harness")
    group.addoption(
        "--benchmark-step-save",
        metavar="FOLDER",
        type=Path,
        help="Keep the samples of benchmark_step in this run folder.",
    )
    group.addoption(
        "--benchmark-step-compare",
        metavar="FOLDER",
        type=Path,
        help="Fail tests whose step is surely slower than in this run folder.",
    )
    group.addoption(
        "--benchmark-step-tolerance",
        metavar="PERCENT",
        type=float,
        default=5.0,
        help="By how much slower a step must surely be to fail its test (default: 5).",
    )


@dataclass
class _Measured:
    """One call of the fixture: its median in milliseconds, and the comparison if there is one."""

    name: str
    summary: Summary
    comparison: Comparison | None
    remark: str


_MEASURED = pytest.StashKey[list[_Measured]]()


@dataclass(frozen=True)
class _Session:
    """What all tests of a run share."""

    store: Store
    writer: Writer
    environment: str
    commit: str | None
    baseline: Store | None
    tolerance: float
    measured: list[_Measured]


@pytest.fixture(scope="session")
def _benchmark_step_session(pytestconfig: pytest.Config) -> Iterator[_Session]:
    from bench_harness import environment
    from bench_harness.store import RESULTS, Store, StoreError

    save = pytestconfig.getoption("--benchmark-step-save")
    against = pytestconfig.getoption("--benchmark-step-compare")
    tolerance = pytestconfig.getoption("--benchmark-step-tolerance")
    if tolerance < 0:
        pytest.fail(
            f"--benchmark-step-tolerance must be at least 0, but got {tolerance:g}. Pass 5.",
            pytrace=False,
        )
    if hasattr(pytestconfig, "workerinput"):
        pytest.fail(
            "benchmark_step must run alone on the machine, but got one of several workers of "
            "pytest-xdist. Run these tests without -n.",
            pytrace=False,
        )
    if against is not None and not (against / RESULTS).is_file():
        pytest.fail(
            "--benchmark-step-compare must name a folder that --benchmark-step-save has written, "
            f"but got {against}. Measure the baseline first.",
            pytrace=False,
        )
    if against is not None and save is not None and against.resolve() == save.resolve():
        pytest.fail(
            "--benchmark-step-save and --benchmark-step-compare must name different folders, but "
            f"got {save} twice. Save to a new folder.",
            pytrace=False,
        )
    description = environment.describe()
    git = environment.git_state(pytestconfig.rootpath)
    with TemporaryDirectory(prefix="benchmark-step-") as unsaved:
        store = Store(save or Path(unsaved))
        try:
            with store.open_for_writing() as writer:
                yield _Session(
                    store=store,
                    writer=writer,
                    environment=environment.fingerprint(description),
                    commit=None if git is None else git["commit"] + "-dirty" * git["dirty"],
                    baseline=None if against is None else Store(against),
                    tolerance=tolerance / 100,
                    measured=pytestconfig.stash.setdefault(_MEASURED, []),
                )
        except StoreError as error:
            pytest.fail(str(error), pytrace=False)


class BenchmarkStep:
    """What the fixture ``benchmark_step`` gives: call it with the step to measure."""

    def __init__(self, test: str, session: _Session) -> None:
        self._test = test
        self._session = session
        self._names: set[str] = set()

    def __call__(
        self,
        step: Callable[[], object],
        *,
        device: torch.device | str | None = None,
        warmup: int = 5,
        samples: int = 30,
        calls: int = 1,
        name: str = "",
    ) -> Summary:
        """Measures a step, saves the samples, and compares them with the baseline.

        Args:
            step: does one step; the device is synchronised around it.
            device: where it runs; None means the GPU if there is one.
            warmup: untimed calls before any sample.
            samples: how many to take; fewer than 5 never tell two runs apart.
            calls: steps in one sample; more than one for steps of microseconds.
            name: tells several steps of one test apart.

        Returns:
            Median, interval and spread of the step's milliseconds.

        Raises:
            ValueError: a name that the test has used, or a count out of range.
            pytest.fail.Exception: the step is surely slower than the baseline.
        """
        import torch

        from bench_harness.stats import summarize
        from bench_harness.timing import measure

        if name in self._names:
            raise ValueError(
                f"name must be another for each step of a test, but got {name!r} twice. Pass "
                "name='forward' or the like."
            )
        self._names.add(name)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        begin = time.monotonic()
        measured = measure(step, device=device, warmup=warmup, samples=samples, calls=calls)
        label = f"{self._test} {name}".strip()
        config = {"test": label, "device": device.type, "warmup": warmup, "calls": calls}
        row = self._identified(label, config, time.monotonic() - begin) | measured.row()
        self._session.writer.append([row])
        comparison, remark = self._compare(row)
        summary = summarize(measured.wall_ms)
        self._session.measured.append(_Measured(label, summary, comparison, remark))
        if comparison is not None and _fails(comparison, self._session.tolerance):
            pytest.fail(
                f"the step must not be more than {self._session.tolerance:.3g} of the baseline "
                f"slower, but got {_described(comparison)}. If that is meant, save a new baseline.",
                pytrace=False,
            )
        return summary

    def _identified(self, label: str, config: Row, seconds: float) -> Row:
        from bench_harness.case import Case

        case = Case(experiment=EXPERIMENT, config={**config, "label": label})
        return {
            "experiment": EXPERIMENT,
            "case_key": case.key,
            "label": label,
            "status": "ok",
            "error": None,
            "detail": None,
            "environment": self._session.environment,
            "commit": self._session.commit,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "seconds": round(seconds, 3),
            "config": dict(case.config),
        }

    def _compare(self, row: Row) -> tuple[Comparison | None, str]:
        """The comparison with the baseline's row, or why there is none."""
        from bench_harness.compare import ComparisonError, compare

        if self._session.baseline is None:
            return None, ""
        keys = {known["case_key"] for known in self._session.baseline.load().rows}
        if row["case_key"] not in keys:
            return None, "not in the baseline"
        try:
            found = compare(
                self._session.baseline, self._session.store, tolerance=self._session.tolerance
            )
        except ComparisonError:
            pytest.fail(
                "the baseline must be measured on the same hardware with the same libraries, but "
                f"{self._session.baseline.folder} was measured elsewhere. Measure it on this "
                "machine.",
                pytrace=False,
            )
        [comparison] = [each for each in found if each.label == row["label"]]
        return comparison, _described(comparison)


@pytest.fixture
def benchmark_step(
    request: pytest.FixtureRequest, _benchmark_step_session: _Session
) -> BenchmarkStep:
    """Measures a step by bench-harness; see :class:`BenchmarkStep`."""
    return BenchmarkStep(request.node.nodeid, _benchmark_step_session)


def _fails(comparison: Comparison, tolerance: float) -> bool:
    from bench_harness.compare import slower

    return bool(slower([comparison], tolerance))


def _described(comparison: Comparison) -> str:
    verdict = "slower" if comparison.verdict == "slower" else "not slower"
    if comparison.verdict == "cannot tell":
        verdict = "cannot tell"
    interval = ""
    if comparison.low is not None and comparison.high is not None:
        interval = f" (95 % interval {comparison.low:.3f} to {comparison.high:.3f})"
    more = ""
    if comparison.samples_needed is not None:
        more = f"; {comparison.samples_needed} samples would probably tell"
    return (
        f"{comparison.median_b:.4g} ms against {comparison.median_a:.4g} ms, "
        f"{comparison.ratio:.3f} times{interval}: {verdict}{more}"
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Lists every step that was measured."""
    measured = config.stash.get(_MEASURED, [])
    if measured:
        terminalreporter.section("step times (bench-harness)")
    for each in measured:
        median = f"{each.summary['median']:.4g} ms"
        low, high = each.summary["ci_low"], each.summary["ci_high"]
        if low is not None and high is not None:
            median += f" ({low:.4g} to {high:.4g})"
        terminalreporter.write_line(f"{each.name}: {each.remark or median}")
