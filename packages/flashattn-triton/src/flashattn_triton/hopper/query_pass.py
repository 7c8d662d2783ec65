# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""The backward pass on sm_90 of heads up to 256 wide, second part: dQ.

A program owns 128 queries of one head, each of two consumers 64, and walks over the tiles of keys
that they see, as the forward pass does:

    S = Q Kᵀ,  dP = dO Vᵀ,  dS = exp2(S · scale · log2(e) - L · log2(e)) (dP - delta),  dQ += dS K

Tiles of V and K take turns in a ring of slots, V of a tile before K, because K is read twice. The
next tile's scores queue behind the product of dS and K; then the tensor cores have the products of
the other consumer.

Legend as in ``key_pass``.
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

from flashattn_triton.hopper.backward_common import EVERYBODY, STATISTICS
from flashattn_triton.hopper.products import zero_accumulator
from flashattn_triton.hopper.schedule import (
    entry_of_tile,
    key_tiles,
    load_tile,
    store_tile,
    tile_at,
    whole_tiles,
)
from flashattn_triton.hopper.scores import tanh, where_seen
from flashattn_triton.hopper.support import (
    allocate_tiles,
    exp2,
    named_barrier_arrive_at,
    named_barrier_sync_at,
    new_barriers,
    to_operand,
    wait_for_prerequisites,
)

ROWS = gl.constexpr(64)  # queries of a consumer
BOTH = gl.constexpr(128)  # of a program
KEYS = gl.constexpr(64)  # of a tile
WIDTH = gl.constexpr(256)  # columns of all tiles
SLOTS = gl.constexpr(3)  # of tiles of K and V
# Hardware barriers, one for each slot: consumers arrive when they have read it.
EMPTY = gl.constexpr(0)


@gluon.jit
def _tile_of_program(work, zero, OPTIONS: gl.constexpr):
    """(first row, head, rows, band, ``at`` of rows, ``at`` of keys, tiles of keys, statistics).

    Tiles of keys are (first, last + 1); statistics begin at a row among all heads' padded ones.
    ``zero``: if the compiler cannot know that it is, everything is computed once more, and needs no
    registers before.
    """
    sizes, _, tiles_ptr = work
    index = gl.program_id(0) + zero
    first_row, head, n_queries, band, q_at, k_at = tile_at(index, work, BOTH, OPTIONS)
    N_HEADS = sizes[2]
    tiles = key_tiles(first_row, min(first_row + BOTH, n_queries), band, KEYS, OPTIONS)
    n_tiles = gl.cdiv(n_queries, BOTH)
    if OPTIONS.packed:
        sequence = entry_of_tile(tiles_ptr, index // N_HEADS)[7]
        n_tiles = max(n_tiles, 1)
        first_tile = ((q_at[0] - n_queries) // BOTH + sequence) * N_HEADS
    else:
        first_tile = q_at[0] * N_HEADS * n_tiles
    row = gl.cast(first_tile + head * n_tiles, gl.int64) * BOTH + first_row
    return first_row, head, n_queries, band, q_at, k_at, tiles, row


@gluon.jit
def _producer(loads, barriers, buffers, work, OPTIONS: gl.constexpr):
    """Loads Q and dO once, then V and K tile by tile."""
    q_desc, k_desc, v_desc, do_desc = loads
    rows_full, full = barriers
    q_smem, do_smem, ring = buffers
    first_row, head, _, _, q_at, k_at, tiles, _ = _tile_of_program(work, 0, OPTIONS)
    kv_head = head // work[0][3]
    PACKED: gl.constexpr = OPTIONS.packed
    mbarrier.expect(rows_full.index(0), 2 * BOTH * WIDTH * 2)
    for c in gl.static_range(2):
        row = first_row + c * ROWS
        load_tile(q_desc, q_at, head, row, rows_full.index(0), q_smem.index(c), PACKED)
        load_tile(do_desc, q_at, head, row, rows_full.index(0), do_smem.index(c), PACKED)
    loaded = 0
    for tile in range(tiles[0], tiles[1]):
        for which in gl.static_range(2):
            slot = loaded % SLOTS
            if loaded >= SLOTS:
                named_barrier_sync_at(EMPTY + slot, EVERYBODY)
            mbarrier.expect(full.index(slot), KEYS * WIDTH * 2)
            descriptor = v_desc if which == 0 else k_desc
            first_key = tile * KEYS
            load_tile(descriptor, k_at, kv_head, first_key, full.index(slot), ring.index(slot),
                      PACKED)  # fmt: skip
            loaded += 1
    for i in gl.static_range(SLOTS):  # takes the last arrivals
        if loaded + i >= SLOTS:
            named_barrier_sync_at(EMPTY + (loaded + i) % SLOTS, EVERYBODY)


@gluon.jit
def _wait(full, n):
    """Waits until tile n of the ring has been loaded."""
    mbarrier.wait(full.index(n % SLOTS), (n // SLOTS) & 1)


@gluon.jit
def _release(n):
    """This consumer has read tile n of the ring."""
    named_barrier_arrive_at(EMPTY + n % SLOTS, EVERYBODY)


@gluon.jit
def _pass_over(full, first, stop):
    """Releases tiles of the ring that only the other consumer's rows see."""
    for n in range(first, stop):
        _wait(full, n)
        _release(n)


@gluon.jit
def _start_scores(do_tile, q_tile, full, ring, n, SCORES: gl.constexpr):
    """Issues dP and scores of the tile of keys whose V is number n of the ring."""
    zeros = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    v_tile, k_tile = ring.index(n % SLOTS), ring.index((n + 1) % SLOTS)
    _wait(full, n)
    dp = warpgroup_mma(do_tile, v_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    _wait(full, n + 1)
    s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return dp, s


@gluon.jit
def _score_gradient(
    s, dp, l_log2, minus_delta, scales, first_row, first_key, band,
    OPTIONS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """dS of a tile of keys."""
    _, scale_log2, tanh_scale = scales
    if tanh_scale is not None:
        s = tanh(s * tanh_scale)
        dp = (dp + gl.expand_dims(minus_delta, 1)) * (1.0 - s * s)
    else:
        dp = dp + gl.expand_dims(minus_delta, 1)
    ds = exp2(s * scale_log2 + gl.expand_dims(l_log2, 1)) * dp
    if MASKED:
        ds = where_seen(ds, first_row, first_key, band, OPTIONS, 0.0)
    return ds


@gluon.constexpr_function
def _has_part(part, options):
    """Whether there can be tiles before those of which all rows see all keys, such, or after."""
    return (options.has_left, True, options.is_causal or options.ragged)[part]


@gluon.jit
def _sum_of_parts(statistics, HALF: gl.constexpr, SCORES: gl.constexpr):
    """A number for each row, from the parts that preprocess_kernel wrote."""
    PARTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    rows = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, PARTS)), 1)
    parts = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, PARTS)), 0)
    x = gl.load(statistics + rows * STATISTICS + HALF * 8 + parts, cache_modifier=".cg")
    return gl.convert_layout(gl.sum(x.to(gl.float32), 1), gl.SliceLayout(1, SCORES))


@gluon.jit
def _consumer(
    dq_out, statistics_ptr, barriers, buffers, scales, work,
    CONSUMER: gl.constexpr, OPTIONS: gl.constexpr,
):  # fmt: skip
    """dQ of 64 queries."""
    rows_full, full = barriers
    q_smem, do_smem, ring = buffers
    scale, scale_log2, _ = scales
    DTYPE: gl.constexpr = q_smem.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    tile_row, _, n_queries, band, _, _, tiles, row = _tile_of_program(work, 0, OPTIONS)
    first_row = tile_row + CONSUMER * ROWS
    stop_row = min(first_row + ROWS, n_queries)
    start, stop = key_tiles(first_row, stop_row, band, KEYS, OPTIONS)
    statistics = statistics_ptr + (row + CONSUMER * ROWS) * STATISTICS
    l_log2 = _sum_of_parts(statistics, 0, SCORES) * scale_log2
    minus_delta = _sum_of_parts(statistics, 1, SCORES)
    q_tile, do_tile = q_smem.index(CONSUMER), do_smem.index(CONSUMER)

    dq = zero_accumulator(ROWS, WIDTH)  # without the scale
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    n = 2 * (start - tiles[0])
    _pass_over(full, 0, n)
    mbarrier.wait(rows_full.index(0), 0)
    dp, s = _start_scores(do_tile, q_tile, full, ring, n, SCORES)
    dp, s = warpgroup_mma_wait(0, deps=(dp, s))
    _release(n)
    ds = _score_gradient(
        s, dp, l_log2, minus_delta, scales, first_row, start * KEYS, band, OPTIONS, True
    )
    operand = to_operand(ds, DTYPE, OPERAND)
    first_whole, last_whole = whole_tiles(first_row, stop_row, band, KEYS, OPTIONS)
    first_whole = min(max(first_whole, start + 1), stop)
    last_whole = max(min(last_whole, stop), first_whole)
    bounds = (start + 1, first_whole, last_whole, stop)
    for part in gl.static_range(3):
        if _has_part(part, OPTIONS):
            for tile in range(bounds[part], bounds[part + 1]):
                # dQ of the tile before, whose dS is in registers, and dS of this one. The number of
                # Q and dO, which the compiler cannot know, keeps it from having all addresses
                # within them in registers, of which there are too few.
                own = CONSUMER + (tile >> 30)
                dq = warpgroup_mma(operand, ring.index((n + 1) % SLOTS), dq, is_async=True)
                dp, s = _start_scores(
                    do_smem.index(own), q_smem.index(own), full, ring, n + 2, SCORES
                )
                dq = warpgroup_mma_wait(2, deps=(dq,))
                _release(n + 1)
                n += 2
                dp = warpgroup_mma_wait(1, deps=(dp,))
                _release(n)
                s = warpgroup_mma_wait(0, deps=(s,))
                ds = _score_gradient(
                    s, dp, l_log2, minus_delta, scales, first_row, tile * KEYS, band, OPTIONS,
                    part != 1,
                )  # fmt: skip
                operand = to_operand(ds, DTYPE, OPERAND)
    dq = warpgroup_mma(operand, ring.index((n + 1) % SLOTS), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=(dq,))
    _release(n + 1)
    tile_row, head, _, _, q_at, _, tiles, _ = _tile_of_program(work, n >> 30, OPTIONS)
    _pass_over(full, n + 2, 2 * (tiles[1] - tiles[0]))
    q_tile.store((dq * scale).to(DTYPE))
    fence_async_shared()
    store_tile(dq_out, q_at, head, tile_row + CONSUMER * ROWS, q_tile, OPTIONS.packed)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        *("N_TILES", "N_QUERIES", "N_HEADS", "HEADS_PER_KV", "GROUP", "N_KEYS", "offset", "width"),
        *("scale", "scale_log2", "tanh_scale"),
    ]
)
def query_pass_kernel(
    q_desc,  # (B, H, N_q, D), tiles of (ROWS, WIDTH)
    k_desc,  # (B, G, N_k, D), tiles of (KEYS, WIDTH)
    v_desc,  # (B, G, N_k, E), likewise
    do_desc,  # (B, H, N_q, E), tiles of (ROWS, WIDTH)
    statistics_ptr,  # (B · H · tiles · BOTH, STATISTICS) bf16
    dq_out,  # (B, H, N_q, D), tiles of (ROWS, WIDTH)
    tiles_ptr,  # the table of schedule.packed_tiles_kernel if ``packed``, else None
    N_TILES,  # of BOTH queries, of all heads
    N_QUERIES,
    N_HEADS,
    HEADS_PER_KV,
    GROUP,
    N_KEYS,
    offset,
    width,
    scale,
    scale_log2,
    tanh_scale,
    OPTIONS: gl.constexpr,  # BackwardOptions
):
    """dQ. Grid: ``N_TILES``. Parameters are those of hopper_forward_kernel."""
    q_smem = allocate_tiles(q_desc.dtype, 2, ROWS, WIDTH)
    do_smem = allocate_tiles(q_desc.dtype, 2, ROWS, WIDTH)
    ring = allocate_tiles(q_desc.dtype, SLOTS, KEYS, WIDTH)
    barriers = (new_barriers(1, 1), new_barriers(SLOTS, 1))
    loads = (q_desc, k_desc, v_desc, do_desc)
    buffers = (q_smem, do_smem, ring)
    scales = (scale, scale_log2, tanh_scale)
    sizes = (N_TILES, N_QUERIES, N_HEADS, HEADS_PER_KV, GROUP)
    work = (sizes, (N_KEYS, offset, width), tiles_ptr)
    present = True
    if OPTIONS.packed:
        present = gl.program_id(0) < gl.load(tiles_ptr) * N_HEADS

    # Written in place, because a tuple bound to a variable loses its compile-time members.
    # fmt: off
    if present:
        gl.warp_specialize([
            (_producer, (loads, barriers, buffers, work, OPTIONS)),
            (_consumer, (dq_out, statistics_ptr, barriers, buffers, scales, work, 0, OPTIONS)),
            (_consumer, (dq_out, statistics_ptr, barriers, buffers, scales, work, 1, OPTIONS)),
        ], [4, 4], [240, 240])
    # fmt: on
    # Nothing here depends on the kernel before, which has itself waited for preprocess_kernel. But
    # who comes next must find both ended.
    wait_for_prerequisites()
