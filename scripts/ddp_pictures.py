"""Pictures of data-parallel steps: timelines from traces, bars from rows."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from bench_harness.report.plots import COLOURS, new_figure, png_bytes
from bench_harness.traces import kineto
from bench_harness.traces.intervals import Interval, clip, total, union
from bench_harness.traces.trace import Trace


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


def one_step(path: Path) -> tuple[Trace, Interval]:
    """A trace and its last step: from the end of one optimizer step to the end of the next."""
    trace = kineto.load(path)
    optimizer = sorted(k.interval for k in trace.compute if "Adam" in k.name)
    gaps = [
        (before[1], after[0])
        for before, after in itertools.pairwise(optimizer)
        if after[0] - before[1] > 10_000_000
    ]
    begin = gaps[-1][0] if gaps else min(k.start_ns for k in trace.compute)
    return trace, (begin, optimizer[-1][1])


def trim(folder: Path, kept_in: Path) -> None:
    """Keeps the last step of every trace in ``folder``, names and times only."""
    for path in sorted(folder.glob("*.json.gz")):
        _, (begin, end) = one_step(path)
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        kept = []
        for event in events:
            if event.get("cat") in ("kernel", "gpu_memcpy"):
                start = float(event["ts"]) * 1e3
                if begin - 1e3 <= start <= end:
                    event["args"] = {"stream": event["args"].get("stream")}
                    kept.append(event)
            elif event.get("ph") == "M":
                kept.append(event)
        target = kept_in / path.name
        kept_in.mkdir(parents=True, exist_ok=True)
        with gzip.open(target, "wt", compresslevel=9) as file:
            json.dump({"traceEvents": kept}, file)


def lanes_of(trace: Trace, window: Interval) -> dict[str, list[Interval]]:
    """What ran when: forward, backward, optimizer, communication."""
    turn = min(
        (k.start_ns for k in trace.compute if "nll_loss_backward" in k.name), default=window[0]
    )
    computing = [k for k in trace.compute if "symmetric_memory" not in k.name]
    optimizer = [k.interval for k in computing if "Adam" in k.name]
    others = [k.interval for k in computing if "Adam" not in k.name]
    between = [c.interval for c in trace.copies if "PtoP" in c.name]
    lanes = {
        "forward": [i for i in others if i[0] < turn],
        "backward": [i for i in others if i[0] >= turn],
        "optimizer": optimizer,
        "communication": [*(c.interval for c in trace.communication), *between],
    }
    return {name: union(clip(found, window)) for name, found in lanes.items()}


def draw_timelines(traces: Mapping[str, Path]) -> bytes:
    """A picture of one step per trace, on one time axis."""
    from matplotlib.patches import Patch

    colours = dict(
        zip(
            ("forward", "backward", "optimizer", "communication"),
            (COLOURS[5], COLOURS[0], COLOURS[2], COLOURS[1]),
            strict=True,
        )
    )
    figure, axes = new_figure(width=10, height=0.9 + 0.62 * len(traces))
    plot = axes[0, 0]
    ends = []
    for place, path in enumerate(traces.values()):
        trace, window = one_step(path)
        lanes = lanes_of(trace, window)
        for name, found in lanes.items():
            bars = [((a - window[0]) / 1e6, max(b - a, 20_000) / 1e6) for a, b in found]
            offset = 0.4 if name == "communication" else 0.0
            plot.broken_barh(bars, (place + offset, 0.36), color=colours[name], linewidth=0)
        busy = [i for name in ("forward", "backward", "optimizer") for i in lanes[name]]
        alone = total([*busy, *lanes["communication"]]) - total(busy)
        ends.append((window[1] - window[0]) / 1e6)
        text = f" {ends[-1]:.1f} ms, {alone / 1e6:.1f} ms of communication alone"
        plot.annotate(text, (ends[-1], place + 0.38), va="center", fontsize="x-small")
    plot.set_yticks([place + 0.38 for place in range(len(traces))], list(traces))
    plot.set_ylim(len(traces), -0.15)
    plot.set_xlim(0, max(ends) * 1.33)
    plot.set_xlabel("time since the end of the optimizer step before (ms)")
    plot.grid(visible=False)
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return png_bytes(figure)
