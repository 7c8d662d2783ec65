"""Runs flashattn-triton's kernels on small problems under NVIDIA's compute-sanitizer.

    python tools/sanitize_attention.py [--checks memcheck racecheck] [--kinds 0 2]
                                       [--sanitizer PATH]

Forward and backward of every kind of problem, by the portable kernels and, where another tier takes
a problem, by that one too. Everything is compiled first, at full speed and in parallel; then each
kind of problem with each mask is a program of its own under each check, as many at a time as there
are processors. The compute sanitizer is part of the CUDA toolkit; it is looked for on PATH and
beside the toolkit's compiler.

Of racecheck's reports two kinds are counted, and are not errors:

- Where a kernel gives warps different work, Triton 3.6 writes into shared memory which work is
  whose, and racecheck takes the loop in which warps read it for a race: it does not follow the
  hardware barrier between. That loop belongs to no line of the package, so debug information puts
  it on the kernel's ``def``.
- Where several threads write, meet, and one of them arrives at an mbarrier for the readers,
  racecheck may order that thread's writes alone. Statements that write so end with the comment in
  HANDED_OVER. racecheck_control.py, which does nothing else, runs first: unless that is reported
  there, it is an error here. Such handovers are also tested on random schedules, by
  tests/test_hopper_protocol.py.

Exit status 1 if a check reports an error, 2 if the sanitizer is not found
or there is nothing to run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

CHECKS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Query and key lengths around tile sizes, and below them.
LENGTHS = ((1, 1), (64, 64), (65, 129), (130, 100))
# head_dim of query and key, of value, and the type. Another tier takes the first HOPPER of them.
HOPPER = 5
KINDS = (
    (64, 64, "bfloat16"),
    (128, 128, "float16"),
    (192, 128, "bfloat16"),
    (256, 256, "bfloat16"),
    (96, 96, "bfloat16"),
    (40, 24, "bfloat16"),
    (64, 64, "float32"),
    (128, 128, "float32"),
    (256, 256, "float32"),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": "bottom-right", "window": (20, None)},
    {"causal": True, "softcap": 5.0, "deterministic": True},
    {"deterministic": True},
)
# Batch elements that make more tiles than a GPU runs at a time, so that programs take several.
MANY = 70


KERNELS = Path(__file__).parents[1] / "src/flashattn_triton"
CONTROL = Path(__file__).with_name("racecheck_control.py")
# What racecheck reports: one access, and lines with others.
RACE = re.compile(r"^=+ Error: Race reported between (.*(?:\n=+ +and .*)*)", re.MULTILINE)
ACCESS = re.compile(r"(Read|Write) access at (\w+)\+0x\w+ in (\S+):(\d+)")
HANDED_OVER = "# read after an mbarrier"


def run_problems(implementation: str, kind: int, option: int, quick: bool) -> None:
    """The problems of this kind with this option, in this process.

    "auto" stands for what it chooses besides the portable kernels, and leaves the rest out.
    """
    import torch

    from flashattn_triton import choose, flash_attention, flash_attention_varlen
    from flashattn_triton.problem import new_problem

    (dim, value_dim, type_name), given = KINDS[kind], OPTIONS[option]
    dtype = getattr(torch, type_name)

    def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
        return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]

    q, k, v = leaves((1, 4, 1, dim), (1, 2, 1, dim), (1, 2, 1, value_dim))
    tier = choose(q, k, v, new_problem(head_dim=dim, **given)).tier
    ran = 0
    if implementation != "auto" or tier != "triton":
        keywords = {**given, "implementation": implementation}
        problems = [(1, *lengths) for lengths in (LENGTHS[2:] if quick else LENGTHS)]
        if implementation == "auto":
            problems.append((MANY, *LENGTHS[2]))
        for b, n, m in problems:
            q, k, v = leaves((b, 4, n, dim), (b, 2, m, dim), (b, 2, m, value_dim))
            out, lse = flash_attention(q, k, v, return_lse=True, **keywords)
            visible = torch.where(lse.isinf(), 0.0, lse)
            (out.float().sum() + visible.sum()).backward()
            ran += 1
        n, m = LENGTHS[3]
        q, k, v, sinks = leaves((1, 4, n, dim), (1, 2, m, dim), (1, 2, m, value_dim), (4,))
        flash_attention(q, k, v, sinks=sinks, **keywords).float().sum().backward()
        ran += 1
        if not quick:
            starts = torch.tensor([0, 3, 3, 70], dtype=torch.int32, device="cuda")
            q, k, v = leaves((70, 4, dim), (70, 2, dim), (70, 2, value_dim))
            out = flash_attention_varlen(q, k, v, starts, starts, 67, 67, **keywords)
            out.float().sum().backward()
            ran += 1
    torch.cuda.synchronize()
    print(f"{ran} problems ran with implementation {implementation!r}", flush=True)


def find_sanitizer(given: Path | None) -> str | None:
    """Where the tool is."""
    if given is not None:
        return str(given.resolve()) if given.exists() else None
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
    kinds = [f"{i}: {dim}/{value_dim} {dtype}" for i, (dim, value_dim, dtype) in enumerate(KINDS)]
    parser.add_argument(
        "--kinds",
        nargs="+",
        type=int,
        choices=range(len(KINDS)),
        default=range(len(KINDS)),
        help="columns of query and key, columns of value, type: " + ", ".join(kinds),
    )
    parser.add_argument("--quick", action="store_true", help="half types and plain masks only")
    # What is run in the processes that are watched:
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--kind", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--option", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run_problems(arguments.run, arguments.kind, arguments.option, arguments.quick)
        return 0
    sanitizer = find_sanitizer(arguments.sanitizer)
    if sanitizer is None:
        print("compute-sanitizer was not found; say where it is by --sanitizer", file=sys.stderr)
        return 2
    quick = ["--quick"] if arguments.quick else []
    n_kinds = {"auto": HOPPER}
    programs = [
        [sys.executable, __file__, "--run", implementation, "--kind", str(kind),
         "--option", str(option), *quick]
        for implementation in arguments.implementations
        for kind in arguments.kinds
        if kind < (2 if quick else n_kinds.get(implementation, len(KINDS)))
        for option in range(2 if quick else len(OPTIONS))
    ]  # fmt: skip
    if not programs:
        print("none of these implementations takes any of these kinds", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        if any(pool.map(lambda x: subprocess.run(x, check=False).returncode, programs)):
            print("the problems do not run without a sanitizer either", file=sys.stderr)
            return 1
        handovers = "racecheck" in arguments.checks and reports_control(sanitizer)
        checks = product(arguments.checks, programs)
        return int(any([*pool.map(lambda x: fails(sanitizer, *x, handovers), checks)]))


def watched(sanitizer: str, check: str, program: list[str]) -> subprocess.CompletedProcess[str]:
    """A program under one check; exit status 99 if the check reports an error."""
    # PyTorch's pool would make one allocation of many tensors, and hide what runs past one of them.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    limits = ["--error-exitcode", "99", "--print-limit", "10000"]
    command = [sanitizer, "--tool", check, *limits, *program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def reports_control(sanitizer: str) -> bool:
    """Whether racecheck reports a handover that is right, besides the compiler's reads."""
    output = watched(sanitizer, "racecheck", [sys.executable, str(CONTROL)]).stdout
    expected, compilers = (expected_reports(output, handovers) for handovers in (True, False))
    print(f"== racecheck, {CONTROL.name}:", output, sep="\n", flush=True)
    return "control ran" in output and expected is not None and compilers is None


def fails(sanitizer: str, check: str, program: list[str], handovers: bool) -> bool:
    """Whether one check of one program reports an error; prints what it says."""
    result = watched(sanitizer, check, program)
    output = result.stdout + result.stderr
    verdict = f"exit status {result.returncode}"
    complete = result.returncode == 99 and " problems ran with " in output
    reports = expected_reports(output, handovers) if complete else None
    if reports is not None:
        verdict += f", {reports} reports, none of them of a race"
    lines = [line[:200] for line in output.splitlines()[-25:]]
    print(f"== {check}, {program[3:]}: {verdict}", *lines, sep="\n", flush=True)
    return result.returncode != 0 and reports is None


def expected_reports(output: str, handovers: bool) -> int | None:
    """How many errors were reported, if all are of the two kinds that are not races.

    ``handovers``: whether those at mbarriers are.
    """
    reports = [ACCESS.findall(report) for report in RACE.findall(output)]
    if not 0 < len(reports) == len(re.findall("^=+ Error", output, re.MULTILINE)):
        return None

    def lines(file: str, number: str) -> list[str]:
        """The line of that number in each file of that name: both tiers have a key_pass.py."""
        sources = [*KERNELS.rglob(file), *CONTROL.parent.glob(file)]
        found = [source.read_text().splitlines()[int(number) - 1 :] for source in sources]
        return [rest[0] for rest in found if rest]

    for accesses in reports:
        kind, kernel, file, number = accesses[0]
        of_compiler = kind == "Read" and any(
            line.startswith(f"def {kernel}(") for line in lines(file, number)
        )
        writes = [lines(*place) for kind, _, *place in accesses if kind == "Write"]
        handed_over = writes and all(
            any(line.endswith(HANDED_OVER) for line in found) for found in writes
        )
        if not (of_compiler or (handovers and handed_over)):
            return None
    return len(reports)


if __name__ == "__main__":
    sys.exit(main())
