"""Memory in use over the order of allocations, drawn.

``bench-harness memory`` draws memory over time. The first pass of a process waits most of its time
for libraries that load, which such a picture shows as long flat stretches. Here each point of a
timeline has the same width: they are stretches of equally many allocations and frees. What comes
before the pass, the building of the model and a first step, is left out of the axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from bench_harness.display.bars import colours
from bench_harness.display.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURE = "memory_in_order"
_GIB = 2**30
_GREY = "0.75"
#: Phases before the pass that is drawn.
_BEFORE = ("model", "first step")
#: An axis begins above zero where what is always held takes a larger share than this.
_MOSTLY_HELD = 0.8


def figure(rows: pd.DataFrame) -> Figure:
    """Memory of one case from the beginning of its pass, stacked by the phase that allocated it.

    Args:
        rows: of one case of ``memory``.

    Raises:
        ValueError: the rows hold no timeline, or several.
    """
    lines = rows["timeline"].dropna().tolist()
    if len(lines) != 1:
        raise ValueError(f"rows must hold one timeline, but got {len(lines)}. Name one case.")
    (line,) = lines
    starts = {name: at for name, at in line["phase_starts_ms"].items() if name not in _BEFORE}
    begin = min(starts.values())
    kept = [index for index, at in enumerate(line["time_ms"]) if at >= begin]
    held = {
        ("held before" if phase in _BEFORE else phase): [0.0] * len(kept) for phase in line["bytes"]
    }
    for phase, values in line["bytes"].items():
        name = "held before" if phase in _BEFORE else phase
        held[name] = [
            sum(pair) for pair in zip(held[name], (values[i] / _GIB for i in kept), strict=True)
        ]
    totals = [sum(values) for values in zip(*held.values(), strict=True)]
    share = [100 * place / (len(kept) - 1) for place in range(len(kept))]
    drawn, axes = new_figure(height=3.4)
    plot = axes[0, 0]
    colour = {**colours(held), "held before": _GREY}
    plot.stackplot(share, *held.values(), labels=list(held), step="post",
                   colors=[colour[name] for name in held])  # fmt: skip
    for name, start in starts.items():
        first = share[sum(line["time_ms"][i] < start for i in kept)]
        plot.axvline(first, color="black", linestyle=":", linewidth=1)
        plot.annotate(name, (first, 1.01), xycoords=("data", "axes fraction"), fontsize="small")
    peak = max(range(len(totals)), key=totals.__getitem__)
    plot.plot([share[peak]], [totals[peak]], "k.")
    late = share[peak] > share[-1] / 2
    text, at = f"peak {totals[peak]:.3g} GiB", (share[peak], totals[peak])
    plot.annotate(text, at, (-5 if late else 5, 3), textcoords="offset points",
                  ha="right" if late else "left", va="bottom", fontsize="small")  # fmt: skip
    low, span = min(totals), max(totals) - min(totals)
    bottom = low - 0.15 * span if low > _MOSTLY_HELD * max(totals) else 0.0
    plot.set_ylim(bottom, max(totals) + 0.15 * (max(totals) - bottom))
    plot.set_xlim(0, 100)
    plot.set_xlabel("allocations and frees in their order (%)")
    plot.set_ylabel("memory in use (GiB)")
    drawn.legend(loc="outside lower center", ncols=4, title="allocated in")
    return drawn
