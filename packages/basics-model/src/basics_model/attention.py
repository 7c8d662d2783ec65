"""Causal attention over (batch, heads, seq, head_dim), and the rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

Attention: TypeAlias = "Callable[[Tensor, Tensor, Tensor], Tensor]"
"""Maps query, key and value, each (batch, heads, seq, head_dim), to an output of that shape.

All have one dtype. The mask is the callable's own: position i sees positions 0 to i.
"""


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention by PyTorch's ``scaled_dot_product_attention``, of type :data:`Attention`."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention as its formula reads: O = softmax(Q·Kᵀ / √head_dim + mask)·V.

    It is of type :data:`Attention` and stores the seq × seq scores. Its three steps are ranges in a
    profile: ``attention.scores``, ``attention.softmax`` and ``attention.output``.
    """
    with record_function("attention.scores"):
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    with record_function("attention.softmax"):
        weights = torch.softmax(scores, dim=-1)
    with record_function("attention.output"):
        # Autocast leaves the softmax in fp32, so the weights may be wider than the values.
        return weights.to(value.dtype) @ value


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding (Su et al., 2021, arXiv:2104.09864).

    Position i turns pair k of a head by the angle i·theta^(-2k / head_dim).

    Args:
        positions: (seq,) integers, ``torch.arange(seq)`` for a whole sequence.
        head_dim: even.
        theta: the base.

    Returns:
        Two fp32 tensors (seq, head_dim): the cosine of each pair's angle, twice, and its sine,
        first negated, then as it is.
    """
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequencies = theta ** (-pairs / head_dim)
    angles = positions.float()[:, None] * frequencies  # [seq, head_dim / 2]
    cos, sin = angles.cos(), angles.sin()
    return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[2k], x[2k + 1]) of the last dimension by the tables' angles.

    A pair (a, b) becomes (a·cos - b·sin, b·cos + a·sin): the pair times the cosine plus the swapped
    pair times the signed sine. That is four kernels, where slicing out both halves takes eight.

    Args:
        x: (..., seq, head_dim).
        cos, sin: (seq, head_dim), from :func:`rotary_tables`.

    Returns:
        (..., seq, head_dim) in x's dtype and memory order, computed in the tables' fp32 or wider.
    """
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)
