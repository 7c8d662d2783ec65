"""Rows of scripts/bench_attention.py: which are the same cell, and what they become.

A row is what was measured of one pass of one implementation on one problem: milliseconds, the
case's fields, and the GPU, versions and commit that the figure holds for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attention_cases import (
    CASES,
    CUDNN,
    DTYPES,
    EFFICIENT,
    FLASH,
    FLASH_4,
    FLEX,
    OURS,
    PASSES,
    PORTABLE,
    Case,
)

Row = dict[str, Any]
FIELDS = tuple(field.name for field in dataclasses.fields(Case))
BEGIN = "<!-- measured: scripts/bench_attention.py report writes what is between these marks -->\n"
END = "<!-- end of measured -->\n"
CELL = ["dtype", "head_dim", "mask", "length", "problem"]
ORDER = (OURS, PORTABLE, FLEX, FLASH, CUDNN, FLASH_4, EFFICIENT)


def rows_in(path: Path) -> list[Row]:
    """Rows of a file: one JSON object per line, or one list of them."""
    text = path.read_text() if path.exists() else ""
    if text.startswith("["):
        return list(json.loads(text))
    return [json.loads(line) for line in text.splitlines()]


def cell(row: Row) -> tuple[Any, ...]:
    """What was measured, and on which GPU: all rows of a cell are replaced together."""
    return tuple(row.get(key) for key in (*FIELDS, "set", "implementation", "gpu"))


def identity(row: Row) -> tuple[Any, ...]:
    """What a run need not measure again."""
    return (*cell(row), *(row.get(key) for key in ("torch", "triton", "commit")))


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """``new``, and those rows of ``old`` whose cell ``new`` does not hold."""
    added = list(new)
    replaced = {cell(row) for row in added}
    return [*(row for row in old if cell(row) not in replaced), *added]


def frame_of(rows: Iterable[Row]) -> Any:
    """The timed cells as a table."""
    import pandas as pd

    frame = pd.DataFrame([row for row in rows if row["set"] in CASES and "ms" in row])
    frame["mask"] = frame["causal"].map({True: "causal", False: "full"})
    heads = frame["heads"].astype(str)
    if "kv_heads" in frame:
        grouped = frame["kv_heads"].notna()
        shared = frame["kv_heads"].fillna(0).astype(int).astype(str)
        heads = heads.where(~grouped, heads + "/" + shared)
    batch, length = frame["batch"].astype(str), frame["length"].astype(str)
    frame["problem"] = batch + " × " + heads + " × " + length
    return frame


def lost_cells(frame: Any, factor: float) -> str:
    """A list of the passes in which ours takes more than ``factor`` times a peer's time."""
    times = frame.pivot_table(
        index=[*CELL, "pass"], columns="implementation", values="ms", aggfunc="median"
    )
    lines = []
    for ours in (OURS, PORTABLE):
        for peer in (FLASH, EFFICIENT, FLEX, CUDNN, FLASH_4):
            if ours not in times or peer not in times:
                continue
            both = times[[ours, peer]].dropna()
            slower = both[both[ours] > factor * both[peer]]
            lines.append(f"{ours} against {peer}: slower in {len(slower)} of {len(both)} cells")
            for index, row in slower.iterrows():
                name = ", ".join(map(str, index))
                ratio = row[ours] / row[peer]
                lines.append(f"- {name}: {row[ours]:.3f} against {row[peer]:.3f} ms, {ratio:.2f}")
            lines.append("")
    return "\n".join(lines)


def markdown(frame: Any) -> str:
    """All cells: forward / backward / both in milliseconds, implementations side by side.

    One table for each dtype; columns in which it has no cell are left out.
    """
    tables = []
    for dtype in [name for name in DTYPES if name in set(frame["dtype"])]:
        part = frame[frame["dtype"] == dtype]
        keys = [*CELL, "implementation"]
        wide = part.pivot_table(index=keys, columns="pass", values="ms", aggfunc="median")
        wide = wide[list(PASSES)].map(lambda ms: f"{ms:.3f}")
        cells = wide.agg(" / ".join, axis=1).unstack("implementation").fillna("–")
        cells = cells[[name for name in ORDER if name in cells]]
        cells = cells.reset_index().drop(columns="length")
        tables.append(str(cells.to_markdown(index=False)) + "\n")
    return "\n".join(tables)


def ratios(frame: Any) -> str:
    """Ours over the peers' time, forward / backward: least and greatest of all cells of a kind."""
    index = [*CELL, "pass"]
    times = frame.pivot_table(index=index, columns="implementation", values="ms", aggfunc="median")
    lines = []
    for ours in (name for name in (OURS, PORTABLE) if name in times):
        kinds = times.groupby(["dtype", "head_dim"]).groups
        for dtype, head_dim in sorted(kinds, key=lambda kind: ([*DTYPES].index(kind[0]), kind[1])):
            part = times.loc[kinds[dtype, head_dim]].dropna(subset=[ours])
            line = {"time of": ours, "dtype": dtype, "head_dim": head_dim}
            for peer in (name for name in ORDER[2:] if name in times):
                ratio = (part[ours] / part[peer]).dropna()
                passes = [ratio[ratio.index.get_level_values("pass") == p] for p in PASSES[:2]]
                spans = [f"{r.min():.2f}–{r.max():.2f}" for r in passes if len(r)]
                line[f"over {peer}"] = " / ".join(spans) or "–"
            if len(part):
                lines.append(line)
    import pandas as pd

    return str(pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True)) + "\n"


def rendered(text: str, frame: Any) -> str:
    """``text`` with its measured part renewed.

    Raises:
        ValueError: a mark is missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"the file must hold the marks {BEGIN.strip()!r} and {END.strip()!r}")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    cells = f"<details>\n<summary>All cells</summary>\n\n{markdown(frame)}\n</details>\n"
    return f"{before}{BEGIN}\n{ratios(frame)}\n{cells}\n{END}{after}"


def draw(frame: Any, path: Path) -> None:
    """TFLOP/s of forward + backward over the length; a row for each dtype with all its panels."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    frame = frame[(frame["pass"] == "both") & frame["set"].isin(["lengths", "lengths-fp16"])]
    panels = sorted({(d, m) for d, m in zip(frame["head_dim"], frame["mask"], strict=True)})
    lengths = frame.groupby(["dtype", "head_dim", "mask"])["length"].nunique().gt(1)
    dtypes = [name for name in DTYPES if name in lengths and lengths[name].sum() == len(panels)]
    figure, axes = plt.subplots(
        len(dtypes),
        len(panels),
        figsize=(4 * len(panels), 3.2 * len(dtypes) + 0.6),
        sharey=True,
        squeeze=False,
    )
    present = [name for name in ORDER if name in set(frame["implementation"])]
    for row, dtype in zip(axes, dtypes, strict=True):
        for axis, (head_dim, mask) in zip(row, panels, strict=True):
            chosen = frame[(frame["head_dim"] == head_dim) & (frame["mask"] == mask)]
            chosen = chosen[chosen["dtype"] == dtype]
            for number, name in enumerate(present):
                line = chosen[chosen["implementation"] == name].sort_values("length")
                style = {"marker": "o", "markersize": 3, "label": name, "color": f"C{number}"}
                axis.plot(line["length"], line["tflops"], **style)
            axis.set(xlabel="sequence length", title=f"{dtype}, head_dim {head_dim}, {mask}")
            axis.set_xscale("log", base=2)
            axis.grid(alpha=0.3)
        row[0].set_ylabel("forward + backward, TFLOP/s")
    axes[0][0].set_ylim(bottom=0)  # shared
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=9, frameon=False)
    figure.suptitle(f"{frame['gpu'].iloc[0]}, 16,384 tokens in all up to that length", fontsize=10)
    figure.tight_layout(rect=(0, 0.12 / (len(dtypes) + 1), 1, 1))
    figure.savefig(path, dpi=120)
