"""The overhead of bucketed gradient averaging, fitted and drawn.

With n buckets for s bytes of gradients, bandwidth w and a cost of o per collective, the time after
backward is the last bucket's transfer plus every call's cost:

    T(n) = s / (n·w) + n·o,    least at  b* = s/n* = √(s·o·w),  T* = 2·√(s·o/w)

It is linear in 1/w and o, so both come from non-negative least squares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_RESAMPLES = 400
#: The sweep's least overhead further than this from the predicted one is flagged.
MISS_TOLERANCE = 0.25


def fit(
    size_bytes: float, buckets: np.ndarray[Any, Any], overhead_s: np.ndarray[Any, Any]
) -> tuple[float, float]:
    """1/w (seconds per byte) and o (seconds per call) of T(n), both at least 0."""
    from scipy.optimize import nnls

    design = np.stack([size_bytes / buckets, buckets.astype(np.float64)], axis=1)
    scale = design.max(axis=0)  # columns of like size keep the solver well conditioned
    solution, _ = nnls(design / scale, np.maximum(overhead_s, 0.0))
    inverse_bandwidth, per_call = solution / scale
    return float(inverse_bandwidth), float(per_call)


@dataclass(frozen=True)
class Sweep:
    """A cell with at least three bucket sizes.

    Attributes:
        rows: of the bucketed variants, fewest buckets first.
        bare: row of the step without communication.
    """

    label: str
    rows: pd.DataFrame
    bare: pd.Series[Any]

    @property
    def bare_ms(self) -> list[float]:
        """Samples of the step without communication."""
        return list(self.bare["samples_ms"])


def sweeps(done: pd.DataFrame) -> list[Sweep]:
    """The cells that the model can be fitted to."""
    found = []
    for _, cell in done.groupby("case_key", sort=False):
        if "buckets" not in cell:
            continue
        buckets = cell[cell["settings"].map(_only_sized) & cell["buckets"].notna()]
        bare = cell[cell["variant"] == "no communication"]
        if buckets["buckets"].nunique() >= 3 and len(bare):
            label = str(cell["label"].iloc[0])
            found.append(Sweep(label, buckets.sort_values("buckets"), bare.iloc[0]))
    return found


def _only_sized(settings: Any) -> bool:
    """Whether a variant is the bucketed wrapper with nothing given but the size of its buckets."""
    wrapper = settings["wrapper"]
    sized = wrapper["name"] == "bucketed" and isinstance(wrapper.get("bucket_size_mb"), float)
    return sized and set(wrapper) == {"name", "bucket_size_mb"}


def fit_table(done: pd.DataFrame) -> pd.DataFrame:
    """The constants of each sweep with bootstrap intervals, and the optimum they imply.

    Beside them stands what all-reduces alone predict, where the case timed some, and whether that
    least overhead misses the sweep's.
    """
    import pandas as pd

    rng = np.random.default_rng(0)
    lines = []
    for sweep in sweeps(done):
        size = float(sweep.rows["gradient_bytes"].iloc[0])
        counts = sweep.rows["buckets"].to_numpy(np.float64)

        def once(
            draw: Any, sweep: Sweep = sweep, size: Any = size, counts: Any = counts
        ) -> tuple[float, float]:
            base = np.median(draw(sweep.bare_ms))
            overhead = [np.median(draw(samples)) - base for samples in sweep.rows["samples_ms"]]
            return fit(size, counts, np.array(overhead) / 1e3)

        inverse, per_call = once(np.asarray)
        resampled = np.array([once(lambda s: rng.choice(s, len(s))) for _ in range(_RESAMPLES)])
        low, high = np.percentile(resampled, [2.5, 97.5], axis=0)
        least = sweep.bare.get("largest_parameter_bytes", 0.0)
        optimum = _optimum("", size, inverse, per_call, least)
        lines.append(
            {
                "cell": sweep.label,
                "gradients s (MiB)": round(size / 2**20, 3),
                "bandwidth w (GB/s)": _rounded(1e-9 / inverse if inverse else None),
                "w 95 % low (GB/s)": _rounded(1e-9 / high[0] if high[0] else None),
                "w 95 % high (GB/s)": _rounded(1e-9 / low[0] if low[0] else None),
                "per call o (µs)": _rounded(per_call * 1e6),
                "o 95 % low (µs)": _rounded(low[1] * 1e6),
                "o 95 % high (µs)": _rounded(high[1] * 1e6),
                **optimum,
                **_prediction(sweep.bare.get("all_reduce"), size, least, optimum[_LEAST]),
            }
        )
    return pd.DataFrame(lines)


def _prediction(
    link: Any, size: float, least: float, found_ms: float | None
) -> dict[str, float | bool | None]:
    """Constants of all-reduces alone, the optimum that they predict, and whether it misses the
    ``found_ms`` of the sweep."""
    from bench_harness.experiments import allreduce

    if not isinstance(link, dict):
        return {}
    cost = allreduce.fit(link["size_bytes"], link["samples_ms"])
    inverse = 1 / cost.bandwidth  # 0 where the sizes show no bandwidth
    predicted = _optimum("predicted ", size, inverse, cost.overhead_s, least)
    expected_ms = predicted[f"predicted {_LEAST}"]
    missed = None
    if expected_ms is not None and found_ms is not None:
        missed = abs(found_ms - expected_ms) > MISS_TOLERANCE * expected_ms
    return {
        "all-reduce w (GB/s)": _rounded(1e-9 / inverse if inverse else None),
        "all-reduce o (µs)": _rounded(cost.overhead_s * 1e6),
        **predicted,
        "prediction missed": missed,
    }


_LEAST = "least overhead T* (ms)"


def _optimum(
    prefix: str, size: float, inverse: float, per_call: float, least: float
) -> dict[str, float | None]:
    """The best bucket, no smaller than the largest parameter, and the overhead that is left."""
    best = max(float(np.sqrt(size * per_call / inverse)), least) if inverse > 0 else None
    count = size / best if best else 1.0
    overhead = size / count * inverse + count * per_call
    return {
        f"{prefix}best bucket b* (MiB)": _rounded(best / 2**20 if best else None),
        f"{prefix}{_LEAST}": _rounded(1e3 * overhead),
    }


def draw_fit(done: pd.DataFrame) -> Figure | None:
    """Measured overhead over bucket size, with the model; None without a sweep."""
    from bench_harness.display import marks
    from bench_harness.display.plots import COLOURS, new_figure
    from bench_harness.display.row_tables import log_axes
    from bench_harness.stats import with_summary

    found = sweeps(with_summary(done))
    if not found:
        return None
    found = sorted(found, key=lambda sweep: sweep.label)
    columns = min(2, len(found))
    lines = -(-len(found) // columns)
    figure, axes = new_figure(
        rows=lines, columns=columns, width=5 * columns + 2, height=0.8 + 3 * lines
    )
    for plot in list(axes.flat)[len(found) :]:
        plot.set_visible(False)
    for plot, sweep in zip(axes.flat, found, strict=False):
        rows, bare, label = sweep.rows, sweep.bare_ms, sweep.label
        size = float(rows["gradient_bytes"].iloc[0])
        counts = rows["buckets"].to_numpy(np.float64)
        overhead = rows["median_ms"].to_numpy(np.float64) - np.median(bare)
        inverse, per_call = fit(size, counts, overhead / 1e3)
        pairs = zip(marks.whiskers(rows), _bare_whiskers(sweep.bare), strict=True)
        below, above = (np.hypot(own, base) for own, base in pairs)
        plot.errorbar(
            size / counts / 2**20,
            overhead,
            yerr=[below, above],
            fmt="none",
            ecolor=COLOURS[0],
            capsize=3,
        )
        steady = marks.steady(rows).to_numpy()
        for chosen, fill in ((steady, COLOURS[0]), (~steady, "white")):
            plot.plot(size / counts[chosen] / 2**20, overhead[chosen], "o", color=COLOURS[0],
                      markerfacecolor=fill)  # fmt: skip
        plot.plot([], [], "o", color=COLOURS[0], label="measured")
        for x, y, settings in zip(size / counts / 2**20, overhead, rows["settings"], strict=True):
            asked = f"{settings['wrapper']['bucket_size_mb']:g} MB"
            plot.annotate(asked, (x, y), (6, 4), textcoords="offset points", fontsize="small")
        line = np.geomspace(counts.min(), counts.max(), 100)
        model = 1e3 * (size / line * inverse + line * per_call)
        plot.plot(size / line / 2**20, model, "-", color=COLOURS[1], label="model")
        plot.set_title(label)
        log_axes(
            plot,
            x="mean gradients per bucket (MiB), labels: bucket_size_mb",
            y="overhead (ms)",
            y_log=False,
        )
        # A point below the step without communication stays whole.
        plot.set_ylim(bottom=min(0.0, float(overhead.min() - 0.05 * overhead.max())))
        plot.legend()
    return figure


def _bare_whiskers(bare: pd.Series[Any]) -> tuple[float, float]:
    """How far the interval of the step without communication reaches below and above it."""
    from bench_harness.stats import summarize

    found = summarize(bare["samples_ms"])
    low, high = found["ci_low"], found["ci_high"]
    if low is None or high is None:
        return 0.0, 0.0
    return high - found["median"], found["median"] - low  # it is subtracted


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
