"""Reads hardware counters of flashattn-triton's Hopper kernels with Nsight Compute.

    python tools/profile_attention.py [--raw counters.csv] [--ncu PATH]
    python tools/profile_attention.py --read counters.csv

Forward and backward of the leaderboard case and of the same at head_dim 128 (1 x 16 heads x 16,384
tokens, bf16, causal), each after a warm-up. Prints how busy tensor cores, shared memory, L2 and
memory are, and what warps wait for; ``--raw`` keeps all counters. ``ncu`` is part of the CUDA
toolkit. Clocks are left as they are. Exit status 2 if ncu is not found or reports nothing.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Tables",
    "WarpStateStats",
    "SchedulerStats",
)
# Of some thousand counters, those that say what a kernel is limited by.
WANTED = re.compile(
    r"^gpu__time_duration\.sum$"
    r"|^smsp__cycles_active\.avg$"
    r"|^(sm__throughput|gpu__dram_throughput|lts__throughput|l1tex__throughput)\.avg\.pct"
    r"|^sm__.*pipe_(tensor|xu|alu|fma).*\.avg\.pct_of_peak_sustained_active$"
    r"|^l1tex__data_(pipe|bank).*pct_of_peak_sustained_elapsed$"
    r"|^smsp__issue_active\.avg\.pct"
    r"|^smsp__average_warps?_(latency_)?issue_stalled_\w+?(_per_issue_active)?\.ratio$"
)
FEWEST = 0.05  # smaller values are not printed


def run_problems() -> None:
    """Both problems in this process; the profiler is on in the second step of each."""
    import torch

    from flashattn_triton import flash_attention

    for head_dim in (64, 128):
        shape = (1, 16, 16384, head_dim)
        leaves = [
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]
        grad_out = torch.randn_like(leaves[0])
        for step in range(2):
            torch.cuda.synchronize()
            if step:
                torch.cuda.profiler.start()
            out = flash_attention(*leaves, causal=True, implementation="hopper")
            torch.autograd.grad(out, leaves, grad_out)
            torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def profile(ncu: str, raw: Path) -> int:
    """Writes the counters of the four kernels; the status of ncu."""
    command = [ncu, "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--kernel-name", "regex:hopper"]
    for section in SECTIONS:
        command += ["--section", section]
    command += ["--page", "raw", "--csv", "--log-file", str(raw), sys.executable, __file__, "--run"]
    return subprocess.run(command, check=False).returncode


def read(raw: Path) -> list[dict[str, str]]:
    """One row per kernel, of counters by name. Lines that ncu writes before the table are left."""
    lines = [line for line in raw.read_text().splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    return [row for row in rows if row.get("Kernel Name")]  # the first holds units


def report(rows: list[dict[str, str]]) -> None:
    """A line per counter, a column per kernel."""
    names = sorted({name for row in rows for name in row if name and WANTED.search(name)})
    titles = [
        f"{row['Kernel Name'].removesuffix('_kernel')[:24]} #{i}" for i, row in enumerate(rows)
    ]
    width = max(map(len, [*names, "counter"]))
    print("counter".ljust(width), *(title.rjust(26) for title in titles))
    for name in names:
        cells = [row.get(name) or "" for row in rows]
        if any(number(cell) >= FEWEST for cell in cells):
            print(name.ljust(width), *(cell.rjust(26) for cell in cells))


def number(cell: str) -> float:
    """The value of a cell, 0 if it is none."""
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return 0.0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--raw", type=Path, help="where to write all counters")
    parser.add_argument("--read", type=Path, help="counters that were written before")
    parser.add_argument("--ncu", default=shutil.which("ncu"), help="the ncu program")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_problems()
        return 0
    if arguments.read is not None:
        report(read(arguments.read))
        return 0
    if arguments.ncu is None:
        print("ncu was not found; say where it is by --ncu", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        raw = arguments.raw or Path(folder) / "counters.csv"
        status = profile(arguments.ncu, raw)
        rows = read(raw) if raw.exists() else []
        if not rows:
            print(f"ncu ended with status {status} and no counters", file=sys.stderr)
            return 2
        report(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
