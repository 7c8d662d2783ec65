"""Training steps: what each way to train costs, in time, exposed communication and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness.core import Case, Figure, Row, Table, option
from bench_harness.distributed import default_world_size, run_on_ranks
from bench_harness.experiments.base import Experiment, SubjectOptions, subject_label
from bench_harness.timing import SamplingOptions
from bench_harness.training import settings
from bench_harness.workload import SIZES, billions

if TYPE_CHECKING:
    import pandas as pd

_PRECISIONS = ("fp32", "tf32", "bf16")


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
    precision: str = option("fp32", "Precision.", choices=_PRECISIONS)
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
    world_size: int | None = option(None, "Ranks; by default 2, or as many as there are GPUs.")
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
        for name in ("rounds", "blocks", "calls"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, but got {getattr(self, name)}. Raise it."
                )
        settings.labels(self.settings())

    def settings(self) -> list[settings.Settings]:
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
        variants = [settings.read(each, defaults) for each in self.variants]
        return settings.with_bounds(variants) if self.lower_bound else variants


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
        """One case per size, batch and context length; all variants in each."""
        chosen = Options(**options)
        how = "rounds blocks calls warmup interval max_seconds profiled all_reduces first_step"
        options = chosen.stored(f"{how} alone nsight coursework")
        world_size = chosen.world_size or default_world_size(options["device"])
        variants = chosen.settings()
        if world_size > 1 and chosen.nsight:  # nothing to see without communication
            variants = [variant for variant in variants if variant.communicates]
        subjects = chosen.subjects(chosen.sizes, chosen.batches, chosen.sequences)
        common: Row = {
            "variants": [variant.table() for variant in variants],
            "world_size": world_size,
            "nnodes": 1,  # as in published rows, whose keys stay
            **options,
        }
        how = " rank 0 alone" * chosen.alone + " first step" * chosen.first_step
        how += " Nsight Systems" if chosen.nsight else " profiled" * chosen.profiled
        return [
            Case(
                experiment=self.name,
                config={**subject, **common, "label": _label(subject, variants, world_size) + how},
                timeout_s=900,
            )
            for subject in subjects
        ]

    def run(self, case: Case, progress: Callable[[str], None]) -> list[Row]:
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
        """By variants, each built, proven and compiled, and their rounds."""
        config, count = case.config, len(case.config["variants"])
        if config["device"] == "cpu":
            return float(2 + count * (0.2 * config["rounds"] + 5 * billions(config)))
        if config["alone"]:
            return 4.0 * count
        return float(10 + count * (8 + 1.5 * config["rounds"]) * (0.4 + 0.3 * billions(config)))

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """Steps, memory, communication, the course's CSV columns, all-reduces."""
        from bench_harness.experiments import train_step_show

        return train_step_show.tables(rows)

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """Step times, memory at its moments, overlap on one time axis."""
        from bench_harness.experiments import train_step_show

        return train_step_show.figures(rows)


def _label(subject: Row, variants: list[settings.Settings], world_size: int) -> str:
    precisions = "+".join(dict.fromkeys(variant.precision for variant in variants))
    compiled = dict.fromkeys(v.compile for v in variants if v.compile != "off")
    parts = [
        f"train-step {subject_label(subject)} {precisions}",
        *(f"compiled {each}" for each in compiled),
    ]
    return " ".join([*parts, f"{world_size} ranks"])
