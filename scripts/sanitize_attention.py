"""Runs flashattn-triton's kernels on small problems under NVIDIA's compute-sanitizer.

    python scripts/sanitize_attention.py [--checks memcheck racecheck] [--sanitizer PATH]

Forward and backward of every kind of problem, by both GPU tiers where both run, all checks at the
same time. The compute sanitizer is part of the CUDA toolkit; it is looked for on PATH and beside
the toolkit's compiler.
Exit status 1 if a check reports an error, 2 if the sanitizer is not found.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CHECKS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Query and key lengths around tile sizes, and below them.
LENGTHS = ((1, 1), (64, 64), (65, 129), (130, 100))
# head_dim of query and key, of value, and the type.
KINDS = (
    (64, 64, "bfloat16"),
    (128, 128, "float16"),
    (40, 24, "bfloat16"),
    (256, 256, "bfloat16"),
    (64, 64, "float32"),
    (128, 128, "float32"),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": "bottom-right", "window": (20, None)},
    {"causal": True, "softcap": 5.0, "deterministic": True},
)


def run_problems(implementation: str, full: bool) -> None:
    """All problems in this process."""
    import torch

    from flashattn_triton import flash_attention, flash_attention_varlen

    def leaves(*shapes: tuple[int, ...], dtype: str) -> list[torch.Tensor]:
        kind = getattr(torch, dtype)
        return [torch.randn(s, device="cuda", dtype=kind, requires_grad=True) for s in shapes]

    ran = 0
    for dim, value_dim, dtype in KINDS if full else KINDS[:2]:
        for n, m in LENGTHS if full else LENGTHS[2:]:
            for options in OPTIONS if full else OPTIONS[:2]:
                q, k, v = leaves((1, 4, n, dim), (1, 2, m, dim), (1, 2, m, value_dim), dtype=dtype)
                keywords = {**options, "implementation": implementation, "return_lse": True}
                out, lse = flash_attention(q, k, v, **keywords)
                visible = torch.where(lse.isinf(), 0.0, lse)
                (out.float().sum() + visible.sum()).backward()
                ran += 1
    starts = torch.tensor([0, 3, 3, 70], dtype=torch.int32, device="cuda")
    for dim, value_dim, dtype in KINDS if full else ():
        q, k, v = leaves((70, 4, dim), (70, 2, dim), (70, 2, value_dim), dtype=dtype)
        out = flash_attention_varlen(
            q, k, v, starts, starts, 67, 67, causal=True, implementation=implementation
        )
        out.float().sum().backward()
        ran += 1
    torch.cuda.synchronize()
    print(f"{ran} problems ran with implementation {implementation!r}", flush=True)


def find_sanitizer(given: Path | None) -> str | None:
    """Where the tool is."""
    if given is not None:
        return str(given) if given.exists() else None
    compiler = shutil.which("nvcc")
    beside = None if compiler is None else str(Path(compiler).resolve().parent)
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=beside)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=["memcheck", "racecheck"])
    parser.add_argument("--sanitizer", type=Path, help="the compute-sanitizer program")
    parser.add_argument("--implementations", nargs="+", default=["triton", "auto"])
    parser.add_argument("--quick", action="store_true", help="half types and plain masks only")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # in the process that is watched
    arguments = parser.parse_args()
    if arguments.run:
        run_problems(arguments.run, not arguments.quick)
        return 0
    sanitizer = find_sanitizer(arguments.sanitizer)
    if sanitizer is None:
        print("compute-sanitizer was not found; say where it is by --sanitizer", file=sys.stderr)
        return 2
    quick = ["--quick"] if arguments.quick else []
    programs = [[sys.executable, __file__, "--run", i, *quick] for i in arguments.implementations]
    with ThreadPoolExecutor() as pool:
        # Compiles everything at full speed first.
        if any(pool.map(lambda program: subprocess.run(program, check=False).returncode, programs)):
            print("the problems do not run without a sanitizer either", file=sys.stderr)
            return 1
        pairs = [(check, program) for program in programs for check in arguments.checks]
        return int(any([*pool.map(lambda pair: checked(sanitizer, *pair), pairs)]))


def checked(sanitizer: str, check: str, program: list[str]) -> bool:
    """Whether one check of one program reports an error; prints what it says."""
    # PyTorch's pool would make one allocation of many tensors, and hide what runs past one of them.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", check, "--error-exitcode", "99", "--print-limit", "5", *program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line[:200] for line in (result.stdout + result.stderr).splitlines()[-25:]]
    print(
        f"== {check}, {program[3:]}: exit status {result.returncode}", *lines, sep="\n", flush=True
    )
    return result.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
