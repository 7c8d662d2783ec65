# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""The backward pass on sm_90 of heads up to 256 wide, first part: dK and dV.

dK and dV of 64 keys take 128 registers of a thread each, and dQ would be as much again in every
step, added to memory: at this width additions to memory take longer than products. So dQ has a
pass of its own (``query_pass``), which computes scores once more, seven products instead of five.
Nothing is added up in an order that changes.

A program owns 64 keys. Of each tile of 64 queries, in the letters of ``backward_kernel``,

    one consumer computes      Sᵀ, Pᵀ and dV += Pᵀ dO
    the other one              dPᵀ, dSᵀ = Pᵀ (dPᵀ - delta) and dK += dSᵀ Q

Only P goes from one to the other, in shared memory. While one computes exponentials, the tensor
cores have the products of the other. Each rounds its next operand to a half type only when it has
told the other that P is written, or that it has been read, because the other waits for that.

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
    EVERYBODY,
    Q_EMPTY,
    STAGES,
    UNSPECIALIZED,
    allocate_barriers,
    allocate_buffers,
    has_part,
    has_work,
    producer,
    soft_cap,
    start_dp,
    start_scores,
    steps_of_head,
    work_of_program,
)
from flashattn_triton.hopper.products import zero_accumulator
from flashattn_triton.hopper.schedule import store_tile
from flashattn_triton.hopper.scores import probabilities
from flashattn_triton.hopper.support import (
    launch_dependents,
    named_barrier_arrive,
    named_barrier_arrive_at,
    named_barrier_sync,
    slot_and_phase,
    to_operand,
    wait_for_prerequisites,
)

TILE = gl.constexpr(64)  # keys of a program, queries of a step
WIDTH = gl.constexpr(256)  # columns of all tiles
# Hardware barriers beside the producer's: P of the tile before has been read, and P is written.
P_READ = gl.constexpr(4)
P_WRITTEN = gl.constexpr(5)

# ---- consumers -----------------------------------------------------------------------------------


@gluon.jit
def _start_scores(buffers, slot, HAS_SOFTCAP: gl.constexpr, SCORES: gl.constexpr):
    """Issues scores of the queries in a slot, less L / scale."""
    k_smem, _, q_smem, _, statistics_smem = buffers
    q_tile, statistics = q_smem.index(slot), statistics_smem.index(slot)
    return start_scores(k_smem.index(0), q_tile, statistics, WIDTH, HAS_SOFTCAP, SCORES)


@gluon.jit
def _probabilities(
    s, statistics, diagonal, limits, scales, OPTIONS: gl.constexpr, MASKED: gl.constexpr
):
    """P, and P times the derivative of the soft-cap, if there is one."""
    _, scale_log2, tanh_scale = scales
    SCORES: gl.constexpr = s.type.layout
    if tanh_scale is not None:
        s, slope = soft_cap(s, tanh_scale, statistics, gl.float32, SCORES)
    p = probabilities(s, scale_log2, diagonal, limits, OPTIONS, MASKED)
    times_slope = p
    if tanh_scale is not None:
        times_slope = p * slope
    return p, times_slope


@gluon.jit
def _value_consumer(dv_out, barriers, buffers, p_smem, scales, work, OPTIONS: gl.constexpr):
    """P, and dV."""
    kv_full, q_full, do_full = barriers
    _, v_smem, q_smem, do_smem, statistics_smem = buffers
    HAS_SOFTCAP: gl.constexpr = scales[2] is not None
    PRODUCTS: gl.constexpr = 1 if HAS_SOFTCAP else 2  # that compute scores
    DTYPE: gl.constexpr = q_smem.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    own, walked, _ = work_of_program(work, TILE, TILE, OPTIONS)
    first_key, kv_head, n_keys, offset, _, k_at = own
    first, per_head = walked[0], walked[3]
    HEADS_PER_KV = work[0][3]
    limits = (work[2], n_keys - first_key)
    diagonal = first * TILE + offset - first_key
    steps = per_head * HEADS_PER_KV
    bounds = steps_of_head(diagonal, limits, walked, TILE, TILE, OPTIONS)

    dv = zero_accumulator(TILE, WIDTH)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(_start_scores(buffers, 0, HAS_SOFTCAP, SCORES),))
    statistics = statistics_smem.index(0)
    p, shared = _probabilities(s, statistics, diagonal, limits, scales, OPTIONS, True)
    p_smem.store(shared)
    named_barrier_arrive(P_WRITTEN, CONSUMERS)
    step = 0
    for head in range(HEADS_PER_KV):
        first_tile = gl.where(head == 0, 1, 0)  # P of the first head's first tile is there
        for part in gl.static_range(3):
            if has_part(part, OPTIONS):
                for j in range(max(bounds[part], first_tile), bounds[part + 1]):
                    # dV of the tile whose P is in registers, and P of the next one.
                    slot, phase = slot_and_phase(step, STAGES)
                    next_slot, next_phase = slot_and_phase(step + 1, STAGES)
                    named_barrier_arrive_at(Q_EMPTY + slot, EVERYBODY)
                    operand = to_operand(p, DTYPE, OPERAND)
                    mbarrier.wait(do_full.index(slot), phase)
                    dv = warpgroup_mma(operand, do_smem.index(slot), dv, is_async=True)
                    mbarrier.wait(q_full.index(next_slot), next_phase)
                    s = _start_scores(buffers, next_slot, HAS_SOFTCAP, SCORES)
                    dv = warpgroup_mma_wait(PRODUCTS, deps=(dv,))
                    named_barrier_arrive_at(DO_EMPTY + slot, EVERYBODY)
                    s = warpgroup_mma_wait(0, deps=(s,))
                    statistics = statistics_smem.index(next_slot)
                    p, shared = _probabilities(
                        s, statistics, diagonal + j * TILE, limits, scales, OPTIONS, part != 1
                    )
                    named_barrier_sync(P_READ, CONSUMERS)
                    p_smem.store(shared)
                    named_barrier_arrive(P_WRITTEN, CONSUMERS)
                    step += 1
    slot, phase = slot_and_phase(steps - 1, STAGES)
    named_barrier_arrive_at(Q_EMPTY + slot, EVERYBODY)
    operand = to_operand(p, DTYPE, OPERAND)
    mbarrier.wait(do_full.index(slot), phase)
    dv = warpgroup_mma(operand, do_smem.index(slot), dv, is_async=True)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    named_barrier_arrive_at(DO_EMPTY + slot, EVERYBODY)
    named_barrier_sync(P_READ, CONSUMERS)  # then the other consumer has also read V
    v_smem.index(0).store(dv.to(DTYPE))
    fence_async_shared()
    store_tile(dv_out, k_at, kv_head, first_key, v_smem.index(0), OPTIONS.packed)
    tma.store_wait(0)


@gluon.jit
def _key_consumer(dk_out, barriers, buffers, p_smem, scales, work, OPTIONS: gl.constexpr):
    """dS, and dK."""
    kv_full, q_full, do_full = barriers
    k_smem, v_smem, q_smem, do_smem, statistics_smem = buffers
    DTYPE: gl.constexpr = q_smem.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    own, walked, _ = work_of_program(work, TILE, TILE, OPTIONS)
    first_key, kv_head, _, _, _, k_at = own
    steps = walked[3] * work[0][3]

    dk = zero_accumulator(TILE, WIDTH)  # without the scale
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(do_full.index(0), 0)
    dp = start_dp(v_smem.index(0), do_smem.index(0), statistics_smem.index(0), WIDTH, SCORES)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    named_barrier_sync(P_WRITTEN, CONSUMERS)
    p = p_smem.load(SCORES)
    named_barrier_arrive(P_READ, CONSUMERS)
    for step in range(steps - 1):
        # dK of the tile whose dS is in registers, and dS of the next one.
        slot, _phase = slot_and_phase(step, STAGES)
        next_slot, next_phase = slot_and_phase(step + 1, STAGES)
        named_barrier_arrive_at(DO_EMPTY + slot, EVERYBODY)
        operand = to_operand(p * dp, DTYPE, OPERAND)
        dk = warpgroup_mma(operand, q_smem.index(slot), dk, is_async=True)
        mbarrier.wait(q_full.index(next_slot), next_phase)
        mbarrier.wait(do_full.index(next_slot), next_phase)
        statistics = statistics_smem.index(next_slot)
        dp = start_dp(v_smem.index(0), do_smem.index(next_slot), statistics, WIDTH, SCORES)
        dk = warpgroup_mma_wait(2, deps=(dk,))
        named_barrier_arrive_at(Q_EMPTY + slot, EVERYBODY)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        named_barrier_sync(P_WRITTEN, CONSUMERS)  # the last time, the other has also read K
        p = p_smem.load(SCORES)
        named_barrier_arrive(P_READ, CONSUMERS)
    slot, _phase = slot_and_phase(steps - 1, STAGES)
    named_barrier_arrive_at(DO_EMPTY + slot, EVERYBODY)
    operand = to_operand(p * dp, DTYPE, OPERAND)
    dk = warpgroup_mma(operand, q_smem.index(slot), dk, is_async=True)
    dk = warpgroup_mma_wait(0, deps=(dk,))
    named_barrier_arrive_at(Q_EMPTY + slot, EVERYBODY)
    k_smem.index(0).store((dk * scales[0]).to(DTYPE))
    fence_async_shared()
    store_tile(dk_out, k_at, kv_head, first_key, k_smem.index(0), OPTIONS.packed)
    tma.store_wait(0)


# ---- kernel --------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def key_pass_kernel(
    q_desc,  # (B, H, N_q, D), tiles of (TILE, WIDTH), as all but the statistics'
    k_desc,  # (B, G, N_k, D)
    v_desc,  # (B, G, N_k, E)
    do_desc,  # (B, H, N_q, E)
    statistics_desc,  # (B · H · tiles · TILE, STATISTICS) bf16, tiles of (TILE, STATISTICS)
    dk_out,  # (B, G, N_k, D)
    dv_out,  # (B, G, N_k, E)
    # From here on, parameters are those of hopper_backward_kernel.
    key_tiles_ptr,
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
    """dK and dV. Grid: key tiles · B · G."""
    loads = (q_desc, k_desc, v_desc, do_desc, statistics_desc)
    buffers = allocate_buffers(loads)
    # A thread's neighbours in a row are stored together; rows of eight threads in other banks.
    P_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, order=[1, 0])
    p_smem = gl.allocate_shared_memory(gl.float32, [TILE, TILE], P_LAYOUT)
    barriers = allocate_barriers()
    scales = (scale, scale_log2, tanh_scale)
    work = ((N_QUERIES, N_KEYS, N_KV_HEADS, HEADS_PER_KV, offset), key_tiles_ptr, band)
    wait_for_prerequisites()
    launch_dependents()

    # Written in place, because a tuple bound to a variable loses its compile-time members.
    if has_work(work, OPTIONS):
        gl.warp_specialize([
            (producer, (loads, barriers, buffers, key_tiles_ptr, work, OPTIONS, False)),
            (_value_consumer, (dv_out, barriers, buffers, p_smem, scales, work, OPTIONS)),
            (_key_consumer, (dk_out, barriers, buffers, p_smem, scales, work, OPTIONS)),
        ], [4, 4], [240, 240])  # fmt: skip
