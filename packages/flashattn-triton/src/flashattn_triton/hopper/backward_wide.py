# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""The backward pass on sm_90 of heads up to 192 wide, with values up to 128: the kernel.

The division of labour, the formulas and the barriers are those of ``backward_kernel``: a program
owns 128 keys, two consumers 64 each, and dQ is one step late. What differs comes from registers. dK
(64 x 192) and dV (64 x 128) of a consumer take 160 of a thread's 240, and scores of 64 queries 32.
So what follows the scores is computed in two halves of 32 queries:

    Sᵀ of 64 queries
    Pᵀ, dPᵀ, dSᵀ of 32 queries; dV += Pᵀ dO, dK += dSᵀ Q; then the other 32
    dQ of all 64 queries, whose dS of both halves meets in shared memory

Q and K are three PARTS of 64 columns, which lie one after another in shared memory, as in the
forward kernel. Of the tile of dQ, each consumer computes half of the third part of columns during
the first half, and a whole part during the second, when the registers of the scores are free.

Legend: B batch, H query heads, G key/value heads, N_q queries, N_k keys, D head_dim of query and
key, E of value.
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

from flashattn_triton.hopper.backward_kernel import (
    CONSUMERS,
    DO_EMPTY,
    DS_BUFFERS,
    EVERYBODY,
    Q_EMPTY,
    STAGES,
    apply_mask,
    ds_written,
    fragment_offsets,
    wrapped,
)
from flashattn_triton.hopper.backward_products import OWN, STATISTICS, subtract
from flashattn_triton.hopper.schedule import (
    KEYS,
    key_tile_of_program,
    load_tile,
    next_query_tile,
    store_tile,
    walk,
)
from flashattn_triton.hopper.support import (
    exp2,
    named_barrier_arrive_at,
    named_barrier_sync_at,
    reduce_add,
    tma_load,
)

QUERIES = gl.constexpr(64)  # of a step
HALF = gl.constexpr(32)  # queries whose dP a consumer holds at a time
PARTS = gl.constexpr(3)  # of the columns of Q, K and their gradients
PART = gl.constexpr(64)  # columns of one
VALUES = gl.constexpr(128)  # columns of V and dO

# ---- producer ------------------------------------------------------------------------------------


@gluon.jit
def _producer(loads, full, buffers, sizes, is_causal: gl.constexpr):
    """Fetches K and V once, then each step's Q with L and delta, and dO."""
    q_desc, k_desc, v_desc, do_desc, statistics_desc = loads
    kv_full, q_full, do_full = full
    k_smem, v_smem, q_smem, do_smem, statistics_smem = buffers
    KEY_BYTES: gl.constexpr = KEYS * (PARTS * PART + VALUES) * 2
    QUERY_BYTES: gl.constexpr = QUERIES * (PARTS * PART + STATISTICS) * 2
    _, _, N_KV_HEADS, HEADS_PER_KV, _ = sizes
    first_key, kv_head, n_queries, _, offset, q_at, k_at, batch = key_tile_of_program(
        sizes, None, False, False, False
    )
    n_tiles = gl.cdiv(n_queries, QUERIES)
    first, last, wrap, per_head = walk(
        first_key, offset, 0, n_tiles, QUERIES, is_causal, False, False
    )
    steps = per_head * HEADS_PER_KV
    mbarrier.expect(kv_full, KEY_BYTES)
    for part in gl.static_range(PARTS):
        k_part = k_smem.index(part)
        load_tile(k_desc, k_at, kv_head, first_key, kv_full, k_part, False, part * PART)
    load_tile(v_desc, k_at, kv_head, first_key, kv_full, v_smem.index(0), False)
    before = batch * N_KV_HEADS * HEADS_PER_KV  # heads of other batch elements
    tile = first
    head = kv_head * HEADS_PER_KV
    for step in range(steps + STAGES):
        slot = step % STAGES
        row = ((before + head) * n_tiles + tile) * QUERIES  # of all heads' tiles
        first_query = tile * QUERIES
        if step >= STAGES:
            named_barrier_sync_at(DO_EMPTY + slot, EVERYBODY)
        if step < steps:
            mbarrier.expect(do_full.index(slot), QUERIES * VALUES * 2)
            do_tile = do_smem.index(slot)
            load_tile(do_desc, q_at, head, first_query, do_full.index(slot), do_tile, False)
        if step >= STAGES:
            named_barrier_sync_at(Q_EMPTY + slot, EVERYBODY)
        if step <= steps:  # consumers start one more product than they use
            arrived = q_full.index(slot)
            mbarrier.expect(arrived, QUERY_BYTES)
            for part in gl.static_range(PARTS):
                q_part = q_smem.index(slot * PARTS + part)
                load_tile(q_desc, q_at, head, first_query, arrived, q_part, False, part * PART)
            tma_load(statistics_desc, [row, 0], arrived, statistics_smem.index(slot))
        if step + 1 < steps:
            tile, head = next_query_tile(tile, head, first, last, wrap)


# ---- consumer ------------------------------------------------------------------------------------


@gluon.jit
def _start_scores(k_smem, q_smem, statistics_smem, again, slot, CONSUMER: gl.constexpr):
    """Issues (OWN, QUERIES) scores, less L / scale."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    s = gl.zeros([OWN, QUERIES], gl.float32, SCORES)
    s = subtract(0, statistics_smem.index(slot), s, False, SCORES)
    for part in gl.static_range(PARTS):
        own_k = k_smem.index(again + part).slice(CONSUMER * OWN, OWN, dim=0)
        q_part = q_smem.index(slot * PARTS + part)
        s = warpgroup_mma(own_k, q_part.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _start_dp(own_v, do_half, statistics):
    """Issues (OWN, HALF) dP, less delta."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dp = gl.zeros([OWN, HALF], gl.float32, SCORES)
    dp = warpgroup_mma(own_v, do_half.permute((1, 0)), dp, use_acc=False, is_async=True)
    return subtract(1, statistics, dp, True, SCORES)


@gluon.jit
def _start_dk(ds, q_smem, slot, dk, SECOND: gl.constexpr):
    """Issues dSᵀ Q of one half of the queries, by parts of columns."""
    q_0 = q_smem.index(slot * PARTS).slice(SECOND * HALF, HALF, dim=0)
    q_1 = q_smem.index(slot * PARTS + 1).slice(SECOND * HALF, HALF, dim=0)
    q_2 = q_smem.index(slot * PARTS + 2).slice(SECOND * HALF, HALF, dim=0)
    return (
        warpgroup_mma(ds, q_0, dk[0], is_async=True),
        warpgroup_mma(ds, q_1, dk[1], is_async=True),
        warpgroup_mma(ds, q_2, dk[2], is_async=True),
    )


@gluon.jit
def _start_dq(ds_tile, k_smem, again, THIRD: gl.constexpr, CONSUMER: gl.constexpr):
    """Issues this consumer's columns of a tile of dQ: its own part, or half of the third one."""
    WIDTH: gl.constexpr = PART // 2 if THIRD else PART
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    nothing = gl.zeros([QUERIES, WIDTH], gl.float32, LAYOUT)
    if THIRD:
        columns = k_smem.index(again + 2).slice(CONSUMER * WIDTH, WIDTH, dim=1)
    else:
        columns = k_smem.index(again + CONSUMER)
    return warpgroup_mma(ds_tile.permute((1, 0)), columns, nothing, use_acc=False, is_async=True)


@gluon.jit
def _add_dq(dq_own, tile, dq, THIRD: gl.constexpr):
    """Adds what :func:`_start_dq` computed to a tile of the sum."""
    there = dq_own[1] if THIRD else dq_own[0]
    there += gl.cast(tile, gl.int64) * (QUERIES * PARTS * PART)
    reduce_add(there, dq, gl.to_tensor(True))


@gluon.jit
def _side_by_side(left, right):
    """(OWN, HALF) twice to (OWN, QUERIES), without moving anything between threads."""
    WHOLE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    both = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [OWN, QUERIES])
    return gl.convert_layout(both, WHOLE, assert_trivial=True)


@gluon.jit
def _halves(whole):
    """(OWN, QUERIES) as (OWN, HALF) twice, without moving anything between threads."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = gl.split(gl.permute(gl.reshape(whole, [OWN, 2, HALF]), (0, 2, 1)))
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def _zero(step):
    """0, which the compiler cannot know: it would otherwise keep all addresses within K and V in
    registers, of which there are too few."""
    return step >> 30


@gluon.jit
def _half_step(
    q_full,
    buffers,
    ds_smem,
    dq_own,  # where this consumer's parts of the group's first tile of dQ lie
    step,
    before,  # the tile before, of the tiles of the group's heads; -1 if there is none
    diagonal,
    n_keys,
    scale_log2,
    s_half,  # (OWN, HALF) fp32, raw scores of this half, less L / scale
    ds_first,  # (OWN, HALF), dS of the first half
    dk,  # (OWN, D) fp32, by parts of columns, without the scale
    dv,  # (OWN, E) fp32
    SECOND: gl.constexpr,
    CONSUMER: gl.constexpr,
    RAGGED: gl.constexpr,
    is_causal: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Adds what half a tile of queries contributes to dK and dV, and the tile before to dQ.

    The second half also waits until the next tile of Q has arrived.

    Returns dS, dK and dV.
    """
    k_smem, v_smem, q_smem, do_smem, statistics_smem = buffers
    DTYPE: gl.constexpr = q_smem.dtype
    DK_OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    DV_OPERAND: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    slot = step % STAGES
    again = _zero(step)
    own_v = v_smem.index(again).slice(CONSUMER * OWN, OWN, dim=0)
    do_half = do_smem.index(slot).slice(SECOND * HALF, HALF, dim=0)
    statistics = statistics_smem.index(slot).slice(SECOND * HALF, HALF, dim=0)
    ds_before = ds_smem.index((step + DS_BUFFERS - 1) % DS_BUFFERS)

    dp = _start_dp(own_v, do_half, statistics)
    p = exp2(s_half * scale_log2)
    if MASKED:
        first = diagonal + SECOND * HALF
        p = apply_mask(p, first, 0, n_keys, RAGGED, is_causal, False)
    dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), DV_OPERAND), do_half, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = (p * dp).to(DTYPE)
    dk = _start_dk(gl.convert_layout(ds, DK_OPERAND), q_smem, slot, dk, SECOND)
    if SECOND:
        ds_tile = ds_smem.index(step % DS_BUFFERS).slice(CONSUMER * OWN, OWN, dim=0)
        ds_tile.store(_side_by_side(ds_first, ds))
        fence_async_shared()
        named_barrier_arrive_at(ds_written(CONSUMER, step + 1), CONSUMERS)
    else:
        named_barrier_sync_at(ds_written(1 - CONSUMER, step), CONSUMERS)
    # Before dQ, so that P and dS need no registers beside it.
    dk_0, dk_1, dk_2, dv = warpgroup_mma_wait(0, deps=(dk[0], dk[1], dk[2], dv))
    dk = (dk_0, dk_1, dk_2)
    # In step 0 of whatever is there. The narrower product while half of the scores wait.
    THIRD: gl.constexpr = not SECOND
    dq = _start_dq(ds_before, k_smem, again, THIRD, CONSUMER)
    if SECOND:
        named_barrier_arrive_at(DO_EMPTY + slot, EVERYBODY)
        named_barrier_arrive_at(Q_EMPTY + slot, EVERYBODY)
        mbarrier.wait(q_full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    # By a branch, because a condition for each addition costs registers.
    if before >= 0:
        _add_dq(dq_own, before, dq, THIRD)
    return ds, dk, dv


@gluon.jit
def _step(
    full,
    buffers,
    ds_smem,
    dq_own,
    step,
    steps,
    before,
    diagonal,
    n_keys,
    scale_log2,
    s,
    dk,
    dv,
    CONSUMER: gl.constexpr,
    RAGGED: gl.constexpr,
    is_causal: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Both halves of a tile of queries with scores ``s``: the next tile's scores, dK and dV."""
    _, q_full, do_full = full
    k_smem, _, q_smem, _, statistics_smem = buffers
    next_slot = (step + 1) % STAGES
    next_phase = ((step + 1) // STAGES) & 1
    s_first, s_second = _halves(s)
    ds, dk, dv = _half_step(
        q_full, buffers, ds_smem, dq_own, step, before, diagonal, n_keys, scale_log2, s_first,
        None, dk, dv, False, CONSUMER, RAGGED, is_causal, MASKED,
    )  # fmt: skip
    _, dk, dv = _half_step(
        q_full, buffers, ds_smem, dq_own, step, before, diagonal, n_keys, scale_log2, s_second,
        ds, dk, dv, True, CONSUMER, RAGGED, is_causal, MASKED,
    )  # fmt: skip
    s = _start_scores(k_smem, q_smem, statistics_smem, _zero(step), next_slot, CONSUMER)
    mbarrier.wait(do_full.index(next_slot), next_phase, pred=step + 1 < steps)
    # ptxas runs every product by itself unless each iteration ends with nothing in flight.
    s = warpgroup_mma_wait(0, deps=(s,))
    return s, dk, dv


@gluon.jit
def _consumer(
    dk_desc,
    dv_desc,
    full,
    buffers,
    ds_smem,
    dq_ptr,
    scale,
    scale_log2,
    sizes,
    CONSUMER: gl.constexpr,
    RAGGED: gl.constexpr,
    is_causal: gl.constexpr,
):
    """dK and dV of 64 keys, and half of each tile of dQ."""
    kv_full, q_full, do_full = full
    k_smem, v_smem, q_smem, _, statistics_smem = buffers
    _, _, N_KV_HEADS, HEADS_PER_KV, _ = sizes
    first_key, kv_head, n_queries, n_keys, offset, _, k_at, batch = key_tile_of_program(
        sizes, None, False, False, False
    )
    own_key = first_key + CONSUMER * OWN
    n_keys -= own_key
    n_tiles = gl.cdiv(n_queries, QUERIES)
    first, _, _, per_head = walk(first_key, offset, 0, n_tiles, QUERIES, is_causal, False, False)
    steps = per_head * HEADS_PER_KV
    # A tile of queries sees all keys here if its first query does.
    diagonal = first * QUERIES + offset - own_key
    n_masked = 0
    if is_causal:
        n_masked = min(max(gl.cdiv(OWN - 1 - diagonal, QUERIES), 0), per_head)
    if RAGGED:
        n_masked = gl.where(n_keys < OWN, per_head, n_masked)
    group = (batch * N_KV_HEADS + kv_head) * HEADS_PER_KV * n_tiles
    dq_group = dq_ptr + gl.cast(group, gl.int64) * (QUERIES * PARTS * PART)
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    DQ_THIRD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART // 2, 16])
    dq_own = (
        dq_group + CONSUMER * 4096 + fragment_offsets(PART, DQ),
        dq_group + 2 * 4096 + CONSUMER * 2048 + fragment_offsets(PART // 2, DQ_THIRD),
    )

    mbarrier.wait(kv_full, 0)
    mbarrier.wait(q_full.index(0), 0)
    s = _start_scores(k_smem, q_smem, statistics_smem, 0, 0, CONSUMER)
    mbarrier.wait(do_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    DV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VALUES, 16])
    dk = (
        gl.zeros([OWN, PART], gl.float32, DK),
        gl.zeros([OWN, PART], gl.float32, DK),
        gl.zeros([OWN, PART], gl.float32, DK),
    )
    dv = gl.zeros([OWN, VALUES], gl.float32, DV)
    named_barrier_arrive_at(ds_written(CONSUMER, 0), CONSUMERS)
    step = 0
    head = 0  # the first tile of a head, of the tiles of the group's heads
    before = -1
    for _ in range(HEADS_PER_KV):
        if is_causal or RAGGED:
            for j in range(n_masked):
                s, dk, dv = _step(
                    full, buffers, ds_smem, dq_own, step, steps, before, diagonal + j * QUERIES,
                    n_keys, scale_log2, s, dk, dv, CONSUMER, RAGGED, is_causal, True,
                )  # fmt: skip
                step += 1
                before = head + wrapped(first + j, n_tiles)
        for j in range(n_masked, per_head):
            s, dk, dv = _step(
                full, buffers, ds_smem, dq_own, step, steps, before, diagonal, n_keys, scale_log2,
                s, dk, dv, CONSUMER, RAGGED, is_causal, False,
            )  # fmt: skip
            step += 1
            before = head + wrapped(first + j, n_tiles)
        head += n_tiles

    named_barrier_sync_at(ds_written(1 - CONSUMER, steps), CONSUMERS)
    ds_tile = ds_smem.index((steps - 1) % DS_BUFFERS)
    dq = _start_dq(ds_tile, k_smem, 0, False, CONSUMER)
    own_v = v_smem.index(0).slice(CONSUMER * OWN, OWN, dim=0)
    own_v.store(dv.to(own_v.dtype))  # whose memory nobody else reads
    fence_async_shared()
    store_tile(dv_desc, k_at, kv_head, own_key, own_v, False)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    _add_dq(dq_own, before, dq, False)
    dq_third = _start_dq(ds_tile, k_smem, 0, True, CONSUMER)
    dq_third = warpgroup_mma_wait(0, deps=(dq_third,))
    _add_dq(dq_own, before, dq_third, True)
    named_barrier_arrive_at(ds_written(CONSUMER, steps + 1), CONSUMERS)
    named_barrier_sync_at(ds_written(1 - CONSUMER, steps + 1), CONSUMERS)
    for part in gl.static_range(PARTS):
        own_k = k_smem.index(part).slice(CONSUMER * OWN, OWN, dim=0)
        own_k.store((dk[part] * scale).to(own_k.dtype))  # the other was reading until then
        fence_async_shared()
        store_tile(dk_desc, k_at, kv_head, own_key, own_k, False, part * PART)
    tma.store_wait(0)


# ---- kernel --------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=[
        *("N_QUERIES", "N_KEYS", "N_KV_HEADS", "HEADS_PER_KV", "offset", "scale", "scale_log2")
    ]
)
def wide_backward_kernel(
    q_desc,  # (B, H, N_q, D), tiles of (QUERIES, PART)
    k_desc,  # (B, G, N_k, D), tiles of (KEYS, PART)
    v_desc,  # (B, G, N_k, E), tiles of (KEYS, VALUES)
    do_desc,  # (B, H, N_q, E), tiles of (QUERIES, VALUES)
    statistics_desc,  # (B · H · tiles · QUERIES, STATISTICS) bf16, tiles of (QUERIES, STATISTICS)
    dq_ptr,  # (B · H · tiles, PARTS, QUERIES · PART) fp32, blocks in the order of fragment_offsets
    dk_desc,  # (B, G, N_k, D), tiles of (OWN, PART)
    dv_desc,  # (B, G, N_k, E), tiles of (OWN, VALUES)
    N_QUERIES,
    N_KEYS,
    N_KV_HEADS,
    HEADS_PER_KV,
    offset,
    scale,
    scale_log2,
    RAGGED: gl.constexpr,
    is_causal: gl.constexpr,
):
    """dK and dV, and dQ / scale added to ``dq_ptr``. Grid: key tiles · B · G.

    ``offset``: key index minus query index of the last key that a query sees, if ``is_causal``.
    ``RAGGED``: the last tile has keys past the end.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    Q_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, PART], DTYPE)
    K_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, PART], DTYPE)
    DO_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, VALUES], DTYPE)
    V_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, VALUES], DTYPE)
    DS_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], DTYPE)
    k_smem = gl.allocate_shared_memory(DTYPE, [PARTS, KEYS, PART], K_SMEM)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, KEYS, VALUES], V_SMEM)
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES * PARTS, QUERIES, PART], Q_SMEM)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, QUERIES, VALUES], DO_SMEM)
    statistics_smem = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, QUERIES, STATISTICS], statistics_desc.layout
    )
    ds_smem = gl.allocate_shared_memory(DTYPE, [DS_BUFFERS, KEYS, QUERIES], DS_SMEM)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
    loads = (q_desc, k_desc, v_desc, do_desc, statistics_desc)
    full = (kv_full, q_full, do_full)
    buffers = (k_smem, v_smem, q_smem, do_smem, statistics_smem)
    sizes = (N_QUERIES, N_KEYS, N_KV_HEADS, HEADS_PER_KV, offset)

    # Written in place, because a tuple bound to a variable loses its compile-time members.
    gl.warp_specialize([
        (_producer, (loads, full, buffers, sizes, is_causal)),
        (_consumer, (
            dk_desc, dv_desc, full, buffers, ds_smem, dq_ptr, scale, scale_log2, sizes, 0, RAGGED,
            is_causal,
        )),
        (_consumer, (
            dk_desc, dv_desc, full, buffers, ds_smem, dq_ptr, scale, scale_log2, sizes, 1, RAGGED,
            is_causal,
        )),
    ], [4, 4], [240, 240])  # fmt: skip
