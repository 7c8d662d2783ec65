"""Weighs and times sharded optimizers against torch's own.

    python scripts/bench_optimizer.py --size xl --output rows.jsonl
    python scripts/bench_optimizer.py --size tiny --device cpu        # smoke test, gloo

First every variant must end at torch's parameters on a small model. Then each variant of
``--weigh`` is built alone, and its memory is recorded moment by moment over two steps. Then all
variants of ``--timed`` are built, and rounds go through them forwards and backwards in turn: a
short block of steps timed without synchronising inside, and one optimizer step alone. Neighbouring
blocks of different variants see the same state of the machine, which matters more than the length
of a block; the variants must fit into memory together.

Every measurement becomes one JSON line at once. A run with the same ``--output`` and settings skips
what is there, so it can be resumed. ``--trace DIR`` also writes one profiler trace per timed
variant. ``scripts/optimizer_results.py`` makes tables and a picture from the lines.

    python scripts/bench_optimizer.py --alone --world-size 64 --output rows.jsonl

weighs rank 0 of any number of ranks on one device: its collectives move nothing, so memory is the
real one and all else is not; nothing is checked or timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks_bench import (
    add_arguments,
    collector_paused,
    compiler,
    configuration,
    facts,
    graphs,
    new_model,
    small_model,
    start_alone,
    start_ranks,
    synchronize,
    time_steps,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

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
    wrapped = DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True)
    if dist.get_backend() == "fake":  # what its all-reduce returns, DDP does not understand
        wrapped.register_comm_hook(None, noop_hook)
    return wrapped


def build_torch_zero(model: nn.Module) -> Trainer:
    """Torch's wrapper and torch's sharded optimizer."""
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True
    )
    return Trainer(torch_ddp(model), optimizer)


def build_ddp_lite(*, shard: bool, bucket_size_mb: float | Literal["auto"] = "auto") -> Build:
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
    "ddp-lite-auto": build_ddp_lite(shard=False),
    "ddp-lite": build_ddp_lite(shard=False, bucket_size_mb=250),
    "ddp-lite-500": build_ddp_lite(shard=False, bucket_size_mb=500),
    "torch-ddp+sharded": lambda model: Trainer(torch_ddp(model), sharded(model)),
    "ddp-lite+sharded": build_ddp_lite(shard=True, bucket_size_mb=250),
    "ddp-lite+handoff": build_handoff,
    "reduce": build_sharded(),
    "reduce-overlap": build_sharded(overlap="next-forward"),
    "reduce-250-overlap": build_sharded(bucket_size_mb=250, overlap="next-forward"),
    "reduce-500-overlap": build_sharded(bucket_size_mb=500, overlap="next-forward"),
    "reduce-1000-overlap": build_sharded(bucket_size_mb=1000, overlap="next-forward"),
    "reduce-even-overlap": build_sharded(bucket_size_mb=476, overlap="next-forward"),
}


# Together these fit the memory of one H200 at the size "xl".
TIMED = ("reduce-overlap", "ddp-lite-auto", "torch-ddp", "torch-ddp+zero")


def loss_of(trainer: Trainer, tokens: Tensor) -> Tensor:
    """Next-token cross-entropy; ``tokens`` has shape (batch, sequence + 1)."""
    logits = trainer.forward(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def final_parameters(build: Build, device: torch.device, args: argparse.Namespace) -> list[Tensor]:
    """Parameters of a small model after three fp32 steps; the batch differs between ranks."""
    model = small_model(device, args)
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


def check_variants(names: list[str], device: torch.device, args: argparse.Namespace) -> None:
    """Raises on every rank unless every variant that communicates ends where torch does."""
    expected = final_parameters(VARIANTS["torch-ddp"], device, args)
    for name in names:
        if name == "no-communication":
            continue
        found = final_parameters(VARIANTS[name], device, args)
        worst = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
        agreed = torch.tensor([worst], device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        if not agreed.item() <= TOLERANCE:
            raise RuntimeError(
                f"{name} must end within {TOLERANCE:.0e} of torch's parameters, but is "
                f"{agreed.item():.2e} away; nothing was timed"
            )


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
            held = -1
            while held != self.before:  # what one collection frees may hold more to collect
                held = self.before
                synchronize(device)
                time.sleep(0.5)  # NCCL's watchdog lets go of finished collectives' tensors late
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


class Training:
    """One variant in memory, with its model, its batch and its precision."""

    def __init__(self, name: str, batch: Tensor, args: argparse.Namespace) -> None:
        self.name = name
        self.batch = batch
        self.autocast = args.precision == "bf16"
        self.model = new_model(args.size, args.sequence, batch.device, compiler(args))
        self.trainer = VARIANTS[name](self.model)
        self.optimizer = self.trainer.optimizer

    def forward(self) -> Tensor:
        """The loss, with all gradients reset."""
        self.optimizer.zero_grad(set_to_none=True)
        kind = self.batch.device.type
        with torch.autocast(kind, torch.bfloat16) if self.autocast else nullcontext():
            return loss_of(self.trainer, self.batch)

    def backward(self, loss: Tensor) -> None:
        """Averaged gradients."""
        loss.backward()
        self.trainer.finish()

    def step(self) -> None:
        """A whole training step."""
        self.backward(self.forward())
        self.optimizer.step()

    def whole_gradient_bytes(self) -> int:
        """Bytes of the gradients in the parameters."""
        return nbytes([p.grad for p in self.model.parameters() if p.grad is not None])

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that a rank holds after backward, whole or in shards."""
        if isinstance(self.optimizer, ShardedOptimizer) and not self.whole_gradient_bytes():
            return nbytes(self.optimizer.local_gradients())
        return self.whole_gradient_bytes()


def weigh(name: str, batch: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """Memory of one variant over construction and two steps; nothing else is in memory."""
    memory = Memory(batch.device)
    training = Training(name, batch, args)
    parameters = nbytes(list(training.model.parameters()))
    memory.mark("after_init", parameters=parameters)
    for number in (1, 2):
        loss = training.forward()
        state = state_bytes(training.optimizer)
        memory.mark(f"forward_{number}", parameters=parameters, optimizer_state=state)
        training.backward(loss)
        gradients = training.gradient_bytes()
        memory.mark(
            f"before_step_{number}",
            parameters=parameters,
            gradients=gradients,
            optimizer_state=state,
        )
        del loss
        training.optimizer.step()
        memory.mark(
            f"after_step_{number}",
            parameters=parameters,
            gradients=training.whole_gradient_bytes(),
            optimizer_state=state_bytes(training.optimizer),
        )
    training.trainer.close()
    return {
        "memory": memory.moments,
        "held_before": memory.before,
        "parameter_bytes": parameters,
        "predicted_bytes": predicted(name, parameters, args.world_size),
    }


def time_block(training: Training, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per step, the slower rank's, and of one optimizer step alone."""
    with collector_paused():
        training.step()
        result: dict[str, Any] = time_steps(training.step, args.block, training.batch.device)
        result["optimizer_ms"] = time_optimizer(training)
    training.optimizer.zero_grad(set_to_none=True)  # the other variants need the memory
    result["buckets"] = len(getattr(training.optimizer, "buckets", ()))
    return result


def time_optimizer(training: Training) -> float:
    """Milliseconds from a finished backward to updated parameters."""
    training.backward(training.forward())
    dist.barrier()
    synchronize(training.batch.device)
    begin = time.perf_counter()
    training.optimizer.step()
    if isinstance(training.optimizer, ShardedOptimizer):
        training.optimizer.wait()
    synchronize(training.batch.device)
    return (time.perf_counter() - begin) * 1e3


def write_trace(training: Training, folder: Path) -> None:
    """A profiler trace of three steps of rank 0."""
    from torch.profiler import ProfilerActivity, profile

    device = training.batch.device
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(3):
            training.step()
        synchronize(device)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"{training.name}.json.gz"))


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


# What must be equal for two rows to belong to one run.
SETTINGS = (
    "commit",
    "hardware",
    "backend",
    "world_size",
    "size",
    "compiled_blocks",
    "precision",
    "batch",
    "sequence",
)


class Rows:
    """The measurements of this run, and of earlier ones with the same settings.

    Args:
        common: what every row says about the machine and the settings.
        output: JSON lines are read from here and appended to it; None keeps them in memory.
    """

    def __init__(self, common: dict[str, Any], output: Path | None) -> None:
        self._facts = common
        self._output = output
        self.rows: list[dict[str, Any]] = []
        if output is not None and output.exists():
            found = [json.loads(line) for line in output.read_text().splitlines()]
            self.rows = [
                row for row in found if all(row.get(key) == common[key] for key in SETTINGS)
            ]

    def has(self, kind: str, variant: str, turn: int) -> bool:
        """Whether this was measured already."""
        wanted = (kind, variant, turn)
        return any((row["kind"], row["variant"], row["round"]) == wanted for row in self.rows)

    def add(self, kind: str, variant: str, turn: int, result: dict[str, Any]) -> None:
        """Keeps a measurement, on disk at once; rank 0 writes."""
        row = self._facts | {"kind": kind, "variant": variant, "round": turn} | result
        self.rows.append(row)
        if dist.get_rank() == 0 and self._output is not None:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            with self._output.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def summary(self) -> str:
        """One line per timed variant, fastest first."""
        blocks: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            if row["kind"] == "time":
                blocks.setdefault(row["variant"], []).append(row)

        def median(name: str, key: str) -> float:
            return float(statistics.median(row[key] for row in blocks[name]))

        lines = []
        for name in sorted(blocks, key=lambda name: median(name, "step_ms")):
            ratios = ", ".join(
                f"{median(name, 'step_ms') / median(base, 'step_ms'):.3f} of {base}"
                for base in blocks
            )
            lines.append(
                f"{name}: median {median(name, 'step_ms'):.2f} min "
                f"{min(row['step_ms'] for row in blocks[name]):.2f} ms, host "
                f"{median(name, 'host_ms'):.2f} ms, optimizer "
                f"{median(name, 'optimizer_ms'):.2f} ms; {ratios}"
            )
        return "\n".join(lines)


def time_together(batch: Tensor, rows: Rows, args: argparse.Namespace) -> None:
    """All rounds over all timed variants."""
    if all(rows.has("time", name, turn) for name in args.timed for turn in range(args.rounds)):
        return
    Memory(batch.device)  # lets go of what the weighed variants left
    trainings = [Training(name, batch, args) for name in args.timed]
    for training in trainings:
        training.step()
        training.optimizer.zero_grad(set_to_none=True)
    for turn in range(args.rounds):
        for training in trainings if turn % 2 == 0 else trainings[::-1]:
            if rows.has("time", training.name, turn):
                continue
            block = time_block(training, args)
            rows.add("time", training.name, turn, block)
            if dist.get_rank() == 0:
                print(f"round {turn} {training.name}: {block['step_ms']:.2f} ms", flush=True)
    for training in trainings:
        if args.trace is not None:
            write_trace(training, args.trace)
        training.trainer.close()


def measure(device: torch.device, args: argparse.Namespace) -> None:
    """One rank: correctness first, then memory, then all rounds."""
    names = sorted({*args.weigh, *args.timed}, key=list(VARIANTS).index)
    first = dist.get_rank() == 0
    if not args.alone:
        check_variants(names, device, args)
        if first:
            print(f"{len(names)} variants agree with torch on a small model", flush=True)
    vocabulary = configuration(args.size, args.sequence).vocab_size
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (args.batch, args.sequence + 1)
    batch = torch.randint(vocabulary, shape, generator=generator).to(device)
    settings = {key: getattr(args, key) for key in ("precision", "batch", "sequence")}
    rows = Rows(facts("optimizer-variants", device, args) | settings, args.output)
    for name in args.weigh:
        if not rows.has("memory", name, 0):
            rows.add("memory", name, 0, weigh(name, batch, args))
    time_together(batch, rows, args)
    if args.compile:
        print(f"rank {dist.get_rank()} compiled {graphs()} graphs", flush=True)
    if first and args.timed:
        print(rows.summary(), flush=True)


def main() -> None:
    """Reads the command line and starts the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--sequence", type=int, help="default: 512, or 16 for tiny")
    names = list(VARIANTS)
    parser.add_argument("--weigh", nargs="*", choices=names, default=names, help="default: all")
    parser.add_argument(
        "--timed",
        nargs="*",
        choices=names,
        default=list(TIMED),
        help=f"default: {', '.join(TIMED)}",
    )
    parser.add_argument(
        "--alone", action="store_true", help="weigh rank 0 only, with collectives that move nothing"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=4, help="steps timed together")
    parser.add_argument("--trace", type=Path, help="folder for one profiler trace per variant")
    parser.add_argument("--output", type=Path, help="JSON lines are appended here")
    args = parser.parse_args()
    args.sequence = args.sequence or (16 if args.size == "tiny" else 512)
    if args.alone:
        args.timed = []
        start_alone(measure, args)
    else:
        start_ranks(measure, args)


if __name__ == "__main__":
    main()
