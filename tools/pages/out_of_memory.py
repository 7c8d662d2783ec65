"""Memory of the smallest problem on which naive attention ran out: a table of one page."""

from __future__ import annotations

from typing import Any

import pandas as pd

from bench_harness.core import Table
from bench_harness.display import row_tables
from bench_harness.experiments.attention_measure import Problem

TITLE = "Memory of the smallest cell that ran out"


def table(rows: pd.DataFrame) -> Table:
    """Every tensor of the smallest problem on which naive attention ran out of memory.

    Raises:
        ValueError: none did.
    """
    frame = row_tables.lengths(rows)
    variants = frame["variant"] if "variant" in frame else pd.Series(None, index=frame.index)
    named = variants.where(variants.notna(), frame["variants"].map("+".join))
    failed = frame[(frame["status"] == "oom") & named.str.contains("naive")]
    if failed.empty:
        raise ValueError("rows must hold a naive attention without memory, but got none")
    # A case of several lengths ends at the longest.
    smallest = failed.sort_values(["longest", "head_dim"]).iloc[0]
    problem = Problem(
        batch=int(smallest["batch"]),
        heads=int(smallest["heads"]),
        kv_heads=int(smallest["heads"]),
        sequence=int(smallest["longest"]),
        head_dim=int(smallest["head_dim"]),
        value_head_dim=int(smallest["head_dim"]),
        dtype=smallest["dtype"],
        causal=smallest["mask"] == "causal",
    )
    return Table(
        TITLE,
        pd.DataFrame(accounting(problem)),
        f"Batch {problem.batch}, {problem.heads} heads, sequence {problem.sequence}, head_dim "
        f"{problem.head_dim}, {problem.dtype} elements.",
    )


def accounting(problem: Problem) -> list[dict[str, Any]]:
    """Every tensor of one naive forward and backward pass, with its formula."""
    size = 4 if problem.dtype == "fp32" else 2
    scores = size * problem.batch * problem.heads * problem.sequence**2
    rows = size * problem.batch * problem.heads * problem.sequence * problem.head_dim
    entries = [
        ("query, key, value", "3·B·H·S·D", 3 * rows),
        ("their gradients", "3·B·H·S·D", 3 * rows),
        ("scores, during forward", "B·H·S²", scores),
        ("mask, saved", "S² (1 byte)", problem.causal * problem.sequence**2),
        ("softmax output, saved", "B·H·S²", scores),
        ("output and its gradient", "2·B·H·S·D", 2 * rows),
        ("gradient of the softmax output", "B·H·S²", scores),
        ("that gradient times the output", "B·H·S²", scores),
        ("gradient of the scores", "B·H·S²", scores),
    ]
    return [
        {"tensor": tensor, "elements": formula, "size (MiB)": round(size / 2**20, 1)}
        for tensor, formula, size in entries
    ]
