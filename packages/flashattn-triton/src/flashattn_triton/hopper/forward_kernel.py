# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""The forward pass on sm_90: FlashAttention-3's division of labour (arXiv:2407.08608), in Gluon.

A program computes CONSUMERS · 64 rows of queries of one head. One warp group, the producer, only
issues loads of tiles by the TMA (tensor memory accelerator). Each of the others, the consumers,
owns 64 rows: it issues the product Q·Kᵀ of tile j and the product P·V of tile j - 1, and computes
the softmax of tile j while the tensor cores still work on the second product, or, with
``products_first``, on those of other consumers only.

    s = Q Kᵀ                        raw scores of one tile of keys, in registers
    P = exp2(s · scale · log2(e) - shift)
    O = Σ P V / Σ P,  L = (shift + log2 Σ P) · ln(2)

Any shift gives the same output, as long as no number overflows and P is not all zeros. In bf16 it
is the largest score of a row in the first tile of keys, plus 48, not a running maximum
(arXiv:1805.02867): the loop over the other tiles searches no maximum and corrects no sum, which are
a third of its instructions. Where scores rise so far above the first ones that the sum of P is more
than 2^48, consumers note the row; the tile of queries comes once more, and the rows that are noted
are computed with running maxima. fp16, which has too few exponents, has these always.

Keys are walked from the last visible tile to the first, so that the tiles on the diagonal and the
ragged tail come first and the loop over all others is without a mask. Rows past the end of a head
are read as zeros and not written: the descriptors know where a head ends.

With ``in_order``, a consumer adds P·V of tile j before it multiplies tile j + 1. No P is kept
beside the next scores, so three consumers of 96 columns hold all in registers, and what one leaves
of the tensor cores' time the two others use.

Tiles have powers of two as widths. Of tiles of 128 columns, products leave out those that a
head_dim of 80 or 96 does not use (``products.py``). A head_dim of 192 is three PARTS of 64 columns
that lie one after another in shared memory; Q·Kᵀ is the sum of their products. The output has
shared memory of its own, or overwrites Q.

Legend: B batch, H query heads, G key/value heads, N_q queries, N_k keys, D head_dim of query and
key, E of value.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from flashattn_triton.hopper.configs import ForwardShape
from flashattn_triton.hopper.products import (
    issue_columns,
    issue_over_columns,
    scale_rows,
    store_columns,
    wait_for_all,
    wait_for_columns,
    write_columns,
    zero_columns,
)
from flashattn_triton.hopper.schedule import (
    END,
    first_element,
    key_tiles,
    load_tile,
    store_tile,
    tile_at,
    tile_index,
    whole_tiles,
)
from flashattn_triton.hopper.scores import (
    add_to_first,
    factors_like,
    finite_max,
    largest,
    pad_columns,
    scores_tile,
    sums_of_columns,
)
from flashattn_triton.hopper.support import (
    allocate_tiles,
    exp2,
    named_barrier_arrive,
    named_barrier_arrive_at,
    named_barrier_arrive_soon_at,
    named_barrier_sync,
    named_barrier_sync_at,
    new_barriers,
    slot_and_phase,
    to_operand,
    wait_until_written,
)

ROWS = gl.constexpr(64)  # of one consumer: what one warp group's wgmma computes
LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
KEY_SLOT = gl.constexpr(0)
VALUE_SLOT = gl.constexpr(1)


@dataclass(frozen=True, kw_only=True)
class ForwardOptions(ForwardShape):
    """Compile-time options of the forward kernel.

    columns: of each part of Q and K, those that are in use; of V, as many others are not.
    negative: the scale is.
    shifted: the diagonal's offset is not 0.
    halved: no query of the first of two consumers sees more than half of its last tile of keys.
    is_causal: no query sees a key after its diagonal.
    has_left: no query sees a key more than ``width`` before its diagonal.
    packed: sequences are packed; ``bottom_right`` adds the difference of a sequence's lengths.
    has_sinks: each head has one more score in every row.
    fp16: inputs are, not bf16.
    fp32_out: the output is stored as it was accumulated.
    """

    columns: int
    negative: bool
    shifted: bool
    halved: bool
    is_causal: bool
    has_left: bool
    packed: bool
    bottom_right: bool
    has_sinks: bool
    fp16: bool
    fp32_out: bool


# ---- the next tile of queries --------------------------------------------------------------------
#
# The producer finds out which tile is next, and tells consumers by a record in shared memory, which
# is complete when the tile's Q is. Consumers divide no indices and read no table between two tiles:
# packed sequences are 2 to 3 % faster.
#
# A round is a tile of queries, for the first time or once more. Consumers note which of its rows
# overflowed, and the producer looks before it fills the same slot of Q again, and at the end.

RECORD = gl.constexpr(8)  # fields
NO_TILE = gl.constexpr(-1)  # in place of the first row, after the last tile, and of a number


@gluon.jit
def _write_record(record, first_row, head, first_at, n_queries, band, keys_end, again):
    """Each thread writes all fields, so that whoever arrives at a barrier next has written them."""
    n_keys, offset, _width = band
    field = gl.arange(0, RECORD, gl.BlockedLayout([RECORD], [32], [4], [0]))
    values = gl.where(field == 0, first_row, head)
    values = gl.where(field == 2, first_at, values)
    values = gl.where(field == 3, n_queries, values)
    values = gl.where(field == 4, n_keys, values)
    values = gl.where(field == 5, offset, values)
    values = gl.where(field == 6, keys_end, values)
    record.store(gl.where(field == 7, again, values))  # read after an mbarrier


@gluon.jit
def _field(record, INDEX: gl.constexpr):
    """One field of a record."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([RECORD], [32], [4], [0])
    return gl.sum(gl.where(gl.arange(0, RECORD, LAYOUT) == INDEX, record.load(LAYOUT), 0), 0)


@gluon.jit
def _has_tile(q_full, records, round_index, OPTIONS: gl.constexpr):
    """Waits for the next tile of queries; whether there is one."""
    slot, phase = slot_and_phase(round_index, OPTIONS.q_slots)
    mbarrier.wait(q_full.index(slot), phase)
    return _field(records.index(slot), 0) != NO_TILE


@gluon.jit
def _read_record(record, work, OPTIONS: gl.constexpr):
    """A tile for consumers: (first row, head, rows, band, ``at`` of the rows, end of keys, again).

    Where keys end at -1, no sequence owns the rows. Of a tile that comes again, the last number is
    1 more than the slot where its overflowed rows are noted, else 0.
    """
    sizes, band, _ = work
    n_queries = sizes[1]
    first_row, head, first_at = _field(record, 0), _field(record, 1), _field(record, 2)
    q_at = (first_at, 0)
    keys_end = 0
    if OPTIONS.packed:
        n_queries = _field(record, 3)
        band = (_field(record, 4), _field(record, 5), band[2])
        q_at = (first_at, END - n_queries)
        keys_end = _field(record, 6)
    return first_row, head, n_queries, band, q_at, keys_end, _field(record, 7)


@gluon.jit
def _any_overflowed(finished, overflowed, round_index, number, OPTIONS: gl.constexpr):
    """Waits until consumers have finished a round's tile; whether rows of it overflowed.

    Without waiting, no if the tile's ``number`` is NO_TILE.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    found = 0
    if number != NO_TILE:
        slot, phase = slot_and_phase(round_index, OPTIONS.q_slots)
        mbarrier.wait(finished.index(slot), phase)
        for c in gl.static_range(CONSUMERS):
            found += gl.max(overflowed.index(slot * CONSUMERS + c).load(LAYOUT), 0)
    return found != 0


@gluon.jit
def _next_tile(finished, overflowed, round_index, begun, before, N_TILES, OPTIONS: gl.constexpr):
    """Which tile this program computes in a round: its number, or NO_TILE after the last one.

    ``begun``: how many tiles came once. ``before``: numbers of the tiles of the last two rounds,
    or NO_TILE where none is to come again. Also returns ``again`` of the record, and what ``begun``
    and the last round's number are now.
    """
    last_but_one, last = before
    due = last if OPTIONS.q_slots == 1 else last_but_one  # was in the slot that is filled now
    number = NO_TILE
    again = 0
    if _any_overflowed(finished, overflowed, round_index - OPTIONS.q_slots, due, OPTIONS):
        number = due
        again = 1 + slot_and_phase(round_index, OPTIONS.q_slots)[0]
    elif tile_index(begun) < N_TILES:
        number = begun
        begun += 1
    elif OPTIONS.q_slots > 1:
        if _any_overflowed(finished, overflowed, round_index - 1, last, OPTIONS):
            number = last
            again = 1 + slot_and_phase(round_index - 1, OPTIONS.q_slots)[0]
        last = NO_TILE
    return number, again, begun, last


# ---- slots of K and V ----------------------------------------------------------------------------
#
# Consumers release slots at hardware barriers, at which each warp arrives by itself; before an
# arrival at an mbarrier Triton has all warps of the consumer meet, in each step twice.


@gluon.jit
def _release(KIND: gl.constexpr, slot, OPTIONS: gl.constexpr, IN_FLIGHT: gl.constexpr = False):
    """A consumer has read a slot; another product of it may be ``IN_FLIGHT``."""
    THREADS: gl.constexpr = 128 * (OPTIONS.consumers + 1)
    named = OPTIONS.consumers + KIND * OPTIONS.stages + slot
    if IN_FLIGHT:
        named_barrier_arrive_at(named, THREADS)
    else:
        named_barrier_arrive_soon_at(named, THREADS)


@gluon.jit
def _wait_for_release(KIND: gl.constexpr, slot, OPTIONS: gl.constexpr):
    """The producer waits until all consumers have read what was in a slot."""
    named = OPTIONS.consumers + KIND * OPTIONS.stages + slot
    named_barrier_sync_at(named, 128 * (OPTIONS.consumers + 1))


# ---- producer ------------------------------------------------------------------------------------


@gluon.jit
def _load(descriptor, at, head, row, barrier, smem, tile, OPTIONS: gl.constexpr):
    """Loads all parts of one tile of Q or K."""
    PARTS: gl.constexpr = OPTIONS.parts
    for part in gl.static_range(PARTS):
        to = smem.index(tile * PARTS + part)
        load_tile(descriptor, at, head, row, barrier, to, OPTIONS.packed, part * smem.shape[2])


@gluon.jit
def _load_keys(k_desc, at, head, first_key, tiles_done, k_full, k_smem, OPTIONS: gl.constexpr):
    """Loads a tile of K as soon as its slot is free.

    ``tiles_done``: tiles of keys before it, for all tiles of queries so far.
    """
    KEY_BYTES: gl.constexpr = k_smem.shape[1] * OPTIONS.parts * k_smem.shape[2] * 2
    slot, _phase = slot_and_phase(tiles_done, OPTIONS.stages)
    full = k_full.index(slot)
    _wait_for_release(KEY_SLOT, slot, OPTIONS)
    mbarrier.expect(full, KEY_BYTES)
    _load(k_desc, at, head, first_key, full, k_smem, slot, OPTIONS)


@gluon.jit
def _load_values(v_desc, at, head, first_key, tiles_done, v_full, v_smem, OPTIONS: gl.constexpr):
    """Likewise of V."""
    VALUE_BYTES: gl.constexpr = v_smem.shape[1] * v_smem.shape[2] * 2
    slot, _phase = slot_and_phase(tiles_done, OPTIONS.stages)
    full = v_full.index(slot)
    _wait_for_release(VALUE_SLOT, slot, OPTIONS)
    mbarrier.expect(full, VALUE_BYTES)
    load_tile(v_desc, at, head, first_key, full, v_smem.index(slot), OPTIONS.packed)


@gluon.jit
def _producer(descriptors, barriers, buffers, work, OPTIONS: gl.constexpr):
    """Loads each tile's Q once and its K and V tile by tile, into slots that consumers released.

    In the order in which consumers ask for them: who adds P·V of tile j - 1 beside the scores of
    tile j needs K of tile j first. V first, whose slot is released last, would hold up K: 1 % at
    head_dim 128.
    """
    q_desc, k_desc, v_desc, _o_out = descriptors
    q_full, q_empty, k_full, v_full, finished = barriers
    q_smem, k_smem, v_smem, _o_smem, records, overflowed = buffers
    N_TILES, _N_QUERIES, _N_HEADS, HEADS_PER_KV, _GROUP = work[0]
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    STAGES: gl.constexpr = OPTIONS.stages
    Q_SLOTS: gl.constexpr = OPTIONS.q_slots
    KEYS: gl.constexpr = k_smem.shape[1]
    QUERY_BYTES: gl.constexpr = CONSUMERS * ROWS * OPTIONS.parts * k_smem.shape[2] * 2
    LAG: gl.constexpr = 0 if OPTIONS.in_order else 1  # of V behind K, in tiles
    tiles_done = 0  # tiles of keys so far
    round_index = 0
    before = NO_TILE  # the tile of the round before the last, and of the last
    last = NO_TILE
    begun = 1
    again = 0
    number = gl.where(tile_index(0) < N_TILES, 0, NO_TILE)
    while number != NO_TILE:
        first_row, head, n_queries, own_band, q_at, k_at = tile_at(
            tile_index(number), work, CONSUMERS * ROWS, OPTIONS
        )
        stop_row = min(first_row + CONSUMERS * ROWS, n_queries)
        start, stop = key_tiles(first_row, stop_row, own_band, KEYS, OPTIONS)
        kv_head = head // HEADS_PER_KV
        q_slot, q_phase = slot_and_phase(round_index, Q_SLOTS)
        if OPTIONS.over_queries:
            mbarrier.wait(q_empty.index(q_slot), q_phase ^ 1)
        record = records.index(q_slot)
        _write_record(record, first_row, head, q_at[0], n_queries, own_band, k_at[0], again)
        mbarrier.expect(q_full.index(q_slot), QUERY_BYTES)
        for c in gl.static_range(CONSUMERS):
            row = first_row + c * ROWS
            q_tile = q_slot * CONSUMERS + c
            _load(q_desc, q_at, head, row, q_full.index(q_slot), q_smem, q_tile, OPTIONS)
        n_key_tiles = stop - start
        for j in range(n_key_tiles + LAG):
            first_key = (stop - 1 - j) * KEYS
            if j < n_key_tiles:
                _load_keys(
                    k_desc, k_at, kv_head, first_key, tiles_done + j, k_full, k_smem, OPTIONS
                )  # fmt: skip
            if j >= LAG:
                _load_values(
                    v_desc, k_at, kv_head, first_key + LAG * KEYS, tiles_done + j - LAG, v_full,
                    v_smem, OPTIONS,
                )  # fmt: skip
        tiles_done += n_key_tiles
        round_index += 1
        before = last
        last = number
        number, again, begun, last = _next_tile(
            finished, overflowed, round_index, begun, (before, last), N_TILES, OPTIONS
        )
    q_slot, q_phase = slot_and_phase(round_index, Q_SLOTS)
    if OPTIONS.over_queries:
        mbarrier.wait(q_empty.index(q_slot), q_phase ^ 1)
    _write_record(records.index(q_slot), NO_TILE, 0, 0, 0, work[1], 0, 0)
    mbarrier.arrive(q_full.index(q_slot), count=1)
    for i in gl.static_range(STAGES):  # takes the last arrivals
        _wait_for_release(KEY_SLOT, i, OPTIONS)
        _wait_for_release(VALUE_SLOT, i, OPTIONS)


# ---- consumer ------------------------------------------------------------------------------------


@gluon.jit
def _scheduler_barrier_wait(CONSUMER: gl.constexpr):
    """Waits until the previous consumer has issued its products.

    Consumers use the tensor cores one after another (FlashAttention-3's ping-pong schedule), so
    that one computes exponentials while another multiplies.
    """
    named_barrier_sync(CONSUMER, 256)


@gluon.jit
def _scheduler_barrier_arrive(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Allows the next consumer to issue its products."""
    named_barrier_arrive((CONSUMER + 1) % CONSUMERS, 256)


@gluon.jit
def _release_queries(q_empty, round_index, OPTIONS: gl.constexpr):
    """Releases a slot of Q when the output, which has overwritten it, has left shared memory."""
    tma.store_wait(0)
    slot, _phase = slot_and_phase(round_index, OPTIONS.q_slots)
    mbarrier.arrive(q_empty.index(slot), count=1)


@gluon.jit
def _release_tiles(n, tiles_done, barriers, CONSUMER: gl.constexpr, OPTIONS: gl.constexpr):
    """Releases ``n`` tiles that only other consumers' rows see; returns the new ``tiles_done``."""
    _q_full, _q_empty, k_full, v_full, _finished = barriers
    for _ in range(n):
        slot, phase = slot_and_phase(tiles_done, OPTIONS.stages)
        mbarrier.wait(k_full.index(slot), phase)
        _release(KEY_SLOT, slot, OPTIONS)
        mbarrier.wait(v_full.index(slot), phase)
        _release(VALUE_SLOT, slot, OPTIONS)
        tiles_done += 1
        if not OPTIONS.in_order:
            _scheduler_barrier_wait(CONSUMER)
            _scheduler_barrier_arrive(CONSUMER, OPTIONS.consumers)
    return tiles_done


@gluon.jit
def _parts_of(smem, tile, PARTS: gl.constexpr):
    """The parts of one tile of Q."""
    parts = ()
    for part in gl.static_range(PARTS):
        parts += (smem.index(PARTS * tile + part),)
    return parts


@gluon.jit
def _issue_scores(
    q_parts, k_smem, slot, KEYS: gl.constexpr, SCORES: gl.constexpr, OPTIONS: gl.constexpr
):
    """Starts Q·Kᵀ with the first KEYS keys of a tile, one part after another."""
    PARTS: gl.constexpr = OPTIONS.parts
    s = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    for part in gl.static_range(PARTS):
        keys = k_smem.index(slot * PARTS + part).slice(0, KEYS, dim=0)
        s = issue_over_columns(q_parts[part], keys, s, OPTIONS.columns, part > 0)
    return s


@gluon.jit
def _store_output(
    out, descriptor, at, head, row, smem, tile, PARTS: gl.constexpr, PACKED: gl.constexpr
):
    """Stores 64 rows through shared memory, in one tile or in PARTS, of which there are two."""
    if PARTS == 1:
        store_columns(smem.index(tile), out)
    else:
        halves = gl.reshape(out[0].to(smem.dtype), [ROWS, PARTS, smem.shape[2]])
        parts = gl.split(gl.permute(halves, (0, 2, 1)))
        for part in gl.static_range(PARTS):
            store_columns(smem.index(tile + part), (parts[part],))
    fence_async_shared()
    for part in gl.static_range(PARTS):
        store_tile(descriptor, at, head, row, smem.index(tile + part), PACKED, part * smem.shape[2])


# ---- softmax -------------------------------------------------------------------------------------

# What becomes of rows' shifts in a step.
KEPT = gl.constexpr("kept")
RAISED = gl.constexpr("raised")
# As RAISED, but scores are compared as integers, three in one instruction. That finds the largest
# one if it is not negative, and else a smaller one, so that exponentials may be above 1.
RAISED_BY_INTEGERS = gl.constexpr("raised by integers")


@gluon.constexpr_function
def _headroom(options):
    """By how many powers of two the first exponentials are smaller than 1.

    bf16 has the exponents of fp32: 2^48 is as far from the smallest as from the largest that is
    left for sums and values. fp16 would lose digits.
    """
    return 0.0 if options.fp16 else 48.0


@gluon.constexpr_function
def _power_of_two(exponent):
    return 2.0**exponent


@gluon.constexpr_function
def _usual(options):
    """What becomes of shifts in tiles without a mask, as long as nothing overflows."""
    if not options.fp16:
        return KEPT
    return RAISED if options.negative else RAISED_BY_INTEGERS


@gluon.constexpr_function
def _has_blind_rows(options):
    """Whether some row may see no key at first."""
    return options.shifted or options.has_left or options.packed


@gluon.jit
def _shift(s, scale_log2, OPTIONS: gl.constexpr, INTEGERS: gl.constexpr = False):
    """What is subtracted from scores (ROWS, keys) of each row, in units of log2."""
    return largest(s, scale_log2, OPTIONS.negative, INTEGERS) + _headroom(OPTIONS)


@gluon.jit
def _softmax(
    s,
    scales,
    first_row,
    first_key,
    band,
    state,
    overflowed,  # (ROWS,), or None: rows whose shifts are raised; others' change as usual
    OPTIONS: gl.constexpr,
    MASKED: gl.constexpr,
    SHIFTS: gl.constexpr,
):
    """Exponentials of one tile of scores.

    Returns them, factors of the sums before if shifts are raised, and the new state: of each row
    its shift (ROWS,), and its sum as of ``sums_of_columns``.
    """
    scale_log2, tanh_scale = scales
    shift, row_sum = state
    BLIND_ROWS: gl.constexpr = _has_blind_rows(OPTIONS)
    s = scores_tile(s, tanh_scale, first_row, first_key, band, MASKED, OPTIONS)
    factors = ()
    if SHIFTS != KEPT:
        own = _shift(s, scale_log2, OPTIONS, SHIFTS == RAISED_BY_INTEGERS)
        raised = gl.maximum(shift, own)
        if overflowed is not None:
            others = shift
            if OPTIONS.fp16:
                BY_INTEGERS: gl.constexpr = _usual(OPTIONS) == RAISED_BY_INTEGERS
                others = gl.maximum(shift, _shift(s, scale_log2, OPTIONS, BY_INTEGERS))
            raised = gl.where(overflowed != 0, raised, others)
        factor = exp2(shift - finite_max(raised, BLIND_ROWS))
        row_sum = row_sum * factors_like(factor, row_sum)
        factors = (factor,)
        shift = raised
    exponentials = exp2(s * scale_log2 - gl.expand_dims(finite_max(shift, BLIND_ROWS), 1))
    row_sum += sums_of_columns(exponentials)
    return exponentials, factors, (shift, row_sum)


@gluon.jit
def _scaled_by(acc, factors):
    """O so far, times the factors of :func:`_softmax`."""
    for i in gl.static_range(len(factors)):
        acc = scale_rows(acc, factors[i])
    return acc


@gluon.jit
def _overflowed_rows(shift, row_sum, OPTIONS: gl.constexpr):
    """(ROWS,): 1 where a number of the row may have overflowed, else 0.

    In bf16, where the sum of exponentials is above 2^48, which values up to 2^79 may be multiplied
    with. In fp16 exponentials are at most 2^-shift, for a negative shift; in steps that compare
    integers, ``shift`` is the one before them.
    """
    if OPTIONS.fp16:
        overflowed = gl.where((shift >= -15.0) | (shift == -float("inf")), 0, 1)
    else:
        overflowed = gl.where(row_sum <= 2.0**48, 0, 1)  # 1 if the sum is NaN
    return overflowed


@gluon.jit
def _add_values(p, acc, v_smem, tiles_done, v_full, OPTIONS: gl.constexpr):
    """O plus P·V of a tile, whose slot is then released."""
    slot, phase = slot_and_phase(tiles_done, OPTIONS.stages)
    mbarrier.wait(v_full.index(slot), phase)
    acc = issue_columns(p, v_smem.index(slot), acc)
    acc = wait_for_columns(acc, 0)
    _release(VALUE_SLOT, slot, OPTIONS)
    return acc


@gluon.jit
def _step(
    q_parts,
    barriers,
    buffers,
    tiles_done,  # tiles of keys before this one, over all rows of this program
    first_row,
    first_key,
    band,
    scales,
    acc,  # (ROWS, E) fp32, by ranges of columns
    p,  # (ROWS, KEYS), P of the previous tile
    state,  # of _softmax
    overflowed,  # likewise
    CONSUMER: gl.constexpr,
    OPTIONS: gl.constexpr,
    MASKED: gl.constexpr,
    SHIFTS: gl.constexpr,
    SCORES: gl.constexpr,
):
    """Q·Kᵀ and softmax of this tile, and P·V of the tile before, or ``in_order`` of this one."""
    _q_full, _q_empty, k_full, v_full, _finished = barriers
    _q_smem, k_smem, v_smem, _o_smem, _records, _overflowed = buffers
    STAGES: gl.constexpr = OPTIONS.stages
    PROBABILITIES: gl.constexpr = p.type.layout
    slot, phase = slot_and_phase(tiles_done, STAGES)
    before, phase_before = slot_and_phase(tiles_done - 1, STAGES)

    mbarrier.wait(k_full.index(slot), phase)
    if OPTIONS.in_order:
        s = _issue_scores(q_parts, k_smem, slot, k_smem.shape[1], SCORES, OPTIONS)
        s = warpgroup_mma_wait(0, deps=(s,))
        _release(KEY_SLOT, slot, OPTIONS)
    else:
        _scheduler_barrier_wait(CONSUMER)
        s = _issue_scores(q_parts, k_smem, slot, k_smem.shape[1], SCORES, OPTIONS)
        mbarrier.wait(v_full.index(before), phase_before)
        acc = issue_columns(p, v_smem.index(before), acc)
        _scheduler_barrier_arrive(CONSUMER, OPTIONS.consumers)
        if OPTIONS.products_first:
            s, acc = wait_for_all(s, acc)
            _release(KEY_SLOT, slot, OPTIONS)
            _release(VALUE_SLOT, before, OPTIONS)
        else:
            s = warpgroup_mma_wait(len(acc), deps=(s,))
            _release(KEY_SLOT, slot, OPTIONS, IN_FLIGHT=True)
    exponentials, factors, state = _softmax(
        s, scales, first_row, first_key, band, state, overflowed, OPTIONS, MASKED, SHIFTS
    )
    if not OPTIONS.in_order and not OPTIONS.products_first:
        acc = wait_for_columns(acc, 0)
        _release(VALUE_SLOT, before, OPTIONS)
    acc = _scaled_by(acc, factors)
    p = to_operand(exponentials, p.dtype, PROBABILITIES)
    if OPTIONS.in_order:
        acc = _add_values(p, acc, v_smem, tiles_done, v_full, OPTIONS)
    return acc, p, state


@gluon.jit
def _consumer(
    descriptors,
    barriers,
    buffers,
    work,
    per_row,
    scales,
    CONSUMER: gl.constexpr,
    OPTIONS: gl.constexpr,
):
    """Output and logsumexp of 64 rows of each tile."""
    _q_desc, _k_desc, _v_desc, o_out = descriptors
    q_full, q_empty, k_full, v_full, finished = barriers
    q_smem, k_smem, v_smem, o_smem, records, overflowed = buffers
    _N_TILES, N_QUERIES, N_HEADS, _HEADS_PER_KV, _GROUP = work[0]
    L_ptr, sinks_ptr, o_strides, width_div8 = per_row
    scale_log2, tanh_scale = scales
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    STAGES: gl.constexpr = OPTIONS.stages
    PARTS: gl.constexpr = OPTIONS.parts
    Q_SLOTS: gl.constexpr = OPTIONS.q_slots
    KEYS: gl.constexpr = k_smem.shape[1]
    E: gl.constexpr = v_smem.shape[2]
    O_PARTS: gl.constexpr = E // o_smem.shape[2]
    DTYPE: gl.constexpr = k_smem.dtype
    WARPS: gl.constexpr = [gl.num_warps(), 1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, E, 16])
    PROBABILITIES: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    # Of the tile on the diagonal, the first of two consumers sees the first half at most.
    FIRST_KEYS: gl.constexpr = KEYS // 2 if OPTIONS.halved and CONSUMER == 0 else KEYS
    FIRST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, FIRST_KEYS, 16])
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    tiles_done = 0
    if CONSUMER == CONSUMERS - 1 and not OPTIONS.in_order:
        _scheduler_barrier_arrive(CONSUMER, CONSUMERS)  # consumer 0 is first
    for i in gl.static_range(STAGES):  # all slots are empty
        _release(KEY_SLOT, i, OPTIONS)
        _release(VALUE_SLOT, i, OPTIONS)

    round_index = 0
    while _has_tile(q_full, records, round_index, OPTIONS):
        if OPTIONS.in_order:
            # Their products then queue one behind another, which keeps their softmaxes apart: 8 %.
            named_barrier_sync(0, 128 * CONSUMERS)
        q_slot, _phase = slot_and_phase(round_index, Q_SLOTS)
        tile_row, head, n_queries, own_band, q_at, keys_end, again = _read_record(
            records.index(q_slot), work, OPTIONS
        )
        first_row = tile_row + CONSUMER * ROWS
        stop_row = min(tile_row + CONSUMERS * ROWS, n_queries)
        tile_start, tile_stop = key_tiles(tile_row, stop_row, own_band, KEYS, OPTIONS)
        stop_row = min(first_row + ROWS, n_queries)
        start, stop = key_tiles(first_row, stop_row, own_band, KEYS, OPTIONS)
        if first_row >= n_queries:  # there are no rows here
            start = tile_start
            stop = tile_start + 1
        n_key_tiles = stop - start
        tiles_done = _release_tiles(tile_stop - stop, tiles_done, barriers, CONSUMER, OPTIONS)

        # The last visible tile: there is no P·V to issue beside its scores, and no maximum yet.
        slot, phase = slot_and_phase(tiles_done, STAGES)
        q_parts = _parts_of(q_smem, q_slot * CONSUMERS + CONSUMER, PARTS)
        mbarrier.wait(k_full.index(slot), phase)
        if not OPTIONS.in_order:
            _scheduler_barrier_wait(CONSUMER)
        s = _issue_scores(q_parts, k_smem, slot, FIRST_KEYS, FIRST, OPTIONS)
        if not OPTIONS.in_order:
            _scheduler_barrier_arrive(CONSUMER, CONSUMERS)
        if OPTIONS.over_queries and Q_SLOTS > 1 and round_index > 0:
            _release_queries(q_empty, round_index - 1, OPTIONS)
        s = warpgroup_mma_wait(0, deps=(s,))
        _release(KEY_SLOT, slot, OPTIONS)
        first_key = (stop - 1) * KEYS
        masked = OPTIONS.is_causal or OPTIONS.has_left or first_key + KEYS > own_band[0]
        s = scores_tile(s, tanh_scale, first_row, first_key, own_band, masked, OPTIONS)
        shift = _shift(s, scale_log2, OPTIONS)
        if OPTIONS.has_sinks:  # one more score of each row, without a value
            sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
            if OPTIONS.packed:  # nor do tokens that no sequence owns see a sink
                sink = gl.where(keys_end < 0, float("-inf"), sink)
            shift = gl.maximum(shift, sink + _headroom(OPTIONS))
        finite_shift = finite_max(shift, _has_blind_rows(OPTIONS))
        exponentials = exp2(s * scale_log2 - gl.expand_dims(finite_shift, 1))
        row_sum = sums_of_columns(exponentials)
        if OPTIONS.has_sinks:
            row_sum = add_to_first(row_sum, exp2(sink - finite_shift))
        if FIRST_KEYS < KEYS:
            exponentials = pad_columns(exponentials, SCORES)
            shift = gl.convert_layout(shift, SCORE_ROWS, assert_trivial=True)
        p = to_operand(exponentials, DTYPE, PROBABILITIES)
        acc = zero_columns(ROWS, E, E - (k_smem.shape[2] - OPTIONS.columns))
        if OPTIONS.in_order:
            acc = _add_values(p, acc, v_smem, tiles_done, v_full, OPTIONS)

        # A diagonal that is not aligned to tiles crosses two of them, a window's left edge too.
        whole = 1
        whole_stop = n_key_tiles
        if OPTIONS.shifted or OPTIONS.has_left:
            # Where the first row's keys end with a tile, it may have seen no key before, and so has
            # no shift to keep: the row before it sees not all of that tile.
            first_whole, last_whole = whole_tiles(first_row - 1, stop_row, own_band, KEYS, OPTIONS)
        if OPTIONS.shifted:
            whole = min(max(stop - last_whole, 1), n_key_tiles)
        if OPTIONS.has_left:
            whole_stop = min(max(stop - first_whole, whole), n_key_tiles)
        state = (shift, row_sum)
        if OPTIONS.shifted:
            for j in range(1, whole):
                acc, p, state = _step(
                    q_parts, barriers, buffers, tiles_done + j, first_row, first_key - j * KEYS,
                    own_band, scales, acc, p, state, None, CONSUMER, OPTIONS, True, RAISED, SCORES,
                )  # fmt: skip
        first_shift, _ = state
        bounds = (whole, whole_stop, n_key_tiles)
        if again > 0:
            rows = overflowed.index((again - 1) * CONSUMERS + CONSUMER).load(SCORE_ROWS)
            for part in gl.static_range(1 + OPTIONS.has_left):
                for j in range(bounds[part], bounds[part + 1]):
                    acc, p, state = _step(
                        q_parts, barriers, buffers, tiles_done + j, first_row, first_key - j * KEYS,
                        own_band, scales, acc, p, state, rows, CONSUMER, OPTIONS, part == 1,
                        RAISED, SCORES,
                    )  # fmt: skip
        else:
            for part in gl.static_range(1 + OPTIONS.has_left):
                for j in range(bounds[part], bounds[part + 1]):
                    acc, p, state = _step(
                        q_parts, barriers, buffers, tiles_done + j, first_row, first_key - j * KEYS,
                        own_band, scales, acc, p, state, None, CONSUMER, OPTIONS, part == 1,
                        _usual(OPTIONS), SCORES,
                    )  # fmt: skip
        tiles_done += n_key_tiles

        shift, row_sum = state
        slot, phase = slot_and_phase(tiles_done - 1, STAGES)
        if not OPTIONS.in_order:
            mbarrier.wait(v_full.index(slot), phase)
            acc = issue_columns(p, v_smem.index(slot), acc)
        row_sum = gl.convert_layout(gl.sum(row_sum, 1), SCORE_ROWS, assert_trivial=True)
        rows = gl.where(again > 0, 0, _overflowed_rows(first_shift, row_sum, OPTIONS))
        overflowed.index(q_slot * CONSUMERS + CONSUMER).store(rows)  # read after an mbarrier
        mbarrier.arrive(finished.index(q_slot), count=1)
        # A row that saw no key, nor a sink, has sum 0: output 0 / 1, logsumexp -inf + log2(1).
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
        # The sum as of a shift without headroom, because logarithms near 0 are the most exact.
        HEADROOM: gl.constexpr = _headroom(OPTIONS)
        logsumexp = (shift - HEADROOM + gl.log2(row_sum * _power_of_two(HEADROOM))) * LN_2
        normaliser = 1.0 / row_sum
        if not OPTIONS.in_order:
            acc = wait_for_columns(acc, 0)
            _release(VALUE_SLOT, slot, OPTIONS)
        if OPTIONS.has_left:
            tiles_done = _release_tiles(start - tile_start, tiles_done, barriers, CONSUMER, OPTIONS)

        if not OPTIONS.over_queries:
            tma.store_wait(0)  # until the previous tile's output has left shared memory
        if again > 0:
            wait_until_written()  # the output of the first time, to the same place
        acc = scale_rows(acc, normaliser)
        if OPTIONS.fp32_out:
            at = first_element(o_strides, q_at, head, n_queries, first_row, OPTIONS.packed)
            write_columns(o_out + at, n_queries - first_row, o_strides[2], width_div8, acc, False)
        else:
            tile = CONSUMER * PARTS
            if OPTIONS.over_queries:
                tile += q_slot * CONSUMERS * PARTS
            _store_output(acc, o_out, q_at, head, first_row, o_smem, tile, O_PARTS, OPTIONS.packed)
        rows = first_row + gl.arange(0, ROWS, SCORE_ROWS)
        if OPTIONS.packed:
            l_row = head.to(gl.int64) * N_QUERIES + (q_at[0] - n_queries)
        else:
            l_row = (q_at[0] * N_HEADS + head).to(gl.int64) * N_QUERIES
        gl.store(L_ptr + l_row + rows, logsumexp, mask=rows < n_queries)
        if Q_SLOTS == 1:
            _release_queries(q_empty, round_index, OPTIONS)
        round_index += 1
    tma.store_wait(0)
    if CONSUMER == 0 and not OPTIONS.in_order:
        _scheduler_barrier_wait(CONSUMER)  # takes the last arrival, which no consumer waited for


# ---- kernel --------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=[
        "N_TILES",
        "N_QUERIES",
        "N_HEADS",
        "HEADS_PER_KV",
        "GROUP",
        "N_KEYS",
        "offset",
        "width",
        "scale_log2",
        "tanh_scale",
        *("stride_ob", "stride_oh", "stride_oq", "E_DIV8"),
    ],
    do_not_specialize_on_alignment=["sinks_ptr"],
)
def hopper_forward_kernel(
    q_desc,  # (B, H, N_q, D), tiles of (ROWS, D / PARTS)
    k_desc,  # (B, G, N_k, D), tiles of (KEYS, D / PARTS)
    v_desc,  # (B, G, N_k, E), tiles of (KEYS, E)
    o_out,  # (B, H, N_q, E), tiles of (ROWS, E), or of (ROWS, E / 2); a pointer if ``fp32_out``
    L_ptr,  # (B, H, N_q) fp32, contiguous
    tiles_ptr,  # the table of schedule.packed_tiles_kernel if ``packed``, else None
    sinks_ptr,  # (H,) if ``has_sinks``, else None
    N_TILES,
    N_QUERIES,
    N_HEADS,
    HEADS_PER_KV,
    GROUP,
    N_KEYS,
    offset,
    width,
    scale_log2,
    tanh_scale,
    stride_ob,  # of the output in units of 8 elements, if ``fp32_out``, else None
    stride_oh,
    stride_oq,
    E_DIV8,  # E / 8, likewise
    OPTIONS: gl.constexpr,  # ForwardOptions
):
    """Tiles of consumers · 64 rows, ``N_TILES`` of them over all heads, by any number of programs.

    ``GROUP``: how many heads are worked on at a time, at least 1.
    ``offset``: key index minus query index of the last key that a query sees, if ``is_causal``.
    ``width``: how many keys before that one a query sees, if ``has_left``.
    ``scale_log2``: scale · log2(e), not 0. With a soft-cap it is softcap · log2(e), and
    ``tanh_scale``, else None, is scale / softcap: the tanh of scores times this factor takes their
    place.
    If ``packed``, ``N_QUERIES`` and ``N_KEYS`` are the tokens of all sequences, ``offset`` does not
    count the difference of a sequence's lengths, and the table says how many tiles there are.
    """
    CONSUMERS: gl.constexpr = OPTIONS.consumers
    STAGES: gl.constexpr = OPTIONS.stages
    PARTS: gl.constexpr = OPTIONS.parts
    Q_SLOTS: gl.constexpr = OPTIONS.q_slots
    DTYPE: gl.constexpr = q_desc.dtype
    KEYS: gl.constexpr = k_desc.block_shape[-2]
    WIDTH: gl.constexpr = k_desc.block_shape[-1]
    q_smem = allocate_tiles(DTYPE, Q_SLOTS * CONSUMERS * PARTS, ROWS, WIDTH)
    k_smem = allocate_tiles(DTYPE, STAGES * PARTS, KEYS, WIDTH)
    v_smem = allocate_tiles(DTYPE, STAGES, KEYS, v_desc.block_shape[-1])
    o_smem = q_smem
    if not OPTIONS.over_queries:
        o_smem = allocate_tiles(DTYPE, CONSUMERS * PARTS, ROWS, WIDTH)
    RECORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    records = gl.allocate_shared_memory(gl.int32, [Q_SLOTS, RECORD], RECORDS)
    q_full = new_barriers(Q_SLOTS, 1)
    q_empty = new_barriers(Q_SLOTS, CONSUMERS)
    k_full = new_barriers(STAGES, 1)
    v_full = new_barriers(STAGES, 1)
    finished = new_barriers(Q_SLOTS, CONSUMERS)
    overflowed = gl.allocate_shared_memory(gl.int32, [Q_SLOTS * CONSUMERS, ROWS], RECORDS)
    descriptors = (q_desc, k_desc, v_desc, o_out)
    barriers = (q_full, q_empty, k_full, v_full, finished)
    buffers = (q_smem, k_smem, v_smem, o_smem, records, overflowed)
    if OPTIONS.packed:
        N_TILES = gl.load(tiles_ptr) * N_HEADS
    if not OPTIONS.shifted:
        offset = 0
    work = (
        (N_TILES, N_QUERIES, N_HEADS, HEADS_PER_KV, GROUP), (N_KEYS, offset, width), tiles_ptr
    )  # fmt: skip
    scales = (scale_log2, tanh_scale)
    per_row = (L_ptr, sinks_ptr, (stride_ob, stride_oh, stride_oq), E_DIV8)
    REGISTERS: gl.constexpr = OPTIONS.registers

    # Written in place, because a tuple bound to a variable loses its compile-time members.
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_producer, (descriptors, barriers, buffers, work, OPTIONS)),
            (_consumer, (descriptors, barriers, buffers, work, per_row, scales, 0, OPTIONS)),
            (_consumer, (descriptors, barriers, buffers, work, per_row, scales, 1, OPTIONS)),
        ], [4, 4], [REGISTERS, REGISTERS])
    else:
        gl.warp_specialize([
            (_producer, (descriptors, barriers, buffers, work, OPTIONS)),
            (_consumer, (descriptors, barriers, buffers, work, per_row, scales, 0, OPTIONS)),
            (_consumer, (descriptors, barriers, buffers, work, per_row, scales, 1, OPTIONS)),
            (_consumer, (descriptors, barriers, buffers, work, per_row, scales, 2, OPTIONS)),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])
