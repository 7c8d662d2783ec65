"""Pictures of data-parallel steps: bars from rows."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from bench_harness.report.plots import COLOURS, new_figure, png_bytes


def draw_speed(table: pd.DataFrame, labels: Mapping[str, str]) -> bytes:
    """Bars of the median step, cell by cell; communication that is not hidden stands out.

    Args:
        table: rows of ``bench_ddp.py``, any order; cells that did not measure the step without
            communication are left out.
        labels: what to call each variant.
    """
    cells = list(dict.fromkeys(table.cell[table.variant == "no-communication"]))
    most = max(sum(table.cell == cell) for cell in cells)
    size = {"width": 1 + 5.2 * len(cells), "height": 1.3 + 0.3 * most}
    figure, axes = new_figure(columns=len(cells), **size)
    for plot, cell in zip(axes[0], cells, strict=True):
        own = table[table.cell == cell].sort_values("median_ms", ascending=False)
        alone = float(own.median_ms[own.variant == "no-communication"].iloc[0])
        plain = (labels[name].replace("`", "").replace("*", "") for name in own.variant)
        names = [name.partition(" (")[0] for name in plain]
        plot.barh(names, own.median_ms.clip(upper=alone), color=COLOURS[0])
        exposed = (own.median_ms - alone).clip(lower=0)
        plot.barh(names, exposed, left=alone, color=COLOURS[1], label="exposed communication")
        for place, (ms, more) in enumerate(zip(own.median_ms, exposed, strict=True)):
            text = f" {ms:.1f} (+{more:.1f})" if more else f" {ms:.1f}"
            plot.annotate(text, (ms, place), va="center", fontsize="x-small")
        precision, batch, sequence = cell.split(",")
        plot.set_title(f"{precision}, batch {batch} × {sequence}")
        plot.set_xlabel("median step (ms)")
        plot.set_xlim(0, own.median_ms.max() * 1.45)
        plot.tick_params(axis="y", labelsize="x-small")
        plot.grid(visible=False, axis="y")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center")
    return png_bytes(figure)
