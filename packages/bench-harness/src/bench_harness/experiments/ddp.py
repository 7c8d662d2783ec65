"""Data-parallel training steps: what each way of averaging gradients costs, and why.

Communication means the same for every variant: in one profiled step per rank, the union of the
collectives' own spans; exposed is the part of it with nothing computed meanwhile. Beside it stands
the plainest measure, the step minus a step without communication in the same case.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness.case import Case, Row
from bench_harness.environment import resolve_device
from bench_harness.experiments import estimates, present
from bench_harness.experiments.base import Experiment, Figure, Table, option
from bench_harness.experiments.distributed import (
    NodeOptions,
    default_world_size,
    require_gpus,
    run_on_ranks,
    slowest_of,
    slowest_rank,
)
from bench_harness.experiments.shape import ShapeOptions
from bench_harness.workload import OPTIMIZERS, PRECISIONS, SIZES

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from bench_harness.timing import Samples
    from bench_harness.workload import Workload

VARIANTS = (
    *("naive", "flat", "overlap", "bucketed", "bucketed-default"),
    *("torch-ddp", "torch-ddp-tuned"),
)
#: How rows name "bucketed-default", whose buckets differ in size: no part of a bucket sweep.
_DEFAULT = "default buckets"
_PHASE = "step"
#: Shares of the gradients whose all-reduce is timed, for the prediction beside the bucket sweep.
_SWEEP_SHARES = (1000, 100, 10)


@dataclass(frozen=True, kw_only=True)
class Options(ShapeOptions, NodeOptions):
    """Options of :class:`Ddp`.

    Small enough for a quick run on two cores: ``sizes=["custom"]``, ``d_model=64``, ``d_ff=128``,
    ``num_layers=2``, ``num_heads=2``, ``vocab_size=256``, ``batches=[2]``, ``sequences=[32]``,
    ``bucket_sizes_mb=[0.1, 1]``, ``rounds=2``, ``blocks=3``, ``calls=2``, ``warmup=2``.
    """

    sizes: tuple[str, ...] = option(("xl",), "Model sizes.", choices=SIZES)
    batches: tuple[int, ...] = option((2,), "Sequences per rank.")
    sequences: tuple[int, ...] = option((128,), "Context lengths.")
    precisions: tuple[str, ...] = option(("fp32",), "Precisions.", choices=PRECISIONS)
    optimizer: str = option("adamw", "Optimizer of the step.", choices=OPTIMIZERS)
    variants: tuple[str, ...] = option(VARIANTS, "Ways to average, compared.", choices=VARIANTS)
    bucket_sizes_mb: tuple[float, ...] = option(
        (1, 10, 100, 1000), "Bucket sizes of the bucketed variant (MB of 1024² bytes)."
    )
    world_size: int | None = option(None, "Ranks; by default 2, or as many as there are GPUs.")
    rounds: int = option(3, "Times each variant has its turn.")
    blocks: int = option(4, "Samples per turn.")
    calls: int = option(5, "Steps per sample, without synchronisation between them.")
    warmup: int = option(5, "Warm-up steps per turn.")
    profiled: bool = option(
        True, "Also profile one step of each: takes longer than timing it, for a large model."
    )
    nsight: bool = option(
        False,
        "Instead of timing, record one step of each variant with Nsight Systems; the case is "
        "skipped where nsys is missing.",
    )
    device: str = option("auto", "Where to run.", choices=("auto", "cpu", "cuda"))


class Ddp(Experiment):
    """Step times and communication of the data-parallel wrappers."""

    name: ClassVar[str] = "ddp"
    summary: ClassVar[str] = "Data-parallel wrappers: step time, hidden and exposed communication"
    guide: ClassVar[str] = (
        "Times training steps of every way to average gradients, in turns, after each one's "
        "gradients have been checked. A profiled step says how much communication computation "
        "hides and how much is exposed. Three bucket sizes or more are fitted with T(n) = "
        "s/(n·w) + n·o."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "ddp --sizes small --variants naive,overlap,bucketed",
        "ddp --batches 2,4 --sequences 128,256,512 --no-profiled",
    )
    Options: ClassVar[type[Any]] = Options

    def cases(self, **options: Any) -> list[Case]:
        """One case per size, batch, context length and precision; all wrappers in each."""
        chosen = Options(**options)
        device = resolve_device(chosen.device)
        world_size = chosen.world_size or default_world_size(device, chosen.nnodes)
        variants = expand(chosen.variants, chosen.bucket_sizes_mb)
        if chosen.nsight:  # nothing to see without communication
            variants = [each for each in variants if each["wrapper"] != "none"]
        how = " Nsight Systems" if chosen.nsight else " profiled" * chosen.profiled
        configs: list[Row] = [
            {
                "size": size,
                **chosen.shape(),
                "batch": batch,
                "sequence": sequence,
                "precision": precision,
                "optimizer": chosen.optimizer,
                "variants": variants,
                "world_size": world_size,
                "nnodes": chosen.nnodes,
                "rounds": chosen.rounds,
                "blocks": chosen.blocks,
                "calls": chosen.calls,
                "warmup": chosen.warmup,
                "profiled": chosen.profiled,
                "nsight": chosen.nsight,
                "device": device,
                "label": f"ddp {size} b{batch} s{sequence} {precision} {world_size} ranks{how}",
            }
            for size in chosen.sizes
            for batch in chosen.batches
            for sequence in chosen.sequences
            for precision in chosen.precisions
        ]
        steps = 1 + chosen.rounds * (chosen.warmup + chosen.blocks * chosen.calls)
        return [
            Case(
                experiment=self.name,
                config=config,
                placement=chosen.placement(),
                timeout_s=900,
                estimate_s=estimates.RANKS_S[device]
                + estimates.build_s(config)
                + len(variants)
                * (
                    20.0 * chosen.nsight
                    + steps * estimates.step_s(config, config["precision"])
                    + steps * estimates.all_reduce_s(config, 4 * estimates.parameters(config))
                    + chosen.profiled * (0.3 + 3e-9 * estimates.parameters(config))
                ),
            )
            for config in configs
        ]

    def run(self, case: Case, progress: Callable[[str], None]) -> list[Row]:
        """Checks every wrapper's gradients, times all in turn, and profiles one step of each."""
        from bench_harness.experiments import ddp_nsight

        if case.config["nsight"]:
            require_gpus(case.config)
            return ddp_nsight.rows(dict(case.config), case.timeout_s / 3, progress)
        rows: list[Row] = []
        for ranks in zip(*run_on_ranks(case, progress, measure_rank, str(Path.cwd())), strict=True):
            row = slowest_rank(list(ranks))
            if "all_reduce" in row:
                row["all_reduce"] = {
                    "size_bytes": row["all_reduce"]["size_bytes"],
                    "samples_ms": [
                        slowest_of(list(size))
                        for size in zip(
                            *(rank["all_reduce"]["samples_ms"] for rank in ranks), strict=True
                        )
                    ],
                }
            if case.config["profiled"]:
                row |= over_ranks(list(ranks))
            rows.append(row)
        return rows

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """Steps and communication; the course's CSV columns; the bucket model's constants."""
        import pandas as pd

        from bench_harness.experiments.bucket_model import MISS_TOLERANCE, fit_table
        from bench_harness.stats import ratio_interval, with_summary

        frame = with_summary(rows)
        if "variant" not in frame or frame["variant"].isna().all():
            return [
                Table("Data-parallel steps", present.columns(frame, _CELL | {"status": "status"}))
            ]
        timed = frame[frame["median_ms"].notna()]
        samples: dict[Any, list[float]] = {}
        if len(timed):
            samples = timed.set_index(["case_key", "variant"])["samples_ms"].to_dict()
        medians = frame.set_index(["case_key", "variant"])["median_ms"].to_dict()
        speedups = []
        for case, variant in zip(frame["case_key"], frame["variant"], strict=True):
            naive = samples.get((case, "naive"))
            own = samples.get((case, variant))
            speedups.append(ratio_interval(naive, own) if naive and own else (float("nan"),) * 3)
        frame[["speedup", "speedup_low", "speedup_high"]] = pd.DataFrame(
            speedups, index=frame.index
        )
        frame["beyond_none_ms"] = frame["median_ms"] - [
            medians.get((case, "none"), float("nan")) for case in frame["case_key"]
        ]
        frame["fastest_ms"] = [
            min(taken) if isinstance(taken, list) and taken else float("nan")
            for taken in frame.get("samples_ms", [None] * len(frame))
        ]
        frame["share"] = 100 * frame["beyond_none_ms"] / frame["median_ms"]
        frame["payload_mib"] = frame["payload_bytes"].astype("float64") / 2**20
        steps = Table(
            "Data-parallel steps",
            present.columns(
                frame[frame["median_ms"].notna() | (frame["status"] != "ok")],
                _CELL
                | {"variant": "variant"}
                | present.STATISTICS
                | {
                    "fastest_ms": "fastest (ms)",
                    "speedup": "speedup over naive (ratio)",
                    "speedup_low": "95 % low (ratio)",
                    "speedup_high": "95 % high (ratio)",
                    "beyond_none_ms": "beyond no communication (ms)",
                    "share": "of the step (%)",
                    "peak_gib": "peak memory (GiB)",
                    "status": "status",
                },
            ),
            "Samples are means over blocks of steps without synchronisation inside, the slowest "
            "rank's. 'none' averages nothing and marks what a step costs without communication. "
            "A busy host only adds time, so where samples scatter the fastest say more.",
        )
        done = present.finished(frame)
        profiled = done[done["spans"].notna()] if "spans" in done else done.iloc[:0]
        communication = Table(
            "Communication in one profiled step",
            present.columns(
                profiled,
                _CELL
                | {
                    "variant": "variant",
                    "collectives": "collectives (count)",
                    "in_backward": "started in backward (count)",
                    "payload_mib": "payload (MiB)",
                    "communication_ms": "total (ms)",
                    "hidden_ms": "hidden (ms)",
                    "exposed_ms": "exposed (ms)",
                    "exposed_min_ms": "exposed, least rank (ms)",
                    "idle_ms": "idle (ms)",
                    "spans": "spans",
                },
            ),
            "Exposed is communication with nothing computed meanwhile; hidden is "
            "the rest. Each figure is the largest over ranks unless marked. Collectives wait for "
            "the slowest rank, and that waiting counts.",
        )
        done = done[done["median_ms"].notna()]
        if done.empty:  # recorded for their pictures only
            return [communication]
        submission = pd.DataFrame(
            {
                "implementation": done["variant"],
                "model_size": done["size"],
                "d_model": done["d_model"],
                "num_layers": done["num_layers"],
                "world_size": done["world_size"],
                "avg_step_time_ms": done["mean_ms"].round(4),
                "speedup_vs_naive": (
                    [
                        float(sum(samples[case, "naive"]) / len(samples[case, "naive"])) / mean
                        if (case, "naive") in samples
                        else None
                        for case, mean in zip(done["case_key"], done["mean_ms"], strict=True)
                    ]
                ),
                "batch": done["batch"],
                "sequence": done["sequence"],
                "precision": done["precision"],
            }
        )
        tables = [
            steps,
            *([communication] if len(profiled) else []),
            Table(
                "Step times for comparison by column",
                submission.round({"speedup_vs_naive": 4}).reset_index(drop=True),
                "The columns that other implementations of the assignment publish; the last three "
                "say which cell a line belongs to.",
            ),
        ]
        fitted = fit_table(done)
        if len(fitted):
            tables.append(
                Table(
                    "Bucket overhead model",
                    fitted,
                    "T(n) = s/(n·w) + n·o fitted to the step beyond no communication, with the "
                    "bucket counts that the wrapper really used; b* = √(s·o·w), at least the "
                    "largest parameter. Predicted: the same with o and w of all-reduces alone, "
                    "t = o + S/w, timed in the same run; a T* further than "
                    f"{MISS_TOLERANCE:.0%} from it is flagged.",
                )
            )
        return tables

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """Step times; overlap pictures on one time axis; bucket sweeps with the fitted model."""
        from bench_harness.experiments.bucket_model import draw_fit
        from bench_harness.stats import with_summary
        from bench_harness.traces.picture import draw_overlap

        done = with_summary(present.finished(rows))
        if "variant" not in done or done.empty:
            return []
        timed = done[done["median_ms"].notna()]
        figures = []
        if len(timed):
            figures.append(
                Figure(
                    "ddp_steps",
                    "Step time by variant",
                    _draw_steps(timed),
                    "Bars: median; whiskers: 95 % interval. Dashed: the step without "
                    "communication.",
                )
            )
        shown = ["naive", "flat", "overlap", *_bucketed(done), _DEFAULT, "torch-ddp"]
        profiled = done[done["timeline"].notna()] if "timeline" in done else done.iloc[:0]
        for index, (_, cell) in enumerate(profiled.groupby("case_key", sort=False)):
            label = cell["label"].iloc[0]
            lines = dict(zip(cell["variant"], cell["timeline"], strict=True))
            picked = {name: lines[name] for name in shown if name in lines}
            figures.append(
                Figure(
                    f"ddp_overlap_{index}",
                    f"Overlap: {label}",
                    draw_overlap(picked),
                    f"One step of {_drawn(cell)}; {cell['spans'].iloc[0]}. Black line: its end.",
                )
            )
        sweep = draw_fit(timed)
        if sweep is not None:
            figures.append(
                Figure(
                    "ddp_buckets",
                    "Communication overhead over bucket size",
                    sweep,
                    "Points: step minus the step without communication. Line: fitted model.",
                )
            )
        return figures


_CELL = {
    "size": "size",
    "batch": "batch per rank",
    "sequence": "sequence (tokens)",
    "precision": "precision",
    "world_size": "world size (ranks)",
}


def expand(variants: tuple[str, ...], bucket_sizes_mb: tuple[float, ...]) -> list[Row]:
    """Every variant with its wrapper and settings; one per bucket size; no communication first."""
    expanded: list[Row] = [{"variant": "none", "wrapper": "none", "settings": {}}]
    for variant in variants:
        if variant == "bucketed":
            expanded += [
                {
                    "variant": f"bucketed {size:g} MB",
                    "wrapper": "bucketed",
                    "settings": {"bucket_size_mb": size},
                }
                for size in bucket_sizes_mb
            ]
        elif variant == "bucketed-default":
            expanded.append({"variant": _DEFAULT, "wrapper": "bucketed", "settings": {}})
        elif variant == "torch-ddp-tuned":
            settings = {
                "gradient_as_bucket_view": True,
                "bucket_cap_mb": 100,
                "static_graph": True,
            }
            expanded.append({"variant": variant, "wrapper": "torch-ddp", "settings": settings})
        else:
            expanded.append({"variant": variant, "wrapper": variant, "settings": {}})
    return expanded


def measure_rank(
    rank: int, world_size: int, device: torch.device, config: Mapping[str, Any], folder: str
) -> list[Row]:
    """One rank's part of a case: one row per variant with this rank's samples."""
    from bench_harness.experiments.allreduce import sweep
    from bench_harness.experiments.steps import averaged_gradients
    from bench_harness.timing import Samples
    from bench_harness.workload import language_model, optimizer_class, shape_row

    workload = language_model(config, device, precision=config["precision"], batch_seed=rank)
    assert workload.model_config is not None
    facts = shape_row(workload.model_config)
    expected = averaged_gradients(workload)
    optimizer = optimizer_class(config["optimizer"], device)(workload.module.parameters(), lr=1e-5)
    gc.freeze()  # what exists by now stays: ``wrapped`` collects garbage often
    largest = max(p.numel() * p.element_size() for p in workload.module.parameters())
    sizes = [max(4096, 4 * workload.parameters() // share) for share in _SWEEP_SHARES]
    link = {"size_bytes": sizes, "samples_ms": sweep(sizes, device, warmup=3, samples=10)}
    rows: dict[str, Row] = {}
    for variant in config["variants"]:
        # The check comes first for all, while the parameters are still those of ``expected``.
        error = _check(variant, workload, expected, config["precision"])
        rows[variant["variant"]] = {"variant": variant["variant"], **facts, "gradient_error": error}
    rows["none"] |= {"all_reduce": link, "largest_parameter_bytes": largest}
    del expected
    samples = {name: Samples() for name in rows}
    order = list(config["variants"])
    for turn in range(config["rounds"]):
        start = turn % len(order)
        for variant in order[start:] + order[:start]:
            name = variant["variant"]
            trace = Path(folder) / f"step-{name}-rank{rank}.json"
            rows[name] |= _turn(variant, workload, optimizer, config, samples[name], turn, trace)
    return [{**row, **samples[name].row()} for name, row in rows.items()]


def over_ranks(ranks: list[Row]) -> Row:
    """Communication in a step: largest and least over ranks, and the timeline worth drawing.

    NCCL's kernels spin while they wait for other ranks. The rank whose communication is exposed
    least waits least, so its timeline shows what the exchange itself takes.
    """
    row: Row = {}
    for name in ("communication_ms", "exposed_ms", "hidden_ms", "idle_ms"):
        values = [rank[name] for rank in ranks]
        row |= {name: max(values), f"{name.removesuffix('_ms')}_min_ms": min(values)}
    drawn = min(range(len(ranks)), key=lambda rank: float(ranks[rank]["exposed_ms"]))
    kept = {name: ranks[drawn][name] for name in ("overlap_ratio", "timeline", "spans")}
    return {**row, **kept, "drawn_rank": drawn}


# A function per turn, so that nothing holds a wrapper, and with it torch's buckets, when the next
# one begins.


def _check(
    variant: Mapping[str, Any],
    workload: Workload,
    expected: Mapping[str, torch.Tensor],
    precision: str,
) -> float | None:
    """One step of a wrapper; the error of its gradients, or None if it averages none."""
    from bench_harness.experiments.steps import check_gradients, train_step, wrapped

    with wrapped(variant["wrapper"], variant["settings"], workload.module) as way:
        train_step(workload, way, None)
        if variant["wrapper"] == "none":
            return None
        return check_gradients(variant["variant"], workload.module, expected, precision)


def _turn(
    variant: Mapping[str, Any],
    workload: Workload,
    optimizer: torch.optim.Optimizer,
    config: Mapping[str, Any],
    samples: Samples,
    turn: int,
    trace: Path,
) -> Row:
    """One turn of a wrapper: warm-up and samples; the last one also counts and profiles."""
    from bench_harness.experiments.steps import timed_blocks, train_step, wrapped

    found: Row = {}
    device = workload.device
    with wrapped(variant["wrapper"], variant["settings"], workload.module) as way:

        def step() -> None:
            train_step(workload, way, optimizer)

        for _ in range(config["warmup"]):
            step()
        _reset_peak(device)
        timed_blocks(step, samples, device, blocks=config["blocks"], calls=config["calls"])
        if turn == 0:
            found |= _peak(device)
        if turn == config["rounds"] - 1:
            found |= counted(way.module)
            if config["profiled"]:
                found |= _profile(step, workload, trace)
    return found


def counted(module: torch.nn.Module) -> Row:
    """Collectives and payload of the last step, as the wrapper counted them."""
    stats = getattr(module, "stats", None)
    stats = stats() if callable(stats) else stats
    return {
        "collectives": getattr(stats, "collectives", None),
        "in_backward": getattr(stats, "started_in_backward", None),
        "buckets": getattr(stats, "reductions", None),
        "payload_bytes": getattr(stats, "bytes", None),
        "gradient_bytes": sum(
            p.numel() * p.element_size() for p in module.parameters() if p.requires_grad
        ),
    }


def _profile(step: Callable[[], None], workload: Workload, path: Path) -> Row:
    """Communication of one profiled step by interval arithmetic."""
    import torch.distributed as dist

    from bench_harness.traces import kineto
    from bench_harness.traces.picture import timeline
    from bench_harness.traces.trace import phase

    device = workload.device
    with kineto.recording(path, device):
        dist.barrier()
        with phase(_PHASE, device):
            step()
    trace = kineto.load(path)
    window = trace.phases(_PHASE)[0]
    found = trace.overlap(window)
    if dist.get_rank() == 0:
        kineto.trimmed(path, path.with_suffix(".trimmed.json.gz"), [window])
    path.unlink()
    return {
        "communication_ms": found.communication_ns / 1e6,
        "exposed_ms": found.exposed_ns / 1e6,
        "hidden_ms": found.hidden_ns / 1e6,
        "idle_ms": found.idle_ns / 1e6,
        "overlap_ratio": found.ratio,
        "spans": "GPU kernels" if trace.on_device else "host spans (gloo on a CPU)",
        "timeline": timeline(trace, window),
    }


def _reset_peak(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> Row:
    import torch

    if device.type != "cuda":
        return {"peak_gib": None}
    return {"peak_gib": torch.cuda.max_memory_allocated(device) / 2**30}


def _drawn(cell: pd.DataFrame) -> str:
    if "drawn_rank" in cell and cell["drawn_rank"].notna().all():
        return "each wrapper on the rank that waited least for others"
    return "rank 0"


def _bucketed(rows: pd.DataFrame) -> list[str]:
    return [name for name in rows["variant"].unique() if str(name).startswith("bucketed")]


def _draw_steps(done: pd.DataFrame) -> Any:
    from bench_harness.report.plots import COLOURS, new_figure

    cells = [cell for _, cell in done.groupby("case_key", sort=False)]
    figure, axes = new_figure(rows=len(cells), height=0.8 + 2.6 * len(cells))
    for plot, cell in zip(axes[:, 0], cells, strict=True):
        shown = cell[cell["variant"] != "none"]
        errors = [
            (shown["median_ms"] - shown["ci_low_ms"]).fillna(0).clip(lower=0),
            (shown["ci_high_ms"] - shown["median_ms"]).fillna(0).clip(lower=0),
        ]
        plot.barh(shown["variant"], shown["median_ms"], xerr=errors, color=COLOURS[0], capsize=2)
        bare = cell.loc[cell["variant"] == "none", "median_ms"]
        if len(bare):
            plot.axvline(float(bare.iloc[0]), color="black", linestyle="--", linewidth=1)
        plot.invert_yaxis()
        plot.set_title(cell["label"].iloc[0])
        plot.set_xlabel("median step time (ms)")
    return figure
