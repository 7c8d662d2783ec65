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

The order in which programs add to dQ is not fixed unless ORDERED. Then each tile of dQ has an order
counter, and programs add to the tile in the order of their tiles of keys, from the last to the
first. The producer waits until the program's predecessors, those with later keys, have incremented
the counter, lets the consumers add, and increments it when they have. Under a causal mask the wait
is short: each program begins at its diagonal, the first tile of queries that sees its keys, and its
predecessors begin at later tiles. Predecessors have smaller program indices, and the hardware
starts those first, so that no program waits for one that cannot start.

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

from flashattn_triton.hopper.backward_products import (
    OWN,
    STATISTICS,
    soft_cap,
    start_dp,
    start_dq,
    start_scores,
)
from flashattn_triton.hopper.products import (
    FIRST,
    issue_columns,
    scaled,
    store_columns,
    wait_for_all,
    wait_for_columns,
    zero_columns,
)
from flashattn_triton.hopper.schedule import (
    WARPS,
    allow_addition,
    key_tile_of_program,
    load_tile,
    next_query_tile,
    query_tiles,
    ring_of,
    store_tile,
    tiles_before,
    walk,
)
from flashattn_triton.hopper.scores import probabilities
from flashattn_triton.hopper.support import (
    named_barrier_arrive_at,
    named_barrier_sync_at,
    reduce_add,
    signal_successors,
    tma_load,
)

KEYS = gl.constexpr(128)  # of one program
STAGES = gl.constexpr(2)  # tiles of Q and of dO that are in shared memory at a time
DS_BUFFERS = gl.constexpr(3)  # tiles of dS: written, read, and still read by the slower consumer

# Hardware barriers, the first of several each. Consumers arrive at DO_EMPTY + slot or at
# Q_EMPTY + slot when they have read that slot, and the producer waits there before it loads the
# next tile into it. At the four barriers from DS_WRITTEN on, each consumer tells the other that it
# has written its half of dS (see ds_written). Arrivals at barriers in shared memory would need a
# barrier among a consumer's own warps first; arrivals at these do not.
DO_EMPTY = gl.constexpr(0)
Q_EMPTY = gl.constexpr(2)
DS_WRITTEN = gl.constexpr(4)
CONSUMERS = gl.constexpr(256)  # threads
EVERYBODY = gl.constexpr(384)

# ---- producer ------------------------------------------------------------------------------------


@gluon.jit
def _producer(
    loads,  # descriptors of Q, K, V, dO and the statistics
    full,  # barriers: the TMA has loaded K and V, a tile of Q, a tile of dO
    may_add,
    buffers,
    order_counters_ptr,
    sizes,
    tiles_ptr,
    band,
    QUERIES: gl.constexpr,
    is_causal: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    PACKED: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    ORDERED: gl.constexpr,
    RING: gl.constexpr,
):
    """Fetches K and V once, then each step's Q with L and delta, and dO."""
    q_desc, k_desc, v_desc, do_desc, statistics_desc = loads
    kv_full, q_full, do_full = full
    k_smem, v_smem, q_smem, do_smem, statistics_smem = buffers
    D: gl.constexpr = k_smem.shape[2]
    KEY_BYTES: gl.constexpr = 2 * KEYS * D * 2
    QUERY_BYTES: gl.constexpr = QUERIES * D * 2
    _, _, N_KV_HEADS, HEADS_PER_KV, _ = sizes
    first_key, kv_head, n_queries, n_keys, offset, q_at, k_at, sequence = key_tile_of_program(
        sizes, tiles_ptr, KEYS, PACKED, BOTTOM_RIGHT, ORDERED
    )
    n_tiles = query_tiles(n_queries, QUERIES, PACKED)
    ring = ring_of(n_keys, n_tiles, RING, KEYS, QUERIES)
    first, last, wrap, per_head = walk(
        first_key, offset, band, n_tiles, KEYS, QUERIES, is_causal, HAS_LEFT, ORDERED, ring
    )
    steps = per_head * HEADS_PER_KV
    mbarrier.expect(kv_full, KEY_BYTES)
    load_tile(k_desc, k_at, kv_head, first_key, kv_full, k_smem.index(0), PACKED)
    load_tile(v_desc, k_at, kv_head, first_key, kv_full, v_smem.index(0), PACKED)
    n_heads = N_KV_HEADS * HEADS_PER_KV
    first_tile = tiles_before(q_at, n_queries, sequence, n_heads, n_tiles, QUERIES, PACKED)
    tile = first
    head = kv_head * HEADS_PER_KV
    tile_to_add = tile
    head_to_add = head
    order_counter = order_counters_ptr
    for step in range(steps + STAGES):
        slot = step % STAGES
        row = (first_tile + head * n_tiles + tile) * QUERIES  # of all heads' tiles
        first_query = tile * QUERIES
        if step >= STAGES:
            named_barrier_sync_at(DO_EMPTY + slot, EVERYBODY)
        if step < steps:
            mbarrier.expect(do_full.index(slot), QUERY_BYTES)
            do_tile = do_smem.index(slot)
            load_tile(do_desc, q_at, head, first_query, do_full.index(slot), do_tile, PACKED)
        if step >= STAGES:
            named_barrier_sync_at(Q_EMPTY + slot, EVERYBODY)
        if step <= steps:  # the last step issues the scores of a tile that nobody uses
            mbarrier.expect(q_full.index(slot), QUERY_BYTES + QUERIES * STATISTICS * 2)
            q_tile = q_smem.index(slot)
            load_tile(q_desc, q_at, head, first_query, q_full.index(slot), q_tile, PACKED)
            tma_load(statistics_desc, [row, 0], q_full.index(slot), statistics_smem.index(slot))
        if ORDERED:
            # The consumers have given back Q of STAGES steps before, in which they added to the
            # tile of one step before that. In their next step they add to this one's.
            if step > STAGES:
                signal_successors(order_counter, gl.to_tensor(True))
            if step >= STAGES:
                order_counter = order_counters_ptr + first_tile + head_to_add * n_tiles
                order_counter += tile_to_add
                allow_addition(
                    may_add, order_counter, tile_to_add, first, first_key, n_keys, offset, n_tiles,
                    KEYS, QUERIES, is_causal, WARPS, ring,
                )  # fmt: skip
                tile_to_add, head_to_add = next_query_tile(
                    tile_to_add, head_to_add, first, last, wrap
                )
        if step + 1 < steps:
            tile, head = next_query_tile(tile, head, first, last, wrap)
    if ORDERED:  # after the loop, the consumers add to the last tile
        named_barrier_sync_at(Q_EMPTY + steps % STAGES, EVERYBODY)
        signal_successors(order_counter, gl.to_tensor(True))


# ---- consumer ------------------------------------------------------------------------------------


@gluon.jit
def wrapped(tile, n_tiles):
    """``tile``, counted on from tile 0 after the last one, where a walk begins in the middle."""
    return gl.where(tile < n_tiles, tile, tile - n_tiles)


@gluon.jit
def fragment_offsets(WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of the first WIDTH columns of a (64, 64) fp32 block.

    A thread's elements are groups of four.
    """
    rows = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)), 1)
    columns = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)), 0)
    return (columns // 8) * 512 + ((rows // 16) * 32 + (rows % 8) * 4 + (columns % 8) // 2) * 4


@gluon.jit
def ds_written(CONSUMER: gl.constexpr, steps):
    """The barrier at which ``CONSUMER`` arrives when it has written dS of ``steps`` steps.

    In step n a consumer waits at the other consumer's barrier for n steps, writes its half of dS,
    arrives at its own barrier for n + 1 steps, and reads both halves of dS of step n - 1. It
    arrives once before step 0, for 0 steps, and once after the last step, when it has read all dS.
    Two barriers for each consumer and three buffers of dS are enough:

    - A read is safe: both halves of dS of step n - 1 are complete after the wait for n steps, in
      which all warps of the reading consumer take part.
    - A write is safe: in step n it replaces dS of step n - 3. The other consumer reads that in its
      step n - 2, at whose end its products are complete, and arrives for n steps after that.
    - A barrier is free when it is used again: an arrival for n + 1 steps uses the barrier of n - 1
      steps. It follows a wait for the other's n steps, and the other consumer waits for n - 1 steps
      before it arrives for n.
    """
    return DS_WRITTEN + 2 * CONSUMER + steps % 2


@gluon.jit
def _step(
    full,
    may_add,
    buffers,
    ds_smem,
    dq_own,  # pointers to this consumer's half of the first tile of dQ of the group of heads
    step,
    steps,  # in all
    previous_tile,  # the previous step's, counted from the group's first tile; -1 in step 0
    diagonal,
    band,
    n_keys,
    scale_log2,
    tanh_scale,
    s,  # (OWN, QUERIES) fp32, raw scores of this tile, less L / scale
    dk,  # (OWN, D) fp32, by ranges of columns, without the scale
    dv,
    CONSUMER: gl.constexpr,
    COLUMNS: gl.constexpr,
    DQ_WIDTH: gl.constexpr,
    RAGGED: gl.constexpr,
    is_causal: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    ORDERED: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Adds what one tile of queries contributes to dK and dV, and the previous tile to dQ.

    Returns the next tile's scores, dK and dV.
    """
    _, q_full, do_full = full
    k_smem, v_smem, q_smem, do_smem, statistics_smem = buffers
    QUERIES: gl.constexpr = q_smem.shape[1]
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
    p = probabilities(s, scale_log2, diagonal, band, n_keys, RAGGED, is_causal, HAS_LEFT, MASKED)
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
    if ORDERED:
        mbarrier.wait(may_add, (step - 1) & 1, pred=previous_tile >= 0)
    reduce_add(dq_own + gl.cast(previous_tile, gl.int64) * (QUERIES * D), dq, previous_tile >= 0)
    mbarrier.wait(do_full.index(next_slot), next_phase, pred=step + 1 < steps)
    # ptxas runs every product by itself unless each iteration ends with nothing in flight.
    s, dk = wait_for_all(s, dk)
    named_barrier_arrive_at(Q_EMPTY + slot, EVERYBODY)
    return s, dk, dv


@gluon.jit
def _consumer(
    dk_desc,
    dv_desc,
    full,
    may_add,
    buffers,
    ds_smem,
    dq_ptr,
    scale,
    scale_log2,
    tanh_scale,
    sizes,
    tiles_ptr,
    band,
    CONSUMER: gl.constexpr,
    COLUMNS: gl.constexpr,
    RAGGED: gl.constexpr,
    is_causal: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    PACKED: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    ORDERED: gl.constexpr,
    RING: gl.constexpr,
):
    """dK and dV of 64 keys, and half of each tile of dQ."""
    kv_full, q_full, do_full = full
    k_smem, v_smem, q_smem, _, statistics_smem = buffers
    QUERIES: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    HAS_SOFTCAP: gl.constexpr = tanh_scale is not None
    # Consumers share the columns of dQ if there are 128, else its rows.
    DQ_WIDTH: gl.constexpr = COLUMNS - FIRST if D == 128 and CONSUMER == 1 else 64
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_WIDTH, 16])
    _, _, N_KV_HEADS, HEADS_PER_KV, _ = sizes
    first_key, kv_head, n_queries, n_keys, offset, q_at, k_at, sequence = key_tile_of_program(
        sizes, tiles_ptr, KEYS, PACKED, BOTTOM_RIGHT, ORDERED
    )
    own_key = first_key + CONSUMER * OWN
    all_keys = n_keys
    n_keys -= own_key
    n_tiles = query_tiles(n_queries, QUERIES, PACKED)
    ring = ring_of(all_keys, n_tiles, RING, KEYS, QUERIES)
    first, _, _, per_head = walk(
        first_key, offset, band, n_tiles, KEYS, QUERIES, is_causal, HAS_LEFT, ORDERED, ring
    )
    steps = per_head * HEADS_PER_KV
    # Under a causal mask, all queries of a tile see all keys here if its first query does.
    diagonal = first * QUERIES + offset - own_key
    n_masked = 0
    if is_causal:
        n_masked = min(max(gl.cdiv(OWN - 1 - diagonal, QUERIES), 0), per_head)
    n_seen = per_head  # from this step on, a window's left edge hides keys from some queries
    if HAS_LEFT:  # all queries of a tile see all keys here if its last query does
        n_seen = min(max((band - diagonal + 1) // QUERIES, n_masked), per_head)
    if RAGGED:
        n_masked = gl.where(n_keys < OWN, per_head, n_masked)
        n_seen = max(n_seen, n_masked)
    n_heads = N_KV_HEADS * HEADS_PER_KV
    group = tiles_before(q_at, n_queries, sequence, n_heads, n_tiles, QUERIES, PACKED)
    group += kv_head * HEADS_PER_KV * n_tiles
    dq_own = dq_ptr + gl.cast(group, gl.int64) * (QUERIES * D) + CONSUMER * 4096
    dq_own += fragment_offsets(DQ_WIDTH, DQ)

    mbarrier.wait(kv_full, 0)
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
    head = 0  # the first tile of a head, of the tiles of the group's heads
    previous_tile = -1
    for _ in range(HEADS_PER_KV):
        if is_causal or RAGGED:
            for j in range(n_masked):
                s, dk, dv = _step(
                    full, may_add, buffers, ds_smem, dq_own, step, steps, previous_tile,
                    diagonal + j * QUERIES, band, n_keys, scale_log2, tanh_scale, s, dk, dv,
                    CONSUMER, COLUMNS, DQ_WIDTH, RAGGED, is_causal, HAS_LEFT, ORDERED, True,
                )  # fmt: skip
                step += 1
                previous_tile = head + wrapped(first + j, n_tiles)
        for j in range(n_masked, n_seen):
            s, dk, dv = _step(
                full, may_add, buffers, ds_smem, dq_own, step, steps, previous_tile, diagonal,
                band, n_keys, scale_log2, tanh_scale, s, dk, dv, CONSUMER, COLUMNS, DQ_WIDTH,
                RAGGED, is_causal, HAS_LEFT, ORDERED, False,
            )  # fmt: skip
            step += 1
            previous_tile = head + wrapped(first + j, n_tiles)
        if HAS_LEFT:
            for j in range(n_seen, per_head):
                s, dk, dv = _step(
                    full, may_add, buffers, ds_smem, dq_own, step, steps, previous_tile,
                    diagonal + j * QUERIES, band, n_keys, scale_log2, tanh_scale, s, dk, dv,
                    CONSUMER, COLUMNS, DQ_WIDTH, RAGGED, is_causal, HAS_LEFT, ORDERED, True,
                )  # fmt: skip
                step += 1
                previous_tile = head + first + j
        head += n_tiles

    named_barrier_sync_at(ds_written(1 - CONSUMER, steps), CONSUMERS)
    dq = start_dq(ds_smem.index((steps - 1) % DS_BUFFERS), k_smem.index(0), DQ_WIDTH, CONSUMER)
    store_columns(own_v, dv)  # the other consumer never reads this half of V
    fence_async_shared()
    store_tile(dv_desc, k_at, kv_head, own_key, own_v, PACKED)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    if ORDERED:
        mbarrier.wait(may_add, (steps - 1) & 1)
    reduce_add(dq_own + gl.cast(previous_tile, gl.int64) * (QUERIES * D), dq, previous_tile >= 0)
    if ORDERED:
        named_barrier_arrive_at(Q_EMPTY + steps % STAGES, EVERYBODY)
    named_barrier_arrive_at(ds_written(CONSUMER, steps + 1), CONSUMERS)
    named_barrier_sync_at(ds_written(1 - CONSUMER, steps + 1), CONSUMERS)
    # dK replaces this half of K, which the other consumer's dQ read until it arrived above.
    store_columns(own_k, scaled(dk, scale))
    fence_async_shared()
    store_tile(dk_desc, k_at, kv_head, own_key, own_k, PACKED)
    tma.store_wait(0)


# ---- kernel --------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=[
        *("N_QUERIES", "N_KEYS", "N_KV_HEADS", "HEADS_PER_KV", "offset", "band"),
        *("scale", "scale_log2", "tanh_scale"),
    ]
)
def hopper_backward_kernel(
    q_desc,  # (B, H, N_q, D), tiles of (QUERIES, D)
    k_desc,  # (B, G, N_k, D), tiles of (KEYS, D)
    v_desc,
    do_desc,  # as q_desc
    statistics_desc,  # (B · H · tiles · QUERIES, STATISTICS) bf16, tiles of (QUERIES, STATISTICS)
    dq_ptr,  # (B · H · tiles · QUERIES, D) fp32, each 64 rows in the order of fragment_offsets
    dk_desc,  # (B, G, N_k, D), tiles of (OWN, D)
    dv_desc,
    tiles_ptr,  # the table of schedule.packed_tiles_kernel, of keys, if PACKED, else None
    order_counters_ptr,  # (B · H · tiles,) int32, zeros, if ORDERED, else None
    N_QUERIES,
    N_KEYS,
    N_KV_HEADS,
    HEADS_PER_KV,
    offset,
    band,
    scale,
    scale_log2,
    tanh_scale,
    COLUMNS: gl.constexpr,
    RAGGED: gl.constexpr,
    is_causal: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    PACKED: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    ORDERED: gl.constexpr,
    RING: gl.constexpr,
):
    """dK and dV, and dQ / scale added to ``dq_ptr``. Grid: key tiles · B · G.

    ``offset``: key index minus query index of the last key that a query sees, if ``is_causal``.
    ``COLUMNS``: of tiles, those in use. ``band``: how many keys before that one a query sees, if
    ``HAS_LEFT``. ``RAGGED``: the last tile has keys past the end. ``PACKED``, ``BOTTOM_RIGHT``: as
    of the forward kernel; there are at most as many tiles as programs. ``RING``: the most
    programs of a ring; 0 unless ORDERED and without a mask.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    QUERIES: gl.constexpr = q_desc.block_shape[-2]
    D: gl.constexpr = q_desc.block_shape[-1]
    Q_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, D], DTYPE)
    KV_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], DTYPE)
    DS_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], DTYPE)
    k_smem = gl.allocate_shared_memory(DTYPE, [1, KEYS, D], KV_SMEM)
    v_smem = gl.allocate_shared_memory(DTYPE, [1, KEYS, D], KV_SMEM)
    q_smem = gl.allocate_shared_memory(DTYPE, [STAGES, QUERIES, D], Q_SMEM)
    do_smem = gl.allocate_shared_memory(DTYPE, [STAGES, QUERIES, D], Q_SMEM)
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
    may_add = kv_full  # of no use unless ORDERED
    if ORDERED:
        may_add = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(may_add, count=1)
    buffers = (k_smem, v_smem, q_smem, do_smem, statistics_smem)

    sizes = (N_QUERIES, N_KEYS, N_KV_HEADS, HEADS_PER_KV, offset)
    present = True
    if PACKED:
        present = gl.program_id(0) < gl.load(tiles_ptr) * N_KV_HEADS

    # Written in place, because a tuple bound to a variable loses its compile-time members.
    if present:
        gl.warp_specialize([
            (_producer, (
                loads, full, may_add, buffers, order_counters_ptr, sizes, tiles_ptr, band, QUERIES,
                is_causal, HAS_LEFT, PACKED, BOTTOM_RIGHT, ORDERED, RING,
            )),
            (_consumer, (
                dk_desc, dv_desc, full, may_add, buffers, ds_smem, dq_ptr, scale, scale_log2,
                tanh_scale, sizes, tiles_ptr, band, 0, COLUMNS, RAGGED, is_causal, HAS_LEFT,
                PACKED, BOTTOM_RIGHT, ORDERED, RING,
            )),
            (_consumer, (
                dk_desc, dv_desc, full, may_add, buffers, ds_smem, dq_ptr, scale, scale_log2,
                tanh_scale, sizes, tiles_ptr, band, 1, COLUMNS, RAGGED, is_causal, HAS_LEFT,
                PACKED, BOTTOM_RIGHT, ORDERED, RING,
            )),
        ], [4, 4], [240, 240])  # fmt: skip
