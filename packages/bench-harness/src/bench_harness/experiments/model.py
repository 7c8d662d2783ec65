"""Times a model end to end: forward, backward, optimizer, and the whole training step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness import roofline, timing, workload
from bench_harness.core import Bar, Bars, Case, Column, Config, Figure, Progress, Row, Table, option
from bench_harness.display import row_tables
from bench_harness.experiments.base import Experiment, SubjectOptions, subject_label
from bench_harness.roofline import forward_flops, step_bytes
from bench_harness.timing import Samples, SamplingOptions, in_turns, record_sample
from bench_harness.user_code import workload_of

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from bench_harness.training.build import Training
    from bench_harness.training.settings import Settings

_COLUMNS = row_tables.Columns(
    Column("warmup", "warm-up", "steps"),
    Column("tokens_s", "tokens/s"),
    Column("timer", "timer itself", "%"),
    Column("first_ratio", "first / steady", "ratio"),
)
#: forward: inference, no graph. The other four belong to a training step: its three parts, each
#: synchronised, and the step as a whole with one synchronisation at its end.
PHASES = ("forward", "training forward", "backward", "optimizer", "step")
MODES = ("forward", "forward-backward", "step")
#: The step as a whole and nothing before it, so that its first one meets a cold start.
WHOLE_STEP = "whole-step"


@dataclass(frozen=True, kw_only=True)
class Options(SubjectOptions, SamplingOptions):
    """Options of :class:`Model`."""

    sizes: tuple[str, ...] = option(("small",), "Model sizes.", choices=workload.SIZES)
    batch: int = option(4, "Sequences per batch.")
    sequences: tuple[int, ...] = option((256,), "Context lengths.")
    precisions: tuple[str, ...] = option(
        ("fp32",), "Precisions, compared.", choices=workload.PRECISIONS
    )
    attentions: tuple[str, ...] = option(
        ("sdpa",), "Attentions, compared.", choices=workload.ATTENTIONS
    )
    executions: tuple[str, ...] = option(
        ("eager",), "Plain or through torch.compile, compared.", choices=("eager", "compiled")
    )
    modes: tuple[str, ...] = option(
        MODES,
        "What to run; step has its parts too, whole-step nothing else.",
        choices=(*MODES, WHOLE_STEP),
    )
    warmups: tuple[int, ...] = option((5,), "Warm-up steps; each count is a case of its own.")
    samples: int = option(10, "Measured steps of a round.")


class Model(Experiment):
    """End-to-end timing of the language model or of any module."""

    name: ClassVar[str] = "model"
    summary: ClassVar[str] = "Forward, backward and step times, FLOP/s and utilisation"
    guide: ClassVar[str] = (
        "Times inference, the parts of a training step, each measured on its own, and the whole "
        "step. Precisions, attentions and executions take turns in one process, each with the same "
        "initial parameters. MFU is the share of the rate of a matrix product measured in the same "
        "process. The first step is shown apart from the steady state."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "model --sizes small,medium --precisions fp32,bf16",
        "model --warmups 0,1,2,5 --modes step",
        "model --model my_package.model:build --input float32[8x512]",
    )
    Options: ClassVar[type[Any]] = Options

    def cases(self, **options: Any) -> list[Case]:
        """One case per size, context length and number of warm-up steps."""
        chosen = Options(**options)
        variants = [
            {"precision": precision, "attention": attention, "execution": execution}
            for precision, attention, execution in itertools.product(
                chosen.precisions,
                chosen.attentions if chosen.model is None else ("own",),
                chosen.executions,
            )
        ]
        common = {**chosen.stored("modes samples interval max_seconds"), "optimizer": "adamw"}
        subjects = chosen.subjects(chosen.sizes, [chosen.batch], chosen.sequences)
        return [
            Case(
                experiment=self.name,
                config={
                    **subject,
                    "variants": variants,
                    "warmup": warmup,
                    **common,
                    "label": _label(subject, variants, chosen.modes, warmup),
                },
                timeout_s=900,
            )
            for subject in subjects
            for warmup in chosen.warmups
        ]

    def run(self, case: Case, progress: Progress) -> list[Row]:
        """Measures every variant of the case in turns."""
        config = case.config
        device = workload.device_of(config["device"])
        progress("building the model")
        facts = _facts(config, device)
        names = {" ".join(variant.values()): variant for variant in config["variants"]}
        variants = {name: _settings(variant, config) for name, variant in names.items()}
        measured = measure_phases(variants, config, device, progress)
        overhead = timing.timer_overhead_ms(device)
        least = step_bytes(facts["parameters"])
        least["step"] = sum(least.values())
        rows, rates = list[Row](), dict[str, Row]()
        for name, phases in measured.items():
            # fp32 products in TF32 have a ceiling of their own, so measure it in the precision.
            precision = names[name]["precision"]
            dtype, ran = workload.compute_dtype(precision), None
            if precision not in rates:
                with workload.precision_context(precision, device):
                    rates[precision] = roofline.ceilings(device, dtype)
            if "d_model" in facts:  # of a user's model nothing is known
                attention = names[name]["attention"]
                ran = workload.ran_in_model(attention, {**config, **facts}, dtype, device)
            for phase, samples in phases.items():
                work = {"forward": 1, "training forward": 1, "backward": 2, "step": 3}.get(phase)
                rows.append(
                    {"variant": name, **names[name], "phase": phase, "ran": ran, **facts}
                    | {"flops": facts["forward_flops"] * work if work else None}
                    | {"least_bytes": least[phase.removeprefix("training ")], **rates[precision]}
                    | {"timer_overhead_ms": overhead, **samples.row()}
                )
        return rows

    def work_s(self, case: Case) -> float:
        """By variants, what is run of each, and the size of the model; compiling takes longest."""
        config, variants = case.config, case.config["variants"]
        compiled = sum(each["execution"] == "compiled" for each in variants)
        triton = sum(each["attention"] == "flash" for each in variants)
        steps = len(variants) * (1 + len(config["modes"])) / 4
        if config["device"] == "cpu":
            modes, count = set(config["modes"]), config["warmup"] + config["samples"]
            step = {"step"} & modes
            passes = len({"forward"} & modes) + 3 * bool(step or {"forward-backward"} & modes)
            passes += 3 * bool(step or {WHOLE_STEP} & modes)
            # The optimizer takes a seventh of the time of all passes.
            sampled = workload.cpu_seconds(config, 8 / 7 * count * passes)
            work = steps * (3 + 9 * workload.billions(config)) + len(variants) * sampled
            return float(2 + work + 40 * compiled)
        steps *= 1 + 9 * workload.billions(config)
        return float(0.8 + steps + 5 * triton + (20 + 1.8 * workload.blocks(config)) * compiled)

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """Times per phase; the effect of warm-up; the first step against the steady state."""
        from bench_harness.stats import with_summary

        frame = with_summary(rows)
        seconds = frame["median_ms"] / 1e3
        if "flops" in frame:
            frame["tflop_s"] = frame["flops"] / seconds / 1e12
            frame["mfu"] = 100 * frame["tflop_s"] / frame["ceiling_tflop_s"]
        frame = roofline.with_roofline(frame)
        if "timer_overhead_ms" in frame:
            frame["timer"] = 100 * frame["timer_overhead_ms"] / frame["median_ms"]
        if "tokens" in frame:
            frame["tokens_s"] = frame["tokens"] / seconds
        subject = (
            "size model d_model num_layers parameters batch sequence precision attention execution "
            "ran phase"
        )
        tables = [
            _COLUMNS.table(
                "Time per phase",
                frame,
                f"{subject} warmup {row_tables.STATISTICS} tokens_s tflop_s mfu "
                f"{row_tables.ROOFLINE} timer status",
                "Wall clock, device synchronised around every sample. The parts of a training step "
                "are synchronised one by one, so they add up to more than the step. MFU refers to "
                "a matrix product measured in the same process and precision; the S×S attention "
                "products are counted in full. Where the timer itself is more than 1 % of the "
                f"median, the figure is marked too short to quote. {roofline.NOTE}",
            )
        ]
        done = row_tables.finished(frame)
        if "warmup" in done and done["warmup"].nunique() > 1:
            tables.append(
                _COLUMNS.table(
                    "Effect of warm-up",
                    done[done["phase"].isin(["forward", "backward", "step"])],
                    f"{subject} warmup mean_ms std_ms median_ms",
                    "Without warm-up the first sample holds memory allocation, kernel loading and "
                    "library initialisation; every case is a fresh process.",
                )
            )
        if "first_ms" in done and done["first_ms"].notna().any():
            first = done[done["first_ms"].notna()].copy()
            ratio = first["first_ms"] / first["median_ms"]
            first["first_ratio"] = ratio.where(row_tables.steady(first))
            tables.append(
                _COLUMNS.table(
                    "First step against steady state",
                    first,
                    f"{subject} first_ms median_ms first_ratio",
                    "The first variant of a case also pays for what all variants share.",
                    {"median_ms": "steady median (ms)"},
                )
            )
        return tables

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """The parts of the training step, stacked, per subject and variant."""
        from bench_harness.stats import with_summary

        done = with_summary(row_tables.finished(rows))
        parts = ["training forward", "backward", "optimizer"]
        if "phase" not in done or not done["phase"].isin(parts).any():
            return []
        done["steady"] = row_tables.steady(done)
        bars = []
        for text, group in row_tables.by(
            done, ["size", "model", "sequence", "warmup", "precision", "attention", "execution"]
        ):
            # Two cases may have measured the same, each beside variants of its own.
            phases = group.drop_duplicates("phase").set_index("phase")
            own = phases.loc[[part for part in parts if part in phases.index]]
            lengths = {str(name): float(time) for name, time in own["median_ms"].items()}
            bars.append(Bar(text, lengths, steady=bool(own["steady"].all())))
            for _, step in phases[phases.index == "step"].iterrows():
                ends = step["ci_low_ms"], step["ci_high_ms"]
                whole = {"whole step": step["median_ms"]}
                bars.append(Bar("whole step", whole, *ends, steady=bool(step["steady"])))
        return [
            Figure(
                "model_step",
                "Parts of a training step",
                Bars("ms", {"": bars}),
                "Medians. The parts are synchronised one by one, the whole step once.",
            )
        ]


def _label(
    subject: Row, variants: list[dict[str, str]], modes: tuple[str, ...], warmup: int
) -> str:
    which = " ".join(
        "+".join(dict.fromkeys(variant[name] for variant in variants)) for name in variants[0]
    )
    # One word: compare leaves the label's words out of the rows' own, as "forward" of a phase.
    ran = "" if modes == MODES else f" modes={'+'.join(modes)}"
    return f"model {subject_label(subject)} {which}{ran} warm-up {warmup}"


def _settings(variant: Mapping[str, str], config: Config) -> Settings:
    """A variant as a way to train, of which this experiment measures the phases."""
    from bench_harness.training.build import plain

    attention = {"attention": "sdpa"} if variant["attention"] == "own" else {}
    compiled: Any = "model" if variant["execution"] == "compiled" else "off"
    return replace(plain({**config, **variant, **attention}), compile=compiled)


def _facts(config: Config, device: torch.device) -> Row:
    """Shape, parameters, tokens, and the operations of one forward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    if "model" in config:
        own = workload_of(config, device, precision=config["variants"][0]["precision"])
        with FlopCounterMode(display=False) as counter:
            own.loss()
        operations = int(counter.get_total_flops())
        return {"parameters": own.parameters(), "forward_flops": operations}
    shape, size = workload.language_model_config(config), (config["batch"], config["sequence"])
    return {
        **workload.shape_row(shape),
        "tokens": size[0] * size[1],
        "forward_flops": sum(forward_flops(shape, *size).values()),
    }


def measure_phases(
    variants: Mapping[str, Settings], config: Config, device: torch.device, progress: Progress
) -> dict[str, dict[str, Samples]]:
    """Samples by variant and phase.

    Each variant is built anew in every round, so that only one is in memory and all meet the same
    state of the machine. Nothing is averaged over ranks, so nothing is proven first, and the very
    first step of a process is measured too.

    Args:
        config: of a case: what is trained, ``modes``, ``warmup``, ``samples`` of a round, and how
            long sampling may go on. Without warm-up there is one round, whose first sample is that
            of a cold start.
    """
    from bench_harness.training.build import training

    timings: dict[str, dict[str, Samples]] = {name: {} for name in variants}
    rounds = in_turns(
        lambda: variants,
        config if config["warmup"] else {},
        lambda: [samples.wall_ms for phases in timings.values() for samples in phases.values()],
    )
    for number, names in rounds:
        for name in names:
            progress(f"round {number + 1}: {name}")
            with training(variants[name], config, device) as steps:
                for index in range(config["warmup"] + config["samples"]):
                    found = _round(steps, config["modes"])
                    _keep(timings[name], found, measured=index >= config["warmup"])
    return timings


def _round(steps: Training, modes: list[str]) -> dict[str, Samples]:
    """Inference, the training step in parts, and the training step as a whole."""
    import torch

    found: dict[str, Samples] = {}

    def phase(name: str) -> Any:
        return record_sample(found.setdefault(name, Samples()), steps.workload.device)

    if "forward" in modes:
        with phase("forward"), torch.no_grad():
            steps.workload.loss(steps.module)
    if "forward-backward" in modes or "step" in modes:
        steps.optimizer.zero_grad()
        with phase("training forward"):
            loss = steps.workload.loss(steps.module)
        with phase("backward"):
            steps.backward(loss)
    if "step" in modes:
        with phase("optimizer"):
            steps.update()
    if "step" in modes or "whole-step" in modes:
        with phase("step"):
            steps.step()
    return found


def _keep(timings: dict[str, Samples], found: dict[str, Samples], *, measured: bool) -> None:
    """Adds the samples of a round; of a warm-up round only the very first time is kept."""
    for phase, samples in found.items():
        kept = timings.setdefault(phase, Samples())
        if kept.first_ms is None:
            kept.first_ms = samples.wall_ms[0]
        if measured:
            kept.extend(samples)
