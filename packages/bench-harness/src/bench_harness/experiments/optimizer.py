"""Sharded optimizer state: what each rank holds at three moments, and what a step costs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness.case import Case, Row
from bench_harness.environment import resolve_device
from bench_harness.experiments import estimates, present
from bench_harness.experiments.base import Experiment, Figure, Table, option
from bench_harness.experiments.distributed import (
    NodeOptions,
    default_world_size,
    run_on_ranks,
    slowest_rank,
)
from bench_harness.experiments.shape import ShapeOptions
from bench_harness.workload import PRECISIONS, SIZES

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import nn

    from bench_harness.workload import Workload

VARIANTS = ("unsharded", "sharded-flat", "sharded-whole", "zero-redundancy")
MOMENTS = ("after initialisation", "before the optimizer step", "after the optimizer step")
#: Optimizer steps of the check; one would miss what depends on state.
_CHECKED_STEPS = 3
#: A breakdown further than this from its prediction is flagged.
_TOLERANCE = 0.02
#: Of the breakdown; each is predicted.
_PARTS = ("parameter", "gradient", "state")
_FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Options(ShapeOptions, NodeOptions):
    """Options of :class:`Optimizer`.

    Small enough for a quick run on two cores: ``size="custom"``, ``d_model=64``, ``d_ff=128``,
    ``num_layers=2``, ``num_heads=2``, ``vocab_size=256``, ``batch=2``, ``sequence=32``,
    ``rounds=2``, ``samples=4``, ``warmup=1``.
    """

    size: str = option("xl", "Model size.", choices=SIZES)
    batch: int = option(2, "Sequences per rank.")
    sequence: int = option(128, "Context length.")
    precision: str = option("fp32", "Precision.", choices=PRECISIONS)
    variants: tuple[str, ...] = option(VARIANTS, "Optimizers, compared.", choices=VARIANTS)
    world_size: int | None = option(None, "Ranks; by default 2, or as many as there are GPUs.")
    rounds: int = option(3, "Times each variant has its turn.")
    samples: int = option(5, "Measured steps per turn.")
    warmup: int = option(2, "Warm-up steps per turn.")
    device: str = option("auto", "Where to run.", choices=("auto", "cpu", "cuda"))


class Optimizer(Experiment):
    """AdamW with and without sharded state."""

    name: ClassVar[str] = "optimizer"
    summary: ClassVar[str] = "Optimizer state sharding: memory at three moments, step time"
    guide: ClassVar[str] = (
        "Weighs parameters, gradients and optimizer state at three moments against their "
        "prediction, and times the optimizer and the whole step, with and without sharding."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "optimizer --size small",
        "optimizer --variants unsharded,sharded-flat --world-size 2",
    )
    Options: ClassVar[type[Any]] = Options

    def cases(self, **options: Any) -> list[Case]:
        """One case; all variants in it."""
        chosen = Options(**options)
        device = resolve_device(chosen.device)
        world_size = chosen.world_size or default_world_size(device, chosen.nnodes)
        config: Row = {
            "size": chosen.size,
            **chosen.shape(),
            "batch": chosen.batch,
            "sequence": chosen.sequence,
            "precision": chosen.precision,
            "variants": list(chosen.variants),
            "world_size": world_size,
            "nnodes": chosen.nnodes,
            "rounds": chosen.rounds,
            "samples": chosen.samples,
            "warmup": chosen.warmup,
            "device": device,
            "label": f"optimizer {chosen.size} b{chosen.batch} s{chosen.sequence} "
            f"{chosen.precision} {world_size} ranks",
        }
        steps = chosen.rounds * (1 + 1.2 * (chosen.warmup + chosen.samples))
        exchange = estimates.all_reduce_s(config, 4 * estimates.parameters(config))
        return [
            Case(
                experiment=self.name,
                config=config,
                placement=chosen.placement(),
                timeout_s=900,
                estimate_s=estimates.RANKS_S[device]
                + estimates.build_s(config)
                + len(chosen.variants)
                * steps
                * (estimates.step_s(config, chosen.precision) + exchange),
            )
        ]

    def run(self, case: Case, progress: Callable[[str], None]) -> list[Row]:
        """Checks every variant against unsharded AdamW, then measures memory and time in turn."""
        rows = []
        for ranks in zip(*run_on_ranks(case, progress, measure_rank), strict=True):
            row = slowest_rank(list(ranks))
            for name in ("state_bytes", "allocated_bytes", "peak_bytes"):
                if row.get(name) is not None:
                    row[name] = max(rank[name] for rank in ranks)
            rows.append(row)
        return rows

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """Memory against prediction; step times; how it differs from ZeRO stage 1."""
        import pandas as pd

        from bench_harness.stats import with_summary

        frame = with_summary(rows)
        if "moment" not in frame:
            return [
                Table("Optimizer", present.columns(frame, {"size": "size", "status": "status"}))
            ]
        frame["predicted_parameter_bytes"] = frame["parameters"] * _FP32_BYTES
        frame["predicted_gradient_bytes"] = frame["predicted_parameter_bytes"].where(
            frame["moment"] != MOMENTS[0], 0
        )
        frame["predicted_bytes"] = sum(frame[f"predicted_{part}_bytes"] for part in _PARTS)
        frame[["activation_bytes", "predicted_peak_bytes"]] = _training_pass(frame)
        for name in _BYTES:
            if name in frame:
                frame[name.replace("_bytes", "_mib")] = frame[name].astype("float64") / 2**20
        frame["missed"] = _missed(frame)
        memory = frame[frame["moment"].notna()]
        timing = frame[frame["phase"].notna()].copy()
        bases = {}
        for _, line in timing[timing["variant"] == "unsharded"].iterrows():
            bases[line["case_key"], line["phase"]] = line["median_ms"]
        timing["relative"] = [
            bases.get((case, phase), float("nan")) / median
            for case, phase, median in zip(
                timing["case_key"], timing["phase"], timing["median_ms"], strict=True
            )
        ]
        return [
            Table(
                "Memory per rank at three moments",
                present.columns(
                    memory,
                    {
                        "size": "size",
                        "world_size": "world size (ranks)",
                        "variant": "variant",
                        "moment": "moment",
                        "parameter_mib": "parameters (MiB)",
                        "gradient_mib": "gradients (MiB)",
                        "state_mib": "optimizer state (MiB)",
                        "predicted_state_mib": "predicted state (MiB)",
                        "predicted_mib": "predicted sum (MiB)",
                        "missed": "prediction missed",
                        "activation_mib": "predicted activations (MiB)",
                        "allocated_mib": "allocated (MiB)",
                        "peak_mib": "peak until then (MiB)",
                        "predicted_peak_mib": "predicted peak (MiB)",
                        "status": "status",
                    },
                ),
                "Sizes of the tensors themselves, the largest rank's. On a GPU 'allocated' is the "
                "allocator's figure, and the peak, reset at each moment, holds activations and "
                "temporary buffers. Predictions: parameters and, once there, gradients are one "
                "fp32 value per parameter; AdamW keeps two, on 1/world_size of them when sharded. "
                f"A part that is off by more than {_TOLERANCE:.0%} is flagged. Activations, from "
                "shapes, are what forward keeps for backward: they are gone when the pass has "
                "ended, and raise its peak where they outweigh the gradients that replace them.",
            ),
            Table(
                "Step time with and without sharding",
                present.columns(
                    timing,
                    {
                        "size": "size",
                        "world_size": "world size (ranks)",
                        "variant": "variant",
                        "phase": "phase",
                    }
                    | present.STATISTICS
                    | {"relative": "speedup over unsharded (ratio)", "status": "status"},
                ),
                "The same data-parallel wrapper under every optimizer. The optimizer phase of the "
                "sharded ones contains the exchange of updated parameters.",
            ),
            Table(
                "Difference from ZeRO stage 1",
                pd.DataFrame(_ZERO_COMPARISON),
                "N bytes of fp32 gradients; sent per rank and step, without the ring's (n-1)/n.",
            ),
        ]

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """Memory after the step, broken down, beside the step's time."""
        from bench_harness.report.plots import COLOURS, new_figure
        from bench_harness.stats import with_summary

        done = with_summary(present.finished(rows))
        if "moment" not in done or done.empty:
            return []
        memory = done[done["moment"] == MOMENTS[2]].drop_duplicates("variant").set_index("variant")
        step = done[done["phase"] == "step"].drop_duplicates("variant").set_index("variant")
        figure, axes = new_figure(columns=2, width=10, height=3.4)
        left: Any = 0.0
        for colour, (name, label) in zip(
            COLOURS,
            (
                ("parameter_bytes", "parameters"),
                ("gradient_bytes", "gradients"),
                ("state_bytes", "optimizer state"),
            ),
            strict=False,
        ):
            width = memory[name].astype("float64") / 2**20
            axes[0, 0].barh(memory.index, width, left=left, color=colour, label=label)
            left = left + width
        axes[0, 0].set_xlabel("memory per rank after the step (MiB)")
        axes[0, 1].barh(
            step.index,
            step["median_ms"],
            xerr=[
                (step["median_ms"] - step["ci_low_ms"]).fillna(0).clip(lower=0),
                (step["ci_high_ms"] - step["median_ms"]).fillna(0).clip(lower=0),
            ],
            color=COLOURS[0],
            capsize=2,
        )
        axes[0, 1].set_xlabel("median training step (ms)")
        axes[0, 1].set_yticklabels([])
        for plot in axes[0]:
            plot.invert_yaxis()
        figure.legend(loc="outside upper center", ncols=3)
        return [Figure("optimizer", "Memory and step time by optimizer", figure)]


_BYTES = (
    "parameter_bytes",
    "gradient_bytes",
    "state_bytes",
    "predicted_state_bytes",
    "predicted_bytes",
    "activation_bytes",
    "allocated_bytes",
    "peak_bytes",
    "predicted_peak_bytes",
)

_ZERO_COMPARISON = [
    {
        "method": "unsharded data parallel",
        "gradients": "all-reduce, 2N",
        "parameters": "none",
        "sent (bytes)": "2N",
        "gradient memory (share)": "1",
    },
    {
        "method": "sharded optimizer after all-reduce",
        "gradients": "all-reduce, 2N",
        "parameters": "all-gather, N",
        "sent (bytes)": "3N",
        "gradient memory (share)": "1",
    },
    {
        "method": "ZeRO stage 1 as published",
        "gradients": "reduce-scatter, N",
        "parameters": "all-gather, N",
        "sent (bytes)": "2N",
        "gradient memory (share)": "1 until reduced",
    },
]


def measure_rank(
    rank: int, world_size: int, device: torch.device, config: Mapping[str, Any]
) -> list[Row]:
    """One rank's part: memory rows and time rows of every variant."""
    from bench_harness.experiments.steps import wrapped
    from bench_harness.timing import Samples
    from bench_harness.workload import language_model, shape_row

    for variant in config["variants"]:
        check(variant, device)
    workload = language_model(config, device, precision=config["precision"], batch_seed=rank)
    assert workload.model_config is not None
    facts = shape_row(workload.model_config)
    predicted = _predicted_state(workload.parameters(), world_size)
    gc.freeze()  # what exists by now stays: every turn collects garbage
    memory: dict[str, list[Row]] = {}
    samples = {(v, p): Samples() for v in config["variants"] for p in ("optimizer", "step")}
    order = list(config["variants"])
    for turn in range(config["rounds"]):
        start = turn % len(order)
        for variant in order[start:] + order[:start]:
            with wrapped("bucketed", {}, workload.module) as way:
                rows = _turn(variant, workload, way, config, samples)
            memory.setdefault(variant, rows)
    moments = [
        {
            "variant": variant,
            "moment": moment,
            "phase": None,
            **facts,
            **row,
            "predicted_state_bytes": predicted[variant != "unsharded"]
            if moment == MOMENTS[2]
            else 0,
        }
        for variant, rows in memory.items()
        for moment, row in zip(MOMENTS, rows, strict=True)
    ]
    times = [
        {"variant": variant, "moment": None, "phase": phase, **facts, **taken.row()}
        for (variant, phase), taken in samples.items()
    ]
    return [*moments, *times]


def make_optimizer(variant: str, module: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """AdamW, fused on CUDA, by variant.

    Raises:
        ValueError: unknown variant.
    """
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from shard_optim import ShardedOptimizer

    settings: dict[str, Any] = {"lr": 1e-4, "fused": device.type == "cuda"}
    parameters = list(module.parameters())
    if variant == "unsharded":
        return torch.optim.AdamW(parameters, **settings)
    if variant == "zero-redundancy":
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, **settings)
    if variant in ("sharded-flat", "sharded-whole"):
        partition: Any = variant.removeprefix("sharded-")
        return ShardedOptimizer(parameters, torch.optim.AdamW, partition=partition, **settings)
    raise ValueError(f"variant must be one of {', '.join(VARIANTS)}; received {variant!r}")


def check(variant: str, device: torch.device) -> None:
    """Takes a few steps on a small model and compares every parameter with unsharded AdamW.

    Raises:
        ArithmeticError: a parameter differs by more than 1e-6; the variant is not timed then.
    """
    import torch

    def after_steps(which: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(17, 33), torch.nn.Linear(33, 5)).to(device)
        inputs = torch.randn(8, 17, device=device)
        optimizer = make_optimizer(which, module, device)
        for _ in range(_CHECKED_STEPS):
            optimizer.zero_grad()
            module(inputs).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in module.parameters()]

    for found, expected in zip(after_steps(variant), after_steps("unsharded"), strict=True):
        error = float((found - expected).abs().max())
        if not error <= 1e-6:
            raise ArithmeticError(
                f"{variant}: parameters after {_CHECKED_STEPS} steps must equal unsharded AdamW's "
                f"within 1e-6; received a difference of {error:.2e}"
            )


def _turn(
    variant: str,
    workload: Workload,
    way: Any,
    config: Mapping[str, Any],
    samples: dict[tuple[str, str], Any],
) -> list[Row]:
    """One turn of a variant: the three memory moments, then the timed steps."""
    import torch.distributed as dist

    from bench_harness.timing import record_sample

    device = workload.device
    gc.collect()
    _reset_peak(device)
    optimizer = make_optimizer(variant, workload.module, device)
    rows = [_memory(workload.module, optimizer, device)]
    workload.backward(workload.loss(way.module))
    way.finish()
    rows.append(_memory(workload.module, optimizer, device))
    optimizer.step()
    rows.append(_memory(workload.module, optimizer, device))
    for index in range(config["warmup"] + config["samples"]):
        taken = {p: type(samples[variant, p])() for p in ("optimizer", "step")}
        dist.barrier()
        with record_sample(taken["step"], device):
            for parameter in workload.module.parameters():
                parameter.grad = None
            workload.backward(workload.loss(way.module))
            way.finish()
            optimizer.step()
        dist.barrier()
        with record_sample(taken["optimizer"], device):
            optimizer.step()
        if index >= config["warmup"]:
            for phase, found in taken.items():
                samples[variant, phase].wall_ms += found.wall_ms
                samples[variant, phase].device_ms += found.device_ms
    return rows


def _memory(module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> Row:
    """Bytes of parameters, gradients and optimizer state, and what the allocator says."""
    import torch

    parameters = list(module.parameters())
    # ZeroRedundancyOptimizer keeps the state of its part in an optimizer of its own.
    states = getattr(optimizer, "optim", optimizer).state.values()
    row: Row = {
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "gradient_bytes": sum(
            p.grad.numel() * p.grad.element_size() for p in parameters if p.grad is not None
        ),
        "state_bytes": sum(
            t.numel() * t.element_size()
            for state in states
            for t in state.values()
            if isinstance(t, torch.Tensor)
        ),
        "allocated_bytes": None,
        "peak_bytes": None,
    }
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        row["allocated_bytes"] = torch.cuda.memory_allocated(device)
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    return row


def _reset_peak(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _predicted_state(numel: int, world_size: int) -> dict[bool, int]:
    """Predicted bytes of AdamW's state on one rank, by whether it is sharded."""
    from shard_optim.accounting import rank_memory

    return {
        sharded: round(
            rank_memory(numel, world_size=world_size, stage=1 if sharded else 0).optimizer_state
        )
        for sharded in (False, True)
    }


def _training_pass(frame: pd.DataFrame) -> pd.DataFrame:
    """Predicted activations of forward and backward, and their peak; empty at other moments."""
    import pandas as pd

    from bench_harness.activations import peaks, saved_for_backward

    names = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads")
    lines: list[tuple[float, float]] = []
    for _, row in frame.iterrows():
        if row["moment"] != MOMENTS[1]:
            lines.append((float("nan"), float("nan")))
            continue
        shape = SimpleNamespace(**{name: int(row[name]) for name in names})
        size = int(row["batch"]), int(row["sequence"])
        given = {"precision": row["precision"], "attention": "sdpa", "device": row["device"]}
        by_phase = peaks(shape, *size, training=True, **given)
        lines.append(
            (
                sum(saved_for_backward(shape, *size, **given).values()),
                max(by_phase["forward"], by_phase["backward"]),
            )
        )
    return pd.DataFrame(lines, index=frame.index)


def _missed(frame: pd.DataFrame) -> pd.Series[Any]:
    """Whether a part of the breakdown is off; empty where nothing was predicted."""
    import pandas as pd

    off = pd.Series(False, index=frame.index)
    for part in _PARTS:
        predicted = frame[f"predicted_{part}_bytes"]
        off |= (frame[f"{part}_bytes"] - predicted).abs() > _TOLERANCE * predicted
    return off.where(frame["predicted_state_bytes"].notna())
