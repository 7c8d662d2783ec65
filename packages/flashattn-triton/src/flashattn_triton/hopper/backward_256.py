# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""The backward pass on sm_90 of heads up to 256 wide: the kernel.

Formulas and producer are those of ``backward_kernel``. The division of labour differs, because dK
and dV of 64 keys take 256 registers of a thread in one warp group: a program owns 64 keys, and two
consumers split the columns. Of each tile of 64 queries a consumer computes

    Sᵀ, Pᵀ, dPᵀ, dSᵀ of 32 queries, which meet the other half in shared memory
    128 columns of dV += Pᵀ dO and of dK += dSᵀ Q, and of the tile's dQ = dS K

A step issues the products of the next tile's scores, dV, dK and the first part of dQ one after
another. While they run, the second part of the previous step's dQ is added to the sum in memory.
The next tile's exponentials run beside the first part of dQ, and its P and dS are written before
the second part is issued: dS has two buffers, and the registers of P and dS are free by then. With
both parts in flight at the exponentials, registers would not suffice, and ptxas would run every
product by itself.

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
    EVERYBODY,
    STAGES,
    UNSPECIALIZED,
    allocate_barriers,
    allocate_buffers,
    fragment_offsets,
    has_work,
    load_keys,
    load_output_gradient,
    load_queries,
    subtract,
    work_of_program,
    wrapped,
)
from flashattn_triton.hopper.products import zero_accumulator
from flashattn_triton.hopper.schedule import WARPS, allow_addition, next_query_tile, store_tile
from flashattn_triton.hopper.scores import probabilities, tanh
from flashattn_triton.hopper.support import (
    allocate_tiles,
    named_barrier_arrive,
    named_barrier_arrive_at,
    named_barrier_sync,
    named_barrier_sync_at,
    reduce_add,
    signal_successors,
)

TILE = gl.constexpr(64)  # keys of a program, queries of a step
WIDTH = gl.constexpr(256)  # columns of all tiles
HALF = gl.constexpr(32)  # queries whose scores a consumer computes
COLUMNS = gl.constexpr(128)  # of the gradients, of a consumer
PART = gl.constexpr(64)  # columns of dQ that a consumer computes at a time
DS_BUFFERS = gl.constexpr(2)  # tiles of dS: read for dQ, and written
# Hardware barriers, the first of two each. Consumers arrive at EMPTY + slot when they have read
# Q and dO there, and if ``ordered`` at ADDED + slot when they have added to all of the tile of dQ
# of the step before. Consumer c arrives at READ + c when it has read this tile's P, and at
# WRITTEN + c when it has written its half of P and dS of the next tile.
EMPTY = gl.constexpr(0)
ADDED = gl.constexpr(2)
READ = gl.constexpr(4)
WRITTEN = gl.constexpr(6)

# ---- producer ------------------------------------------------------------------------------------


@gluon.jit
def _producer(loads, barriers, buffers, order_counters_ptr, work, OPTIONS: gl.constexpr):
    """Fetches K and V once, then each step's Q with L and delta, and dO."""
    own, walked, tiles = work_of_program(work, TILE, TILE, OPTIONS)
    _, kv_head, _, _, q_at, _ = own
    first, _, _, per_head = walked
    n_tiles, first_tile, _ = tiles
    HEADS_PER_KV = work[0][3]
    steps = per_head * HEADS_PER_KV
    load_keys(loads, barriers, buffers, own, OPTIONS.packed)
    tile = first
    head = kv_head * HEADS_PER_KV
    tile_to_add = tile
    head_to_add = head
    for step in range(steps + STAGES):
        slot = step % STAGES
        row = (first_tile + head * n_tiles + tile) * TILE  # of all heads' tiles
        if step >= STAGES:
            named_barrier_sync_at(EMPTY + slot, EVERYBODY)
        if step < steps:
            load_queries(loads, barriers, buffers, slot, q_at, head, tile, row, OPTIONS.packed)
            load_output_gradient(loads, barriers, buffers, slot, q_at, head, tile, OPTIONS.packed)
            tile, head = next_query_tile(tile, head, walked)
        if OPTIONS.ordered:
            order_counter = order_counters_ptr + first_tile + head_to_add * n_tiles + tile_to_add
            if step >= STAGES:
                allow_addition(
                    barriers[3].index(0), order_counter, tile_to_add, own, walked, tiles, TILE,
                    TILE, OPTIONS.is_causal, WARPS,
                )  # fmt: skip
                tile_to_add, head_to_add = next_query_tile(tile_to_add, head_to_add, walked)
            if step > 0:
                named_barrier_sync_at(ADDED + (step - 1) % STAGES, EVERYBODY)
            if step >= STAGES:
                signal_successors(order_counter, gl.to_tensor(True))


# ---- consumer ------------------------------------------------------------------------------------


@gluon.jit
def _start_scores(buffers, opaque_zero, slot, CONSUMER: gl.constexpr, HAS_SOFTCAP: gl.constexpr):
    """Issues (TILE, HALF) scores less L / scale, and dP less delta, of the consumer's queries.

    With a soft-cap L is subtracted later, from their tanh.
    """
    k_smem, v_smem, q_smem, do_smem, statistics_smem = buffers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    statistics = statistics_smem.index(slot).slice(CONSUMER * HALF, HALF, dim=0)
    q_half = q_smem.index(slot).slice(CONSUMER * HALF, HALF, dim=0)
    do_half = do_smem.index(slot).slice(CONSUMER * HALF, HALF, dim=0)
    s = gl.zeros([TILE, HALF], gl.float32, SCORES)
    if not HAS_SOFTCAP:
        s = subtract(0, statistics, s, False, SCORES)
    s = warpgroup_mma(k_smem.index(opaque_zero), q_half.permute((1, 0)), s, is_async=True)
    dp = gl.zeros([TILE, HALF], gl.float32, SCORES)
    v_tile = v_smem.index(opaque_zero)
    dp = warpgroup_mma(v_tile, do_half.permute((1, 0)), dp, use_acc=False, is_async=True)
    dp = subtract(1, statistics, dp, True, SCORES)
    return s, dp


@gluon.jit
def _start_dq(ds_tile, k_smem, opaque_zero, dq, SECOND: gl.constexpr, CONSUMER: gl.constexpr):
    """Issues PART columns of a tile of dQ, in the registers of ``dq``, whatever they hold."""
    columns = k_smem.index(opaque_zero).slice(CONSUMER * COLUMNS + SECOND * PART, PART, dim=1)
    return warpgroup_mma(ds_tile.permute((1, 0)), columns, dq, use_acc=False, is_async=True)


@gluon.jit
def _add_dq(dq_pointer, dq, SECOND: gl.constexpr, CONSUMER: gl.constexpr):
    """Adds what :func:`_start_dq` computed to the tile of the sum that begins at ``dq_pointer``."""
    FIRST: gl.constexpr = (CONSUMER * 2 + SECOND) * TILE * PART
    LAYOUT: gl.constexpr = dq.type.layout
    reduce_add(dq_pointer + FIRST + fragment_offsets(PART, LAYOUT), dq, gl.to_tensor(True))


@gluon.jit
def _probabilities(
    s,
    dp,
    statistics_smem,
    slot,
    diagonal,
    limits,
    scales,
    CONSUMER: gl.constexpr,
    DTYPE: gl.constexpr,
    OPTIONS: gl.constexpr,
):
    """(TILE, HALF) P and dS of the queries whose statistics are in that slot."""
    _, scale_log2, tanh_scale = scales
    HAS_SOFTCAP: gl.constexpr = tanh_scale is not None
    SCORES: gl.constexpr = s.type.layout
    if HAS_SOFTCAP:
        # Unlike in soft_cap, dP takes the derivative at once, which then needs no registers.
        s = tanh(s * tanh_scale)
        dp *= 1.0 - s * s
        statistics = statistics_smem.index(slot).slice(CONSUMER * HALF, HALF, dim=0)
        s = subtract(0, statistics, s, True, SCORES)
        s = warpgroup_mma_wait(0, deps=(s,))
    p = probabilities(s, scale_log2, diagonal, limits, OPTIONS, True)
    return p.to(DTYPE), (p * dp).to(DTYPE)


@gluon.jit
def _write(p, ds, p_smem, ds_tile, CONSUMER: gl.constexpr):
    """Writes this consumer's half of P and dS, once the other has read the previous tile's P.

    The other consumer may still compute dQ of the previous tile from the other buffer of dS.
    """
    named_barrier_sync(READ + 1 - CONSUMER, CONSUMERS)
    p_smem.index(0).slice(CONSUMER * HALF, HALF, dim=1).store(p)
    ds_tile.slice(CONSUMER * HALF, HALF, dim=1).store(ds)
    fence_async_shared()
    named_barrier_arrive(WRITTEN + CONSUMER, CONSUMERS)


@gluon.jit
def _consumer(
    stores,
    barriers,
    buffers,
    p_smem,
    ds_smem,
    dq_ptr,
    scales,
    work,
    CONSUMER: gl.constexpr,
    OPTIONS: gl.constexpr,
):
    """Half of the columns of dK, dV and each tile of dQ."""
    dk_out, dv_out = stores
    kv_full, q_full, do_full, may_add = barriers
    k_smem, v_smem, q_smem, do_smem, statistics_smem = buffers
    HAS_SOFTCAP: gl.constexpr = scales[2] is not None
    own, walked, tiles = work_of_program(work, TILE, TILE, OPTIONS)
    first_key, kv_head, n_keys, offset, _, k_at = own
    first, _, _, per_head = walked
    n_tiles, first_tile, _ = tiles
    HEADS_PER_KV = work[0][3]
    limits = (work[2], n_keys - first_key)
    steps = per_head * HEADS_PER_KV
    group = first_tile + kv_head * HEADS_PER_KV * n_tiles
    dq_group = dq_ptr + gl.cast(group, gl.int64) * (TILE * WIDTH)
    diagonal = first * TILE + offset - first_key + CONSUMER * HALF
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(do_full.index(0), 0)
    s, dp = _start_scores(buffers, 0, 0, CONSUMER, HAS_SOFTCAP)
    s, dp = warpgroup_mma_wait(0, deps=(s, dp))
    p, ds = _probabilities(
        s, dp, statistics_smem, 0, diagonal, limits, scales, CONSUMER, q_smem.dtype, OPTIONS
    )
    named_barrier_arrive(READ + CONSUMER, CONSUMERS)
    _write(p, ds, p_smem, ds_smem.index(0), CONSUMER)
    named_barrier_sync(WRITTEN + 1 - CONSUMER, CONSUMERS)
    dk = zero_accumulator(TILE, COLUMNS)  # without the scale
    dv = zero_accumulator(TILE, COLUMNS)
    dq = zero_accumulator(TILE, PART)  # the second part of the previous step's
    previous_dq_pointer = dq_group + gl.cast(first, gl.int64) * (TILE * WIDTH)
    for step in range(steps):
        # dV, dK and dQ of the tile whose P and dS are in shared memory, and P and dS of the next.
        tile = (step // per_head) * n_tiles + wrapped(first + step % per_head, n_tiles)
        dq_pointer = dq_group + gl.cast(tile, gl.int64) * (TILE * WIDTH)
        next_diagonal = diagonal + ((step + 1) % per_head) * TILE
        slot = step % STAGES
        next_slot = (step + 1) % STAGES
        next_phase = ((step + 1) // STAGES) & 1
        # Always 0, which the compiler cannot know: it would otherwise keep all addresses within K
        # and V in registers, of which there are too few.
        opaque_zero = step >> 30
        zeros = zero_accumulator(TILE, PART)
        ds_tile = ds_smem.index(step % DS_BUFFERS)
        next_ds_tile = ds_smem.index((step + 1) % DS_BUFFERS)
        mbarrier.wait(q_full.index(next_slot), next_phase, pred=step + 1 < steps)
        mbarrier.wait(do_full.index(next_slot), next_phase, pred=step + 1 < steps)
        # In the last step there is no next tile: operands are old, and nobody uses the result.
        next_s, next_dp = _start_scores(buffers, opaque_zero, next_slot, CONSUMER, HAS_SOFTCAP)
        do_columns = do_smem.index(slot).slice(CONSUMER * COLUMNS, COLUMNS, dim=1)
        q_columns = q_smem.index(slot).slice(CONSUMER * COLUMNS, COLUMNS, dim=1)
        dv = warpgroup_mma(p_smem.index(0), do_columns, dv, is_async=True)
        dk = warpgroup_mma(ds_tile, q_columns, dk, is_async=True)
        _add_dq(previous_dq_pointer, dq, True, CONSUMER)
        if OPTIONS.ordered:
            named_barrier_arrive_at(ADDED + slot, EVERYBODY)
        dq = _start_dq(ds_tile, k_smem, opaque_zero, dq, False, CONSUMER)
        next_s, next_dp, dk, dv = warpgroup_mma_wait(1, deps=(next_s, next_dp, dk, dv))
        named_barrier_arrive(READ + CONSUMER, CONSUMERS)
        named_barrier_arrive_at(EMPTY + slot, EVERYBODY)
        next_p, next_ds = _probabilities(
            next_s, next_dp, statistics_smem, next_slot, next_diagonal, limits, scales, CONSUMER,
            q_smem.dtype, OPTIONS,
        )  # fmt: skip
        _write(next_p, next_ds, p_smem, next_ds_tile, CONSUMER)
        second = _start_dq(ds_tile, k_smem, opaque_zero, zeros, True, CONSUMER)
        dq = warpgroup_mma_wait(1, deps=(dq,))
        if OPTIONS.ordered:
            mbarrier.wait(may_add.index(0), step & 1)
        _add_dq(dq_pointer, dq, False, CONSUMER)
        dq = warpgroup_mma_wait(0, deps=(second,))
        named_barrier_sync(WRITTEN + 1 - CONSUMER, CONSUMERS)
        previous_dq_pointer = dq_pointer
    _add_dq(previous_dq_pointer, dq, True, CONSUMER)
    if OPTIONS.ordered:
        named_barrier_arrive_at(ADDED + steps % STAGES, EVERYBODY)
    # The other consumer has arrived at WRITTEN, so that its scores are complete. After them it does
    # not read V, and of K only its own columns: this consumer's columns may be overwritten.
    own_v = v_smem.index(0).slice(CONSUMER * COLUMNS, COLUMNS, dim=1)
    own_k = k_smem.index(0).slice(CONSUMER * COLUMNS, COLUMNS, dim=1)
    own_v.store(dv.to(own_v.dtype))
    own_k.store((dk * scales[0]).to(own_k.dtype))
    fence_async_shared()
    named_barrier_sync(READ, CONSUMERS)
    if CONSUMER == 0:
        store_tile(dv_out, k_at, kv_head, first_key, v_smem.index(0), OPTIONS.packed)
        store_tile(dk_out, k_at, kv_head, first_key, k_smem.index(0), OPTIONS.packed)
        tma.store_wait(0)


# ---- kernel --------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def backward_256_kernel(
    q_desc,  # (B, H, N_q, D), tiles of (TILE, WIDTH), as all but the statistics'
    k_desc,  # (B, G, N_k, D)
    v_desc,  # (B, G, N_k, E)
    do_desc,  # (B, H, N_q, E)
    statistics_desc,  # (B · H · tiles · TILE, STATISTICS) bf16, tiles of (TILE, STATISTICS)
    dq_ptr,  # (B · H · tiles, WIDTH / PART, TILE · PART) fp32, blocks as fragment_offsets says
    dk_out,  # (B, G, N_k, D)
    dv_out,  # (B, G, N_k, E)
    # From here on, parameters are those of hopper_backward_kernel.
    key_tiles_ptr,
    order_counters_ptr,
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
    buffers = allocate_buffers(loads)
    p_smem = allocate_tiles(q_desc.dtype, 1, TILE, TILE)
    ds_smem = allocate_tiles(q_desc.dtype, DS_BUFFERS, TILE, TILE)
    barriers = allocate_barriers(1 if OPTIONS.ordered else 0)
    stores = (dk_out, dv_out)
    scales = (scale, scale_log2, tanh_scale)
    work = ((N_QUERIES, N_KEYS, N_KV_HEADS, HEADS_PER_KV, offset), key_tiles_ptr, band)

    # Written in place, because a tuple bound to a variable loses its compile-time members.
    if has_work(work, OPTIONS):
        gl.warp_specialize([
            (_producer, (loads, barriers, buffers, order_counters_ptr, work, OPTIONS)),
            (_consumer, (
                stores, barriers, buffers, p_smem, ds_smem, dq_ptr, scales, work, 0, OPTIONS,
            )),
            (_consumer, (
                stores, barriers, buffers, p_smem, ds_smem, dq_ptr, scales, work, 1, OPTIONS,
            )),
        ], [4, 4], [240, 240])  # fmt: skip
