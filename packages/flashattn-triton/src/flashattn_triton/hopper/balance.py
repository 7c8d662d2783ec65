"""How many heads the forward kernel works on at a time, so that it ends soonest.

Programs take tiles in the order of ``schedule.tile_at``, in turns that run forwards and backwards.
Where a causal mask makes tiles differ in length, two things take time beyond the sum of the tiles:
some programs end later than others, and programs at different heads read more keys and values than
stay in the L2 cache together. Many heads at a time are balanced well and read much. Few heads are
read together, but if programs run ahead of others for long, they come to other heads.

The order is known, so both are calculated, in lengths of tiles. On an H100

    (last program's end / mean) · (1 + head_cost · heads that are read at a time)

was within 3 % of the measured time for 80 of 83 orders of 18 problems, from 4,096 tokens on within
2.2 % for all (results/head_groups.jsonl).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from operator import add

_OVERHEAD = 192  # keys whose step takes as long as what a tile takes beside its steps
_TURNS = 64  # after which an order is balanced well enough
_GOOD = 1.03  # times the mean is so little that other sizes are not tried
_FEW_TILES = 16  # of a head, with which a few heads at a time may be balanced


@functools.lru_cache(maxsize=1024)
def heads_at_a_time(
    heads: int,
    keys_seen: tuple[int, ...],
    keys: int,
    programs: int,
    head_cost: float,
    of_sequence: int | None = None,
) -> int:
    """Into groups of how many heads all are divided.

    Args:
        heads: of queries, in all batch elements.
        keys_seen: by each tile of queries of a head, first to last.
        keys: in a step of the kernel.
        programs: that run at the same time.
        head_cost: share of the time that each head more, read at the same time, takes.
        of_sequence: heads of each packed sequence, all of one length. Groups hold heads of one
            sequence, so that they are in the order that is calculated only if they divide these.
    """
    tiles = len(keys_seen)
    costs = [-(-seen // keys) + _OVERHEAD / keys for seen in keys_seen]
    simulated = min(heads, max(1, _TURNS * programs // tiles))

    def time(group: int) -> float:
        last, lead = _ends(simulated, costs, min(group, simulated), programs)
        return last * (1 + head_cost * (group + lead * programs / tiles))

    sizes = [2 * programs // tiles, 4 * programs // tiles]
    for size in sizes[:]:
        pairs = max(1, round(heads / (2 * max(1, size))))  # of falling and rising lengths
        sizes.append(-(-heads // (2 * pairs)))
    sizes += [-(-2 * programs // tiles), heads]
    if tiles <= _FEW_TILES:
        sizes += [1, 2, 3]
    times: dict[int, float] = {}
    sizes = [min(max(1, size), heads) for size in sizes]
    if of_sequence is not None:
        sizes = [next(n for n in range(size, 0, -1) if of_sequence % n == 0) for size in sizes]
    for size in dict.fromkeys(sizes):
        times[size] = time(size)
        if times[size] < _GOOD:
            break
    return min(times, key=times.__getitem__)


def _ends(heads: int, costs: Sequence[float], group: int, programs: int) -> tuple[float, float]:
    """(the last program's end over the mean, by how many mean tiles the first leads the last)."""
    groups = math.ceil(heads / group)
    left = heads - (groups - 1) * group  # for the last group, whose lengths fall
    order: list[float] = []
    blocks = [[cost for cost in way for _ in range(group)] for way in (costs, costs[::-1])]
    for number in range(groups, 1, -1):
        order += blocks[number % 2]
    order += [cost for cost in costs[::-1] for _ in range(left)]
    ends, lead = [0.0] * programs, 0.0
    for at in range(0, len(order), programs):
        turn = order[at : at + programs]
        turn += [0.0] * (programs - len(turn))
        if at // programs % 2:
            turn.reverse()
        ends = [*map(add, ends, turn)]
        lead += max(ends) - min(ends)
    mean_tile = sum(order) / len(order)
    turns = math.ceil(len(order) / programs)
    return max(ends) * programs / sum(order), lead / turns / mean_tile
