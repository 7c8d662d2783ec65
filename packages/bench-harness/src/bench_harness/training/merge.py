"""One variant's row from those of all ranks."""

from __future__ import annotations

from typing import Any

from bench_harness.core import Row
from bench_harness.distributed import slowest_of, slowest_rank
from bench_harness.traces.step import over_ranks


def merged(ranks: list[Row]) -> Row:
    """One variant's row from those of all ranks: times of the slowest, memory of the fullest."""
    row = slowest_rank(ranks)
    if not row["samples_ms"]:  # skipped, or it did not agree
        return {name: value for name, value in row.items() if value not in ([], None)}
    for name in ("host_ms", "optimizer_ms"):
        row[name] = slowest_of([rank[name] for rank in ranks])
    for name in ("peak_gib", "device_allocations", "compilations"):
        if name in row:
            row[name] = max(rank[name] for rank in ranks)
    row["memory"] = [_fullest(list(moment)) for moment in zip(*_each(ranks, "memory"), strict=True)]
    if "all_reduce" in row:
        sweeps = [rank["all_reduce"]["samples_ms"] for rank in ranks]
        row["all_reduce"] = {
            "size_bytes": row["all_reduce"]["size_bytes"],
            "samples_ms": [slowest_of(list(size)) for size in zip(*sweeps, strict=True)],
        }
    if "communication_ms" in row:
        row |= over_ranks(ranks)
    return row


def _each(ranks: list[Row], name: str) -> list[Any]:
    return [rank[name] for rank in ranks]


def _fullest(ranks: list[Row]) -> Row:
    return {
        name: max(rank[name] for rank in ranks) if isinstance(value, int) else value
        for name, value in ranks[0].items()
    }
