# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""dQ where it is not added up by the key pass: the kernel whose programs own queries.

The formulas are in :mod:`flashattn_triton.portable.backward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn_triton.primitives import (
    added_of,
    dot,
    key_range,
    load_rows,
    load_statistic,
    load_tile,
    loop_bound,
    mask_of,
    probabilities,
    rows_of_head,
    store_rows,
    tile_indices,
    tile_of_program,
    tma_reload,
)


@triton.jit(do_not_specialize=["N_QUERIES", "N_KEYS", "N_HEADS", "window_left", "window_right"])
def query_pass_kernel(
    Q_ptr,
    K_ptr,  # or if ``use_tma`` a descriptor of (B, G, N_k, D); so is V_ptr
    V_ptr,
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
    OPTIONS: tl.constexpr,  # portable.launch.KernelOptions
):
    """dQ of one query tile of one head; the same walk over keys as the forward kernel."""
    tile, own, other = tile_of_program(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, N_QUERIES, N_KEYS, N_HEADS, Q_TILE_SIZE, True, OPTIONS
    )
    query_start, batch, head, _ = tile
    first_query, N_QUERIES = own
    first_key, N_KEYS = other
    if OPTIONS.packed and query_start >= N_QUERIES:
        return
    D_PADDED: tl.constexpr = OPTIONS.d_padded
    E_PADDED: tl.constexpr = OPTIONS.e_padded
    b, h = batch.to(tl.int64), head.to(tl.int64)
    kv_head = head // HEADS_PER_KV
    kv_h = kv_head.to(tl.int64)
    Q_ptr = rows_of_head(Q_ptr, b, h, first_query, (stride_qb, stride_qh, stride_qq), OPTIONS)
    if not OPTIONS.use_tma:
        K_ptr = rows_of_head(K_ptr, b, kv_h, first_key, (stride_kb, stride_kh, stride_kk), OPTIONS)
        V_ptr = rows_of_head(V_ptr, b, kv_h, first_key, (stride_vb, stride_vh, stride_vk), OPTIONS)
    dO_ptr = rows_of_head(dO_ptr, b, h, first_query, (stride_dob, stride_doh, stride_doq), OPTIONS)
    dQ_ptr = rows_of_head(dQ_ptr, b, h, first_query, (stride_dqb, stride_dqh, stride_dqq), OPTIONS)
    batch_head = batch * N_HEADS + head
    if OPTIONS.packed:  # all sequences are one row of each head
        batch_head = head
    statistics_ptr += batch_head.to(tl.int64) * 2 * N_PADDED
    if OPTIONS.packed:
        statistics_ptr += first_query
    mask = mask_of(batch, N_QUERIES, N_KEYS, window_left, window_right, prefix_ptr, OPTIONS)
    bias_strides = (stride_bb, stride_bh, stride_bq, stride_bk)
    added = added_of(
        slopes_ptr, bias_ptr, mask_ptr, bias_strides, batch, N_HEADS, head, N_KEYS, OPTIONS
    )

    starts, stops = key_range(query_start, mask, Q_TILE_SIZE, K_TILE_SIZE, is_causal, OPTIONS)
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

    dq = tl.zeros([Q_TILE_SIZE, D_PADDED], tl.float32)  # without the scale
    key_source, value_source, position = (K_ptr, stride_kk), (V_ptr, stride_vk), (batch, kv_head)
    for part in tl.static_range(3):  # a window's left edge, whole tiles, the right edge
        if part > 0 or OPTIONS.has_left:
            for key_start in range(
                loop_bound(starts[part], OPTIONS), loop_bound(stops[part], OPTIONS), K_TILE_SIZE
            ):
                key_start = key_start + 0  # a tensor under the interpreter too
                k = load_tile(
                    key_source, position, key_start, N_KEYS, keys, columns, D, part != 1, OPTIONS
                )
                v = load_tile(
                    value_source, position, key_start, N_KEYS, keys, value_columns, OPTIONS.e,
                    part != 1, OPTIONS,
                )  # fmt: skip
                s = dot(q, tl.trans(k), None, OPTIONS)  # (Q_TILE_SIZE, K_TILE_SIZE)
                dp = dot(do, tl.trans(v), None, OPTIONS)
                p, s = probabilities(
                    s, logsumexp, queries, key_start, keys, key_start, mask, added,
                    (scale, softcap), is_causal, OPTIONS, part != 1, False,
                )  # fmt: skip
                ds = p * (dp - delta[:, None])
                if OPTIONS.has_softcap:
                    ds = ds * (1.0 - s * s)
                if OPTIONS.reloads:
                    k = tma_reload(key_source, position, key_start, N_KEYS, keys, columns)
                dq = dot(ds.to(k.dtype), k, dq, OPTIONS, INFINITIES=not OPTIONS.reloads)
    dq_tile = dQ_ptr + first * stride_dqq
    ADDS: tl.constexpr = OPTIONS.adds
    store_rows(dq_tile, dq * scale, rows, columns, stride_dqq, n_rows, D, ADDS)
