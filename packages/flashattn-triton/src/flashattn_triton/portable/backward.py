"""The backward pass as portable Triton kernels: FlashAttention-2, Algorithm 2.

Which of the kernels run, and on what, is decided here; they are in ``preprocess``, ``key_pass`` and
``query_pass``.

P is recomputed from the stored logsumexp, tile by tile (assignment, Eq. 13-19; S: scaled scores):

    P  = exp(S - L)                 dV = Pᵀ dO
    dP = dO Vᵀ                      dS = P ∘ (dP - delta),   delta = rowsum(O ∘ dO) - dL
    dQ = scale · dS K               dK = scale · dSᵀ Q

A gradient dL of the logsumexp adds P dL to dS, which is why it only enters through delta.

Two forms. *Two passes*: one kernel whose programs own keys (dK, dV; the query heads that share a
key head are summed inside), one whose programs own queries (dQ). P is computed twice, nothing is
shared between programs, every sum has a fixed order. *Fused*: the first kernel also adds its part
of dQ to an fp32 buffer atomically: five matrix products instead of seven, the sum in any order.

Legend: B batch, H query heads, G key/value heads, N_q queries, N_k keys, D head_dim of query and
key, E head_dim of value, T tokens of a packed batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from flashattn_triton.configs import Tiles, Tiling
from flashattn_triton.launch import (
    Launch,
    Packing,
    Strides,
    TileView,
    alibi_constant,
    can_use_tma,
    dot_precision,
    empty_output,
    is_wide,
    option_constants,
    option_numbers,
    outer,
    padded,
    problem_tensors,
    register_limit,
    stride_numbers,
    unit_last_stride,
)
from flashattn_triton.mask_and_bias import NO_MASK_OR_BIAS, MaskAndBias
from flashattn_triton.options import AttentionOptions
from flashattn_triton.portable.key_pass import ATOMIC, NONE, TMA_REDUCE, key_pass_kernel
from flashattn_triton.portable.preprocess import PREPROCESS_TILES, preprocess_launch
from flashattn_triton.portable.query_pass import query_pass_kernel


def triton_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    options: AttentionOptions,
    tiling: Tiling,
    packing: Packing | None = None,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the backward kernels.

    Args:
        query: and ``key``, ``value``, ``options``, ``packing``, ``mask_and_bias``: as given to the
            forward pass.
        out: its output, (B, H, N_q, E).
        logsumexp: its logsumexp, contiguous (B, H, N_q) fp32.
        grad_out: dO, the shape of ``out``, any strides (copied if the last is not 1).
        grad_logsumexp: dL, the shape of ``logsumexp``, or None for zero.
        tiling: kernel shapes; the fused form is used if it has one, unless a fixed order of every
            sum is asked for by ``options.deterministic``.

    Returns:
        dQ, dK and dV in the inputs' shapes and dtype. dQ is accumulated in fp32.
    """
    query, key, value, out, grad_out = map(unit_last_stride, (query, key, value, out, grad_out))
    call = backward_call(
        query, key, value, out, grad_out, grad_logsumexp, options, tiling, packing, mask_and_bias
    )
    tensors = (query, key, value, out, logsumexp, grad_out, grad_logsumexp)
    return call(*tensors, packing, mask_and_bias)


@dataclass(frozen=True, kw_only=True)
class BackwardCall:
    """The backward kernels on one kind of input: what their launches need, found out once."""

    preprocess: Launch
    key_pass: Launch
    query_pass: Launch | None
    statistics: Sequence[int]
    gradients: Sequence[tuple[Sequence[int], Strides]]
    dq_sum: Sequence[int] | None
    scale: float

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        grad_out: Tensor,
        grad_logsumexp: Tensor | None,
        packing: Packing | None = None,
        mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of inputs whose last stride is 1."""
        problem = problem_tensors(packing, mask_and_bias)
        fp32 = torch.float32
        dq, dk, dv = [query.new_empty_strided(*like) for like in self.gradients]
        statistics = query.new_empty(self.statistics, dtype=fp32)
        dq_sum = None if self.dq_sum is None else query.new_empty(self.dq_sum, dtype=fp32)
        self.preprocess(out, grad_out, grad_logsumexp, logsumexp, statistics, dq_sum)
        self.key_pass(
            query,
            key,
            value,
            grad_out,
            statistics,
            dq if dq_sum is None else dq_sum,
            dk,
            dv,
            *problem,
        )
        if self.query_pass is not None:
            self.query_pass(query, key, value, grad_out, statistics, dq, *problem)
        if dq_sum is not None:
            # One elementwise kernel: scale and cast.
            torch.mul(dq_sum[..., : query.shape[3]], self.scale, out=dq)
        return dq, dk, dv


def backward_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    options: AttentionOptions,
    tiling: Tiling,
    packing: Packing | None = None,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> BackwardCall:
    """The call for inputs of these shapes, strides and types; their last stride is 1."""
    device, dtype, kind = query.device, query.dtype, mask_and_bias.kind
    shapes = (query.shape, key.shape, value.shape)
    strides = tuple([x.stride() for x in (query, key, value, grad_out, out)])
    grad_logsumexp_stride = None if grad_logsumexp is None else grad_logsumexp.stride()
    sizes = None if packing is None else packing.sizes
    readable_by_tma = sizes is None and all(can_use_tma(x) for x in (query, key, value, grad_out))
    (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, _), (*_, value_dim) = shapes
    *inputs, out_stride = strides
    gradients = [
        empty_output(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), shape[3])
        for shape, stride in zip(shapes, strides[:3], strict=True)
    ]
    dq, dk, dv = (x.stride() for x in gradients)
    fused = None if options.deterministic else tiling.fused
    width, value_width = padded(head_dim, dtype), padded(value_dim, dtype)
    if fused is not None:  # padded, so that a tile is one block of memory
        dq = (heads * n_queries * width, n_queries * width, width, 1)
    longest_tile = max(t.queries for t in (PREPROCESS_TILES, tiling.key_pass, tiling.query_pass))
    multiple = max(longest_tile, 0 if fused is None else fused.queries)
    n_padded = -(-n_queries // multiple) * multiple
    preprocess = preprocess_launch(
        device,
        dtype,
        (batch, heads, n_queries),
        (head_dim, value_dim),
        (out_stride, inputs[3], grad_logsumexp_stride),
        n_padded,
        zeroes=fused is not None,
    )
    key_tiles, query_tiles = fused or tiling.key_pass, tiling.query_pass
    # Of Q, K, V, dO, the statistics and the sum of dQ for the key pass; Q, K, V for the query pass.
    key_views: list[TileView | None] = [None] * 6
    query_views: list[TileView | None] = [None] * 3
    if fused is not None and tiling.tma_reduce:
        rows = batch * heads * n_queries
        key_views[5] = TileView([rows, width], [width, 1], [fused.queries, width])
    # A copy is waited for where it stands unless the loop is pipelined; a load is not.
    statistics_by_tma = readable_by_tma and key_tiles.use_tma and key_tiles.stages > 1
    if readable_by_tma and key_tiles.use_tma:
        do_shape, block = (*shapes[0][:3], value_dim), [1, 1, key_tiles.queries]
        key_views[0] = TileView(shapes[0], strides[0], [*block, width])
        key_views[3] = TileView(do_shape, strides[3], [*block, value_width])
        if statistics_by_tma:
            key_views[4] = TileView([2 * batch * heads, n_padded], [n_padded, 1], block[1:])
    if readable_by_tma and query_tiles.use_tma:
        block = [1, 1, query_tiles.keys]
        query_views[1] = TileView(shapes[1], strides[1], [*block, width])
        query_views[2] = TileView(shapes[2], strides[2], [*block, value_width])
    statistics, dq_sum = (batch * heads, 2, n_padded), (batch, heads, n_queries, width)
    if sizes is not None:
        batch, n_queries, n_keys = sizes
    constants = {
        "D": head_dim,
        "E": value_dim,
        "D_PADDED": width,
        "E_PADDED": value_width,
        "PACKED": sizes is not None,
        "WIDE": is_wide(*inputs, dq, dk, dv),
        "PRECISION": dot_precision(dtype),
        "INTERPRETED": not isinstance(key_pass_kernel, triton.JITFunction),
        **option_constants(options),
        **kind.constants,
        **alibi_constant(options, kind),
    }

    q, k, v, do = (outer(stride, sizes) for stride in inputs)
    numbers = {
        **stride_numbers(q=q, k=k, v=v, do=do),
        **kind.numbers,
        "N_PADDED": n_padded,
        "N_QUERIES": n_queries,
        "N_KEYS": n_keys,
        "HEADS_PER_KV": heads // kv_heads,
        **option_numbers(options),
    }

    def shape(tiles: Tiles) -> dict[str, Any]:
        return {
            "Q_TILE_SIZE": tiles.queries,
            "K_TILE_SIZE": tiles.keys,
            "USE_TMA": readable_by_tma and tiles.use_tma,
        }

    mode = NONE if fused is None else TMA_REDUCE if tiling.tma_reduce else ATOMIC
    dq_outer, dk_outer, dv_outer = (outer(stride, sizes) for stride in (dq, dk, dv))
    # A descriptor counts rows, a pointer elements.
    unit = width if mode is TMA_REDUCE else 1
    target = tuple(stride // unit for stride in dq_outer)
    key_pass = Launch(
        key_pass_kernel,
        device,
        -(-n_keys // key_tiles.keys) * batch * kv_heads,
        {
            **numbers,
            **stride_numbers(dq=target, dk=dk_outer, dv=dv_outer),
            "N_KV_HEADS": kv_heads,
        },
        {
            **constants,
            **shape(key_tiles),
            "DQ_MODE": mode.value,
            "STATISTICS_BY_TMA": statistics_by_tma,
        },
        key_tiles,
        key_views,
    )
    query_pass = None
    if fused is None:
        query_pass = Launch(
            query_pass_kernel,
            device,
            -(-n_queries // query_tiles.queries) * batch * heads,
            {**numbers, **stride_numbers(dq=dq_outer), "N_HEADS": heads},
            {**constants, **shape(query_tiles)},
            query_tiles,
            query_views,
            register_limit(kind, query_tiles, dtype, max(width, value_width)),
        )
    return BackwardCall(
        preprocess=preprocess,
        key_pass=key_pass,
        query_pass=query_pass,
        statistics=statistics,
        gradients=[(x.shape, x.stride()) for x in gradients],
        dq_sum=None if fused is None else dq_sum,
        scale=options.scale,
    )
