"""One rank's part of a training-step case: proof, memory, blocks of steps in turns, a profile.

Every round builds its variant anew from the same initial weights, warms it up, and lets go of it
afterwards: variants meet the same state of the machine, only one is in memory at a time, and each
may change its model for good, as sharding does. The first round of a variant also weighs it and
keeps the losses of its first steps, which all variants must share.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from basics_model.captured_step import CaptureError
from bench_harness.core import CaseSkipped, Config, Progress, Row
from bench_harness.distributed import on_rank_0, slowest_rank
from bench_harness.environment import gpu_now
from bench_harness.roofline import (
    ceilings,
    step_bytes,
    step_work,
    sustained_rate,
    training_flops,
)
from bench_harness.timing import Samples, in_turns, record_sample, synchronize
from bench_harness.traces import kineto
from bench_harness.traces.step import of_rank, over_ranks
from bench_harness.traces.trace import phase
from bench_harness.training import moments, proof
from bench_harness.training import settings as of
from bench_harness.training.build import Training, training
from bench_harness.training.constructors import Call, resolved
from bench_harness.workload import (
    compute_dtype,
    device_of,
    precision_context,
    ran_in_model,
    shape_row,
)

STEP = "step"
#: Largest difference of the first losses between variants, relative to them, by precision.
LOSS_TOLERANCE = {"fp32": 1e-3, "tf32": 5e-3, "bf16": 2e-2}
#: How long a rank waits for the others, and one that has raised, for which they may be waiting.
_PATIENCE, _PATIENCE_OF_FAILED = timedelta(minutes=15), timedelta(minutes=2)
#: Shares of the gradients whose all-reduce is timed, for the prediction beside a bucket sweep.
_SWEEP_SHARES = (1000, 100, 10)


def measure_rank(
    rank: int,
    world_size: int,
    device: torch.device,
    config: Config,
    folder: str,
    progress: Progress,
) -> list[Row]:
    """One row per variant, with this rank's samples.

    A row that ends with ``ended`` was not timed on: it says with which status and why.
    """
    variants = [of.stored(table) for table in config["variants"]]
    rows: list[Row] = [
        {"variant": label, "settings": variant.table(), "round": [], "samples_ms": []}
        | {"resolved": {each.name: resolved(each) for each in (variant.wrapper, variant.optimizer)}}
        | {"host_ms": [], "optimizer_ms": [], "device_allocations": 0, "compilations": 0}
        for label, variant in zip(of.labels(variants), variants, strict=True)
    ]
    _prove(variants, rows, config, device, progress)
    link = _all_reduces(variants[0], config, device) if config["all_reduces"] else {}
    for number, pairs in in_turns(
        lambda: zip(variants, rows, strict=True),
        config,
        lambda: (row["samples_ms"] for row in rows),
        least=config["rounds"],
        agreed=on_rank_0,
    ):
        for variant, row in pairs:
            if "ended" not in row:
                progress(f"round {number + 1}: {row['variant']}")
                _one_round(variant, row, number, config, device, Path(folder))
        if number == 0:
            _compare_losses(variants, rows)
    rows[0] |= link
    rates: dict[str, Row] = {}
    for variant, row in zip(variants, rows, strict=True):
        if "ended" not in row:
            dtype = compute_dtype(variant.precision)
            if variant.precision not in rates:
                with precision_context(variant.precision, device):
                    rates[variant.precision] = ceilings(device, dtype) | {
                        "sustained_tflop_s": sustained_rate(device, dtype)
                    }
            row |= rates[variant.precision]
            if "d_model" in row:  # of a user's model nothing is known
                row["ran"] = ran_in_model(variant.attention, {**config, **row}, dtype, device)
    return rows


def merged(ranks: list[Row]) -> Row:
    """One variant's row from those of all ranks: times of the slowest, memory of the fullest."""
    row = slowest_rank(ranks)
    if not row["samples_ms"]:  # skipped, or it did not agree
        return {name: value for name, value in row.items() if value not in ([], None)}
    for name in ("peak_gib", "device_allocations", "compilations", "memory", "all_reduce"):
        if name in row:
            row[name] = _largest([rank[name] for rank in ranks])
    return row | (over_ranks(ranks) if "communication_ms" in row else {})


def _largest(values: Sequence[Any]) -> Any:
    """The largest of each number in values of one shape; texts and gaps are all alike."""
    first = values[0]
    if isinstance(first, dict):
        return {name: _largest([each[name] for each in values]) for name in first}
    if isinstance(first, list):
        return [_largest(each) for each in zip(*values, strict=True)]
    return max(values) if isinstance(first, int | float) else first


def weigh_alone(config: Config) -> list[Row]:
    """Memory of rank 0 of any number of ranks, in a group whose collectives move nothing.

    One device holds what it would hold among any number of ranks; only the numbers in it are
    wrong, so nothing is proven or timed.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = device_of(config["device"])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=config["world_size"])
    try:
        rows: list[Row] = []
        variants = [of.stored(table) for table in config["variants"]]
        for label, variant in zip(of.labels(variants), variants, strict=True):
            before = moments.held_before(device)
            row: Row = {"variant": label, "settings": variant.table(), "held_before_bytes": before}
            rows.append(row | _weighed(variant, before, config, device))
        return rows
    finally:
        dist.destroy_process_group()


def _weighed(variant: of.Settings, before: int, config: Config, device: torch.device) -> Row:
    """A function of its own, so that nothing holds a training when the next variant is weighed."""
    with training(variant, config, device) as steps:
        row = facts(steps)
        row["memory"], _ = moments.weigh(steps, variant, before, first_step=config["first_step"])
    return row


def _prove(
    variants: list[of.Settings],
    rows: list[Row],
    config: Config,
    device: torch.device,
    progress: Progress,
) -> None:
    """Marks the variants that cannot run here, or do not train like the definition."""
    # Ranks tell each other by their store: after one has raised, others may be in a collective.
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    definitions: dict[tuple[Call, int], proof.Trained] = {}
    for variant, row in zip(variants, rows, strict=True):
        progress(f"proof: {row['variant']}")
        plain, steps = variant.without_communication().optimizer, proof.steps_of(variant)
        if (plain, steps) not in definitions:
            definitions[plain, steps] = proof.definition(plain, config, device, steps=steps)
        own: Row | None = None
        try:
            expected = definitions[plain, steps]
            trouble, errors = proof.disagreement(variant, expected, config, device)
            row |= errors
            own = None if trouble is None else {"status": "error", "error": trouble}
        except CaseSkipped as reason:
            own = {"status": "skipped", "error": str(reason)}
        except CaptureError:
            raise  # nothing else can run in this process
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported; the others still run
            own = {"status": "error", "error": f"{type(error).__name__}: {error}"}
        keys = [f"{row['variant']}/{rank}" for rank in range(dist.get_world_size())]
        store.set(keys[dist.get_rank()], json.dumps(own))
        try:
            store.wait(keys, _PATIENCE if own is None else _PATIENCE_OF_FAILED)
        except RuntimeError as error:
            raise RuntimeError(f"{row['variant']}: {(own or {}).get('error', error)}") from None
        if troubled := [ended for key in keys if (ended := json.loads(store.get(key)))]:
            row["ended"] = troubled[0]


def _all_reduces(variant: of.Settings, config: Config, device: torch.device) -> Row:
    """All-reduces alone, from which the cost of a bucket sweep is predicted."""
    with training(variant, config, device) as steps:
        largest = max(p.nbytes for p in steps.workload.module.parameters())
        sizes = [max(4096, 4 * steps.numel // share) for share in _SWEEP_SHARES]
    link: Row = {"size_bytes": sizes, "samples_ms": []}
    for size in sizes:
        vector, timed = torch.zeros(size // 4, device=device), Samples()
        for _ in range(3 + 10):
            dist.barrier()
            with record_sample(timed, device):
                dist.all_reduce(vector)
        link["samples_ms"].append(timed.wall_ms[3:])  # after the warm-up
    return {"all_reduce": link, "largest_parameter_bytes": largest}


def _one_round(
    variant: of.Settings, row: Row, number: int, config: Config, device: torch.device, folder: Path
) -> None:
    """One round of a variant: warm-up, blocks of steps, the optimizer alone; adds to its row."""
    before = moments.held_before(device) if number == 0 else 0
    with training(variant, config, device) as steps:
        if number == 0:
            row |= facts(steps) | work(steps, variant)
            row["held_before_bytes"] = before
            row["memory"], row["losses"] = moments.weigh(
                steps, variant, before, first_step=config["first_step"]
            )
        warmup = config["warmup"]
        if variant.cuda_graph:
            warmup = max(warmup, variant.steps_before_recording)
        for done in range(1, warmup + 1):
            loss = steps.step()
            if number == 0 and done == config["warmup"]:
                row["losses"].append(proof.mean_over_ranks(loss))
        with _collector_paused():
            synchronize(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            if variant.cuda_graph:
                steps.capture()
            for _ in range(config["blocks"]):
                row["round"].append(number)
                _block(steps.step, config["calls"], device, row)
            if device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(device) / 2**30
                row["peak_gib"] = max(peak, row.get("peak_gib", 0.0))
            _optimizer_alone(steps, row)
        if number == config["rounds"] - 1:
            row |= steps.stats()
            if config["profiled"]:
                name = row["variant"].replace("/", "-").replace(" ", "-")
                path = folder / f"step-{name}-rank{dist.get_rank()}.json"
                row |= _profile(steps, path)


def facts(steps: Training) -> Row:
    """Shape, parameters and operations of the model and its batch."""
    shape = steps.workload.model_config
    known: Row = {} if shape is None else dict(shape_row(shape))
    if shape is not None:
        batch, sequence = steps.workload.args[0].shape
        known["flops"] = training_flops(shape, batch, sequence)
        parts = step_bytes(steps.numel)
        known["least_bytes"] = parts["forward"] + parts["backward"]
    explain = getattr(steps.module, "explain", None)
    return {
        **known,
        "parameters": steps.numel,
        "gradient_bytes": steps.gradient_bytes,
        "tokens": steps.workload.args[0].numel() if shape is not None else None,
        "trainable": sum(p.requires_grad for p in steps.workload.module.parameters()),
        "explained": explain() if callable(explain) else None,
    }


def work(steps: Training, variant: of.Settings) -> Row:
    """What a step of the language model must do on one rank: operations, the optimizer's bytes.

    ``model_flops`` is the work that makes progress, without recomputation and masked scores.
    """
    shape = steps.workload.model_config
    if shape is None:
        return {}
    batch, sequence = steps.workload.args[0].shape
    shards = dist.get_world_size() if variant.zero_stage else 1
    return {
        "model_flops": training_flops(shape, batch, sequence, causal=True),
        "work": step_work(
            shape,
            batch,
            sequence,
            recomputed=variant.checkpoint_blocks > 0,
            keep_attention=variant.keep_attention,
        )
        # It reads and writes parameters and state, and reads gradients.
        | {"optimizer": (12 * steps.numel + 2 * steps.state_bytes) // shards},
    }


def _block(step: Callable[[], object], calls: int, device: torch.device, row: Row) -> None:
    """Adds one sample: milliseconds per step of a block, not synchronised inside.

    ``samples_ms`` is until the device was done, ``host_ms`` until the host had launched
    everything: where the two are close, the step is limited by the host. What must not happen
    meanwhile is counted: requests for device memory, and compilations.
    """
    allocations, graphs = _device_allocations(device), _graphs()
    dist.barrier()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    launched = time.perf_counter() - begin
    synchronize(device)
    elapsed = time.perf_counter() - begin
    row["samples_ms"].append(round(1e3 * elapsed / calls, 6))
    row["host_ms"].append(round(1e3 * launched / calls, 6))
    for name, value in gpu_now(device).items():
        row.setdefault(f"samples_{name}", []).append(value)
    row["device_allocations"] += _device_allocations(device) - allocations
    row["compilations"] += _graphs() - graphs


def _optimizer_alone(steps: Training, row: Row) -> None:
    """Adds the milliseconds from a finished backward to updated parameters."""
    device = steps.workload.device
    steps.backward(steps.forward())
    dist.barrier()
    synchronize(device)
    begin = time.perf_counter()
    steps.update()
    steps.wait()
    synchronize(device)
    row["optimizer_ms"].append(round(1e3 * (time.perf_counter() - begin), 6))


def _compare_losses(variants: list[of.Settings], rows: list[Row]) -> None:
    """Excludes variants whose first losses are not finite, or not those of the first one with their
    optimizer.

    At full size and in their own precision; the small model has proven them before.
    """
    first: dict[Call, tuple[of.Settings, Row]] = {}
    for variant, row in zip(variants, rows, strict=True):
        if "ended" in row:
            continue
        other, known, must = variant, row, "be finite"
        if all(map(math.isfinite, row["losses"])):
            if (variant.communicates or dist.get_world_size() == 1) and not variant.rounds:
                optimizer = variant.without_communication().optimizer
                other, known = first.setdefault(optimizer, (variant, row))
            limit = max(LOSS_TOLERANCE[each.precision] for each in (variant, other))
            if proof.relative_error(row["losses"], known["losses"]) <= limit:
                continue
            must = f"be those of {known['variant']}, {known['losses']}, within {limit:g}"
        error = f"the first losses must {must}, but got {row.pop('losses')}"
        row["ended"] = {"status": "error", "error": error}


def _profile(steps: Training, path: Path) -> Row:
    """Communication of one profiled step by interval arithmetic."""
    device = steps.workload.device
    with kineto.recording(path, device):
        dist.barrier()
        with phase(STEP, device):
            steps.step()
        # What is under way holds a part of the profiler. If it outlived the recording, freeing it
        # could end the process (seen with gloo and torch 2.15).
        steps.wait()
    trace = kineto.load(path)
    window = trace.phases(STEP)[0]
    if dist.get_rank() == 0:
        kineto.trimmed(path, path.with_suffix(".trimmed.json.gz"), [window])
    path.unlink()
    spans = "GPU kernels" if trace.on_device else "host spans (gloo on a CPU)"
    return of_rank(trace, window, spans)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses Python's garbage collector, which would slow some blocks of steps and not others."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _device_allocations(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device)["num_device_alloc"])


def _graphs() -> int:
    """How many graphs this process has compiled so far."""
    import torch._dynamo.utils

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
