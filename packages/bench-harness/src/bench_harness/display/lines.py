"""Lines over a logarithmic axis, with the 95 % interval of every point.

Axes follow the points. An interval that reaches beyond them is cut, and marked there. A point that
is not steady is a ring, and two points are not joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench_harness.display.bars import colours
from bench_harness.display.plots import new_figure
from bench_harness.display.row_tables import steady

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: More lines than this are named in a legend, and not at their ends.
_NAMED = 6


def points(rows: pd.DataFrame, x: str, y: str, ends: tuple[str, str] | None = None) -> pd.DataFrame:
    """The points of a line in the order of ``x``: ``x``, ``y``, ``low``, ``high`` and ``steady``.

    Rows of the same x, as of two cases, are put together. Rows without a y are left out.

    Args:
        ends: columns with the ends of the 95 % interval; None for what does not vary.
    """
    import pandas as pd

    rows = rows[rows[y].notna()]
    values = rows[y].astype("float64")
    low, high = (rows[end].astype("float64").fillna(values) for end in ends or (y, y))
    known = steady(rows) if ends else pd.Series(True, index=rows.index)
    made = pd.DataFrame({"x": rows[x], "y": values, "low": low, "high": high, "steady": known})
    how = {"y": "median", "low": "min", "high": "max", "steady": "all"}
    return made.groupby("x").agg(how).reset_index()


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
        y: what its vertical axis is.
        lines: :func:`points` by name; a column ``text``, if there is one, stands beside them.
        curve: x and y of a model, without points.
        log: whether the vertical axis is logarithmic, too; else it begins at 0.
    """

    y: str
    lines: Mapping[str, pd.DataFrame]
    title: str = ""
    curve: tuple[Sequence[float], Sequence[float]] | None = None
    log: bool = True


def draw_lines(panels: Sequence[Panel], *, x: str, base: int = 2, columns: int = 1) -> Figure:
    """Panels in rows, on logarithmic horizontal axes of the same meaning."""
    height = -(-len(panels) // columns)
    figure, axes = new_figure(
        rows=height, columns=columns, width=max(5.6, 3.4 * columns), height=2.9 * height + 0.4
    )
    colour = colours(name for panel in panels for name in panel.lines)
    at_ends = (columns == 1 and len(colour) <= _NAMED) or any(panel.curve for panel in panels)
    for plot, panel in zip(axes.flat, panels, strict=False):
        _draw(plot, panel, colour, x, base)
        if at_ends and panel.curve is None:
            _name_ends(plot, panel.lines, colour)
    for plot in axes.flat[len(panels) :]:
        plot.set_visible(False)
    if not at_ends:
        drawn = (zip(*plot.get_legend_handles_labels(), strict=True) for plot in axes.flat)
        named = {name: line for lines in drawn for line, name in lines}
        across = 4 if columns > 1 else 2
        figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=across)
    return figure


def _draw(plot: Axes, panel: Panel, colour: Mapping[str, str], x: str, base: int) -> None:
    ys: list[float] = []
    for name, line in panel.lines.items():
        joined = "o-" if len(line) > 2 and panel.curve is None else "o"
        plot.plot(line["x"], line["y"], joined, color=colour[name], label=name, markersize=5)
        plot.vlines(line["x"], line["low"], line["high"], color=colour[name], linewidth=1.2)
        rings = line[~line["steady"]]
        plot.plot(rings["x"], rings["y"], "o", color=colour[name], markerfacecolor="white")
        for _, point in line.iterrows() if "text" in line else ():
            place = point["x"], point["y"]
            plot.annotate(
                point["text"], place, (6, 4), textcoords="offset points", fontsize="small"
            )
        ys += line["y"].to_list()
    if panel.curve is not None:
        plot.plot(*panel.curve, "-", color="#d55e00", label="model")
        plot.legend()
    plot.set_title(panel.title)
    low, top = min(ys, default=0.0), max(ys, default=1.0)
    log = panel.log and low > 0  # errors of fp32 may be 0
    _scale(plot, (low / 1.3, 1.3 * top) if log else (min(0.0, 1.1 * low), 1.1 * top or 1.0), log)
    plot.set_xscale("log", base=base)
    plot.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    plot.set_xlabel(x)
    plot.set_ylabel(panel.y)
    ticks = sorted({each for line in panel.lines.values() for each in line["x"]})
    if panel.curve is None and base == 2 and len(ticks) <= 6:
        plot.set_xticks(ticks, [f"{each:g}" for each in ticks])
    for name, line in panel.lines.items():
        for end, edge, mark in (("high", 1, "^"), ("low", 0, "v")):
            limit = plot.get_ylim()[edge]
            cut = line[line[end] > limit] if edge else line[line[end] < limit]
            plot.plot(cut["x"], [limit] * len(cut), mark, color=colour[name])


def _scale(plot: Axes, limits: tuple[float, float], log: bool) -> None:
    """The vertical axis, with plain numbers at its ticks."""
    from matplotlib.ticker import LogLocator, NullLocator

    if log:
        plot.set_yscale("log")
        # Within a decade or two, powers of ten alone are too few to read a value.
        steps = (1.0, 2.0, 5.0) if limits[1] < 300 * limits[0] else (1.0,)
        plot.yaxis.set_major_locator(LogLocator(subs=steps))
        plot.yaxis.set_minor_locator(NullLocator())
        plot.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    plot.set_ylim(*limits)


def _name_ends(plot: Axes, lines: Mapping[str, pd.DataFrame], colour: Mapping[str, str]) -> None:
    """Names lines at their right ends, moved apart where they would overlap."""
    gap = 0.075  # of the height
    to_share = plot.transData + plot.transAxes.inverted()
    ends = {name: line["y"].iloc[-1] for name, line in lines.items() if len(line)}
    right = plot.get_xlim()[1]
    shares = {name: float(to_share.transform((right, end))[1]) for name, end in ends.items()}
    placed: dict[str, float] = {}
    for name in sorted(shares, key=shares.__getitem__):
        placed[name] = max(shares[name], max(placed.values(), default=-gap) + gap)
    over = max(0.0, max(placed.values(), default=0.0) - 1.0)
    for name, place in placed.items():
        plot.annotate(name, (1.02, place - over), xycoords="axes fraction", color=colour[name],
                      va="center", fontsize="small")  # fmt: skip
