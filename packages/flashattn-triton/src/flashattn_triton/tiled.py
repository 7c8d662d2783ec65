"""FlashAttention-2 in plain PyTorch, tile by tile: the readable version, and the CPU tier.

Algorithm 1 (forward, online softmax) and Algorithm 2 (backward, P recomputed from the logsumexp)
of FlashAttention-2 (Dao 2023, arXiv:2307.08691), with every mask and option of the Triton
kernels. One tile of scores exists at a time; tiles in which no key is visible are never visited;
all arithmetic is fp32 (fp64 for fp64 inputs), whatever the dtype of the inputs.

The functions take and return data: gradients are computed by ``tiled_backward``, not by autograd.

Dimensions: B batch, H query heads, G key/value heads, R = H / G, N_q queries, N_k keys,
D head_dim of query and key, E head_dim of value, T tokens of a packed batch. Inside, tensors are
folded as :mod:`flashattn_triton.score_tiles` says.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashattn_triton.mask_and_bias import NO_MASK_OR_BIAS, MaskAndBias
from flashattn_triton.mistakes import check_tensors
from flashattn_triton.problem import Problem
from flashattn_triton.score_tiles import ScoreTiles, accumulation_dtype, fold, unfold

# Large enough that the matrix products, not the Python loop, take the time on a CPU; small enough
# that a causal mask still skips nearly half of the tiles of a few hundred tokens.
QUERY_TILE = 128
KEY_TILE = 256


@torch.no_grad()
def tiled_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    problem: Problem,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
    /,
    *,
    query_tile: int = QUERY_TILE,
    key_tile: int = KEY_TILE,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1: attention output and logsumexp, one tile of scores at a time.

    Args:
        query: (B, H, N_q, D), floating, any strides.
        key: (B, G, N_k, D); query head h reads key/value head h // (H / G).
        value: (B, G, N_k, E).
        problem: mask, scale and soft-cap. ``deterministic`` changes nothing: the order of all
            sums is fixed.
        mask_and_bias: ALiBi slopes, a bias, prefixes and sinks.
        query_tile: queries in a tile.
        key_tile: keys in a tile.

    Returns:
        Output (B, H, N_q, E) in the problem's or the query's dtype, and natural-log logsumexp
        (B, H, N_q) in fp32 (fp64 for fp64 inputs). A query that sees no key has output 0 and
        logsumexp -inf.
    """
    score_tiles = ScoreTiles(query, key, problem, mask_and_bias)
    with torch.autocast(query.device.type, enabled=False):
        v = fold(value, score_tiles.groups)
        out = v.new_zeros(*score_tiles.q.shape[:2], v.shape[-1])
        lse = v.new_full(score_tiles.q.shape[:2], float("-inf"))
        for start, end in tiles(query.shape[2], query_tile):
            rows = score_tiles.rows(start, end)
            row_max = score_tiles.sinks(start, end)  # m
            row_sum = (~torch.isneginf(row_max)).to(row_max.dtype)  # l: a sink is a key before all
            acc = torch.zeros_like(out[:, rows])
            for k_start, k_end in score_tiles.band.key_tiles(start, end, key_tile):
                if score_tiles.hides(k_start, k_end):
                    continue
                scores, _ = score_tiles.scores((start, end), (k_start, k_end))
                new_max = torch.maximum(row_max, scores.amax(dim=-1))
                # A row that has seen no key yet has m = -inf, and -inf - (-inf) is NaN.
                shift = new_max.masked_fill(torch.isneginf(new_max), 0.0)
                p = torch.exp(scores - shift[..., None])
                decay = torch.exp(row_max - shift)
                row_sum = row_sum * decay + p.sum(dim=-1)
                acc = torch.baddbmm(acc * decay[..., None], p, v[:, k_start:k_end])
                row_max = new_max
            # Rows without visible keys: 0 / 1 = 0, and -inf + log 0 = -inf.
            out[:, rows] = acc / row_sum.masked_fill(row_sum == 0, 1.0)[..., None]
            lse[:, rows] = row_max + (0.0 if problem.largest_only else torch.log(row_sum))
        groups = score_tiles.groups
        out = unfold(out, query, groups).to(problem.out_dtype or query.dtype)
        return out, unfold(lse, query, groups)


@torch.no_grad()
def tiled_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    problem: Problem,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
    /,
    *,
    query_tile: int = QUERY_TILE,
    key_tile: int = KEY_TILE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: gradients of query, key and value, with P recomputed from the logsumexp.

    The gradient of the logsumexp enters through D: with dL given, dS = P ∘ (dP - (D - dL)).

    Args:
        query: (B, H, N_q, D), as in :func:`tiled_forward`, as are key, value, problem and
            mask_and_bias.
        key: (B, G, N_k, D).
        value: (B, G, N_k, E).
        out: (B, H, N_q, E), what :func:`tiled_forward` returned.
        lse: (B, H, N_q), what :func:`tiled_forward` returned.
        grad_out: (B, H, N_q, E), dO.
        grad_lse: (B, H, N_q), dL, or None for zero.
        problem: the same as in the forward pass.
        mask_and_bias: the same as in the forward pass.
        query_tile: queries in a tile.
        key_tile: keys in a tile.

    Returns:
        dQ, dK, dV, shaped and typed like query, key, value, accumulated in fp32 (fp64).
    """
    score_tiles = ScoreTiles(query, key, problem, mask_and_bias)
    groups, q, k = score_tiles.groups, score_tiles.q, score_tiles.k
    with torch.autocast(query.device.type, enabled=False):
        v, do = fold(value, groups), fold(grad_out, groups)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys, p, ds, slope in _gradients_of_scores(
            score_tiles, value, out, lse, grad_out, grad_lse, (query_tile, key_tile)
        ):
            rows, columns = score_tiles.rows(*queries), slice(*keys)
            dv[:, columns] += torch.bmm(p.transpose(1, 2), do[:, rows])
            if slope is not None:
                ds = ds * slope
            dq[:, rows] += torch.bmm(ds, k[:, columns])
            dk[:, columns] += torch.bmm(ds.transpose(1, 2), q[:, rows])
        dq *= problem.scale  # q was scaled in advance, which serves S and dK; dQ needs its own
        pairs = zip((dq, dk, dv), (query, key, value), strict=True)
        dq, dk, dv = (unfold(grad, x, groups).to(x.dtype) for grad, x in pairs)
        return dq, dk, dv


@torch.no_grad()
def tiled_bias_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    problem: Problem,
    mask_and_bias: MaskAndBias,
    /,
    *,
    query_tile: int = QUERY_TILE,
    key_tile: int = KEY_TILE,
) -> Tensor:
    """Gradient of ``mask_and_bias.bias``: dS, summed over the dimensions that share a bias.

    Takes the arguments of :func:`tiled_backward`.

    Returns:
        The gradient, shaped and typed like the bias, accumulated in fp32 (fp64).
    """
    bias = mask_and_bias.bias
    assert bias is not None
    total = torch.zeros(bias.shape, dtype=accumulation_dtype(query.dtype), device=bias.device)
    score_tiles = ScoreTiles(query, key, problem, mask_and_bias)
    with torch.autocast(query.device.type, enabled=False):
        for queries, keys, _, ds, _ in _gradients_of_scores(
            score_tiles, value, out, lse, grad_out, grad_lse, (query_tile, key_tile)
        ):
            rows = slice(*queries) if bias.shape[2] > 1 else slice(None)
            columns = slice(*keys) if bias.shape[3] > 1 else slice(None)
            target = total[:, :, rows, columns]
            target += score_tiles.unfold_tile(ds, queries).sum_to_size(target.shape)
    return total.to(bias.dtype)


def _gradients_of_scores(
    score_tiles: ScoreTiles,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    sizes: tuple[int, int],
) -> Iterator[tuple[tuple[int, int], tuple[int, int], Tensor, Tensor, Tensor | None]]:
    """Query range, key range, P, dS behind the soft-cap, and its slope, for each visible tile.

    ``sizes``: queries and keys of a tile.
    """
    v, do = fold(value, score_tiles.groups), fold(grad_out, score_tiles.groups)
    lse = fold(lse, score_tiles.groups)
    delta = (do * fold(out, score_tiles.groups)).sum(dim=-1)  # D = rowsum(dO ∘ O)
    if grad_lse is not None:
        delta = delta - fold(grad_lse, score_tiles.groups)
    empty = torch.isneginf(lse)
    delta = delta.masked_fill(empty, 0.0)
    lse = lse.masked_fill(empty, float("inf"))  # makes P = exp(S - L) zero in such rows
    for keys in tiles(value.shape[2], sizes[1]):
        if score_tiles.hides(*keys):
            continue
        for queries in score_tiles.band.query_tiles(*keys, sizes[0]):
            rows = score_tiles.rows(*queries)
            scores, slope = score_tiles.scores(queries, keys)
            p = torch.exp(scores - lse[:, rows, None])
            dp = torch.bmm(do[:, rows], v[:, slice(*keys)].transpose(1, 2))
            yield queries, keys, p, p * (dp - delta[:, rows, None]), slope


def tiles(length: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges that cut ``length`` into pieces of at most ``size``."""
    for start in range(0, length, size):
        yield start, min(start + size, length)


def sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Where each sequence lies in the packed queries and in the packed keys."""
    for (q_start, q_end), (k_start, k_end) in zip(
        itertools.pairwise(cu_seqlens_q.tolist()),
        itertools.pairwise(cu_seqlens_k.tolist()),
        strict=True,
    ):
        yield slice(q_start, q_end), slice(k_start, k_end)


def batched(x: Tensor, tokens: slice) -> Tensor:
    """Tokens of a packed (T, H, D) tensor as a batch of one: (1, H, N, D)."""
    return x[tokens].transpose(0, 1)[None]


@torch.no_grad()
def tiled_forward_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    problem: Problem,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> tuple[Tensor, Tensor]:
    """:func:`tiled_forward` of each sequence of a packed batch.

    Args:
        query: (T_q, H, D), the sequences' tokens one after another.
        key: (T_k, G, D).
        value: (T_k, G, E).
        cu_seqlens_q: (B + 1,) int32: 0, where each next sequence starts in ``query``, and T_q.
        cu_seqlens_k: (B + 1,) int32, the same for key and value. Sequences may be empty. Both are
            read on the host, which synchronises if they are on an accelerator.
        problem: as in :func:`tiled_forward`; the diagonal is each sequence's own.
        mask_and_bias: slopes and prefixes of each sequence; no bias.

    Returns:
        Output (T_q, H, E) in the problem's or the query's dtype, logsumexp (H, T_q) in fp32 (fp64).
    """
    out = query.new_zeros(*query.shape[:2], value.shape[-1], dtype=problem.out_dtype)
    lse = torch.full(
        (query.shape[1], query.shape[0]),
        float("-inf"),
        dtype=accumulation_dtype(query.dtype),
        device=query.device,
    )
    for i, (q_span, k_span) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k)):
        if q_span.start == q_span.stop and k_span.start == k_span.stop:  # there may be thousands
            continue
        q, k, v = batched(query, q_span), batched(key, k_span), batched(value, k_span)
        o_s, lse_s = tiled_forward(q, k, v, problem, mask_and_bias.sequence(i))
        out[q_span], lse[:, q_span] = o_s[0].transpose(0, 1), lse_s[0]
    return out, lse


@torch.no_grad()
def tiled_backward_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    problem: Problem,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`tiled_backward` of each sequence of a packed batch.

    Shapes are those of :func:`tiled_forward_varlen`: ``out`` and ``grad_out`` (T_q, H, E), ``lse``
    and ``grad_lse`` (H, T_q).

    Returns:
        dQ, dK, dV, shaped and typed like query, key, value.
    """
    dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for i, (q_span, k_span) in enumerate(sequences(cu_seqlens_q, cu_seqlens_k)):
        if q_span.start == q_span.stop and k_span.start == k_span.stop:  # there may be thousands
            continue
        gradients = tiled_backward(
            batched(query, q_span),
            batched(key, k_span),
            batched(value, k_span),
            batched(out, q_span),
            lse[None, :, q_span],
            batched(grad_out, q_span),
            None if grad_lse is None else grad_lse[None, :, q_span],
            problem,
            mask_and_bias.sequence(i),
        )
        spans = (q_span, k_span, k_span)
        for whole, part, span in zip((dq, dk, dv), gradients, spans, strict=True):
            whole[span] = part[0].transpose(0, 1)
    return dq, dk, dv


class FlashAttention2PyTorch(torch.autograd.Function):
    """``FlashAttention2PyTorch.apply(Q, K, V, is_causal=False)``: both algorithms as a Function.

    Q is (..., N_q, D), K (..., N_k, D), V (..., N_k, E), with the same leading dimensions (at
    least one), dtype and device; the output is (..., N_q, E). The scale is 1/√D; ``is_causal`` lets
    query i see the keys j <= i. Saves L, Q, K, V, O; L is the natural-log logsumexp, shaped
    ``Q.shape[:-1]``.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit together.
    """

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False) -> Tensor:
        """Computes the output tile by tile (Algorithm 1)."""
        check_assignment_inputs(Q, K, V)
        ctx.problem = Problem(
            causal="top-left" if is_causal else "none", scale=1 / math.sqrt(Q.shape[-1])
        )
        out, lse = tiled_forward(as_batch(Q), as_batch(K), as_batch(V), ctx.problem)
        out = out.reshape(*Q.shape[:-1], V.shape[-1])
        ctx.save_for_backward(lse.reshape(Q.shape[:-1]), Q, K, V, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Computes the gradients tile by tile, from recomputed probabilities (Algorithm 2)."""
        L, Q, K, V, out = ctx.saved_tensors
        dQ, dK, dV = tiled_backward(
            as_batch(Q),
            as_batch(K),
            as_batch(V),
            as_batch(out),
            L.reshape(-1, 1, L.shape[-1]),
            as_batch(dO),
            None,
            ctx.problem,
        )
        return dQ.reshape(Q.shape), dK.reshape(K.shape), dV.reshape(V.shape), None


def as_batch(x: Tensor) -> Tensor:
    """(..., N, D) to (B, 1, N, D)."""
    return x.reshape(-1, 1, *x.shape[-2:])


def check_assignment_inputs(Q: Tensor, K: Tensor, V: Tensor) -> None:
    """Raises a ValueError unless Q, K, V are what :class:`FlashAttention2PyTorch` documents."""
    check_tensors(Q=Q, K=K, V=V)
    for name, x in (("Q", Q), ("K", K), ("V", V)):
        if x.dim() < 3:
            raise ValueError(
                f"{name} must have at least three dimensions (..., sequence, head_dim), but got "
                f"shape {tuple(x.shape)}. Add a batch dimension with {name}[None]."
            )
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, but got {x.dtype}. Convert it first.")
        if x.dtype != Q.dtype:
            raise ValueError(
                f"Q, K, V must share one dtype, but got {Q.dtype} for Q and {x.dtype} for {name}. "
                "Convert one of them."
            )
        if x.device != Q.device:
            raise ValueError(
                f"Q, K, V must be on one device, but got {Q.device} for Q and {x.device} for "
                f"{name}. Move one of them."
            )
        if x.shape[:-2] != Q.shape[:-2]:
            raise ValueError(
                f"Q, K, V must have the same leading dimensions, but got {tuple(Q.shape)} for Q "
                f"and {tuple(x.shape)} for {name}. Expand {name} first."
            )
    if K.shape[-1] != Q.shape[-1]:
        raise ValueError(
            f"K must have Q's head_dim {Q.shape[-1]}, but got shape {tuple(K.shape)}. Project K."
        )
    if V.shape[-2] != K.shape[-2]:
        raise ValueError(
            f"V must have K's sequence length {K.shape[-2]}, but got shape {tuple(V.shape)}. Pass "
            "one value for each key."
        )
