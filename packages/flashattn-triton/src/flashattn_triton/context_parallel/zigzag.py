"""Zigzag order: the tokens of each rank, and the calls that attend from them to other tokens.

Every sequence is cut into 2·W chunks for W ranks. Rank r holds chunks r and 2·W-1-r, one behind the
other, and so the sequences' chunks one after another. Under a causal mask a late chunk sees many
keys and an early one few, so that all ranks have the same work, in every packed sequence.

    W = 2, a sequence of 8 tokens:   0 1 | 2 3 | 4 5 | 6 7
    rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5

A mask is a band: the token at position i of a sequence sees positions i - left to i + right of the
same sequence. The pairs of a chunk of queries and a chunk of keys that the band shows are a
rectangle, in which the band is a window or a causal mask again. One call of packed attention takes
all rectangles that have the same mask.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

#: Positions before and after a token that it sees; None means no limit.
Band = tuple[int | None, int | None]
#: The arguments ``causal`` and ``window`` of a call.
Mask = tuple[Literal[False, "bottom-right"], tuple[int | None, int | None] | None]


class Chunk(NamedTuple):
    """Tokens of a sequence: its positions from ``start`` to ``end``, which begin at row ``at``."""

    start: int
    end: int
    at: int


class Rectangle(NamedTuple):
    """Rows of queries and of keys, each (start, end), and the mask between them."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: Mask


@dataclass(frozen=True)
class Call:
    """Attention of rows of queries to rows of keys, which hold packed sequences.

    ``starts_q`` and ``starts_k`` count from the first of these rows.
    """

    mask: Mask
    queries: slice
    keys: slice
    starts_q: tuple[int, ...]
    starts_k: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """Whether there is one sequence, without rows that see nothing."""
        return len(self.starts_q) == 2

    @property
    def longest(self) -> tuple[int, int]:
        """Queries and keys of the longest sequences."""
        of_q, of_k = (
            max(b - a for a, b in itertools.pairwise(starts))
            for starts in (self.starts_q, self.starts_k)
        )
        return of_q, of_k

    def starts(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """``starts_q`` and ``starts_k`` as int32 tensors."""
        return on_device(self.starts_q, device), on_device(self.starts_k, device)


@functools.lru_cache(maxsize=2048)
def on_device(
    numbers: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int32
) -> Tensor:
    """Integers as a tensor that is made once."""
    return torch.tensor(numbers, dtype=dtype, device=device)


@dataclass(frozen=True)
class Zigzag:
    """Sequences, packed one after another, in zigzag order over ``world_size`` ranks.

    ``starts``: where each sequence starts, and the number of all tokens.
    """

    world_size: int
    starts: tuple[int, ...]

    @functools.cached_property
    def _cuts(self) -> list[list[int]]:
        """Positions at which each sequence is cut.

        The tokens that are left over by equal chunks go to one chunk after the other, from sequence
        to sequence, so that no rank gets more than two tokens more than another.
        """
        n_chunks, turn, cuts = 2 * self.world_size, 0, []
        for start, end in itertools.pairwise(self.starts):
            size, rest = divmod(end - start, n_chunks)
            longer = {(turn + i) % n_chunks for i in range(rest)}
            sizes = (size + (i in longer) for i in range(n_chunks))
            cuts.append(list(itertools.accumulate(sizes, initial=0)))
            turn = (turn + rest) % n_chunks
        return cuts

    @functools.cached_property
    def _chunks(self) -> list[list[list[Chunk]]]:
        """For each rank and sequence, the two chunks, with their rows on the rank."""
        chunks: list[list[list[Chunk]]] = []
        for rank in range(self.world_size):
            row, of_rank = 0, []
            for cut in self._cuts:
                pair = []
                for i in (rank, 2 * self.world_size - 1 - rank):
                    pair.append(Chunk(cut[i], cut[i + 1], row))
                    row += cut[i + 1] - cut[i]
                of_rank.append(pair)
            chunks.append(of_rank)
        return chunks

    def length(self, rank: int) -> int:
        """The number of tokens of a rank."""
        chunk = self._chunks[rank][-1][-1]
        return chunk.at + chunk.end - chunk.start

    @functools.cached_property
    def longest(self) -> int:
        """The largest number of tokens of a rank."""
        return max(map(self.length, range(self.world_size)))

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """Rows of a rank's chunks in the packed sequences, (start, end) each, in its own order."""
        return [
            (start + chunk.start, start + chunk.end)
            for start, pair in zip(self.starts, self._chunks[rank], strict=False)
            for chunk in pair
        ]

    def calls(self, rank: int, source: int | None, band: Band) -> tuple[Call, ...]:
        """The calls for the queries of ``rank`` and the keys of ``source``.

        ``source`` None stands for the keys of all ranks, in the order of the packed sequences. Then
        every query has all of its keys in one call.
        """
        return _calls(self, rank, source, band)


@functools.lru_cache(maxsize=1024)
def _calls(order: Zigzag, rank: int, source: int | None, band: Band) -> tuple[Call, ...]:
    queries = order._chunks[rank]
    if source is None:
        lengths = itertools.pairwise(order.starts)
        keys = [[Chunk(0, end - start, start)] for start, end in lengths]
    else:
        keys = order._chunks[source]
    if source == rank and band == (None, 0):  # a late chunk sees all of an early one
        queries = keys = [[Chunk(0, b.at + b.end - b.start - a.at, a.at)] for a, b in queries]
    layers: dict[Mask, list[list[Rectangle]]] = {}
    for of_queries, of_keys in zip(queries, keys, strict=True):
        pairs = itertools.product(of_queries, of_keys)
        for found in _joined(filter(None, (rectangle(q, k, band) for q, k in pairs))):
            of_mask = layers.setdefault(found.mask, [])
            for layer in of_mask:  # whose rectangles must all end before it on both sides
                if layer[-1].queries[1] <= found.queries[0] and layer[-1].keys[1] <= found.keys[0]:
                    layer.append(found)
                    break
            else:
                of_mask.append([found])
    return tuple(_call(layer) for of_mask in layers.values() for layer in of_mask)


def _joined(rectangles: Iterable[Rectangle]) -> list[Rectangle]:
    """Rectangles, of which neighbours without a mask that make a larger one are joined."""
    found: list[Rectangle] = []
    for q, k, mask in rectangles:
        while found and found[-1].mask == mask == (False, None):
            before = found[-1]
            if before.queries == q and before.keys[1] == k[0]:
                k = (before.keys[0], k[1])
            elif before.keys == k and before.queries[1] == q[0]:
                q = (before.queries[0], q[1])
            else:
                break
            found.pop()
        found.append(Rectangle(q, k, mask))
    return found


def rectangle(q: Chunk, k: Chunk, band: Band) -> Rectangle | None:
    """The queries of ``q`` that see keys of ``k``, and these keys; None if there are none."""
    left, right = band
    k0, k1, q0, q1 = k.start, k.end, q.start, q.end
    if left is not None:
        k0, q1 = max(k0, q.start - left), min(q1, k.end + left)
    if right is not None:
        k1, q0 = min(k1, q.end + right), max(q0, k.start - right)
    if k0 >= k1 or q0 >= q1:
        return None
    offset = q0 - k0  # from a row of queries to its diagonal, in rows of keys
    mask: Mask
    if (left is None or q1 - 1 - left <= k0) and (right is None or k1 - 1 <= q0 + right):
        mask = (False, None)
    elif right == 0 and k1 == q1:
        mask = ("bottom-right", None if left is None else (left, None))
    else:  # 0 <= left - offset and 0 <= right + offset, because the first query sees the first key
        sides = (None if left is None else left - offset, None if right is None else right + offset)
        mask = (False, sides)
    row_q, row_k = q.at + q0 - q.start, k.at + k0 - k.start
    return Rectangle((row_q, row_q + q1 - q0), (row_k, row_k + k1 - k0), mask)


def _call(layer: Sequence[Rectangle]) -> Call:
    """Rectangles as packed sequences. Rows between them are sequences with one empty side."""
    q, k = first_q, first_k = layer[0].queries[0], layer[0].keys[0]
    ends = [(q, k)]  # of queries and of keys, behind each sequence
    for (q_start, q_end), (k_start, k_end), _ in layer:
        if q_start > q:
            ends.append((q_start, k))
        if k_start > k:
            ends.append((q_start, k_start))
        q, k = q_end, k_end
        ends.append((q, k))
    starts_q, starts_k = (tuple(x - end[0] for x in end) for end in zip(*ends, strict=True))
    return Call(layer[0].mask, slice(first_q, q), slice(first_k, k), starts_q, starts_k)
