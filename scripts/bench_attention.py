"""Measures flashattn-triton next to PyTorch's own attention kernels, and draws what was measured.

    python scripts/bench_attention.py run rows.jsonl --set all
    python scripts/bench_attention.py merge docs/results/flash/h200_attention.jsonl rows.jsonl
    python scripts/bench_attention.py report rows.jsonl --table table.md --plot plot.png

``run`` first proves each implementation against fp32 tiles on one head of the very problem that is
timed, then times forward, backward, and both with ``out.sum().backward()``, implementations
interleaved over several rounds. Every row carries its statistics, GPU, versions and commit. Rows
are appended as they are measured, and cells that the file already holds for this commit are not
measured again, so an interrupted run is continued by the same command. Several GPUs share the work
by ``--shard 0/2`` and ``--shard 1/2``, into files of their own; ``merge`` puts rows into a file
instead of the same cells' older ones.

The sets ``host`` and ``first-call`` measure something else: the time that the host spends in a
call, and the time of the first call in a new process whose compilation caches are empty.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
import triton
from attention_cases import (
    BACKENDS,
    CASES,
    FLASH_4,
    FLEX,
    OURS,
    PASSES,
    PORTABLE,
    Attention,
    Case,
    implementations,
)
from attention_rows import draw, frame_of, identity, lost_cells, markdown, merged, rendered, rows_in
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from flashattn_triton.options import resolve_options
from flashattn_triton.tiled import tiled_backward, tiled_forward

# Relative to the largest element of the oracle: one rounding to the type, of values and of P.
TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3, "fp32": 1e-4}
SETS = ("host", "first-call", *CASES)


# ---- compiling in advance ------------------------------------------------------------------------


def configure() -> None:
    """What every process that compiles or times must have set alike."""
    # Backward is timed alone, over one graph that is kept; compiled functions then may not reuse
    # the memory of what they saved.
    torch._functorch.config.donated_buffer = False
    # FlashAttention-4 keeps what it compiled only if it is told to.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def compile_case(set_name: str, case: Case, name: str) -> str | None:
    """Fills the compilers' disk caches in a process of its own; the reason if that fails."""
    configure()
    try:
        attend = implementations(set_name, case)[name]()
        attend(*case.leaves()).sum().backward()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - the measuring process meets and records it again
        return f"{case}, {name}: {error}"[:200]
    finally:
        torch.compiler.reset()  # one process compiles many shapes of one function
        torch.cuda.empty_cache()
    return None


def to_compile(cells: list[tuple[str, Case, list[str]]]) -> Iterator[tuple[str, Case, str]]:
    """FlexAttention for each shape, all others once for each kind of problem; slowest first."""
    kinds = set()
    for set_name, case, names in cells:
        for name in (FLASH_4, OURS, PORTABLE):
            kind = (name, case.dtype, case.head_dim, case.causal, case.heads_per_kv)
            if name in names and kind not in kinds:
                kinds.add(kind)
                yield set_name, case, name
    for set_name, case, names in cells:
        if FLEX in names:
            yield set_name, case, FLEX


def compile_all(cells: list[tuple[str, Case, list[str]]], jobs: int) -> None:
    """Everything that ``cells`` will want, by ``jobs`` processes."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        pending = [pool.submit(compile_case, *wanted) for wanted in to_compile(cells)]
        for future in as_completed(pending):
            failure = future.exception() or future.result()
            if failure:
                print(failure, flush=True)


# ---- correctness ---------------------------------------------------------------------------------


def last_head(case: Case, tensors: list[Tensor]) -> list[Tensor]:
    """The last key head of each of (query, key, value, ...), with the query heads that read it."""
    group = case.heads_per_kv
    wanted = (group, 1, 1, group)
    return [x.detach()[-1:, -n:].float() for x, n in zip(tensors, wanted, strict=True)]


def exact_head(case: Case, leaves: list[Tensor], grad_out: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of the last key head, in fp32 tiles."""
    options = resolve_options(head_dim=case.head_dim, causal=case.causal)
    q, k, v, do = last_head(case, [*leaves, grad_out])
    side = max(2048, case.length // 8)
    tiles = {"query_tile": side // case.heads_per_kv, "key_tile": side}
    out, lse = tiled_forward(q, k, v, options, **tiles)
    return (out, *tiled_backward(q, k, v, out, lse, do, None, options, **tiles))


def relative_errors(
    case: Case,
    attend: Attention,
    leaves: list[Tensor],
    grad_out: Tensor,
    exact: tuple[Tensor, ...],
) -> dict[str, float]:
    """Largest error of the last head's output and gradients over their largest element."""
    out = attend(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad_out)
    q, k, v, o = last_head(case, [dq, dk, dv, out])
    return {
        name: ((a - e).abs().max() / e.abs().max()).item()
        for name, a, e in zip(("out", "dq", "dk", "dv"), (o, q, k, v), exact, strict=True)
    }


# ---- timing --------------------------------------------------------------------------------------


def timed(which: str, attend: Attention, leaves: list[Tensor]) -> Callable[[], Any]:
    """The pass as a function without arguments."""
    if which == "forward":
        return torch.no_grad()(lambda: attend(*leaves))
    if which == "both":
        return lambda: attend(*leaves).sum().backward()
    out = attend(*leaves)
    grad_out = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def statistics_of(ms: list[float]) -> dict[str, float]:
    """Median and the range that holds three fifths of the samples."""
    p20, *_, p80 = statistics.quantiles(ms, n=5)
    numbers = {"ms": statistics.median(ms), "ms_p20": p20, "ms_p80": p80}
    return numbers | {"ms_min": min(ms), "samples": len(ms)}


# Of one implementation in one round, however long they take: fewer have no quantiles.
FEWEST_CALLS = 3

Sampler = Callable[[Callable[[], Any], list[Tensor], int], list[float]]


def sampled_by_the_board(call: Callable[[], Any], leaves: list[Tensor], rep: int) -> list[float]:
    """Milliseconds of single calls, by the function that the public leaderboard times with."""
    samples: list[float] = []
    while len(samples) < FEWEST_CALLS:
        samples += triton.testing.do_bench(
            call, warmup=rep // 5, rep=rep, grad_to_none=leaves, return_mode="all"
        )
    return samples


def sampled(call: Callable[[], Any], leaves: list[Tensor], rep: int) -> list[float]:
    """The same protocol: gradients dropped and the L2 cache overwritten before every call.

    What is left out is what takes most of that function's time where a call takes long: it makes
    six calls, in each round again, to find out how many fit.
    """
    overwritten = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def timed_calls(n: int) -> list[float]:
        events = []
        for _ in range(n):
            for leaf in leaves:
                leaf.grad = None
            overwritten.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    *_, expected = timed_calls(2)
    timed_calls(int(rep / 5 / expected))
    return timed_calls(max(FEWEST_CALLS, int(rep / expected)))


def measure(
    set_name: str,
    case: Case,
    wanted: dict[str, Callable[[], Attention]],
    rounds: int,
    rep: int,
) -> Iterator[dict[str, Any]]:
    """The rows of one case."""
    sampler: Sampler = sampled_by_the_board if set_name == "leaderboard" else sampled
    leaves = case.leaves()
    grad_out = torch.randn_like(leaves[0])
    exact = exact_head(case, leaves, grad_out)
    attentions, errors = {}, {}
    for name, make in wanted.items():
        row = {**dataclasses.asdict(case), "implementation": name}
        try:
            attend = make()
            found = relative_errors(case, attend, leaves, grad_out, exact)
        except Exception as error:  # noqa: BLE001 - whatever stops one peer, the others go on
            yield row | {"note": str(error)[:200]}
            continue
        if not max(found.values()) <= TOLERANCE[case.dtype]:
            yield row | {"note": f"wrong: {found}"}
            continue
        attentions[name], errors[name] = attend, found
    for which in PASSES:
        calls = {name: timed(which, attend, leaves) for name, attend in attentions.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds):  # back and forth: who follows whom decides on the clock
            for name in list(calls) if turn % 2 == 0 else list(calls)[::-1]:
                samples[name] += sampler(calls[name], leaves, rep)
        for name, ms in samples.items():
            numbers = statistics_of(ms)
            yield {
                **dataclasses.asdict(case),
                "implementation": name,
                "pass": which,
                **numbers,
                "tflops": case.flops(which) / numbers["ms"] / 1e9,
                "errors": errors[name],
            }


_HOST_ROUNDS, _HOST_CALLS = 20, 50


def host_rows() -> Iterator[dict[str, Any]]:
    """Time from the start of a call to its return, while the GPU has less to do than the host.

    Everything in turns, for the host's clock changes from one second to the next. PyTorch's kernel
    is chosen once, outside: a user does not choose it at every call.
    """
    case = Case(batch=1, heads=2, length=64, head_dim=64, causal=True)
    leaves = case.leaves()
    calls: dict[tuple[str, str], tuple[Any, Callable[[], Any]]] = {}
    for name, make in implementations("host", case).items():
        if name == FLEX:
            continue
        try:
            attend = make()
            attend(*leaves)
        except Exception as error:  # noqa: BLE001 - whatever stops one peer, the others go on
            yield {**dataclasses.asdict(case), "implementation": name, "note": str(error)[:200]}
            continue
        backend = BACKENDS.get(name)
        if backend is not None:
            attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        detached = [x.detach() for x in leaves]
        calls[name, "forward"] = backend, functools.partial(attend, *detached)
        calls[name, "forward, differentiated"] = backend, functools.partial(attend, *leaves)
        calls[name, "both"] = backend, timed("both", attend, leaves)
    ms: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in range(_HOST_ROUNDS):
        for key, (backend, call) in calls.items():
            with nullcontext() if backend is None else sdpa_kernel(backend):
                call()
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(_HOST_CALLS):
                    call()
                ms[key].append((time.perf_counter() - started) / _HOST_CALLS * 1e3)
    for (name, which), times in ms.items():
        row = {**dataclasses.asdict(case), "implementation": name, "pass": which}
        yield row | statistics_of(times)


FIRST_CALL = """
import json, sys, time
started = time.perf_counter()
import torch
head_dim, dtype, causal = int(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3] == "True"
shape = (1, 16, 4096, head_dim)
leaves = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
torch.cuda.synchronize()
torch_ready = time.perf_counter()
from flashattn_triton import flash_attention
imported = time.perf_counter()
out = flash_attention(*leaves, causal=causal, implementation=sys.argv[4])
torch.cuda.synchronize()
forward = time.perf_counter()
out.sum().backward()
torch.cuda.synchronize()
backward = time.perf_counter()
flash_attention(*(x.detach()[:, :, :2048] for x in leaves), causal=causal,
                implementation=sys.argv[4])
torch.cuda.synchronize()
other_length = time.perf_counter()
print(json.dumps({
    "import torch": torch_ready - started,
    "import": imported - torch_ready,
    "forward": forward - imported,
    "backward": backward - forward,
    "both": backward - imported,
    "forward, other length": other_length - backward,
}))
"""


def first_call(head_dim: int, dtype: str, causal: bool, name: str) -> list[dict[str, Any]]:
    """The first calls of one new process without anything in Triton's disk cache."""
    row = {"head_dim": head_dim, "dtype": dtype, "causal": causal, "implementation": name}
    implementation = {OURS: "auto", PORTABLE: "triton"}[name]
    with tempfile.TemporaryDirectory() as cache:
        child = subprocess.run(
            [sys.executable, "-c", FIRST_CALL, str(head_dim), dtype, str(causal), implementation],
            env={**os.environ, "TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=False,
        )
    if child.returncode:
        return [row | {"note": child.stderr[-200:]}]
    seconds = json.loads(child.stdout.splitlines()[-1])
    return [row | {"pass": which, "ms": s * 1e3} for which, s in seconds.items()]


def first_call_rows() -> Iterator[dict[str, Any]]:
    """All kinds, three processes at a time."""
    kinds = [(64, "bfloat16", True), (128, "bfloat16", False), (128, "float32", True)]
    calls = [(*kind, name) for name in (OURS, PORTABLE) for kind in kinds]
    with ThreadPoolExecutor(3) as pool:
        for rows in pool.map(lambda call: first_call(*call), calls):
            yield from rows


OTHERS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "host": host_rows,
    "first-call": first_call_rows,
}


# ---- commands ------------------------------------------------------------------------------------


def environment(commit: str | None) -> dict[str, Any]:
    """What the figures hold for."""
    if commit is None:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "commit": commit or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def driver_version() -> str | None:
    """As the driver's own tool says it, None without the tool."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return text.splitlines()[0].strip()


def dealt(cases: list[tuple[str, Case]], shard: tuple[int, int]) -> list[tuple[str, Case]]:
    """Every n-th of the cases by their amount of work, in their own order."""
    number, of = shard
    by_work = sorted(cases, key=lambda pair: pair[1].flops("both"))
    mine = set(by_work[number::of])
    return [pair for pair in cases if pair in mine]


def run(arguments: argparse.Namespace) -> int:
    """Measures, and appends each case's rows."""
    started = time.monotonic()
    where = environment(arguments.commit)
    saved = rows_in(arguments.rows)
    done = {identity(row) for row in saved}
    sets = SETS if "all" in arguments.set else tuple(arguments.set)
    configure()

    def wanted(name: str, case: Case) -> dict[str, Callable[[], Attention]]:
        row = {"set": name, **dataclasses.asdict(case), **where}
        return {
            implementation: make
            for implementation, make in implementations(name, case).items()
            if arguments.only is None or any(part in implementation for part in arguments.only)
            if identity(row | {"implementation": implementation}) not in done
        }

    def save(name: str, rows: Iterator[dict[str, Any]]) -> None:
        complete = list(rows)  # a case is saved whole, or measured again
        with arguments.rows.open("a") as file:
            for row in complete:
                file.write(json.dumps({"set": name, **row, **where}) + "\n")
                print_row(row)

    measured = {(row["set"], row["commit"]) for row in saved}
    for name, other_rows in OTHERS.items():
        known = (name, where["commit"]) in measured
        if name in sets and not known and arguments.shard[0] == 0:
            print(f"-- {name} ({time.monotonic() - started:.0f} s)", flush=True)
            save(name, other_rows())
    cases = [(name, case) for name in sets if name in CASES for case in CASES[name]()]
    cases = [pair for pair in cases if re.search(arguments.matching, str(pair[1]))]
    cases = [pair for pair in dealt(cases, arguments.shard) if wanted(*pair)]
    if arguments.jobs > 0 and cases:
        compile_all([(name, case, [*wanted(name, case)]) for name, case in cases], arguments.jobs)
        print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    for name, case in cases:
        if time.monotonic() - started > arguments.seconds:
            print("out of time: run again to continue", flush=True)
            return 3
        print(f"-- {name}: {case} ({time.monotonic() - started:.0f} s)", flush=True)
        rows = measure(name, case, wanted(name, case), arguments.rounds, arguments.rep)
        save(name, rows)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def print_row(row: dict[str, Any]) -> None:
    """One line of progress."""
    figure = f"{row['ms']:10.3f} ms" if "ms" in row else f"           {row['note']}"
    print(f"    {row['implementation']:40s} {row.get('pass', ''):25s} {figure}", flush=True)


def merge(arguments: argparse.Namespace) -> int:
    """Puts new rows into a file, instead of the same cells' older ones."""
    rows = rows_in(arguments.target)
    for path in arguments.rows:
        rows = merged(rows, rows_in(path))
    arguments.target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Table, plot and lost cells from saved rows."""
    frame = frame_of(row for path in arguments.rows for row in rows_in(path))
    if arguments.table:
        arguments.table.write_text(markdown(frame))
    if arguments.readme:
        arguments.readme.write_text(rendered(arguments.readme.read_text(), frame))
    if arguments.lost:
        arguments.lost.write_text(lost_cells(frame, arguments.factor))
    if arguments.plot:
        draw(frame, arguments.plot)
    return 0


def shard(text: str) -> tuple[int, int]:
    """The numbers of "0/2"."""
    number, of = map(int, text.split("/"))
    if not 0 <= number < of:
        raise ValueError
    return number, of


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True)
    runner = commands.add_parser("run", help="measure")
    runner.add_argument("rows", type=Path, help="JSON lines are appended to this file")
    runner.add_argument("--set", nargs="+", choices=[*SETS, "all"], default=["leaderboard"])
    runner.add_argument("--only", nargs="+", help="parts of implementation names")
    runner.add_argument("--matching", default="", help="regular expression that cases match")
    runner.add_argument("--rounds", type=int, default=4)
    runner.add_argument("--rep", type=int, default=50, help="milliseconds per round and pass")
    runner.add_argument("--jobs", type=int, default=8, help="processes that compile beforehand")
    runner.add_argument("--shard", type=shard, default=(0, 1), help="which part of the cells: 0/2")
    runner.add_argument("--seconds", type=float, default=float("inf"), help="start no case later")
    runner.add_argument("--commit", help="of the code that is measured, where git cannot say it")
    runner.set_defaults(command=run)
    merger = commands.add_parser("merge", help="replace a file's rows by newer ones")
    merger.add_argument("target", type=Path)
    merger.add_argument("rows", type=Path, nargs="+")
    merger.set_defaults(command=merge)
    reporter = commands.add_parser("report", help="table, plot and lost cells from saved rows")
    reporter.add_argument("rows", type=Path, nargs="+")
    reporter.add_argument("--table", type=Path)
    reporter.add_argument("--readme", type=Path, help="file whose marked part is rewritten")
    reporter.add_argument("--plot", type=Path)
    reporter.add_argument("--lost", type=Path, help="cells in which a peer is faster")
    reporter.add_argument("--factor", type=float, default=1.0, help="that still counts as a tie")
    reporter.set_defaults(command=report)
    arguments = parser.parse_args()
    return int(arguments.command(arguments))


if __name__ == "__main__":
    sys.exit(main())
