"""Times and weighs sharded optimizers against torch's own, interleaved in one run.

    python scripts/bench_optimizer.py --size xl --output rows.jsonl
    python scripts/bench_optimizer.py --size tiny --device cpu        # smoke test, gloo

One variant is in memory at a time: each block builds the model, the wrapper and the optimizer,
weighs two steps moment by moment (they are the warm-up), times a block of steps without
synchronising inside, then a few optimizer steps alone. Rounds go through the variants forwards and
backwards in turn, so drift hits all alike. Before anything is timed, every variant must end at
torch's parameters on a small model. Each block becomes one JSON line as soon as it is measured; a
run with the same ``--output`` and settings skips the blocks that are there, so it can be resumed.
``--trace DIR`` also writes one profiler trace per variant. ``scripts/optimizer_results.py`` makes
the table and the picture from the lines.
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
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from basics_model import SIZES, ModelConfig, TransformerLM, model_config
from ddp_lite import BucketedDDP
from shard_optim import ReduceScatterHook, ShardedOptimizer
from shard_optim.accounting import rank_memory

LEARNING_RATE = 1e-4
# Parameters after a few fp32 AdamW steps against torch's: sums may be ordered differently, and
# Adam divides gradients near zero by their own magnitude.
TOLERANCE = 2e-5


@dataclass
class Trainer:
    """What one step needs: the callable model, its optimizer, what ends a backward, a clean-up."""

    forward: nn.Module
    optimizer: torch.optim.Optimizer
    finish: Callable[[], None] = lambda: None
    close: Callable[[], object] = lambda: None


Build = Callable[[nn.Module], Trainer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The unsharded optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def sharded(model: nn.Module, **kwargs: Any) -> ShardedOptimizer:
    """The same, sharded by us."""
    return ShardedOptimizer(
        model.named_parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True, **kwargs
    )


def torch_ddp(model: nn.Module) -> nn.Module:
    """Torch's wrapper at its best setting in our measurements."""
    return DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)


def build_torch_zero(model: nn.Module) -> Trainer:
    """Torch's wrapper and torch's sharded optimizer."""
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True
    )
    return Trainer(torch_ddp(model), optimizer)


def build_ddp_lite(*, shard: bool, bucket_size_mb: float = 250) -> Build:
    """Our wrapper with either optimizer."""

    def build(model: nn.Module) -> Trainer:
        optimizer = sharded(model) if shard else adamw(model)
        wrapped = BucketedDDP(model, bucket_size_mb=bucket_size_mb)
        return Trainer(wrapped, optimizer, wrapped.finish_gradient_synchronization, wrapped.detach)

    return build


def build_handoff(model: nn.Module) -> Trainer:
    """Our wrapper hands its buckets over: reduce-scattered instead of all-reduced."""
    wrapped = BucketedDDP(model, bucket_size_mb=250, comm_hook=ReduceScatterHook())
    optimizer = sharded(model, layout=wrapped.buckets)
    return Trainer(wrapped, optimizer, wrapped.finish_gradient_synchronization, wrapped.detach)


def build_sharded(**kwargs: Any) -> Build:
    """No wrapper: the optimizer reduces gradients itself."""

    def build(model: nn.Module) -> Trainer:
        optimizer = sharded(model, reduce_gradients=True, **kwargs)
        if kwargs.get("overlap"):
            optimizer.attach(model)
        return Trainer(model, optimizer)

    return build


VARIANTS: dict[str, Build] = {
    "no-communication": lambda model: Trainer(model, adamw(model)),
    "torch-ddp": lambda model: Trainer(torch_ddp(model), adamw(model)),
    "torch-ddp+zero": build_torch_zero,
    "ddp-lite": build_ddp_lite(shard=False),
    "ddp-lite-500": build_ddp_lite(shard=False, bucket_size_mb=500),
    "torch-ddp+sharded": lambda model: Trainer(torch_ddp(model), sharded(model)),
    "ddp-lite+sharded": build_ddp_lite(shard=True),
    "ddp-lite+handoff": build_handoff,
    "reduce": build_sharded(),
    "reduce-overlap": build_sharded(overlap="next-forward"),
    "reduce-250-overlap": build_sharded(bucket_size_mb=250, overlap="next-forward"),
    "reduce-500-overlap": build_sharded(bucket_size_mb=500, overlap="next-forward"),
    "reduce-1000-overlap": build_sharded(bucket_size_mb=1000, overlap="next-forward"),
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


def loss_of(trainer: Trainer, tokens: Tensor) -> Tensor:
    """Next-token cross-entropy; ``tokens`` has shape (batch, sequence + 1)."""
    logits = trainer.forward(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def final_parameters(build: Build, device: torch.device) -> list[Tensor]:
    """Parameters of a small model after three fp32 steps; the batch differs between ranks."""
    torch.manual_seed(0)
    model = TransformerLM(configuration("tiny", 16), device=device)
    trainer = build(model)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(3):
        trainer.optimizer.zero_grad()
        loss_of(trainer, torch.randint(256, (2, 17), generator=generator).to(device)).backward()
        trainer.finish()
        trainer.optimizer.step()
    if isinstance(trainer.optimizer, ShardedOptimizer):
        trainer.optimizer.wait()
    trainer.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def check_variants(names: list[str], device: torch.device) -> None:
    """Raises on every rank unless every variant that communicates ends where torch does."""
    expected = final_parameters(VARIANTS["torch-ddp"], device)
    for name in names:
        if name == "no-communication":
            continue
        found = final_parameters(VARIANTS[name], device)
        worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
        agreed = torch.tensor([worst], device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        if not agreed.item() <= TOLERANCE:
            raise RuntimeError(
                f"{name} must end within {TOLERANCE:.0e} of torch's parameters, but is "
                f"{agreed.item():.2e} away; nothing was timed"
            )


def synchronize(device: torch.device) -> None:
    """Waits for the device, if it runs asynchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def nbytes(tensors: list[Tensor]) -> int:
    """Bytes of tensors, shared storage counted once per tensor."""
    return sum(tensor.nbytes for tensor in tensors)


class Memory:
    """Bytes at named moments, above what was allocated when it was made; empty on CPU, where torch
    does not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.moments: dict[str, dict[str, int]] = {}
        self.before = 0
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            self.before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)

    def mark(self, moment: str, **parts: int) -> None:
        """Records what is allocated now, the peak since the previous mark, and known parts."""
        if self._device.type == "cuda":
            synchronize(self._device)
            self.moments[moment] = {
                "allocated": torch.cuda.memory_allocated(self._device) - self.before,
                "peak": torch.cuda.max_memory_allocated(self._device) - self.before,
                **parts,
            }
            torch.cuda.reset_peak_memory_stats(self._device)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's optimizer state."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer = optimizer.optim
    states = optimizer.state.values()
    return nbytes([v for state in states for v in state.values() if isinstance(v, Tensor)])


def gradient_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the gradients that a rank holds after backward, whole or in shards."""
    whole = [p.grad for p in model.parameters() if p.grad is not None]
    if not whole and isinstance(optimizer, ShardedOptimizer):
        return nbytes(optimizer.local_gradients())
    return nbytes(whole)


def time_block(
    name: str, batch: Tensor, args: argparse.Namespace, *, trace: bool
) -> dict[str, Any]:
    """One block of one variant: milliseconds per step (the slower rank's) and memory."""
    device = batch.device
    memory = Memory(device)
    torch.manual_seed(0)
    model = TransformerLM(configuration(args.size, args.sequence), device=device)
    trainer = VARIANTS[name](model)
    parameters = nbytes(list(model.parameters()))
    memory.mark("after_init", parameters=parameters)

    def forward() -> Tensor:
        trainer.optimizer.zero_grad(set_to_none=True)
        use = args.precision == "bf16"
        with torch.autocast(device.type, torch.bfloat16) if use else nullcontext():
            return loss_of(trainer, batch)

    def backward() -> None:
        forward().backward()
        trainer.finish()

    def step() -> None:
        backward()
        trainer.optimizer.step()

    for number in (1, 2):
        loss = forward()
        state = state_bytes(trainer.optimizer)
        memory.mark(f"forward_{number}", parameters=parameters, optimizer_state=state)
        loss.backward()
        trainer.finish()
        gradients = gradient_bytes(model, trainer.optimizer)
        parts = {"parameters": parameters, "gradients": gradients}
        memory.mark(f"before_step_{number}", **parts, optimizer_state=state)
        del loss
        trainer.optimizer.step()
        whole = nbytes([p.grad for p in model.parameters() if p.grad is not None])
        parts = {"parameters": parameters, "gradients": whole}
        memory.mark(f"after_step_{number}", **parts, optimizer_state=state_bytes(trainer.optimizer))
    step()

    dist.barrier()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(args.block):
        step()
    host = time.perf_counter() - begin
    synchronize(device)
    times = torch.tensor([time.perf_counter() - begin, host], device=device) / args.block
    dist.all_reduce(times, dist.ReduceOp.MAX)
    memory.mark("timed_block")

    optimizer_ms = [time_optimizer(backward, trainer, device) for _ in range(3)]
    if trace:
        write_trace(name, step, device, args)
    result = {
        "step_ms": times[0].item() * 1e3,
        "host_ms": times[1].item() * 1e3,
        "optimizer_ms": statistics.median(optimizer_ms),
        "memory": memory.moments,
        "held_before": memory.before,
        "parameter_bytes": parameters,
        "state_bytes": state_bytes(trainer.optimizer),
        "buckets": len(getattr(trainer.optimizer, "buckets", ())),
    }
    trainer.close()
    return result


def time_optimizer(backward: Callable[[], None], trainer: Trainer, device: torch.device) -> float:
    """Milliseconds from a finished backward to updated parameters."""
    backward()
    dist.barrier()
    synchronize(device)
    begin = time.perf_counter()
    trainer.optimizer.step()
    if isinstance(trainer.optimizer, ShardedOptimizer):
        trainer.optimizer.wait()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def write_trace(
    name: str, step: Callable[[], None], device: torch.device, args: argparse.Namespace
) -> None:
    """A profiler trace of three steps of rank 0."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(3):
            step()
        synchronize(device)
    if dist.get_rank() == 0:
        args.trace.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(args.trace / f"{name}.json.gz"))


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
        "experiment": "optimizer-variants",
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
        "precision": args.precision,
        "batch": args.batch,
        "sequence": args.sequence,
        "steps_per_block": args.block,
    }


def predicted(name: str, parameters: int, world_size: int) -> dict[str, float]:
    """Bytes per rank by the accounting, activations and buffers excluded."""
    stage = (
        2
        if name.startswith("reduce")
        else 1
        if name.endswith(("zero", "sharded", "handoff"))
        else 0
    )
    memory = rank_memory(parameters // 4, world_size=world_size, stage=stage)
    return {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer_state": memory.optimizer_state,
        "total": memory.total,
    }


# What must be equal for two blocks to belong to one run.
SETTINGS = (
    "commit",
    "hardware",
    "world_size",
    "size",
    "precision",
    "batch",
    "sequence",
    "steps_per_block",
)


def measured_already(facts: dict[str, Any], output: Path | None) -> list[dict[str, Any]]:
    """Rows of earlier runs with the same settings."""
    if output is None or not output.exists():
        return []
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return [row for row in rows if all(row.get(key) == facts[key] for key in SETTINGS)]


def summary(rows: list[dict[str, Any]]) -> str:
    """One line per variant, fastest first."""
    blocks: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        blocks.setdefault(row["variant"], []).append(row)

    def median(name: str, key: str) -> float:
        return statistics.median(row[key] for row in blocks[name])

    lines = []
    for name in sorted(blocks, key=lambda name: median(name, "step_ms")):
        ratios = ", ".join(
            f"{median(name, 'step_ms') / median(base, 'step_ms'):.3f} of {base}"
            for base in ("no-communication", "torch-ddp", "torch-ddp+zero", "ddp-lite")
            if base in blocks
        )
        peak = max((m["peak"] for row in blocks[name] for m in row["memory"].values()), default=0)
        lines.append(
            f"{name}: median {median(name, 'step_ms'):.2f} min "
            f"{min(row['step_ms'] for row in blocks[name]):.2f} ms, host "
            f"{median(name, 'host_ms'):.2f} ms, optimizer {median(name, 'optimizer_ms'):.2f} ms, "
            f"peak {peak / 2**30:.2f} GiB; {ratios}"
        )
    return "\n".join(lines)


def worker(rank: int, store: str, args: argparse.Namespace) -> None:
    """One rank: correctness first, then all rounds."""
    on_gpu = args.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
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
        names = args.variants or list(VARIANTS)
        check_variants(names, device)
        if rank == 0:
            print(f"{len(names)} variants agree with torch on a small model", flush=True)
        generator = torch.Generator().manual_seed(rank)
        vocabulary = configuration(args.size, args.sequence).vocab_size
        shape = (args.batch, args.sequence + 1)
        batch = torch.randint(vocabulary, shape, generator=generator).to(device)
        facts = environment(device, args)
        rows = measured_already(facts, args.output)
        done = {(row["variant"], row.get("round")) for row in rows}
        for turn in range(args.rounds):
            for name in names if turn % 2 == 0 else names[::-1]:
                if (name, turn) in done:
                    continue
                trace = args.trace is not None and turn == args.rounds - 1
                block = time_block(name, batch, args, trace=trace)
                expected = predicted(name, block["parameter_bytes"], args.world_size)
                row = facts | {"variant": name, "round": turn} | block
                rows.append(row | {"predicted_bytes": expected})
                if rank == 0:
                    print(f"round {turn} {name}: {block['step_ms']:.2f} ms", flush=True)
                    if args.output is not None:
                        args.output.parent.mkdir(parents=True, exist_ok=True)
                        with args.output.open("a") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
        if rank == 0:
            print(summary(rows), flush=True)
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Reads the command line and starts the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=["tiny", *SIZES], default="xl")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--sequence", type=int, help="default: 512, or 16 for tiny")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--block", type=int, default=6, help="steps timed together")
    parser.add_argument("--trace", type=Path, help="folder for one profiler trace per variant")
    parser.add_argument("--output", type=Path, help="JSON lines are appended here")
    parser.add_argument("--commit", help="recorded; default: git rev-parse HEAD")
    args = parser.parse_args()
    args.sequence = args.sequence or (16 if args.size == "tiny" else 512)
    # Multicast over NVLink stays off in every measurement; the rows record the setting.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            worker, args=(f"{folder}/store", args), nprocs=args.world_size, start_method="spawn"
        )


if __name__ == "__main__":
    main()
