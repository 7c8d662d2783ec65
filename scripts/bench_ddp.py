"""Times data-parallel wrappers against torch's own, interleaved in one run.

    python scripts/bench_ddp.py --output docs/results/ddp/h200x2_xl      # two GPUs, four minutes
    python scripts/bench_ddp.py --size tiny --device cpu --output /tmp/x  # smoke test, gloo

Two ranks share one model and one fused AdamW among all variants: each variant wraps the model,
warms up, runs a block of steps timed without synchronising inside, and unwraps. Rounds go
through cells, and through the variants forwards and backwards in turn, so drift hits all alike.
Before anything is timed, every variant must produce torch's gradients on a small model.

Every block is one line of ``blocks.jsonl`` in the output folder. A run that is repeated, or was
stopped by ``--seconds``, measures only what is missing. ``rows.jsonl`` holds one line per cell and
variant, medians over its blocks. ``--traces`` adds one profiled step of each variant named, which
``scripts/draw_ddp_traces.py`` draws.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ddp_variants import FULL, NEED_CUDA, SHORT, VARIANTS, Build, Groups
from ranks_bench import (
    add_arguments,
    collector_paused,
    compiler,
    facts,
    graphs,
    new_model,
    small_model,
    start_ranks,
    synchronize,
    time_steps,
)
from torch import Tensor, nn

from ddp_lite import DataParallelBase

# precision, batch per rank, sequence: the most telling first, for runs that are cut short.
CELLS = ("bf16,4,512", "bf16,2,512", "fp32,2,512", "fp32,2,128")
BRIEF_ROUNDS = 2
TRACED = (
    "no-communication",
    "naive",
    "flat",
    "overlap",
    "default",
    "default-peer-copy",
    "torch-100-views",
)
# Largest relative error of a gradient tensor against torch's: float32 sums may be ordered
# differently, bfloat16 keeps 8 bits.
TOLERANCE = {"default": 1e-5, "bf16-wire": 1e-2}


@contextmanager
def wrapped_by(build: Build, module: nn.Module, groups: Groups) -> Iterator[nn.Module]:
    """Wraps for the length of a block and leaves no hook and no gradient behind."""
    # The wrapper of the block before is out of reach only now that its function has returned.
    # What is left stays for good: freezing it makes the next collection quick.
    gc.collect()
    gc.freeze()
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


def gradients_of(
    build: Build, groups: Groups, device: torch.device, args: argparse.Namespace
) -> list[Tensor]:
    """Averaged gradients of a small model after two steps; the batch differs between ranks."""
    model = small_model(device, args)
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


def variants_that_agree(
    names: list[str], groups: Groups, device: torch.device, args: argparse.Namespace
) -> list[str]:
    """The variants that produce the gradients of torch's wrapper; says why others do not."""
    expected = gradients_of(VARIANTS["torch-25"], groups, device, args)
    agreeing = []
    for name in names:
        trouble = None
        if name != "no-communication":
            try:
                found = gradients_of(VARIANTS[name], groups, device, args)
                trouble = disagreement(name, found, expected)
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
    limit = TOLERANCE["bf16-wire" if "bf16-wire" in name else "default"]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]
    worst = max(errors)
    return None if worst <= limit else f"relative error {worst:.2e}, allowed {limit:.0e}"


class Workload:
    """One model and optimizer on this rank, and the batches of each cell.

    Args:
        device: where everything lives.
        args: the cells that will be asked for, of which the longest sequence sizes the model, and
            what the model is.
    """

    def __init__(self, device: torch.device, args: argparse.Namespace) -> None:
        longest = max(int(cell.split(",")[2]) for cell in args.cells)
        self.device = device
        self.model = new_model(args.size, longest, device, compiler(args))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step_of(self, cell: str, wrapped: nn.Module) -> Callable[[], None]:
        """A training step of the wrapped model in one cell."""
        precision, batch, sequence = cell.split(",")
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (int(batch), int(sequence) + 1)
        tokens = torch.randint(self.model.config.vocab_size, shape, generator=generator)
        tokens = tokens.to(self.device)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()

        def step() -> None:
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16"):
                loss = F.cross_entropy(wrapped(inputs).flatten(0, 1), targets)
            loss.backward()
            finish(wrapped)
            self.optimizer.step()

        return step


def time_block(
    variant: str, cell: str, workload: Workload, groups: Groups, args: argparse.Namespace
) -> dict[str, Any]:
    """One block of one variant: milliseconds per step (the slower rank's) and peak memory."""
    device = workload.device
    with wrapped_by(VARIANTS[variant], workload.model, groups) as wrapped, collector_paused():
        step = workload.step_of(cell, wrapped)
        step()
        first = wrapped.stats() if isinstance(wrapped, DataParallelBase) else None
        for _ in range(args.warmup - 1):
            step()
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        result: dict[str, Any] = time_steps(step, args.block, device)
        if device.type == "cuda":
            result["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        if first is not None:
            last = wrapped.stats()
            result |= {
                "first_step_started_in_backward": first.started_in_backward,
                "reductions": last.reductions,
                "bytes": last.bytes,
                "exposed_wait_ms": last.exposed_wait_ms,
                "explain": wrapped.explain(),
            }
    return result


def write_trace(
    variant: str, cell: str, workload: Workload, groups: Groups, folder: Path, steps: int
) -> None:
    """Profiles a few steps after one another; rank 0 writes what its device did.

    Host operators are not recorded: that slows the host down, and with it the step.
    """
    device = workload.device
    on_gpu = device.type == "cuda"
    with wrapped_by(VARIANTS[variant], workload.model, groups) as wrapped, collector_paused():
        step = workload.step_of(cell, wrapped)
        for _ in range(3):
            step()
        synchronize(device)
        dist.barrier()
        kinds = {"use_cpu": not on_gpu, "use_device": "cuda" if on_gpu else None}
        with torch.autograd.profiler.profile(use_kineto=True, **kinds) as profiler:
            for _ in range(steps):
                step()
            synchronize(device)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            raw = Path(temporary) / "trace.json"
            profiler.export_chrome_trace(str(raw))
            with gzip.open(folder / f"{variant}.json.gz", "wb", compresslevel=1) as file:
                file.write(raw.read_bytes())


def blocks_in(path: Path) -> list[dict[str, Any]]:
    """The blocks measured so far."""
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def rows_of(blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per cell and variant: medians over its blocks, and comparisons inside its cell.

    ``ratio_to_best_torch`` divides by the least median of torch's variants, ``exposed_ms``
    subtracts the median without communication, ``exposed_ratio`` divides that by the same of
    torch's best. The same names with ``fastest_`` compare fastest blocks, on which a busy host
    weighs less.
    """
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for block in blocks:
        found.setdefault((block["cell"], block["variant"]), []).append(block)
    rows = []
    for of_one in found.values():
        times = [block["step_ms"] for block in of_one]
        medians = {
            key: statistics.median(block[key] for block in of_one)
            for key in ("host_ms", "exposed_wait_ms")
            if key in of_one[0]
        }
        row = {key: value for key, value in of_one[-1].items() if key not in ("step_ms", "round")}
        row |= medians | {
            "median_ms": statistics.median(times),
            "min_ms": min(times),
            "block_ms": times,
            "peak_gib": max(block.get("peak_gib", 0.0) for block in of_one),
        }
        rows.append(row)
    for cell in {row["cell"]: None for row in rows}:
        compare([row for row in rows if row["cell"] == cell])
    return rows


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Adds to the rows of one cell what relates them to each other."""
    for prefix, key in (("", "median_ms"), ("fastest_", "min_ms")):
        times = {row["variant"]: row[key] for row in rows}
        alone = times.get("no-communication")
        theirs = min((ms for name, ms in times.items() if name.startswith("torch-")), default=None)
        for row in rows:
            if theirs is not None:
                row[f"{prefix}ratio_to_best_torch"] = row[key] / theirs
            if alone is not None:
                row[f"{prefix}exposed_ms"] = row[key] - alone
            if alone is not None and theirs is not None and theirs > alone:
                row[f"{prefix}exposed_ratio"] = (row[key] - alone) / (theirs - alone)


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for reading, cell by cell, fastest first."""
    ratios = ("ratio_to_best_torch", "fastest_ratio_to_best_torch", "fastest_exposed_ms")
    lines = []
    for cell in {row["cell"]: None for row in rows}:
        lines.append(f"{cell}: median, fastest block, host (ms); ratios to torch's best of both")
        lines.append("  times; exposed (ms) and its ratio by fastest blocks; peak (GiB)")
        own = sorted((r for r in rows if r["cell"] == cell), key=lambda row: row["median_ms"])
        for row in own:
            numbers = [f"{row[key]:8.2f}" for key in ("median_ms", "min_ms", "host_ms")]
            others = (*ratios, "fastest_exposed_ratio", "peak_gib")
            numbers += [f"{row[key]:8.3f}" if key in row else " " * 8 for key in others]
            lines.append(f"  {row['variant']:28}" + " ".join(numbers))
    return "\n".join(lines)


class Recorder:
    """Rank 0 writes; all ranks ask it what is left to do, and so agree.

    Args:
        folder: of the run.
        facts: added to every block.
        seconds: after which nothing new is begun.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], seconds: float) -> None:
        self._folder = folder
        self._facts = facts
        self._deadline = time.monotonic() + seconds
        self._blocks = blocks_in(folder / "blocks.jsonl")
        self._done = {(b["cell"], b["variant"], b["round"]) for b in self._blocks}

    def wants(self, cell: str, variant: str, turn: int) -> bool:
        """Whether this block is still to be measured. Collective."""
        answer = [
            (cell, variant, turn) not in self._done and time.monotonic() < self._deadline
            if dist.get_rank() == 0
            else None
        ]
        dist.broadcast_object_list(answer, 0)
        return bool(answer[0])

    def add(self, cell: str, variant: str, turn: int, result: dict[str, Any]) -> None:
        """Keeps one block."""
        if dist.get_rank() != 0:
            return
        block = {"cell": cell, "variant": variant, "round": turn} | result | self._facts
        self._blocks.append(block)
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "blocks.jsonl").open("a") as file:
            file.write(json.dumps(block) + "\n")
        print(
            f"{cell} round {turn} {variant}: {result['step_ms']:.2f} ms, host "
            f"{result['host_ms']:.2f} ms",
            flush=True,
        )

    def summarize(self) -> None:
        """Writes ``rows.jsonl`` anew from all blocks and prints it."""
        if dist.get_rank() == 0 and self._blocks:
            rows = rows_of(self._blocks)
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (self._folder / "rows.jsonl").write_text(lines)
            print(table_of(rows), flush=True)


def measure(device: torch.device, args: argparse.Namespace) -> None:
    """One rank: correctness first, then every cell, then traces."""
    begin = time.monotonic()
    groups = Groups()
    plan = {cell: variants_for(cell, args) for cell in args.cells}
    wanted = list(dict.fromkeys(name for names in plan.values() for name in names))
    agreeing = variants_that_agree([*wanted, *args.traces], groups, device, args)
    workload = Workload(device, args)
    if dist.get_rank() == 0:
        print(
            f"{len(agreeing)} variants agree with torch on a small model; ready after "
            f"{time.monotonic() - begin:.0f} s",
            flush=True,
        )
    recorder = Recorder(args.output, facts("ddp-variants", device, args), args.seconds)
    for turn in range(args.rounds):
        for cell, names in plan.items():
            for name in names if turn % 2 == 0 else names[::-1]:
                enough = turn >= BRIEF_ROUNDS and name in args.briefly
                if name in agreeing and not enough and recorder.wants(cell, name, turn):
                    result = time_block(name, cell, workload, groups, args)
                    recorder.add(cell, name, turn, result)
    recorder.summarize()
    if args.compile:
        print(f"rank {dist.get_rank()} compiled {graphs()} graphs", flush=True)
    for name in args.traces:
        if name in agreeing:
            folder = args.output / "traces"
            write_trace(name, args.cells[0], workload, groups, folder, args.traced_steps)


def variants_for(cell: str, args: argparse.Namespace) -> list[str]:
    """What to measure in a cell."""
    chosen = args.variants or (FULL if cell == args.cells[0] else SHORT)
    return possible(chosen, args)


def possible(names: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Those of the variants that this run may use."""
    impossible = (*args.without, *(NEED_CUDA if args.device == "cpu" else ()))
    return [name for name in names if name not in impossible]


def main() -> None:
    """Reads the command line and starts the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder of the run")
    add_arguments(parser)
    parser.add_argument(
        "--cells",
        nargs="+",
        help="precision,batch,sequence (bf16 is autocast; batch per rank); default: "
        + " ".join(CELLS),
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=list(VARIANTS),
        help="default: a full comparison in the first cell, a short one in the others",
    )
    parser.add_argument(
        "--briefly",
        nargs="+",
        choices=list(VARIANTS),
        default=[],
        help=f"of the variants, those that {BRIEF_ROUNDS} rounds are enough for",
    )
    parser.add_argument("--without", nargs="+", choices=list(VARIANTS), default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--block", type=int, default=6, help="steps timed together")
    parser.add_argument("--warmup", type=int, default=2, help="steps before each block, at least 2")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no block after so many")
    parser.add_argument(
        "--traces", nargs="*", choices=list(VARIANTS), help=f"no value: {' '.join(TRACED)}"
    )
    parser.add_argument("--traced-steps", type=int, default=2)
    args = parser.parse_args()
    args.cells = args.cells or (["fp32,2,16", "bf16,2,16"] if args.size == "tiny" else list(CELLS))
    args.traces = [] if args.traces is None else possible(args.traces or TRACED, args)
    start_ranks(measure, args)


if __name__ == "__main__":
    main()
