# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""The backward pass on sm_90, fused: FlashAttention-2, Algorithm 2, with its products overlapped.

A program takes a tile of 128 keys, computes its dK and dV, adds its part of dQ to an fp32 sum in
memory, and takes the next tile. One warp group, the producer, fetches tiles of K and V, and for
each those of Q and dO; two consumers own 64 keys each. Everything is computed transposed, keys by
queries, so that P and dS are operands of the next products as they lie in registers:

    Sᵀ  = K Qᵀ - L / scale          Pᵀ = exp2(Sᵀ · scale · log2(e))
    dPᵀ = V dOᵀ - delta             dSᵀ = Pᵀ ∘ dPᵀ,  delta = rowsum(O ∘ dO) - dL
    dV += Pᵀ dO,   dK += dSᵀ Q      from registers
    dQ  = dS K                      dS through shared memory, where both consumers' halves meet

dQ is one step late: when a consumer has written its half of dS of this tile, it issues the product
with dS of the previous tile. So no consumer waits for dS that the other consumer has just computed,
and the exponentials of one consumer run while the tensor cores work for the other.
``preprocess.py`` holds the small kernels that run before and after this one.

While consumers store a tile's gradients, the next one's inputs come, but for V already in its last
step: K has two buffers, dK leaves through K's, and dV through buffers of dS that nobody reads any
more. A counter in memory says which tile is next.

The tensor cores subtract L and delta: three bf16 numbers that add up to each travel with Q, 32
bytes per query, and are multiplied by ones. If every thread loaded them for its columns of scores,
that would be a fifth (D = 64) or a tenth (128) of the traffic of shared memory, which is the limit.

With a soft-cap c the tanh T of S · scale / c takes the place of S. L / c is subtracted from T, and
dS has a factor 1 - T².

The order in which programs add to dQ is not fixed unless ``ordered``; ``turns.py`` says how. Under
a causal mask the wait for others is short: each program begins at its diagonal, and its
predecessors begin at later tiles. Predecessors come first in the order of the counter, from which
programs then take their first tile too, so that none waits for one that has not begun.

Without a mask all programs of a head would begin at its first tile of queries, and each would wait
for all before it. They form rings instead: of a ring, each program begins two tiles of queries
after the one before, goes on after the last tile with the first one, and the order in a tile is
that of the steps in which programs come to it. A program waits only for earlier steps of others,
which surely run at the same time, so that none waits for itself; and for all of the head's earlier
rings. Before it takes its next tile of keys, all of its ring have been taken.

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
    allocate_buffers,
    ds_written,
    fragment_offsets,
    has_part,
    keys_to_read,
    load_output_gradient,
    load_queries,
    number_of_tiles,
    say_ds_is_written,
    soft_cap,
    start_dp,
    start_dq,
    start_scores,
    steps_of_head,
    steps_that_store,
    work_of_tile,
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
from flashattn_triton.hopper.schedule import (
    both_ways,
    first_element,
    key_tile_at,
    load_tile,
    next_query_tile,
    place_of_keys,
    place_of_tile,
    store_tile,
)
from flashattn_triton.hopper.scores import probabilities
from flashattn_triton.hopper.support import (
    allocate_tiles,
    as_tiles,
    named_barrier_arrive_at,
    named_barrier_arrive_at_one,
    named_barrier_sync_at,
    new_barriers,
    reduce_add,
    slot_and_phase,
    store_or_add,
    wait_until_reached,
)
from flashattn_triton.hopper.turns import (
    end_last_turn,
    end_of_ring,
    first_turn,
    take_turns,
    wait_for_turn,
)

KEYS = gl.constexpr(128)  # of one tile
K_BUFFERS = gl.constexpr(2)  # tiles of K in shared memory


# ---- producer ------------------------------------------------------------------------------------
#
# The producer finds out which tile of keys is next, and tells consumers by a record in shared
# memory, which is complete when the tile's K is. Consumers divide no numbers and read no table
# between two tiles.

LANES = gl.constexpr(32)  # a number for each, because shared memory holds tensors
FIELDS = gl.constexpr(8)  # of a record, see schedule.key_tile_at; there are LANES / FIELDS copies
NO_TILE = gl.constexpr(-1)  # in place of the first key, after the last tile


@gluon.jit
def _tell(record, tile):
    """Each thread writes all numbers, so that whoever arrives next has written them."""
    field = gl.arange(0, LANES, gl.BlockedLayout([LANES], [32], [4], [0])) % FIELDS
    values = gl.where(field == 0, tile[0], NO_TILE)
    for i in gl.static_range(1, FIELDS):
        values = gl.where(field == i, tile[i], values)
    record.store(values)  # read after an mbarrier


@gluon.jit
def _field(record, INDEX: gl.constexpr):
    """One field: the maximum over a warp's lanes, as then the compiler knows it to be uniform."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, LANES, LAYOUT)
    return gl.max(gl.where(lane % FIELDS == INDEX, record.load(LAYOUT), NO_TILE), 0)


@gluon.jit
def _told(record, work, OPTIONS: gl.constexpr):
    """The tile that the producer told, as ``schedule.key_tile_at`` returned it."""
    n_queries, n_keys = work[0][0], work[0][1]
    end_q, end_k = 0, 0
    order = 0
    if OPTIONS.ring > 0 or both_ways(OPTIONS):
        order = _field(record, 3)
    if OPTIONS.packed:
        n_queries, n_keys = _field(record, 4), _field(record, 5)
        end_q, end_k = _field(record, 6), _field(record, 7)
    first_key, kv_head, sequence = _field(record, 0), _field(record, 1), _field(record, 2)
    return first_key, kv_head, sequence, order, n_queries, n_keys, end_q, end_k


@gluon.jit
def _has_tile(barriers, records, turn):
    """Waits for K of the next tile; whether there is one."""
    buffer, phase = slot_and_phase(turn, K_BUFFERS)
    mbarrier.wait(barriers[0].index(buffer), phase)
    return _field(records.index(buffer), 0) != NO_TILE


@gluon.jit
def _load_keys(loads, barriers, buffers, records, keys, turn, tile, PACKED: gl.constexpr):
    """Loads K of a tile, as soon as its buffer is free."""
    k_full, _, k_empty, _, _, _ = barriers
    k_smem = buffers[0]
    first_key, kv_head, _, _, _, _ = tile
    buffer, phase = slot_and_phase(turn, K_BUFFERS)
    full = k_full.index(buffer)
    mbarrier.wait(k_empty.index(buffer), phase ^ 1)
    _tell(records.index(buffer), keys)
    mbarrier.expect(full, k_smem.shape[1] * k_smem.shape[2] * 2)
    k_at = keys_to_read(tile, PACKED)
    load_tile(loads[1], k_at, kv_head, first_key, full, k_smem.index(buffer), PACKED)


@gluon.jit
def _load_values(loads, barriers, buffers, tile, turn, PACKED: gl.constexpr):
    """Loads V of a tile, as soon as consumers have read that of the tile before."""
    _, v_full, _, v_empty, _, _ = barriers
    v_smem = buffers[1]
    first_key, kv_head, _, _, _, _ = tile
    full = v_full.index(0)
    mbarrier.wait(v_empty.index(0), (turn & 1) ^ 1)
    mbarrier.expect(full, v_smem.shape[1] * v_smem.shape[2] * 2)
    k_at = keys_to_read(tile, PACKED)
    load_tile(loads[2], k_at, kv_head, first_key, full, v_smem.index(0), PACKED)


@gluon.jit
def _load_step(loads, full, buffers, step, waits, q_at, head, tile, row, PACKED: gl.constexpr):
    """Loads a step's dO and Q, if it ``waits`` as soon as consumers give back their slots."""
    slot, _phase = slot_and_phase(step, STAGES)
    if waits:
        named_barrier_sync_at(DO_EMPTY + slot, EVERYBODY)
    load_output_gradient(loads, full, buffers, slot, q_at, head, tile, row, PACKED)
    if waits:
        named_barrier_sync_at(Q_EMPTY + slot, EVERYBODY)
    load_queries(loads, full, buffers, slot, q_at, head, tile, PACKED)


@gluon.jit
def _first_step(program, HEADS_PER_KV, QUERIES: gl.constexpr):
    """What a program's first step reads: (``q_at``, head, tile of queries, its first row)."""
    own, walked, tiles = program
    head, tile = own[1] * HEADS_PER_KV, walked[0]
    return own[4], head, tile, place_of_tile(head, tile, tiles) * QUERIES


@gluon.jit
def _producer(
    loads, barriers, buffers, records, counters_ptr, N_TILES, work, OPTIONS: gl.constexpr
):  # fmt: skip
    """Fetches tiles of keys one after another; for each K and V, and each step's Q and dO.

    With a tile's last step come K of the next one, and Q and dO of its first step.
    """
    k_full, _, k_empty, _, q_full, do_full = barriers
    full = (q_full, do_full)
    PACKED: gl.constexpr = OPTIONS.packed
    QUERIES: gl.constexpr = buffers[2].shape[1]
    HEADS_PER_KV = work[0][3]
    order_counters_ptr = counters_ptr + 1
    stop_index = number_of_tiles(N_TILES, work, OPTIONS)
    index = gl.program_id(0)
    n_begun = gl.num_programs(0)
    # Whoever waits for a predecessor knows that a running program has it, if all take tiles in the
    # order of the counter, the first one too.
    if OPTIONS.ordered:
        index = gl.atomic_add(counters_ptr, 1)
        n_begun = 0
    turn = 0
    step = 0  # a tile's first one, of all tiles' steps
    if index < stop_index:
        keys = key_tile_at(index, stop_index, work, KEYS, OPTIONS)
        program = work_of_tile(keys, work, KEYS, QUERIES, OPTIONS)
        q_at, head, tile, row = _first_step(program, HEADS_PER_KV, QUERIES)
        _load_step(loads, full, buffers, 0, False, q_at, head, tile, row, PACKED)
        _load_keys(loads, barriers, buffers, records, keys, turn, program[0], PACKED)
        _load_values(loads, barriers, buffers, program[0], turn, PACKED)
    while index < stop_index:
        keys = key_tile_at(index, stop_index, work, KEYS, OPTIONS)
        program = work_of_tile(keys, work, KEYS, QUERIES, OPTIONS)
        _own, walked, tiles = program
        q_at, head, tile, row = _first_step(program, HEADS_PER_KV, QUERIES)
        if OPTIONS.ordered:
            adding = first_turn(program, HEADS_PER_KV, KEYS, QUERIES, OPTIONS)
        if OPTIONS.ring > 0:
            ring_end = end_of_ring(index, program, KEYS)
        next_index = stop_index
        steps = walked[3] * HEADS_PER_KV
        for of_tile in range(steps):
            if of_tile > 0:
                tile, head = next_query_tile(tile, head, walked)
                row = place_of_tile(head, tile, tiles) * QUERIES
                waits = of_tile >= STAGES
                _load_step(
                    loads, full, buffers, step + of_tile, waits, q_at, head, tile, row, PACKED
                )  # fmt: skip
                if OPTIONS.ordered:  # before the load, for which all warps meet, it costs 3 to 12 %
                    adding = take_turns(
                        of_tile, adding, program, order_counters_ptr, KEYS, QUERIES, OPTIONS
                    )  # fmt: skip
            # Late, so that who ends first begins the next tile. A step later costs up to 22 % where
            # programs add in order.
            if of_tile == max(steps - 2, 0):
                if OPTIONS.ring > 0:
                    wait_until_reached(counters_ptr, ring_end)
                next_index = n_begun + gl.atomic_add(counters_ptr, 1)
        # The last step waits for Q and dO also if there is no next tile.
        is_next = next_index < stop_index
        at = min(next_index, stop_index - 1)
        next_keys = key_tile_at(at, stop_index, work, KEYS, OPTIONS)
        next_program = work_of_tile(next_keys, work, KEYS, QUERIES, OPTIONS)
        next_own = next_program[0]
        q_at, head, tile, row = _first_step(next_program, HEADS_PER_KV, QUERIES)
        waits = steps >= STAGES
        _load_step(loads, full, buffers, step + steps, waits, q_at, head, tile, row, PACKED)
        if is_next:
            _load_keys(loads, barriers, buffers, records, next_keys, turn + 1, next_own, PACKED)
        if OPTIONS.ordered:
            adding = take_turns(steps, adding, program, order_counters_ptr, KEYS, QUERIES, OPTIONS)
        # Before anything else that waits for the last step of this tile: up to 3 %.
        if is_next:
            _load_values(loads, barriers, buffers, next_own, turn + 1, PACKED)
        slot, _phase = slot_and_phase(step + steps + 1, STAGES)
        named_barrier_sync_at(DO_EMPTY + slot, EVERYBODY)
        named_barrier_sync_at(Q_EMPTY + slot, EVERYBODY)
        if OPTIONS.ordered:
            adding = take_turns(
                steps + 1, adding, program, order_counters_ptr, KEYS, QUERIES, OPTIONS
            )  # fmt: skip
            named_barrier_sync_at(Q_EMPTY + slot_and_phase(step + steps, STAGES)[0], EVERYBODY)
            end_last_turn(adding, order_counters_ptr)
        step += steps
        turn += 1
        index = next_index
    buffer, phase = slot_and_phase(turn, K_BUFFERS)
    mbarrier.wait(k_empty.index(buffer), phase ^ 1)
    _tell(records.index(buffer), (NO_TILE, 0, 0, 0, 0, 0, 0, 0))
    mbarrier.arrive(k_full.index(buffer), count=1)


# ---- consumer ------------------------------------------------------------------------------------


@gluon.jit
def _add_dq(
    dq_own, dq, previous,
    QUERIES: gl.constexpr, D: gl.constexpr, CONSUMER: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """Adds this consumer's part of the previous step's tile of dQ to the sum in memory."""
    tile, stores = previous
    sums = dq_own + gl.cast(tile, gl.int64) * (QUERIES * D)
    if OPTIONS.ordered:
        if tile >= 0:
            wait_for_turn(CONSUMER)
            store_or_add(sums, dq, not stores, stores)
    elif OPTIONS.stores:
        store_or_add(sums, dq, (tile >= 0) & (not stores), (tile >= 0) & stores)
    else:
        reduce_add(sums, dq, tile >= 0)


@gluon.jit
def _step(
    barriers,
    buffers,
    ds_smem,
    dq_own,  # pointers to this consumer's half of the first tile of dQ of the group of heads
    k_buffer,
    step,  # of all tiles
    previous,  # the previous step's tile, from the group's first one on, -1 in step 0; if it stores
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
    _, _, _, _, q_full, do_full = barriers
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
    slot, _ = slot_and_phase(step, STAGES)
    next_slot, next_phase = slot_and_phase(step + 1, STAGES)
    # Always 0, which the compiler cannot know: it would otherwise keep all addresses within K and V
    # in registers, of which there are too few.
    opaque_zero = step >> 30
    k_tile = k_smem.index(k_buffer + opaque_zero)
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
    say_ds_is_written(CONSUMER, step + 1)
    # In step 0 there is no previous tile: the buffer is uninitialised, the result is not added.
    dq = start_dq(ds_before, k_tile, DQ_WIDTH, CONSUMER)
    if not DK_FIRST:
        dk = issue_columns(gl.convert_layout(ds, OPERAND), q_tile, dk)
    dv = wait_for_columns(dv, RANGES + 1)
    named_barrier_arrive_at_one(DO_EMPTY, slot, EVERYBODY)

    mbarrier.wait(q_full.index(next_slot), next_phase)
    next_statistics = statistics_smem.index(next_slot)
    s = start_scores(own_k, q_smem.index(next_slot), next_statistics, COLUMNS, HAS_SOFTCAP, SCORES)
    AFTER_DQ: gl.constexpr = 1 if DK_FIRST else 2
    dq = warpgroup_mma_wait(RANGES + AFTER_DQ - (1 if HAS_SOFTCAP else 0), deps=(dq,))
    _add_dq(dq_own, dq, previous, QUERIES, D, CONSUMER, OPTIONS)
    mbarrier.wait(do_full.index(next_slot), next_phase)
    # ptxas runs every product by itself unless each iteration ends with nothing in flight.
    s, dk = wait_for_all(s, dk)
    named_barrier_arrive_at_one(Q_EMPTY, slot, EVERYBODY)
    return s, dk, dv


@gluon.jit
def _consumer(
    stores,
    barriers,
    buffers,
    records,
    ds_smem,
    dq_ptr,
    scales,
    work,
    CONSUMER: gl.constexpr,
    OPTIONS: gl.constexpr,
):
    """dK and dV of 64 keys of each tile, and half of each tile of dQ."""
    dk_out, dv_out, dk_strides, dv_strides, widths_div8 = stores
    _, v_full, k_empty, v_empty, q_full, do_full = barriers
    k_smem, q_smem, statistics_smem = buffers[0], buffers[2], buffers[4]
    scale, tanh_scale = scales[0], scales[2]
    QUERIES: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    COLUMNS: gl.constexpr = OPTIONS.columns
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    HAS_SOFTCAP: gl.constexpr = tanh_scale is not None
    # Consumers share the columns of dQ if there are 128, else its rows.
    DQ_WIDTH: gl.constexpr = COLUMNS - FIRST if D == 128 and CONSUMER == 1 else 64
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_WIDTH, 16])
    HEADS_PER_KV = work[0][3]
    step = 0
    turn = 0
    while _has_tile(barriers, records, turn):
        k_buffer = turn & 1
        keys = _told(records.index(k_buffer), work, OPTIONS)
        own, walked, tiles = work_of_tile(keys, work, KEYS, QUERIES, OPTIONS)
        first_key, kv_head, n_keys, offset = own[0], own[1], own[2], own[3]
        storing = 0
        if OPTIONS.stores:
            storing = steps_that_store(own, walked, tiles, KEYS, QUERIES, OPTIONS)
        first = walked[0]
        ahead = walked[4]
        n_tiles, first_tile = tiles[0], tiles[1]
        own_key = first_key + CONSUMER * OWN
        limits = (work[2], n_keys - own_key)
        diagonal = first * QUERIES + offset - own_key
        bounds = steps_of_head(diagonal, limits, walked, OWN, QUERIES, OPTIONS)
        group = first_tile + kv_head * HEADS_PER_KV * n_tiles
        dq_own = dq_ptr + gl.cast(group, gl.int64) * (QUERIES * D) + CONSUMER * 4096
        dq_own += fragment_offsets(DQ_WIDTH, DQ)

        own_k = k_smem.index(k_buffer).slice(CONSUMER * OWN, OWN, dim=0)
        slot, phase = slot_and_phase(step, STAGES)
        mbarrier.wait(q_full.index(slot), phase)
        q_tile, statistics = q_smem.index(slot), statistics_smem.index(slot)
        s = start_scores(own_k, q_tile, statistics, COLUMNS, HAS_SOFTCAP, SCORES)
        mbarrier.wait(v_full.index(0), turn & 1)
        mbarrier.wait(do_full.index(slot), phase)
        s = warpgroup_mma_wait(0, deps=(s,))
        dk = zero_columns(OWN, D, COLUMNS)
        dv = zero_columns(OWN, D, COLUMNS)
        # dK and dV of the tile before have left their buffers.
        tma.store_wait(0)
        mbarrier.arrive(k_empty.index((turn + 1) & 1), count=1, pred=turn > 0)
        named_barrier_arrive_at(ds_written(CONSUMER, step), CONSUMERS)
        previous_tile = -1
        for head in range(HEADS_PER_KV):
            for part in gl.static_range(3):
                if has_part(part, OPTIONS):
                    for j in range(bounds[part], bounds[part + 1]):
                        s, dk, dv = _step(
                            barriers, buffers, ds_smem, dq_own, k_buffer, step,
                            (previous_tile, gl.where(j > 0, j, walked[3]) <= storing),
                            diagonal + j * ahead * QUERIES, limits, scales, s, dk, dv, CONSUMER,
                            DQ_WIDTH, OPTIONS, part != 1,
                        )  # fmt: skip
                        step += 1
                        tile = first + j * ahead
                        if part < 2:  # behind a left edge no walk begins in the middle
                            tile = wrapped(tile, n_tiles)
                        previous_tile = head * n_tiles + tile

        mbarrier.arrive(v_empty.index(0), count=1)
        # Once more, from what the compiler takes for another record, as uniform registers are few:
        # kept over the steps, these numbers would push others into vector registers.
        keys = _told(records.index((turn + (step >> 30)) & 1), work, OPTIONS)
        own_key, kv_head, n_keys = keys[0] + CONSUMER * OWN, keys[1], keys[5]
        k_at = place_of_keys(keys, OPTIONS.packed)
        named_barrier_sync_at(ds_written(1 - CONSUMER, step), CONSUMERS)
        ds_before = ds_smem.index((step + DS_BUFFERS - 1) % DS_BUFFERS)
        dq = start_dq(ds_before, k_smem.index(k_buffer), DQ_WIDTH, CONSUMER)
        named_barrier_arrive_at(ds_written(CONSUMER, step + 1), CONSUMERS)
        named_barrier_sync_at(ds_written(1 - CONSUMER, step + 1), CONSUMERS)
        if OPTIONS.adds:
            at = first_element(dv_strides, k_at, kv_head, n_keys, own_key, OPTIONS.packed)
            write_columns(dv_out + at, n_keys - own_key, dv_strides[2], widths_div8, dv, True)
        else:
            # Of the buffers of dS one is read now, and each consumer has one of the others.
            staged = as_tiles(ds_smem.index((step + CONSUMER) % DS_BUFFERS), OWN, D).index(0)
            store_columns(staged, dv)
            fence_async_shared()
            store_tile(dv_out, k_at, kv_head, own_key, staged, OPTIONS.packed)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        previous = (previous_tile, walked[3] <= storing)
        _add_dq(dq_own, dq, previous, QUERIES, D, CONSUMER, OPTIONS)
        if OPTIONS.ordered:
            named_barrier_arrive_at(Q_EMPTY + slot_and_phase(step, STAGES)[0], EVERYBODY)
        named_barrier_arrive_at(ds_written(CONSUMER, step + 2), CONSUMERS)
        named_barrier_sync_at(ds_written(1 - CONSUMER, step + 2), CONSUMERS)
        if OPTIONS.adds:
            at = first_element(dk_strides, k_at, kv_head, n_keys, own_key, OPTIONS.packed)
            dk = scaled(dk, scale)
            write_columns(dk_out + at, n_keys - own_key, dk_strides[2], widths_div8, dk, True)
        else:
            # dK replaces this half of K, which the other consumer's dQ read until it arrived above.
            store_columns(own_k, scaled(dk, scale))
            fence_async_shared()
            store_tile(dk_out, k_at, kv_head, own_key, own_k, OPTIONS.packed)
        # Once more, so that the next tile's first step has the barrier that its number says.
        named_barrier_arrive_at(ds_written(CONSUMER, step + 3), CONSUMERS)
        named_barrier_sync_at(ds_written(1 - CONSUMER, step + 3), CONSUMERS)
        turn += 1
    tma.store_wait(0)


# ---- kernel --------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=[
        *UNSPECIALIZED,
        *("stride_dkb", "stride_dkh", "stride_dkk", "stride_dvb", "stride_dvh", "stride_dvk"),
        *("D_DIV8", "N_TILES"),
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
    counters_ptr,  # int32, zeros: tiles taken; if ``ordered``, (B · H · tiles,) of tiles of dQ
    N_QUERIES,
    N_KEYS,
    N_TILES,  # of keys, of all heads; if ``packed``, at most
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
    """dK and dV, and dQ / scale added to ``dq_ptr``. Grid: any; in rings, as many as run at once.

    ``offset``: key index minus query index of the last key that a query sees, if ``is_causal``.
    ``band``: how many keys before that one a query sees, if ``has_left``.
    """
    loads = (q_desc, k_desc, v_desc, do_desc, statistics_desc)
    buffers = allocate_buffers(loads, 1, K_BUFFERS)
    ds_smem = allocate_tiles(q_desc.dtype, DS_BUFFERS, KEYS, q_desc.block_shape[-2])
    RECORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    records = gl.allocate_shared_memory(gl.int32, [K_BUFFERS, LANES], RECORDS)
    k_full = new_barriers(K_BUFFERS, 1)
    v_full = new_barriers(1, 1)
    k_empty = new_barriers(K_BUFFERS, 2)
    v_empty = new_barriers(1, 2)
    q_full = new_barriers(STAGES, 1)
    do_full = new_barriers(STAGES, 1)
    barriers = (k_full, v_full, k_empty, v_empty, q_full, do_full)
    dk_strides = (stride_dkb, stride_dkh, stride_dkk)
    dv_strides = (stride_dvb, stride_dvh, stride_dvk)
    stores = (dk_out, dv_out, dk_strides, dv_strides, D_DIV8)
    scales = (scale, scale_log2, tanh_scale)
    work = ((N_QUERIES, N_KEYS, N_KV_HEADS, HEADS_PER_KV, offset), key_tiles_ptr, band)

    # Written in place, because a tuple bound to a variable loses its compile-time members.
    gl.warp_specialize([
        (_producer, (loads, barriers, buffers, records, counters_ptr, N_TILES, work, OPTIONS)),
        (_consumer, (
            stores, barriers, buffers, records, ds_smem, dq_ptr, scales, work, 0, OPTIONS,
        )),
        (_consumer, (
            stores, barriers, buffers, records, ds_smem, dq_ptr, scales, work, 1, OPTIONS,
        )),
    ], [4, 4], [240, 240])  # fmt: skip
