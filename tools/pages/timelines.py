"""Drawings of timelines for pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from bench_harness.core import Row, Timelines
from bench_harness.display.bars import COLOURS
from bench_harness.display.plots import new_figure
from bench_harness.traces.intervals import union
from bench_harness.traces.timeline import WORK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Gaps narrower than one of so many parts of the window cannot be seen in a drawing and are closed.
_RESOLUTION = 2000
#: Greys of the phases of a step, which take turns.
_GREYS = ("0.85", "0.72")
#: Height of the strip that names the phases, where a row holds their marks.
_STRIP = 0.2
#: A start and a length.
_Bars: TypeAlias = list[tuple[float, float]]


def draw(timelines: Timelines) -> Figure:
    """Computation above communication of each variant, on one time axis from the step's start.

    A strip above them has the marks of forward, backward and optimizer, if a row holds them.
    """
    from matplotlib.patches import Patch

    colour = {"computation": COLOURS[0], "late": COLOURS[3], "communication": COLOURS[1]}
    lines = {name: bars_of(line) for name, line in timelines.items()}
    marks = {name: phases_of(line) for name, line in timelines.items()}
    strip = _STRIP if any(marks.values()) else 0.0
    figure, axes = new_figure(width=9, height=0.9 + 0.85 * (1 + strip) * len(lines))
    plot = axes[0, 0]
    for number, (variant, (window, exposed, lanes)) in enumerate(lines.items()):
        y = number * (1 + strip)
        plot.annotate(variant, (0, y - 0.03), va="bottom", fontsize="small")
        for place, (phase, start, end) in enumerate(marks[variant]):
            plot.broken_barh([(start, end - start)], (y, strip - 0.03), color=_GREYS[place % 2])
            plot.annotate(phase, (start, y + strip / 2 - 0.015), va="center", fontsize="x-small",
                          xytext=(2, 0), textcoords="offset points")  # fmt: skip
        for name, bars in lanes.items():
            top = y + strip + 0.32 * (name == "communication")
            plot.broken_barh(bars, (top, 0.29), color=colour[name], linewidth=0)
        plot.plot([window] * 2, [y + strip - 0.03, y + strip + 0.65], "k-", linewidth=1)
        plot.annotate(f" {exposed:.3g} ms exposed", (window, y + strip + 0.31),
                      va="center", fontsize="small")  # fmt: skip
    plot.set_yticks([])
    plot.set_ylim(len(lines) * (1 + strip) - 0.15, -0.3)
    plot.set_xlim(0, 1.15 * max(window for window, _, _ in lines.values()))
    plot.set_xlabel("time since the step began (ms)")
    plot.grid(visible=False)
    named = {name: name for name in ("computation", "communication")}
    if any(lanes["late"] for _, _, lanes in lines.values()):
        named["late"] = "waiting for a late gather"
    handles = [Patch(color=colour[name], label=text) for name, text in named.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return figure


def bars_of(line: Row) -> tuple[float, float, dict[str, _Bars]]:
    """Of the rank that is drawn: its step and its exposed communication in ms, and its bars."""
    rank = line["ranks"][line["drawn"]]
    spans: Row = {"computation": [], "late": rank["late"], "communication": []}
    for lane in rank["lanes"]:
        end = 0
        for space, duration, name in zip(*[iter(lane["spans"])] * 3, strict=True):
            start, end = end + space, end + space + duration
            if (work := WORK[rank["work"][name]]) != "copy":
                own = work if work == "communication" else "computation"
                spans[own].append((start, end))
    gap = rank["window_ns"] // _RESOLUTION
    bars = {name: _joined(each, gap) for name, each in spans.items()}
    return rank["window_ns"] / 1e6, rank["exposed_ns"] / 1e6, bars


def phases_of(line: Row) -> list[tuple[str, float, float]]:
    """The marked phases of the rank that is drawn: names, starts and ends in ms."""
    phases = line["ranks"][line["drawn"]]["phases"]
    return [(name, start / 1e6, end / 1e6) for name, start, end in phases]


def _joined(spans: Iterable[tuple[int, int]], gap: int) -> _Bars:
    """Starts and lengths in ms, with narrow gaps closed."""
    joined = union((start, end + gap) for start, end in spans)
    return [(start / 1e6, (end - gap - start) / 1e6) for start, end in joined]
