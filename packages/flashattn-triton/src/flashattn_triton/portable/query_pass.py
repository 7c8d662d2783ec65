# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""dQ where it is not added up by the key pass: the kernel whose programs own queries.

The formulas are in :mod:`flashattn_triton.portable.backward`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flashattn_triton.configs import Tiles
from flashattn_triton.launch import (
    Launch,
    Parameter,
    register_limit,
    stride_numbers,
    tile_view,
    tiles_of_head,
)
from flashattn_triton.portable.backward_layout import BackwardLayout
from flashattn_triton.portable.options import KernelOptions
from flashattn_triton.primitives import (
    dot,
    key_range,
    load_rows,
    load_statistic,
    loop_bound,
    mask_of,
    packed_tile_of_program,
    probabilities,
    slope_of,
    store_rows,
    tile_indices,
    tile_of_program,
    tma_load,
    tma_reload,
)


@triton.jit
def _differentiate_queries(
    dq,  # (Q_TILE_SIZE, D_PADDED) fp32, without the scale
    q,
    do,
    logsumexp,
    delta,
    K,  # a pointer to this head, or a descriptor of all of (B, G, N_k, D); so is V
    V,
    kv_position,  # batch element and head in the descriptors
    kv_strides,  # of a row of K and of V
    start,
    stop,
    queries,
    keys,
    columns,
    value_columns,
    mask,
    added,
    factors,
    D: tl.constexpr,
    is_causal: tl.constexpr,
    OPTIONS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds what keys ``start`` to ``stop`` contribute to dQ."""
    n_keys = mask[2]
    batch, kv_head = kv_position
    stride_kk, stride_vk = kv_strides
    K_TILE_SIZE: tl.constexpr = keys.shape[0]
    INTERPRETED: tl.constexpr = OPTIONS.interpreted
    PRECISION: tl.constexpr = OPTIONS.precision
    WIDE_FP32: tl.constexpr = OPTIONS.use_tma and PRECISION == "bf16x6" and columns.shape[0] > 128
    for key_start in range(
        loop_bound(start, INTERPRETED), loop_bound(stop, INTERPRETED), K_TILE_SIZE
    ):
        key_start = key_start + 0  # a tensor under the interpreter too
        n_rows = n_keys - key_start
        if OPTIONS.use_tma:
            k = tma_load(K, batch, kv_head, key_start, K_TILE_SIZE, columns.shape[0])
            v = tma_load(V, batch, kv_head, key_start, K_TILE_SIZE, value_columns.shape[0])
        else:
            k_tile = K + key_start.to(tl.int64) * stride_kk
            k = load_rows(k_tile, keys, columns, stride_kk, n_rows, D, MASKED)
            v_tile = V + key_start.to(tl.int64) * stride_vk
            v = load_rows(v_tile, keys, value_columns, stride_vk, n_rows, OPTIONS.e, MASKED)
        s = dot(q, tl.trans(k), None, PRECISION, INTERPRETED)  # (Q_TILE_SIZE, K_TILE_SIZE)
        dp = dot(do, tl.trans(v), None, PRECISION, INTERPRETED)
        p, s = probabilities(
            s, logsumexp, queries, key_start, keys, key_start, mask, added, factors, is_causal,
            OPTIONS, MASKED, False,
        )  # fmt: skip
        ds = p * (dp - delta[:, None])
        if OPTIONS.has_softcap:
            ds = ds * (1.0 - s * s)
        if WIDE_FP32:
            k = tma_reload(K, batch, kv_head, key_start, n_keys, K_TILE_SIZE, columns.shape[0])
        dq = dot(ds.to(k.dtype), k, dq, PRECISION, INTERPRETED, INFINITIES=not WIDE_FP32)
    return dq


@triton.jit(do_not_specialize=["N_QUERIES", "N_KEYS", "N_HEADS", "window_left", "window_right"])
def query_pass_kernel(
    Q_ptr,
    K,  # a pointer, or if ``use_tma`` a descriptor of (B, G, N_k, D); so is V
    V,
    dO_ptr,
    statistics_ptr,  # (B · H, 2, N_PADDED) fp32, see preprocess_kernel
    dQ_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    slopes_ptr,  # (B, H) fp32, or None without ALiBi
    bias_ptr,  # broadcast to (B, H, N_q, N_k), or None
    prefix_ptr,  # (B,) int32, or None without a prefix
    mask_ptr,  # (B, N_k) uint8, or None without a mask
    stride_qb,
    stride_qh,
    stride_qq,
    stride_kb,
    stride_kh,
    stride_kk,
    stride_vb,
    stride_vh,
    stride_vk,
    stride_dob,
    stride_doh,
    stride_doq,
    stride_dqb,
    stride_dqh,
    stride_dqq,
    stride_bb,  # None without a bias, as are the other three
    stride_bh,
    stride_bq,
    stride_bk,
    N_PADDED,
    N_QUERIES,
    N_KEYS,
    N_HEADS,
    HEADS_PER_KV,
    scale,
    softcap,
    window_left,
    window_right,
    D: tl.constexpr,
    Q_TILE_SIZE: tl.constexpr,
    K_TILE_SIZE: tl.constexpr,
    is_causal: tl.constexpr,
    OPTIONS: tl.constexpr,  # portable.options.KernelOptions
):
    """dQ of one query tile of one head; the same walk over keys as the forward kernel."""
    if OPTIONS.packed:
        tile, own, other = packed_tile_of_program(
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, N_QUERIES, N_HEADS, Q_TILE_SIZE, True
        )
        query_start, batch, head, _ = tile
        first_query, N_QUERIES = own
        first_key, N_KEYS = other
        if query_start >= N_QUERIES:
            return
    else:
        query_start, batch, head = tile_of_program(N_QUERIES, N_HEADS, Q_TILE_SIZE, True, OPTIONS)
    D_PADDED: tl.constexpr = OPTIONS.d_padded
    E_PADDED: tl.constexpr = OPTIONS.e_padded
    b, h = batch.to(tl.int64), head.to(tl.int64)
    kv_head = head // HEADS_PER_KV
    Q_ptr += b * stride_qb + h * stride_qh
    if not OPTIONS.use_tma:
        K += b * stride_kb + kv_head.to(tl.int64) * stride_kh
        V += b * stride_vb + kv_head.to(tl.int64) * stride_vh
    dO_ptr += b * stride_dob + h * stride_doh
    dQ_ptr += b * stride_dqb + h * stride_dqh
    batch_head = batch * N_HEADS + head
    if OPTIONS.packed:  # all sequences are one row of each head
        batch_head = head
    statistics_ptr += batch_head.to(tl.int64) * 2 * N_PADDED
    if OPTIONS.packed:
        Q_ptr += first_query.to(tl.int64) * stride_qq
        K += first_key.to(tl.int64) * stride_kk
        V += first_key.to(tl.int64) * stride_vk
        dO_ptr += first_query.to(tl.int64) * stride_doq
        dQ_ptr += first_query.to(tl.int64) * stride_dqq
        statistics_ptr += first_query
    mask = mask_of(batch, N_QUERIES, N_KEYS, window_left, window_right, prefix_ptr, OPTIONS)
    slope = slope_of(slopes_ptr, batch, N_HEADS, head, OPTIONS)
    if OPTIONS.has_bias:
        bias_ptr += b * stride_bb + h * stride_bh
    if OPTIONS.has_mask:
        mask_ptr += b * N_KEYS

    start, full_start, full_stop, stop = key_range(
        query_start, mask, Q_TILE_SIZE, K_TILE_SIZE, is_causal, OPTIONS
    )
    rows = tile_indices(Q_TILE_SIZE, OPTIONS.wide)
    keys = tile_indices(K_TILE_SIZE, OPTIONS.wide)
    columns = tl.arange(0, D_PADDED)
    value_columns = tl.arange(0, E_PADDED)
    queries = query_start + tl.arange(0, Q_TILE_SIZE)
    n_rows = N_QUERIES - query_start
    first = query_start.to(tl.int64)
    q = load_rows(Q_ptr + first * stride_qq, rows, columns, stride_qq, n_rows, D, True)
    do_tile = dO_ptr + first * stride_doq
    do = load_rows(do_tile, rows, value_columns, stride_doq, n_rows, OPTIONS.e, True)
    logsumexp = load_statistic(statistics_ptr, queries, N_QUERIES, float("inf"), OPTIONS.packed)
    delta = load_statistic(statistics_ptr + N_PADDED, queries, N_QUERIES, 0.0, OPTIONS.packed)

    dq = tl.zeros([Q_TILE_SIZE, D_PADDED], tl.float32)
    starts = (start, full_start, tl.maximum(full_start, full_stop))
    stops = (tl.minimum(full_start, stop), full_stop, stop)
    for part in tl.static_range(3):  # a window's left edge, whole tiles, the right edge
        if part > 0 or OPTIONS.has_left:
            dq = _differentiate_queries(
                dq, q, do, logsumexp, delta, K, V, (batch, kv_head), (stride_kk, stride_vk),
                starts[part], stops[part], queries, keys, columns, value_columns, mask,
                (slope, bias_ptr, stride_bq, stride_bk, mask_ptr), (scale, softcap), D, is_causal,
                OPTIONS, part != 1,
            )  # fmt: skip
    dq_tile = dQ_ptr + first * stride_dqq
    ADDS: tl.constexpr = OPTIONS.adds
    store_rows(dq_tile, dq * scale, rows, columns, stride_dqq, n_rows, D, ADDS)


def query_pass_launch(layout: BackwardLayout, tiles: Tiles) -> Launch:
    """The launch of the kernel on one kind of input."""
    heads, _ = layout.heads
    width, value_width = layout.widths
    dtype = layout.dtype
    parameters: dict[str, Parameter] = {
        **dict.fromkeys(("Q_ptr", "K", "V", "dO_ptr"), dtype),
        "dQ_ptr": torch.float32 if layout.adds else dtype,
        "statistics_ptr": torch.float32,
        **layout.given,
    }
    options = layout.options(KernelOptions, query_pass_kernel, tiles)
    if options.use_tma:
        block = [1, 1, tiles.keys]
        for i, name, columns in ((1, "K", width), (2, "V", value_width)):
            shape, strides = layout.shapes[i], layout.strides[i]
            parameters[name] = tile_view(shape, strides, [*block, columns], dtype)
    dq, _, _ = layout.outer_gradients()
    return Launch(
        query_pass_kernel,
        layout.device,
        tiles_of_head(layout.shapes[0], tiles.queries, layout.packing) * heads,
        parameters,
        {**layout.numbers(), **stride_numbers(dq=dq), "N_HEADS": heads},
        layout.constants(tiles, options),
        warps=tiles.warps,
        stages=tiles.stages,
        registers=register_limit(layout.specialization, tiles, dtype, max(width, value_width)),
    )
