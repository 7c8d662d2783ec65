# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""dK and dV, and in the fused form dQ: the kernel whose programs own keys.

The formulas and both forms are in :mod:`flashattn_triton.portable.backward`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from flashattn_triton.configs import Tiles
from flashattn_triton.launch import Launch, padded, tile_view, tiles_of_head
from flashattn_triton.portable.launch import KernelInputs
from flashattn_triton.primitives import (
    added_of,
    dot,
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
from flashattn_triton.triton_versions import Parameter

# How the key pass adds its part of dQ: not at all, by fp32 atomic additions, or by the TMA's
# reductions of whole tiles (sm_90 and later).
NONE = tl.constexpr(0)
ATOMIC = tl.constexpr(1)
TMA_REDUCE = tl.constexpr(2)


@triton.jit
def _differentiate_keys(
    dk,  # (K_TILE_SIZE, D_PADDED) fp32, without the scale
    dv,  # (K_TILE_SIZE, E_PADDED) fp32
    k,
    v,
    query_source,  # of load_tile, as is the next
    do_source,
    position,
    dq_source,  # a pointer, or a descriptor, where this head begins there, and the stride of a row
    statistics,  # a pointer to this head's, or a descriptor of (2 · B · H, N_PADDED)
    n_padded,
    batch_head,  # batch · H + head
    start,
    stop,
    keys,
    first_key,
    rows,
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
    """Adds what queries ``start`` to ``stop`` contribute. Scores are (keys, queries) here."""
    n_queries = mask[1]
    Q_TILE_SIZE: tl.constexpr = rows.shape[0]
    for query_start in range(loop_bound(start, OPTIONS), loop_bound(stop, OPTIONS), Q_TILE_SIZE):
        query_start = query_start + 0  # a tensor under the interpreter too
        queries = query_start + tl.arange(0, Q_TILE_SIZE)
        q = load_tile(
            query_source, position, query_start, n_queries, rows, columns, D, True, OPTIONS
        )
        if OPTIONS.statistics_by_tma:
            logsumexp = statistics.load([2 * batch_head, query_start]).reshape(Q_TILE_SIZE)
        else:
            logsumexp = load_statistic(statistics, queries, n_queries, float("inf"), OPTIONS.packed)
        do = load_tile(
            do_source, position, query_start, n_queries, rows, value_columns, OPTIONS.e, True,
            OPTIONS,
        )  # fmt: skip
        if OPTIONS.statistics_by_tma:
            delta = statistics.load([2 * batch_head + 1, query_start]).reshape(Q_TILE_SIZE)
        else:
            delta = load_statistic(statistics + n_padded, queries, n_queries, 0.0, OPTIONS.packed)
        # The products that give S and dP are next to each other, so that the compiler issues both
        # before it waits for either. The same holds for the products added to dV and dK below.
        s = dot(k, tl.trans(q), None, OPTIONS)  # (K_TILE_SIZE, Q_TILE_SIZE)
        dp = dot(v, tl.trans(do), None, OPTIONS)
        p, s = probabilities(
            s, logsumexp, queries, 0, keys, first_key, mask, added, factors, is_causal, OPTIONS,
            MASKED, True,
        )  # fmt: skip
        ds = p * (dp - delta[None, :])
        if OPTIONS.has_softcap:
            ds = ds * (1.0 - s * s)
        ds = ds.to(q.dtype)
        if OPTIONS.reloads:
            q = tma_reload(query_source, position, query_start, n_queries, rows, columns)
            do = tma_reload(do_source, position, query_start, n_queries, rows, value_columns)
        dv = dot(p.to(do.dtype), do, dv, OPTIONS, INFINITIES=not OPTIONS.reloads)
        dk = dot(ds, q, dk, OPTIONS, INFINITIES=not OPTIONS.reloads)
        if OPTIONS.dq_mode != NONE:
            dQ, dq_start, stride_dqq = dq_source
            dq = dot(tl.trans(ds), k, None, OPTIONS, INFINITIES=not OPTIONS.reloads)
            if OPTIONS.dq_mode == TMA_REDUCE:
                # Rows past the end carry zeros, which may be added to whatever follows.
                dQ.atomic_add([(dq_start + query_start).to(tl.int32), 0], dq)
            else:
                dq_tile = dQ + dq_start + query_start.to(tl.int64) * stride_dqq
                pointers = dq_tile + rows[:, None] * stride_dqq + columns[None, :]
                inside = (rows < n_queries - query_start)[:, None] & (columns < D)[None, :]
                tl.atomic_add(pointers, dq, mask=inside, sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=["N_QUERIES", "N_KEYS", "N_KV_HEADS", "window_left", "window_right"])
def key_pass_kernel(
    Q_ptr,  # or if ``use_tma`` a descriptor of (B, H, N_q, D); so is dO_ptr
    K_ptr,
    V_ptr,
    dO_ptr,
    statistics_ptr,  # or if ``statistics_by_tma`` a descriptor of (2 · B · H, N_PADDED)
    dQ_ptr,  # to zeros in fp32, or a descriptor of (rows, D_PADDED); unused in mode NONE
    dK_ptr,
    dV_ptr,
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
    stride_dkb,
    stride_dkh,
    stride_dkk,
    stride_dvb,
    stride_dvh,
    stride_dvk,
    stride_bb,  # None without a bias, as are the other three
    stride_bh,
    stride_bq,
    stride_bk,
    N_PADDED,
    N_QUERIES,
    N_KEYS,
    N_KV_HEADS,
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
    """dK and dV of one key tile of one key head. Grid: tiles · B · G.

    Under a causal mask the first key tile is seen by most queries, so the order is longest first.
    """
    tile, own, other = tile_of_program(
        cu_seqlens_k_ptr, cu_seqlens_q_ptr, N_KEYS, N_QUERIES, N_KV_HEADS, K_TILE_SIZE, False,
        OPTIONS,
    )  # fmt: skip
    key_start, batch, kv_head, _ = tile
    first_key, N_KEYS = own
    first_query, N_QUERIES = other
    if OPTIONS.packed and key_start >= N_KEYS:
        return
    D_PADDED: tl.constexpr = OPTIONS.d_padded
    E_PADDED: tl.constexpr = OPTIONS.e_padded
    b, kv_h = batch.to(tl.int64), kv_head.to(tl.int64)
    K_ptr = rows_of_head(K_ptr, b, kv_h, first_key, (stride_kb, stride_kh, stride_kk), OPTIONS)
    V_ptr = rows_of_head(V_ptr, b, kv_h, first_key, (stride_vb, stride_vh, stride_vk), OPTIONS)
    dK_ptr = rows_of_head(dK_ptr, b, kv_h, first_key, (stride_dkb, stride_dkh, stride_dkk), OPTIONS)
    dV_ptr = rows_of_head(dV_ptr, b, kv_h, first_key, (stride_dvb, stride_dvh, stride_dvk), OPTIONS)
    dq_start = b * stride_dqb
    if not OPTIONS.use_tma:
        Q_ptr += b * stride_qb
        dO_ptr += b * stride_dob
    if OPTIONS.packed:
        Q_ptr += first_query.to(tl.int64) * stride_qq
        dO_ptr += first_query.to(tl.int64) * stride_doq
        dq_start += first_query.to(tl.int64) * stride_dqq
    mask = mask_of(batch, N_QUERIES, N_KEYS, window_left, window_right, prefix_ptr, OPTIONS)
    offset, _, _, _, _, prefix = mask

    # Queries that see some key of the tile, and whole query tiles that see every key of it. A key
    # tile past the end is masked throughout: what its padding adds to dQ must be exactly 0.
    start = 0
    full_start = tl.where(key_start + K_TILE_SIZE > N_KEYS, N_QUERIES, 0)
    if is_causal:
        first_seeing = key_start - offset - window_right
        start = tl.maximum(first_seeing, 0) // Q_TILE_SIZE * Q_TILE_SIZE
        full_start = tl.maximum(full_start, first_seeing + K_TILE_SIZE - 1)
    if OPTIONS.has_prefix:
        seen_by_all = tl.minimum(prefix, N_KEYS)
        start = tl.where(key_start < seen_by_all, 0, start)
        full_start = tl.where(key_start + K_TILE_SIZE <= seen_by_all, 0, full_start)
    full_start = tl.cdiv(tl.maximum(full_start, 0), Q_TILE_SIZE) * Q_TILE_SIZE
    stop, full_stop = N_QUERIES, N_QUERIES
    if OPTIONS.has_left:
        first_blind = key_start - offset + window_left + 1
        stop = tl.minimum(stop, tl.maximum(first_blind + K_TILE_SIZE - 1, 0))
        full_stop = tl.minimum(full_stop, tl.maximum(first_blind, 0) // Q_TILE_SIZE * Q_TILE_SIZE)
    starts = (start, full_start, tl.maximum(full_start, full_stop))
    stops = (tl.minimum(full_start, stop), full_stop, stop)

    columns = tl.arange(0, D_PADDED)
    value_columns = tl.arange(0, E_PADDED)
    rows = tile_indices(Q_TILE_SIZE, OPTIONS.wide)
    key_rows = tile_indices(K_TILE_SIZE, OPTIONS.wide)
    keys = key_start + tl.arange(0, K_TILE_SIZE)
    n_rows = N_KEYS - key_start
    first = key_start.to(tl.int64)
    k = load_rows(K_ptr + first * stride_kk, key_rows, columns, stride_kk, n_rows, D, True)
    v_tile = V_ptr + first * stride_vk
    v = load_rows(v_tile, key_rows, value_columns, stride_vk, n_rows, OPTIONS.e, True)

    dk = tl.zeros([K_TILE_SIZE, D_PADDED], tl.float32)
    dv = tl.zeros([K_TILE_SIZE, E_PADDED], tl.float32)
    bias_strides = (stride_bb, stride_bh, stride_bq, stride_bk)
    for member in range(loop_bound(HEADS_PER_KV, OPTIONS)):
        head = kv_head * HEADS_PER_KV + member
        batch_head = batch * N_KV_HEADS * HEADS_PER_KV + head
        if OPTIONS.packed:  # all sequences are one row of each head
            batch_head = head
        q_head, do_head, statistics = Q_ptr, dO_ptr, statistics_ptr
        if not OPTIONS.use_tma:
            q_head += head.to(tl.int64) * stride_qh
            do_head += head.to(tl.int64) * stride_doh
        if not OPTIONS.statistics_by_tma:
            statistics += batch_head.to(tl.int64) * 2 * N_PADDED + first_query
        added = added_of(
            slopes_ptr, bias_ptr, mask_ptr, bias_strides, batch, N_KV_HEADS * HEADS_PER_KV, head,
            N_KEYS, OPTIONS,
        )  # fmt: skip
        dq_head = dq_start + head.to(tl.int64) * stride_dqh
        for part in tl.static_range(3):  # the right edge, whole tiles, a window's left edge
            if part < 2 or OPTIONS.has_left:
                dk, dv = _differentiate_keys(
                    dk, dv, k, v, (q_head, stride_qq), (do_head, stride_doq), (batch, head),
                    (dQ_ptr, dq_head, stride_dqq), statistics, N_PADDED, batch_head, starts[part],
                    stops[part], keys, key_start, rows, columns, value_columns, mask, added,
                    (scale, softcap), D, is_causal, OPTIONS, part != 1,
                )  # fmt: skip
    dk_tile = dK_ptr + first * stride_dkk
    ADDS: tl.constexpr = OPTIONS.adds
    store_rows(dk_tile, dk * scale, key_rows, columns, stride_dkk, n_rows, D, ADDS)
    dv_tile = dV_ptr + first * stride_dvk
    store_rows(dv_tile, dv, key_rows, value_columns, stride_dvk, n_rows, OPTIONS.e, ADDS)


def key_pass_launch(inputs: KernelInputs, tiles: Tiles, dq_mode: tl.constexpr) -> Launch:
    """The launch of the kernel on one kind of input.

    ``dq_mode``: NONE, ATOMIC or TMA_REDUCE. Unless it is NONE, dQ is the fp32 sum.
    """
    fp32 = torch.float32
    parameters: dict[str, Parameter] = {} if dq_mode is NONE else {"dQ_ptr": fp32}
    # Unless the loop is pipelined, the program waits for a TMA load where the load is issued. It
    # does not wait for a load through pointers until it needs the values.
    use_tma = tiles.use_tma and inputs.readable_by_tma
    statistics_by_tma = use_tma and tiles.stages > 1
    batch, heads, n_queries, head_dim = inputs.query.shape
    if statistics_by_tma:
        rows = [2 * batch * heads, inputs.n_padded]
        parameters["statistics_ptr"] = tile_view(rows, [rows[1], 1], [1, tiles.queries], fp32)
    if dq_mode is TMA_REDUCE:
        width = padded(head_dim, inputs.query.dtype)
        rows = [batch * heads * n_queries, width]
        parameters["dQ_ptr"] = tile_view(rows, [width, 1], [tiles.queries, width], fp32)
        # A descriptor counts rows, not elements.
        dq = tuple(stride // width for stride in inputs.results["dq"])
        inputs = replace(inputs, results={**inputs.results, "dq": dq})
    kv_heads = inputs.key.shape[1]
    programs = tiles_of_head(inputs.key.shape, tiles.keys, inputs.given) * kv_heads
    return inputs.launch(
        key_pass_kernel, tiles, parameters, programs=programs, walked=("Q_ptr", "dO_ptr"),
        dq_mode=dq_mode.value, statistics_by_tma=statistics_by_tma,
    )  # fmt: skip
