"""Is B faster or slower than A? A verdict on two lists of samples, in three separate facts.

**Direction**: the 95 % interval of the ratio of medians lies on one side of 1, also after the drift
and the steps of both samples are taken off, and Mann–Whitney's test on medians of at most
:data:`BLOCKS` stretches of time tells the samples apart at 1 %. Samples whose ranges lie apart by
more than :data:`APART`, and by more than both ranges together or :data:`FAR`, have a direction
however they drift.

Neighbouring samples resemble each other, because clocks and temperatures wander. The interval is
the bootstrap's, widened for the number of independent samples that n such samples are worth
(:func:`effective`), by the root of n over it and by Student's t. Fewer than :data:`STEP_SAMPLES`
samples do not show how far a machine wanders, so they have a direction only where their ranges lie
apart.

**Sureness**: both samples are steady, there are enough independent ones, and nothing else that is
known of the two runs (environment, clock, throttling, a control) speaks against the comparison.

**Size**: the ratio with its interval. Only a gate compares it with a tolerance: two runs of the
same code differ by more than the samples within one of them show.

``tools/verdict_errors.py`` simulates how often the rule is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from scipy import stats

from bench_harness.core import TOLERANCE
from bench_harness.stats import UNSTABLE_DRIFT, UNSTABLE_WIDTH, Summary, ratio_interval, summarize

Direction: TypeAlias = Literal["faster", "slower", "same", "cannot tell"]

#: The fewest samples of each run for a direction below twofold, and the fewest independent ones for
#: a sure one.
FEWEST, ENOUGH = 3, 5
#: Stretches of time whose medians the rank test compares.
BLOCKS = 10
#: Fewer samples than this show neither a step nor how far a machine wanders.
STEP_SAMPLES = 12
#: Relative gap between the ranges of two samples that drift cannot explain.
APART = 0.05
#: Gap that no machine's wandering explains, whatever the ranges: one outlier makes a range large.
FAR = 1.0
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
    summaries = {"A": summarize(a), "B": summarize(b)}
    ratio, bare_low, bare_high = ratio_interval(b, a)
    low, high = _widened(a, b, ratio, bare_low, bare_high)
    least, most = min(b) / max(a), max(b) / min(a)
    reasons = [text for name, each in summaries.items() for text in _unsteady(name, each)]
    reasons += [
        text
        for name, each in (("A", a), ("B", b))
        if abs(summaries[name]["drift"]) <= UNSTABLE_DRIFT
        for text in _dependent(name, each)
    ]
    steps = {"A": step(a), "B": step(b)}
    reasons += [
        f"{name} steps by {100 * size:.0f} %"
        for name, size in steps.items()
        if size > UNSTABLE_DRIFT >= abs(summaries[name]["drift"])
    ]
    drift = sum(max(abs(each["drift"]), steps[name]) for name, each in summaries.items())
    wide = any(_width(each) > UNSTABLE_WIDTH for each in summaries.values())
    direction: Direction = "cannot tell"
    if _ranges_apart(a, b):
        direction = "slower" if least > 1 else "faster"
    elif low is not None and high is not None:
        enough = min(len(a), len(b)) >= STEP_SAMPLES
        if enough and _told_apart(a, b) and _beyond(low, high, bare_low, bare_high, drift):
            direction = "slower" if low > 1 else "faster"
        elif 1 - tolerance <= low and high <= 1 + tolerance and not (drift or wide):
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


def _told_apart(a: Sequence[float], b: Sequence[float]) -> bool:
    """Mann–Whitney's test at 1 % on medians of stretches of time; it assumes no distribution."""
    few = min(effective(a), effective(b)) < ENOUGH
    return few or bool(stats.mannwhitneyu(_stretches(a), _stretches(b)).pvalue < 0.01)


def _stretches(samples: Sequence[float]) -> list[float]:
    """Medians of stretches of three samples or more, of which an outlier decides none."""
    blocks = min(BLOCKS, len(samples) // 3, int(effective(samples)))
    if blocks < ENOUGH:
        return list(samples)
    parts = np.array_split(np.asarray(samples, np.float64), blocks)
    return [float(np.median(part)) for part in parts]


def effective(samples: Sequence[float]) -> float:
    """The number of independent samples that these are worth, for the error of their median.

    By a first-order autoregressive process: n·(1 − r)/(1 + r), where r is the correlation of the
    ranks of neighbouring samples, corrected for its bias (Kendall, 1954). All of them count where
    that correlation is not significant at 1 %, and below :data:`STEP_SAMPLES` samples.
    """
    count = len(samples)
    if count < STEP_SAMPLES or min(samples) == max(samples):
        return float(count)
    ranks = stats.rankdata(samples)
    ranks -= ranks.mean()
    found = float((ranks[1:] * ranks[:-1]).sum() / (ranks**2).sum())
    if found < 2.33 / math.sqrt(count):
        return float(count)
    likely = min(found + (1 + 3 * found) / count, 1 - 1 / count)
    return max(2.0, count * (1 - likely) / (1 + likely))


def _dependent(name: str, samples: Sequence[float]) -> list[str]:
    """The reason that samples wander too slowly for their number to count."""
    worth = effective(samples)
    if worth >= min(len(samples), ENOUGH + 1):
        return []
    return [f"{name} wanders, so its {len(samples)} samples count as {worth:.0f}"]


def _beyond(
    low: float, high: float, bare_low: float | None, bare_high: float | None, drift: float
) -> bool:
    """Whether the interval excludes 1, and the bootstrap's own excludes what drift explains."""
    assert bare_low is not None
    assert bare_high is not None
    return (low > 1 and bare_low > 1 + drift) or (high < 1 and bare_high < 1 - drift)


def _widened(
    a: Sequence[float], b: Sequence[float], ratio: float, low: float | None, high: float | None
) -> tuple[float | None, float | None]:
    """The interval of a ratio, widened for samples that resemble their neighbours."""
    worth = min(effective(a), effective(b))
    factor = max(len(each) / effective(each) for each in (a, b))
    if low is None or high is None or factor == 1:
        return low, high
    by = math.sqrt(factor) * float(stats.t.ppf(0.975, worth - 1)) / 1.96
    return max(0.0, ratio - by * (ratio - low)), ratio + by * (high - ratio)


def step(samples: Sequence[float]) -> float:
    """How far the medians of four stretches of time lie apart, as a share of the median.

    0 below :data:`STEP_SAMPLES` samples, and where Kruskal–Wallis's test does not tell the
    stretches apart at 1 %. A clock that changes once leaves no trend that a line would show.
    """
    values = np.asarray(samples, np.float64)
    if values.size < STEP_SAMPLES or np.ptp(values) == 0:
        return 0.0
    parts = np.array_split(values, 4)
    if stats.kruskal(*parts).pvalue > 0.01:
        return 0.0
    return float(np.ptp([np.median(part) for part in parts]) / np.median(values))


def _ranges_apart(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether every sample of one run is larger than every one of the other by :data:`APART`.

    And by more than both ranges together, because few samples do not show how far a machine
    wanders, or by :data:`FAR`, as always below :data:`FEWEST` samples, which have no range to speak
    of. All as ratios: a slower run also scatters by more.
    """
    if min(*a, *b) <= 0:
        return False
    low, high = (a, b) if max(a) < min(b) else (b, a)
    gap = min(high) / max(low)
    few = min(len(a), len(b)) < FEWEST
    ranges = math.inf if few else max(low) / min(low) * max(high) / min(high)
    return gap > 1 + APART and gap > min(ranges, 1 + FAR)


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
    if low is None or high is None:
        return ENOUGH
    margin = max(abs(ratio - 1), tolerance - abs(ratio - 1))
    allowed = min(margin, ratio * UNSTABLE_WIDTH / 2)
    needed = count * (max(high - ratio, ratio - low) / allowed) ** 2
    return max(ENOUGH, count + 1, math.ceil(needed)) if needed <= MOST else None
