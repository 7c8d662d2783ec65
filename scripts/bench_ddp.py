"""Times data-parallel wrappers against torch's own, interleaved in one run.

    python scripts/bench_ddp.py --size xl --output rows.jsonl
    python scripts/bench_ddp.py --size tiny --device cpu        # smoke test, gloo

Two ranks share one model and one fused AdamW among all variants: each variant wraps the model,
warms up, runs a block of steps timed without synchronising inside, and unwraps. Rounds go
through the variants forwards and backwards in turn, so drift hits all alike. Before anything is
timed, every variant must produce torch's gradients on a small model. Each (cell, variant) becomes
one JSON line, written after its cell.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from basics_model import SIZES, ModelConfig, TransformerLM, model_config
from ddp_lite import BucketedDDP, DataParallelBase, FlatDDP, NaiveDDP, OverlapDDP
from ddp_lite.peer import PeerCopyAverage

ANCHOR_CELLS = ["bf16,4,512", "bf16,2,512", "fp32,2,512", "fp32,2,128"]
NEED_CUDA = (
    "inplace-250-high-priority",
    "inplace-250-16-ctas",
    "peer-copy-100",
    "peer-copy-250",
)
# Largest relative error of a gradient tensor against torch's: float32 sums may be ordered
# differently, bfloat16 keeps 8 bits.
TOLERANCE = {"default": 1e-5, "bf16-wire": 1e-2}

PROFILED_STEPS = 2
# The first kind with a fitting part of the kernel's name.
KERNEL_KINDS = {
    "nccl": ("nccl",),
    "attention": ("flash", "fmha"),
    "matmul": ("gemm", "cutlass", "nvjet", "xmma"),
    "optimizer": ("adam",),
    "copy": ("memcpy", "memset", "copy"),
}

Build = Callable[[nn.Module, "Groups"], nn.Module]


class Groups:
    """Process groups that variants may choose from, made on first use (on all ranks alike)."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        self.default = dist.group.WORLD
        self._special: dict[tuple[bool, int | None], dist.ProcessGroup] = {}

    def nccl(self, *, high_priority: bool, max_ctas: int | None) -> dist.ProcessGroup:
        """A group with NCCL on a high-priority stream, or limited to so many thread blocks."""
        key = (high_priority, max_ctas)
        if key not in self._special:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
            if max_ctas is not None:
                options.config.max_ctas = max_ctas
            self._special[key] = dist.new_group(pg_options=options)
        return self._special[key]


def torch_ddp(**kwargs: Any) -> Build:
    """Torch's own wrapper."""
    return lambda module, groups: DistributedDataParallel(module, **kwargs)


def bucketed(**kwargs: Any) -> Build:
    """Our bucketed wrapper on the default group."""
    return lambda module, groups: BucketedDDP(module, **kwargs)


def peer_copies(**kwargs: Any) -> Build:
    """The bucketed wrapper with copies between NVLink peers instead of NCCL."""

    def build(module: nn.Module, groups: Groups) -> nn.Module:
        hook = PeerCopyAverage(groups.default)
        return BucketedDDP(module, comm_hook=hook, missing_gradients="zeros", **kwargs)

    return build


def tuned_nccl(*, high_priority: bool = False, max_ctas: int | None = None, **kwargs: Any) -> Build:
    """The bucketed wrapper on a group with other NCCL settings."""

    def build(module: nn.Module, groups: Groups) -> nn.Module:
        group = groups.nccl(high_priority=high_priority, max_ctas=max_ctas)
        return BucketedDDP(module, process_group=group, **kwargs)

    return build


VARIANTS: dict[str, Build] = {
    "no-communication": lambda module, groups: module,
    "torch-25": torch_ddp(bucket_cap_mb=25),
    "torch-25-views": torch_ddp(bucket_cap_mb=25, gradient_as_bucket_view=True),
    "torch-25-views-static": torch_ddp(
        bucket_cap_mb=25, gradient_as_bucket_view=True, static_graph=True
    ),
    "torch-25-static": torch_ddp(bucket_cap_mb=25, static_graph=True),
    "torch-100": torch_ddp(bucket_cap_mb=100),
    "torch-100-views": torch_ddp(bucket_cap_mb=100, gradient_as_bucket_view=True),
    "torch-100-views-static": torch_ddp(
        bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True
    ),
    "torch-100-static": torch_ddp(bucket_cap_mb=100, static_graph=True),
    "naive": lambda module, groups: NaiveDDP(module),
    "flat": lambda module, groups: FlatDDP(module),
    "overlap": lambda module, groups: OverlapDDP(module),
    "copy-100": bucketed(bucket_size_mb=100, copy=True),
    "copy-250": bucketed(bucket_size_mb=250, copy=True),
    "inplace-25": bucketed(bucket_size_mb=25),
    "inplace-100": bucketed(bucket_size_mb=100),
    "inplace-250": bucketed(bucket_size_mb=250),
    "inplace-500": bucketed(bucket_size_mb=500),
    "inplace-1000": bucketed(bucket_size_mb=1000),
    "inplace-250-no-small-last": bucketed(bucket_size_mb=250, last_bucket_size_mb=None),
    "inplace-250-high-priority": tuned_nccl(bucket_size_mb=250, high_priority=True),
    "inplace-250-16-ctas": tuned_nccl(bucket_size_mb=250, max_ctas=16),
    "peer-copy-100": peer_copies(bucket_size_mb=100),
    "peer-copy-250": peer_copies(bucket_size_mb=250),
    "bf16-wire-100": bucketed(bucket_size_mb=100, wire_dtype=torch.bfloat16),
    "bf16-wire-250": bucketed(bucket_size_mb=250, wire_dtype=torch.bfloat16),
}


def configuration(size: str, context_length: int) -> ModelConfig:
    """A named size of basics_model, or "tiny" for smoke and correctness tests."""
    if size == "tiny":
        return ModelConfig(
            vocab_size=256,
            context_length=context_length,
            d_model=32,
            d_ff=64,
            num_layers=2,
            num_heads=2,
        )
    return model_config(size, context_length=context_length)


@contextmanager
def wrapped_by(build: Build, module: nn.Module, groups: Groups) -> Iterator[nn.Module]:
    """Wraps for the length of a block and leaves no hook and no gradient behind."""
    # The wrapper of the block before is out of reach only now that its function has returned.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    wrapped = build(module, groups)
    try:
        yield wrapped
    finally:
        if isinstance(wrapped, DataParallelBase):
            wrapped.detach()
        for parameter in module.parameters():
            parameter.grad = None


def finish(wrapped: nn.Module) -> None:
    """Ends the synchronisation of wrappers that need to be told."""
    if isinstance(wrapped, DataParallelBase):
        wrapped.finish_gradient_synchronization()


def synchronize(device: torch.device) -> None:
    """Waits for the device, if it runs asynchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gradients_of(build: Build, groups: Groups, device: torch.device) -> list[Tensor]:
    """Averaged gradients of a small model after two steps; the batch differs between ranks."""
    torch.manual_seed(0)
    model = TransformerLM(configuration("tiny", 16), device=device)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    with wrapped_by(build, model, groups) as wrapped:
        for _ in range(2):
            tokens = torch.randint(256, (2, 17), generator=generator).to(device)
            for parameter in model.parameters():
                parameter.grad = None
            logits = wrapped(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            finish(wrapped)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def variants_that_agree(names: list[str], groups: Groups, device: torch.device) -> list[str]:
    """The variants that produce the gradients of torch's wrapper; says why others do not."""
    expected = gradients_of(VARIANTS["torch-25"], groups, device)
    agreeing = []
    for name in names:
        trouble = None
        if name != "no-communication":
            try:
                trouble = disagreement(name, gradients_of(VARIANTS[name], groups, device), expected)
            except Exception as error:  # noqa: BLE001 - reported, and the others still run
                trouble = f"{type(error).__name__}: {error}"
        everyone: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, trouble)
        if not any(everyone):
            agreeing.append(name)
        elif dist.get_rank() == 0:
            print(f"NOT TIMED {name}: {everyone}", flush=True)
    return agreeing


def disagreement(name: str, ours: list[Tensor], theirs: list[Tensor]) -> str | None:
    """What is wrong with a variant's gradients, None if nothing is."""
    limit = TOLERANCE["bf16-wire" if name.startswith("bf16-wire") else "default"]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]
    worst = max(errors)
    return None if worst <= limit else f"relative error {worst:.2e}, allowed {limit:.0e}"


def time_block(
    build: Build,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    precision: str,
    groups: Groups,
    args: argparse.Namespace,
    profiled: bool,
) -> dict[str, Any]:
    """One block of one variant: milliseconds per step (the slower rank's) and peak memory."""
    device = batch[0].device
    tokens, targets = batch

    def autocast() -> Any:
        return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else nullcontext()

    with wrapped_by(build, model, groups) as wrapped:

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with autocast():
                logits = wrapped(tokens)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            finish(wrapped)
            optimizer.step()

        step()
        first = wrapped.stats() if isinstance(wrapped, DataParallelBase) else None
        for _ in range(args.warmup - 1):
            step()
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        dist.barrier()
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(args.block):
            step()
        synchronize(device)
        seconds = torch.tensor([(time.perf_counter() - begin) / args.block], device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        result: dict[str, Any] = {"step_ms": seconds.item() * 1e3}
        if device.type == "cuda":
            result["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        if first is not None:
            last = wrapped.stats()
            result |= {
                "first_step_started_in_backward": first.started_in_backward,
                "reductions": last.reductions,
                "collectives": last.collectives,
                "bytes": last.bytes,
                "exposed_wait_ms": last.exposed_wait_ms,
                "explain": wrapped.explain(),
            }
        if profiled:
            result["kernel_ms"] = kernel_times(step, device)
    return result


def kernel_times(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Where a step's device time goes, in ms, from a profiler trace of two steps.

    Sums over kernels by kind; "nccl_alone" is communication under which nothing else ran. A kind
    that grows against "no-communication" is slowed by contention.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as trace:
        for _ in range(PROFILED_STEPS):
            step()
        synchronize(device)
    totals: dict[str, float] = dict.fromkeys([*KERNEL_KINDS, "other"], 0.0)
    edges: list[tuple[float, int, bool]] = []
    for event in trace.events():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if not on_device or event.is_user_annotation or event.name.startswith("nccl:"):
            continue  # ranges drawn over kernels are no kernels
        begin, end = event.time_range.start, event.time_range.end
        kind = kind_of(event.name)
        totals[kind] += end - begin
        edges += [(begin, 1, kind == "nccl"), (end, -1, kind == "nccl")]
    totals["nccl_alone"] = time_of_communication_alone(sorted(edges))
    return {kind: us / 1e3 / PROFILED_STEPS for kind, us in totals.items()}


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    name = kernel.lower()
    found = (kind for kind, parts in KERNEL_KINDS.items() if any(part in name for part in parts))
    return next(found, "other")


def time_of_communication_alone(edges: list[tuple[float, int, bool]]) -> float:
    """Microseconds in which communication runs and nothing else, from (time, ±1, is nccl)."""
    alone, before = 0.0, 0.0
    running = {True: 0, False: 0}
    for now, change, is_nccl in edges:
        if running[True] and not running[False]:
            alone += now - before
        running[is_nccl] += change
        before = now
    return alone


def summarize(name: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """One row from all blocks of a variant."""
    times = [block["step_ms"] for block in blocks]
    row = {"variant": name, "median_ms": statistics.median(times), "min_ms": min(times)}
    row["block_ms"] = times
    row["exposed_wait_ms"] = statistics.median(b.get("exposed_wait_ms", 0.0) for b in blocks)
    row["peak_gib"] = max(block.get("peak_gib", 0.0) for block in blocks)
    return {**blocks[-1], **row}


def environment(device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """What a reader must know to compare the row with another."""
    commit = args.commit
    if commit is None:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
        commit = answer.stdout.strip() or "unknown"
    on_gpu = device.type == "cuda"
    return {
        "experiment": "ddp-variants",
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "hardware": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "backend": dist.get_backend(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_"))},
        "world_size": dist.get_world_size(),
        "size": args.size,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "steps_per_block": args.block,
        "rounds": args.rounds,
    }


def run_cell(
    cell: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    names: list[str],
    groups: Groups,
    args: argparse.Namespace,
) -> None:
    """Times all variants in one (precision, batch, sequence) cell, round by round."""
    precision, batch_size, sequence = cell.split(",")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(dist.get_rank())
    vocabulary = model.config.vocab_size
    shape = (int(batch_size), int(sequence) + 1)
    tokens = torch.randint(vocabulary, shape, generator=generator).to(device)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(args.rounds):
        profiled = args.profile and turn == args.rounds - 1
        for name in names if turn % 2 == 0 else names[::-1]:
            result = time_block(
                VARIANTS[name], model, optimizer, batch, precision, groups, args, profiled
            )
            blocks[name].append(result)
            if dist.get_rank() == 0:
                print(f"{cell} round {turn} {name}: {result['step_ms']:.2f} ms", flush=True)
    if dist.get_rank() == 0:
        report(cell, {name: summarize(name, found) for name, found in blocks.items()}, device, args)


def report(
    cell: str, rows: dict[str, dict[str, Any]], device: torch.device, args: argparse.Namespace
) -> None:
    """Adds what compares variants, prints the cell in order of speed and appends its rows."""
    precision, batch_size, sequence = cell.split(",")
    alone = rows.get("no-communication", {}).get("median_ms")
    theirs = [row["median_ms"] for name, row in rows.items() if name.startswith("torch-")]
    facts = environment(device, args) | {
        "precision": precision,
        "batch": int(batch_size),
        "sequence": int(sequence),
    }
    lines = []
    for row in sorted(rows.values(), key=lambda row: row["median_ms"]):
        if alone is not None:
            row["exposed_ms"] = row["median_ms"] - alone
        if theirs:
            row["ratio_to_best_torch"] = row["median_ms"] / min(theirs)
        print(
            f"{cell} {row['variant']}: median {row['median_ms']:.2f} min {row['min_ms']:.2f} ms, "
            f"exposed {row.get('exposed_ms', float('nan')):.2f} ms, "
            f"ratio {row.get('ratio_to_best_torch', float('nan')):.3f}, "
            f"peak {row['peak_gib']:.2f} GiB",
            flush=True,
        )
        if "kernel_ms" in row:
            kinds = ", ".join(f"{kind} {ms:.2f}" for kind, ms in row["kernel_ms"].items())
            print(f"  kernels, ms a step: {kinds}", flush=True)
        lines.append(json.dumps(facts | row))
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with args.output.open("a") as file:
            file.write("\n".join(lines) + "\n")


def worker(rank: int, store: str, args: argparse.Namespace) -> None:
    """One rank: correctness first, then every cell."""
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision(args.matmul_precision)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(store, args.world_size),
        rank=rank,
        world_size=args.world_size,
        timeout=timedelta(seconds=120),
        device_id=device if on_gpu else None,
    )
    try:
        groups = Groups()
        names = args.variants or list(VARIANTS)
        names = variants_that_agree(names, groups, device)
        if rank == 0:
            print(f"{len(names)} variants agree with torch on a small model", flush=True)
        longest = max(int(cell.split(",")[2]) for cell in args.cells)
        torch.manual_seed(0)
        model = TransformerLM(configuration(args.size, longest), device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        for cell in args.cells:
            run_cell(cell, model, optimizer, names, groups, args)
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Reads the command line and starts the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=["tiny", *SIZES], default="xl")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument(
        "--cells",
        nargs="+",
        help="precision,batch,sequence (bf16 is autocast; batch per rank); default: "
        + " ".join(ANCHOR_CELLS),
    )
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--block", type=int, default=6, help="steps timed together")
    parser.add_argument("--warmup", type=int, default=3, help="steps before each block")
    parser.add_argument("--matmul-precision", choices=["highest", "high"], default="highest")
    parser.add_argument(
        "--profile", action="store_true", help="add kernel times from a trace of the last round"
    )
    parser.add_argument("--output", type=Path, help="JSON lines are appended here")
    parser.add_argument("--commit", help="recorded; default: git rev-parse HEAD")
    args = parser.parse_args()
    # Multicast over NVLink stays off in every measurement; the rows record the settings.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    args.cells = args.cells or (["fp32,2,16", "bf16,2,16"] if args.size == "tiny" else ANCHOR_CELLS)
    if args.device == "cpu":
        args.variants = args.variants or [name for name in VARIANTS if name not in NEED_CUDA]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            worker, args=(f"{folder}/store", args), nprocs=args.world_size, start_method="spawn"
        )


if __name__ == "__main__":
    main()
