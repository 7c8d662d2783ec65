# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""The backward pass as portable Triton kernels: FlashAttention-2, Algorithm 2.

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

import triton
import triton.language as tl

from flashattn_triton.forward import (
    LOG2_E,
    dot,
    key_range,
    load_rows,
    loop_bound,
    store_rows,
    tanh,
    tile_indices,
    tma_load,
    tma_reload,
    visible,
)

# How the key pass adds its part of dQ: not at all, by fp32 atomic additions, or by the bulk
# reductions of sm_90 and later, which the TMA carries out on whole tiles.
NONE = tl.constexpr(0)
ATOMIC = tl.constexpr(1)
TMA_REDUCE = tl.constexpr(2)


@triton.jit(do_not_specialize=["N_QUERIES", "N_HEADS"])
def preprocess_kernel(
    O_ptr,
    dO_ptr,
    dL_ptr,  # (B, H, N_q) fp32, or None
    L_ptr,
    statistics_ptr,  # (B · H, 2, N_PADDED) fp32
    dQ_ptr,  # (B · H, N_q, D_PADDED) fp32 to be zeroed, or None
    stride_ob,
    stride_oh,
    stride_oq,
    stride_dob,
    stride_doh,
    stride_doq,
    stride_dlb,
    stride_dlh,
    stride_dlq,
    N_QUERIES,
    N_PADDED,
    N_HEADS,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_DL: tl.constexpr,
    ZEROES: tl.constexpr,
):
    """L · log2(e), and delta = rowsum(O ∘ dO) - dL, for ROWS queries of one head.

    Grid: tiles · B · H. N_PADDED queries have statistics: those past the end have L = inf and
    delta = 0, so that their P and dS are exactly 0 and no other kernel needs to ask where the end
    is. A packed batch is one sequence here.
    """
    n_tiles = tl.cdiv(N_PADDED, ROWS)
    batch_head = tl.program_id(0) // n_tiles
    h = (batch_head % N_HEADS).to(tl.int64)
    b = (batch_head // N_HEADS).to(tl.int64)
    query_start = ((tl.program_id(0) % n_tiles) * ROWS).to(tl.int64)
    rows = tl.arange(0, ROWS).to(tl.int64)
    columns = tl.arange(0, E_PADDED)
    n_rows = N_QUERIES - query_start
    o_tile = O_ptr + b * stride_ob + h * stride_oh + query_start * stride_oq
    do_tile = dO_ptr + b * stride_dob + h * stride_doh + query_start * stride_doq
    o = load_rows(o_tile, rows, columns, stride_oq, n_rows, E, True).to(tl.float32)
    do = load_rows(do_tile, rows, columns, stride_doq, n_rows, E, True).to(tl.float32)
    delta = tl.sum(o * do, 1)
    inside = rows < n_rows
    if HAS_DL:
        dl_tile = dL_ptr + b * stride_dlb + h * stride_dlh + query_start * stride_dlq
        delta -= tl.load(dl_tile + rows * stride_dlq, mask=inside, other=0.0)
    row = batch_head.to(tl.int64) * N_QUERIES + query_start
    logsumexp = tl.load(L_ptr + row + rows, mask=inside, other=float("inf"))
    # A constant logsumexp has no derivative, whatever its gradient claims (0 · NaN is NaN).
    delta = tl.where(logsumexp == float("-inf"), 0.0, delta)
    target = statistics_ptr + batch_head.to(tl.int64) * 2 * N_PADDED + query_start + rows
    stored = rows < N_PADDED - query_start
    tl.store(target, logsumexp * LOG2_E, mask=stored)
    tl.store(target + N_PADDED, delta, mask=stored)
    if ZEROES:
        dq_rows = tl.zeros([ROWS, D_PADDED], tl.float32)
        all_columns = tl.arange(0, D_PADDED)
        store_rows(dQ_ptr + row * D_PADDED, dq_rows, rows, all_columns, D_PADDED, n_rows, D_PADDED)


@triton.jit
def load_statistic(ptr, queries, n_queries, other, PACKED: tl.constexpr):
    """One statistic of ``queries``: padded, or followed by those of the next sequence."""
    if PACKED:
        return tl.load(ptr + queries, mask=queries < n_queries, other=other)
    return tl.load(ptr + queries)


@triton.jit
def _differentiate_keys(
    dk,  # (K_TILE_SIZE, D_PADDED) fp32, without the scale
    dv,  # (K_TILE_SIZE, E_PADDED) fp32
    k,
    v,
    Q,  # a pointer to this head, or a descriptor of all of (B, H, N_q, D); so is dO
    dO,
    dQ,
    statistics,  # a pointer to this head's, or a descriptor of (2 · B · H, N_PADDED)
    n_padded,
    batch,
    head,
    batch_head,  # batch · H + head
    dq_start,
    stride_qq,
    stride_doq,
    stride_dqq,
    start,
    stop,
    keys,
    rows,
    columns,
    value_columns,
    offset,
    n_queries,
    n_keys,
    window_left,
    window_right,
    scale,
    softcap,
    D: tl.constexpr,
    E: tl.constexpr,
    Q_TILE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DQ_MODE: tl.constexpr,
    USE_TMA: tl.constexpr,
    STATISTICS_BY_TMA: tl.constexpr,
    PACKED: tl.constexpr,
    is_causal: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds what queries ``start`` to ``stop`` contribute. Scores are (keys, queries) here."""
    WIDE_FP32: tl.constexpr = USE_TMA and PRECISION == "bf16x6" and columns.shape[0] > 128
    for query_start in range(
        loop_bound(start, INTERPRETED), loop_bound(stop, INTERPRETED), Q_TILE_SIZE
    ):
        query_start = query_start + 0  # a tensor under the interpreter too
        n_rows = n_queries - query_start
        queries = query_start + tl.arange(0, Q_TILE_SIZE)
        if USE_TMA:  # rows and columns past the end are 0
            q = tma_load(Q, batch, head, query_start, Q_TILE_SIZE, columns.shape[0])
        else:
            q_tile = Q + query_start.to(tl.int64) * stride_qq
            q = load_rows(q_tile, rows, columns, stride_qq, n_rows, D, True)
        if STATISTICS_BY_TMA:
            logsumexp = statistics.load([2 * batch_head, query_start]).reshape(Q_TILE_SIZE)
        else:
            logsumexp = load_statistic(statistics, queries, n_queries, float("inf"), PACKED)
        if USE_TMA:
            do = tma_load(dO, batch, head, query_start, Q_TILE_SIZE, value_columns.shape[0])
        else:
            do_tile = dO + query_start.to(tl.int64) * stride_doq
            do = load_rows(do_tile, rows, value_columns, stride_doq, n_rows, E, True)
        if STATISTICS_BY_TMA:
            delta = statistics.load([2 * batch_head + 1, query_start]).reshape(Q_TILE_SIZE)
        else:
            delta = load_statistic(statistics + n_padded, queries, n_queries, 0.0, PACKED)
        # Both products of scores are started before either is waited for, and so are the sums.
        s = dot(k, tl.trans(q), None, PRECISION, INTERPRETED)  # (K_TILE_SIZE, Q_TILE_SIZE)
        dp = dot(v, tl.trans(do), None, PRECISION, INTERPRETED)
        if HAS_SOFTCAP:
            s = tanh(s * (scale / softcap))
            p = tl.exp2(s * (softcap * LOG2_E) - logsumexp[None, :])
        else:
            p = tl.exp2(s * (scale * LOG2_E) - logsumexp[None, :])
        if MASKED:
            seen = visible(
                queries[None, :],
                keys[:, None],
                offset,
                n_keys,
                window_left,
                window_right,
                HAS_LEFT,
                is_causal,
            )
            p = tl.where(seen, p, 0.0)
        ds = p * (dp - delta[None, :])
        if HAS_SOFTCAP:
            ds = ds * (1.0 - s * s)
        ds = ds.to(q.dtype)
        if WIDE_FP32:
            q = tma_reload(Q, batch, head, query_start, n_queries, Q_TILE_SIZE, columns.shape[0])
            do = tma_reload(
                dO, batch, head, query_start, n_queries, Q_TILE_SIZE, value_columns.shape[0]
            )
        dv = dot(p.to(do.dtype), do, dv, PRECISION, INTERPRETED, INFINITIES=not WIDE_FP32)
        dk = dot(ds, q, dk, PRECISION, INTERPRETED, INFINITIES=not WIDE_FP32)
        if DQ_MODE == TMA_REDUCE:
            # Rows past the end carry zeros, which may be added to whatever follows.
            dq = dot(tl.trans(ds), k, None, PRECISION, INTERPRETED, INFINITIES=not WIDE_FP32)
            dQ.atomic_add([(dq_start + query_start).to(tl.int32), 0], dq)
        elif DQ_MODE == ATOMIC:
            dq = dot(tl.trans(ds), k, None, PRECISION, INTERPRETED, INFINITIES=not WIDE_FP32)
            dq_tile = dQ + dq_start + query_start.to(tl.int64) * stride_dqq
            pointers = dq_tile + rows[:, None] * stride_dqq + columns[None, :]
            inside = (rows < n_rows)[:, None] & (columns < D)[None, :]
            tl.atomic_add(pointers, dq, mask=inside, sem="relaxed")
    return dk, dv


@triton.jit(do_not_specialize=["N_QUERIES", "N_KEYS", "N_KV_HEADS", "window_left", "window_right"])
def key_pass_kernel(
    Q,  # a pointer, or if COPIED a descriptor of (B, H, N_q, D); so is dO
    K_ptr,
    V_ptr,
    dO,
    statistics,  # a pointer, or if COPIES_STATISTICS a descriptor of (2 · B · H, N_PADDED)
    dQ,  # fp32, zeroed: a pointer, or a descriptor of (rows, D_PADDED); unused in mode NONE
    dK_ptr,
    dV_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
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
    E: tl.constexpr,
    D_PADDED: tl.constexpr,
    E_PADDED: tl.constexpr,
    Q_TILE_SIZE: tl.constexpr,
    K_TILE_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
    DQ_MODE: tl.constexpr,
    USE_TMA: tl.constexpr,
    STATISTICS_BY_TMA: tl.constexpr,
    is_causal: tl.constexpr,
):
    """dK and dV of one key tile of one key head. Grid: tiles · B · G.

    Under a causal mask the first key tile is seen by most queries, so the order is longest first.
    """
    n_tiles = tl.cdiv(N_KEYS, K_TILE_SIZE)
    kv_head = (tl.program_id(0) // n_tiles) % N_KV_HEADS
    batch = tl.program_id(0) // n_tiles // N_KV_HEADS
    key_start = (tl.program_id(0) % n_tiles) * K_TILE_SIZE

    b, kv_h = batch.to(tl.int64), kv_head.to(tl.int64)
    if not USE_TMA:
        Q += b * stride_qb
        dO += b * stride_dob
    K_ptr += b * stride_kb + kv_h * stride_kh
    V_ptr += b * stride_vb + kv_h * stride_vh
    dK_ptr += b * stride_dkb + kv_h * stride_dkh
    dV_ptr += b * stride_dvb + kv_h * stride_dvh
    dq_start = b * stride_dqb
    first_statistic = 0
    if PACKED:
        first_query = tl.load(cu_seqlens_q_ptr + batch)
        first_key = tl.load(cu_seqlens_k_ptr + batch)
        N_QUERIES = tl.load(cu_seqlens_q_ptr + batch + 1) - first_query
        N_KEYS = tl.load(cu_seqlens_k_ptr + batch + 1) - first_key
        if key_start >= N_KEYS:
            return
        Q += first_query.to(tl.int64) * stride_qq
        K_ptr += first_key.to(tl.int64) * stride_kk
        V_ptr += first_key.to(tl.int64) * stride_vk
        dO += first_query.to(tl.int64) * stride_doq
        dq_start += first_query.to(tl.int64) * stride_dqq
        dK_ptr += first_key.to(tl.int64) * stride_dkk
        dV_ptr += first_key.to(tl.int64) * stride_dvk
        first_statistic = first_query
    offset = 0
    if BOTTOM_RIGHT:
        offset = N_KEYS - N_QUERIES

    # Queries that see some key of the tile, and whole query tiles that see every key of it. A key
    # tile past the end is masked throughout: what its padding adds to dQ must be exactly 0.
    start = 0
    full_start = tl.where(key_start + K_TILE_SIZE > N_KEYS, N_QUERIES, 0)
    if is_causal:
        first_seeing = key_start - offset - window_right
        start = tl.maximum(first_seeing, 0) // Q_TILE_SIZE * Q_TILE_SIZE
        full_start = tl.maximum(full_start, first_seeing + K_TILE_SIZE - 1)
    full_start = tl.cdiv(tl.maximum(full_start, 0), Q_TILE_SIZE) * Q_TILE_SIZE
    stop, full_stop = N_QUERIES, N_QUERIES
    if HAS_LEFT:
        first_blind = key_start - offset + window_left + 1
        stop = tl.minimum(stop, tl.maximum(first_blind + K_TILE_SIZE - 1, 0))
        full_stop = tl.minimum(full_stop, tl.maximum(first_blind, 0) // Q_TILE_SIZE * Q_TILE_SIZE)

    columns = tl.arange(0, D_PADDED)
    value_columns = tl.arange(0, E_PADDED)
    rows = tile_indices(Q_TILE_SIZE, WIDE)
    key_rows = tile_indices(K_TILE_SIZE, WIDE)
    keys = key_start + tl.arange(0, K_TILE_SIZE)
    n_rows = N_KEYS - key_start
    first = key_start.to(tl.int64)
    k = load_rows(K_ptr + first * stride_kk, key_rows, columns, stride_kk, n_rows, D, True)
    v = load_rows(V_ptr + first * stride_vk, key_rows, value_columns, stride_vk, n_rows, E, True)

    dk = tl.zeros([K_TILE_SIZE, D_PADDED], tl.float32)
    dv = tl.zeros([K_TILE_SIZE, E_PADDED], tl.float32)
    for member in range(loop_bound(HEADS_PER_KV, INTERPRETED)):
        head = kv_head * HEADS_PER_KV + member
        batch_head = batch * N_KV_HEADS * HEADS_PER_KV + head
        if PACKED:  # all sequences are one row of each head
            batch_head = head
        q_head, do_head, head_statistics = Q, dO, statistics
        if not USE_TMA:
            q_head += head.to(tl.int64) * stride_qh
            do_head += head.to(tl.int64) * stride_doh
        if not STATISTICS_BY_TMA:
            head_statistics += batch_head.to(tl.int64) * 2 * N_PADDED + first_statistic
        dq_head = dq_start + head.to(tl.int64) * stride_dqh
        dk, dv = _differentiate_keys(
            dk, dv, k, v, q_head, do_head, dQ, head_statistics, N_PADDED, batch, head, batch_head,
            dq_head, stride_qq, stride_doq, stride_dqq, start, tl.minimum(full_start, stop),
            keys, rows, columns, value_columns, offset, N_QUERIES, N_KEYS,
            window_left, window_right, scale, softcap, D, E, Q_TILE_SIZE, HAS_SOFTCAP, HAS_LEFT,
            PRECISION, INTERPRETED, DQ_MODE, USE_TMA, STATISTICS_BY_TMA, PACKED, is_causal, True,
        )  # fmt: skip
        dk, dv = _differentiate_keys(
            dk, dv, k, v, q_head, do_head, dQ, head_statistics, N_PADDED, batch, head, batch_head,
            dq_head, stride_qq, stride_doq, stride_dqq, full_start, full_stop,
            keys, rows, columns, value_columns, offset, N_QUERIES, N_KEYS,
            window_left, window_right, scale, softcap, D, E, Q_TILE_SIZE, HAS_SOFTCAP, HAS_LEFT,
            PRECISION, INTERPRETED, DQ_MODE, USE_TMA, STATISTICS_BY_TMA, PACKED, is_causal, False,
        )  # fmt: skip
        if HAS_LEFT:
            dk, dv = _differentiate_keys(
                dk, dv, k, v, q_head, do_head, dQ, head_statistics, N_PADDED, batch, head,
                batch_head, dq_head, stride_qq, stride_doq, stride_dqq,
                tl.maximum(full_start, full_stop), stop, keys, rows, columns, value_columns,
                offset, N_QUERIES, N_KEYS, window_left, window_right, scale, softcap, D, E,
                Q_TILE_SIZE, HAS_SOFTCAP, HAS_LEFT, PRECISION, INTERPRETED, DQ_MODE, USE_TMA,
                STATISTICS_BY_TMA, PACKED, is_causal, True,
            )  # fmt: skip
    dk_tile = dK_ptr + first * stride_dkk
    store_rows(dk_tile, dk * scale, key_rows, columns, stride_dkk, n_rows, D)
    store_rows(dV_ptr + first * stride_dvk, dv, key_rows, value_columns, stride_dvk, n_rows, E)


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
    scale,
    softcap,
    D: tl.constexpr,
    E: tl.constexpr,
    K_TILE_SIZE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
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
        if HAS_SOFTCAP:
            s = tanh(s * (scale / softcap))
            p = tl.exp2(s * (softcap * LOG2_E) - logsumexp[:, None])
        else:
            p = tl.exp2(s * (scale * LOG2_E) - logsumexp[:, None])
        if MASKED:
            seen = visible(
                queries[:, None],
                (key_start + keys)[None, :],
                offset,
                n_keys,
                window_left,
                window_right,
                HAS_LEFT,
                is_causal,
            )
            p = tl.where(seen, p, 0.0)
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
    K,  # a pointer, or if COPIED a descriptor of (B, G, N_k, D); so is V
    V,
    dO_ptr,
    statistics_ptr,  # (B · H, 2, N_PADDED) fp32, see prepare_kernel
    dQ_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
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
        first_query = tl.load(cu_seqlens_q_ptr + batch)
        first_key = tl.load(cu_seqlens_k_ptr + batch)
        N_QUERIES = tl.load(cu_seqlens_q_ptr + batch + 1) - first_query
        N_KEYS = tl.load(cu_seqlens_k_ptr + batch + 1) - first_key
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

    start, full_start, full_stop, stop = key_range(
        query_start, offset, N_KEYS, window_left, window_right, Q_TILE_SIZE, K_TILE_SIZE,
        HAS_LEFT, is_causal,
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
            N_KEYS, window_left, window_right, scale, softcap, D, E, K_TILE_SIZE, HAS_SOFTCAP,
            HAS_LEFT, PRECISION, INTERPRETED, USE_TMA, is_causal, True,
        )  # fmt: skip
    dq = _differentiate_queries(
        dq, q, do, logsumexp, delta, K, V, batch, kv_head, stride_kk, stride_vk,
        full_start, full_stop, queries, keys, columns, value_columns, offset,
        N_KEYS, window_left, window_right, scale, softcap, D, E, K_TILE_SIZE, HAS_SOFTCAP,
        HAS_LEFT, PRECISION, INTERPRETED, USE_TMA, is_causal, False,
    )  # fmt: skip
    dq = _differentiate_queries(
        dq, q, do, logsumexp, delta, K, V, batch, kv_head, stride_kk, stride_vk,
        tl.maximum(full_start, full_stop), stop, queries, keys, columns, value_columns, offset,
        N_KEYS, window_left, window_right, scale, softcap, D, E, K_TILE_SIZE, HAS_SOFTCAP,
        HAS_LEFT, PRECISION, INTERPRETED, USE_TMA, is_causal, True,
    )  # fmt: skip
    store_rows(dQ_ptr + first * stride_dqq, dq * scale, rows, columns, stride_dqq, n_rows, D)
