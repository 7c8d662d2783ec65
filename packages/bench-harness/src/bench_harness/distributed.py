"""What the experiments of several ranks share: where ranks run, and how their figures combine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench_harness.core import Case, CaseSkipped, Row, option
from bench_harness.environment import gpu_count
from bench_harness.nodes import Nodes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options that spread a case over machines; each of them gives the same command.

    The rendezvous and the number of a machine are no part of what is measured, so they do not
    enter a case's identity: with the same options every machine measures the same cases.
    """

    nnodes: int = option(1, "Machines that take part; each gives the same command.")
    rdzv_endpoint: str | None = option(
        None, "host:port of the machine of rank 0, for several machines."
    )
    node_rank: int = option(0, "This machine's number, from 0.")

    def __post_init__(self) -> None:
        nodes(self.placement(), "check")

    def placement(self) -> Row:
        """How this machine takes part, for :attr:`bench_harness.core.Case.placement`."""
        return {
            "nnodes": self.nnodes,
            "rdzv_endpoint": self.rdzv_endpoint,
            "node_rank": self.node_rank,
        }


def nodes(placement: Mapping[str, Any], run_id: str) -> Nodes:
    """The machines of a case.

    Args:
        run_id: the same on all machines and different from case to case.

    Raises:
        ValueError: the options do not fit together.
    """
    if placement.get("nnodes", 1) == 1:
        return Nodes()
    return Nodes(
        nnodes=placement["nnodes"],
        rdzv_endpoint=placement["rdzv_endpoint"] or "",
        node_rank=placement["node_rank"],
        run_id=run_id,
    )


def default_world_size(device: str, nnodes: int = 1) -> int:
    """Two ranks per machine, or one where there is a single GPU."""
    return nnodes * (min(2, gpu_count()) if device == "cuda" else 2)


def run_on_ranks(
    case: Case, progress: Callable[[str], None], function: Callable[..., Any], *args: Any
) -> list[Any]:
    """Calls ``function(rank, world_size, device, config, *args, progress=...)`` on every rank.

    Returns:
        The results of all ranks, in their order, those of other machines included.

    Raises:
        CaseSkipped: this machine has too few GPUs.
        RankError, torch.OutOfMemoryError: a rank failed.
    """
    from bench_harness.ranks import launch

    config = dict(case.config)
    require_gpus(config, case.placement.get("nnodes", 1))
    progress(f"starting {config['world_size']} ranks")
    return launch(
        function,
        config["world_size"],
        config,
        *args,
        backend="nccl" if config["device"] == "cuda" else "gloo",
        timeout_s=0.9 * case.timeout_s,
        nodes=nodes(case.placement, case.key),
        progress=progress,
    )


def require_gpus(config: Mapping[str, Any], nnodes: int = 1) -> None:
    """Ends a case that wants more GPUs than this machine has.

    Raises:
        CaseSkipped: naming both numbers.
    """
    wanted = config["world_size"] // nnodes
    if config["device"] == "cuda" and gpu_count() < wanted:
        raise CaseSkipped(
            f"this machine must have {wanted} CUDA devices, but got {gpu_count()}. Ask for "
            "fewer ranks, or use --device cpu."
        )


def on_rank_0(decision: bool) -> bool:
    """Broadcasts rank 0's decision: clocks of ranks differ, and all must go on or stop together."""
    import torch.distributed as dist

    said = [decision]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def slowest_rank(ranks: list[Row]) -> Row:
    """One variant's row from those of all ranks: a step takes as long as its slowest rank."""
    first = ranks[0]
    row = dict(first)
    for name in ("samples_ms", "samples_device_ms"):
        if name in first:
            row[name] = slowest_of([rank[name] for rank in ranks])
    if "samples_ms" in first:
        fastest = zip(*(rank["samples_ms"] for rank in ranks), strict=True)
        row["samples_fastest_rank_ms"] = [min(sample) for sample in fastest]
    return row


def slowest_of(ranks: list[list[float]]) -> list[float]:
    """The samples of all ranks combined: each takes as long as on its slowest rank."""
    return [max(sample) for sample in zip(*ranks, strict=True)]


def sweep(
    size_bytes: Sequence[int], device: torch.device, *, warmup: int, samples: int
) -> list[list[float]]:
    """Milliseconds of this rank's all-reduces of each size; all ranks call it together."""
    import torch
    import torch.distributed as dist

    from bench_harness.timing import Samples, record_sample

    found = []
    for size in size_bytes:
        vector = torch.zeros(size // 4, device=device)
        timed = Samples()
        for _ in range(warmup + samples):
            dist.barrier()
            with record_sample(timed, device):
                dist.all_reduce(vector)
        found.append(timed.wall_ms[warmup:])
    return found
