# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
"""The order in which programs add to dQ, where gradients are deterministic.

Each tile of dQ has an order counter: how many programs have added to it. A program adds to the tile
when its predecessors have. Consumers do not look at counters; three warps of the producer have a
task each, so that none of them waits for what another does:

    first   loads, as always
    second  increments the counter of the tile to which consumers have added
    third   waits until the next tile's predecessors have incremented its counter, and lets the
            consumers add

An increment comes when the additions are in memory, which takes a good part of a step, and so does
a look at a counter: one warp for both would hold up the consumers.

    under a mask    predecessors have later keys. Each program begins at its diagonal, the first
                    tile of queries that sees its keys, and they begin at later tiles
    the last heads  predecessors have earlier keys, and the walk goes backwards, from the last tile
                    of queries to the diagonal: see ``schedule._tile_of_heads_together``
    in a ring       see ``schedule.ring_of``; the step in which programs come to the tile decides,
                    after all programs of the head's earlier rings

Predecessors are in tiles of keys that are begun earlier, or in a ring at the same time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn_triton.hopper.schedule import (
    STRIDE,
    both_ways,
    next_query_tile,
    place_of_tile,
)
from flashattn_triton.hopper.support import (
    named_barrier_sync,
    signal_successors,
    wait_for_predecessors,
)

# Hardware barriers, one for each consumer, at which it waits for its turn.
MAY_ADD = gl.constexpr(8)
TAKING_TURNS = gl.constexpr(128 + 32)  # threads


@gluon.jit
def predecessors(
    tile, own, walked, tiles, KEYS: gl.constexpr, QUERIES: gl.constexpr, OPTIONS: gl.constexpr
):
    """How many programs come to a tile of dQ before this one.

    ``own``, ``walked``, ``tiles``: as ``backward_common.work_of_tile`` returns them.
    """
    first_key, _, n_keys, offset, _, _ = own
    n_tiles, _, ring = tiles
    first, _, _, _, ahead = walked
    last_key = n_keys - 1
    if OPTIONS.is_causal:  # the last tile of queries is walked over by all programs
        seen = min(last_key, (tile + 1) * QUERIES - 1 + offset)
        last_key = gl.where(tile == n_tiles - 1, last_key, seen)
    last_tile = max(last_key, 0) // KEYS
    n = last_tile - first_key // KEYS
    if both_ways(OPTIONS):
        n = gl.where(ahead < 0, first_key // KEYS, n)
    if OPTIONS.ring > 0:
        place = first // STRIDE
        in_earlier_rings = first_key // KEYS - place
        last_place = min(ring - 1, last_tile - in_earlier_rings)
        begun = tile // STRIDE
        after_wrap = last_place - place + begun + 1
        n = in_earlier_rings + gl.where(tile < first, after_wrap, min(begun, last_place) - place)
    return n


# ---- producer ------------------------------------------------------------------------------------
#
# Consumers add to a step's tile of dQ in their next step. The producer loads tiles of Q and dO when
# they have given back those of two steps before, and so have added to the tile of the step before
# that.


@gluon.jit
def first_turn(
    program, HEADS_PER_KV, KEYS: gl.constexpr, QUERIES: gl.constexpr, OPTIONS: gl.constexpr
):  # fmt: skip
    """The ``adding`` of a program's first step, for :func:`take_turns`.

    (counter of the tile to which consumers add; that of the tile which comes next, how many
    programs come to it before, the tile and its head). Counters are those of all tiles of dQ.
    """
    own, walked, tiles = program
    tile, head = walked[0], own[1] * HEADS_PER_KV
    before = predecessors(tile, own, walked, tiles, KEYS, QUERIES, OPTIONS)
    counter = place_of_tile(head, tile, tiles)
    return counter, counter, before, tile, head


@gluon.jit
def take_turns(
    step, adding, program, counters_ptr, KEYS: gl.constexpr, QUERIES: gl.constexpr,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """To be called when consumers have given back Q of ``step - 2``.

    Tells successors what consumers have added in that step, and lets them add in the next one when
    it is the program's turn.
    """
    own, walked, tiles = program
    added_to, counter, before, tile, head = adding
    if step > 2:
        signal_successors(counters_ptr + added_to)
    if step >= 2:
        wait_for_predecessors(counters_ptr + counter, before, MAY_ADD, TAKING_TURNS)
        added_to = counter
        tile, head = next_query_tile(tile, head, walked)
        counter = place_of_tile(head, tile, tiles)
        before = predecessors(tile, own, walked, tiles, KEYS, QUERIES, OPTIONS)
    return added_to, counter, before, tile, head


@gluon.jit
def end_of_ring(index, program, KEYS: gl.constexpr):
    """The number of the tile of keys after the last one of the ring of tile ``index``.

    When a program takes its next tile, before it has waited for all of the ring, those of the ring
    must have been taken. With two of them, it would wait for itself.
    """
    own, walked, tiles = program
    place = walked[0] // STRIDE
    last_place = min(tiles[2], gl.cdiv(own[2], KEYS) - own[0] // KEYS + place) - 1
    return index + last_place - place + 1


@gluon.jit
def end_last_turn(adding, counters_ptr):
    """To be called when consumers have added to the last tile."""
    signal_successors(counters_ptr + adding[0])


# ---- consumers -----------------------------------------------------------------------------------


@gluon.jit
def wait_for_turn(CONSUMER: gl.constexpr):
    """Until the consumer may add to a tile of dQ."""
    named_barrier_sync(MAY_ADD + CONSUMER, TAKING_TURNS)
