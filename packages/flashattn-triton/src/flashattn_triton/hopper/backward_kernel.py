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

dQ is one step late: when a consumer has written its half of dS of this tile, it multiplies dS of
the tile before. So neither waits for what the other has just computed, and the exponentials of one
run under the products of the other. ``preprocess.py`` holds the small kernels that run before and
after this one.

The tensor cores subtract L and delta: three bf16 numbers that add up to each travel with Q, 32
bytes per query, and are multiplied by ones. If every thread loaded them for its columns of scores,
that would be a fifth (D = 64) or a tenth (128) of the traffic of shared memory, which is the limit.

With a soft-cap c the tanh T of S · scale / c takes the place of S. L / c is subtracted from T, and
dS has a factor 1 - T².

The order in which programs add to dQ is not fixed unless ORDERED. Then each consumer's part of a
tile of dQ has a counter, and tiles of keys add to it from the last to the first: under a causal
mask each program begins at its diagonal, which no program before it has yet to reach. A program
only waits for ones with smaller indices, which the hardware starts earlier.

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
    start_dp,
    start_dq,
    start_scores,
    subtract,
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
    key_tile_of_program,
    load_tile,
    next_query_tile,
    query_tiles,
    store_tile,
    tiles_before,
    turn_of,
    walk,
)
from flashattn_triton.hopper.scores import tanh
from flashattn_triton.hopper.support import (
    end_turn,
    exp2,
    named_barrier_arrive_at,
    named_barrier_sync_at,
    reduce_add,
    tma_load,
    wait_for_turn,
)

KEYS = gl.constexpr(128)  # of one program
STAGES = gl.constexpr(2)  # tiles of Q and of dO that are in shared memory at a time
DS_BUFFERS = gl.constexpr(3)  # tiles of dS: written, read, and still read by the slower consumer

# Hardware barriers. At the first ones consumers tell the producer, which waits, that one of two
# slots may be filled again; at the others they tell each other that dS is written. Unlike arrivals
# at barriers in shared memory, these need no barrier among a consumer's own warps first.
DO_EMPTY = gl.constexpr(0)
Q_EMPTY = gl.constexpr(2)
DS_WRITTEN = gl.constexpr(4)
CONSUMERS = gl.constexpr(256)  # threads
EVERYBODY = gl.constexpr(384)

# ---- producer ------------------------------------------------------------------------------------


@gluon.jit
def _producer(
    loads,  # descriptors of Q, K, V, dO and the statistics
    full,  # barriers: copied
    buffers,
    sizes,
    tiles_ptr,
    band,
    QUERIES: gl.constexpr,
    is_causal: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    PACKED: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    ORDERED: gl.constexpr,
):
    """Fetches K and V once, then each step's Q with L and delta, and dO."""
    q_desc, k_desc, v_desc, do_desc, statistics_desc = loads
    kv_full, q_full, do_full = full
    k_smem, v_smem, q_smem, do_smem, statistics_smem = buffers
    D: gl.constexpr = k_smem.shape[2]
    KEY_BYTES: gl.constexpr = 2 * KEYS * D * 2
    QUERY_BYTES: gl.constexpr = QUERIES * D * 2
    _, _, N_KV_HEADS, HEADS_PER_KV, _ = sizes
    first_key, kv_head, n_queries, _, offset, q_at, k_at, sequence = key_tile_of_program(
        sizes, tiles_ptr, KEYS, PACKED, BOTTOM_RIGHT, ORDERED
    )
    n_tiles = query_tiles(n_queries, QUERIES, PACKED)
    first, last, wrap, per_head = walk(
        first_key, offset, band, n_tiles, KEYS, QUERIES, is_causal, HAS_LEFT, ORDERED
    )
    steps = per_head * HEADS_PER_KV
    mbarrier.expect(kv_full, KEY_BYTES)
    load_tile(k_desc, k_at, kv_head, first_key, kv_full, k_smem.index(0), PACKED)
    load_tile(v_desc, k_at, kv_head, first_key, kv_full, v_smem.index(0), PACKED)
    n_heads = N_KV_HEADS * HEADS_PER_KV
    before = tiles_before(q_at, n_queries, sequence, n_heads, n_tiles, QUERIES, PACKED)
    tile = first
    head = kv_head * HEADS_PER_KV
    for step in range(steps + STAGES):
        slot = step % STAGES
        row = (before + head * n_tiles + tile) * QUERIES  # of all heads' tiles
        first_query = tile * QUERIES
        if step >= STAGES:
            named_barrier_sync_at(DO_EMPTY + slot, EVERYBODY)
        if step < steps:
            mbarrier.expect(do_full.index(slot), QUERY_BYTES)
            do_tile = do_smem.index(slot)
            load_tile(do_desc, q_at, head, first_query, do_full.index(slot), do_tile, PACKED)
        if step >= STAGES:
            named_barrier_sync_at(Q_EMPTY + slot, EVERYBODY)
        if step <= steps:  # consumers start one more product than they use
            mbarrier.expect(q_full.index(slot), QUERY_BYTES + QUERIES * STATISTICS * 2)
            q_tile = q_smem.index(slot)
            load_tile(q_desc, q_at, head, first_query, q_full.index(slot), q_tile, PACKED)
            tma_load(statistics_desc, [row, 0], q_full.index(slot), statistics_smem.index(slot))
        if step + 1 < steps:
            tile, head = next_query_tile(tile, head, first, last, wrap)


# ---- consumer ------------------------------------------------------------------------------------


@gluon.jit
def apply_mask(
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
def wrapped(tile, n_tiles):
    """A walk over all tiles that began in the middle goes on with the first."""
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
    """The barrier at which ``CONSUMER`` says that it has written dS of so many steps.

    In step n a consumer waits for what the other says after n steps, writes dS, says so, which is
    after n + 1 steps, and reads dS of step n - 1. Once before step 0, and once more after the last,
    it does the same without writing. This is enough:

    - Both halves of what it reads have been written, and by all of its own warps, which wait too.
    - It writes over dS of step n - 3. The other read that in step n - 2, at whose end its products
      were complete, and has since spoken after n steps.
    - Two barriers each do: nobody speaks after n + 1 steps before the other has waited for n - 1,
      because the other did so in step n - 1 before it spoke after n, which has been waited for.
    """
    return DS_WRITTEN + 2 * CONSUMER + steps % 2


@gluon.jit
def _step(
    full,
    buffers,
    ds_smem,
    dq_own,  # where this consumer's half of the group's first tile of dQ lies
    step,
    steps,  # in all
    before,  # the tile before, of the tiles of the group's heads; -1 if there is none
    turns_own,  # counters of its part of each tile, if ORDERED
    turn,  # of this program at the tile before
    added,  # the tile that it added to last; -1 if there is none
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
    """Adds what one tile of queries contributes to dK and dV, and the one before to dQ.

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
    again = step >> 30
    k_tile = k_smem.index(again)
    own_k = k_tile.slice(CONSUMER * OWN, OWN, dim=0)
    own_v = v_smem.index(again).slice(CONSUMER * OWN, OWN, dim=0)
    q_tile = q_smem.index(slot)
    do_tile = do_smem.index(slot)
    ds_tile = ds_smem.index(step % DS_BUFFERS)
    ds_before = ds_smem.index((step + DS_BUFFERS - 1) % DS_BUFFERS)

    RANGES: gl.constexpr = len(dk)
    HAS_SOFTCAP: gl.constexpr = tanh_scale is not None
    statistics = statistics_smem.index(slot)
    if HAS_SOFTCAP:
        s = tanh(s * tanh_scale)
        slope = (1.0 - s * s).to(DTYPE)  # in half the registers
        s = warpgroup_mma_wait(0, deps=(subtract(0, statistics, s, True, SCORES),))
    else:
        dp = start_dp(own_v, do_tile, statistics, COLUMNS, SCORES)
    if ORDERED:  # late, when what was added has long arrived
        end_turn(turns_own + 2 * added, added >= 0)
    p = exp2(s * scale_log2)
    if MASKED:
        p = apply_mask(p, diagonal, band, n_keys, RAGGED, is_causal, HAS_LEFT)
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
    dq = start_dq(ds_before, k_tile, DQ_WIDTH, CONSUMER)  # in step 0 of whatever is there
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
        wait_for_turn(turns_own + 2 * before, turn, before >= 0)
    reduce_add(dq_own + gl.cast(before, gl.int64) * (QUERIES * D), dq, before >= 0)
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
    buffers,
    ds_smem,
    dq_ptr,
    turns_ptr,
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
    first, _, _, per_head = walk(
        first_key, offset, band, n_tiles, KEYS, QUERIES, is_causal, HAS_LEFT, ORDERED
    )
    steps = per_head * HEADS_PER_KV
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
    n_heads = N_KV_HEADS * HEADS_PER_KV
    group = tiles_before(q_at, n_queries, sequence, n_heads, n_tiles, QUERIES, PACKED)
    group += kv_head * HEADS_PER_KV * n_tiles
    dq_own = dq_ptr + gl.cast(group, gl.int64) * (QUERIES * D) + CONSUMER * 4096
    dq_own += fragment_offsets(DQ_WIDTH, DQ)
    turns_own = turns_ptr
    if ORDERED:
        turns_own += group * 2 + CONSUMER

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
    before = -1
    turn = 0
    added = -1
    for _ in range(HEADS_PER_KV):
        if is_causal or RAGGED:
            for j in range(n_masked):
                s, dk, dv = _step(
                    full, buffers, ds_smem, dq_own, step, steps, before, turns_own, turn, added,
                    diagonal + j * QUERIES, band, n_keys, scale_log2, tanh_scale, s, dk, dv,
                    CONSUMER, COLUMNS, DQ_WIDTH, RAGGED, is_causal, HAS_LEFT, ORDERED, True,
                )  # fmt: skip
                step += 1
                if ORDERED:
                    added = before
                    turn = turn_of(
                        first + j, first_key, all_keys, offset, n_tiles, KEYS, QUERIES, is_causal
                    )
                before = head + wrapped(first + j, n_tiles)
        for j in range(n_masked, n_seen):
            s, dk, dv = _step(
                full, buffers, ds_smem, dq_own, step, steps, before, turns_own, turn, added,
                diagonal, band, n_keys, scale_log2, tanh_scale, s, dk, dv, CONSUMER, COLUMNS,
                DQ_WIDTH, RAGGED, is_causal, HAS_LEFT, ORDERED, False,
            )  # fmt: skip
            step += 1
            if ORDERED:
                added = before
                turn = turn_of(
                    first + j, first_key, all_keys, offset, n_tiles, KEYS, QUERIES, is_causal
                )
            before = head + wrapped(first + j, n_tiles)
        if HAS_LEFT:
            for j in range(n_seen, per_head):
                s, dk, dv = _step(
                    full, buffers, ds_smem, dq_own, step, steps, before, turns_own, turn, added,
                    diagonal + j * QUERIES, band, n_keys, scale_log2, tanh_scale, s, dk, dv,
                    CONSUMER, COLUMNS, DQ_WIDTH, RAGGED, is_causal, HAS_LEFT, ORDERED, True,
                )  # fmt: skip
                step += 1
                if ORDERED:
                    added = before
                    turn = turn_of(
                        first + j, first_key, all_keys, offset, n_tiles, KEYS, QUERIES, is_causal
                    )
                before = head + first + j
        head += n_tiles

    named_barrier_sync_at(ds_written(1 - CONSUMER, steps), CONSUMERS)
    dq = start_dq(ds_smem.index((steps - 1) % DS_BUFFERS), k_smem.index(0), DQ_WIDTH, CONSUMER)
    store_columns(own_v, dv)  # whose memory nobody else reads
    fence_async_shared()
    store_tile(dv_desc, k_at, kv_head, own_key, own_v, PACKED)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    if ORDERED:
        end_turn(turns_own + 2 * added, added >= 0)
        wait_for_turn(turns_own + 2 * before, turn, before >= 0)
    reduce_add(dq_own + gl.cast(before, gl.int64) * (QUERIES * D), dq, before >= 0)
    if ORDERED:
        end_turn(turns_own + 2 * before, before >= 0)
    named_barrier_arrive_at(ds_written(CONSUMER, steps + 1), CONSUMERS)
    named_barrier_sync_at(ds_written(1 - CONSUMER, steps + 1), CONSUMERS)
    store_columns(own_k, scaled(dk, scale))  # of which the other was reading until then
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
    turns_ptr,  # (B · H · tiles, 2) int32, zeros, if ORDERED, else None
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
):
    """dK and dV, and dQ / scale added to ``dq_ptr``. Grid: key tiles · B · G.

    ``offset``: key index minus query index of the last key that a query sees, if ``is_causal``.
    ``COLUMNS``: of tiles, those in use. ``band``: how many keys before that one a query sees, if
    ``HAS_LEFT``. ``RAGGED``: the last tile has keys past the end. ``PACKED``, ``BOTTOM_RIGHT``: as
    of the forward kernel; there are at most as many tiles as programs.
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
    buffers = (k_smem, v_smem, q_smem, do_smem, statistics_smem)

    sizes = (N_QUERIES, N_KEYS, N_KV_HEADS, HEADS_PER_KV, offset)
    present = True
    if PACKED:
        present = gl.program_id(0) < gl.load(tiles_ptr) * N_KV_HEADS

    # Written in place, because a tuple bound to a variable loses its compile-time members.
    if present:
        gl.warp_specialize([
            (_producer, (
                loads, full, buffers, sizes, tiles_ptr, band, QUERIES, is_causal, HAS_LEFT, PACKED,
                BOTTOM_RIGHT, ORDERED,
            )),
            (_consumer, (
                dk_desc, dv_desc, full, buffers, ds_smem, dq_ptr, turns_ptr, scale, scale_log2,
                tanh_scale, sizes, tiles_ptr, band, 0, COLUMNS, RAGGED, is_causal, HAS_LEFT, PACKED,
                BOTTOM_RIGHT, ORDERED,
            )),
            (_consumer, (
                dk_desc, dv_desc, full, buffers, ds_smem, dq_ptr, turns_ptr, scale, scale_log2,
                tanh_scale, sizes, tiles_ptr, band, 1, COLUMNS, RAGGED, is_causal, HAS_LEFT, PACKED,
                BOTTOM_RIGHT, ORDERED,
            )),
        ], [4, 4], [240, 240])  # fmt: skip
