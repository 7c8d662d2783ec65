"""Shared by the experiments of several ranks: where ranks run, and how their figures combine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench_harness.core import Case, Progress, Row
from bench_harness.environment import gpu_count


def default_world_size(device: str) -> int:
    """Two ranks, or one where there is a single GPU, or none, which skips the case."""
    return max(1, min(2, gpu_count())) if device == "cuda" else 2


def run_on_ranks(
    case: Case, progress: Progress, function: Callable[..., Any], *args: Any
) -> list[Any]:
    """Calls ``function(rank, world_size, device, config, *args, progress=...)`` on every rank.

    Returns:
        The results of all ranks, in their order.

    Raises:
        RankError, torch.OutOfMemoryError: a rank failed.
    """
    from bench_harness.ranks import launch

    config = dict(case.config)
    progress(f"starting {config['world_size']} ranks")
    return launch(
        function,
        config["world_size"],
        config,
        *args,
        backend="nccl" if config["device"] == "cuda" else "gloo",
        timeout_s=0.9 * case.timeout_s,
        progress=progress,
    )


def on_rank_0(decision: bool) -> bool:
    """Broadcasts rank 0's decision: clocks of ranks differ, and all must go on or stop together."""
    import torch.distributed as dist

    said = [decision]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def slowest_rank(ranks: Sequence[Row]) -> Row:
    """One variant's row from those of all ranks: a step takes as long as its slowest rank."""
    row = dict(ranks[0])
    for name in ("samples_ms", "samples_device_ms", "host_ms", "optimizer_ms"):
        if name in row:
            row[name] = [max(each) for each in zip(*(r[name] for r in ranks), strict=True)]
    if "samples_sm_clock_mhz" in row:
        clocks = zip(*(rank["samples_sm_clock_mhz"] for rank in ranks), strict=False)
        row["samples_sm_clock_mhz"] = [min(clock) for clock in clocks]
    if "samples_ms" in row:
        fastest = zip(*(rank["samples_ms"] for rank in ranks), strict=True)
        row["samples_fastest_rank_ms"] = [min(sample) for sample in fastest]
    return row
