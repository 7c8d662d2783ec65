"""An experiment of another package: each of its cases ends in the way that its kind says."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bench_harness.core import Case, CaseSkipped, Figure, Row, Table, option
from bench_harness.experiments import Experiment
from bench_harness.ranks import launch

KINDS = (
    "ok",
    "slow",
    "raises",
    "oom",
    "host-oom",
    "hangs",
    "exits",
    "killed",
    "skips",
    "artifact",
    "reserved",
    "nan",
    "empty",
    "rank-dies",
    "noisy",
)


def _last_rank_dies(rank: int, world_size: int, device: Any) -> None:
    import torch.distributed as dist

    # No rank dies while another is still connecting, which would then be the first to fail.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"connected-{rank}", "")
    store.wait([f"connected-{other}" for other in range(world_size)])
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def _noisy_ms(folder: str) -> list[float]:
    """Fifteen samples of one distribution, others for every folder of results."""
    draw = random.Random(folder)
    return [20 * draw.lognormvariate(0.0, 0.05) for _ in range(15)]


@dataclass(frozen=True, kw_only=True)
class Options:
    kinds: tuple[str, ...] = option(("ok",), "How the cases end.", choices=KINDS)
    repeats: int = option(1, "Cases of each kind.")
    seconds: float = option(0.0, "How long a slow case takes.")
    note: str | None = option(None, "Anything.")
    flag: bool = option(False, "Nothing.")
    broken_report: bool = option(False, "Whether the tables fail.")

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, but got {self.repeats}")


class Toy(Experiment):
    name: ClassVar[str] = "toy"
    summary: ClassVar[str] = "Ends as it is told"
    Options: ClassVar[type[Any]] = Options

    def cases(self, **options: Any) -> list[Case]:
        chosen = Options(**options)
        return [
            Case(
                experiment=self.name,
                config={
                    "kind": kind,
                    "number": number,
                    "seconds": chosen.seconds,
                    "broken": chosen.broken_report,
                    "label": f"toy {kind} {number}",
                },
                timeout_s=5.0 if kind == "hangs" else 200.0,
            )
            for number in range(chosen.repeats)
            for kind in chosen.kinds
        ]

    def run(self, case: Case, progress: Callable[[str], None]) -> list[Row]:
        import torch

        kind = case.config["kind"]
        progress(f"being {kind}")
        if kind == "raises":
            print("words before the end", file=sys.stderr)
            raise ValueError("this case raises")
        if kind == "oom":
            raise torch.OutOfMemoryError("no room on the device")
        if kind == "host-oom":
            torch.empty(2**50, dtype=torch.uint8)
        if kind == "hangs":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            Path("pids").write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        if kind == "exits":
            os._exit(3)
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "skips":
            raise CaseSkipped("needs a device that is not here")
        if kind == "reserved":
            return [{"status": "fine"}]
        if kind == "nan":
            return [{"value": float("nan")}]
        if kind == "empty":
            return []
        if kind == "rank-dies":
            launch(_last_rank_dies, 2, timeout_s=150)
        if kind == "noisy":
            folder = Path.cwd().parents[1].name  # of RUN/artifacts/CASE
            return [{"variant": "plain", "samples_ms": _noisy_ms(folder)}]
        row: Row = {"in_bad_fork": torch.cuda._is_in_bad_fork(), "pid": os.getpid()}
        if kind == "artifact":
            Path("trace.txt").write_text("kept")
            row["artifact"] = "trace.txt"
        # Killed while it sleeps, a case cannot release this.
        lock = multiprocessing.get_context("forkserver").Lock()
        with lock:
            time.sleep(case.config["seconds"])
        samples = [1.0, 1.01, 1.02, 1.0, 1.01, 1.01]
        return [
            {"variant": "plain", "samples_ms": samples, **row},
            {"variant": "double", "samples_ms": [2 * sample for sample in samples], **row},
        ]

    def tables(self, rows: Any) -> list[Table]:
        if rows["broken"].any():
            raise KeyError("no such column")
        done = rows[rows["status"] == "ok"].copy()
        done["median (ms)"] = [sorted(samples)[3] for samples in done["samples_ms"]]
        columns = ["kind", "number", "variant", "median (ms)"]
        return [Table("Toy <times>", done[columns], "A note & more.")]

    def figures(self, rows: Any) -> list[Figure]:
        from bench_harness.display.plots import new_figure

        figure, axes = new_figure()
        axes[0, 0].plot([1, 2, 3])
        return [Figure("line", "A line", figure, "Rising.")]
