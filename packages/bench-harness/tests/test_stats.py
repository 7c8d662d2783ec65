import numpy as np
import pandas as pd
import pytest
from scipy import stats

from bench_harness.stats import interval, ratio_interval, summarize, with_summary


def test_summary_of_known_samples():
    summary = summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    assert summary["n"] == 5
    assert summary["median"] == 3.0
    assert summary["mean"] == 22.0
    assert (summary["p25"], summary["p75"]) == (2.0, 4.0)
    assert summary["outliers"] == 1
    assert summary["std"] == pytest.approx(np.std([1, 2, 3, 4, 100], ddof=1))


def test_interval_covers_the_median_and_narrows_with_more_samples():
    rng = np.random.default_rng(1)
    few, many = rng.normal(10, 1, 10).tolist(), rng.normal(10, 1, 1000).tolist()
    narrow, wide = summarize(many), summarize(few)
    assert narrow["ci_low"] < 10 < narrow["ci_high"]
    assert narrow["ci_high"] - narrow["ci_low"] < wide["ci_high"] - wide["ci_low"]
    assert not narrow["unstable"]


def test_interval_has_about_its_stated_coverage():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(100):
        summary = summarize(rng.exponential(1.0, 40).tolist())
        hits += summary["ci_low"] <= np.log(2) <= summary["ci_high"]
    assert 88 <= hits <= 100


@pytest.mark.parametrize("count", [3, 60])
def test_the_interval_is_scipys_percentile_bootstrap(count):
    samples = [np.random.default_rng(seed).lognormal(size=count + seed) for seed in (1, 2)]
    expected = stats.bootstrap(
        samples, lambda a, b, axis: np.median(a, axis=axis) / np.median(b, axis=axis),
        n_resamples=2000, method="percentile", rng=np.random.default_rng(0),
    ).confidence_interval  # fmt: skip
    assert interval(*samples) == pytest.approx((expected.low, expected.high), rel=1e-12)


@pytest.mark.parametrize("samples", [[5.0], [5.0, 6.0]])
def test_too_few_samples_have_no_interval(samples):
    summary = summarize(samples)
    assert summary["ci_low"] is None
    assert summary["ci_high"] is None
    assert summary["unstable"], "fewer than three samples are never steady"


def test_equal_samples_are_stable():
    summary = summarize([2.0] * 8)
    assert (summary["ci_low"], summary["ci_high"], summary["std"]) == (2.0, 2.0, 0.0)
    assert not summary["unstable"]


def test_drift_is_found_and_marks_the_figure_unstable():
    rising = [10 + 0.2 * i for i in range(20)]
    assert summarize(rising)["drift"] == pytest.approx(0.2 * 19 / np.median(rising))
    assert summarize(rising)["unstable"]
    rng = np.random.default_rng(3)
    assert summarize((10 + rng.normal(0, 0.01, 20)).tolist())["drift"] == 0.0


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_impossible_samples_are_refused(samples):
    with pytest.raises(ValueError, match="samples must"):
        summarize(samples)


def test_ratio_interval():
    rng = np.random.default_rng(4)
    slow, fast = rng.normal(20, 0.5, 50).tolist(), rng.normal(10, 0.5, 50).tolist()
    ratio, low, high = ratio_interval(slow, fast)
    assert low < 2.0 < high
    assert ratio == pytest.approx(2.0, rel=0.05)
    assert ratio_interval([4.0, 4.0], [2.0, 2.0]) == (2.0, None, None)
    assert ratio_interval([4.0] * 3, [2.0] * 3) == (2.0, 2.0, 2.0)


def test_rows_without_samples_get_empty_cells():
    rows = pd.DataFrame(
        {"status": ["ok", "oom"], "samples_ms": [[1.0, 2.0, 3.0], float("nan")], "n": [7, 7]}
    )
    frame = with_summary(rows)
    assert frame["median_ms"].iloc[0] == 2.0
    assert frame["n"].iloc[0] == 3
    assert pd.isna(frame["median_ms"].iloc[1])
    assert pd.isna(with_summary(pd.DataFrame({"status": ["oom"]}))["median_ms"].iloc[0])


def test_medians_near_the_timer_s_own_time_are_marked() -> None:
    rows = pd.DataFrame(
        {
            "samples_ms": [[1.0, 1.1, 1.2], [100.0] * 3, None, [5.0] * 3],
            "timer_overhead_ms": [0.02, 0.02, 0.02, None],
        }
    )
    assert list(with_summary(rows)["too_short"].fillna("unknown")) == [
        True,
        False,
        "unknown",
        "unknown",
    ]
    assert "too_short" not in with_summary(rows[["samples_ms"]])
