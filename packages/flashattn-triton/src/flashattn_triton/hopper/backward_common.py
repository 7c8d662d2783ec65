# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""Functions that the backward kernels on sm_90 share; each kernel's step is its own.

A program owns a tile of keys of one key head, and walks over the tiles of queries of the query
heads that share it. Functions pass on what belongs together as tuples:

    loads       descriptors of Q, K, V, dO and the statistics
    buffers     shared memory of K, V, Q, dO and the statistics, tiles first
    barriers    the TMA has loaded K and V; a tile of Q; a tile of dO (``backward_kernel`` has more)
    work        (sizes of the problem, table of a packed batch, band), see :func:`work_of_program`

Legend as in ``backward_kernel``.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashattn_triton.hopper.products import issue_over_columns, zero_accumulator
from flashattn_triton.hopper.schedule import (
    END,
    STRIDE,
    both_ways,
    key_tile_at,
    load_tile,
    next_query_tile,
    place_of_keys,
    place_of_tile,
    walk,
)
from flashattn_triton.hopper.scores import tanh
from flashattn_triton.hopper.support import (
    allocate_tiles,
    named_barrier_arrive_at_one,
    named_barrier_sync_at,
    new_barriers,
    slot_and_phase,
    tma_load,
)
from flashattn_triton.hopper.turns import end_last_turn, first_turn, take_turns

OWN = gl.constexpr(64)  # keys of one consumer: the rows that one warp group's wgmma computes
STATISTICS = gl.constexpr(16)  # columns of a query: a half adds up to -L / scale, one to -delta
STAGES = gl.constexpr(2)  # tiles of Q and of dO that are in shared memory at a time
DS_BUFFERS = gl.constexpr(3)  # tiles of dS: written, read, and still read by the slower consumer

# Hardware barriers, the first of several each, where consumers own keys. Consumers arrive at
# DO_EMPTY + slot or at Q_EMPTY + slot when they have read that slot, and the producer waits there
# before it loads the next tile into it. At the four barriers from DS_WRITTEN on, each consumer
# tells the other that it has written its half of dS (see ds_written). Arrivals at barriers in
# shared memory would need a barrier among a consumer's own warps first; arrivals at these do not.
DO_EMPTY = gl.constexpr(0)
Q_EMPTY = gl.constexpr(2)
DS_WRITTEN = gl.constexpr(4)
CONSUMERS = gl.constexpr(256)  # threads
EVERYBODY = gl.constexpr(384)

# Parameters whose values compile nothing anew.
UNSPECIALIZED = (
    *("N_QUERIES", "N_KEYS", "N_KV_HEADS", "HEADS_PER_KV", "offset", "band"),
    *("scale", "scale_log2", "tanh_scale"),
)


@dataclass(frozen=True, kw_only=True)
class BackwardOptions:
    """Compile-time options of the backward kernels.

    columns: of tiles that are not cut into parts, those in use.
    padding: the rows of a head's statistics are padded to a multiple of this number.
    ragged: the last tile has keys past the end.
    is_causal: no query sees a key after its diagonal.
    has_left: no query sees a key more than ``band`` before its diagonal.
    packed: sequences are packed; ``bottom_right`` adds the difference of a sequence's lengths.
    ordered: programs add to a tile of dQ in a fixed order.
    stores: programs store tiles as :func:`steps_that_store` says, so that no zeros need be there.
    adds: dK and dV are added to fp32 sums in memory, each row of which one program changes.
    ring: the most programs of a ring, of which the GPU runs ``schedule.RINGS`` at the same time; 0
        unless ``ordered`` and without a mask.
    at_once: heads are taken together, as many as have at most so many tiles of keys, or one; 0 if
        they are taken one by one. See ``schedule._tile_of_heads_together``.
    """

    columns: int
    padding: int
    ragged: bool
    is_causal: bool
    has_left: bool
    packed: bool
    bottom_right: bool
    ordered: bool
    stores: bool
    adds: bool
    ring: int
    at_once: int


# ---- entry ---------------------------------------------------------------------------------------


@gluon.jit
def allocate_buffers(loads, PARTS: gl.constexpr = 1, K_BUFFERS: gl.constexpr = 1):
    """Shared memory of what descriptors load; Q and K in so many parts, and K so often."""
    q_desc, k_desc, v_desc, do_desc, statistics_desc = loads
    DTYPE: gl.constexpr = q_desc.dtype
    KEYS: gl.constexpr = k_desc.block_shape[-2]
    QUERIES: gl.constexpr = q_desc.block_shape[-2]
    k_smem = allocate_tiles(DTYPE, K_BUFFERS * PARTS, KEYS, k_desc.block_shape[-1])
    v_smem = allocate_tiles(DTYPE, 1, KEYS, v_desc.block_shape[-1])
    q_smem = allocate_tiles(DTYPE, STAGES * PARTS, QUERIES, q_desc.block_shape[-1])
    do_smem = allocate_tiles(DTYPE, STAGES, QUERIES, do_desc.block_shape[-1])
    statistics_smem = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, QUERIES, STATISTICS], statistics_desc.layout
    )
    return k_smem, v_smem, q_smem, do_smem, statistics_smem


@gluon.jit
def allocate_barriers():
    """Barriers in shared memory."""
    return new_barriers(1, 1), new_barriers(STAGES, 1), new_barriers(STAGES, 1)


@gluon.jit
def number_of_tiles(n_tiles, work, OPTIONS: gl.constexpr):
    """Of keys, of all heads: ``n_tiles``, but of a packed batch there may be fewer."""
    sizes, tiles_ptr, _ = work
    if OPTIONS.packed:
        n_tiles = gl.load(tiles_ptr) * sizes[2]
    return n_tiles


@gluon.jit
def has_work(work, OPTIONS: gl.constexpr):
    """Whether there is a tile of keys for this program."""
    return gl.program_id(0) < number_of_tiles(gl.num_programs(0), work, OPTIONS)


# ---- walk ----------------------------------------------------------------------------------------


@gluon.jit
def work_of_program(work, KEYS: gl.constexpr, QUERIES: gl.constexpr, OPTIONS: gl.constexpr):
    """:func:`work_of_tile` of the one tile of a program."""
    tile = key_tile_at(gl.program_id(0), gl.num_programs(0), work, KEYS, OPTIONS)
    return work_of_tile(tile, work, KEYS, QUERIES, OPTIONS)


@gluon.jit
def work_of_tile(
    tile, work, KEYS: gl.constexpr, QUERIES: gl.constexpr, OPTIONS: gl.constexpr
):  # fmt: skip
    """What a program does with a tile of keys, which ``schedule.key_tile_at`` returned.

    ``work``: (sizes, table of a packed batch, band); sizes are N_QUERIES, N_KEYS, N_KV_HEADS,
    HEADS_PER_KV and offset.

    Returns:
        (first key, key head, keys, offset, q_at, k_at) of the sequence; the :func:`walk` over one
        head; and where its tiles are: (tiles of a head, tiles before the sequence's, ``order``).
    """
    sizes, _, band = work
    _, _, N_KV_HEADS, HEADS_PER_KV, offset = sizes
    first_key, kv_head, sequence, order, n_queries, n_keys, end_q, _ = tile
    q_at = (sequence, 0)
    if OPTIONS.packed:
        q_at = (end_q, END - n_queries)
        if OPTIONS.bottom_right:
            offset += n_keys - n_queries
    PADDING: gl.constexpr = OPTIONS.padding // QUERIES  # in tiles
    n_tiles = gl.cdiv(n_queries, OPTIONS.padding) * PADDING
    if OPTIONS.packed:
        n_tiles = max(n_tiles, PADDING)  # an empty sequence has these, without rows
    walked = walk(first_key, offset, band, n_tiles, KEYS, QUERIES, OPTIONS, order)
    # Each packed sequence begins at a multiple of so many rows of the statistics and of the sum of
    # dQ, so that no tile belongs to two. With n tokens and s sequences before it, it begins at
    # row (n // padding + s) · padding · heads.
    n_heads = N_KV_HEADS * HEADS_PER_KV
    if OPTIONS.packed:
        first_tile = ((q_at[0] - n_queries) // OPTIONS.padding + sequence) * n_heads * PADDING
    else:
        first_tile = sequence * n_heads * n_tiles
    own = (first_key, kv_head, n_keys, offset, q_at, place_of_keys(tile, OPTIONS.packed))
    return own, walked, (n_tiles, first_tile, order)


@gluon.jit
def wrapped(tile, n_tiles):
    """``tile``, counted on from tile 0 after the last one, where a walk begins in the middle."""
    return gl.where(tile < n_tiles, tile, tile - n_tiles)


@gluon.jit
def steps_of_head(
    diagonal, limits, walked, KEYS: gl.constexpr, QUERIES: gl.constexpr, OPTIONS: gl.constexpr
):
    """Where the three parts of a head's steps begin, and where the last one ends.

    In the second part every query sees each of a consumer's KEYS keys: only the others are masked.
    A walk that goes backwards has the first part alone. ``limits``: (band, keys from the consumer's
    first one on).
    """
    per_head, ahead = walked[3], walked[4]
    band, n_keys = limits
    n_masked = 0  # under a causal mask, all queries of a tile see all keys if the first one does
    if OPTIONS.is_causal:
        n_masked = min(max(gl.cdiv(KEYS - 1 - diagonal, QUERIES), 0), per_head)
    n_seen = per_head  # from this step on, a window's left edge hides keys from some queries
    if OPTIONS.has_left:  # all queries of a tile see all keys here if its last query does
        n_seen = min(max((band - diagonal + 1) // QUERIES, n_masked), per_head)
    if OPTIONS.ragged:
        n_masked = gl.where(n_keys < KEYS, per_head, n_masked)
        n_seen = max(n_seen, n_masked)
    if both_ways(OPTIONS):
        n_masked = gl.where(ahead < 0, per_head, n_masked)
    return 0, n_masked, n_seen, per_head


@gluon.jit
def steps_that_store(
    own, walked, tiles, KEYS: gl.constexpr, QUERIES: gl.constexpr, OPTIONS: gl.constexpr
):
    """In so many of each head's first steps, this program comes first to the tile of dQ.

    Unless ``ordered``, those in which it comes alone: the tile sees the first tile of keys only.
    """
    first_key, _, n_keys, offset, _, _ = own
    n_tiles, _, ring = tiles
    first, _, _, per_head, ahead = walked
    count = 0
    if OPTIONS.is_causal:  # others see the tiles after the diagonal, and the last one
        count = max(min((first_key + KEYS - offset) // QUERIES, n_tiles - 1) - first, 0)
    if OPTIONS.ring > 0:  # the head's first ring
        count = gl.where(first_key // KEYS < ring, STRIDE, 0)
        count = gl.where(first_key // KEYS == ring - 1, n_tiles - first, count)
    elif OPTIONS.ordered:
        count = gl.where(first_key + KEYS >= n_keys, per_head, count)
    else:
        count = gl.where(first_key > 0, 0, gl.where(n_keys <= KEYS, per_head, count))
    if both_ways(OPTIONS):
        count = gl.where(ahead < 0, gl.where(first_key == 0, per_head, 0), count)
    return count


@gluon.constexpr_function
def has_part(part, options):
    """Whether there can be steps in a part of :func:`steps_of_head`."""
    return (options.is_causal or options.ragged, True, options.has_left)[part]


# ---- producer ------------------------------------------------------------------------------------


@gluon.jit
def keys_to_read(tile, PACKED: gl.constexpr):
    """``k_at`` of a ``tile`` that :func:`work_of_tile` returned first, for loads."""
    _, _, _, _, q_at, k_at = tile
    if PACKED:  # of keys without queries read zeros: what they hold must not reach a gradient
        k_at = (gl.where(q_at[1] == END, -1, k_at[0]), k_at[1])
    return k_at


@gluon.jit
def load_keys(loads, barriers, buffers, tile, PACKED: gl.constexpr):
    """Loads K and V of a program's ``tile``, which :func:`work_of_program` returned first."""
    _, k_desc, v_desc, _, _ = loads
    k_smem, v_smem, _, _, _ = buffers
    first_key, kv_head, _, _, _, _ = tile
    k_at = keys_to_read(tile, PACKED)
    PARTS: gl.constexpr = k_smem.shape[0]
    PART: gl.constexpr = k_smem.shape[2]
    BYTES: gl.constexpr = k_smem.shape[1] * (PARTS * PART + v_smem.shape[2]) * 2
    full = barriers[0].index(0)
    mbarrier.expect(full, BYTES)
    for part in gl.static_range(PARTS):
        k_part = k_smem.index(part)
        load_tile(k_desc, k_at, kv_head, first_key, full, k_part, PACKED, part * PART)
    load_tile(v_desc, k_at, kv_head, first_key, full, v_smem.index(0), PACKED)


@gluon.jit
def load_output_gradient(
    loads, barriers, buffers, slot, at, head, tile, row, PACKED: gl.constexpr, LAST=False
):  # fmt: skip
    """Loads a tile of dO, and the statistics that begin at ``row``, when nobody reads that slot's.

    It also announces Q, so that warps need not meet when Q's slot is free. The LAST step loads no
    dO.
    """
    q_full, do_full = barriers
    _, _, q_smem, do_smem, statistics_smem = buffers
    PARTS: gl.constexpr = q_smem.shape[0] // STAGES
    QUERIES: gl.constexpr = do_smem.shape[1]
    Q_BYTES: gl.constexpr = QUERIES * (PARTS * q_smem.shape[2] + STATISTICS) * 2
    of_q, of_do = q_full.index(slot), do_full.index(slot)
    mbarrier.expect(of_q, Q_BYTES)
    if not LAST:
        mbarrier.expect(of_do, QUERIES * do_smem.shape[2] * 2)
        load_tile(loads[3], at, head, tile * QUERIES, of_do, do_smem.index(slot), PACKED)
    tma_load(loads[4], [row, 0], of_q, statistics_smem.index(slot))


@gluon.jit
def load_queries(loads, barriers, buffers, slot, at, head, tile, PACKED: gl.constexpr):
    """Loads a tile of Q."""
    q_smem = buffers[2]
    PARTS: gl.constexpr = q_smem.shape[0] // STAGES
    QUERIES: gl.constexpr = q_smem.shape[1]
    PART: gl.constexpr = q_smem.shape[2]
    full = barriers[0].index(slot)
    for part in gl.static_range(PARTS):
        q_part = q_smem.index(slot * PARTS + part)
        load_tile(loads[0], at, head, tile * QUERIES, full, q_part, PACKED, part * PART)


@gluon.jit
def producer(
    loads, barriers, buffers, order_counters_ptr, work, OPTIONS: gl.constexpr, SPARE: gl.constexpr
):
    """Fetches K and V of a program's one tile, then each step's dO, and Q with L and delta.

    SPARE: then Q once more, because the last step issues the scores of a tile that nobody uses.
    """
    KEYS: gl.constexpr = buffers[0].shape[1]
    QUERIES: gl.constexpr = buffers[2].shape[1]
    program = work_of_program(work, KEYS, QUERIES, OPTIONS)
    own, walked, tiles = program
    kv_head, q_at = own[1], own[4]
    HEADS_PER_KV = work[0][3]
    steps = walked[3] * HEADS_PER_KV
    PACKED: gl.constexpr = OPTIONS.packed
    load_keys(loads, barriers, buffers, own, PACKED)
    tile = walked[0]
    head = kv_head * HEADS_PER_KV
    if OPTIONS.ordered:
        adding = first_turn(program, HEADS_PER_KV, KEYS, QUERIES, OPTIONS)
    for step in range(steps + STAGES):
        slot, _phase = slot_and_phase(step, STAGES)
        row = place_of_tile(head, tile, tiles) * QUERIES
        if step >= STAGES:
            named_barrier_sync_at(DO_EMPTY + slot, EVERYBODY)
        if step < steps + SPARE:
            load_output_gradient(
                loads, barriers[1:], buffers, slot, q_at, head, tile, row, PACKED, step == steps
            )  # fmt: skip
        if step >= STAGES:
            named_barrier_sync_at(Q_EMPTY + slot, EVERYBODY)
        if OPTIONS.ordered:
            adding = take_turns(step, adding, program, order_counters_ptr, KEYS, QUERIES, OPTIONS)
        if step < steps + SPARE:
            load_queries(loads, barriers[1:], buffers, slot, q_at, head, tile, PACKED)
        if step + 1 < steps:
            tile, head = next_query_tile(tile, head, walked)
    if OPTIONS.ordered:
        named_barrier_sync_at(Q_EMPTY + slot_and_phase(steps, STAGES)[0], EVERYBODY)
        end_last_turn(adding, order_counters_ptr)


# ---- consumer ------------------------------------------------------------------------------------


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
    return DS_WRITTEN + 2 * CONSUMER + (steps & 1)


@gluon.jit
def say_ds_is_written(CONSUMER: gl.constexpr, steps):
    """Arrives at :func:`ds_written`, whose number is in no register."""
    named_barrier_arrive_at_one(DS_WRITTEN + 2 * CONSUMER, steps & 1, CONSUMERS)


# ---- products ------------------------------------------------------------------------------------


@gluon.jit
def subtract(HALF: gl.constexpr, statistics, s, USE_ACC: gl.constexpr, SCORES: gl.constexpr):
    """Issues the subtraction of one half of the statistics: 0 is L / scale, 1 is delta.

    A product with ones of (OWN, STATISTICS) in registers, and zeros for the other half, adds it up.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    halves = gl.arange(0, STATISTICS, gl.SliceLayout(0, OPERAND)) // (STATISTICS // 2)
    zeros = gl.zeros([OWN, STATISTICS], gl.bfloat16, OPERAND)
    ones = gl.where(gl.expand_dims(halves == HALF, 0), zeros + 1.0, zeros)
    return warpgroup_mma(ones, statistics.permute((1, 0)), s, use_acc=USE_ACC, is_async=True)


@gluon.jit
def soft_cap(s, tanh_scale, statistics, dtype: gl.constexpr, SCORES: gl.constexpr):
    """tanh of raw scores, less L / scale, and the derivative of tanh, rounded to ``dtype``."""
    s = tanh(s * tanh_scale)
    slope = (1.0 - s * s).to(dtype)
    s = warpgroup_mma_wait(0, deps=(subtract(0, statistics, s, True, SCORES),))
    return s, slope


@gluon.jit
def start_scores(
    own_k,
    q_tile,
    statistics,
    COLUMNS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    SCORES: gl.constexpr,
):
    """Issues (OWN, QUERIES) scores, less L / scale: L first, for speed, then ranges of columns.

    With a soft-cap L is subtracted later, from their tanh.
    """
    QUERIES: gl.constexpr = q_tile.shape[0]
    s = gl.zeros([OWN, QUERIES], gl.float32, SCORES)
    if not HAS_SOFTCAP:
        s = subtract(0, statistics, s, False, SCORES)
    return issue_over_columns(own_k, q_tile, s, COLUMNS, not HAS_SOFTCAP)


@gluon.jit
def start_dp(own_v, do_tile, statistics, COLUMNS: gl.constexpr, SCORES: gl.constexpr):
    """Issues (OWN, QUERIES) dP, less delta: ranges of columns, then delta, for speed."""
    QUERIES: gl.constexpr = do_tile.shape[0]
    dp = gl.zeros([OWN, QUERIES], gl.float32, SCORES)
    dp = issue_over_columns(own_v, do_tile, dp, COLUMNS, False)
    return subtract(1, statistics, dp, True, SCORES)


@gluon.jit
def start_dq(ds_tile, k_tile, WIDTH: gl.constexpr, CONSUMER: gl.constexpr):
    """Issues a consumer's (64, WIDTH) part of a tile of dQ."""
    D: gl.constexpr = k_tile.shape[1]
    zeros = zero_accumulator(64, WIDTH)
    if D == 128:  # of 64 queries a range of columns
        k_tile = k_tile.slice(CONSUMER * 64, WIDTH, dim=1)
    else:  # of 128 queries half
        ds_tile = ds_tile.slice(CONSUMER * 64, 64, dim=1)
    return warpgroup_mma(ds_tile.permute((1, 0)), k_tile, zeros, use_acc=False, is_async=True)
