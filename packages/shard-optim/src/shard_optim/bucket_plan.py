"""Partition plans: where parameters lie in flat buckets, and which rank updates which of them.

Parameters of one dtype on one device are grouped into buckets. A bucket is one flat range of
``world_size * chunk`` elements; rank r owns elements ``[r * chunk, (r + 1) * chunk)`` of it. The
two partitions differ only in where a bucket puts its parameters:

- ``flat`` packs them back to back and pads the end, so a parameter may straddle ranks
  (ZeRO, Rajbhandari et al. 2020, section 5.1);
- ``whole`` puts each parameter inside one rank's range, the largest first onto the least loaded
  rank (Graham's longest-processing-time rule), so that an optimizer sees real shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Partition = Literal["flat", "whole"]
"""Whether each rank owns an equal range of every bucket's elements, or whole parameters."""

# How much faster than all before it together a bucket may grow, where buckets begin small.
RAMP = 2

# A "whole" bucket grows until its parameters outweigh this many times the padding that the largest
# of them can cause, so padding stays under about 1/4 of the bucket at any world size.
_WHOLE_BUCKET_WEIGHT = 4


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Where the parameters of one bucket lie and which rank owns what."""

    members: tuple[int, ...]  # index of each parameter in the list that was planned
    offsets: tuple[int, ...]  # first element of each member inside the bucket
    numels: tuple[int, ...]  # number of elements of each member
    chunk: int  # elements that each rank owns, padding included
    world_size: int

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.chunk * self.world_size

    @property
    def padding(self) -> int:
        """Elements of the flat buffer that belong to no parameter."""
        return self.numel - sum(self.numels)

    def span(self, position: int, rank: int) -> tuple[int, int] | None:
        """First element of member ``position`` that ``rank`` owns, and their number; or None.

        A parameter without elements belongs to exactly one rank, which then owns an empty span, so
        that its optimizer state exists somewhere.
        """
        offset, numel = self.offsets[position], self.numels[position]
        if numel == 0:
            owner = min(offset // max(self.chunk, 1), self.world_size - 1)
            return (0, 0) if rank == owner else None
        begin = max(offset, rank * self.chunk)
        end = min(offset + numel, (rank + 1) * self.chunk)
        return (begin - offset, end - begin) if begin < end else None


def plan_buckets(
    numels: Sequence[int],
    *,
    world_size: int,
    partition: Partition,
    bucket_numel: int,
    first_numel: int | None = None,
    alignment: int = 1,
) -> list[BucketPlan]:
    """Plans buckets for parameters of one dtype on one device, in registration order.

    In a flat bucket every rank's range is ``ceil(bucket elements / world_size)`` long, so none owns
    more than one element above the mean (alignment gaps counted as elements).

    Args:
        numels: elements of each parameter.
        bucket_numel: largest number of elements of a bucket, except that a parameter is never
            split over two buckets, and that a "whole" bucket grows until padding is small.
        first_numel: limit of the first "flat" bucket, whose gradients are the last that backward
            makes, so nothing hides its reduction; see ``split_by_size``.
        alignment: parameters start at multiples of this many elements, because matrix kernels
            are slower on misaligned operands.
    """
    flat, totals, plans = partition == "flat", [0] * world_size, []
    if flat:
        runs = split_by_size(numels, bucket_numel, first_numel)
    else:
        runs = _split_by_padding(numels, bucket_numel, world_size)
    for members in runs:
        sizes = [numels[index] for index in members]
        padded = [round_up(size, alignment) for size in sizes]
        offsets = list(accumulate(padded, initial=0))[:-1]
        chunk = -(-(offsets[-1] + sizes[-1]) // world_size)
        if not flat:
            owned = assign_owners(padded, totals)
            chunk = max(sum(padded[at] for at in mine) for mine in owned)
            for rank, mine in enumerate(owned):
                starts = accumulate((padded[at] for at in mine), initial=rank * chunk)
                for at, start in zip(mine, starts, strict=False):
                    offsets[at] = start
        plan = BucketPlan(
            members=tuple(members),
            offsets=tuple(offsets),
            numels=tuple(sizes),
            chunk=chunk,
            world_size=world_size,
        )
        plans.append(plan)
    return plans


def split_by_size(
    sizes: Sequence[int], limit: float, first_limit: float | None = None
) -> list[list[int]]:
    """Runs of neighbours, by position, each of at most ``limit`` in all or of one item.

    With ``first_limit``, that of the first run, each may hold ``RAMP`` times as much as all before.
    """
    runs: list[list[int]] = []
    room, before = 0.0, 0
    for position, size in enumerate(sizes):
        if not runs or size > room:
            runs.append([])
            room = limit if first_limit is None else min(limit, max(first_limit, RAMP * before))
        runs[-1].append(position)
        room, before = room - size, before + size
    return runs


def _split_by_padding(numels: Sequence[int], bucket_numel: int, world_size: int) -> list[list[int]]:
    """Runs of parameters large enough that balancing whole parameters wastes little."""
    runs: list[list[int]] = [[]]
    for position in range(len(numels)):
        runs[-1].append(position)
        sizes = [numels[at] for at in runs[-1]]
        if sum(sizes) >= max(bucket_numel, _WHOLE_BUCKET_WEIGHT * world_size * max(sizes)):
            runs.append([])
    rest = runs.pop()
    if runs:
        runs[-1] += rest  # a short last run could not be balanced
    return runs or [rest]


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below ``number``."""
    return -(-number // multiple) * multiple


def assign_owners(costs: Sequence[int], totals: list[int]) -> list[list[int]]:
    """Positions of each rank's items: most costly first, to the rank with the lowest cost so far.

    ``totals``, each rank's cost before, breaks ties; this assignment is added to it.
    """
    owned: list[list[int]] = [[] for _ in totals]
    loads = [0] * len(totals)
    for position in sorted(range(len(costs)), key=lambda position: (-costs[position], position)):
        rank = min(range(len(totals)), key=lambda rank: (loads[rank], totals[rank], rank))
        owned[rank].append(position)
        loads[rank] += costs[position]
        totals[rank] += costs[position]
    return owned
