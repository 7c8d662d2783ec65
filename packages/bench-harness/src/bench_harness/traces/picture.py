"""Draws computation above communication, one variant under the other on one time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bench_harness.core import Row
from bench_harness.traces.intervals import Interval, clip, union
from bench_harness.traces.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Gaps narrower than this share of the window cannot be seen and are closed.
_RESOLUTION = 1 / 2000


def timeline(trace: Trace, window: Interval, late: Sequence[Sequence[int]] = ()) -> Row:
    """What a picture needs of a trace, as JSON: merged intervals in microseconds from the start.

    Args:
        late: intervals in which the computation waited for a late gather.
    """
    waits = [(start, end) for start, end in late]
    drawn = {"late_us": _drawable(waits, window)} if waits else {}
    return {
        **drawn,
        "window_us": (window[1] - window[0]) / 1e3,
        "compute_us": _drawable([e.interval for e in trace.compute], window),
        "communication_us": _drawable([e.interval for e in trace.communication], window),
        "exposed_ms": trace.overlap(window).exposed_ns / 1e6,
    }


def _drawable(intervals: Sequence[Interval], window: Interval) -> list[list[float]]:
    gap = int((window[1] - window[0]) * _RESOLUTION)
    widened = union((start, end + gap) for start, end in clip(intervals, window))
    begin, finish = window
    return [
        [(start - begin) / 1e3, (min(end - gap, finish) - begin) / 1e3] for start, end in widened
    ]


def draw_overlap(timelines: Mapping[str, Row]) -> Figure:
    """One pair of lanes per variant, all on the same time axis from the start of the step.

    Args:
        timelines: variant → :func:`timeline`; drawn from top to bottom in this order.
    """
    from matplotlib.patches import Patch

    from bench_harness.display.bars import COLOURS
    from bench_harness.display.plots import new_figure

    figure, axes = new_figure(width=9, height=0.9 + 0.85 * len(timelines))
    plot = axes[0, 0]
    late = any(line.get("late_us") for line in timelines.values())
    lanes = (
        ("compute_us", 0.0, COLOURS[0]),
        ("late_us", 0.0, COLOURS[3]),
        ("communication_us", 0.4, COLOURS[1]),
    )
    for y, (variant, line) in enumerate(timelines.items()):
        plot.annotate(variant, (0, y - 0.03), va="bottom", fontsize="small")
        for name, offset, colour in lanes:
            bars = [(start / 1e3, (end - start) / 1e3) for start, end in line.get(name, [])]
            plot.broken_barh(bars, (y + offset * 0.8, 0.29), color=colour, linewidth=0)
        plot.plot([line["window_us"] / 1e3] * 2, [y - 0.03, y + 0.65], "k-", linewidth=1)
        plot.annotate(
            f" {line['exposed_ms']:.3g} ms exposed",
            (line["window_us"] / 1e3, y + 0.31),
            va="center",
            fontsize="small",
        )
    plot.set_yticks([])
    plot.set_ylim(len(timelines) - 0.15, -0.3)
    longest = max(line["window_us"] for line in timelines.values()) / 1e3
    plot.set_xlim(0, longest * 1.15)
    plot.set_xlabel("time since the step began (ms)")
    plot.grid(visible=False)
    named = [("computation", COLOURS[0]), ("communication", COLOURS[1])]
    named += [("waiting for a late gather", COLOURS[3])] * late
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in named],
        loc="outside upper center",
        ncols=3,
    )
    return figure
