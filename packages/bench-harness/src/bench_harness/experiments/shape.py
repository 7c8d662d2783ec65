"""The options of every experiment that builds a language model: its dimensions."""

from __future__ import annotations

from dataclasses import dataclass

from bench_harness.case import Row
from bench_harness.experiments.base import option
from bench_harness.workload import DIMENSIONS


@dataclass(frozen=True, kw_only=True)
class ShapeOptions:
    """Dimensions given explicitly; those that are not come from the model's size."""

    d_model: int | None = option(None, "Width; overrides the size's.")
    d_ff: int | None = option(None, "Feed-forward width; overrides the size's.")
    num_layers: int | None = option(None, "Number of blocks; overrides the size's.")
    num_heads: int | None = option(None, "Attention heads; overrides the size's.")
    vocab_size: int = option(10_000, "Vocabulary.")

    def shape(self) -> Row:
        """The given dimensions and the vocabulary, as they stand in a case's configuration."""
        given = {name: value for name in DIMENSIONS if (value := getattr(self, name)) is not None}
        return {**given, "vocab_size": self.vocab_size}
