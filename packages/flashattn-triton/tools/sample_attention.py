"""Where consumers of the Hopper forward kernel spend their time, by Nsight Compute's samples.

    python tools/sample_attention.py [--rows samples.jsonl] [--ncu PATH]
    python tools/sample_attention.py --read samples.jsonl

2 x 16 heads x 8,192 tokens, bf16, without a mask, at head_dim 64, 96 and 128. ncu looks at each
warp every few cycles, and notes its instruction and what it waits for. Counted are the loops over
whole tiles. A line is what instructions are for: how many of them a warp executes in a step, and
their share of the samples; waits at barriers count as such wherever they are noticed. ``--rows``
writes them to a file, which ``--read`` shows as a Markdown table.

``ncu`` is part of the CUDA toolkit. Clocks are left as they are. Exit status 2 if ncu is not found
or reports nothing.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_harness.environment import describe, measured_on

HEAD_DIMS = (64, 96, 128)
KINDS = {
    "HGMMA": "matrix products",
    "FMNMX": "row maxima",
    "MUFU": "exponentials",
    "FFMA": "scores less their maximum",
    "FADD": "row sums",
    "FMUL": "factors of output and sums",
    "F2FP": "rounding",
    "SHFL": "exchange between lanes",
}
WAITS, REST = "waits at barriers", "addresses and others"
# Of what a sampled warp waits for: other warps, and tiles that the producer loads.
AT_BARRIERS = ("stall_barrier", "stall_long_sb")
# The loops that all steps pass execute about as many instructions as the products in them.
LOOP = 0.8

Instruction = Mapping[str, str]


def run(head_dim: int) -> None:
    """The kernel in this process, twice: the first call compiles it."""
    import torch

    from flashattn_triton import flash_attention

    shape = (2, 16, 8192, head_dim)
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    for _ in range(2):
        flash_attention(query, key, value, implementation="hopper")
    torch.cuda.synchronize()


def sample(ncu: str, head_dim: int) -> list[Instruction]:
    """The kernel's instructions in their order, with ncu's columns; none if it reported nothing."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.ncu-rep"
        command = [ncu, "--clock-control", "none", "--section", "SourceCounters", "-o", str(report)]
        command += ["--kernel-name", "regex:hopper_forward", "--launch-skip", "1"]
        command += [sys.executable, __file__, "--run", str(head_dim)]
        if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
            return []
        command = [ncu, "--import", str(report), "--page", "source", "--csv"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return instructions(text)


def instructions(text: str) -> list[Instruction]:
    """ncu's source page as CSV; its first line names the kernel."""
    _, _, table = text.partition("\n")
    return list(csv.DictReader(io.StringIO(table)))


def loops(code: Sequence[Instruction]) -> list[list[Instruction]]:
    """The innermost loops with products, one of each consumer."""
    executed = [int(line["Instructions Executed"] or 0) for line in code]
    products = [n for n, line in zip(executed, code, strict=True) if opcode(line) == "HGMMA"]
    found: list[list[Instruction]] = [[]]
    for n, line in zip(executed, code, strict=True):
        if n > LOOP * max(products, default=0):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [body for body in found if any(opcode(line) == "HGMMA" for line in body)]


def opcode(line: Instruction) -> str:
    """Of "@!P0 MUFU.EX2 R1, R2", "MUFU"."""
    words = [word for word in line["Source"].split() if not word.startswith("@")]
    return words[0].partition(".")[0] if words else ""


def kinds(bodies: Sequence[Sequence[Instruction]]) -> list[dict[str, Any]]:
    """Per kind: instructions of a step, share of all samples in %."""
    counts: Counter[str] = Counter()
    samples: Counter[str] = Counter()
    for line in (line for body in bodies for line in body):
        kind = KINDS.get(opcode(line), REST)
        waiting = sum(int(line[name] or 0) for name in AT_BARRIERS)
        counts[kind] += 1
        samples[kind] += int(line["# Samples"] or 0) - waiting
        samples[WAITS] += waiting
    everything = max(1, sum(samples.values()))
    return [
        {
            "kind": kind,
            "instructions": round(counts[kind] / max(1, len(bodies)), 1),
            "share_pct": round(100 * samples[kind] / everything, 1),
        }
        for kind in (*KINDS.values(), REST, WAITS)
    ]


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Markdown: a line per kind, shares and instructions of each head_dim in columns."""
    cells = {(row["kind"], row["head_dim"]): row for row in rows}
    dims = sorted({dim for _, dim in cells})
    lines = [
        "| in a step | " + " | ".join(f"head_dim {dim} (%, instructions)" for dim in dims) + " |",
        "|---|" + "---:|" * len(dims),
    ]
    for kind in dict.fromkeys(kind for kind, _ in cells):
        found = (cells[kind, dim] for dim in dims)
        shown = (f"{x['share_pct']:.0f}, {x['instructions']:.0f}" for x in found)
        lines.append(f"| {kind} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", type=Path, help="where to write the rows")
    parser.add_argument("--read", type=Path, help="rows that were written before")
    parser.add_argument("--ncu", default=shutil.which("ncu"), help="the ncu program")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        run(arguments.run)
        return 0
    if arguments.read is not None:
        print(table(json.loads(line) for line in arguments.read.read_text().splitlines()))
        return 0
    if arguments.ncu is None:
        print("ncu was not found; say where it is by --ncu", file=sys.stderr)
        return 2
    machine, rows = describe(), []
    about = {"measured_on": measured_on(machine), "commit": (machine["git"] or {}).get("commit")}
    for head_dim in HEAD_DIMS:
        bodies = loops(sample(arguments.ncu, head_dim))
        if not bodies:
            print(f"ncu reported no samples at head_dim {head_dim}", file=sys.stderr)
            return 2
        rows += [about | {"head_dim": head_dim} | kind for kind in kinds(bodies)]
    if arguments.rows is not None:
        arguments.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
