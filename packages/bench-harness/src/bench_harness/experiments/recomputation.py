"""Recomputed blocks: memory and time over how many of them backward recomputes together.

L blocks in groups of k keep the input of every group, L/k·s bytes, and while backward goes through
a group, all that its blocks keep, k·b bytes. The sum is least at k* = √(L·s/b) (Chen et al.,
arXiv:1604.06174, where a block keeps as much as its input, b = s). Gradients appear as the inputs
of groups are let go of, so with G bytes of gradients the fullest moment of backward holds
k·b + max(L/k·s, G) beside parameters and optimizer state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from bench_harness.case import Row
from bench_harness.experiments import row_tables
from bench_harness.experiments.base import Figure, Table
from bench_harness.report import marks
from bench_harness.report.plots import COLOURS, new_figure
from bench_harness.training.moments import MOMENTS

if TYPE_CHECKING:
    from bench_harness.training.build import Training
    from bench_harness.training.settings import Settings

#: A prediction of memory further off is flagged.
TOLERANCE = 0.05


def predicted(steps: Training, variant: Settings) -> Row:
    """Bytes that a step of the language model keeps for backward and recomputes, from shapes.

    Empty for what the arithmetic does not cover: autocast, which keeps activations of both
    precisions, sharded parameters, and a loss that keeps all logits.
    """
    shape = steps.workload.model_config
    plain = variant.precision != "bf16" and variant.zero_stage == 0
    if shape is None or not plain or variant.loss != "chunked" or variant.attention == "naive":
        return {}
    from basics_model.memory import activation_memory

    batch, sequence = steps.workload.args[0].shape
    memory = activation_memory(
        shape,
        batch=batch,
        seq=sequence,
        itemsize=4,
        checkpoint_blocks=variant.checkpoint_blocks,
        keep_attention=variant.keep_attention,
        compiled=variant.compile != "off",
    )
    # The loss makes the gradients of the last hidden states and of the head in forward.
    head = 4.0 * shape.vocab_size * shape.d_model
    return {
        "predicted_kept_bytes": memory.kept + memory.ends,
        "predicted_backward_bytes": memory.recomputed
        + max(memory.kept + memory.ends, steps.gradient_bytes - head),
    }


def of_cases(done: pd.DataFrame) -> pd.DataFrame:
    """One line per variant of the cases that differ in how many blocks are recomputed together."""
    if "predicted_kept_bytes" not in done or "memory" not in done:
        return done.iloc[:0]
    known = done[done["predicted_kept_bytes"].notna() & done["memory"].notna()]
    lines: list[dict[str, Any]] = []
    for _, cell in known.groupby("case_key", sort=False):
        if cell["checkpoint_blocks"].nunique() < 2:
            continue
        for _, row in cell.iterrows():
            moments = {moment["moment"]: moment for moment in row["memory"]}
            forward, backward = moments[MOMENTS[1]], moments[MOMENTS[2]]
            if forward["allocated_bytes"] is None:
                continue
            resting = forward["parameter_bytes"] + forward["state_bytes"]
            lines.append(
                {
                    **{str(name): value for name, value in row.items()},
                    "together": int(row["checkpoint_blocks"]),
                    "kept_gib": (forward["allocated_bytes"] - resting) / 2**30,
                    "predicted_kept_gib": row["predicted_kept_bytes"] / 2**30,
                    "backward_gib": backward["peak_bytes"] / 2**30,
                    "predicted_gib": (resting + row["predicted_backward_bytes"]) / 2**30,
                }
            )
    frame = pd.DataFrame(lines)
    if len(frame):
        off = (frame["backward_gib"] / frame["predicted_gib"] - 1).abs()
        frame["missed"] = off > TOLERANCE
    return frame


def tables(done: pd.DataFrame) -> list[Table]:
    """Predicted and measured memory beside the step; none without such a case."""
    frame = of_cases(done)
    if not len(frame):
        return []
    frame["blocks"] = [str(k) if k else "none" for k in frame["together"]]
    shown = {
        "size": "size",
        "batch": "batch per rank",
        "sequence": "sequence (tokens)",
        "blocks": "blocks recomputed together",
        "predicted_kept_gib": "kept by forward, predicted (GiB)",
        "kept_gib": "kept by forward (GiB)",
        "predicted_gib": "peak of backward, predicted (GiB)",
        "backward_gib": "peak of backward (GiB)",
        "missed": "prediction missed",
        "median_ms": "median (ms)",
        "ci_low_ms": "95 % low (ms)",
        "ci_high_ms": "95 % high (ms)",
    }
    return [
        Table(
            "Recomputed blocks",
            row_tables.columns(frame, shown),
            "Predicted from shapes: groups of k blocks keep one input each, and backward holds "
            "what k blocks keep, beside parameters, optimizer state and the gradients so far. "
            f"A peak further than {TOLERANCE:.0%} from its prediction is flagged.",
        )
    ]


def figures(done: pd.DataFrame) -> list[Figure]:
    """Peak memory with its prediction, and the step, over the blocks recomputed together."""
    frame = of_cases(done)
    frame = frame[frame["together"] > 0].sort_values("together") if len(frame) else frame
    if len(frame) < 2:
        return []
    cell = frame[frame["case_key"] == frame["case_key"].iloc[0]]
    figure, axes = new_figure(height=4.6, rows=2, sharex=True)
    memory, time = axes[0, 0], axes[1, 0]
    x = cell["together"].to_list()
    memory.plot(x, cell["predicted_gib"], "--", color=COLOURS[1], label="predicted")
    memory.plot(x, cell["backward_gib"], "o", color=COLOURS[0], label="measured")
    memory.set_ylabel("peak (GiB)")
    memory.set_ylim(bottom=0)
    memory.legend()
    marks.line(
        time,
        x,
        cell["median_ms"].to_list(),
        colour=COLOURS[0],
        filled=marks.steady(cell).to_list(),
        errors=marks.whiskers(cell),
    )
    row_tables.log_axes(time, x="blocks recomputed together", y="median step (ms)", y_log=False)
    time.set_ylim(bottom=0)
    time.set_xticks(x)
    return [
        Figure(
            "train_step_recomputation",
            "Recomputed blocks: memory and time",
            figure,
            "Peak of backward, predicted from shapes and measured; below it the median step.",
        )
    ]
