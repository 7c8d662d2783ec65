"""Is B faster or slower than A? A verdict on two lists of samples, in three separate facts.

**Direction**: the 95 % bootstrap interval of the ratio of medians lies on one side of 1, also after
the drift and the steps of both samples are taken off, and Mann–Whitney's test tells the samples
apart at 1 %. The test is made on medians of at most :data:`BLOCKS` stretches of time, because
neighbouring samples resemble each other (clocks move slowly), and a test of all samples would count
them as independent. Samples whose ranges lie apart by more than :data:`APART` have a direction
however they drift.

**Sureness**: both samples are steady, there are enough of them, and nothing else that is known of
the two runs (environment, clock, throttling, a control) speaks against the comparison.

**Size**: the ratio with its interval. Only a gate compares it with a tolerance: two runs of the
same code differ by more than the samples within one of them show.

``tools/verdict_errors.py`` simulates how often the rule is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:  # numpy and scipy come with the functions: the command line imports this
    from bench_harness.stats import Summary

Direction: TypeAlias = Literal["faster", "slower", "same", "cannot tell"]

#: Relative difference below which two times count as the same, and beyond which a gate closes.
TOLERANCE = 0.05
#: The fewest samples of each run for a direction at all, and for a sure one.
FEWEST, ENOUGH = 3, 5
#: Stretches of time whose medians the rank test compares.
BLOCKS = 10
#: Fewer samples than this show no step.
STEP_SAMPLES = 12
#: Relative gap between the ranges of two samples that drift cannot explain.
APART = 0.05
#: More samples than this are not worth asking for: something else is wrong.
MOST = 10_000


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """B beside A.

    Attributes:
        direction: of B's time; "same" if the interval holds 1 and lies within the tolerance.
        sure: whether the size may be quoted.
        reasons: why it may not, or why there is no direction; empty if ``sure``.
        ratio: B's median over A's; below 1 means that B is faster.
        low, high: 95 % interval of the ratio; None below :data:`FEWEST` samples.
        least: B's fastest sample over A's slowest: B is slower by no less if all samples count.
        samples_needed: of each run, so that there probably is a direction; None if there is one,
            or if more samples would not help, as where they drift.
    """

    direction: Direction
    sure: bool
    reasons: tuple[str, ...]
    ratio: float
    low: float | None
    high: float | None
    least: float
    samples_needed: int | None

    def slower_by(self, beyond: float) -> bool:
        """Whether B is slower by more than ``beyond``, a share of A's time."""
        by_interval = self.low is not None and self.low > 1 + beyond
        return self.direction == "slower" and (by_interval or self.least > 1 + beyond)

    def may_be_slower_by(self, beyond: float) -> bool:
        """Whether nothing shows that B is not slower by more than ``beyond``."""
        if self.direction == "faster":
            return False
        return self.high is None or self.high > 1 + beyond or not self.sure

    def __str__(self) -> str:
        """The direction and its sureness, as tables show them."""
        if self.direction == "cannot tell":
            return self.direction
        return f"{self.direction}, {'sure' if self.sure else 'unsteady'}"


def judge(
    a: Sequence[float],
    b: Sequence[float],
    *,
    tolerance: float = TOLERANCE,
    doubts: Sequence[str] = (),
) -> Verdict:
    """Compares the samples of two runs, each in order of time.

    Args:
        tolerance: half of the width within which an interval that holds 1 means "same".
        doubts: reasons that the samples do not show and that leave nothing sure.

    Raises:
        ValueError: there are no samples, or one is not finite.
    """
    from bench_harness.stats import UNSTABLE_DRIFT, ratio_interval, summarize

    summaries = {"A": summarize(a), "B": summarize(b)}
    ratio, low, high = ratio_interval(b, a)
    least, most = min(b) / max(a), max(b) / min(a)
    reasons = [text for name, each in summaries.items() for text in _unsteady(name, each)]
    steps = {"A": step(a), "B": step(b)}
    reasons += [
        f"{name} steps by {100 * size:.0f} %"
        for name, size in steps.items()
        if size > UNSTABLE_DRIFT >= abs(summaries[name]["drift"])
    ]
    drift = sum(max(abs(each["drift"]), steps[name]) for name, each in summaries.items())
    direction: Direction = "cannot tell"
    if low is not None and high is not None:
        if _told_apart(a, b) and (low > 1 + drift or high < 1 - drift):
            direction = "slower" if low > 1 else "faster"
        elif _ranges_apart(a, b):
            direction = "slower" if least > 1 else "faster"
        elif 1 - tolerance <= low and high <= 1 + tolerance and not (drift or _wide(summaries)):
            direction = "same"
    needed = None
    if direction == "cannot tell":
        if not drift:
            needed = samples_needed(ratio, low, high, min(len(a), len(b)), tolerance)
        if not reasons:
            reasons = [f"the samples of A and B overlap ({least:.2f} to {most:.2f} times)"]
    return Verdict(
        direction=direction,
        sure=direction != "cannot tell" and not reasons and not doubts,
        reasons=(*reasons, *doubts),
        ratio=ratio,
        low=low,
        high=high,
        least=least,
        samples_needed=needed,
    )


def _unsteady(name: str, summary: Summary) -> list[str]:
    """Reasons in the samples of one run for which its median should not be quoted."""
    from bench_harness.stats import UNSTABLE_DRIFT, UNSTABLE_WIDTH

    found = []
    if summary["n"] < ENOUGH:
        found.append(f"{name} has {summary['n']} sample{'s' * (summary['n'] != 1)}")
    if abs(summary["drift"]) > UNSTABLE_DRIFT:
        found.append(f"{name} drifts by {100 * summary['drift']:+.0f} %")
    width = _width(summary)
    if width > UNSTABLE_WIDTH:
        found.append(f"the interval of {name} is {100 * width:.0f} % wide")
    return found


def _width(summary: Summary) -> float:
    low, high = summary["ci_low"], summary["ci_high"]
    if low is None or high is None or not summary["median"]:
        return 0.0
    return abs((high - low) / summary["median"])


def _wide(summaries: dict[str, Summary]) -> bool:
    from bench_harness.stats import UNSTABLE_WIDTH

    return any(_width(each) > UNSTABLE_WIDTH for each in summaries.values())


def _told_apart(a: Sequence[float], b: Sequence[float]) -> bool:
    """Mann–Whitney's test on medians of stretches of time."""
    from bench_harness.stats import separated

    return separated(_stretches(a), _stretches(b))


def _stretches(samples: Sequence[float]) -> list[float]:
    """Medians of stretches of three samples or more, of which an outlier decides none."""
    import numpy as np

    blocks = min(BLOCKS, len(samples) // 3)
    if blocks < ENOUGH:
        return list(samples)
    parts = np.array_split(np.asarray(samples, np.float64), blocks)
    return [float(np.median(part)) for part in parts]


def step(samples: Sequence[float]) -> float:
    """How far the medians of four stretches of time lie apart, as a share of the median.

    0 below :data:`STEP_SAMPLES` samples, and where Kruskal–Wallis's test does not tell the
    stretches apart at 1 %. A clock that changes once leaves no trend that a line would show.
    """
    import numpy as np
    from scipy import stats

    values = np.asarray(samples, np.float64)
    if values.size < STEP_SAMPLES or np.ptp(values) == 0:
        return 0.0
    parts = np.array_split(values, 4)
    if stats.kruskal(*parts).pvalue > 0.01:
        return 0.0
    return float(np.ptp([np.median(part) for part in parts]) / np.median(values))


def _ranges_apart(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether every sample of one run is larger than every one of the other by :data:`APART`.

    Three samples lie apart by chance in one of ten cases. So where the rank test cannot decide,
    the gap must also be wider than either range.
    """
    if min(len(a), len(b)) < FEWEST:
        return False
    low, high = (a, b) if max(a) < min(b) else (b, a)
    gap = min(high) - max(low)
    widest = max(max(low) - min(low), max(high) - min(high))
    return gap > APART * max(low) and (gap > widest or _told_apart(a, b))


def samples_needed(
    ratio: float, low: float | None, high: float | None, count: int, tolerance: float
) -> int | None:
    """How many samples probably give a direction, from how wide the interval of ``count`` is.

    Args:
        ratio: of the medians. The interval around it, whose width shrinks as one over the root of
            the number of samples, must exclude 1 or lie within the tolerance.
        count: samples of the run that has fewer.

    Returns:
        The number; None where it is larger than :data:`MOST`.
    """
    from bench_harness.stats import UNSTABLE_WIDTH

    if low is None or high is None:
        return ENOUGH
    margin = max(abs(ratio - 1), tolerance - abs(ratio - 1))
    allowed = min(margin, ratio * UNSTABLE_WIDTH / 2)
    needed = count * (max(high - ratio, ratio - low) / allowed) ** 2
    return max(ENOUGH, count + 1, math.ceil(needed)) if needed <= MOST else None
