"""Who copies which chunk when: the plan of copies between GPUs, without tensors and without GPUs.

A message is cut into one *row* per rank, and rank q averages, or sends to everyone, row q. A row
that is longer than the shared memory has room for is processed in several *windows*, one after the
other. Each window is one list of operations per rank; ``reduce_scatter``, ``all_gather`` and
``average`` make these lists.

Copies are made in turns: in step s, rank r copies to or from rank r + s, and begins when rank
r + 1, which had that peer in step s - 1, has finished. Otherwise two copies meet at one GPU and
each gets less than half of its bandwidth.

Two *slots* of shared memory alternate from window to window. A slot is written again two windows
later. Every window has a barrier between, so no rank can still be reading it by then. Exchanges
that a CUDA graph repeats break the alternation; ``Recordings`` says where they need a barrier more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

SLOTS = 2
#: Rows begin at multiples of this many bytes, as vectorised kernels and copy engines need.
ALIGNMENT_BYTES = 256


class Kind(Enum):
    """What an operation does."""

    PUSH = auto()
    """Copy this rank's values of the peer's row into the peer's memory."""
    REDUCE = auto()
    """Average this rank's row over what the others have pushed and this rank's own values.

    The averages go to this rank's tensors, and for ``average`` also to where the others pull them.
    """
    PUBLISH = auto()
    """Copy this rank's values to where the others pull them, and to where they belong here."""
    PULL = auto()
    """Copy the peer's result from the peer's memory."""
    BARRIER = auto()
    """Wait until all ranks are here."""
    STAGGER = auto()
    """Tell rank - 1 that this rank has finished its step; wait until rank + 1 says so."""


@dataclass(frozen=True)
class Operation:
    """One operation of one rank.

    Attributes:
        kind: what it does.
        peer: the rank that it copies to or from; -1 where there is none.
    """

    kind: Kind
    peer: int = -1


@dataclass(frozen=True)
class Chunk:
    """A range of one tensor that lies in one row.

    Attributes:
        tensor: index of the tensor.
        begin: first element in the flattened tensor.
        end: one past the last.
        at: the first element's place in the row.
    """

    tensor: int
    begin: int
    end: int
    at: int


class Recordings:
    """Which exchanges must begin with a barrier, because some are recorded in CUDA graphs.

    A recorded exchange uses the same slots at every replay, whatever was exchanged before it. So a
    graph's first window may use the slot of the last window before the replay, which a peer may
    still be reading. The same holds for an exchange outside after a replay, and nobody is told of
    replays: once something has been recorded, every exchange outside begins with a barrier too.
    """

    def __init__(self) -> None:
        self._any = False

    def begin(self, *, recording: bool, first: bool) -> bool:
        """Whether the exchange that begins now needs a barrier before its first window.

        Args:
            recording: whether it is being recorded.
            first: whether it is the first one of its recording.
        """
        self._any |= recording
        return first if recording else self._any


def _in_turns(kind: Kind, rank: int, world_size: int) -> list[Operation]:
    operations = []
    for step in range(1, world_size):
        if step > 1:
            operations.append(Operation(Kind.STAGGER))
        operations.append(Operation(kind, (rank + step) % world_size))
    return operations


def reduce_scatter(rank: int, world_size: int) -> list[Operation]:
    """The operations by which every rank gets the average of its row."""
    return [
        *_in_turns(Kind.PUSH, rank, world_size),
        Operation(Kind.BARRIER),
        Operation(Kind.REDUCE),
    ]


def all_gather(rank: int, world_size: int) -> list[Operation]:
    """The operations by which every rank gets all rows, of which it has one."""
    return [Operation(Kind.PUBLISH), *_gather(rank, world_size)]


def average(rank: int, world_size: int) -> list[Operation]:
    """The operations by which every rank gets the averages of all rows."""
    return [*reduce_scatter(rank, world_size), *_gather(rank, world_size)]


def _gather(rank: int, world_size: int) -> list[Operation]:
    return [Operation(Kind.BARRIER), *_in_turns(Kind.PULL, rank, world_size)]


# --- where the rows of a slot lie ------------------------------------------------------------


def rows_in_slot(world_size: int) -> int:
    """Rows of shared memory that one slot needs: one for the values of each other rank."""
    return world_size - 1


def landing_row(sender: int, owner: int, world_size: int) -> int:
    """The row of ``owner``'s slot in which ``sender``'s values land."""
    return (sender - owner - 1) % world_size


def result_row(world_size: int) -> int:
    """The row of a slot in which its owner's result takes the place of what has landed."""
    return rows_in_slot(world_size) - 1


# --- which elements lie in which row ---------------------------------------------------------


def row_length(numel: int, world_size: int, alignment: int) -> int:
    """Elements of each row of a message of ``numel``, a multiple of ``alignment``."""
    return max(1, -(-numel // (world_size * alignment))) * alignment


def cut_together(numels: Sequence[int], world_size: int, alignment: int) -> list[list[Chunk]]:
    """Cuts the concatenation of some tensors into rows of nearly equal length.

    Args:
        numels: elements of each tensor.
        world_size: number of rows.
        alignment: rows begin at multiples of this many elements. The last rows of a short
            message are shorter, or empty.

    Returns:
        The chunks of each row.
    """
    length = row_length(sum(numels), world_size, alignment)
    rows: list[list[Chunk]] = [[] for _ in range(world_size)]
    start = 0
    for tensor, numel in enumerate(numels):
        done = 0
        while done < numel:
            row, at = divmod(start + done, length)
            end = min(numel, done + length - at)
            rows[row].append(Chunk(tensor, done, end, at))
            done = end
        start += numel
    return rows


def cut_each(numels: Sequence[int], world_size: int) -> list[list[Chunk]]:
    """Cuts every tensor into ``world_size`` equal ranges; row q holds range q of each tensor.

    Args:
        numels: elements of each tensor, multiples of ``world_size``.
        world_size: number of rows.
    """
    rows: list[list[Chunk]] = []
    for row in range(world_size):
        chunks, at = [], 0
        for tensor, numel in enumerate(numels):
            share = numel // world_size
            if share:
                chunks.append(Chunk(tensor, row * share, (row + 1) * share, at))
            at += share
        rows.append(chunks)
    return rows


def windows(rows: Sequence[Sequence[Chunk]], capacity: int) -> list[list[list[Chunk]]]:
    """Cuts rows into windows of at most ``capacity`` elements.

    Args:
        rows: the chunks of each row.
        capacity: elements that a row of shared memory has room for.

    Returns:
        For each window the chunks of each row, whose places count from the window's begin.
    """
    longest = max((chunk.at + chunk.end - chunk.begin for row in rows for chunk in row), default=0)
    found = []
    for first in range(0, longest, capacity):
        last = first + capacity
        found.append([[p for chunk in row for p in _inside(chunk, first, last)] for row in rows])
    return found


def _inside(chunk: Chunk, first: int, last: int) -> list[Chunk]:
    begin = max(chunk.at, first)
    end = min(chunk.at + chunk.end - chunk.begin, last)
    if begin >= end:
        return []
    shift = chunk.begin - chunk.at
    return [Chunk(chunk.tensor, begin + shift, end + shift, begin - first)]


def inside_parts(row: Sequence[Chunk], rank: int, numels: Sequence[int]) -> list[Chunk]:
    """The chunks of row ``rank`` as ranges of that rank's own parts.

    Args:
        row: of ``cut_each``, or a window of it.
        rank: whose row it is.
        numels: elements of each tensor's part.
    """
    firsts = [rank * numel for numel in numels]
    return [replace(c, begin=c.begin - firsts[c.tensor], end=c.end - firsts[c.tensor]) for c in row]
