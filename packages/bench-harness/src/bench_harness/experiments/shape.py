"""Options of experiments with a model: the language model by size, or a user's module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench_harness.core import Row, option
from bench_harness.experiments.base import DeviceOptions
from bench_harness.workload import DIMENSIONS


@dataclass(frozen=True, kw_only=True)
class DimensionOptions(DeviceOptions):
    """Options that change dimensions of the language model's size."""

    d_model: int | None = option(None, "Width; overrides the size's.")
    d_ff: int | None = option(None, "Feed-forward width; overrides the size's.")
    num_layers: int | None = option(None, "Number of blocks; overrides the size's.")
    num_heads: int | None = option(None, "Attention heads; overrides the size's.")

    def dimensions(self) -> Row:
        """Those that were given, as they stand in a case's configuration."""
        return {name: value for name in DIMENSIONS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(DimensionOptions):
    """Options that say what is trained: a user's model, or the dimensions of the language model.

    Dimensions that are not given come from the model's size.
    """

    model: str | None = option(None, "package.module:factory of an nn.Module to measure instead.")
    model_args: dict[str, Any] | None = option(  # noqa: RUF009 - its default is None
        None, "The factory's keyword arguments, as layers=2,width=64."
    )
    input: str | None = option(
        None, "Its input, as input_ids=int64[4x128]<1000; {a=…,b=…} is a dictionary."
    )
    target: str | None = option(None, "What the loss takes beside the output, as int64[4]<10.")
    loss: str | None = option(
        None, "package.module:function of output and target; else the output's own loss, or mean."
    )
    vocab_size: int = option(10_000, "Vocabulary.")

    def __post_init__(self) -> None:
        if (self.model is None) != (self.input is None):
            raise ValueError(
                f"model and input must be given together, but got model={self.model!r} and "
                f"input={self.input!r}. Give both or neither."
            )
        for name in ("model_args", "target"):
            if self.model is None and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} must come with model, but got {getattr(self, name)!r}. Give --model "
                    "and --input."
                )
        if self.target is not None and self.own_loss is None:
            raise ValueError(
                f"target must come with loss, but got {self.target!r}. Give --loss, as "
                "torch.nn.functional:cross_entropy."
            )

    @property
    def own_loss(self) -> str | None:
        """The user's loss function; None where the model's output decides."""
        return self.loss if self.loss is not None and ":" in self.loss else None

    def subjects(
        self, sizes: Sequence[str], batches: Sequence[int], sequences: Sequence[int]
    ) -> list[Row]:
        """What is measured, as cases' configurations keep it: a user's model, or every size."""
        if self.model is not None:
            own = {"model_args": self.model_args, "target": self.target, "loss": self.own_loss}
            given = {name: value for name, value in own.items() if value is not None}
            return [{"model": self.model, "input": self.input, **given}]
        return [
            {
                "size": size,
                **self.dimensions(),
                "vocab_size": self.vocab_size,
                "batch": batch,
                "sequence": sequence,
            }
            for size in sizes
            for batch in batches
            for sequence in sequences
        ]


def subject_label(subject: Mapping[str, Any], *, batch: bool = True) -> str:
    """A subject's part of a case's label."""
    if "model" in subject:
        arguments = subject.get("model_args") or {}
        given = [subject["model"], *(f"{key}={value}" for key, value in arguments.items())]
        return " ".join([*given, str(subject["input"])])
    size = f"{subject['size']} b{subject['batch']}" if batch else str(subject["size"])
    return f"{size} s{subject['sequence']}"
