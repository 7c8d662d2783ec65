"""Times attention over ranks against the rate of one GPU's kernel, and a training step with it.

    torchrun --nproc-per-node 4 packages/flashattn-triton/tools/time_context_parallel.py \
        --tokens 65536,262144 --rows context.jsonl
    torchrun --nproc-per-node 4 packages/flashattn-triton/tools/time_context_parallel.py \
        --step --tokens 131072 --rows context.jsonl

Causal attention of one sequence, forward and backward, bf16 on GPUs. The rate is that of
``flash_attention`` on each GPU by itself, of a sequence with as much work as a rank has, in the
same run: a GPU that works for long has a lower clock. ``--rate-tokens`` asks for that of another
one. The floor divides the FLOPs of all tokens by the ranks' rates; ``over_rate`` is the floor over
the time, of which the slowest rank's counts, the median of ``--repeats``. With ``--step`` it is a
step of a model of 8 billion parameters: stage 3 over all ranks, blocks recomputed but for the
output of attention. MFU is that of 989 TFLOP/s, counts no recomputation, and only pairs of tokens
that the mask shows; ``mfu_all_pairs`` counts all, as many trainers do.

``exposed_ms`` and ``idle_ms`` are of one call more, which a profiler records: the time in which a
GPU communicates and computes nothing, and in which it does neither, on the rank where it is most;
``exposed_min_ms`` is on the rank that waits least for others. ``--timelines`` keeps its spans too.
With ``--repeats 0`` the recorded step, after one that is not counted, is the one that counts. A row
is written as soon as it is measured. A problem that does not fit is a row with its error.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from bench_harness.traces.kineto import load, recording
from bench_harness.traces.step import of_rank, over_ranks
from bench_harness.traces.trace import phase
from flashattn_triton import flash_attention
from flashattn_triton.context_parallel import (
    all_gather_attention,
    ring_attention,
    shard_tokens,
    token_positions,
)
from flashattn_triton.context_parallel.transfers import memory_for

WAYS: dict[str, Callable[..., Any]] = {
    "ring": ring_attention,
    "ring, messages": functools.partial(ring_attention, communication="messages"),
    "all-gather": all_gather_attention,
}
PEAK_TFLOPS = 989.0
GPU = torch.cuda.is_available()
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if GPU else "cpu")


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="65536,262144", help="of the sequence, over all ranks")
    parser.add_argument("--ways", default="ring;all-gather", help=f"of {'; '.join(WAYS)}")
    parser.add_argument(
        "--rate-tokens", type=int, help="of one GPU; else as much work as a rank has"
    )
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int, help="keys before a query's own")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=Path, default=Path("context_parallel.jsonl"))
    parser.add_argument("--timelines", action="store_true", help="in the rows of attention")
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--layers", type=int, default=34, help="of the model of --step")
    parser.add_argument("--recompute-attention", action="store_true", help="with --step")
    parser.add_argument("--offload", action="store_true", help="blocks' inputs to the host")
    return parser.parse_args()


class Rows:
    """Rank 0's file of rows, in the form that the pages of this repository read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        device = torch.cuda.get_device_name() if GPU else "CPU ranks"
        command = ["git", "rev-parse", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        self._same = {
            "commit": found.stdout.strip(),
            "measured_on": f"{dist.get_world_size()} {device}, torch {torch.__version__}",
            "config": {},
        }

    def write(self, kind: str, **row: Any) -> None:
        """Appends a row, and prints it."""
        if dist.get_rank() == 0:
            shape = ("way", "tokens", "kv_heads", "window", "attention")
            label = ", ".join([kind, *(f"{x} {row[x]}" for x in shape if row.get(x) is not None)])
            about = {"experiment": "context-parallel", "case_key": label, "label": label}
            found = {k: round(x, 4) if isinstance(x, float) else x for k, x in row.items()}
            line = json.dumps({**about, **self._same, "rows": [found]})
            print(line[:600], flush=True)
            with self._path.open("a") as file:
                file.write(line + "\n")


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median over some calls of the slowest rank's time, after one that is not counted."""
    found = []
    for turn in range(repeats + 1):
        dist.barrier()
        if GPU:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if GPU:
            torch.cuda.synchronize()
        slowest = torch.tensor(time.perf_counter() - start, device=DEVICE)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if turn:
            found.append(slowest.item())
    return statistics.median(found) if found else 0.0


def recorded(call: Callable[[], object], *, timelines: bool = False) -> dict[str, Any]:
    """Exposed communication of one call, and its timeline."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        dist.barrier()
        with recording(file, DEVICE), phase("call", DEVICE):
            call()
        trace = load(file)
    own = of_rank(trace, trace.phases("call")[0], "recorded by torch.profiler")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    row = over_ranks(everyone)
    kept = ["exposed_ms", "exposed_min_ms", "idle_ms", *["timeline"] * timelines]
    return {"recorded_ms": row["timeline"]["ranks"][0]["window_ns"] / 1e6} | {
        name: row[name] for name in kept
    }


def flops(tokens: int, heads: int, head_dim: int, window: int | None) -> float:
    """Of the forward pass of causal attention; the backward pass has 2.5 times as many."""
    before = tokens if window is None else min(window, tokens)
    pairs = tokens * before - before * before / 2
    return 4.0 * pairs * heads * head_dim


def leaves(tokens: int, arguments: argparse.Namespace) -> list[Tensor]:
    """Query, key and value (1, tokens, heads, head_dim) of one rank."""
    torch.manual_seed(dist.get_rank())
    heads = (arguments.heads, arguments.kv_heads, arguments.kv_heads)
    dtype = torch.bfloat16 if GPU else torch.float32
    return [
        torch.randn(1, tokens, h, arguments.head_dim, device=DEVICE, dtype=dtype).requires_grad_()
        for h in heads
    ]


def time_attention(
    attend: Callable[..., Any], tokens: int, arguments: argparse.Namespace, *, record: bool
) -> tuple[float, float, dict[str, Any]]:
    """Seconds of forward, of forward and backward, and :func:`recorded`, of a rank's tokens."""
    inputs = leaves(tokens, arguments)
    window = None if arguments.window is None else (arguments.window, 0)
    grad_out = torch.randn_like(inputs[0])

    def forward() -> Tensor:
        out: Tensor = attend(*inputs, causal=True, window=window, layout="bshd")
        return out

    def both() -> None:
        torch.autograd.grad(forward(), inputs, grad_out)

    with torch.no_grad():
        of_forward = seconds(forward, arguments.repeats)
    of_both = seconds(both, arguments.repeats)
    spans = recorded(both, timelines=arguments.timelines) if record else {}
    return of_forward, of_both, spans


def memory(*, copies: bool) -> dict[str, float]:
    """GiB that torch had allocated at most, and those besides that other ranks copy from."""
    if not GPU:
        return {}
    shared = memory_for(dist.group.WORLD, DEVICE) if copies and dist.group.WORLD else ""
    nbytes = 0 if isinstance(shared, str) else shared.nbytes
    return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "shared_gib": nbytes / 2**30}


def _tokens_of_equal_work(tokens: int, ranks: int, arguments: argparse.Namespace) -> int:
    """The length of a sequence whose attention has a rank's part of the FLOPs, by 1,024."""
    if arguments.window is not None:
        return tokens // ranks
    return max(round(tokens / math.sqrt(ranks) / 1024), 1) * 1024


def time_ways(arguments: argparse.Namespace, rows: Rows) -> None:
    """A row for each number of tokens and way."""
    size = dist.get_world_size()
    shape = {
        "heads": arguments.heads,
        "kv_heads": arguments.kv_heads,
        "head_dim": arguments.head_dim,
        "window": arguments.window,
    }
    known = (arguments.heads, arguments.head_dim, arguments.window)
    for tokens in map(int, arguments.tokens.split(",")):
        n = arguments.rate_tokens or _tokens_of_equal_work(tokens, size, arguments)
        alone = time_attention(flash_attention, n, arguments, record=False)
        rates = flops(n, *known) / alone[0], 3.5 * flops(n, *known) / alone[1]
        rows.write(
            kind="one GPU", tokens=n, **shape, forward_ms=alone[0] * 1e3, both_ms=alone[1] * 1e3,
            forward_tflops=rates[0] / 1e12, both_tflops=rates[1] / 1e12,
        )  # fmt: skip
        for way in arguments.ways.split(";"):
            if GPU:
                torch.cuda.reset_peak_memory_stats()
            try:
                times = time_attention(WAYS[way], tokens // size, arguments, record=True)
            except torch.OutOfMemoryError as error:
                rows.write(kind="attention", way=way, tokens=tokens, **shape, error=str(error))
                continue
            floors = [
                f * flops(tokens, *known) / size / r for f, r in zip((1, 3.5), rates, strict=True)
            ]
            rows.write(
                kind="attention", way=way, tokens=tokens, **shape, forward_ms=times[0] * 1e3,
                both_ms=times[1] * 1e3, forward_over_rate=floors[0] / times[0],
                both_over_rate=floors[1] / times[1], **memory(copies=way == "ring"), **times[2],
            )  # fmt: skip


def time_steps(arguments: argparse.Namespace, rows: Rows) -> None:
    """A row for each number of tokens and way: a step of a model, whose attention is over ranks."""
    from basics_model import ModelConfig, TransformerLM
    from basics_model.sizes import model_flops
    from shard_optim import FullyShardedDataParallel

    for tokens in map(int, arguments.tokens.split(",")):
        for way in arguments.ways.split(";"):
            config = ModelConfig(
                vocab_size=151_936 if GPU else 256,
                context_length=tokens,
                d_model=arguments.heads * arguments.head_dim,
                d_ff=arguments.heads * arguments.head_dim * 43 // 16,
                num_layers=arguments.layers,
                num_heads=arguments.heads,
            )

            def attend(q: Tensor, k: Tensor, v: Tensor, way: str = way) -> Tensor:
                out: Tensor = WAYS[way](q, k, v, causal=True, layout="bhsd")
                return out

            kept = not arguments.recompute_attention
            module = TransformerLM(
                config, attention=attend, checkpoint_blocks=1, keep_attention=kept, device="meta"
            )
            bf16 = torch.bfloat16 if GPU else None
            model = FullyShardedDataParallel(
                module, compute_dtype=bf16, reduce_dtype=bf16, device=DEVICE
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=GPU)
            torch.manual_seed(0)
            text = torch.randint(config.vocab_size, (1, tokens + 1), device=DEVICE)
            inputs, targets = shard_tokens(text[:, :-1]), shard_tokens(text[:, 1:])
            positions = token_positions(tokens, device=DEVICE)

            def step(
                model: Any = model, optimizer: Any = optimizer, given: Any = (inputs, targets),
                positions: Tensor = positions,
            ) -> None:  # fmt: skip
                optimizer.zero_grad()
                with save_on_cpu(pin_memory=GPU) if arguments.offload else nullcontext():
                    loss = model(*given, positions=positions)
                loss.backward()
                model.finish_gradient_synchronization()
                optimizer.step()

            attention = "kept" if kept else "recomputed"
            attention += ", inputs on the host" if arguments.offload else ""
            shape = {"way": way, "tokens": tokens, "attention": attention}
            shape["parameters"] = config.num_parameters
            try:
                found = seconds(step, arguments.repeats)
                spans = recorded(step)
            except torch.OutOfMemoryError as error:
                rows.write(kind="step", **shape, error=str(error))
                raise  # what stage 3 holds cannot be given back
            found = found or spans["recorded_ms"] / 1e3
            all_pairs = 3 * model_flops(config, batch=1, seq=tokens)
            visible = all_pairs - 6 * config.num_layers * tokens**2 * config.d_model
            per_rank = found * dist.get_world_size() * 1e12 * PEAK_TFLOPS
            rows.write(
                kind="step", **shape, step_s=found, tokens_per_second=tokens / found,
                mfu=100 * visible / per_rank, mfu_all_pairs=100 * all_pairs / per_rank,
                **memory(copies=way == "ring"), **spans,
            )  # fmt: skip
            del module, model, optimizer, step


def main() -> None:
    """Joins the ranks, and measures."""
    arguments = parsed()
    if GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if GPU else "gloo")
    rows = Rows(arguments.rows)
    try:
        (time_steps if arguments.step else time_ways)(arguments, rows)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
