# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""Which tiles a program of the Hopper kernels computes, of a dense or of a packed batch.

Of a dense batch the host knows everything. Where the sequences of a packed batch start is known on
the device alone: :func:`packed_tiles_kernel`, which runs before the others, writes a table with one
entry of ``FIELDS`` int32 for each tile, longest sequences first, and the number of tiles before it.

The TMA sees a packed (T, H, D) tensor with two dimensions more, of which one also counts tokens.
Token i of a sequence of length n that ends before token e is at (N, e, h, N - n + i), where N is
PACKED_END: what follows the sequence's end is outside of the tensor, so that it is read as zeros
and not written, whatever the next sequence holds. The first dimension's stride is 2³⁴ elements less
one token, so that its index N takes N tokens away: 2⁶⁴ elements more are none, as addresses have 64
bits. (Triton's ``tools.ragged_tma`` does the same.)

Legend: B sequences, T tokens of all of them, H query heads, D head_dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn_triton.hopper.support import tma_load, tma_store

PACKED_END = 2**30  # where the descriptor of a packed tensor ends
END = gl.constexpr(PACKED_END)
FIELDS = gl.constexpr(8)  # of an entry
SEQUENCES = 64  # whose tiles one program of packed_tiles_kernel writes
# Of the backward pass in rings: how many of the longest run at the same time, and how many tiles of
# queries lie from one program's first to the next one's. Were it 1, a program would wait for what
# the next one has just added.
RINGS = gl.constexpr(2)
STRIDE = gl.constexpr(2)
# Each tile of queries has 64 KB of Q, dO and the sum of dQ. Two heads of more tiles than this, read
# together, do not fit into the L2 cache beside their keys.
MOST_IN_L2 = gl.constexpr(192)


def most_tiles(tokens: int, sequences: int, rows: int) -> int:
    """An upper bound of how many tiles of ``rows`` tokens the sequences of a packed batch have.

    It counts the tokens that no sequence owns as one sequence more. It does not depend on how long
    the longest sequence is, which callers may understate.
    """
    return tokens // rows + sequences + 1


@triton.jit
def _lengths(starts_ptr, sequences, N_SEQUENCES, N_TOKENS):
    """(lengths, ends) of sequences. The last one has the tokens that no sequence owns."""
    starts = tl.load(starts_ptr + sequences, mask=sequences <= N_SEQUENCES, other=N_TOKENS)
    within = sequences < N_SEQUENCES
    ends = tl.load(starts_ptr + sequences + 1, mask=within, other=N_TOKENS)
    return ends - starts, ends


@triton.jit
def _rows_and_seen(n_queries, n_keys, sequences, N_SEQUENCES, of_keys, ROWS, KEY_ROWS):
    """(tiles, how much a row of them sees or is seen by) of sequences.

    A sequence with keys alone has a tile of queries without rows, whose statistics say so.
    """
    tiles = tl.where(n_queries == 0, tl.minimum(n_keys, 1), tl.cdiv(n_queries, ROWS))
    tiles = tl.where(of_keys, tl.cdiv(n_keys, KEY_ROWS), tiles)
    return tiles, tl.where(sequences < N_SEQUENCES, tl.where(of_keys, n_queries, n_keys), 0)


@triton.jit
def _heads_and_groups(tiles, N_HEADS, GROUP):
    """(heads in a group, groups) of sequences with so many tiles."""
    heads = tl.minimum(tl.maximum(tl.cdiv(GROUP, tl.maximum(tiles, 1)), 1), N_HEADS)
    return heads, tl.where(tiles > 0, tl.cdiv(N_HEADS, heads), 0)


@triton.jit(
    do_not_specialize=["N_SEQUENCES", "N_QUERIES", "N_KEYS", "N_HEADS", "GROUP", "KEY_TABLE"],
    do_not_specialize_on_alignment=["starts_q_ptr", "starts_k_ptr"],
)
def packed_tiles_kernel(
    starts_q_ptr,  # (B + 1,) int32
    starts_k_ptr,
    tiles_ptr,  # (1 + tiles, FIELDS) int32 of queries; then of keys
    N_SEQUENCES,
    N_QUERIES,
    N_KEYS,
    N_HEADS,
    GROUP,
    KEY_TABLE,
    ROWS: tl.constexpr,
    KEY_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Writes the table of tiles of ROWS queries, and from element KEY_TABLE on of KEY_ROWS keys.

    Grid: (B + 1) / SEQUENCES for the first, and twice as much for both.

    Sequences come in the order of how many keys a tile of queries may see, or queries a tile of
    keys, most first. There is no sort: each program looks at all sequences, and counts the tiles of
    those that come before its own. ``GROUP``: how many tiles of one sequence are computed at the
    same time; the number of heads in a group is this number divided by the sequence's tiles.

    The tokens that no sequence owns are one more sequence, number B, in which queries see no keys
    and keys are seen by no queries. Its keys end at -1 in the table of queries.
    """
    n_programs = tl.cdiv(N_SEQUENCES + 1, SEQUENCES)
    of_keys = tl.program_id(0) >= n_programs
    own = (tl.program_id(0) % n_programs) * SEQUENCES + tl.arange(0, SEQUENCES)
    n_queries, end_q = _lengths(starts_q_ptr, own, N_SEQUENCES, N_QUERIES)
    n_keys, end_k = _lengths(starts_k_ptr, own, N_SEQUENCES, N_KEYS)
    tiles, own_seen = _rows_and_seen(n_queries, n_keys, own, N_SEQUENCES, of_keys, ROWS, KEY_ROWS)
    first_tile = tl.zeros([SEQUENCES], tl.int32)
    first_group = tl.zeros([SEQUENCES], tl.int32)
    all_tiles = 0
    all_groups = 0
    for first in range(0, N_SEQUENCES + 1, SEQUENCES):
        other = first + tl.arange(0, SEQUENCES)
        other_queries, _ = _lengths(starts_q_ptr, other, N_SEQUENCES, N_QUERIES)
        other_keys, _ = _lengths(starts_k_ptr, other, N_SEQUENCES, N_KEYS)
        other_tiles, seen = _rows_and_seen(
            other_queries, other_keys, other, N_SEQUENCES, of_keys, ROWS, KEY_ROWS
        )
        _, groups = _heads_and_groups(other_tiles, N_HEADS, GROUP)
        earlier = (seen[None, :] == own_seen[:, None]) & (other[None, :] < own[:, None])
        earlier = earlier | (seen[None, :] > own_seen[:, None])
        first_tile += tl.sum(tl.where(earlier, other_tiles[None, :], 0), 1)
        first_group += tl.sum(tl.where(earlier, groups[None, :], 0), 1)
        all_tiles += tl.sum(other_tiles, 0)
        all_groups += tl.sum(groups, 0)
    if of_keys:
        tiles_ptr += KEY_TABLE
    if tl.program_id(0) % n_programs == 0:
        tl.store(tiles_ptr, all_tiles)

    owned = own < N_SEQUENCES
    end_q = tl.where(owned | (not of_keys), end_q, end_q - n_queries)
    end_k = tl.where(owned | of_keys, end_k, -1)
    n_queries = tl.where(owned | (not of_keys), n_queries, 0)
    n_keys = tl.where(owned | of_keys, n_keys, 0)
    heads, _ = _heads_and_groups(tiles, N_HEADS, GROUP)
    for tile in range(tl.max(tiles, 0)):
        entry = tiles_ptr + (1 + first_tile + tile) * FIELDS
        present = tile < tiles
        tl.store(entry, first_tile, mask=present)
        tl.store(entry + 1, end_q, mask=present)
        tl.store(entry + 2, n_queries, mask=present)
        tl.store(entry + 3, end_k, mask=present)
        tl.store(entry + 4, n_keys, mask=present)
        tl.store(entry + 5, heads, mask=present)
        tl.store(entry + 6, all_groups - 1 - first_group, mask=present)
        tl.store(entry + 7, own, mask=present)


@gluon.jit
def entry_of_tile(tiles_ptr, tile):
    """One tile of a packed batch, as :func:`packed_tiles_kernel` wrote it.

    (first tile of its sequence, end of the sequence's queries, their number, end of its keys, their
    number, heads computed at a time, groups of heads from the sequence's first one to the last of
    all sequences, the sequence).
    """
    entry = tiles_ptr + (1 + tile) * FIELDS
    fields = ()
    for i in gl.static_range(FIELDS):
        fields += (gl.load(entry + i),)
    return fields


@gluon.jit
def load_tile(descriptor, at, head, row, barrier, tile, PACKED: gl.constexpr, COLUMN=0):
    """A tile from global to shared memory, from a row of a batch element or sequence.

    ``at``: (batch element, 0), or of a packed sequence (its end, END less its length), as the
    module's docstring describes.
    """
    if PACKED:
        tma_load(descriptor, [END, at[0], head, at[1] + row, COLUMN], barrier, tile)
    else:
        tma_load(descriptor, [at[0], head, row, COLUMN], barrier, tile)


@gluon.jit
def store_tile(descriptor, at, head, row, tile, PACKED: gl.constexpr, COLUMN=0):
    """A tile from shared to global memory."""
    if PACKED:
        tma_store(descriptor, [END, at[0], head, at[1] + row, COLUMN], tile)
    else:
        tma_store(descriptor, [at[0], head, row, COLUMN], tile)


@gluon.jit
def first_element(strides, at, head, n_rows, row, PACKED: gl.constexpr):
    """Where a sequence's ``row`` begins in memory, in elements, if there is no descriptor.

    ``strides``: of batch, head and row in units of 8. ``at``: as for :func:`load_tile`.
    """
    if PACKED:
        outer = gl.cast(at[0] - n_rows, gl.int64) * strides[2]
    else:
        outer = gl.cast(at[0], gl.int64) * strides[0]
    return (outer + gl.cast(head, gl.int64) * strides[1] + gl.cast(row, gl.int64) * strides[2]) * 8


# ---- forward: persistent programs ----------------------------------------------------------------


@gluon.jit
def tile_index(round_index):
    """Which tile this program computes in this round; every other round runs backwards.

    In the order of :func:`tile_at`, neighbours are of almost equal length. Programs alternate
    between the longer and the shorter one, so that each does about the same amount of work.
    """
    program = gl.program_id(0)
    backwards = gl.num_programs(0) - 1 - program
    return round_index * gl.num_programs(0) + gl.where(round_index % 2 == 0, program, backwards)


@gluon.jit
def tile_at(index, work, ROWS_PER_TILE: gl.constexpr, OPTIONS: gl.constexpr):
    """A tile of queries: (first row, head, rows, band, ``at`` of the rows, ``at`` of the keys).

    ``work``: (sizes of the problem, band, table of a packed batch). Rows and band are those of the
    tile's sequence; ``at`` is an argument of :func:`load_tile`.

    Groups of heads come one after another. Within a group, rows are outermost, so that under a
    causal mask lengths rise or fall steadily: they fall in the last group, and in each other group
    they end as the next one begins.
    """
    sizes, band, tiles_ptr = work
    N_TILES, n_queries, N_HEADS, _HEADS_PER_KV, GROUP = sizes
    if OPTIONS.packed:  # sequence after sequence, each in groups of heads
        _N_KEYS, offset, width = band
        first_tile, end_q, n_queries, end_k, n_keys, group_size, groups_after, _ = entry_of_tile(
            tiles_ptr, index // N_HEADS
        )
        index -= first_tile * N_HEADS
        n_tiles = max(gl.cdiv(n_queries, ROWS_PER_TILE), 1)
        group = index // (n_tiles * group_size)
        index -= group * n_tiles * group_size
        in_group = min(group_size, N_HEADS - group * group_size)
        head = group * group_size + index % in_group
        tile = index // in_group
        tile = gl.where((groups_after - group) % 2 == 0, n_tiles - 1 - tile, tile)
        q_at, k_at = (end_q, END - n_queries), (end_k, END - n_keys)
        if OPTIONS.bottom_right:
            offset = offset + n_keys - n_queries
        first_row, band = tile * ROWS_PER_TILE, (n_keys, offset, width)
    else:  # groups of heads of all batch elements
        n_tiles = gl.cdiv(n_queries, ROWS_PER_TILE)
        n_heads = N_TILES // n_tiles
        group = index // (n_tiles * GROUP)
        index -= group * n_tiles * GROUP
        in_group = min(GROUP, n_heads - group * GROUP)
        head = group * GROUP + index % in_group
        tile = index // in_group
        falls = (gl.cdiv(n_heads, GROUP) - 1 - group) % 2 == 0
        tile = gl.where(falls, n_tiles - 1 - tile, tile)
        first_row, batch = tile * ROWS_PER_TILE, head // N_HEADS
        head = head % N_HEADS
        q_at, k_at = (batch, 0), (batch, 0)
    return first_row, head, n_queries, band, q_at, k_at


@gluon.jit
def key_tiles(first_row, stop_row, band, KEYS: gl.constexpr, OPTIONS: gl.constexpr):
    """Tiles of keys that at least one of these rows sees: (first, last + 1), at least one tile."""
    N_KEYS, offset, width = band
    stop = N_KEYS
    if OPTIONS.is_causal:
        stop = min(stop, max(stop_row + offset, 1))
    stop = gl.cdiv(stop, KEYS)
    if OPTIONS.packed:  # where a sequence may be empty
        stop = max(stop, 1)
    start = 0
    if OPTIONS.has_left:
        start = min(max(first_row + offset - width, 0) // KEYS, stop - 1)
    return start, stop


@gluon.jit
def whole_tiles(first_row, stop_row, band, KEYS: gl.constexpr, OPTIONS: gl.constexpr):
    """Tiles of keys of which each of these rows sees every key: (first, last + 1)."""
    N_KEYS, offset, width = band
    stop = N_KEYS
    if OPTIONS.is_causal:
        stop = min(stop, max(first_row + offset + 1, 0))
    start = 0
    if OPTIONS.has_left:
        start = gl.cdiv(max(stop_row - 1 + offset - width, 0), KEYS)
    return start, stop // KEYS


# ---- backward: tiles of keys, and walks over queries ---------------------------------------------


@gluon.jit
def _tile_of_heads_together(
    index, n_tiles, n_heads, band, KEYS: gl.constexpr, OPTIONS: gl.constexpr
):  # fmt: skip
    """(head, tile of keys, 1 if its walk goes backwards, else 0), where ``at_once`` says so.

    Programs take one head after another, and of a head the first tile of keys first, which most
    queries see; but the last heads together, their shortest tiles last, when other programs end:
    3 %. If ``ordered`` they take a head's last tile first, and as many heads together as have steps
    for all programs. With the longest tiles last, some would end late: 2 to 5 %. So the last heads
    have the other order, and their walks go backwards: all begin at the last tile of queries, one
    after the other.
    """
    most_steps = n_tiles
    if OPTIONS.has_left:
        most_steps = min(n_tiles, gl.cdiv(band + KEYS, OPTIONS.padding) + 1)
    together = min(max(OPTIONS.at_once // most_steps, 1), n_heads)
    if OPTIONS.ordered and OPTIONS.has_left:  # in groups of about one size: 2 %
        together = gl.cdiv(n_heads, gl.cdiv(n_heads, together))
    if OPTIONS.packed:  # those of a sequence, if all its tiles run at once
        together = gl.where(together == n_heads, n_heads, 1)
    last = n_heads - together
    is_last = index >= last * n_tiles
    size = 1
    if OPTIONS.ordered:  # programs that wait for one another begin further apart
        size = together
    first_head = gl.where(is_last, last, index // (n_tiles * size) * size)
    size = gl.where(is_last, together, min(size, last - first_head))
    index -= first_head * n_tiles
    tile = index // size
    backwards = 0
    if both_ways(OPTIONS):
        backwards = gl.where(is_last & (last > 0), 1, 0)
    if OPTIONS.ordered:
        tile = gl.where(backwards == 1, tile, n_tiles - 1 - tile)
    return first_head + index % size, tile, backwards


@gluon.jit
def _tile_in_rings(
    index, n_tiles, n_heads, lengths, KEYS: gl.constexpr, OPTIONS: gl.constexpr
):  # fmt: skip
    """(head, tile of keys, programs of its ring): see :func:`ring_of`.

    First the first ring of as many heads as fill the GPU, then their next.
    """
    n_queries, n_keys = lengths
    n_query_tiles = gl.cdiv(n_queries, OPTIONS.padding)
    ring = ring_of(n_keys, n_query_tiles, KEYS, OPTIONS)
    together = min(OPTIONS.ring * RINGS // ring, n_heads)
    together = gl.where(n_query_tiles > MOST_IN_L2, 1, together)
    first_head = index // (n_tiles * together) * together
    size = min(together, n_heads - first_head)
    index -= first_head * n_tiles
    first_tile = index // (ring * size) * ring
    index -= first_tile * size
    members = min(ring, n_tiles - first_tile)  # of the last one fewer
    return first_head + index // members, first_tile + index % members, ring


@gluon.jit
def key_tile_at(index, n_tiles_of_all, work, KEYS: gl.constexpr, OPTIONS: gl.constexpr):
    """A tile of KEYS keys: (first key, key head, sequence, order, queries, keys, end_q, end_k).

    All are at least 0. ``order``: 1 if its :func:`walk` goes backwards, or how many programs form
    its ring, else 0. Queries and keys are those of the tile's sequence, a batch element if the
    batch is dense; ``end_q`` and ``end_k``: where those of a packed sequence end, else 0.
    """
    sizes, tiles_ptr, band = work
    N_QUERIES, N_KEYS, N_KV_HEADS, _HEADS_PER_KV, _offset = sizes
    end_q, end_k = 0, 0
    if OPTIONS.packed:
        first_tile, end_q, n_queries, end_k, n_keys, _, _, sequence = entry_of_tile(
            tiles_ptr, index // N_KV_HEADS
        )
        n_tiles = max(gl.cdiv(n_keys, KEYS), 1)
        index -= first_tile * N_KV_HEADS
        n_heads = N_KV_HEADS
    else:
        n_queries, n_keys = N_QUERIES, N_KEYS
        n_tiles = gl.cdiv(n_keys, KEYS)
        n_heads = n_tiles_of_all // n_tiles
    order = 0
    if OPTIONS.at_once > 0:
        head, tile, order = _tile_of_heads_together(index, n_tiles, n_heads, band, KEYS, OPTIONS)
    elif OPTIONS.ring > 0:
        head, tile, order = _tile_in_rings(
            index, n_tiles, n_heads, (n_queries, n_keys), KEYS, OPTIONS
        )
    else:
        head = index // n_tiles
        tile = index % n_tiles
        if OPTIONS.ordered:
            tile = n_tiles - 1 - tile
    if not OPTIONS.packed:
        sequence = head // N_KV_HEADS
        head = head % N_KV_HEADS
    return tile * KEYS, head, sequence, order, n_queries, n_keys, end_q, end_k


@gluon.jit
def place_of_keys(tile, PACKED: gl.constexpr):
    """``at`` of the keys, for :func:`load_tile`, of a tile that :func:`key_tile_at` returned."""
    _, _, sequence, _, _, n_keys, _, end_k = tile
    if PACKED:
        return end_k, END - n_keys
    return sequence, 0


@gluon.constexpr_function
def both_ways(options):
    """Whether there are walks that go backwards, see :func:`key_tile_at`."""
    return options.ordered and options.at_once > 0 and not options.has_left


@gluon.jit
def walk(
    first_key, offset, band, n_tiles, KEYS: gl.constexpr, QUERIES: gl.constexpr,
    OPTIONS: gl.constexpr, order,
):  # fmt: skip
    """Which of a head's tiles of queries see some key here: (first, last, wrap, count, ahead).

    The count is at least 1. ``wrap`` is the tile that comes after ``last``. Without a mask programs
    start at different tiles, so that they do not all add to the same part of dQ: ``wrap`` is then
    tile 0. Otherwise it is ``first``, of the next head. ``order``: see :func:`key_tile_at`.
    ``ahead`` is 1, or -1 if the walk goes backwards.
    """
    first = 0
    last = n_tiles - 1
    if OPTIONS.is_causal:
        first = min(max(first_key - offset, 0) // QUERIES, last)
    if OPTIONS.has_left:
        last = max(min((first_key + KEYS - 1 - offset + band) // QUERIES, last), first)
    if both_ways(OPTIONS):
        begin = gl.where(order == 1, last, first)
        end = gl.where(order == 1, first, last)
        return begin, end, begin, last - first + 1, gl.where(order == 1, -1, 1)
    if OPTIONS.is_causal or OPTIONS.has_left:
        return first, last, first, last - first + 1, 1
    if OPTIONS.ring > 0:
        return first_key // KEYS % order * STRIDE, last, 0, n_tiles, 1
    return (first_key // QUERIES) % n_tiles, last, 0, n_tiles, 1


@gluon.jit
def next_query_tile(tile, head, walked):
    """The next tile of queries of a :func:`walk`; after a head's last one, of the next head."""
    first, last, wrap, _, ahead = walked
    tile = gl.where(tile == last, wrap, tile + ahead)
    return tile, gl.where(tile == first, head + 1, head)


@gluon.jit
def place_of_tile(head, tile, tiles):
    """A tile of queries among those of all heads and sequences.

    ``tiles``: as ``backward_common.work_of_tile`` returns them.
    """
    n_tiles, first_tile, _ = tiles
    return first_tile + head * n_tiles + tile


@gluon.jit
def ring_of(n_keys, n_tiles, KEYS: gl.constexpr, OPTIONS: gl.constexpr):
    """How many programs form a ring, which the backward kernel's docstring describes.

    At most ``OPTIONS.ring``, and so few that each begins STRIDE of the ``n_tiles`` tiles of queries
    after the one before. A head has as many rings as it takes, of one size but for the last. In
    rings of one, all programs begin at the first tile; for long sequences, one head after another.
    """
    n = gl.cdiv(max(n_keys, 1), KEYS)
    most = max(min(gl.cdiv(n_tiles, STRIDE), OPTIONS.ring), 1)
    members = gl.cdiv(n, gl.cdiv(n, most))
    # Two of these should almost fill the GPU, or it runs smaller ones.
    in_halves = gl.cdiv(n, gl.cdiv(n, min(most, max(OPTIONS.ring // 2, 1))))
    fills = (2 * members <= OPTIONS.ring) | (8 * members >= 7 * OPTIONS.ring)
    members = gl.where(fills, members, in_halves)
    return gl.where(n_tiles > MOST_IN_L2, 1, members)
