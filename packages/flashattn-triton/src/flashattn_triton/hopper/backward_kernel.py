# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""The backward pass on sm_90, fused: FlashAttention-2, Algorithm 2, with its products overlapped.

A program computes dK and dV of 128 keys and its part of dQ, which the copy engine adds up in fp32.
One warp group, the producer, fetches tiles of Q and dO and has finished tiles of dQ added; two
consumers own 64 keys each. Everything is computed transposed, keys by queries, so that P and dS are
operands of the next products as they lie in registers:

    Sᵀ  = K Qᵀ                      Pᵀ = exp2(Sᵀ · scale · log2(e) - L · log2(e))
    dPᵀ = V dOᵀ                     dSᵀ = Pᵀ ∘ (dPᵀ - delta),  delta = rowsum(O ∘ dO) - dL
    dV += Pᵀ dO,   dK += dSᵀ Q      from registers
    dQ  = dS K                      dS through shared memory, where both consumers' halves meet

In the loop Sᵀ of the next tile is issued before dQ of this one is handed over. L and delta travel
with Q and dO; before and after there are the kernels of ``preprocess``.

The order in which programs add to dQ is not fixed: ``deterministic`` needs the portable tier.

Legend: B batch, H query heads, G key/value heads, N_q queries, N_k keys, D head_dim.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashattn_triton.hopper.support import (
    exp2,
    named_barrier_arrive_at,
    named_barrier_sync,
    named_barrier_sync_at,
    reduce_add,
    tma_reduce_add,
)

KEYS = gl.constexpr(128)  # of one program
OWN = gl.constexpr(64)  # keys of one consumer: the rows that one warp group's wgmma computes
STAGES = gl.constexpr(2)  # tiles of Q and of dO that are in shared memory at a time

# Hardware barriers. Consumers meet at the first; at the others they tell the producer, which waits,
# that one of two slots may be filled again, or that a tile of dQ may be added. Unlike an arrival at
# a barrier in shared memory, these need no barrier among a consumer's own warps first.
EXCHANGE = gl.constexpr(0)
DO_EMPTY = gl.constexpr(1)
Q_EMPTY = gl.constexpr(3)
DQ_FULL = gl.constexpr(5)
CONSUMERS = gl.constexpr(256)  # threads
EVERYBODY = gl.constexpr(384)

# ---- which work ----------------------------------------------------------------------------------


@gluon.jit
def _key_tile(N_KEYS, N_KV_HEADS):
    """(first key, key head, batch) of this program: head after head, longest key tile first."""
    n_tiles = gl.cdiv(N_KEYS, KEYS)
    head = gl.program_id(0) // n_tiles
    return (gl.program_id(0) % n_tiles) * KEYS, head % N_KV_HEADS, head // N_KV_HEADS


@gluon.jit
def _walk(
    first_key,
    offset,
    band,
    n_tiles,
    QUERIES: gl.constexpr,
    is_causal: gl.constexpr,
    HAS_LEFT: gl.constexpr,
):
    """Which of a head's tiles of queries see some key here: (first, last, after the last, count).

    The count is at least 1. Without a mask programs start at different tiles, so that they do not
    all add to the same part of dQ, and go on with the first tile after the last.
    """
    first = 0
    last = n_tiles - 1
    if is_causal:
        first = min(max(first_key - offset, 0) // QUERIES, last)
    if HAS_LEFT:
        last = max(min((first_key + KEYS - 1 - offset + band) // QUERIES, last), first)
    if is_causal or HAS_LEFT:
        return first, last, first, last - first + 1
    return (first_key // KEYS * 2) % n_tiles, last, 0, n_tiles


@gluon.jit
def _advance(tile, head, first, last, wrap):
    """The next tile of queries; after a head's last one, of the next head of the group."""
    tile = gl.where(tile == last, wrap, tile + 1)
    return tile, gl.where(tile == first, head + 1, head)


# ---- producer ------------------------------------------------------------------------------------


@gluon.jit
def _produce(
    loads,  # descriptors of Q, K, V, dO and the statistics
    dq,
    full,  # barriers: copied
    dq_empty,
    buffers,
    dq_smem,
    N_QUERIES,
    N_KEYS,
    N_KV_HEADS,
    HEADS_PER_KV,
    offset,
    band,
    QUERIES: gl.constexpr,
    DQ_BUFFERS: gl.constexpr,
    is_causal: gl.constexpr,
    HAS_LEFT: gl.constexpr,
):
    """Fetches K and V once, then each step's Q, dO, L and delta; has dQ added two steps later."""
    q_desc, k_desc, v_desc, do_desc, statistics_desc = loads
    kv_full, q_full, do_full = full
    k_smem, v_smem, q_smem, do_smem, l_smem, delta_smem = buffers
    D: gl.constexpr = k_smem.shape[2]
    KEY_BYTES: gl.constexpr = 2 * KEYS * D * 2
    QUERY_BYTES: gl.constexpr = QUERIES * D * 2 + QUERIES * 4
    first_key, kv_head, batch = _key_tile(N_KEYS, N_KV_HEADS)
    n_tiles = gl.cdiv(N_QUERIES, QUERIES)
    first, last, wrap, per_head = _walk(
        first_key, offset, band, n_tiles, QUERIES, is_causal, HAS_LEFT
    )
    steps = per_head * HEADS_PER_KV
    mbarrier.expect(kv_full, KEY_BYTES)
    key_tile = [batch, kv_head, first_key, 0]
    tma.async_copy_global_to_shared(k_desc, key_tile, kv_full, k_smem.index(0))
    tma.async_copy_global_to_shared(v_desc, key_tile, kv_full, v_smem.index(0))
    before = batch * N_KV_HEADS * HEADS_PER_KV  # heads of other batch elements
    deltas = statistics_desc.shape[0] // 2
    tile = first
    head = kv_head * HEADS_PER_KV
    added_tile = tile
    added_head = head
    for step in range(steps + STAGES):
        slot = step % STAGES
        row = (before + head) * n_tiles + tile  # of the tiles of all heads
        query_tile = [batch, head, tile * QUERIES, 0]
        if step >= STAGES:
            named_barrier_sync_at(DO_EMPTY + slot, EVERYBODY)
        if step < steps:
            mbarrier.expect(do_full.index(slot), QUERY_BYTES)
            tma.async_copy_global_to_shared(
                do_desc, query_tile, do_full.index(slot), do_smem.index(slot)
            )
            tma.async_copy_global_to_shared(
                statistics_desc, [deltas + row, 0], do_full.index(slot), delta_smem.index(slot)
            )
        if step >= STAGES:
            if DQ_BUFFERS > 0:
                buffer = (step - STAGES) % DQ_BUFFERS
                start = ((before + added_head) * n_tiles + added_tile) * QUERIES
                named_barrier_sync_at(DQ_FULL + buffer, EVERYBODY)
                tma_reduce_add(dq, [start, 0], dq_smem.index(buffer * 2))
                if D == 128:
                    tma_reduce_add(dq, [start, 64], dq_smem.index(buffer * 2 + 1))
                else:
                    tma_reduce_add(dq, [start + 64, 0], dq_smem.index(buffer * 2 + 1))
                added_tile, added_head = _advance(added_tile, added_head, first, last, wrap)
            named_barrier_sync_at(Q_EMPTY + slot, EVERYBODY)
        if step <= steps:  # consumers start one more product than they use
            mbarrier.expect(q_full.index(slot), QUERY_BYTES)
            tma.async_copy_global_to_shared(
                q_desc, query_tile, q_full.index(slot), q_smem.index(slot)
            )
            tma.async_copy_global_to_shared(
                statistics_desc, [row, 0], q_full.index(slot), l_smem.index(slot)
            )
        if DQ_BUFFERS > 0 and step >= STAGES:
            if DQ_BUFFERS == 1:
                tma.store_wait(0)
                mbarrier.arrive(dq_empty.index(0), count=1)
            else:
                tma.store_wait(2)  # the two additions of this step may still be read
                mbarrier.arrive(dq_empty.index((step + 1) % 2), count=1, pred=step > STAGES)
        if step + 1 < steps:
            tile, head = _advance(tile, head, first, last, wrap)
    if DQ_BUFFERS > 1:
        tma.store_wait(0)


# ---- consumer ------------------------------------------------------------------------------------


@gluon.jit
def _part(x, PART: gl.constexpr, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Of (keys, queries) ``x`` one of at most two parts of the queries: a choice of registers."""
    if PARTS == 2:
        halves = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))
        x = gl.convert_layout(halves[PART], LAYOUT, assert_trivial=True)
    return x


@gluon.jit
def _hide(
    p,
    diagonal,
    band,
    n_keys,
    RAGGED: gl.constexpr,
    is_causal: gl.constexpr,
    HAS_LEFT: gl.constexpr,
):
    """(keys, queries) probabilities, with 0 where the query does not see the key.

    Query i sees the rows of ``p`` from ``diagonal + i - band`` to ``diagonal + i``, which are among
    the first ``n_keys``.
    """
    LAYOUT: gl.constexpr = p.type.layout
    keys = gl.arange(0, p.shape[0], gl.SliceLayout(1, LAYOUT))
    last = diagonal + gl.arange(0, p.shape[1], gl.SliceLayout(0, LAYOUT))
    if is_causal:
        p = gl.where(gl.expand_dims(keys, 1) <= gl.expand_dims(last, 0), p, 0.0)
    if HAS_LEFT:
        p = gl.where(gl.expand_dims(keys, 1) >= gl.expand_dims(last - band, 0), p, 0.0)
    if RAGGED:
        p = gl.where(gl.expand_dims(keys < n_keys, 1), p, 0.0)
    return p


@gluon.jit
def _wrapped(tile, n_tiles):
    """A walk over all tiles that began in the middle goes on with the first."""
    return gl.where(tile < n_tiles, tile, tile - n_tiles)


@gluon.jit
def _fragment_offsets(LAYOUT: gl.constexpr):
    """Offsets of a (64, 64) fp32 block such that a thread's elements are groups of four."""
    rows = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1)
    columns = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, LAYOUT)), 0)
    return (columns // 8) * 512 + ((rows // 16) * 32 + (rows % 8) * 4 + (columns % 8) // 2) * 4


@gluon.jit
def _step(
    full,
    dq_empty,
    buffers,
    ds_smem,
    dq_smem,
    dq_own,  # where this consumer's half of the group's first tile of dQ lies, without DQ_BUFFERS
    step,
    last_step,
    row,  # of this tile, of the tiles of the group's heads
    diagonal,
    band,
    n_keys,
    scale_log2,
    s,  # (OWN, QUERIES) fp32, raw scores of this tile
    dk,  # (OWN, D) fp32, without the scale
    dv,
    CONSUMER: gl.constexpr,
    DQ_BUFFERS: gl.constexpr,
    PARTS: gl.constexpr,
    DK_FIRST: gl.constexpr,
    RAGGED: gl.constexpr,
    is_causal: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Adds what one tile of queries contributes; returns the next tile's scores, dK and dV."""
    _, q_full, do_full = full
    k_smem, v_smem, q_smem, do_smem, l_smem, delta_smem = buffers
    QUERIES: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    DTYPE: gl.constexpr = q_smem.dtype
    WIDTH: gl.constexpr = QUERIES // PARTS
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SCORES: gl.constexpr = s.type.layout
    SUMS: gl.constexpr = dk.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    slot = step % STAGES
    next_slot = (step + 1) % STAGES
    next_phase = ((step + 1) // STAGES) & 1
    # Always 0, which the compiler cannot know: it would otherwise keep all addresses within K and V
    # in registers, of which there are too few.
    again = step >> 30
    k_tile = k_smem.index(again)
    own_k = k_tile.slice(CONSUMER * OWN, OWN, dim=0)
    own_v = v_smem.index(again).slice(CONSUMER * OWN, OWN, dim=0)
    q_tile = q_smem.index(slot)
    do_tile = do_smem.index(slot)
    ds_tile = ds_smem.index(slot)
    no_scores = gl.zeros([OWN, QUERIES], gl.float32, SCORES)
    no_dq = gl.zeros([64, 64], gl.float32, DQ)

    dp = warpgroup_mma(own_v, do_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    p = ()
    for i in gl.static_range(PARTS):
        minus_l = l_smem.index(slot).slice(i * WIDTH, WIDTH, dim=1).load(PART)
        p_part = exp2(_part(s, i, PARTS, PART) * scale_log2 + minus_l)
        if MASKED:
            p_part = _hide(p_part, diagonal + i * WIDTH, band, n_keys, RAGGED, is_causal, HAS_LEFT)
        p = p + (p_part,)  # noqa: RUF005 (Triton's tuples)
        operand = gl.convert_layout(p_part.to(DTYPE), OPERAND)
        dv = warpgroup_mma(operand, do_tile.slice(i * WIDTH, WIDTH, dim=0), dv, is_async=True)
    dp = warpgroup_mma_wait(PARTS, deps=(dp,))
    ds = ()
    for i in gl.static_range(PARTS):
        minus_delta = delta_smem.index(slot).slice(i * WIDTH, WIDTH, dim=1).load(PART)
        ds_part = (p[i] * (_part(dp, i, PARTS, PART) + minus_delta)).to(DTYPE)
        ds = ds + (ds_part,)  # noqa: RUF005
        if DK_FIRST:
            operand = gl.convert_layout(ds_part, OPERAND)
            dk = warpgroup_mma(operand, q_tile.slice(i * WIDTH, WIDTH, dim=0), dk, is_async=True)
    for i in gl.static_range(PARTS):
        ds_tile.slice(CONSUMER * OWN, OWN, dim=0).slice(i * WIDTH, WIDTH, dim=1).store(ds[i])
    fence_async_shared()
    named_barrier_sync(EXCHANGE, CONSUMERS)
    if D == 128:  # 64 queries, half of the columns
        own_columns = k_tile.slice(CONSUMER * 64, 64, dim=1)
        dq = warpgroup_mma(
            ds_tile.permute((1, 0)), own_columns, no_dq, use_acc=False, is_async=True
        )
    else:  # half of 128 queries
        own_queries = ds_tile.slice(CONSUMER * 64, 64, dim=1).permute((1, 0))
        dq = warpgroup_mma(own_queries, k_tile, no_dq, use_acc=False, is_async=True)
    if not DK_FIRST:
        for i in gl.static_range(PARTS):
            operand = gl.convert_layout(ds[i], OPERAND)
            dk = warpgroup_mma(operand, q_tile.slice(i * WIDTH, WIDTH, dim=0), dk, is_async=True)
    dv = warpgroup_mma_wait(PARTS + 1, deps=(dv,))
    named_barrier_arrive_at(DO_EMPTY + slot, EVERYBODY)

    mbarrier.wait(q_full.index(next_slot), next_phase)
    next_q = q_smem.index(next_slot).permute((1, 0))
    s = warpgroup_mma(own_k, next_q, no_scores, use_acc=False, is_async=True)
    if DK_FIRST:
        dq, dk = warpgroup_mma_wait(1, deps=(dq, dk))
    else:
        dq = warpgroup_mma_wait(PARTS + 1, deps=(dq,))
    if DQ_BUFFERS > 0:
        buffer = step % DQ_BUFFERS
        mbarrier.wait(dq_empty.index(buffer), ((step // DQ_BUFFERS) & 1) ^ 1)
        dq_smem.index(buffer * 2 + CONSUMER).store(dq)
        fence_async_shared()
        named_barrier_arrive_at(DQ_FULL + buffer, EVERYBODY)
    else:
        reduce_add(dq_own + row.to(gl.int64) * (QUERIES * D), dq)
    if DK_FIRST:
        named_barrier_arrive_at(Q_EMPTY + slot, EVERYBODY)
    mbarrier.wait(do_full.index(next_slot), next_phase, pred=step < last_step)
    # ptxas runs every product by itself unless each iteration ends with nothing in flight.
    s, dk = warpgroup_mma_wait(0, deps=(s, dk))
    if not DK_FIRST:
        named_barrier_arrive_at(Q_EMPTY + slot, EVERYBODY)
    return s, dk, dv


@gluon.jit
def _consume(
    dk_desc,
    dv_desc,
    full,
    dq_empty,
    buffers,
    ds_smem,
    dq_smem,
    dq_ptr,
    scale,
    scale_log2,
    N_QUERIES,
    N_KEYS,
    N_KV_HEADS,
    HEADS_PER_KV,
    offset,
    band,
    CONSUMER: gl.constexpr,
    DQ_BUFFERS: gl.constexpr,
    PARTS: gl.constexpr,
    DK_FIRST: gl.constexpr,
    RAGGED: gl.constexpr,
    is_causal: gl.constexpr,
    HAS_LEFT: gl.constexpr,
):
    """dK and dV of 64 keys, and half of each tile of dQ."""
    kv_full, q_full, do_full = full
    k_smem, v_smem, q_smem, _, _, _ = buffers
    QUERIES: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    DTYPE: gl.constexpr = q_smem.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    first_key, kv_head, batch = _key_tile(N_KEYS, N_KV_HEADS)
    own_key = first_key + CONSUMER * OWN
    n_keys = N_KEYS - own_key
    n_tiles = gl.cdiv(N_QUERIES, QUERIES)
    first, _, _, per_head = _walk(first_key, offset, band, n_tiles, QUERIES, is_causal, HAS_LEFT)
    last_step = per_head * HEADS_PER_KV - 1
    # A tile of queries sees all keys here if its first query does.
    diagonal = first * QUERIES + offset - own_key
    n_masked = 0
    if is_causal:
        n_masked = min(max(gl.cdiv(OWN - 1 - diagonal, QUERIES), 0), per_head)
    n_seen = per_head  # of these steps, those before a window's left edge, or on it
    if HAS_LEFT:  # a tile of queries sees all keys here if its last query does
        n_seen = min(max((band - diagonal + 1) // QUERIES, n_masked), per_head)
    if RAGGED:
        n_masked = gl.where(n_keys < OWN, per_head, n_masked)
        n_seen = max(n_seen, n_masked)
    dq_own = dq_ptr
    if DQ_BUFFERS == 0:
        before = (batch * N_KV_HEADS + kv_head) * HEADS_PER_KV * n_tiles
        dq_own = dq_ptr + before.to(gl.int64) * (QUERIES * D) + CONSUMER * 4096
        dq_own = dq_own + _fragment_offsets(DQ)

    mbarrier.wait(kv_full, 0)
    mbarrier.wait(q_full.index(0), 0)
    own_k = k_smem.index(0).slice(CONSUMER * OWN, OWN, dim=0)
    own_v = v_smem.index(0).slice(CONSUMER * OWN, OWN, dim=0)
    no_scores = gl.zeros([OWN, QUERIES], gl.float32, SCORES)
    s = warpgroup_mma(
        own_k, q_smem.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True
    )
    mbarrier.wait(do_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    dk = gl.zeros([OWN, D], gl.float32, SUMS)
    dv = gl.zeros([OWN, D], gl.float32, SUMS)
    step = 0
    row = 0
    for _ in range(HEADS_PER_KV):
        if is_causal or RAGGED:
            for j in range(n_masked):
                s, dk, dv = _step(
                    full, dq_empty, buffers, ds_smem, dq_smem, dq_own, step, last_step,
                    row + _wrapped(first + j, n_tiles), diagonal + j * QUERIES, band, n_keys,
                    scale_log2, s, dk, dv, CONSUMER, DQ_BUFFERS, PARTS, DK_FIRST, RAGGED, is_causal,
                    HAS_LEFT, True,
                )  # fmt: skip
                step += 1
        for j in range(n_masked, n_seen):
            s, dk, dv = _step(
                full, dq_empty, buffers, ds_smem, dq_smem, dq_own, step, last_step,
                row + _wrapped(first + j, n_tiles), diagonal, band, n_keys, scale_log2,
                s, dk, dv, CONSUMER, DQ_BUFFERS, PARTS, DK_FIRST, RAGGED, is_causal, HAS_LEFT,
                False,
            )  # fmt: skip
            step += 1
        if HAS_LEFT:
            for j in range(n_seen, per_head):
                s, dk, dv = _step(
                    full, dq_empty, buffers, ds_smem, dq_smem, dq_own, step, last_step,
                    row + first + j, diagonal + j * QUERIES, band, n_keys,
                    scale_log2, s, dk, dv, CONSUMER, DQ_BUFFERS, PARTS, DK_FIRST, RAGGED, is_causal,
                    HAS_LEFT, True,
                )  # fmt: skip
                step += 1
        row += n_tiles

    # Nobody reads K and V any more: their memory takes dK and dV.
    named_barrier_sync(EXCHANGE, CONSUMERS)
    own_k.store((dk * scale).to(DTYPE))
    own_v.store(dv.to(DTYPE))
    fence_async_shared()
    tma.async_copy_shared_to_global(dk_desc, [batch, kv_head, own_key, 0], own_k)
    tma.async_copy_shared_to_global(dv_desc, [batch, kv_head, own_key, 0], own_v)
    tma.store_wait(0)


# ---- kernel --------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=[
        *("N_QUERIES", "N_KEYS", "N_KV_HEADS", "HEADS_PER_KV", "offset", "band"),
        *("scale", "scale_log2"),
    ]
)
def hopper_backward_kernel(
    q_desc,  # (B, H, N_q, D), tiles of (QUERIES, D)
    k_desc,  # (B, G, N_k, D), tiles of (KEYS, D)
    v_desc,
    do_desc,  # as q_desc
    statistics_desc,  # (2 · B · H · tiles, QUERIES): -L · log2(e), then -delta
    dq,  # (B · H · tiles · QUERIES, D) fp32: a descriptor, or a pointer if DQ_BUFFERS is 0
    dk_desc,  # (B, G, N_k, D), tiles of (OWN, D)
    dv_desc,
    N_QUERIES,
    N_KEYS,
    N_KV_HEADS,
    HEADS_PER_KV,
    offset,
    band,
    scale,
    scale_log2,
    DQ_BUFFERS: gl.constexpr,
    PARTS: gl.constexpr,
    DK_FIRST: gl.constexpr,
    RAGGED: gl.constexpr,
    is_causal: gl.constexpr,
    HAS_LEFT: gl.constexpr,
):
    """dK and dV, and dQ / scale added to ``dq``. Grid: key tiles · B · G.

    ``offset``: key index minus query index of the last key that a query sees, if ``is_causal``.
    ``band``: how many keys before that one a query sees, if ``HAS_LEFT``. ``RAGGED``: the last tile
    has keys past the end.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    QUERIES: gl.constexpr = q_desc.block_shape[2]
    D: gl.constexpr = q_desc.block_shape[3]
    Q_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, D], DTYPE)
    KV_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], DTYPE)
    DS_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], DTYPE)
    DQ_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float32)
    k_smem = gl.allocate_shared_memory(DTYPE, [1, KEYS, D], KV_SMEM)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, KEYS, D], KV_SMEM)
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, QUERIES, D], Q_SMEM)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, QUERIES, D], Q_SMEM)
    STATISTICS: gl.constexpr = statistics_desc.layout
    l_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], STATISTICS)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], STATISTICS)
    # Two tiles: a consumer may be a step ahead of the other's reads.
    ds_smem = gl.allocate_shared_memory(DTYPE, [2, KEYS, QUERIES], DS_SMEM)
    dq_smem = ds_smem  # unused
    if DQ_BUFFERS > 0:
        dq_smem = gl.allocate_shared_memory(gl.float32, [2 * DQ_BUFFERS, 64, 64], DQ_SMEM)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(dq_empty.index(i), count=1)
    loads = (q_desc, k_desc, v_desc, do_desc, statistics_desc)
    full = (kv_full, q_full, do_full)
    buffers = (k_smem, v_smem, q_smem, do_smem, l_smem, delta_smem)

    # Tuples that are not written in place lose their compile-time members.
    gl.warp_specialize([
        (_produce, (
            loads, dq, full, dq_empty, buffers, dq_smem, N_QUERIES, N_KEYS, N_KV_HEADS,
            HEADS_PER_KV, offset, band, QUERIES, DQ_BUFFERS, is_causal, HAS_LEFT,
        )),
        (_consume, (
            dk_desc, dv_desc, full, dq_empty, buffers, ds_smem, dq_smem, dq, scale, scale_log2,
            N_QUERIES, N_KEYS, N_KV_HEADS, HEADS_PER_KV, offset, band, 0, DQ_BUFFERS, PARTS,
            DK_FIRST, RAGGED, is_causal, HAS_LEFT,
        )),
        (_consume, (
            dk_desc, dv_desc, full, dq_empty, buffers, ds_smem, dq_smem, dq, scale, scale_log2,
            N_QUERIES, N_KEYS, N_KV_HEADS, HEADS_PER_KV, offset, band, 1, DQ_BUFFERS, PARTS,
            DK_FIRST, RAGGED, is_causal, HAS_LEFT,
        )),
    ], [4, 4], [240, 240])  # fmt: skip
