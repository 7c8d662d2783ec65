"""Which rank updates which elements: pure planning, no tensors and no communication.

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
from typing import Literal

Partition = Literal["flat", "whole"]

PARTITIONS: tuple[Partition, ...] = ("flat", "whole")

# How much faster than all before it together a bucket may grow, where buckets begin small.
RAMP = 2

# A "whole" bucket grows until its parameters outweigh this many times the padding that the largest
# of them can cause, so padding stays under about 1/4 of the bucket at any world size.
_WHOLE_BUCKET_WEIGHT = 4


@dataclass(frozen=True, kw_only=True)
class Span:
    """The part of one parameter that one rank owns: elements ``[start, start + length)``."""

    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Where the parameters of one bucket lie and which rank owns what.

    Attributes:
        members: index of each parameter in the list that was planned.
        offsets: first element of each member inside the bucket.
        numels: number of elements of each member.
        chunk: elements that each rank owns, padding included.
        world_size: number of ranks.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    chunk: int
    world_size: int

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.chunk * self.world_size

    @property
    def padding(self) -> int:
        """Elements of the flat buffer that belong to no parameter."""
        return self.numel - sum(self.numels)

    def span(self, position: int, rank: int) -> Span | None:
        """The part of member ``position`` that ``rank`` owns, or None.

        A parameter without elements belongs to exactly one rank, which then owns an empty span, so
        that its optimizer state exists somewhere.
        """
        offset, numel = self.offsets[position], self.numels[position]
        if numel == 0:
            owner = min(offset // max(self.chunk, 1), self.world_size - 1)
            return Span(start=0, length=0) if rank == owner else None
        begin = max(offset, rank * self.chunk)
        end = min(offset + numel, (rank + 1) * self.chunk)
        return Span(start=begin - offset, length=end - begin) if begin < end else None

    def owners(self, position: int) -> list[int]:
        """The ranks that own part of member ``position``, in ascending order."""
        first = self.offsets[position] // max(self.chunk, 1)
        last = (self.offsets[position] + max(self.numels[position], 1) - 1) // max(self.chunk, 1)
        candidates = range(min(first, self.world_size - 1), min(last, self.world_size - 1) + 1)
        return [rank for rank in candidates if self.span(position, rank) is not None]

    def owned(self, rank: int) -> int:
        """Elements of real parameters that ``rank`` owns."""
        spans = (self.span(position, rank) for position in range(len(self.members)))
        return sum(span.length for span in spans if span is not None)


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
        world_size: number of ranks, at least 1.
        partition: "flat" or "whole".
        bucket_numel: largest number of elements of a bucket, except that a parameter is never
            split over two buckets, and that a "whole" bucket grows until padding is small.
        first_numel: limit of the first "flat" bucket, if smaller; each further one may hold
            ``RAMP`` times as much as all before it, up to ``bucket_numel``. The first bucket's
            gradients are the last that backward makes, so nothing hides its reduction.
        alignment: parameters start at multiples of this many elements, because matrix kernels
            are slower on misaligned operands.

    Raises:
        ValueError: for an unknown partition, or a size or world size below 1.
    """
    if partition not in PARTITIONS:
        raise ValueError(f"partition must be one of {PARTITIONS}, got {partition!r}")
    first = bucket_numel if first_numel is None else first_numel
    if min(world_size, bucket_numel, first, alignment) < 1:
        raise ValueError(
            "world_size, bucket_numel, first_numel and alignment must be at least 1, got "
            f"world_size={world_size}, bucket_numel={bucket_numel}, first_numel={first_numel}, "
            f"alignment={alignment}"
        )
    if partition == "flat":
        return [
            _flat_bucket(members, numels, world_size, alignment)
            for members in _split_by_size(numels, bucket_numel, first)
        ]
    totals = [0] * world_size
    return [
        _whole_bucket(members, numels, totals, alignment)
        for members in _split_by_padding(numels, bucket_numel, world_size)
    ]


def _split_by_size(numels: Sequence[int], bucket_numel: int, first_numel: int) -> list[list[int]]:
    runs: list[list[int]] = []
    room = before = 0
    for index, numel in enumerate(numels):
        if not runs or numel > room:
            runs.append([])
            room = min(bucket_numel, max(first_numel, RAMP * before))
        runs[-1].append(index)
        room -= numel
        before += numel
    return runs


def _split_by_padding(numels: Sequence[int], bucket_numel: int, world_size: int) -> list[list[int]]:
    """Runs of parameters large enough that balancing whole parameters wastes little."""
    runs: list[list[int]] = []
    open_run: list[int] = []
    for index in range(len(numels)):
        open_run.append(index)
        filled = sum(numels[i] for i in open_run)
        largest = max(numels[i] for i in open_run)
        if filled >= max(bucket_numel, _WHOLE_BUCKET_WEIGHT * world_size * largest):
            runs.append(open_run)
            open_run = []
    if open_run and runs:
        runs[-1].extend(open_run)  # a short last run could not be balanced
    elif open_run:
        runs.append(open_run)
    return runs


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _flat_bucket(
    members: Sequence[int], numels: Sequence[int], world_size: int, alignment: int
) -> BucketPlan:
    offsets, filled = [], 0
    for index in members:
        offsets.append(_round_up(filled, alignment))
        filled = offsets[-1] + numels[index]
    return BucketPlan(
        members=tuple(members),
        offsets=tuple(offsets),
        numels=tuple(numels[index] for index in members),
        chunk=-(-filled // world_size),
        world_size=world_size,
    )


def _whole_bucket(
    members: Sequence[int], numels: Sequence[int], totals: list[int], alignment: int
) -> BucketPlan:
    """Greedy by size; ``totals`` carries each rank's load over buckets and breaks ties."""
    world_size = len(totals)
    loads = [0] * world_size
    place: dict[int, tuple[int, int]] = {}  # parameter -> (rank, offset in its range)
    for index in sorted(members, key=lambda index: (-numels[index], index)):
        rank = min(range(world_size), key=lambda rank: (loads[rank], totals[rank], rank))
        place[index] = (rank, loads[rank])
        loads[rank] += _round_up(numels[index], alignment)
        totals[rank] += numels[index]
    chunk = max(loads)
    return BucketPlan(
        members=tuple(members),
        offsets=tuple(place[index][0] * chunk + place[index][1] for index in members),
        numels=tuple(numels[index] for index in members),
        chunk=chunk,
        world_size=world_size,
    )
