"""``python -m flashattn_triton.tune``: measures kernel shapes on this GPU and writes a table.

Nothing tunes itself at run time. This command is how the shipped table was made, and how a table
for another GPU or another kind of problem is made; its entries are passed as ``tiling=``:

    python -m flashattn_triton.tune --head-dim 64 --output table.json
    tiling = Tiling.unpack(json.load(open("table.json"))["entries"][0]["tiling"])
    flash_attention(q, k, v, tiling=tiling)

Each candidate must first agree with the definition, on a small ragged problem; one that does not
fit the GPU is listed as such. Kernels are tuned one after the other, the rest held fixed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from flashattn_triton.configs import KERNELS, Tiles, Tiling, tiling_for
from flashattn_triton.dispatch import describe_gpu
from flashattn_triton.portable.backward import BackwardCall
from flashattn_triton.portable.forward import ForwardCall
from flashattn_triton.problem import Problem as AttentionProblem
from flashattn_triton.problem import new_problem
from flashattn_triton.reference import attention_reference

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# Half precision errs by 2^-9 of values that are order 1 and summed; a wrong shape errs by order 1.
AGREEMENT = 0.05
# Longer than any tile, and a multiple of none.
CHECK_LENGTH = 333


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """The attention problem that tiles are tuned for."""

    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: str
    causal: bool

    def inputs(self, length: int) -> list[Tensor]:
        """Random query, key, value and output gradient, (B, H, length, D)."""
        shape = (self.batch, self.heads, length, self.head_dim)
        return [torch.randn(shape, device="cuda", dtype=DTYPES[self.dtype]) for _ in range(4)]

    @property
    def options(self) -> AttentionProblem:
        """Default scale, nothing but the causal mask."""
        return new_problem(head_dim=self.head_dim, causal=self.causal)


def candidates(role: str, head_dim: int, itemsize: int) -> Iterator[Tiles]:
    """Shapes worth trying: accumulators that fit the registers and still fill the matrix units."""
    owns_queries = role in ("forward", "query_pass")
    half = itemsize == 2
    sizes: tuple[int, ...] = (32, 64, 128) if head_dim * itemsize <= 256 else (16, 32, 64)
    # fp32 rows of a program: see dispatch.check_tiling. Its operands, split into three parts, take
    # the registers that half types leave to accumulators.
    own_sizes, fewest, widest = ((16, 32, 64, 128), 36, 2) if half else ((16, 32), 8, 4)
    shapes = itertools.product(own_sizes, sizes, (4, 8), (2, 3) if half else (1, 2, 3))
    for own, other, warps, stages in shapes:
        queries, keys = (own, other) if owns_queries else (other, own)
        accumulators = own * head_dim * (1 if owns_queries else 2)
        scores = queries * keys * (1 if role == "forward" else 2)
        repeated = 64 <= own < 16 * warps  # see dispatch.check_tiling
        registers = (accumulators + scores) / (32 * warps)
        if not repeated and other <= widest * own and fewest <= registers <= 240:
            yield Tiles(queries, keys, warps, stages)


def passes(problem: Problem, tiling: Tiling, inputs: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """The forward and the backward pass with these shapes."""
    query, key, value, grad_out = inputs
    forward = ForwardCall(query, key, value, problem.options, tiling.forward)
    out, lse = forward((query, key, value))
    tensors = (query, key, value, out, lse, grad_out, None)
    backward = BackwardCall(tensors, problem.options, tiling)
    return {
        "forward": lambda: forward((query, key, value)), "backward": lambda: backward(tensors)
    }  # fmt: skip


def agrees(problem: Problem, tiling: Tiling) -> bool:
    """Whether output and gradients are those of the definition."""
    small = dataclasses.replace(problem, batch=1, heads=2)
    query, key, value, grad_out = small.inputs(CHECK_LENGTH)
    leaves = [x.float().requires_grad_() for x in (query, key, value)]
    q, k, v = leaves
    expected, _ = attention_reference(q, k, v, problem.options)
    gradients = torch.autograd.grad(expected, leaves, grad_out.float())
    run = passes(small, tiling, [query, key, value, grad_out])
    actual = [run["forward"]()[0], *run["backward"]()]
    return all(
        bool(((a.float() - e).abs().max() <= AGREEMENT * e.abs().max()).item())
        for a, e in zip(actual, (expected, *gradients), strict=True)
    )


def measure(problem: Problem, tiling: Tiling, role: str) -> dict[str, Any]:
    """One row: the median in milliseconds of the pass that ``role`` belongs to, or why not."""
    shape = getattr(tiling, role)
    row: dict[str, Any] = {**dataclasses.asdict(problem), "role": role, **vars(shape)}
    try:
        if not agrees(problem, tiling):
            return row | {"ms": None, "note": "wrong result"}
        run = passes(problem, tiling, problem.inputs(problem.length))
        pass_name = "forward" if role == "forward" else "backward"
        ms = triton.testing.do_bench(run[pass_name], warmup=5, rep=25, return_mode="median")
    except OutOfResources as error:
        return row | {"ms": None, "note": f"does not fit: {error}"}
    return row | {"ms": ms, "note": ""}


def compile_only(problem: Problem, tiling: Tiling) -> None:
    """Fills Triton's disk cache, in a process of its own."""
    for length in (CHECK_LENGTH, problem.length):
        small = dataclasses.replace(problem, batch=1, heads=2)
        try:
            passes(small, tiling, small.inputs(min(length, 1024)))["backward"]()
        except OutOfResources:
            return


def _with(tiling: Tiling, role: str, shape: Tiles) -> Tiling:
    """``tiling`` with another shape of one kernel; the fused form adds dQ as the GPU does best."""
    tma_reduce = torch.cuda.get_device_capability() >= (9, 0)
    replaced: dict[str, Any] = {role: shape, "tma_reduce": tma_reduce}
    return dataclasses.replace(tiling, **replaced)


def variants(role: str, base: Tiling, problem: Problem) -> list[Tiling]:
    """``base`` with each candidate in ``role``; two-pass roles are measured without ``fused``."""
    itemsize = DTYPES[problem.dtype].itemsize
    if role in ("key_pass", "query_pass"):
        base = dataclasses.replace(base, fused=None)
    shapes = list(candidates(role, problem.head_dim, itemsize))
    if torch.cuda.get_device_capability() >= (9, 0):
        shapes += [dataclasses.replace(shape, use_tma=True) for shape in shapes]
    return [_with(base, role, shape) for shape in shapes]


def tune(problem: Problem, jobs: int) -> tuple[Tiling, list[dict[str, Any]]]:
    """The best shape of each kernel, and every row that was measured."""
    gpu = describe_gpu(torch.cuda.current_device())
    start = tiling_for(gpu.shared_memory, problem.head_dim, DTYPES[problem.dtype])
    tried = {role: variants(role, start, problem) for role in KERNELS}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        pending = [pool.submit(compile_only, problem, t) for ts in tried.values() for t in ts]
        for future in pending:
            future.result()
    best, rows, fastest = start, [], {}
    for role in KERNELS:
        measured = [measure(problem, tiling, role) for tiling in tried[role]]
        rows += measured
        timed = [row for row in measured if row["ms"] is not None]
        if timed:
            row = min(timed, key=lambda row: row["ms"])
            shape = Tiles(**{field.name: row[field.name] for field in dataclasses.fields(Tiles)})
            best = _with(best, role, shape)
            fastest[role] = row["ms"]
    # The two passes were tuned one at a time; only both at their best compare with the fused form.
    two_pass = dataclasses.replace(best, fused=None)
    row = measure(problem, two_pass, "query_pass")
    rows.append(row | {"note": "both passes at their best"})
    if row["ms"] is not None and row["ms"] <= fastest.get("fused", float("inf")):
        best = two_pass
    return best, rows


def main(arguments: list[str] | None = None) -> int:
    """Runs the command ``python -m flashattn_triton.tune``; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m flashattn_triton.tune", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128], help="1 to 512")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bf16"])
    parser.add_argument("--mask", choices=("causal", "full"), nargs="+", default=["causal", "full"])
    parser.add_argument("--batch", type=int, default=1, help="sequences of the timed problem")
    parser.add_argument("--heads", type=int, default=16, help="of query, key and value alike")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--jobs", type=int, default=4, help="processes that compile")
    parser.add_argument("--output", type=Path, help="JSON file for the table and all rows")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("flashattn_triton.tune measures on a GPU, and torch sees none", file=sys.stderr)
        return 2
    entries, rows = [], []
    for head_dim, dtype, mask in itertools.product(options.head_dim, options.dtype, options.mask):
        problem = Problem(
            batch=options.batch,
            heads=options.heads,
            length=options.length,
            head_dim=head_dim,
            dtype=dtype,
            causal=mask == "causal",
        )
        tiling, measured = tune(problem, options.jobs)
        rows += measured
        entries.append(dataclasses.asdict(problem) | {"tiling": tiling.pack()})
        print(f"{dtype} head_dim {head_dim} {mask}: {tiling}", flush=True)
    table = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "entries": entries,
        "rows": rows,
    }
    if options.output:
        options.output.write_text(json.dumps(table, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
