"""Statistics over all samples: centre, spread, interval, and warnings about the samples themselves.

The median is the headline figure: step times have a hard floor and a long upper tail, so the mean
follows the tail. Its interval is a percentile bootstrap (Efron & Tibshirani, 1993, ch. 13), which
assumes no distribution.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

#: Bootstrap resamples; the interval's ends move by less than its width over 20.
RESAMPLES = 2000
CONFIDENCE = 0.95
#: From so many samples on, the bootstrap's medians are drawn without drawing the samples.
MANY = 5000
#: Points through which a trend is fitted; more samples than that are put together in time.
TREND_POINTS = 5000
#: Relative width of the interval, or relative drift, beyond which a figure is called unstable.
UNSTABLE_WIDTH = 0.10
UNSTABLE_DRIFT = 0.05
#: Share of a median beyond which the timer's own time makes it too short to quote.
TIMER_SHARE = 0.01


class Summary(TypedDict):
    """What :func:`summarize` returns; times in the unit of the samples.

    Attributes:
        ci_low, ci_high: 95 % bootstrap interval of the median; None below three samples.
        outliers: samples beyond 1.5 interquartile ranges outside the quartiles (Tukey).
        drift: relative change of the fitted trend from first to last sample; 0 unless a rank
            correlation with time is significant at 1 %.
        unstable: whether the median should not be quoted: the interval or the drift is too wide,
            or there are fewer than three samples.
    """

    n: int
    mean: float
    std: float | None
    median: float
    p25: float
    p75: float
    ci_low: float | None
    ci_high: float | None
    outliers: int
    drift: float
    unstable: bool


def summarize(samples: Sequence[float]) -> Summary:
    """Summarises samples of one quantity.

    Raises:
        ValueError: there are no samples, or one is not finite.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("samples must not be empty, but got none")
    if not np.isfinite(values).all():
        raise ValueError(f"samples must be finite, but got {list(samples)}")
    p25, median, p75 = (float(q) for q in np.percentile(values, [25, 50, 75]))
    fence = 1.5 * (p75 - p25)
    low, high = interval(values)
    drift = _drift(values)
    width = (high - low) / median if low is not None and high is not None and median else 0.0
    return Summary(
        n=int(values.size),
        mean=float(values.mean()),
        std=float(values.std(ddof=1)) if values.size > 1 else None,
        median=median,
        p25=p25,
        p75=p75,
        ci_low=low,
        ci_high=high,
        outliers=int(((values < p25 - fence) | (values > p75 + fence)).sum()),
        drift=drift,
        unstable=low is None or abs(width) > UNSTABLE_WIDTH or abs(drift) > UNSTABLE_DRIFT,
    )


def ratio_interval(
    numerator: Sequence[float], denominator: Sequence[float]
) -> tuple[float, float | None, float | None]:
    """The ratio of two medians and its 95 % bootstrap interval (None below three samples).

    The two are resampled independently: rounds are interleaved, but not paired.
    """
    top, bottom = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    return float(np.median(top) / np.median(bottom)), *interval(top, bottom)


def with_summary(rows: pd.DataFrame) -> pd.DataFrame:
    """A copy of ``rows`` with the summary of their samples as ``median_ms``, ``mean_ms``, ...

    Rows without samples (cases that ran out of memory, for one) get empty cells, except for a part
    of the summary that they hold themselves. Where rows say how long the timer itself takes,
    ``too_short`` marks medians of which that is over 1 %.
    """
    import pandas as pd

    timed = ("mean", "std", "median", "p25", "p75", "ci_low", "ci_high")
    summaries = []
    for samples in rows["samples_ms"] if "samples_ms" in rows else [None] * len(rows):
        summary = dict(_known(tuple(samples))) if isinstance(samples, list) and samples else {}
        summaries.append({f"{k}_ms" if k in timed else k: v for k, v in summary.items()})
    names = [f"{k}_ms" if k in timed else k for k in Summary.__annotations__]
    added = pd.DataFrame(summaries, index=rows.index, columns=pd.Index(names))
    for name in [name for name in names if name in rows]:  # published with a summary alone
        added[name] = added[name].where(added[name].notna(), rows[name])
    if "timer_overhead_ms" in rows:
        known = rows["timer_overhead_ms"].notna() & added["median_ms"].notna()
        short = rows["timer_overhead_ms"] > TIMER_SHARE * added["median_ms"].astype("float64")
        added["too_short"] = short.astype(object).where(known)
        names.append("too_short")
    return pd.concat([rows.drop(columns=[n for n in names if n in rows]), added], axis=1)


@functools.lru_cache(maxsize=1 << 14)
def _known(samples: tuple[float, ...]) -> Summary:
    """:func:`summarize`, once per sample: tables and pictures of a report ask for the same."""
    return summarize(samples)


def _drawn_medians(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Medians of bootstrap resamples, at the cost of one sort.

    The median of n resampled values is the order statistic whose rank is distributed as n times
    the median of n uniform numbers, which is Beta((n + 1) / 2, (n + 1) / 2).
    """
    half = (values.size + 1) / 2
    ranks = rng.beta(half, half, RESAMPLES) * values.size
    drawn: np.ndarray = np.sort(values)[np.minimum(ranks.astype(np.int64), values.size - 1)]
    return drawn


def interval(*samples: np.ndarray) -> tuple[float | None, float | None]:
    """The 95 % interval of a median, or of the ratio of two; None below three samples."""
    # In NumPy alone: cases ask for it between samples, and scipy.stats takes seconds to import.
    of_medians = functools.partial(functools.reduce, operator.truediv)
    sizes = [values.size for values in samples]
    if min(sizes) < 3:
        return None, None
    if not any(map(np.ptp, samples)):
        same = float(of_medians([np.median(values) for values in samples]))
        return same, same
    rng = np.random.default_rng(0)
    if max(sizes) > MANY:
        drawn = [_drawn_medians(values, rng) for values in samples]
    else:
        indices = [rng.integers(0, size, (RESAMPLES, size)) for size in sizes]
        drawn = [np.median(v[chosen], axis=1) for v, chosen in zip(samples, indices, strict=True)]
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(of_medians(drawn), [tail, 100 - tail])
    return float(low), float(high)


def _drift(values: np.ndarray) -> float:
    """Relative change along the Theil–Sen line, where Kendall's test finds a trend at all."""
    if values.size < 6 or np.ptp(values) == 0:
        return 0.0
    from scipy import stats

    if values.size > TREND_POINTS:  # the slope of all pairs takes the square of their number
        values = np.array([np.median(part) for part in np.array_split(values, TREND_POINTS)])
    time = np.arange(values.size)
    tau = stats.kendalltau(time, values)
    if not math.isfinite(tau.pvalue) or tau.pvalue > 0.01:
        return 0.0
    # scipy.stats.theilslopes sorts all slopes for an interval that is not needed here.
    first, second = np.triu_indices(values.size, 1)
    slope = float(np.median((values[second] - values[first]) / (second - first)))
    return slope * (values.size - 1) / float(np.median(values))
