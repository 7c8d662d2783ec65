"""Attention by its definition: the oracle that every tier is compared to.

Nothing is tiled, fused or skipped: the whole score matrix exists, every formula appears once, and
autograd supplies the gradients. Use it to check results, not to run models.

    S = scale · Q Kᵀ                         assignment, Eq. 4; soft-cap and biases follow
    P = softmax(S)                           Eq. 5
    O = P V                                  Eq. 6
    L = log Σ_j exp(S_ij)                    Eq. 12, natural logarithm

The same quantities are what FlashAttention-2 (Dao 2023, arXiv:2307.08691) computes tile by tile.

Dimensions: B batch, H query heads, G key/value heads (G divides H), N_q queries, N_k keys,
D head_dim of query and key, E head_dim of value, T tokens of a packed batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashattn_triton.mask_and_bias import NOTHING, Given, joined_parts, parts_of_batch
from flashattn_triton.problem import (
    Problem,
    as_given,
    diagonal_offset,
    heads_first,
    without_autocast,
)


def visibility_mask(
    n_queries: int, n_keys: int, problem: Problem, device: torch.device | str | None = None
) -> Tensor:
    """Which key each query sees.

    The diagonal of query i is key i ("none" and "top-left"), or key i + N_k - N_q ("bottom-right"
    and "bottom-right-window", so that the last query meets the last key). A causal mask ("top-left"
    and "bottom-right") keeps the keys up to the diagonal; a window (left, right) keeps those from
    diagonal - left to diagonal + right; both together keep the intersection.

    Returns:
        (N_q, N_k) bool, True where the key is visible.
    """
    queries = torch.arange(n_queries, device=device)[:, None]
    keys = torch.arange(n_keys, device=device)[None, :]
    # From what was asked, not from Problem's band, which every other tier computes with.
    diagonal = queries + (n_keys - n_queries if problem.bottom_right else 0)
    visible = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
    if problem.causal in ("top-left", "bottom-right"):
        visible &= keys <= diagonal
    left, right = problem.window
    if left is not None:
        visible &= keys >= diagonal - left
    if right is not None:
        visible &= keys <= diagonal + right
    return visible


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    problem: Problem,
    given: Given = NOTHING,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention output and logsumexp with the full score matrix (Eq. 4-6, 12).

    Differentiable in query, key and value, through the output and through the logsumexp. A query
    that sees no key has output 0, logsumexp -inf (or the sink), and contributes no gradient.

    Args:
        query: (B, H, N_q, D), any floating dtype.
        key: (B, G, N_k, D); query head h reads key/value head h // (H / G).
        value: (B, G, N_k, E).
        problem: mask, scale and soft-cap.
        given: ALiBi slopes, prefixes, a bias and sinks, both differentiable too.
        dtype: everything is computed and returned in it. ``torch.float64`` is the oracle of
            float32 kernels; a half type gives "the same computation in PyTorch at the same
            precision", the yardstick of half-precision kernels.

    Returns:
        Output (B, H, N_q, E) and logsumexp (B, H, N_q), both in ``dtype``.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    key, value = (x.to(dtype).repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    scores = query.to(dtype) @ key.transpose(-2, -1) * problem.scale  # (B, H, N_q, N_k)
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    n_queries, n_keys = query.shape[2], key.shape[2]
    offset = diagonal_offset(n_queries, n_keys, problem)
    added = given.added((0, n_queries), (0, n_keys), offset, dtype)
    if added is not None:
        scores = scores + added
    visible = visibility_mask(n_queries, n_keys, problem, query.device)
    if given.prefix_lengths is not None:
        prefixes = given.prefix_lengths[:, None, None, None]
        visible = visible | (torch.arange(n_keys, device=query.device) < prefixes)
    scores = scores.masked_fill(~visible, float("-inf"))
    # Neither the maximum nor the sum of a row without visible keys may reach a logarithm or a
    # division, or its gradients become NaN: such rows are computed as if max = 0 and sum = 1.
    # The extra column lets amax accept N_k = 0. The shift cancels, so it carries no gradient.
    row_max = F.pad(scores.detach(), (0, 1), value=float("-inf")).amax(dim=-1)
    sinks = given.sinks
    if sinks is not None:
        sinks = sinks.to(dtype)[:, None]  # (H, 1)
        row_max = torch.maximum(row_max, sinks.detach())
    empty = row_max == float("-inf")
    row_max = row_max.masked_fill(empty, 0.0)
    weights = torch.exp(scores - row_max[..., None])
    row_sum = weights.sum(dim=-1)
    if sinks is not None:
        row_sum = row_sum + torch.exp(sinks - row_max)
    row_sum = row_sum.masked_fill(empty, 1.0)
    out = weights / row_sum[..., None] @ value
    beside_max = torch.zeros_like(row_sum) if problem.largest_only else torch.log(row_sum)
    logsumexp = (row_max + beside_max).masked_fill(empty, float("-inf"))
    return out, logsumexp


def attend_by_definition(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, given: Given, *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """:func:`attention_reference` of the batch, or of each packed sequence, in the given layout.

    ``given``: checked and in one shape. ``dtype`` None: everything is computed in fp32, or in
    float64 for such tensors, and the output is rounded to the problem's or query's dtype. Tokens
    behind the last sequence get 0 and -inf.
    """
    out_dtype = dtype or problem.out_dtype or query.dtype
    dtype = dtype or torch.promote_types(query.dtype, torch.float32)
    with without_autocast(query):
        parts = [
            attention_reference(q, k, v, problem, own, dtype=dtype)
            for (q,), (k, v), own in parts_of_batch(problem, given, (query,), (key, value))
        ]
    outs, lses = zip(*parts, strict=True)
    n_queries = heads_first(query, problem.layout).shape[2]
    out, lse = joined_parts(outs, n_queries), joined_parts(lses, n_queries, float("-inf"))
    return as_given(out, problem.layout).to(out_dtype), as_given(lse, problem.layout)
