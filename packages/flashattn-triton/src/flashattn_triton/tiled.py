"""FlashAttention-2 in plain PyTorch, tile by tile: the readable version, and the CPU tier.

Algorithm 1 (forward, online softmax) and Algorithm 2 (backward, P recomputed from the logsumexp)
of FlashAttention-2 (Dao 2023, arXiv:2307.08691), with every mask and option of the Triton
kernels. One tile of scores exists at a time; tiles in which no key is visible are never visited;
all arithmetic is fp32 (fp64 for fp64 inputs), whatever the dtype of the inputs.

The functions take and return data: gradients are computed by ``tiled_backward``, not by autograd.

Dimensions: B batch, H query heads, G key/value heads, R = H / G, N_q queries, N_k keys,
D head_dim of query and key, E head_dim of value, T tokens of a packed batch. Inside, the heads
that share a key head become rows of one matrix, so that keys and values are never repeated:
queries are (B·G, N_q·R, D), with row i·R + r for query i of the r-th head of the group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashattn_triton.mistakes import check_tensors
from flashattn_triton.options import AttentionOptions, diagonal_offset

# Large enough that the matrix products, not the Python loop, take the time on a CPU; small enough
# that a causal mask still skips nearly half of the tiles of a few hundred tokens.
QUERY_TILE = 128
KEY_TILE = 256


@dataclass(frozen=True)
class Band:
    """Query i sees the keys from i + low to i + high: causal masks and windows are both this."""

    n_queries: int
    n_keys: int
    low: int
    high: int

    @classmethod
    def of(cls, n_queries: int, n_keys: int, options: AttentionOptions) -> Band:
        """The band of :func:`flashattn_triton.reference.visibility_mask`."""
        diagonal = diagonal_offset(n_queries, n_keys, options)
        left, right = options.band
        # With low = -N_q, or high = N_k, no key is out of any query's sight.
        low = -n_queries if left is None else diagonal - left
        high = n_keys if right is None else diagonal + right
        return cls(n_queries, n_keys, low, high)

    def key_tiles(self, query_start: int, query_end: int, size: int) -> Iterator[tuple[int, int]]:
        """Key ranges of which some key is visible to some of the given queries."""
        first = max(0, query_start + self.low)
        last = min(self.n_keys, query_end + self.high)
        for start in range(first, last, size):
            yield start, min(start + size, last)

    def query_tiles(self, key_start: int, key_end: int, size: int) -> Iterator[tuple[int, int]]:
        """Query ranges of which some query sees some of the given keys."""
        first = max(0, key_start - self.high)
        last = min(self.n_queries, key_end - self.low)
        for start in range(first, last, size):
            yield start, min(start + size, last)

    def hidden(
        self, queries: tuple[int, int], keys: tuple[int, int], like: Tensor
    ) -> Tensor | None:
        """(queries, 1, keys) bool, True where the key is not visible; None if all are."""
        (q_start, q_end), (k_start, k_end) = queries, keys
        if k_start >= q_end - 1 + self.low and k_end - 1 <= q_start + self.high:
            return None
        i = torch.arange(q_start, q_end, device=like.device)[:, None, None]
        j = torch.arange(k_start, k_end, device=like.device)
        return (j < i + self.low) | (j > i + self.high)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that scores, sums and the logsumexp have for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fold(x: Tensor, groups: int) -> Tensor:
    """(B, H, N, ...) to (B·G, N·R, ...) in the accumulation dtype."""
    x = x.to(accumulation_dtype(x.dtype)).unflatten(1, (groups, -1)).transpose(2, 3)
    return x.flatten(2, 3).flatten(0, 1)


def unfold(x: Tensor, like: Tensor, groups: int) -> Tensor:
    """(B·G, N·R, ...) to a contiguous (B, H, N, ...), where ``like`` is (B, H, N, ...)."""
    batch, heads, length = like.shape[:3]
    x = x.unflatten(1, (length, heads // groups)).unflatten(0, (batch, groups))
    return x.transpose(2, 3).flatten(1, 2).contiguous()


def score_tile(
    query: Tensor, key: Tensor, hidden: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Scores of one tile, -inf where hidden, and the slope of the soft-cap at each of them.

    ``query`` (already scaled) is (B·G, q·R, D) and ``key`` (B·G, k, D); both results are
    (B·G, q·R, k), the slope None without a soft-cap.
    """
    scores = torch.bmm(query, key.transpose(1, 2))
    slope = None
    if softcap is not None:
        capped = torch.tanh(scores / softcap)
        scores, slope = capped * softcap, 1 - capped.square()
    if hidden is not None:
        rows = scores.unflatten(1, (hidden.shape[0], -1))  # (B·G, q, R, k)
        scores = rows.masked_fill(hidden, float("-inf")).flatten(1, 2)
    return scores, slope


@torch.no_grad()
def tiled_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    query_tile: int = QUERY_TILE,
    key_tile: int = KEY_TILE,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1: attention output and logsumexp, one tile of scores at a time.

    Args:
        query: (B, H, N_q, D), floating, any strides.
        key: (B, G, N_k, D); query head h reads key/value head h // (H / G).
        value: (B, G, N_k, E).
        options: mask, scale and soft-cap. ``deterministic`` changes nothing: the order of all
            sums is fixed.
        query_tile: queries in a tile.
        key_tile: keys in a tile.

    Returns:
        Output (B, H, N_q, E) in the query's dtype, and natural-log logsumexp (B, H, N_q) in fp32
        (fp64 for fp64 inputs). A query that sees no key has output 0 and logsumexp -inf.
    """
    groups, n_queries, n_keys = key.shape[1], query.shape[2], key.shape[2]
    ratio = query.shape[1] // groups
    band = Band.of(n_queries, n_keys, options)
    with torch.autocast(query.device.type, enabled=False):
        q, k, v = fold(query, groups) * options.scale, fold(key, groups), fold(value, groups)
        out = q.new_zeros(*q.shape[:2], v.shape[-1])
        lse = q.new_full(q.shape[:2], float("-inf"))
        for start, end in tiles(n_queries, query_tile):
            rows = slice(start * ratio, end * ratio)
            q_i = q[:, rows]
            row_max = torch.full_like(lse[:, rows], float("-inf"))  # m
            row_sum = torch.zeros_like(row_max)  # l
            acc = torch.zeros_like(out[:, rows])
            for k_start, k_end in band.key_tiles(start, end, key_tile):
                hidden = band.hidden((start, end), (k_start, k_end), q)
                scores, _ = score_tile(q_i, k[:, k_start:k_end], hidden, options.softcap)
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
            lse[:, rows] = row_max + torch.log(row_sum)
        return unfold(out, query, groups).to(query.dtype), unfold(lse, query, groups)


@torch.no_grad()
def tiled_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    options: AttentionOptions,
    *,
    query_tile: int = QUERY_TILE,
    key_tile: int = KEY_TILE,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: gradients of query, key and value, with P recomputed from the logsumexp.

    The gradient of the logsumexp enters through D: with dL given, dS = P ∘ (dP - (D - dL)).

    Args:
        query: (B, H, N_q, D), as in :func:`tiled_forward`, as are key, value and options.
        key: (B, G, N_k, D).
        value: (B, G, N_k, E).
        out: (B, H, N_q, E), what :func:`tiled_forward` returned.
        lse: (B, H, N_q), what :func:`tiled_forward` returned.
        grad_out: (B, H, N_q, E), dO.
        grad_lse: (B, H, N_q), dL, or None for zero.
        options: the same as in the forward pass.
        query_tile: queries in a tile.
        key_tile: keys in a tile.

    Returns:
        dQ, dK, dV, shaped and typed like query, key, value, accumulated in fp32 (fp64).
    """
    groups, n_queries, n_keys = key.shape[1], query.shape[2], key.shape[2]
    ratio = query.shape[1] // groups
    band = Band.of(n_queries, n_keys, options)
    with torch.autocast(query.device.type, enabled=False):
        q, k, v = fold(query, groups) * options.scale, fold(key, groups), fold(value, groups)
        do, lse = fold(grad_out, groups), fold(lse, groups)
        delta = (do * fold(out, groups)).sum(dim=-1)  # D = rowsum(dO ∘ O)
        if grad_lse is not None:
            delta = delta - fold(grad_lse, groups)
        empty = torch.isneginf(lse)
        delta = delta.masked_fill(empty, 0.0)
        lse = lse.masked_fill(empty, float("inf"))  # makes P = exp(S - L) zero in such rows
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start, end in tiles(n_keys, key_tile):
            k_j, v_j = k[:, start:end], v[:, start:end]
            dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)
            for q_start, q_end in band.query_tiles(start, end, query_tile):
                rows = slice(q_start * ratio, q_end * ratio)
                hidden = band.hidden((q_start, q_end), (start, end), q)
                scores, slope = score_tile(q[:, rows], k_j, hidden, options.softcap)
                p = torch.exp(scores - lse[:, rows, None])
                dv_j = torch.baddbmm(dv_j, p.transpose(1, 2), do[:, rows])
                dp = torch.bmm(do[:, rows], v_j.transpose(1, 2))
                ds = p * (dp - delta[:, rows, None])
                if slope is not None:
                    ds = ds * slope
                dq[:, rows] += torch.bmm(ds, k_j)
                dk_j = torch.baddbmm(dk_j, ds.transpose(1, 2), q[:, rows])
            dk[:, start:end], dv[:, start:end] = dk_j, dv_j
        dq *= options.scale  # q was scaled in advance, which serves S and dK; dQ needs its own
        gradients = zip((dq, dk, dv), (query, key, value), strict=True)
        dq, dk, dv = (unfold(grad, x, groups).to(x.dtype) for grad, x in gradients)
        return dq, dk, dv


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
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """:func:`tiled_forward` of each sequence of a packed batch.

    Args:
        query: (T_q, H, D), the sequences' tokens one after another.
        key: (T_k, G, D).
        value: (T_k, G, E).
        cu_seqlens_q: (B + 1,) int32: 0, where each next sequence starts in ``query``, and T_q.
        cu_seqlens_k: (B + 1,) int32, the same for key and value. Sequences may be empty. Both are
            read on the host, which synchronises if they are on an accelerator.
        options: as in :func:`tiled_forward`; the diagonal is each sequence's own.

    Returns:
        Output (T_q, H, E) in the query's dtype, logsumexp (H, T_q) in fp32 (fp64).
    """
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    lse = torch.full(
        (query.shape[1], query.shape[0]),
        float("-inf"),
        dtype=accumulation_dtype(query.dtype),
        device=query.device,
    )
    for q_span, k_span in sequences(cu_seqlens_q, cu_seqlens_k):
        q, k, v = batched(query, q_span), batched(key, k_span), batched(value, k_span)
        o_s, lse_s = tiled_forward(q, k, v, options)
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
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`tiled_backward` of each sequence of a packed batch.

    Shapes are those of :func:`tiled_forward_varlen`: ``out`` and ``grad_out`` (T_q, H, E), ``lse``
    and ``grad_lse`` (H, T_q).

    Returns:
        dQ, dK, dV, shaped and typed like query, key, value.
    """
    dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for q_span, k_span in sequences(cu_seqlens_q, cu_seqlens_k):
        gradients = tiled_backward(
            batched(query, q_span),
            batched(key, k_span),
            batched(value, k_span),
            batched(out, q_span),
            lse[None, :, q_span],
            batched(grad_out, q_span),
            None if grad_lse is None else grad_lse[None, :, q_span],
            options,
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
        """Algorithm 1."""
        check_assignment_inputs(Q, K, V)
        ctx.options = AttentionOptions(
            causal="top-left" if is_causal else "none", scale=1 / math.sqrt(Q.shape[-1])
        )
        out, lse = tiled_forward(as_batch(Q), as_batch(K), as_batch(V), ctx.options)
        out = out.reshape(*Q.shape[:-1], V.shape[-1])
        ctx.save_for_backward(lse.reshape(Q.shape[:-1]), Q, K, V, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Algorithm 2."""
        L, Q, K, V, out = ctx.saved_tensors
        dQ, dK, dV = tiled_backward(
            as_batch(Q),
            as_batch(K),
            as_batch(V),
            as_batch(out),
            L.reshape(-1, 1, L.shape[-1]),
            as_batch(dO),
            None,
            ctx.options,
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
                f"{name} must have at least three dimensions (..., sequence, head_dim), got shape "
                f"{tuple(x.shape)}; add a batch dimension with {name}[None]"
            )
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {x.dtype}; convert it first")
        if x.dtype != Q.dtype:
            raise ValueError(
                f"Q, K, V must share one dtype, got {Q.dtype} for Q, {x.dtype} for {name}"
            )
        if x.device != Q.device:
            raise ValueError(
                f"Q, K, V must be on one device, got {Q.device} for Q and {x.device} for {name}"
            )
        if x.shape[:-2] != Q.shape[:-2]:
            raise ValueError(
                f"Q, K, V must have the same leading dimensions, got {tuple(Q.shape)} for Q and "
                f"{tuple(x.shape)} for {name}; expand {name} first"
            )
    if K.shape[-1] != Q.shape[-1]:
        raise ValueError(f"K must have Q's head_dim {Q.shape[-1]}, got shape {tuple(K.shape)}")
    if V.shape[-2] != K.shape[-2]:
        raise ValueError(
            f"V must have K's sequence length {K.shape[-2]}, got shape {tuple(V.shape)}"
        )
