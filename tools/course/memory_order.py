"""Memory in use over the order of allocations, drawn.

``bench-harness memory`` draws it over time, most of which the first pass of a process waits for
libraries that load. Here stretches of equally many allocations and frees have the same width. What
comes before the pass, the building of the model and a first step, is one band, not on the axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from bench_harness.display.bars import colours
from bench_harness.display.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = "memory_in_order"
_BEFORE, _HELD = ("model", "first step"), "held before"


def figure(rows: pd.DataFrame) -> Figure:
    """Memory of one case of ``memory`` in its pass, stacked by the phase that allocated it."""
    (line,) = rows["timeline"].dropna()
    starts = {name: at for name, at in line["phase_starts_ms"].items() if name not in _BEFORE}
    times = np.array(line["time_ms"])
    kept = times >= min(starts.values())
    held: dict[str, np.ndarray] = {}
    for phase, values in line["bytes"].items():
        name = _HELD if phase in _BEFORE else phase
        held[name] = held.get(name, 0) + np.array(values)[kept] / 2**30
    total, share = np.sum(list(held.values()), axis=0), np.linspace(0, 100, kept.sum())
    drawn, ((plot,),) = new_figure(height=3.4)
    colour = [{**colours(held), _HELD: "0.75"}[name] for name in held]
    plot.stackplot(share, *held.values(), labels=list(held), step="post", colors=colour)
    for name, start in starts.items():
        first = share[(times[kept] < start).sum()]
        plot.axvline(first, color="black", linestyle=":", linewidth=1)
        plot.annotate(name, (first, 1.01), xycoords=("data", "axes fraction"), fontsize="small")
    # The axis begins above zero where nearly everything is always held.
    bottom = total.min() - 0.15 * np.ptp(total) if total.min() > 0.8 * total.max() else 0.0
    plot.set_ylim(bottom, total.max() + 0.1 * (total.max() - bottom))
    plot.set_xlim(0, 100)
    plot.set_xlabel("allocations and frees in their order (%)")
    plot.set_ylabel(f"memory in use (GiB), {total.max():.3g} at most")
    drawn.legend(loc="outside lower center", ncols=4, title="allocated in")
    return drawn
