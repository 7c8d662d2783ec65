# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""The forward pass on sm_90: FlashAttention-3's division of labour (arXiv:2407.08608), in Gluon.

A program computes CONSUMERS · 64 rows of queries of one head. One warp group, the producer, only
has the copy engine fetch tiles. Each of the others, the consumers, owns 64 rows: it issues the
product Q·Kᵀ of tile j and the product P·V of tile j - 1, and computes the softmax of tile j while
the tensor cores still work on the second product.

    s = Q Kᵀ                        raw scores of one tile of keys, in registers
    P = exp2(s · scale · log2(e) - max)
    O = Σ P V / Σ P,  L = (max + log2 Σ P) · ln(2)

Keys are walked from the last visible tile to the first, so that the tiles on the diagonal and the
ragged tail come first and the loop over all others is without a mask. Rows past the end of a head
are read as zeros and not written: the descriptors know where a head ends.

Legend: B batch, H query heads, G key/value heads, N_q queries, N_k keys, D head_dim, S stages.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashattn_triton.configs import Tiles
from flashattn_triton.hopper.configs import forward_config
from flashattn_triton.hopper.support import (
    TileMap,
    exp2,
    named_barrier_arrive,
    named_barrier_sync,
    tile_map,
)
from flashattn_triton.launch import (
    Launch,
    Strides,
    empty_output,
    empty_row_statistic,
    on_device_of,
)
from flashattn_triton.options import AttentionOptions, diagonal_offset

ROWS = gl.constexpr(64)  # of one consumer: what one warp group's wgmma computes
LOG2_E = 1.4426950408889634
LN_2 = gl.constexpr(0.6931471805599453)


# ---- which work ----------------------------------------------------------------------------------


@gluon.jit
def _tile_index(turn):
    """Which tile this program computes as its ``turn``-th: every other round backwards.

    In the order of :func:`_tile` neighbours are of almost equal length, and whoever has the longer
    tile of one round has the shorter one of the next.
    """
    program = gl.program_id(0)
    backwards = gl.num_programs(0) - 1 - program
    return turn * gl.num_programs(0) + gl.where(turn % 2 == 0, program, backwards)


@gluon.jit
def _n_turns(N_TILES):
    """How many tiles this program computes."""
    whole_rounds = N_TILES // gl.num_programs(0)
    return whole_rounds + gl.where(_tile_index(whole_rounds) < N_TILES, 1, 0)


@gluon.jit
def _tile(turn, sizes, ROWS_PER_TILE: gl.constexpr):
    """(first row, head, batch) of a tile.

    Groups of heads come one after another. Within a group, rows are outermost, so that under a
    causal mask lengths rise or fall steadily: they fall in the last group, and in each other group
    they end as the next one begins.
    """
    N_TILES, N_QUERIES, _N_KEYS, N_HEADS, _HEADS_PER_KV, GROUP = sizes
    index = _tile_index(turn)
    n_tiles = gl.cdiv(N_QUERIES, ROWS_PER_TILE)
    n_heads = N_TILES // n_tiles  # of all batch elements
    group = index // (n_tiles * GROUP)
    index -= group * n_tiles * GROUP
    in_group = min(GROUP, n_heads - group * GROUP)
    head = group * GROUP + index % in_group
    tile = index // in_group
    falls = (gl.cdiv(n_heads, GROUP) - 1 - group) % 2 == 0
    tile = gl.where(falls, n_tiles - 1 - tile, tile)
    return tile * ROWS_PER_TILE, head % N_HEADS, head // N_HEADS


@gluon.jit
def _diagonal_offset(N_QUERIES, N_KEYS, BOTTOM_RIGHT: gl.constexpr):
    """Key index minus query index on the diagonal."""
    if BOTTOM_RIGHT:
        return N_KEYS - N_QUERIES
    return 0


@gluon.jit
def _key_tiles(first_row, stop_row, N_KEYS, offset, KEYS: gl.constexpr, is_causal: gl.constexpr):
    """(tiles of keys that some row sees, at least 1; leading ones that every row sees whole)."""
    seen = N_KEYS
    seen_by_all = N_KEYS
    if is_causal:
        seen = min(seen, max(stop_row + offset, 1))
        seen_by_all = min(seen_by_all, max(first_row + offset + 1, 0))
    return gl.cdiv(seen, KEYS), seen_by_all // KEYS


# ---- producer ------------------------------------------------------------------------------------


@gluon.jit
def _produce(
    descriptors,
    barriers,
    buffers,
    sizes,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    is_causal: gl.constexpr,
):
    """Fetches each tile's Q once and its K and V tile by tile, into slots that consumers freed."""
    q_desc, k_desc, v_desc, _o_desc = descriptors
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    q_smem, k_smem, v_smem, _o_smem = buffers
    N_TILES, N_QUERIES, N_KEYS, _N_HEADS, HEADS_PER_KV, _GROUP = sizes
    KEYS: gl.constexpr = k_smem.shape[1]
    D: gl.constexpr = k_smem.shape[2]
    offset = _diagonal_offset(N_QUERIES, N_KEYS, BOTTOM_RIGHT)
    QUERY_BYTES: gl.constexpr = CONSUMERS * ROWS * D * 2
    KEY_BYTES: gl.constexpr = KEYS * D * 2
    copied = 0  # tiles of keys so far
    for turn in range(_n_turns(N_TILES)):
        first_row, head, batch = _tile(turn, sizes, CONSUMERS * ROWS)
        stop_row = min(first_row + CONSUMERS * ROWS, N_QUERIES)
        n_key_tiles, _ = _key_tiles(first_row, stop_row, N_KEYS, offset, KEYS, is_causal)
        kv_head = head // HEADS_PER_KV
        q_slot = turn % 2
        mbarrier.wait(q_empty.index(q_slot), ((turn // 2) & 1) ^ 1)
        mbarrier.expect(q_full.index(q_slot), QUERY_BYTES)
        for c in gl.static_range(CONSUMERS):
            row = first_row + c * ROWS
            q_tile = q_smem.index(q_slot * CONSUMERS + c)
            tma.async_copy_global_to_shared(
                q_desc, [batch, head, row, 0], q_full.index(q_slot), q_tile
            )
        for j in range(n_key_tiles):
            first_key = (n_key_tiles - 1 - j) * KEYS
            slot = copied % STAGES
            phase = (copied // STAGES) & 1
            mbarrier.wait(k_empty.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), KEY_BYTES)
            tma.async_copy_global_to_shared(
                k_desc, [batch, kv_head, first_key, 0], k_full.index(slot), k_smem.index(slot)
            )
            mbarrier.wait(v_empty.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), KEY_BYTES)
            tma.async_copy_global_to_shared(
                v_desc, [batch, kv_head, first_key, 0], v_full.index(slot), v_smem.index(slot)
            )
            copied += 1


# ---- consumer ------------------------------------------------------------------------------------


@gluon.jit
def _take_turn(CONSUMER: gl.constexpr):
    """Waits until the previous consumer has issued its products.

    Consumers take turns with the tensor cores, so that while one multiplies another computes
    exponentials.
    """
    named_barrier_sync(CONSUMER, 256)


@gluon.jit
def _pass_turn(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Lets the next consumer issue its products."""
    named_barrier_arrive((CONSUMER + 1) % CONSUMERS, 256)


@gluon.jit
def _hide(s, first_row, first_key, N_KEYS, offset, NEGATIVE: gl.constexpr, is_causal: gl.constexpr):
    """Scores of keys that a row does not see become those that exp2 maps to 0."""
    LAYOUT: gl.constexpr = s.type.layout
    keys = gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT))
    last = gl.full([s.shape[0]], N_KEYS - 1 - first_key, gl.int32, gl.SliceLayout(1, LAYOUT))
    if is_causal:
        rows = gl.arange(0, s.shape[0], gl.SliceLayout(1, LAYOUT))
        last = gl.minimum(last, rows + (first_row + offset - first_key))
    seen = gl.expand_dims(keys, 0) <= gl.expand_dims(last, 1)
    return gl.where(seen, s, float("inf") if NEGATIVE else -float("inf"))


@gluon.jit
def _largest(s, scale_log2, NEGATIVE: gl.constexpr):
    """Row maxima of s · scale_log2; the scale's sign says which of the scores those are."""
    return (gl.min(s, 1) if NEGATIVE else gl.max(s, 1)) * scale_log2


@gluon.jit
def _shift(row_max, BLIND_ROWS: gl.constexpr):
    """``row_max``, but 0 where a row has seen no key yet, because -inf - -inf is NaN."""
    if BLIND_ROWS:
        return gl.where(row_max == -float("inf"), 0.0, row_max)
    return row_max


@gluon.jit
def _step(
    q_tile,
    barriers,
    buffers,
    taken,  # tiles of keys before this one, over all rows of this program
    first_row,
    first_key,
    N_KEYS,
    offset,
    scale_log2,
    acc,  # (ROWS, D) fp32
    p,  # (ROWS, KEYS), P of the tile before
    row_max,  # (ROWS,) fp32, in units of log2
    row_sum,  # (ROWS,) fp32
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    NEGATIVE: gl.constexpr,
    BLIND_ROWS: gl.constexpr,
    is_causal: gl.constexpr,
    MASKED: gl.constexpr,
    SCORES: gl.constexpr,
):
    """Q·Kᵀ of this tile and P·V of the one before, and the softmax of this one meanwhile."""
    _q_full, _q_empty, k_full, k_empty, v_full, v_empty = barriers
    _q_smem, k_smem, v_smem, _o_smem = buffers
    KEYS: gl.constexpr = k_smem.shape[1]
    slot = taken % STAGES
    phase = (taken // STAGES) & 1
    before = (taken - 1) % STAGES
    phase_before = ((taken - 1) // STAGES) & 1

    mbarrier.wait(k_full.index(slot), phase)
    _take_turn(CONSUMER)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    s = warpgroup_mma(
        q_tile, k_smem.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    mbarrier.wait(v_full.index(before), phase_before)
    acc = warpgroup_mma(p, v_smem.index(before), acc, is_async=True)
    _pass_turn(CONSUMER, CONSUMERS)

    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_empty.index(slot), count=1)
    if MASKED:
        s = _hide(s, first_row, first_key, N_KEYS, offset, NEGATIVE, is_causal)
    new_max = gl.maximum(row_max, _largest(s, scale_log2, NEGATIVE))
    shift = _shift(new_max, BLIND_ROWS and MASKED)
    exponentials = exp2(s * scale_log2 - gl.expand_dims(shift, 1))
    correction = exp2(row_max - shift)
    row_sum = row_sum * correction + gl.sum(exponentials, 1)

    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(before), count=1)
    OUTPUT: gl.constexpr = acc.type.layout
    acc *= gl.expand_dims(gl.convert_layout(correction, gl.SliceLayout(1, OUTPUT)), 1)
    p = gl.convert_layout(exponentials.to(p.dtype), p.type.layout)
    return acc, p, new_max, row_sum


@gluon.jit
def _consume(
    descriptors,
    barriers,
    buffers,
    sizes,
    L_ptr,
    scale_log2,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    NEGATIVE: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    is_causal: gl.constexpr,
):
    """Output and logsumexp of 64 rows of each tile."""
    _q_desc, _k_desc, _v_desc, o_desc = descriptors
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    q_smem, k_smem, v_smem, o_smem = buffers
    N_TILES, N_QUERIES, N_KEYS, N_HEADS, _HEADS_PER_KV, _GROUP = sizes
    offset = _diagonal_offset(N_QUERIES, N_KEYS, BOTTOM_RIGHT)
    KEYS: gl.constexpr = k_smem.shape[1]
    D: gl.constexpr = k_smem.shape[2]
    DTYPE: gl.constexpr = k_smem.dtype
    WARPS: gl.constexpr = [gl.num_warps(), 1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, D, 16])
    PROBABILITIES: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUTPUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUTPUT)
    o_tile = o_smem.index(CONSUMER)
    taken = 0
    if CONSUMER == CONSUMERS - 1:
        _pass_turn(CONSUMER, CONSUMERS)  # the first turn is the first consumer's

    for turn in range(_n_turns(N_TILES)):
        tile_row, head, batch = _tile(turn, sizes, CONSUMERS * ROWS)
        first_row = tile_row + CONSUMER * ROWS
        tile_stop = min(tile_row + CONSUMERS * ROWS, N_QUERIES)
        n_copied, _ = _key_tiles(tile_row, tile_stop, N_KEYS, offset, KEYS, is_causal)
        stop_row = min(first_row + ROWS, N_QUERIES)
        n_key_tiles, n_whole = _key_tiles(first_row, stop_row, N_KEYS, offset, KEYS, is_causal)
        n_key_tiles = gl.where(first_row < N_QUERIES, n_key_tiles, 1)

        # Tiles that only later rows see, or that no row here sees because there is none.
        for _ in range(n_copied - n_key_tiles):
            slot = taken % STAGES
            phase = (taken // STAGES) & 1
            mbarrier.wait(k_full.index(slot), phase)
            mbarrier.arrive(k_empty.index(slot), count=1)
            mbarrier.wait(v_full.index(slot), phase)
            mbarrier.arrive(v_empty.index(slot), count=1)
            taken += 1
            _take_turn(CONSUMER)
            _pass_turn(CONSUMER, CONSUMERS)

        # The last visible tile: nothing to multiply meanwhile, no maximum yet.
        slot = taken % STAGES
        q_slot = turn % 2
        q_tile = q_smem.index(q_slot * CONSUMERS + CONSUMER)
        mbarrier.wait(q_full.index(q_slot), (turn // 2) & 1)
        mbarrier.wait(k_full.index(slot), (taken // STAGES) & 1)
        _take_turn(CONSUMER)
        nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
        s = warpgroup_mma(
            q_tile, k_smem.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True
        )
        _pass_turn(CONSUMER, CONSUMERS)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_empty.index(slot), count=1)
        first_key = (n_key_tiles - 1) * KEYS
        if is_causal or first_key + KEYS > N_KEYS:
            s = _hide(s, first_row, first_key, N_KEYS, offset, NEGATIVE, is_causal)
        row_max = _largest(s, scale_log2, NEGATIVE)
        shift = _shift(row_max, BOTTOM_RIGHT)
        exponentials = exp2(s * scale_log2 - gl.expand_dims(shift, 1))
        row_sum = gl.sum(exponentials, 1)
        p = gl.convert_layout(exponentials.to(DTYPE), PROBABILITIES)
        acc = gl.zeros([ROWS, D], gl.float32, OUTPUT)

        # A diagonal that is not aligned to tiles crosses two of them.
        start = 1
        if BOTTOM_RIGHT:
            for j in range(1, n_key_tiles - n_whole):
                acc, p, row_max, row_sum = _step(
                    q_tile, barriers, buffers, taken + j, first_row, first_key - j * KEYS,
                    N_KEYS, offset, scale_log2, acc, p, row_max, row_sum, CONSUMER, CONSUMERS,
                    STAGES, NEGATIVE, BOTTOM_RIGHT, is_causal, True, SCORES,
                )  # fmt: skip
            start = max(1, n_key_tiles - n_whole)
        for j in range(start, n_key_tiles):
            acc, p, row_max, row_sum = _step(
                q_tile, barriers, buffers, taken + j, first_row, first_key - j * KEYS,
                N_KEYS, offset, scale_log2, acc, p, row_max, row_sum, CONSUMER, CONSUMERS,
                STAGES, NEGATIVE, BOTTOM_RIGHT, is_causal, False, SCORES,
            )  # fmt: skip
        taken += n_key_tiles
        mbarrier.arrive(q_empty.index(q_slot), count=1)

        slot = (taken - 1) % STAGES
        mbarrier.wait(v_full.index(slot), ((taken - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, v_smem.index(slot), acc, is_async=True)
        # A row that saw no key has sum 0: output 0 / 1, logsumexp -inf + log2(1).
        row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
        logsumexp = (row_max + gl.log2(row_sum)) * LN_2
        normaliser = 1.0 / gl.convert_layout(row_sum, OUTPUT_ROWS)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(slot), count=1)

        tma.store_wait(0)  # for the output of the tile before to have left
        o_tile.store((acc * gl.expand_dims(normaliser, 1)).to(DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [batch, head, first_row, 0], o_tile)
        rows = first_row + gl.arange(0, ROWS, SCORE_ROWS)
        l_row = (batch * N_HEADS + head).to(gl.int64) * N_QUERIES
        gl.store(L_ptr + l_row + rows, logsumexp, mask=rows < N_QUERIES)
    tma.store_wait(0)
    if CONSUMER == 0:
        _take_turn(CONSUMER)  # the turn that nobody took is left at the barrier


# ---- kernel --------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=[
        "N_TILES",
        "N_QUERIES",
        "N_KEYS",
        "N_HEADS",
        "HEADS_PER_KV",
        "GROUP",
        "scale_log2",
    ]
)
def hopper_forward_kernel(
    q_desc,  # (B, H, N_q, D), tiles of (ROWS, D)
    k_desc,  # (B, G, N_k, D), tiles of (KEYS, D)
    v_desc,
    o_desc,
    L_ptr,  # (B, H, N_q) fp32, contiguous
    N_TILES,
    N_QUERIES,
    N_KEYS,
    N_HEADS,
    HEADS_PER_KV,
    GROUP,
    scale_log2,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    NEGATIVE: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    is_causal: gl.constexpr,
):
    """Tiles of CONSUMERS · 64 rows, ``N_TILES`` of them over all heads, by any number of programs.

    ``GROUP``: how many heads are worked on at a time, at least 1.
    ``scale_log2``: scale · log2(e), not 0; ``NEGATIVE`` is its sign.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    KEYS: gl.constexpr = k_desc.block_shape[2]
    D: gl.constexpr = k_desc.block_shape[3]
    Q_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], DTYPE)
    KV_SMEM: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], DTYPE)
    q_smem = gl.allocate_shared_memory(DTYPE, [2 * CONSUMERS, ROWS, D], Q_SMEM)
    k_smem = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, D], KV_SMEM)
    v_smem = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, D], KV_SMEM)
    o_smem = gl.allocate_shared_memory(DTYPE, [CONSUMERS, ROWS, D], Q_SMEM)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    descriptors = (q_desc, k_desc, v_desc, o_desc)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    buffers = (q_smem, k_smem, v_smem, o_smem)
    sizes = (N_TILES, N_QUERIES, N_KEYS, N_HEADS, HEADS_PER_KV, GROUP)

    # Tuples with compile-time members lose those unless they are written in place.
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_produce, (descriptors, barriers, buffers, sizes,
                        CONSUMERS, STAGES, BOTTOM_RIGHT, is_causal)),
            (_consume, (descriptors, barriers, buffers, sizes, L_ptr, scale_log2, 0, CONSUMERS,
                        STAGES, NEGATIVE, BOTTOM_RIGHT, is_causal)),
            (_consume, (descriptors, barriers, buffers, sizes, L_ptr, scale_log2, 1, CONSUMERS,
                        STAGES, NEGATIVE, BOTTOM_RIGHT, is_causal)),
        ], [4, 4], [REGISTERS, REGISTERS])
    else:
        gl.warp_specialize([
            (_produce, (descriptors, barriers, buffers, sizes,
                        CONSUMERS, STAGES, BOTTOM_RIGHT, is_causal)),
            (_consume, (descriptors, barriers, buffers, sizes, L_ptr, scale_log2, 0, CONSUMERS,
                        STAGES, NEGATIVE, BOTTOM_RIGHT, is_causal)),
            (_consume, (descriptors, barriers, buffers, sizes, L_ptr, scale_log2, 1, CONSUMERS,
                        STAGES, NEGATIVE, BOTTOM_RIGHT, is_causal)),
            (_consume, (descriptors, barriers, buffers, sizes, L_ptr, scale_log2, 2, CONSUMERS,
                        STAGES, NEGATIVE, BOTTOM_RIGHT, is_causal)),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])
    # fmt: on


# ---- launcher ------------------------------------------------------------------------------------


def hopper_forward(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Launches the forward kernel on inputs that ``eligibility`` has not refused.

    Args:
        query: (B, H, N_q, D), fp16 or bf16, D 64 or 128.
        key: (B, G, N_k, D).
        value: (B, G, N_k, D).
        options: mask and scale.

    Returns:
        Output (B, H, N_q, D) in the inputs' dtype and logsumexp (B, H, N_q) in fp32.
    """
    return hopper_forward_call(query, key, value, options)(query, key, value)


class HopperForwardCall:
    """The forward kernel on one kind of input: what its launch needs, found out once."""

    def __init__(self, launch: Launch, maps: Sequence[TileMap], out: Tensor, lse: Tensor) -> None:
        self.launch = launch
        self.maps = tuple(maps)
        self.out = (out.shape, out.stride())
        self.logsumexp = (lse.shape, lse.stride())

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Output and logsumexp."""
        out = query.new_empty_strided(*self.out)
        logsumexp = query.new_empty_strided(*self.logsumexp, dtype=torch.float32)
        q_map, k_map, v_map, o_map = self.maps
        tiles = (q_map.of(query), k_map.of(key), v_map.of(value), o_map.of(out))
        with on_device_of(query):
            self.launch(*tiles, logsumexp)
        return out, logsumexp


def hopper_forward_call(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> HopperForwardCall:
    """The call for inputs of these shapes, strides and types."""
    shapes, strides = (query.shape, key.shape), (query.stride(), key.stride(), value.stride())
    return _forward_call(query.device, query.dtype, shapes, strides, options)


@functools.lru_cache(maxsize=4096)
def _forward_call(
    device: torch.device,
    dtype: torch.dtype,
    shapes: tuple[torch.Size, torch.Size],
    strides: tuple[Strides, ...],
    options: AttentionOptions,
) -> HopperForwardCall:
    q_shape, k_shape = shapes
    (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, _) = shapes
    like = torch.empty_strided(q_shape, strides[0], dtype=dtype, device="meta")
    out, lse = empty_output(like, head_dim), empty_row_statistic(like)
    config = forward_config(head_dim, options.causal != "none", n_queries)
    programs = multiprocessors(device)
    tiles_of_head = -(-n_queries // config.queries)
    n_tiles = tiles_of_head * batch * heads
    group = max(1, -(-config.rounds * programs // tiles_of_head))
    numbers = [
        *(n_tiles, n_queries, n_keys, heads, heads // kv_heads, group),
        options.scale * LOG2_E,
    ]
    constants = {
        "CONSUMERS": config.consumers,
        "STAGES": config.stages,
        "REGISTERS": config.registers,
        "NEGATIVE": options.scale < 0,
        "BOTTOM_RIGHT": diagonal_offset(n_queries, n_keys, options) != 0,
        "is_causal": options.causal != "none",
    }
    warps = Tiles(config.queries, config.keys, 4, 1)
    launch = Launch(hopper_forward_kernel, min(n_tiles, programs), numbers, constants, warps)
    query_block, key_block = [1, 1, ROWS.value, head_dim], [1, 1, config.keys, head_dim]
    q_map, o_map = (tile_map(q_shape, x, query_block, dtype) for x in (strides[0], out.stride()))
    k_map, v_map = (tile_map(k_shape, x, key_block, dtype) for x in strides[1:])
    return HopperForwardCall(launch, (q_map, k_map, v_map, o_map), out, lse)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU: how many programs of these kernels run at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count
