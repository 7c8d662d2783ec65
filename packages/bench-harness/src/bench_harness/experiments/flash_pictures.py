"""Pictures of the flash experiment's rows: times over lengths, and errors by variant."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from bench_harness.experiments import present

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as MatplotlibFigure


def draw_grid(done: pd.DataFrame) -> MatplotlibFigure:
    """Time of forward and backward over sequence length, a panel per dtype and head dimension.

    Args:
        done: rows with their statistics.
    """
    from bench_harness.report.plots import COLOURS, new_figure

    whole = done[done["phase"] == "forward+backward"]
    whole = whole.sort_values(["dtype", "head_dim"], kind="stable")
    panels = present.by(whole, ["dtype", "head_dim"])
    columns = min(4, len(panels))
    height = -(-len(panels) // columns)
    figure, axes = new_figure(
        rows=height, columns=columns, width=3.4 * max(2, columns), height=3.2 * height + 0.5
    )
    colour = dict(zip(whole["variant"].unique(), COLOURS * 2, strict=False))
    drawn: dict[str, Any] = {}
    for plot, (title, panel) in zip(axes.flat, panels, strict=False):
        for variant, group in panel.groupby("variant", sort=False):
            part = group.groupby("sequence")["median_ms"].median()
            (drawn[str(variant)],) = plot.plot(
                part.index, part.to_numpy(), "o-", color=colour[variant]
            )
        plot.set_title(title or "forward + backward")
        present.log_axes(plot, x="sequence length (tokens)", y="median time (ms)")
    for plot in list(axes.flat)[len(panels) :]:
        plot.set_visible(False)
    figure.legend(drawn.values(), drawn.keys(), loc="outside upper center", ncols=4)
    return figure


def draw_errors(done: pd.DataFrame, column: str, longest: int) -> MatplotlibFigure:
    """Errors by variant, a panel per dtype, a colour per head dimension.

    Args:
        column: of the error, a share of the largest value.
        longest: longer sequences were checked at this length, and are left out where they can be.
    """
    from matplotlib.ticker import NullFormatter

    from bench_harness.report.plots import COLOURS, new_figure

    cell = ["dtype", "head_dim", "sequence", "variant"]
    checked = done[done["sequence"] <= longest]
    shown = (checked if len(checked) else done).drop_duplicates(cell)
    panels = present.by(shown, ["dtype"])
    lines = max(panel["variant"].nunique() for _, panel in panels)
    figure, axes = new_figure(columns=len(panels), width=10, height=1.6 + 0.36 * lines)
    for plot, (title, panel) in zip(axes[0], panels, strict=True):
        names = list(panel["variant"].unique())
        dimensions = sorted(panel["head_dim"].unique())
        for place, dimension in enumerate(dimensions):
            part = panel[panel["head_dim"] == dimension]
            # Apart in height, so that equal errors do not hide each other.
            shift = 0.12 * (place - (len(dimensions) - 1) / 2)
            plot.plot(
                part[column],
                [names.index(name) + shift for name in part["variant"]],
                "o",
                color=COLOURS[place % len(COLOURS)],
                label=f"head_dim {int(dimension)}",
            )
        plot.set_xscale("log")
        positive = panel.loc[panel[column] > 0, column]
        if len(positive):  # whole decades, so that both ends have a number
            ends = math.floor(math.log10(positive.min())), math.ceil(math.log10(positive.max()))
            plot.set_xlim(10.0 ** ends[0], 10.0 ** max(ends[1], ends[0] + 1))
        plot.xaxis.set_minor_formatter(NullFormatter())
        plot.set_yticks(range(len(names)), names)
        plot.set_ylim(len(names) - 0.5, -0.5)
        plot.set_title(title or str(panel["dtype"].iloc[0]))
        plot.set_xlabel("error (share of the largest value)")
    handles, named = max(
        (plot.get_legend_handles_labels() for plot in axes[0]), key=lambda found: len(found[1])
    )
    figure.legend(handles, named, loc="outside upper center", ncols=4)
    return figure
