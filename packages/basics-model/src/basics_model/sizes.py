"""Configuration of the language model, its named sizes, and the operations of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypedDict, Unpack


def require_integer(name: str, value: object, *, least: int) -> None:
    """Raises ValueError, naming the argument, unless it is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, but got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Hyperparameters of a :class:`basics_model.TransformerLM`.

    Attributes:
        vocab_size: number of token ids; valid ids are 0 to ``vocab_size - 1``.
        context_length: tokens per training sequence, and the window that generation looks back
            over. The model itself accepts sequences of any length.
        d_model: width of the residual stream.
        d_ff: inner width of the feed-forward layers.
        num_layers: number of blocks.
        num_heads: attention heads; each has ``d_model / num_heads`` dimensions.
        rope_theta: base of the rotary position frequencies.

    Raises:
        ValueError: a count below 1, a head dimension that is not even, ``rope_theta`` not above 0.
    """

    vocab_size: int = 10_000
    context_length: int = 256
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "rope_theta":
                require_integer(name, value, least=1)
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta must be above 0, but got {self.rope_theta!r}.")
        if self.d_model % (2 * self.num_heads):
            raise ValueError(
                "num_heads must divide d_model into even dimensions for rotary embeddings, but got "
                f"d_model={self.d_model} and num_heads={self.num_heads}. Change one of them."
            )

    @property
    def head_dim(self) -> int:
        """Dimensions of one attention head."""
        return self.d_model // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Number of trainable values: embedding, blocks, final norm, and an untied LM head."""
        attention = 4 * self.d_model**2
        feed_forward = 3 * self.d_model * self.d_ff
        norms = 2 * self.d_model
        vocabulary = 2 * self.vocab_size * self.d_model
        return self.num_layers * (attention + feed_forward + norms) + self.d_model + vocabulary


SizeName: TypeAlias = Literal["small", "medium", "large", "xl", "2.7B", "2026/xl", "2026/10B", "8B"]
"""Names that :func:`model_config` takes: the keys of :data:`SIZES`."""

SIZES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "small": ModelConfig(d_model=768, d_ff=3072, num_layers=12, num_heads=12),
        "medium": ModelConfig(d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
        "large": ModelConfig(d_model=1280, d_ff=5120, num_layers=36, num_heads=20),
        "xl": ModelConfig(d_model=1600, d_ff=6400, num_layers=48, num_heads=25),
        "2.7B": ModelConfig(d_model=2560, d_ff=10240, num_layers=32, num_heads=32),
        "2026/xl": ModelConfig(d_model=2560, d_ff=10240, num_layers=32, num_heads=32),
        "2026/10B": ModelConfig(d_model=4608, d_ff=12288, num_layers=50, num_heads=36),
        "8B": ModelConfig(d_model=4096, d_ff=11008, num_layers=34, num_heads=32),
    }
)
"""The named sizes, all with a vocabulary of 10,000 tokens and a context of 256.

The first five are those of the assignment's 2025 edition. Names that begin with ``2026/`` are those
of the 2026 edition, in which "xl" is another size. "8B" is the model of that edition's leaderboard,
which has 8,125,698,048 parameters with its own vocabulary of 151,936 tokens.
"""


class ConfigChanges(TypedDict, total=False):
    """Fields of a :class:`ModelConfig` that replace those of a named size, except where None."""

    vocab_size: int | None
    context_length: int | None
    d_model: int | None
    d_ff: int | None
    num_layers: int | None
    num_heads: int | None
    rope_theta: float | None


def model_config(name: SizeName, **changes: Unpack[ConfigChanges]) -> ModelConfig:
    """Returns the configuration of a named size, with some of its fields replaced.

    Args:
        name: a key of :data:`SIZES`.
        changes: fields of :class:`ModelConfig`, for example ``num_layers=2`` for a shallow model of
            the same width. None keeps the size's own value.

    Raises:
        ValueError: the name is not in :data:`SIZES`, or the resulting configuration is invalid.
    """
    if name not in SIZES:
        raise ValueError(f"name must be one of {', '.join(SIZES)}, but got {name!r}.")
    given: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    return replace(SIZES[name], **given)


def model_flops(config: ModelConfig, batch: int, seq: int) -> int:
    """Returns the floating-point operations of the matrix products in one forward pass.

    A product of (m, k) and (k, n) takes 2·m·k·n operations. Scores and weighted values are counted
    in full, although the mask discards half. Backward computes two products for each of forward's,
    so a step takes three times this number.
    """
    tokens = batch * seq
    projections = 4 * 2 * tokens * config.d_model * config.d_model  # query, key, value, output
    attention = 2 * 2 * tokens * seq * config.d_model  # scores, weighted values; of all heads
    feed_forward = 3 * 2 * tokens * config.d_model * config.d_ff  # gate, up, down
    head = 2 * tokens * config.d_model * config.vocab_size
    return config.num_layers * (projections + attention + feed_forward) + head
