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

from flashattn_triton.hopper.backward_common import (
    CONSUMERS,
    DO_EMPTY,
    DS_BUFFERS,
    EVERYBODY,
    OWN,
    Q_EMPTY,
    STAGES,
    UNSPECIALIZED,
    allocate_barriers,
    allocate_buffers,
    ds_written,
    fragment_offsets,
    has_part,
    has_work,
    producer,
    soft_cap,
    start_dp,
    steps_of_head,
    subtract,
    work_of_program,
    wrapped,
)
from flashattn_triton.hopper.backward_kernel import KEYS
from flashattn_triton.hopper.products import zero_accumulator
from flashattn_triton.hopper.schedule import key_tile_at, place_of_keys, store_tile
from flashattn_triton.hopper.scores import probabilities
from flashattn_triton.hopper.support import (
    allocate_tiles,
    named_barrier_arrive_at,
    named_barrier_sync_at,
    reduce_add,
    slot_and_phase,
)
from flashattn_triton.hopper.turns import wait_for_turn

QUERIES = gl.constexpr(64)  # of a step
HALF = gl.constexpr(32)  # queries whose dP a consumer holds at a time
PARTS = gl.constexpr(3)  # of the columns of Q, K and their gradients
PART = gl.constexpr(64)  # columns of one
VALUES = gl.constexpr(128)  # columns of V and dO


# ---- products ------------------------------------------------------------------------------------


@gluon.jit
def _start_scores(
    k_smem,
    q_smem,
    statistics_smem,
    opaque_zero,
    slot,
    CONSUMER: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):
    """Issues (OWN, QUERIES) scores, less L / scale; with a soft-cap that comes later."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    s = gl.zeros([OWN, QUERIES], gl.float32, SCORES)
    if not HAS_SOFTCAP:
        s = subtract(0, statistics_smem.index(slot), s, False, SCORES)
    for part in gl.static_range(PARTS):
        own_k = k_smem.index(opaque_zero + part).slice(CONSUMER * OWN, OWN, dim=0)
        q_part = q_smem.index(slot * PARTS + part)
        s = warpgroup_mma(own_k, q_part.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _start_dk(ds, q_smem, slot, dk, SECOND: gl.constexpr):
    """Issues dSᵀ Q of one half of the queries, by parts of columns."""
    started = ()
    for part in gl.static_range(PARTS):
        q_part = q_smem.index(slot * PARTS + part).slice(SECOND * HALF, HALF, dim=0)
        started += (warpgroup_mma(ds, q_part, dk[part], is_async=True),)
    return started


@gluon.jit
def _start_dq(ds_tile, k_smem, opaque_zero, THIRD: gl.constexpr, CONSUMER: gl.constexpr):
    """Issues this consumer's columns of a tile of dQ: its own part, or half of the third one."""
    WIDTH: gl.constexpr = PART // 2 if THIRD else PART
    zeros = zero_accumulator(QUERIES, WIDTH)
    if THIRD:
        columns = k_smem.index(opaque_zero + 2).slice(CONSUMER * WIDTH, WIDTH, dim=1)
    else:
        columns = k_smem.index(opaque_zero + CONSUMER)
    return warpgroup_mma(ds_tile.permute((1, 0)), columns, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_dq(dq_own, tile, dq, THIRD: gl.constexpr):
    """Adds what :func:`_start_dq` computed to a tile of the sum."""
    dq_tile_pointers = dq_own[1] if THIRD else dq_own[0]
    dq_tile_pointers += gl.cast(tile, gl.int64) * (QUERIES * PARTS * PART)
    reduce_add(dq_tile_pointers, dq, gl.to_tensor(True))


@gluon.jit
def _side_by_side(left, right):
    """Joins two (OWN, HALF) tiles to one (OWN, QUERIES) tile; nothing moves between threads."""
    WHOLE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    joined = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [OWN, QUERIES])
    return gl.convert_layout(joined, WHOLE, assert_trivial=True)


@gluon.jit
def _halves(whole):
    """Splits an (OWN, QUERIES) tile into two (OWN, HALF) tiles; nothing moves between threads."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = gl.split(gl.permute(gl.reshape(whole, [OWN, 2, HALF]), (0, 2, 1)))
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(right, LAYOUT, assert_trivial=True)


# ---- consumer ------------------------------------------------------------------------------------


@gluon.jit
def _opaque_zero(step):
    """0, but the compiler cannot know that.

    Added to an index, it keeps the compiler from computing addresses before the loop and keeping
    them in registers, of which there are too few.
    """
    return step >> 30


@gluon.jit
def _half_step(
    barriers,
    buffers,
    ds_smem,
    dq_own,  # pointers to this consumer's parts of the first tile of dQ of the group of heads
    step,
    previous_tile,  # the previous step's, counted from the group's first tile; -1 in step 0
    diagonal,
    limits,
    scales,
    s_half,  # (OWN, HALF) fp32, raw scores of this half, less L / scale
    ds_first,  # (OWN, HALF), dS of the first half
    dk,  # (OWN, D) fp32, by parts of columns, without the scale
    dv,  # (OWN, E) fp32
    SECOND: gl.constexpr,
    CONSUMER: gl.constexpr,
    OPTIONS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Adds what half a tile of queries contributes to dK and dV, and the previous tile to dQ.

    The second half also waits until the next tile of Q has arrived.

    Returns dS, dK and dV.
    """
    _, q_full, _ = barriers
    k_smem, v_smem, q_smem, do_smem, statistics_smem = buffers
    _, scale_log2, tanh_scale = scales
    DTYPE: gl.constexpr = q_smem.dtype
    SCORES: gl.constexpr = s_half.type.layout
    HAS_SOFTCAP: gl.constexpr = tanh_scale is not None
    DK_OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    DV_OPERAND: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    slot, _phase = slot_and_phase(step, STAGES)
    opaque_zero = _opaque_zero(step)
    own_v = v_smem.index(opaque_zero).slice(CONSUMER * OWN, OWN, dim=0)
    do_half = do_smem.index(slot).slice(SECOND * HALF, HALF, dim=0)
    statistics = statistics_smem.index(slot).slice(SECOND * HALF, HALF, dim=0)
    ds_before = ds_smem.index((step + DS_BUFFERS - 1) % DS_BUFFERS)

    if HAS_SOFTCAP:
        s_half, slope = soft_cap(s_half, tanh_scale, statistics, gl.float32, SCORES)
    dp = start_dp(own_v, do_half, statistics, VALUES, SCORES)
    first = diagonal + SECOND * HALF
    p = probabilities(s_half, scale_log2, first, limits, OPTIONS, MASKED)
    dv = warpgroup_mma(gl.convert_layout(p.to(DTYPE), DV_OPERAND), do_half, dv, is_async=True)
    if HAS_SOFTCAP:
        p *= slope
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
    # In step 0 the buffer is uninitialised, and the result is not added. The first half issues the
    # narrower product, because the scores of the second half still occupy registers.
    THIRD: gl.constexpr = not SECOND
    dq = _start_dq(ds_before, k_smem, opaque_zero, THIRD, CONSUMER)
    if SECOND:
        named_barrier_arrive_at(DO_EMPTY + slot, EVERYBODY)
        if not OPTIONS.ordered:  # else after the additions
            named_barrier_arrive_at(Q_EMPTY + slot, EVERYBODY)
        next_slot, next_phase = slot_and_phase(step + 1, STAGES)
        mbarrier.wait(q_full.index(next_slot), next_phase)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    # One branch around all additions, because a condition on each of them costs registers.
    if previous_tile >= 0:
        if OPTIONS.ordered and not SECOND:
            wait_for_turn(CONSUMER)
        _add_dq(dq_own, previous_tile, dq, THIRD)
    if OPTIONS.ordered and SECOND:
        named_barrier_arrive_at(Q_EMPTY + slot, EVERYBODY)
    return ds, dk, dv


@gluon.jit
def _step(
    barriers,
    buffers,
    ds_smem,
    dq_own,
    step,
    steps,
    previous_tile,
    diagonal,
    limits,
    scales,
    s,
    dk,
    dv,
    CONSUMER: gl.constexpr,
    OPTIONS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Both halves of a tile of queries with scores ``s``: the next tile's scores, dK and dV."""
    do_full = barriers[2]
    k_smem, _, q_smem, _, statistics_smem = buffers
    next_slot, next_phase = slot_and_phase(step + 1, STAGES)
    s_first, s_second = _halves(s)
    ds, dk, dv = _half_step(
        barriers, buffers, ds_smem, dq_own, step, previous_tile, diagonal, limits, scales, s_first,
        None, dk, dv, False, CONSUMER, OPTIONS, MASKED,
    )  # fmt: skip
    _, dk, dv = _half_step(
        barriers, buffers, ds_smem, dq_own, step, previous_tile, diagonal, limits, scales, s_second,
        ds, dk, dv, True, CONSUMER, OPTIONS, MASKED,
    )  # fmt: skip
    HAS_SOFTCAP: gl.constexpr = scales[2] is not None
    opaque_zero = _opaque_zero(step)
    s = _start_scores(
        k_smem, q_smem, statistics_smem, opaque_zero, next_slot, CONSUMER, HAS_SOFTCAP
    )
    mbarrier.wait(do_full.index(next_slot), next_phase, pred=step + 1 < steps)
    # ptxas runs every product by itself unless each iteration ends with nothing in flight.
    s = warpgroup_mma_wait(0, deps=(s,))
    return s, dk, dv


@gluon.jit
def _consumer(
    stores,
    barriers,
    buffers,
    ds_smem,
    dq_ptr,
    scales,
    work,
    CONSUMER: gl.constexpr,
    OPTIONS: gl.constexpr,
):
    """dK and dV of 64 keys, and half of each tile of dQ."""
    dk_out, dv_out = stores
    kv_full, q_full, do_full = barriers
    k_smem, v_smem, q_smem, _, statistics_smem = buffers
    sizes, tiles_ptr, band = work
    N_QUERIES, N_KEYS, N_KV_HEADS, HEADS_PER_KV, first_offset = sizes
    scale, _, tanh_scale = scales
    HAS_SOFTCAP: gl.constexpr = tanh_scale is not None
    own, walked, tiles = work_of_program(work, KEYS, QUERIES, OPTIONS)
    first_key, kv_head, n_keys, offset, _, _ = own
    first, per_head = walked[0], walked[3]
    n_tiles, first_tile, _ = tiles
    own_key = first_key + CONSUMER * OWN
    limits = (band, n_keys - own_key)
    steps = per_head * HEADS_PER_KV
    diagonal = first * QUERIES + offset - own_key
    bounds = steps_of_head(diagonal, limits, walked, OWN, QUERIES, OPTIONS)
    ahead = walked[4]
    group = first_tile + kv_head * HEADS_PER_KV * n_tiles
    dq_group = dq_ptr + gl.cast(group, gl.int64) * (QUERIES * PARTS * PART)
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    DQ_THIRD: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART // 2, 16])
    dq_own = (
        dq_group + CONSUMER * 4096 + fragment_offsets(PART, DQ),
        dq_group + 2 * 4096 + CONSUMER * 2048 + fragment_offsets(PART // 2, DQ_THIRD),
    )

    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    s = _start_scores(k_smem, q_smem, statistics_smem, 0, 0, CONSUMER, HAS_SOFTCAP)
    mbarrier.wait(do_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    zeros = zero_accumulator(OWN, PART)
    dk = (zeros, zeros, zeros)
    dv = zero_accumulator(OWN, VALUES)
    named_barrier_arrive_at(ds_written(CONSUMER, 0), CONSUMERS)
    step = 0
    head = 0  # the first tile of a head, of the tiles of the group's heads
    previous_tile = -1
    for _ in range(HEADS_PER_KV):
        for part in gl.static_range(3):
            if has_part(part, OPTIONS):
                for j in range(bounds[part], bounds[part + 1]):
                    s, dk, dv = _step(
                        barriers, buffers, ds_smem, dq_own, step, steps, previous_tile,
                        diagonal + j * ahead * QUERIES, limits, scales, s, dk, dv,
                        CONSUMER, OPTIONS, part != 1,
                    )  # fmt: skip
                    step += 1
                    tile = first + j * ahead
                    if part < 2:  # behind a left edge no walk begins in the middle
                        tile = wrapped(tile, n_tiles)
                    previous_tile = head + tile
        head += n_tiles

    # Computed once more, with numbers that the compiler takes for new ones: see _opaque_zero.
    opaque_zero = _opaque_zero(previous_tile)
    sizes = (
        N_QUERIES + opaque_zero,
        N_KEYS + opaque_zero,
        N_KV_HEADS + opaque_zero,
        HEADS_PER_KV,
        first_offset,
    )
    keys = key_tile_at(
        gl.program_id(0), gl.num_programs(0), (sizes, tiles_ptr, band), KEYS, OPTIONS
    )
    own_key, kv_head = keys[0] + CONSUMER * OWN, keys[1]
    k_at = place_of_keys(keys, OPTIONS.packed)
    named_barrier_sync_at(ds_written(1 - CONSUMER, steps), CONSUMERS)
    ds_tile = ds_smem.index((steps - 1) % DS_BUFFERS)
    dq = _start_dq(ds_tile, k_smem, opaque_zero, False, CONSUMER)
    own_v = v_smem.index(opaque_zero).slice(CONSUMER * OWN, OWN, dim=0)
    own_v.store(dv.to(own_v.dtype))  # the other consumer never reads this half of V
    fence_async_shared()
    store_tile(dv_out, k_at, kv_head, own_key, own_v, OPTIONS.packed)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    if OPTIONS.ordered:
        wait_for_turn(CONSUMER)
    _add_dq(dq_own, previous_tile, dq, False)
    dq_third = _start_dq(ds_tile, k_smem, opaque_zero, True, CONSUMER)
    dq_third = warpgroup_mma_wait(0, deps=(dq_third,))
    _add_dq(dq_own, previous_tile, dq_third, True)
    if OPTIONS.ordered:
        named_barrier_arrive_at(Q_EMPTY + slot_and_phase(steps, STAGES)[0], EVERYBODY)
    named_barrier_arrive_at(ds_written(CONSUMER, steps + 1), CONSUMERS)
    named_barrier_sync_at(ds_written(1 - CONSUMER, steps + 1), CONSUMERS)
    for part in gl.static_range(PARTS):
        own_k = k_smem.index(opaque_zero + part).slice(CONSUMER * OWN, OWN, dim=0)
        # dK replaces this half of K, which the other consumer's dQ read until it arrived above.
        own_k.store((dk[part] * scale).to(own_k.dtype))
        fence_async_shared()
        store_tile(dk_out, k_at, kv_head, own_key, own_k, OPTIONS.packed, part * PART)
    tma.store_wait(0)


# ---- kernel --------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def wide_backward_kernel(
    q_desc,  # (B, H, N_q, D), tiles of (QUERIES, PART)
    k_desc,  # (B, G, N_k, D), tiles of (KEYS, PART)
    v_desc,  # (B, G, N_k, E), tiles of (KEYS, VALUES)
    do_desc,  # (B, H, N_q, E), tiles of (QUERIES, VALUES)
    statistics_desc,  # (B · H · tiles · QUERIES, STATISTICS) bf16, tiles of (QUERIES, STATISTICS)
    dq_ptr,  # (B · H · tiles, PARTS, QUERIES · PART) fp32, blocks in the order of fragment_offsets
    dk_out,  # (B, G, N_k, D), tiles of (OWN, PART)
    dv_out,  # (B, G, N_k, E), tiles of (OWN, VALUES)
    # From here on, parameters are those of hopper_backward_kernel, but for the counters' shape.
    key_tiles_ptr,
    order_counters_ptr,  # (B · H · tiles,) int32, zeros, if ``ordered``, else None
    N_QUERIES,
    N_KEYS,
    N_KV_HEADS,
    HEADS_PER_KV,
    offset,
    band,
    scale,
    scale_log2,
    tanh_scale,
    OPTIONS: gl.constexpr,
):
    """dK and dV, and dQ / scale added to ``dq_ptr``. Grid: key tiles · B · G."""
    loads = (q_desc, k_desc, v_desc, do_desc, statistics_desc)
    buffers = allocate_buffers(loads, PARTS)
    ds_smem = allocate_tiles(q_desc.dtype, DS_BUFFERS, KEYS, QUERIES)
    barriers = allocate_barriers()
    stores = (dk_out, dv_out)
    scales = (scale, scale_log2, tanh_scale)
    work = ((N_QUERIES, N_KEYS, N_KV_HEADS, HEADS_PER_KV, offset), key_tiles_ptr, band)

    # Written in place, because a tuple bound to a variable loses its compile-time members.
    if has_work(work, OPTIONS):
        gl.warp_specialize([
            (producer, (loads, barriers, buffers, order_counters_ptr, work, OPTIONS, True)),
            (_consumer, (
                stores, barriers, buffers, ds_smem, dq_ptr, scales, work, 0, OPTIONS,
            )),
            (_consumer, (
                stores, barriers, buffers, ds_smem, dq_ptr, scales, work, 1, OPTIONS,
            )),
        ], [4, 4], [240, 240])  # fmt: skip
