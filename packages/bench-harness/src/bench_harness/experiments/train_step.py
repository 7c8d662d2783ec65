"""Training steps: what each way to train costs, in time, exposed communication and memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard, TypeVar

from bench_harness import roofline
from bench_harness.core import Bar, Bars, Case, Column, Figure, Progress, Row, Table, option
from bench_harness.display import row_tables
from bench_harness.display.timelines import timelines
from bench_harness.distributed import default_world_size, run_on_ranks
from bench_harness.experiments.allreduce import fit_table
from bench_harness.experiments.base import Experiment, SubjectOptions, subject_label
from bench_harness.timing import SamplingOptions
from bench_harness.traces.step import OPTIMIZER, PARTS
from bench_harness.training import settings as of
from bench_harness.workload import PRECISIONS, SIZES, billions, cpu_seconds

if TYPE_CHECKING:
    import pandas as pd

_Made = TypeVar("_Made")

_COLUMNS = row_tables.Columns(
    Column("batch", "batch per rank"),
    Column("compile", "compiled"),
    Column("exposed_step_ms", "exposed communication", "ms"),
    Column("share", "of the step", "%"),
    Column("speedup", "speedup over naive", "ratio"),
    Column("speedup_low", "speedup 95 % low", "ratio"),
    Column("speedup_high", "speedup 95 % high", "ratio"),
    Column("optimizer_ms_median", "optimizer alone", "ms"),
    Column("host_ms_median", "host", "ms"),
    Column("peak_gib", "peak memory", "GiB"),
    Column("floor_ms", "floor", "ms"),
    Column("parameter_gib", "parameters", "GiB"),
    Column("gradient_gib", "gradients", "GiB"),
    Column("state_gib", "optimizer state", "GiB"),
    Column("predicted_gib", "predicted sum", "GiB"),
    Column("host_state_gib", "state in host memory", "GiB"),
    Column("predicted_host_state_gib", "predicted there", "GiB"),
    Column("collectives", "collectives", "count"),
    Column("in_backward", "started in backward", "count"),
    Column("communication_ms", "total", "ms"),
    Column("exposed_min_ms", "exposed, least rank", "ms"),
    Column("spent_ms", "time", "ms"),
    Column("least_ms", "at the measured ceiling", "ms"),
    Column("reached", "of the ceiling", "%"),
    Column("late_max_ms", "on another rank up to", "ms"),
    Column("rank", "rank", "number"),
)
_CELL = "model size batch sequence precision compile world_size"
_ROW = f"{_CELL} variant"
#: A part of the memory further than this from its prediction is flagged.
_TOLERANCE = 0.03
#: What a rank holds by the name of its part in a row.
_KINDS = {"parameter": "parameters", "gradient": "gradients", "state": "optimizer state"}
#: Names of the course's comparison by column, where they are not those of the wrappers.
_PUBLISHED = {"overlap": "overlap_individual"}


@dataclass(frozen=True, kw_only=True)
class Options(SubjectOptions, SamplingOptions):
    """Options of :class:`TrainStep`."""

    sizes: tuple[str, ...] = option(("xl",), "Model sizes.", choices=SIZES)
    batches: tuple[int, ...] = option((2,), "Sequences per rank.")
    sequences: tuple[int, ...] = option((128,), "Context lengths.")
    variants: tuple[dict[str, Any] | str, ...] = option(
        ("naive", "flat", "overlap", "bucketed", "torch-ddp"),
        "Ways to train, compared: wrappers by name, or tables of a preset, which also set "
        "arguments, optimizer, precision, compilation, attention.",
    )
    optimizer: dict[str, Any] | str | None = option(  # noqa: RUF009 - its default is None
        None, "Optimizer of variants that name none."
    )
    precision: str = option("fp32", "Precision.", choices=PRECISIONS)
    compile: str = option("off", "What to compile.", choices=("off", "blocks", "model"))
    attention: str = option("sdpa", "naive, sdpa, flash or package.module:callable.")
    loss: str = option(
        "logits",
        "How the built-in model's loss is made: logits, or chunked; beside --model "
        "package.module:function of output and target.",
    )
    lower_bound: bool = option(
        True, "Also measure each step without communication; the whole model must fit a device."
    )
    world_sizes: tuple[int, ...] = option(
        (), "Ranks; by default 2, or as many as there are GPUs if fewer."
    )
    rounds: int = option(3, "Least turns of each variant; the order goes back and forth.")
    blocks: int = option(4, "Samples per turn.")
    calls: int = option(5, "Steps per sample, without synchronisation between them.")
    warmup: int = option(5, "Warm-up steps per turn.")
    profiled: bool = option(False, "Also profile one step of each variant.")
    all_reduces: bool = option(False, "Also time all-reduces alone: what a call and a byte cost.")
    first_step: bool = option(
        False,
        "Weigh memory at the moments of the first step, which makes the optimizer's state, instead "
        "of the second.",
    )
    alone: bool = option(
        False,
        "Instead of timing, weigh rank 0 of the ranks, alone on one device: its collectives move "
        "nothing, so only memory is the real one.",
    )
    nsight: bool = option(
        False,
        "Instead of timing, record one step of each variant with Nsight Systems; the case is "
        "skipped where nsys is missing.",
    )
    coursework: bool = option(
        False,
        "Also show the columns that other implementations of the course's assignment publish.",
    )

    def __post_init__(self) -> None:
        SubjectOptions.__post_init__(self)
        if self.model is not None and self.own_loss is None and self.loss != "logits":
            raise ValueError(
                f"loss must be package.module:function beside model, but got {self.loss!r}, which "
                "describes the built-in language model. Leave it out, or name a function."
            )
        kinds = ("alone", "nsight", "profiled", "all_reduces")
        asked = [name for name in kinds if getattr(self, name)]
        if asked[1:] and asked[0] in kinds[:2]:
            raise ValueError(
                f"{asked[0]} must come without {asked[1]}, but got both. Leave one of them out."
            )
        of.labels(self.settings())

    def settings(self) -> list[of.Settings]:
        """The variants, complete; before them, if asked for, each step without communication.

        Raises:
            ValueError: an unknown key or value, or two variants that are the same.
        """
        own = ("precision", "compile", "attention", "loss")
        defaults: Row = {name: getattr(self, name) for name in own}
        if self.own_loss is not None and self.model is not None:
            defaults["loss"] = "logits"  # the user's function is part of the subject
        if self.optimizer is not None:
            defaults["optimizer"] = self.optimizer
        variants = [of.read(each, defaults) for each in self.variants]
        return of.with_bounds(variants) if self.lower_bound else variants


class TrainStep(Experiment):
    """Step time, exposed communication and memory of ways to train."""

    name: ClassVar[str] = "train-step"
    summary: ClassVar[str] = "Ways to train: step time, overlap, memory"
    guide: ClassVar[str] = (
        "Times training steps of every variant in turns, in blocks that are not synchronised "
        "inside, after its losses and weights have been proven to be those of plain averaging. A "
        "variant is a wrapper, an optimizer, a precision, what is compiled, and an attention. "
        "Exposed communication is the step minus the same step without communication, which is "
        "always measured too. The first turn also weighs parameters, gradients and optimizer "
        "state at four moments against their prediction."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "train-step --sizes small --variants naive,overlap,bucketed",
        "train-step --batches 8 --sequences 512 --compile blocks",
        "train-step --model my.model:build --input float32[8x512]",
    )
    Options: ClassVar[type[Any]] = Options

    def cases(self, **options: Any) -> list[Case]:
        """One case per number of ranks, size, batch and context length; all variants in each."""
        chosen = Options(**options)
        how = "rounds blocks calls warmup interval max_seconds profiled all_reduces first_step"
        options = chosen.stored(f"{how} alone nsight coursework")
        how = " rank 0 alone" * chosen.alone + " first step" * chosen.first_step
        how += " Nsight Systems" if chosen.nsight else " profiled" * chosen.profiled
        cases = []
        for world_size in chosen.world_sizes or (default_world_size(options["device"]),):
            variants = chosen.settings()
            if world_size > 1 and chosen.nsight:  # nothing to see without communication
                variants = [variant for variant in variants if variant.communicates]
            common: Row = {
                "variants": [variant.table() for variant in variants],
                "world_size": world_size,
                "nnodes": 1,  # as in published rows, whose keys stay
                **options,
            }
            for subject in chosen.subjects(chosen.sizes, chosen.batches, chosen.sequences):
                label = _label(subject, variants, world_size) + how
                config = {**subject, **common, "label": label}
                cases.append(Case(experiment=self.name, config=config, timeout_s=900))
        return cases

    def run(self, case: Case, progress: Progress) -> list[Row]:
        """Proves, weighs and times every variant in turns."""
        if case.config["nsight"]:
            from bench_harness.training import nsight

            return nsight.rows(dict(case.config), case.timeout_s / 3, progress)
        from bench_harness.training.measure import measure_rank, merged, weigh_alone

        if case.config["alone"]:
            return weigh_alone(case.config)
        ranks = run_on_ranks(case, progress, measure_rank, str(Path.cwd()))
        return [merged(list(each)) for each in zip(*ranks, strict=True)]

    def work_s(self, case: Case) -> float:
        """By variants, each built, proven and compiled, and their rounds of so many tokens."""
        config, count = case.config, len(case.config["variants"])
        if config["device"] == "cpu":  # whose ranks share its cores
            rounds, ranks = (0, 1) if config["alone"] else (config["rounds"], config["world_size"])
            steps = 2 + rounds * (config["warmup"] + config["blocks"] * config["calls"])
            moved = 10 * billions(config) * (steps + 2 * rounds)  # optimizer, all-reduces, builds
            each = 0.2 * rounds + moved + cpu_seconds(config, 3 * ranks * steps)
            return float(2 + count * each)
        if config["alone"]:
            return 4.0 * count
        fast = 4200 if config["variants"][0]["precision"] == "fp32" else 20000
        work = 0.8 + config.get("batch", 0) * config.get("sequence", 0) / fast
        steps = count * (6 + 0.8 * config["rounds"] * config["blocks"])
        return float(10 + steps * (0.3 + 0.3 * billions(config) * work))

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """Steps, memory, communication, the course's CSV columns, all-reduces."""
        from bench_harness.stats import with_summary

        frame = with_summary(rows)
        if "settings" not in frame:
            return [_COLUMNS.table("Training steps", frame, f"{_CELL} status")]
        frame = roofline.with_roofline(compared(frame))
        if "model_flops" in frame and "ceiling_tflop_s" in frame:
            rate = frame["model_flops"].astype("float64") / frame["median_ms"] / 1e9
            frame["mfu"] = 100 * rate / frame["ceiling_tflop_s"]
            if "sustained_tflop_s" in frame:
                frame["floor_ms"] = frame["median_ms"] * rate / frame["sustained_tflop_s"]
        made = []
        if frame["median_ms"].notna().any() or (frame["status"] != "ok").any():
            made.append(_steps(frame))
        done = row_tables.finished(frame)
        timed = done[done["median_ms"].notna()]
        for name, make in (
            ("memory", _memory),
            ("communication_ms", _communication),
            ("waterfall", _waterfall),
            ("gathers", _gathers),
            ("latest_gathers", _latest_gathers),
        ):
            if name in done and len(held := done[done[name].notna()]):
                made.append(make(held))
        if len(timed):
            # Rows from before this option always showed it.
            if (
                "coursework" not in timed
                or timed["coursework"].map(lambda wanted: wanted is not False).any()
            ):
                made.append(_published(timed))
            if "all_reduce" in timed:
                made += _all_reduces(timed[timed["all_reduce"].notna()])
        return [table for table in made if len(table.frame)]

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """Step times, memory at its moments, overlap on one time axis."""
        from bench_harness.stats import with_summary

        done = row_tables.finished(rows)
        if "settings" not in done or done.empty:
            return []
        done = compared(with_summary(done))
        timed = done[done["median_ms"].notna()]
        made = []
        if len(timed):
            title = "Step time by variant"
            note = "What is beyond the same step without communication is exposed."
            made.append(Figure("train_steps", title, Bars("ms", _panels(timed, _step_bars)), note))
        if "memory" in done and len(held := done[done["memory"].map(_are_samples)]):
            panels = {
                f"{title}{': ' * bool(title)}{row['variant']}": [
                    Bar(moment["moment"], _held(moment)) for moment in row["memory"]
                ]
                for title, cell in _panels(held, lambda cell: cell).items()
                for _, row in cell.iterrows()
            }
            title = "Memory per rank at its moments"
            made.append(Figure("train_step_memory", title, Bars("B", panels), folded=True))
        profiled = done[done["timeline"].notna()] if "timeline" in done else done.iloc[:0]
        for index, (_, cell) in enumerate(profiled.groupby("case_key", sort=False)):
            lines = dict(zip(cell["variant"], cell["timeline"], strict=True))
            lines.pop("no communication", None)
            if lines:
                note = f"One profiled step of each variant; {cell['spans'].iloc[0]}."
                if cell["cuda_graph"].map(bool).any():
                    note += (
                        " One launch replays a step with cuda_graph, so its phases are not marked."
                    )
                made.append(
                    Figure(
                        f"train_step_overlap_{index}",
                        f"Timeline: {cell['label'].iloc[0]}",
                        timelines(lines),
                        note,
                    )
                )
        broken = done[done["waterfall"].notna()] if "waterfall" in done else done.iloc[:0]
        for index, (_, cell) in enumerate(broken.groupby("case_key", sort=False)):
            bars = [Bar(row["variant"], row["waterfall"]) for _, row in cell.iterrows()]
            made.append(
                Figure(
                    f"train_step_waterfall_{index}",
                    f"Where the time goes: {cell['label'].iloc[0]}",
                    Bars("ms", {"": bars}),
                    "One profiled step, on the rank that waited least for others; "
                    f"{cell['spans'].iloc[0]}.",
                )
            )
        return made


def _label(subject: Row, variants: list[of.Settings], world_size: int) -> str:
    precisions = "+".join(dict.fromkeys(variant.precision for variant in variants))
    compiled = dict.fromkeys(v.compile for v in variants if v.compile != "off")
    parts = [
        f"train-step {subject_label(subject)} {precisions}",
        *(f"compiled {each}" for each in compiled),
    ]
    return " ".join([*parts, f"{world_size} ranks"])


def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Adds to each row its settings as columns, and how it compares with others of its case."""
    import pandas as pd

    from bench_harness.stats import ratio_interval

    for name in of.SHARED:
        frame[name] = [_setting(table, name) for table in frame["settings"]]
    frame["wrapper"] = [_setting(table, "wrapper", "name") for table in frame["settings"]]
    frame["quotable"] = row_tables.steady(frame)
    every = [of.stored(each) if isinstance(each, Mapping) else None for each in frame["settings"]]
    own = list(zip(frame["case_key"], map(repr, every), strict=True))
    bare = [repr(each and each.without_communication()) for each in every]
    bound = list(zip(frame["case_key"], bare, strict=True))
    medians = dict(zip(own, frame["median_ms"], strict=True))
    quotable = dict(zip(own, frame["quotable"], strict=True))
    frame["exposed_step_ms"] = frame["median_ms"] - [medians.get(b, float("nan")) for b in bound]
    frame["exposed_quotable"] = [
        both and quotable.get(b, False) for both, b in zip(frame["quotable"], bound, strict=True)
    ]
    frame["share"] = 100 * frame["exposed_step_ms"] / frame["median_ms"]
    samples = frame["samples_ms"] if "samples_ms" in frame else pd.Series(None, index=frame.index)
    steady = samples.where(frame["quotable"] & samples.map(_are_samples))
    naive = steady[frame["wrapper"] == "naive"].dropna()
    slow = dict(zip(frame.loc[naive.index, "case_key"], naive, strict=True))
    frame[["speedup", "speedup_low", "speedup_high"]] = [
        ratio_interval(slow[case], times)
        if case in slow and _are_samples(times)
        else (float("nan"),) * 3
        for case, times in zip(frame["case_key"], steady, strict=True)
    ]
    frame["fastest_ms"] = [_of(min, times) for times in samples]
    frame["slowest_ms"] = [_of(max, times) for times in samples]
    for name in ("host_ms", "optimizer_ms"):
        if name in frame:
            frame[f"{name}_median"] = [_of(statistics.median, times) for times in frame[name]]
    return frame


def _setting(table: Any, *names: str) -> Any:
    for name in names:
        table = table.get(name) if isinstance(table, Mapping) else None
    return table


def _of(function: Any, times: Any) -> float:
    return float(function(times)) if _are_samples(times) else float("nan")


def _are_samples(samples: Any) -> TypeGuard[list[float]]:
    """Whether there are samples; a cell of a row that has none holds something else."""
    return isinstance(samples, list) and bool(samples)


def _steps(frame: pd.DataFrame) -> Table:
    return _COLUMNS.table(
        "Training steps",
        frame[frame["median_ms"].notna() | (frame["status"] != "ok")],
        f"{_ROW} {row_tables.STATISTICS} fastest_ms slowest_ms exposed_step_ms share speedup "
        "speedup_low speedup_high optimizer_ms_median host_ms_median peak_gib mfu floor_ms "
        f"{row_tables.ROOFLINE} ran status error",
        "A sample is the mean over a block of steps without synchronisation inside, the slowest "
        "rank's. Exposed communication is the step minus the same step without communication. "
        "Where the host's time is close to the step's, the host is the limit. A busy host only "
        "adds time, so where samples scatter the fastest say more. MFU: the model's operations, "
        "causal and without recomputation, over the median step, relative to the rate of a matrix "
        "product. Floor: those operations at the rate that such a product still has after a second "
        f"of it, when power limits the clock. {roofline.NOTE}",
    )


def _memory(done: pd.DataFrame) -> Table:
    frame = row_tables.entries(done, "memory", _ROW)
    frame["predicted_bytes"] = sum(frame[f"predicted_{part}_bytes"] for part in _KINDS)
    frame["missed"] = False
    for part in [*_KINDS, *(["host_state"] if "host_state_bytes" in frame else [])]:
        expected = frame[f"predicted_{part}_bytes"]
        frame["missed"] |= (frame[f"{part}_bytes"] - expected).abs() > _TOLERANCE * expected
    return _COLUMNS.table(
        "Memory per rank at its moments",
        frame,
        f"{_ROW} moment parameter_gib gradient_gib state_gib predicted_gib host_state_gib "
        "predicted_host_state_gib missed allocated_gib peak_gib",
        "The second step, or the first where the case says so; sizes of the tensors themselves, "
        "the fullest rank's. On a GPU 'allocated' is the allocator's figure, and the peak, reset "
        "at each moment, holds activations and temporary buffers. Predicted: the accounting of "
        f"ZeRO's stages; a part that is off by more than {_TOLERANCE:.0%} is flagged.",
        {"peak_gib": "peak until then (GiB)"},
    )


def _communication(profiled: pd.DataFrame) -> Table:
    return _COLUMNS.table(
        "Communication in one profiled step",
        profiled,
        f"{_ROW} collectives in_backward payload_mib communication_ms hidden_ms exposed_ms "
        "exposed_min_ms idle_ms spans",
        "Exposed is communication with nothing computed meanwhile; hidden is the rest. Each "
        "figure is the largest over ranks unless marked. Collectives wait for the slowest rank, "
        "and that waiting counts.",
    )


def _waterfall(profiled: pd.DataFrame) -> Table:
    """One line per variant and part of its profiled step."""
    shares = profiled.assign(parts=profiled.apply(_parts, axis=1))
    return _COLUMNS.table(
        "Where the time of one profiled step goes",
        row_tables.entries(shares, "parts", _ROW),
        f"{_ROW} part spent_ms share least_ms reached",
        "The rank that waited least for others. Every moment counts for one part, the first of "
        "this list among those that ran, so the parts add up to the step. The loss is what is not "
        "a matrix product of it. Profiling makes the host slower, so more time is idle than in the "
        "timed steps. Ceilings: operations at the rate of a matrix product, AdamW's traffic at the "
        "rate of a copy, both measured in the same process.",
    )


def _parts(row: pd.Series[Any]) -> list[Row]:
    step, found = sum(row["waterfall"].values()), []
    for part in PARTS:
        spent, least = row["waterfall"][part], _least_ms(row, part)
        reached = 100 * least / spent if spent else float("nan")
        found.append(
            {"part": part, "spent_ms": spent, "share": 100 * spent / step}
            | {"least_ms": least, "reached": reached}
        )
    return found


def _least_ms(row: pd.Series[Any], part: str) -> float:
    """Milliseconds that a part of the step would take at the measured rate of its limit."""
    work = row.get("work")
    if not isinstance(work, Mapping) or part not in work:
        return float("nan")
    if part == OPTIMIZER:
        return float(work[part] / row["bandwidth_gb_s"] / 1e6)
    return float(work[part] / row["ceiling_tflop_s"] / 1e9)


def _gathers(profiled: pd.DataFrame) -> Table:
    """How many gathers of sharded parameters came late."""
    return _COLUMNS.table(
        "Gathers in one profiled step",
        profiled,
        f"{_ROW} gathers late_gathers late_ms late_max_ms",
        "A gather is late if the computation could have gone on but for its parameters. On a "
        "GPU that is from the end of the kernel before, or the launch of the next one if that "
        "was later, to the end of the gather. Counted on the rank that waits least for others: "
        "elsewhere a gather also waits until the slowest rank has come.",
    )


def _latest_gathers(profiled: pd.DataFrame) -> Table:
    return _COLUMNS.table(
        "Latest gathers",
        row_tables.entries(profiled, "latest_gathers", _ROW),
        f"{_ROW} rank number unit gather_ms late_ms",
        "On the rank that waited longest. Numbered in the order of the waits.",
        {"late_ms": "late by (ms)"},
    )


def _all_reduces(held: pd.DataFrame) -> list[Table]:
    """The cost of a call and of a byte of all-reduces alone, where cases timed them."""
    import pandas as pd

    sizes = [
        {"backend": "nccl" if row["device"] == "cuda" else "gloo", "variant": "all_reduce"}
        | {"world_size": row["world_size"], "size_bytes": size, "samples_ms": samples}
        for _, row in held.iterrows()
        for size, samples in zip(*row["all_reduce"].values(), strict=True)
    ]
    return fit_table(pd.DataFrame(sizes))


def _published(done: pd.DataFrame) -> Table:
    done = done[done["wrapper"] != "none"]  # which is no implementation
    naive = done[done["wrapper"] == "naive"].set_index("case_key")["mean_ms"].to_dict()
    names = [
        _PUBLISHED.get(wrapper, wrapper if wrapper in ("naive", "flat") else label)
        for wrapper, label in zip(done["wrapper"], done["variant"], strict=True)
    ]
    speedup = done["case_key"].map(naive).astype("float64") / done["mean_ms"]
    frame = done.assign(implementation=names, speedup_vs_naive=speedup.round(4))
    frame["avg_step_time_ms"] = done["mean_ms"].round(4)
    renamed = frame.rename(columns={"size": "model_size"})
    columns = "implementation model_size d_model num_layers world_size avg_step_time_ms "
    columns += "speedup_vs_naive batch sequence precision"
    return Table(
        "Step times for comparison by column",
        renamed.reindex(columns=columns.split()).reset_index(drop=True),
        "The columns that other implementations of the assignment publish; the last three say "
        "which cell a line belongs to.",
    )


def _panels(rows: pd.DataFrame, make: Callable[[pd.DataFrame], _Made]) -> dict[str, _Made]:
    """What is made of the rows of each case, by its label, which one case alone does not need."""
    cells = {cell["label"].iloc[0]: cell for _, cell in rows.groupby("case_key", sort=False)}
    return {
        label.removeprefix("train-step ") * (len(cells) > 1): make(cell)
        for label, cell in cells.items()
    }


def _step_bars(cell: pd.DataFrame) -> list[Bar]:
    """A bar for each variant of a case, the fastest first."""
    bars = []
    for _, row in cell.sort_values("median_ms").iterrows():
        exposed = max(row["exposed_step_ms"], 0.0) if row["exposed_step_ms"] > 0 else 0.0
        parts = {"computation": row["median_ms"] - exposed, "exposed communication": exposed}
        known = row["exposed_quotable"] or row["exposed_step_ms"] != row["exposed_step_ms"]
        ends = row["ci_low_ms"], row["ci_high_ms"]
        bars.append(Bar(row["variant"], parts, *ends, steady=bool(row["quotable"] and known)))
    return bars


def _held(moment: Mapping[str, Any]) -> dict[str, float]:
    """Bytes at a moment by kind; on a GPU also what the allocator counts beyond them."""
    parts = {name: float(moment[f"{part}_bytes"]) for part, name in _KINDS.items()}
    if moment["allocated_bytes"] is not None:
        rest = moment["allocated_bytes"] - sum(parts.values())
        parts["activations and buffers"] = max(rest, 0.0)
    return parts
