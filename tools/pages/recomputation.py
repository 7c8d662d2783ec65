"""Recomputed blocks: memory and time over how many of them backward recomputes together.

L blocks in groups of k keep the input of every group, L/k·s bytes, and while backward goes through
a group, all that its blocks keep, k·b bytes. The sum is least at k* = √(L·s/b) (Chen et al.,
arXiv:1604.06174, where a block keeps as much as its input, b = s). Gradients appear as the inputs
of groups are let go of, so with G bytes of gradients the fullest moment of backward, the first or
the last group's beginning, holds k·b + max(L/k·s, (1 - k/L)·G) beside parameters and optimizer
state. ``presets/checkpointing.toml`` measures it; ``examples/activation_memory.py`` predicts it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pandas as pd

from basics_model import ModelConfig
from bench_harness.core import Row
from bench_harness.display import row_tables
from bench_harness.stats import with_summary
from bench_harness.training.moments import MOMENTS

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from activation_memory import activation_memory

TITLE = "Recomputed blocks"
#: A prediction of memory further off is flagged.
TOLERANCE = 0.05


def predicted(row: pd.Series[Any]) -> Row:
    """Bytes that a step of the language model keeps for backward, and holds at backward's peak.

    Beside parameters and optimizer state, for a chunked loss and unsharded fp32 parameters. The
    loss makes the gradients of the last hidden states and of the head in forward.
    """
    names = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads")
    shape: Any = {name: int(row[name]) for name in names}
    memory = activation_memory(
        ModelConfig(context_length=int(row["sequence"]), **shape),
        batch=int(row["batch"]),
        seq=int(row["sequence"]),
        itemsize=4,
        checkpoint_blocks=row["settings"]["checkpoint_blocks"],
        keep_attention=row["settings"]["keep_attention"],
        compiled=row["settings"]["compile"] != "off",
    )
    groups = -(-shape["num_layers"] // max(1, row["settings"]["checkpoint_blocks"]))
    before_last = row["gradient_bytes"] - 4 * shape["vocab_size"] * shape["d_model"]
    before_last *= (groups - 1) / groups
    kept = memory.kept + memory.ends
    return {"kept": kept, "backward": memory.recomputed + max(kept, before_last)}


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Predicted and measured memory beside the step, a line for each size of groups."""
    lines: list[Row] = []
    for _, row in with_summary(row_tables.finished(rows)).iterrows():
        moments = {moment["moment"]: moment for moment in row["memory"]}
        forward, backward = moments[MOMENTS[1]], moments[MOMENTS[2]]
        resting = forward["parameter_bytes"] + forward["state_bytes"]
        expected = predicted(row)
        peak, peak_expected = backward["peak_bytes"], resting + expected["backward"]
        lines.append(
            {
                "blocks recomputed together": str(row["settings"]["checkpoint_blocks"] or "none"),
                "kept by forward, predicted (GiB)": expected["kept"] / 2**30,
                "kept by forward (GiB)": (forward["allocated_bytes"] - resting) / 2**30,
                "peak of backward, predicted (GiB)": peak_expected / 2**30,
                "peak of backward (GiB)": peak / 2**30,
                "prediction missed": abs(peak / peak_expected - 1) > TOLERANCE,
                "median (ms)": row["median_ms"],
            }
        )
    return pd.DataFrame(lines)
