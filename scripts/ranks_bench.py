"""What the benchmarks of data parallelism share: ranks, model, batch, clock, facts of a row."""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.distributed.fake_pg import FakeStore

from basics_model import SIZES, ModelConfig, TransformerLM, model_config

Work = Callable[[torch.device, argparse.Namespace], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The settings that both benchmarks have."""
    parser.add_argument("--size", choices=["tiny", *SIZES], default="xl")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile every Transformer block, so that the device decides and not the host",
    )
    parser.add_argument("--matmul-precision", choices=["highest", "high"], default="highest")
    parser.add_argument("--commit", help="recorded; default: git rev-parse HEAD")


def start_ranks(work: Work, args: argparse.Namespace) -> None:
    """Runs ``work(device, args)`` on every rank of a new group."""
    # Multicast over NVLink stays off in every measurement; the rows record the settings.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank,
            args=(f"{folder}/store", work, args),
            nprocs=args.world_size,
            start_method="spawn",
        )


def start_alone(work: Work, args: argparse.Namespace) -> None:
    """Runs ``work(device, args)`` as rank 0 of a group whose collectives move nothing.

    One device holds what it would hold among any number of ranks; only numbers are wrong.
    """
    device = _prepare(0, args)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    try:
        work(device, args)
    finally:
        dist.destroy_process_group()


def _prepare(rank: int, args: argparse.Namespace) -> torch.device:
    """A rank's device, chosen, with settings that hold for the whole process."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # rather than run eagerly unnoticed
    if args.device == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision(args.matmul_precision)
    return device


def _rank(rank: int, store: str, work: Work, args: argparse.Namespace) -> None:
    device = _prepare(rank, args)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(store, args.world_size),
        rank=rank,
        world_size=args.world_size,
        timeout=timedelta(seconds=120),
        device_id=device if on_gpu else None,
    )
    try:
        work(device, args)
    finally:
        dist.destroy_process_group()


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


def compiler(args: argparse.Namespace) -> str | None:
    """What compiles the blocks; without a GPU nothing is worth generating code for."""
    if not args.compile:
        return None
    return "inductor" if args.device == "cuda" else "aot_eager"


def new_model(
    size: str, context_length: int, device: torch.device, backend: str | None
) -> TransformerLM:
    """The same model on every rank; ``backend`` compiles each block in place, None does not.

    All blocks, of all models of one size, share one graph per kind of batch.
    """
    torch.manual_seed(0)
    model = TransformerLM(configuration(size, context_length), device=device)
    if backend is not None:
        for block in model.blocks:
            block.compile(backend=backend, dynamic=False)
    return model


def small_model(device: torch.device, args: argparse.Namespace) -> TransformerLM:
    """For checks of correctness: hooks meet the same kind of graph, but nothing is generated."""
    return new_model("tiny", 16, device, "aot_eager" if args.compile else None)


def graphs() -> int:
    """How many graphs this process has compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def synchronize(device: torch.device) -> None:
    """Waits for the device, if it runs asynchronously."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection inside: it would hit some blocks and not others."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_steps(step: Callable[[], None], count: int, device: torch.device) -> dict[str, float]:
    """A block of steps, timed without synchronising inside.

    Returns:
        The slower rank's milliseconds per step until the device was done (``step_ms``) and until
        the host had launched everything (``host_ms``), and what must not happen in between: how
        often a rank asked the device for memory (``device_allocations``) and compiled a graph
        (``compilations``).
    """
    memory, compiled = _device_allocations(device), graphs()
    dist.barrier()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    launched = time.perf_counter() - begin
    synchronize(device)
    elapsed = time.perf_counter() - begin
    stalls = [_device_allocations(device) - memory, graphs() - compiled]
    found = [elapsed / count, launched / count, *stalls]
    slowest = torch.tensor(found, device=device, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {
        "step_ms": slowest[0].item() * 1e3,
        "host_ms": slowest[1].item() * 1e3,
        "device_allocations": int(slowest[2].item()),
        "compilations": int(slowest[3].item()),
    }


def _device_allocations(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device)["num_device_alloc"])


def facts(experiment: str, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """What a reader must know to compare a row with another."""
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
        "experiment": experiment,
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
        "compiled_blocks": compiler(args),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "steps_per_block": args.block,
    }
