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
)
from flashattn_triton.portable.backward_layout import BackwardLayout
from flashattn_triton.primitives import (
    LOG2_E,
    dot,
    key_range,
    load_rows,
    load_statistic,
    loop_bound,
    packed_offsets,
    probabilities,
    store_rows,
    tile_indices,
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
    batch,
    kv_head,
    stride_kk,
    stride_vk,
    start,
    stop,
    queries,
    keys,
    columns,
    value_columns,
    offset,
    n_keys,
    window_left,
    window_right,
    prefix,
    slope,
    bias,
    stride_bq,
    stride_bk,
    n_queries,
    scale,
    softcap,
    D: tl.constexpr,
    E: tl.constexpr,
    K_TILE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    USE_TMA: tl.constexpr,
    is_causal: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds what keys ``start`` to ``stop`` contribute to dQ."""
    WIDE_FP32: tl.constexpr = USE_TMA and PRECISION == "bf16x6" and columns.shape[0] > 128
    for key_start in range(
        loop_bound(start, INTERPRETED), loop_bound(stop, INTERPRETED), K_TILE_SIZE
    ):
        key_start = key_start + 0  # a tensor under the interpreter too
        n_rows = n_keys - key_start
        if USE_TMA:
            k = tma_load(K, batch, kv_head, key_start, K_TILE_SIZE, columns.shape[0])
            v = tma_load(V, batch, kv_head, key_start, K_TILE_SIZE, value_columns.shape[0])
        else:
            k_tile = K + key_start.to(tl.int64) * stride_kk
            k = load_rows(k_tile, keys, columns, stride_kk, n_rows, D, MASKED)
            v_tile = V + key_start.to(tl.int64) * stride_vk
            v = load_rows(v_tile, keys, value_columns, stride_vk, n_rows, E, MASKED)
        s = dot(q, tl.trans(k), None, PRECISION, INTERPRETED)  # (Q_TILE_SIZE, K_TILE_SIZE)
        dp = dot(do, tl.trans(v), None, PRECISION, INTERPRETED)
        p, s = probabilities(
            s, logsumexp, queries, key_start, keys, key_start, offset, n_queries, n_keys,
            window_left, window_right, prefix, slope, bias, stride_bq, stride_bk, scale, softcap,
            HAS_SOFTCAP, HAS_LEFT, HAS_PREFIX, HAS_ALIBI, HAS_BIAS, is_causal, MASKED, False,
        )  # fmt: skip
        ds = p * (dp - delta[:, None])
        if HAS_SOFTCAP:
            ds = ds * (1.0 - s * s)
        if WIDE_FP32:
            k = tma_reload(K, batch, kv_head, key_start, n_keys, K_TILE_SIZE, columns.shape[0])
        dq = dot(ds.to(k.dtype), k, dq, PRECISION, INTERPRETED, INFINITIES=not WIDE_FP32)
    return dq


@triton.jit(do_not_specialize=["N_QUERIES", "N_KEYS", "N_HEADS", "window_left", "window_right"])
def query_pass_kernel(
    Q_ptr,
    K,  # a pointer, or if USE_TMA a descriptor of (B, G, N_k, D); so is V
    V,
    dO_ptr,
    statistics_ptr,  # (B · H, 2, N_PADDED) fp32, see preprocess_kernel
    dQ_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    slopes_ptr,  # (B, H) fp32, or None without ALiBi
    bias_ptr,  # broadcast to (B, H, N_q, N_k), or None
    prefix_ptr,  # (B,) int32, or None without a prefix
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
    E: tl.constexpr,
    D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    Q_TILE_SIZE: tl.constexpr,
    K_TILE_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    USE_TMA: tl.constexpr,
    is_causal: tl.constexpr,
):
    """dQ of one query tile of one head; the same walk over keys as the forward kernel."""
    n_tiles = tl.cdiv(N_QUERIES, Q_TILE_SIZE)
    head = (tl.program_id(0) // n_tiles) % N_HEADS
    batch = tl.program_id(0) // n_tiles // N_HEADS
    query_start = (n_tiles - 1 - tl.program_id(0) % n_tiles) * Q_TILE_SIZE
    if HAS_BIAS:  # which the batch may share: its elements follow one another, to find it in L2
        n_batch = tl.num_programs(0) // (n_tiles * N_HEADS)
        batch = tl.program_id(0) % n_batch
        head = tl.program_id(0) // n_batch // n_tiles
        query_start = (n_tiles - 1 - tl.program_id(0) // n_batch % n_tiles) * Q_TILE_SIZE

    b, h = batch.to(tl.int64), head.to(tl.int64)
    kv_head = head // HEADS_PER_KV
    Q_ptr += b * stride_qb + h * stride_qh
    if not USE_TMA:
        K += b * stride_kb + kv_head.to(tl.int64) * stride_kh
        V += b * stride_vb + kv_head.to(tl.int64) * stride_vh
    dO_ptr += b * stride_dob + h * stride_doh
    dQ_ptr += b * stride_dqb + h * stride_dqh
    batch_head = batch * N_HEADS + head
    if PACKED:  # all sequences are one row of each head
        batch_head = head
    statistics_ptr += batch_head.to(tl.int64) * 2 * N_PADDED
    if PACKED:
        first_query, first_key, N_QUERIES, N_KEYS = packed_offsets(
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch
        )
        if query_start >= N_QUERIES:
            return
        Q_ptr += first_query.to(tl.int64) * stride_qq
        K += first_key.to(tl.int64) * stride_kk
        V += first_key.to(tl.int64) * stride_vk
        dO_ptr += first_query.to(tl.int64) * stride_doq
        dQ_ptr += first_query.to(tl.int64) * stride_dqq
        statistics_ptr += first_query
    offset = 0
    if BOTTOM_RIGHT:
        offset = N_KEYS - N_QUERIES
    prefix = 0
    if HAS_PREFIX:
        prefix = tl.load(prefix_ptr + batch)
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + batch * N_HEADS + head) * LOG2_E
    if HAS_BIAS:
        bias_ptr += b * stride_bb + h * stride_bh

    start, full_start, full_stop, stop = key_range(
        query_start, offset, N_KEYS, window_left, window_right, prefix, Q_TILE_SIZE, K_TILE_SIZE,
        HAS_LEFT, HAS_PREFIX, is_causal,
    )  # fmt: skip
    rows = tile_indices(Q_TILE_SIZE, WIDE)
    keys = tile_indices(K_TILE_SIZE, WIDE)
    columns = tl.arange(0, D_PADDED)
    value_columns = tl.arange(0, E_PADDED)
    queries = query_start + tl.arange(0, Q_TILE_SIZE)
    n_rows = N_QUERIES - query_start
    first = query_start.to(tl.int64)
    q = load_rows(Q_ptr + first * stride_qq, rows, columns, stride_qq, n_rows, D, True)
    do = load_rows(dO_ptr + first * stride_doq, rows, value_columns, stride_doq, n_rows, E, True)
    logsumexp = load_statistic(statistics_ptr, queries, N_QUERIES, float("inf"), PACKED)
    delta = load_statistic(statistics_ptr + N_PADDED, queries, N_QUERIES, 0.0, PACKED)

    dq = tl.zeros([Q_TILE_SIZE, D_PADDED], tl.float32)
    if HAS_LEFT:
        dq = _differentiate_queries(
            dq, q, do, logsumexp, delta, K, V, batch, kv_head, stride_kk, stride_vk,
            start, tl.minimum(full_start, stop), queries, keys, columns, value_columns, offset,
            N_KEYS, window_left, window_right, prefix, slope, bias_ptr, stride_bq, stride_bk,
            N_QUERIES, scale, softcap, D, E, K_TILE_SIZE, HAS_SOFTCAP, HAS_LEFT, HAS_PREFIX,
            HAS_ALIBI, HAS_BIAS, PRECISION, INTERPRETED, USE_TMA, is_causal, True,
        )  # fmt: skip
    dq = _differentiate_queries(
        dq, q, do, logsumexp, delta, K, V, batch, kv_head, stride_kk, stride_vk,
        full_start, full_stop, queries, keys, columns, value_columns, offset,
        N_KEYS, window_left, window_right, prefix, slope, bias_ptr, stride_bq, stride_bk,
        N_QUERIES, scale, softcap, D, E, K_TILE_SIZE, HAS_SOFTCAP, HAS_LEFT, HAS_PREFIX,
        HAS_ALIBI, HAS_BIAS, PRECISION, INTERPRETED, USE_TMA, is_causal, False,
    )  # fmt: skip
    dq = _differentiate_queries(
        dq, q, do, logsumexp, delta, K, V, batch, kv_head, stride_kk, stride_vk,
        tl.maximum(full_start, full_stop), stop, queries, keys, columns, value_columns, offset,
        N_KEYS, window_left, window_right, prefix, slope, bias_ptr, stride_bq, stride_bk,
        N_QUERIES, scale, softcap, D, E, K_TILE_SIZE, HAS_SOFTCAP, HAS_LEFT, HAS_PREFIX,
        HAS_ALIBI, HAS_BIAS, PRECISION, INTERPRETED, USE_TMA, is_causal, True,
    )  # fmt: skip
    store_rows(dQ_ptr + first * stride_dqq, dq * scale, rows, columns, stride_dqq, n_rows, D)


def query_pass_launch(layout: BackwardLayout, tiles: Tiles) -> Launch:
    """The launch of the kernel on one kind of input."""
    batch, n_queries, _ = layout.lengths
    heads, _ = layout.heads
    width, value_width = layout.widths
    dtype = layout.dtype
    parameters: dict[str, Parameter] = {
        **dict.fromkeys(("Q_ptr", "K", "V", "dO_ptr", "dQ_ptr"), dtype),
        "statistics_ptr": torch.float32,
        **layout.given,
    }
    constants = layout.constants(query_pass_kernel, tiles)
    if constants["USE_TMA"]:
        block = [1, 1, tiles.keys]
        for i, name, columns in ((1, "K", width), (2, "V", value_width)):
            shape, strides = layout.shapes[i], layout.strides[i]
            parameters[name] = tile_view(shape, strides, [*block, columns], dtype)
    dq, _, _ = layout.outer_gradients()
    return Launch(
        query_pass_kernel,
        layout.device,
        -(-n_queries // tiles.queries) * batch * heads,
        parameters,
        {**layout.numbers(), **stride_numbers(dq=dq), "N_HEADS": heads},
        constants,
        warps=tiles.warps,
        stages=tiles.stages,
        registers=register_limit(layout.specialization, tiles, dtype, max(width, value_width)),
    )
