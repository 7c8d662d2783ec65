# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""The backward pass on sm_90, fused: FlashAttention-2, Algorithm 2, with its products overlapped.

A program computes dK and dV of 128 keys, and adds its part of dQ to an fp32 sum in memory. One warp
group, the producer, fetches tiles of Q and dO; two consumers own 64 keys each. Everything is
computed transposed, keys by queries, so that P and dS are operands of the next products as they lie
in registers:

    Sᵀ  = K Qᵀ - L / scale          Pᵀ = exp2(Sᵀ · scale · log2(e))
    dPᵀ = V dOᵀ - delta             dSᵀ = Pᵀ ∘ dPᵀ,  delta = rowsum(O ∘ dO) - dL
    dV += Pᵀ dO,   dK += dSᵀ Q      from registers
    dQ  = dS K                      dS through shared memory, where both consumers' halves meet

dQ is one step late: when a consumer has written its half of dS of this tile, it issues the product
with dS of the previous tile. So no consumer waits for dS that the other consumer has just computed,
and the exponentials of one consumer run while the tensor cores work for the other.
``preprocess.py`` holds the small kernels that run before and after this one.

The tensor cores subtract L and delta: three bf16 numbers that add up to each travel with Q, 32
bytes per query, and are multiplied by ones. If every thread loaded them for its columns of scores,
that would be a fifth (D = 64) or a tenth (128) of the traffic of shared memory, which is the limit.

With a soft-cap c the tanh T of S · scale / c takes the place of S. L / c is subtracted from T, and
dS has a factor 1 - T².

The order in which programs add to dQ is not fixed unless ``ordered``. Then each tile of dQ has an
order counter, and programs add to the tile in the order of their tiles of keys, from the last to
the first. The producer waits until the program's predecessors, those with later keys, have
incremented the counter, lets the consumers add, and increments it when they have. Under a causal
mask the wait is short: each program begins at its diagonal, the first tile of queries that sees its
keys, and its predecessors begin at later tiles. Predecessors have smaller program indices, and the
hardware starts those first, so that no program waits for one that cannot start.

Without a mask all programs of a head would begin at its first tile of queries, and each would wait
for all before it. Where ``schedule.ring_of`` says so, they form a ring instead: each begins at the
tile of queries that lies beside its keys, goes on after the last tile with the first one, and the
order in a tile is that of the steps in which programs come to it. A program waits only for earlier
steps of others, which surely run at the same time, so that none waits for itself.

Legend: B batch, H query heads, G key/value heads, N_q queries, N_k keys, D head_dim.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
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
    start_dq,
    start_scores,
    steps_of_head,
    work_of_program,
    wrapped,
)
from flashattn_triton.hopper.products import (
    FIRST,
    issue_columns,
    scaled,
    store_columns,
    wait_for_all,
    wait_for_columns,
    write_columns,
    zero_columns,
)
from flashattn_triton.hopper.schedule import first_element, predecessors, store_tile
from flashattn_triton.hopper.scores import probabilities
from flashattn_triton.hopper.support import (
    allocate_tiles,
    named_barrier_arrive_at,
    named_barrier_sync_at,
    reduce_add,
    store_or_add,
)

KEYS = gl.constexpr(128)  # of one program

# ---- consumer ------------------------------------------------------------------------------------


@gluon.jit
def _add_dq(
    dq_own, dq, program, previous, step, may_add,
    QUERIES: gl.constexpr, D: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Adds this consumer's part of the previous step's tile of dQ to the sum in memory.

    If ``ordered``, the tile's first program stores it: no zeros come before.
    """
    tile, head = previous
    sums = dq_own + gl.cast(tile, gl.int64) * (QUERIES * D)
    if OPTIONS.ordered:
        _, own, walked, tiles = program
        in_head = tile - head * tiles[0]
        before = predecessors(in_head, own, walked, tiles, KEYS, QUERIES, OPTIONS)
        mbarrier.wait(may_add.index(0), step & 1, pred=tile >= 0)
        store_or_add(sums, dq, (tile >= 0) & (before > 0), (tile >= 0) & (before == 0))
    else:
        reduce_add(sums, dq, tile >= 0)


@gluon.jit
def _step(
    barriers,
    buffers,
    ds_smem,
    dq_own,  # pointers to this consumer's half of the first tile of dQ of the group of heads
    program,  # (work, and what work_of_program returned)
    step,
    steps,  # in all
    previous,  # the previous step's tile, from the group's first one on, -1 in step 0; and its head
    diagonal,
    limits,
    scales,
    s,  # (OWN, QUERIES) fp32, raw scores of this tile, less L / scale
    dk,  # (OWN, D) fp32, by ranges of columns, without the scale
    dv,
    CONSUMER: gl.constexpr,
    DQ_WIDTH: gl.constexpr,
    OPTIONS: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Adds what one tile of queries contributes to dK and dV, and the previous tile to dQ.

    Returns the next tile's scores, dK and dV.
    """
    _, q_full, do_full, may_add = barriers
    k_smem, v_smem, q_smem, do_smem, statistics_smem = buffers
    _, scale_log2, tanh_scale = scales
    QUERIES: gl.constexpr = q_smem.shape[1]
    COLUMNS: gl.constexpr = OPTIONS.columns
    D: gl.constexpr = q_smem.shape[2]
    DTYPE: gl.constexpr = q_smem.dtype
    SCORES: gl.constexpr = s.type.layout
    SUMS: gl.constexpr = dk[0].type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    DK_FIRST: gl.constexpr = D == 128  # its products run while dS is exchanged; by measurement
    slot = step % STAGES
    next_slot = (step + 1) % STAGES
    next_phase = ((step + 1) // STAGES) & 1
    # Always 0, which the compiler cannot know: it would otherwise keep all addresses within K and V
    # in registers, of which there are too few.
    opaque_zero = step >> 30
    k_tile = k_smem.index(opaque_zero)
    own_k = k_tile.slice(CONSUMER * OWN, OWN, dim=0)
    own_v = v_smem.index(opaque_zero).slice(CONSUMER * OWN, OWN, dim=0)
    q_tile = q_smem.index(slot)
    do_tile = do_smem.index(slot)
    ds_tile = ds_smem.index(step % DS_BUFFERS)
    ds_before = ds_smem.index((step + DS_BUFFERS - 1) % DS_BUFFERS)

    RANGES: gl.constexpr = len(dk)
    HAS_SOFTCAP: gl.constexpr = tanh_scale is not None
    statistics = statistics_smem.index(slot)
    if HAS_SOFTCAP:
        # The slope is rounded, to fit half the registers.
        s, slope = soft_cap(s, tanh_scale, statistics, DTYPE, SCORES)
    else:
        dp = start_dp(own_v, do_tile, statistics, COLUMNS, SCORES)
    p = probabilities(s, scale_log2, diagonal, limits, OPTIONS, MASKED)
    dv = issue_columns(gl.convert_layout(p.to(DTYPE), OPERAND), do_tile, dv)
    if HAS_SOFTCAP:  # dP as late as this, for want of registers
        p *= slope.to(gl.float32)
        dp = start_dp(own_v, do_tile, statistics, COLUMNS, SCORES)
    dp = warpgroup_mma_wait(0 if HAS_SOFTCAP else RANGES, deps=(dp,))
    ds = (p * dp).to(DTYPE)

    if DK_FIRST:
        dk = issue_columns(gl.convert_layout(ds, OPERAND), q_tile, dk)
    named_barrier_sync_at(ds_written(1 - CONSUMER, step), CONSUMERS)
    ds_tile.slice(CONSUMER * OWN, OWN, dim=0).store(ds)
    fence_async_shared()
    named_barrier_arrive_at(ds_written(CONSUMER, step + 1), CONSUMERS)
    # In step 0 there is no previous tile: the buffer is uninitialised, the result is not added.
    dq = start_dq(ds_before, k_tile, DQ_WIDTH, CONSUMER)
    if not DK_FIRST:
        dk = issue_columns(gl.convert_layout(ds, OPERAND), q_tile, dk)
    dv = wait_for_columns(dv, RANGES + 1)
    named_barrier_arrive_at(DO_EMPTY + slot, EVERYBODY)

    mbarrier.wait(q_full.index(next_slot), next_phase)
    next_statistics = statistics_smem.index(next_slot)
    s = start_scores(own_k, q_smem.index(next_slot), next_statistics, COLUMNS, HAS_SOFTCAP, SCORES)
    AFTER_DQ: gl.constexpr = 1 if DK_FIRST else 2
    dq = warpgroup_mma_wait(RANGES + AFTER_DQ - (1 if HAS_SOFTCAP else 0), deps=(dq,))
    _add_dq(dq_own, dq, program, previous, step - 1, may_add, QUERIES, D, OPTIONS)
    mbarrier.wait(do_full.index(next_slot), next_phase, pred=step + 1 < steps)
    # ptxas runs every product by itself unless each iteration ends with nothing in flight.
    s, dk = wait_for_all(s, dk)
    named_barrier_arrive_at(Q_EMPTY + slot, EVERYBODY)
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
    dk_out, dv_out, dk_strides, dv_strides, widths_div8 = stores
    kv_full, q_full, do_full, may_add = barriers
    k_smem, v_smem, q_smem, _, statistics_smem = buffers
    scale, _, tanh_scale = scales
    QUERIES: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    COLUMNS: gl.constexpr = OPTIONS.columns
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    HAS_SOFTCAP: gl.constexpr = tanh_scale is not None
    # Consumers share the columns of dQ if there are 128, else its rows.
    DQ_WIDTH: gl.constexpr = COLUMNS - FIRST if D == 128 and CONSUMER == 1 else 64
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_WIDTH, 16])
    own, walked, tiles = work_of_program(work, KEYS, QUERIES, OPTIONS)
    program = (work, own, walked, tiles)
    first_key, kv_head, n_keys, offset, _, k_at = own
    first, _, _, per_head = walked
    n_tiles, first_tile, _ = tiles
    HEADS_PER_KV = work[0][3]
    own_key = first_key + CONSUMER * OWN
    limits = (work[2], n_keys - own_key)
    steps = per_head * HEADS_PER_KV
    diagonal = first * QUERIES + offset - own_key
    bounds = steps_of_head(diagonal, limits, per_head, OWN, QUERIES, OPTIONS)
    group = first_tile + kv_head * HEADS_PER_KV * n_tiles
    dq_own = dq_ptr + gl.cast(group, gl.int64) * (QUERIES * D) + CONSUMER * 4096
    dq_own += fragment_offsets(DQ_WIDTH, DQ)

    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(q_full.index(0), 0)
    own_k = k_smem.index(0).slice(CONSUMER * OWN, OWN, dim=0)
    own_v = v_smem.index(0).slice(CONSUMER * OWN, OWN, dim=0)
    s = start_scores(own_k, q_smem.index(0), statistics_smem.index(0), COLUMNS, HAS_SOFTCAP, SCORES)
    mbarrier.wait(do_full.index(0), 0)
    s = warpgroup_mma_wait(0, deps=(s,))
    dk = zero_columns(OWN, D, COLUMNS)
    dv = zero_columns(OWN, D, COLUMNS)
    named_barrier_arrive_at(ds_written(CONSUMER, 0), CONSUMERS)
    step = 0
    previous_tile = -1
    previous_head = 0
    for head in range(HEADS_PER_KV):
        for part in gl.static_range(3):
            if has_part(part, OPTIONS):
                for j in range(bounds[part], bounds[part + 1]):
                    s, dk, dv = _step(
                        barriers, buffers, ds_smem, dq_own, program, step, steps,
                        (previous_tile, previous_head), diagonal + j * QUERIES, limits, scales, s,
                        dk, dv, CONSUMER, DQ_WIDTH, OPTIONS, part != 1,
                    )  # fmt: skip
                    step += 1
                    tile = first + j
                    if part < 2:  # behind a left edge no walk begins in the middle
                        tile = wrapped(tile, n_tiles)
                    previous_tile = head * n_tiles + tile
                    previous_head = head

    named_barrier_sync_at(ds_written(1 - CONSUMER, steps), CONSUMERS)
    dq = start_dq(ds_smem.index((steps - 1) % DS_BUFFERS), k_smem.index(0), DQ_WIDTH, CONSUMER)
    if OPTIONS.adds:
        dv_rows = dv_out + first_element(dv_strides, k_at, kv_head, n_keys, own_key, OPTIONS.packed)
        write_columns(dv_rows, n_keys - own_key, dv_strides[2], widths_div8, dv, True)
    else:
        store_columns(own_v, dv)  # the other consumer never reads this half of V
        fence_async_shared()
        store_tile(dv_out, k_at, kv_head, own_key, own_v, OPTIONS.packed)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    previous = (previous_tile, previous_head)
    _add_dq(dq_own, dq, program, previous, steps - 1, may_add, QUERIES, D, OPTIONS)
    if OPTIONS.ordered:
        named_barrier_arrive_at(Q_EMPTY + steps % STAGES, EVERYBODY)
    named_barrier_arrive_at(ds_written(CONSUMER, steps + 1), CONSUMERS)
    named_barrier_sync_at(ds_written(1 - CONSUMER, steps + 1), CONSUMERS)
    if OPTIONS.adds:
        dk_rows = dk_out + first_element(dk_strides, k_at, kv_head, n_keys, own_key, OPTIONS.packed)
        dk = scaled(dk, scale)
        write_columns(dk_rows, n_keys - own_key, dk_strides[2], widths_div8, dk, True)
    else:
        # dK replaces this half of K, which the other consumer's dQ read until it arrived above.
        store_columns(own_k, scaled(dk, scale))
        fence_async_shared()
        store_tile(dk_out, k_at, kv_head, own_key, own_k, OPTIONS.packed)
        tma.store_wait(0)


# ---- kernel --------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=[
        *UNSPECIALIZED,
        *("stride_dkb", "stride_dkh", "stride_dkk", "stride_dvb", "stride_dvh", "stride_dvk"),
        "D_DIV8",
    ]
)
def hopper_backward_kernel(
    q_desc,  # (B, H, N_q, D), tiles of (QUERIES, D)
    k_desc,  # (B, G, N_k, D), tiles of (KEYS, D)
    v_desc,
    do_desc,  # as q_desc
    statistics_desc,  # (B · H · tiles · QUERIES, STATISTICS) bf16, tiles of (QUERIES, STATISTICS)
    dq_ptr,  # (B · H · tiles · QUERIES, D) fp32, each 64 rows in the order of fragment_offsets
    dk_out,  # (B, G, N_k, D), tiles of (OWN, D); a pointer to fp32 sums if ``adds``
    dv_out,
    key_tiles_ptr,  # the table of schedule.packed_tiles_kernel, of keys, if ``packed``, else None
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
    stride_dkb,  # of dK and dV in units of 8 elements, if ``adds``, else None
    stride_dkh,
    stride_dkk,
    stride_dvb,
    stride_dvh,
    stride_dvk,
    D_DIV8,  # D / 8, likewise
    OPTIONS: gl.constexpr,  # backward_common.BackwardOptions
):
    """dK and dV, and dQ / scale added to ``dq_ptr``. Grid: key tiles · B · G.

    ``offset``: key index minus query index of the last key that a query sees, if ``is_causal``.
    ``band``: how many keys before that one a query sees, if ``has_left``. If ``packed``, there are
    at most as many tiles as programs.
    """
    loads = (q_desc, k_desc, v_desc, do_desc, statistics_desc)
    buffers = allocate_buffers(loads)
    ds_smem = allocate_tiles(q_desc.dtype, DS_BUFFERS, KEYS, q_desc.block_shape[-2])
    barriers = allocate_barriers(1 if OPTIONS.ordered else 0)
    dk_strides = (stride_dkb, stride_dkh, stride_dkk)
    dv_strides = (stride_dvb, stride_dvh, stride_dvk)
    stores = (dk_out, dv_out, dk_strides, dv_strides, D_DIV8)
    scales = (scale, scale_log2, tanh_scale)
    work = ((N_QUERIES, N_KEYS, N_KV_HEADS, HEADS_PER_KV, offset), key_tiles_ptr, band)

    # Written in place, because a tuple bound to a variable loses its compile-time members.
    if has_work(work, OPTIONS):
        gl.warp_specialize([
            (producer, (loads, barriers, buffers, order_counters_ptr, work, OPTIONS, True)),
            (_consumer, (stores, barriers, buffers, ds_smem, dq_ptr, scales, work, 0, OPTIONS)),
            (_consumer, (stores, barriers, buffers, ds_smem, dq_ptr, scales, work, 1, OPTIONS)),
        ], [4, 4], [240, 240])  # fmt: skip
