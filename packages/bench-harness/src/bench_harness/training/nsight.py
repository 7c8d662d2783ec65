"""One training step of each variant under Nsight Systems: one report per variant."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bench_harness.core import Config, Progress, Row
from bench_harness.traces import nsight
from bench_harness.training import settings as of

if TYPE_CHECKING:
    import torch


def rows(config: Row, timeout_s: float, progress: Progress) -> list[Row]:
    """Records every variant of a case, and reads communication and overlap from the exports.

    Raises:
        NsightMissingError: no usable ``nsys``; the case is skipped.
        NsightError: recording failed, or a report holds no kernels.
    """
    variants = [of.stored(table) for table in config["variants"]]
    found = []
    for index, (name, variant) in enumerate(zip(of.labels(variants), variants, strict=True)):
        if variant.cuda_graph:
            why = (
                "its step must be launched by the host for --nsight, but got one replayed launch. "
            )
            ended = {"status": "skipped", "error": why + "Record it with --profiled."}
            found.append({"variant": name, "settings": variant.table(), "ended": ended})
            continue
        progress(f"recording {name} with Nsight Systems")
        report = Path(f"step-{index}.nsys-rep")
        export, counted = nsight.run_and_record(
            f"{__name__}:under_nsight",
            {**config, "recorded": variant.table()},
            report.with_suffix(""),
            timeout_s=timeout_s / len(variants),
        )
        progress(f"reading the report of {name}")
        about = {"variant": name, "settings": variant.table(), "report": report.name}
        found.append({**about, **counted, **read(export, config["world_size"])})
        export.unlink()  # the report itself stays
    return found


def read(export: Path, world_size: int) -> Row:
    """Communication of the recorded step over all ranks, and the picture's data.

    Raises:
        NsightError: the report does not hold kernels of every rank.
    """
    from bench_harness.traces.step import of_rank, over_ranks

    found_on = nsight.devices(export)
    if len(found_on) != world_size:
        raise nsight.NsightError(
            f"a report of {world_size} ranks must hold kernels of as many GPUs, but got those of "
            f"{len(found_on)} in {export.name}. Record it again."
        )
    ranks = []
    for device in found_on:
        trace = nsight.load(export, device)
        ranks.append(of_rank(trace, trace.phases("step")[0], "GPU kernels (Nsight Systems)"))
    return over_ranks(ranks)


def measure_rank(rank: int, world_size: int, device: torch.device, config: Config) -> Row:
    """One rank's part: warm-up, then one step in a range of its own, its phases marked."""
    import torch.distributed as dist

    from bench_harness.traces.trace import mark, phase
    from bench_harness.training.build import training
    from bench_harness.training.measure import STEP, facts

    with training(of.stored(config["recorded"]), config, device) as steps:
        with phase("warm-up", device):
            for _ in range(config["warmup"]):
                steps.step()
        dist.barrier()
        with phase(STEP, device):
            steps.in_phases(lambda name: mark(name, device))
        return {**facts(steps), **steps.stats()}


def under_nsight(config: Row) -> Row:
    """What Nsight Systems records: every rank as a program of its own. Returns the counts."""
    from bench_harness.ranks import launch

    counted: Row = launch(
        measure_rank,
        config["world_size"],
        config,
        backend="nccl" if config["device"] == "cuda" else "gloo",
        start_method="spawn",
    )[0]
    return counted
