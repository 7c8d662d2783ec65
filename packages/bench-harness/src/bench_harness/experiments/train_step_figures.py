"""Pictures of training steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from bench_harness.core import Figure
from bench_harness.display import marks, row_tables, units
from bench_harness.display.plots import COLOURS, new_figure
from bench_harness.experiments import recomputation
from bench_harness.experiments.bucket_model import draw_fit
from bench_harness.experiments.train_step_tables import compared
from bench_harness.stats import with_summary
from bench_harness.traces import waterfall
from bench_harness.traces.picture import draw_overlap

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure

#: What a rank holds by the name of its part in a row.
_KINDS = {"parameter": "parameters", "gradient": "gradients", "state": "optimizer state"}


def figures(rows: pd.DataFrame) -> list[Figure]:
    """Every picture that the rows have something for."""
    done = row_tables.finished(rows)
    if "settings" not in done or done.empty:
        return []
    done = compared(with_summary(done))
    timed = done[done["median_ms"].notna()]
    made = []
    if len(timed):
        made.append(
            Figure(
                "train_steps",
                "Step time by variant",
                _draw_steps(timed),
                "What is beyond the same step without communication is exposed.",
            )
        )
    if "memory" in done and done["memory"].notna().any():
        drawn = _draw_memory(done)
        if drawn is not None:
            title = "Memory per rank at its moments"
            made.append(Figure("train_step_memory", title, drawn, folded=True))
    profiled = done[done["timeline"].notna()] if "timeline" in done else done.iloc[:0]
    for index, (_, cell) in enumerate(profiled.groupby("case_key", sort=False)):
        lines = dict(zip(cell["variant"], cell["timeline"], strict=True))
        lines.pop("no communication", None)
        if lines:
            made.append(
                Figure(
                    f"train_step_overlap_{index}",
                    f"Overlap: {cell['label'].iloc[0]}",
                    draw_overlap(lines),
                    "One step of each variant, on the rank that waited least for others; "
                    f"{cell['spans'].iloc[0]}. Black line: its end.",
                )
            )
    broken = done[done["waterfall"].notna()] if "waterfall" in done else done.iloc[:0]
    for index, (_, cell) in enumerate(broken.groupby("case_key", sort=False)):
        made.append(
            Figure(
                f"train_step_waterfall_{index}",
                f"Where the time goes: {cell['label'].iloc[0]}",
                waterfall.draw(dict(zip(cell["variant"], cell["waterfall"], strict=True))),
                "One profiled step, on the rank that waited least for others; "
                f"{cell['spans'].iloc[0]}.",
            )
        )
    made += recomputation.figures(done)
    sweep = draw_fit(timed)
    if sweep is not None:
        made.append(
            Figure(
                "train_step_buckets",
                "Exposed communication over bucket size",
                sweep,
                "Points: step minus the step without communication. Line: fitted model.",
            )
        )
    return made


def _draw_steps(done: pd.DataFrame) -> MatplotlibFigure:
    """A panel per case, a bar per variant with its name above it, the fastest first."""
    cells = [cell.sort_values("median_ms") for _, cell in done.groupby("case_key", sort=False)]
    lines = sum(len(cell) for cell in cells)
    figure, axes = new_figure(rows=len(cells), height=0.5 + 0.7 * len(cells) + 0.46 * lines)
    for plot, cell in zip(axes[:, 0], cells, strict=True):
        ys = [float(y) for y in range(len(cell))]
        filled = marks.steady(cell).to_list()
        exposed = cell["exposed_step_ms"].fillna(0).clip(lower=0)
        bare = (cell["median_ms"] - exposed).to_list()
        marks.bars(
            plot,
            ys,
            bare,
            colour=COLOURS[0],
            label="the step without it",
            filled=filled,
            height=0.4,
        )
        marks.bars(
            plot,
            ys,
            exposed.to_list(),
            left=bare,
            colour=COLOURS[1],
            errors=marks.whiskers(cell),
            label="exposed communication",
            filled=cell["exposed_quotable"].to_list(),
            height=0.4,
        )
        for y, name in zip(ys, cell["variant"], strict=True):
            size = 8.3 * min(1.0, 80 / len(name))  # so that the longest names fit the width
            plot.annotate(name, (0, y - 0.25), (2, 0), textcoords="offset points",
                          va="bottom", fontsize=size)  # fmt: skip
        plot.set_ylim(len(cell) - 0.6, -0.8)
        plot.set_yticks([])
        plot.set_xlim(left=0)
        if len(cells) > 1:
            plot.set_title(cell["label"].iloc[0].removeprefix("train-step "))
        plot.set_xlabel("median step (ms)")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=2)
    return figure


def _draw_memory(done: pd.DataFrame) -> MatplotlibFigure | None:
    """Stacked bars of the first cell: what is held at each moment, by kind."""
    _, cell = next(iter(done[done["memory"].notna()].groupby("case_key", sort=False)))
    held = [row for _, row in cell.iterrows() if isinstance(row["memory"], list)]
    if not held:
        return None
    bars = [
        (f"{row['variant']}, {moment['moment']}", _held(moment))
        for row in held
        for moment in row["memory"]
    ]
    unit, size = units.scale([sum(parts.values()) for _, parts in bars], "B")
    longest = max(len(name) for name, _ in bars)
    figure, axes = new_figure(width=5 + 0.06 * longest, height=1.2 + 0.24 * len(bars))
    plot = axes[0, 0]
    for y, (_, parts) in enumerate(bars):
        left = 0.0
        for colour, (part, nbytes) in zip(COLOURS, parts.items(), strict=False):
            width = nbytes / size
            plot.barh(y, width, left=left, color=colour, label=None if y else part)
            left += width
    plot.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize="x-small")
    plot.invert_yaxis()
    plot.set_xlabel(f"memory per rank ({unit})")
    figure.legend(loc="outside upper center", ncols=4)
    return figure


def _held(moment: Mapping[str, Any]) -> dict[str, float]:
    """Bytes at a moment by kind; on a GPU also what the allocator counts beyond them."""
    parts = {name: float(moment[f"{part}_bytes"]) for part, name in _KINDS.items()}
    if moment["allocated_bytes"] is not None:
        rest = moment["allocated_bytes"] - sum(parts.values())
        parts["activations and buffers"] = max(rest, 0.0)
    return parts
