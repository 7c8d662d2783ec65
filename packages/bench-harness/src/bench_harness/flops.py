"""Floating-point work and bytes, counted from shapes.

One multiply–add counts as two operations. Only matrix products are counted, the usual convention
for utilisation (Chowdhery et al., 2022, appendix B); a backward pass costs twice its forward pass.

Dimensions: B batch, S sequence, D model width, F feed-forward width, H heads, L layers,
V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from basics_model import ModelConfig


def forward_flops(
    shape: ModelConfig, batch: int, sequence: int, *, causal: bool = False
) -> dict[str, int]:
    """Operations of one forward pass by component.

    Args:
        causal: count only the scores on and below the diagonal (about half), as a kernel that
            skips masked tiles computes them. The default counts the full S×S products, as an
            implementation with a mask does.
    """
    tokens, width = batch * sequence, shape.d_model
    scores = sequence * (sequence + 1) // 2 if causal else sequence * sequence
    layers = shape.num_layers
    return {
        "attention projections": layers * tokens * 4 * 2 * width * width,
        "attention scores": layers * batch * 2 * scores * width,
        "attention values": layers * batch * 2 * scores * width,
        "feed-forward": layers * tokens * 3 * 2 * width * shape.d_ff,
        "language-model head": tokens * 2 * width * shape.vocab_size,
    }


def training_flops(shape: ModelConfig, batch: int, sequence: int, *, causal: bool = False) -> int:
    """Operations of forward and backward; the optimizer's element-wise work is not counted."""
    return 3 * sum(forward_flops(shape, batch, sequence, causal=causal).values())


def step_work(
    shape: ModelConfig,
    batch: int,
    sequence: int,
    *,
    recomputed: bool = False,
    keep_attention: bool = False,
) -> dict[str, int]:
    """Operations of one training step with causal attention: matrix products, and attention.

    Args:
        recomputed: blocks run their forward pass twice (activation checkpointing).
        keep_attention: attention does not, because its output is kept.
    """
    forward = forward_flops(shape, batch, sequence, causal=True)
    head = forward["language-model head"]
    blocks = forward["attention projections"] + forward["feed-forward"]
    attention = forward["attention scores"] + forward["attention values"]
    # The backward pass of attention computes the scores again: five products for two.
    return {
        "matrix products": 3 * head + (4 if recomputed else 3) * blocks,
        "attention": attention * 7 // 2 + (attention if recomputed and not keep_attention else 0),
    }


def attention_flops(
    batch: int,
    heads: int,
    sequence: int,
    head_dim: int,
    *,
    causal: bool,
    backward: bool = False,
    value_head_dim: int | None = None,
    window: tuple[int | None, int | None] | None = None,
) -> int:
    """Operations of attention alone: two products forward, five backward (Dao, 2023, section 4.1).

    Causal attention counts half of the S×S scores; with a window only visible scores count.

    Args:
        value_head_dim: of the value, if it is other than that of query and key.
        window: (left, right) visible keys beside the diagonal; None means no limit.
    """
    scores = sequence * sequence / (2 if causal else 1)
    if window is not None:
        left = sequence if window[0] is None else window[0]
        right = 0 if causal else sequence if window[1] is None else window[1]
        scores = sum(min(i, left) + 1 + min(sequence - 1 - i, right) for i in range(sequence))
    value = value_head_dim or head_dim
    widths = 3 * head_dim + 2 * value if backward else head_dim + value
    return int(2 * batch * heads * scores * widths)


def bus_bandwidth_factor(operation: str, world_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth, so that a perfect ring shows the link's own rate.

    The factors are those of nccl-tests: every byte of an all-reduce crosses a link 2(N-1)/N
    times, of a reduce-scatter or all-gather (N-1)/N times, of a broadcast once.

    Raises:
        ValueError: unknown operation.
    """
    factors = {
        "all_reduce": 2 * (world_size - 1) / world_size,
        "reduce_scatter": (world_size - 1) / world_size,
        "all_gather": (world_size - 1) / world_size,
        "broadcast": 1.0,
    }
    if operation not in factors:
        raise ValueError(f"operation must be one of {', '.join(factors)}, but got {operation!r}")
    return factors[operation]
