"""Bars and lines that show how sure they are: 95 % intervals, and hollow marks where unstable.

Every picture of measured figures draws them with these functions, so that a figure that scatters or
drifts too much to quote looks the same everywhere, and an implementation has one colour everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bench_harness.display.plots import COLOURS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Colours, by their place in the palette, of names that several pictures show.
_FIXED = {
    name: position
    for position, names in enumerate(
        (
            ("flashattn-triton", "forward", "training forward", "matmul", "all_reduce"),
            ("naive", "backward", "other", "reduce_scatter"),
            ("sdpa-flash", "optimizer", "fused attention", "all_gather"),
            ("sdpa-cudnn", "communication", "broadcast"),
            ("flex", "naive-compiled"),
            ("flashattn-triton-portable", "inference"),
            ("flash-attn-4", "model"),
        )
    )
    for name in names
}
#: What readers need to know of the marks, once per page.
LEGEND = (
    "Bars and points are medians, and whiskers their 95 % intervals. A hollow one must not be "
    "quoted: its samples scatter or drift too much, or are too short for the timer."
)


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: the same in every picture, and different within one if possible."""
    chosen: dict[str, str] = {}
    for name in dict.fromkeys(map(str, names)):
        own = _FIXED.get(name, zlib.crc32(name.encode()) % len(COLOURS))
        order = [*COLOURS[own:], *COLOURS[:own]]
        free = [colour for colour in order if colour not in chosen.values()]
        chosen[name] = COLOURS[own] if name in _FIXED or not free else free[0]
    return chosen


def steady(rows: pd.DataFrame) -> pd.Series[Any]:
    """Whether each median of :func:`bench_harness.stats.with_summary` may be quoted."""
    shaky = rows["unstable"].map(lambda value: value is True or value == 1)
    if "too_short" in rows:
        shaky |= rows["too_short"].map(lambda value: value is True or value == 1)
    return ~shaky


def whiskers(rows: pd.DataFrame) -> tuple[list[float], list[float]]:
    """How far the 95 % interval reaches below and above each median; 0 where there is none.

    And 0 for less than a billionth of the median: matplotlib cannot draw an axis of that height.
    """
    median = rows["median_ms"]
    low = median - rows["ci_low_ms"].astype("float64")
    high = rows["ci_high_ms"].astype("float64") - median
    below, above = (reach.where(reach > 1e-9 * median, 0.0).to_list() for reach in (low, high))
    return below, above


def bars(
    plot: Axes,
    positions: Sequence[float],
    widths: Sequence[float],
    *,
    colour: str,
    filled: Sequence[bool],
    left: Sequence[float] | None = None,
    errors: tuple[Sequence[float], Sequence[float]] | None = None,
    label: str | None = None,
    height: float = 0.7,
) -> None:
    """Horizontal bars; those that are not ``filled`` are outlines.

    Args:
        left: where each bar begins; 0 by default.
        errors: length of each bar's whiskers, to the left and to the right of its end.
    """
    begins = list(left) if left is not None else [0.0] * len(positions)
    for position, width, begin, full in zip(positions, widths, begins, filled, strict=True):
        plot.barh(
            position,
            width,
            left=begin,
            height=height,
            facecolor=colour if full else "none",
            edgecolor=colour,
            hatch=None if full else "////",
            linewidth=1.0,
        )
    if label is not None:  # one entry of the legend, however the bars look
        plot.barh([positions[0]], [0.0], color=colour, label=label, height=height)
    if errors is not None and any(map(any, errors)):
        ends = [begin + width for begin, width in zip(begins, widths, strict=True)]
        plot.errorbar(
            ends, list(positions), xerr=[list(errors[0]), list(errors[1])],
            fmt="none", ecolor="#555555", elinewidth=1.2, capsize=3,
        )  # fmt: skip


def line(
    plot: Axes,
    x: Sequence[float],
    y: Sequence[float],
    *,
    colour: str,
    filled: Sequence[bool] | None = None,
    errors: tuple[Sequence[float], Sequence[float]] | None = None,
    label: str | None = None,
) -> None:
    """Points joined by a line; those that are not ``filled`` are rings.

    Args:
        errors: length of each point's whiskers, below and above it.
    """
    plot.plot(x, y, "o-", color=colour, label=label, linewidth=1.2, markersize=5)
    if errors is not None and any(map(any, errors)):
        plot.errorbar(
            x,
            y,
            yerr=[list(errors[0]), list(errors[1])],
            fmt="none",
            ecolor=colour,
            elinewidth=1.2,
            capsize=3,
        )
    rings = [] if filled is None else [position for position, full in enumerate(filled) if not full]
    if rings:
        plot.plot(
            [x[position] for position in rings],
            [y[position] for position in rings],
            "o",
            color=colour,
            markersize=5,
            markerfacecolor="white",
        )


def label_ends(plot: Axes, ends: Sequence[tuple[str, float, str]], *, gap: float = 0.075) -> None:
    """Names lines at their right ends, moved apart where they would overlap.

    Args:
        ends: name, last value and colour of each line; call it once everything is drawn.
        gap: least distance of two names, as a share of the height.
    """
    plot.autoscale_view()
    to_share = plot.transData + plot.transAxes.inverted()
    x = plot.get_xlim()[1]
    shares = [float(to_share.transform((x, value))[1]) for _, value, _ in ends]
    order = sorted(range(len(ends)), key=shares.__getitem__)
    positions: dict[int, float] = {}
    least = 0.0
    for index in order:
        positions[index] = max(shares[index], least)
        least = positions[index] + gap
    over = max(0.0, least - gap - 1.0)
    for index, (name, _, colour) in enumerate(ends):
        plot.annotate(
            name,
            (1.02, positions[index] - over),
            xycoords="axes fraction",
            color=colour,
            va="center",
            fontsize="small",
        )
