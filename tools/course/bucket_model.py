"""The overhead of bucketed gradient averaging, fitted and drawn.

With n buckets for s bytes of gradients, bandwidth w and a cost of o per collective, the time after
backward is the last bucket's transfer plus every call's cost:

    T(n) = s / (n·w) + n·o,    least at  b* = s/n* = √(s·o·w),  T* = 2·√(s·o/w)

It is linear in 1/w and o, so both come from non-negative least squares. ``table`` and ``figure``
are made of rows of ``train-step --all-reduces`` for two pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from bench_harness.core import Column, Row
from bench_harness.display import row_tables
from bench_harness.display.lines import Panel, draw_lines, points
from bench_harness.experiments.allreduce import COST, Cost, fit, shown, solved, with_interval
from bench_harness.stats import summarize, with_summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = row_tables.Columns(
    *COST,
    Column("s_mib", "gradients s", "MiB", 7),
    Column("best_mib", "best bucket b*", "MiB"),
    Column("least_ms", "least overhead T*", "ms"),
    Column("link_w", "all-reduce w", "GB/s"),
    Column("link_o", "all-reduce o", "µs"),
    Column("link_best_mib", "predicted best bucket b*", "MiB"),
    Column("link_least_ms", "predicted least overhead T*", "ms"),
)
TITLE, FIGURE = "Bucket overhead model", "train_step_buckets"
#: The sweep's least overhead further than this from the predicted one is flagged.
MISS_TOLERANCE = 0.25


@dataclass(frozen=True)
class Sweep:
    """A case with at least three bucket sizes.

    Attributes:
        rows: of the bucketed variants, fewest buckets first.
        bare: row of the step without communication.
    """

    rows: pd.DataFrame
    bare: pd.Series[Any]

    @property
    def size(self) -> float:
        """Bytes of all gradients."""
        return float(self.rows["gradient_bytes"].iloc[0])

    def optimum(self, cost: Cost) -> tuple[float | None, float]:
        """The best bucket (MiB), no smaller than the largest parameter, and its overhead (ms)."""
        per_call, inverse = cost
        least = self.bare.get("largest_parameter_bytes", 0.0)
        best = max(float(np.sqrt(self.size * per_call / inverse)), least) if inverse > 0 else None
        count = self.size / best if best else 1.0
        overhead = self.size / count * inverse + count * per_call
        return best / 2**20 if best else None, 1e3 * overhead

    def fit(self, overhead_s: np.ndarray[Any, Any]) -> Cost:
        """o and 1/w of T(n), from the seconds beyond the step without communication."""
        counts = self.rows["buckets"].to_numpy(np.float64)
        return solved(counts, self.size / counts, overhead_s)


def sweep_of(rows: pd.DataFrame) -> Sweep:
    """The one case that the model can be fitted to.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = []
    for _, cell in row_tables.finished(rows).groupby("case_key", sort=False):
        bare = cell[cell["variant"] == "no communication"]
        sized = cell[cell["settings"].map(_only_sized)]
        if len(bare) and "buckets" in sized and sized["buckets"].nunique() >= 3:
            found.append(Sweep(sized.sort_values("buckets"), bare.iloc[0]))
    if len(found) != 1:
        raise ValueError(f"rows must hold a sweep of three bucket sizes, but got {len(found)}")
    return found[0]


def _only_sized(settings: Any) -> bool:
    """Whether a variant is the bucketed wrapper with nothing given but the size of its buckets."""
    name, size = (settings["wrapper"].get(key) for key in ("name", "bucket_size_mb"))
    return name == "bucketed" and isinstance(size, float) and len(settings["wrapper"]) == 2


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """The constants of the sweep with bootstrap intervals, and the optimum they imply.

    T(n) is fitted to the exposed communication, with the bucket counts that the wrapper really
    used; b* is at least the largest parameter. Beside them stands what all-reduces alone predict,
    t = o + S/w, where the case timed some, and whether that least overhead misses the sweep's by
    more than :data:`MISS_TOLERANCE`.
    """
    sweep = sweep_of(rows)

    def once(draw: Any) -> Cost:
        base = np.median(draw(list(sweep.bare["samples_ms"])))
        overhead = [np.median(draw(samples)) - base for samples in sweep.rows["samples_ms"]]
        return sweep.fit(np.array(overhead) / 1e3)

    costs = with_interval(once, np.random.default_rng(0))
    line: Row = {"cell": sweep.bare["label"], "s_mib": sweep.size / 2**20, **shown(costs)}
    line["best_mib"], line["least_ms"] = sweep.optimum(costs[0])
    if isinstance(link := sweep.bare.get("all_reduce"), dict):
        cost, *_ = fit(link["size_bytes"], link["samples_ms"])
        best, least = sweep.optimum(cost)
        line |= {"link_w": 1e-9 / cost.per_byte_s if cost.per_byte_s else None}
        line |= {"link_o": 1e6 * cost.overhead_s, "link_best_mib": best, "link_least_ms": least}
        line["missed"] = abs(line["least_ms"] - least) > MISS_TOLERANCE * least
    keys = "cell s_mib w w_low w_high o o_low o_high best_mib least_ms link_w link_o "
    keys += "link_best_mib link_least_ms missed"
    return _COLUMNS.table(TITLE, pd.DataFrame([line]), keys, "", {"o": "per call o (µs)"}).frame


def figure(rows: pd.DataFrame) -> Figure:
    """Measured overhead over bucket size, with the model."""
    sweep = sweep_of(with_summary(rows))
    own, bare = sweep.rows.copy(), summarize(sweep.bare["samples_ms"])
    counts = own["buckets"].to_numpy(np.float64)
    own["mean_mib"] = sweep.size / counts / 2**20
    own["overhead"] = own["median_ms"] - bare["median"]
    # The interval of a difference, as of independent ones: what is subtracted is turned.
    for end, other, sign in (("low", bare["ci_high"], -1), ("high", bare["ci_low"], 1)):
        ends = own[f"ci_{end}_ms"].astype("float64") - own["median_ms"]
        base = (other or bare["median"]) - bare["median"]
        own[f"overhead_{end}"] = own["overhead"] + sign * np.hypot(ends, base)
    sizes = [f"{settings['wrapper']['bucket_size_mb']:g} MB" for settings in own["settings"]]
    line = points(own, "mean_mib", "overhead", ("overhead_low", "overhead_high"))
    line["text"] = line["x"].map(dict(zip(own["mean_mib"], sizes, strict=True)))
    cost = sweep.fit(own["overhead"].to_numpy(np.float64) / 1e3)
    many = np.geomspace(counts.min(), counts.max(), 100)
    model = 1e3 * (sweep.size / many * cost.per_byte_s + many * cost.overhead_s)
    curve = ((sweep.size / many / 2**20).tolist(), model.tolist())
    lines, y = {"measured": line}, "overhead (ms)"
    panel = Panel(title=sweep.bare["label"], y=y, lines=lines, curve=curve, log=False)
    return draw_lines([panel], x="mean gradients per bucket (MiB), labels: bucket_size_mb")
