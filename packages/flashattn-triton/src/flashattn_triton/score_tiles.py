"""Tiles of scores in plain PyTorch: which of them exist, and what is in them.

Dimensions: B batch, H query heads, G key/value heads, R = H / G, N_q queries, N_k keys, D head_dim
of query and key. The heads that share a key head become rows of one matrix, so that keys and values
are never repeated: folded queries are (B·G, N_q·R, D), with row i·R + r for query i of the r-th
head of the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashattn_triton.mask_and_bias import MaskAndBias
from flashattn_triton.problem import Problem, accumulated, diagonal_offset


@dataclass(frozen=True)
class Band:
    """Query i sees the keys from i + low to i + high: causal masks and windows are both this.

    Beyond i + high it also sees the keys below its batch element's prefix, which comes without a
    window; ``prefix`` is the shortest and the longest one, which decide what tiles there are.
    """

    n_queries: int
    n_keys: int
    low: int
    high: int
    prefix: tuple[int, int] = (0, 0)

    @classmethod
    def of(
        cls, n_queries: int, n_keys: int, problem: Problem, prefixes: Tensor | None = None
    ) -> Band:
        """The band of :func:`flashattn_triton.reference.visibility_mask`.

        ``prefixes``: (B,), which the host reads.
        """
        lengths = [0] if prefixes is None or len(prefixes) == 0 else prefixes.tolist()
        diagonal = diagonal_offset(n_queries, n_keys, problem)
        left, right = problem.band
        # With low = -N_q, or high = N_k, no key is out of any query's sight.
        low = -n_queries if left is None else diagonal - left
        high = n_keys if right is None else diagonal + right
        prefix = (min(*lengths, n_keys), min(max(lengths), n_keys))
        return cls(n_queries, n_keys, low, high, prefix)

    def key_tiles(self, query_start: int, query_end: int, size: int) -> Iterator[tuple[int, int]]:
        """Key ranges of which some key is visible to some of the given queries."""
        first = max(0, query_start + self.low)
        last = max(min(self.n_keys, query_end + self.high), self.prefix[1])
        for start in range(first, last, size):
            yield start, min(start + size, last)

    def query_tiles(self, key_start: int, key_end: int, size: int) -> Iterator[tuple[int, int]]:
        """Query ranges of which some query sees some of the given keys."""
        first = 0 if key_start < self.prefix[1] else max(0, key_start - self.high)
        last = min(self.n_queries, key_end - self.low)
        for start in range(first, last, size):
            yield start, min(start + size, last)

    def hidden(
        self,
        queries: tuple[int, int],
        keys: tuple[int, int],
        like: Tensor,
        prefixes: Tensor | None = None,
    ) -> Tensor | None:
        """(B or 1, 1, queries, 1, keys) bool, True for a key that is not visible; None if all are.

        ``prefixes``: (B,), or None.
        """
        (q_start, q_end), (k_start, k_end) = queries, keys
        reached = k_end - 1 <= q_start + self.high or k_end <= self.prefix[0]
        if k_start >= q_end - 1 + self.low and reached:
            return None
        i = torch.arange(q_start, q_end, device=like.device)[None, None, :, None, None]
        j = torch.arange(k_start, k_end, device=like.device)
        beyond = j > i + self.high
        if prefixes is not None:
            beyond = beyond & (j >= prefixes[:, None, None, None, None])
        return (j < i + self.low) | beyond


def fold(x: Tensor, groups: int) -> Tensor:
    """(B, H, N, ...) to (B·G, N·R, ...) in the accumulation dtype."""
    x = accumulated(x).unflatten(1, (groups, -1)).transpose(2, 3)
    return x.flatten(2, 3).flatten(0, 1)


def unfold(x: Tensor, shape: Sequence[int], groups: int) -> Tensor:
    """(B·G, N·R, ...) to a contiguous (B, H, N, ...), where ``shape`` begins with (B, H, N)."""
    batch, heads, length, *_ = shape
    x = x.unflatten(1, (length, heads // groups)).unflatten(0, (batch, groups))
    return x.transpose(2, 3).flatten(1, 2).contiguous()


class ScoreTiles:
    """Queries and keys folded and scaled, and the scores of their tiles."""

    def __init__(
        self, query: Tensor, key: Tensor, problem: Problem, mask_and_bias: MaskAndBias
    ) -> None:
        self.batch, self.heads, n_queries, _ = query.shape
        self.n_queries = n_queries
        self.groups, n_keys = key.shape[1], key.shape[2]
        self.ratio = self.heads // self.groups
        self.problem = problem
        self.mask_and_bias = mask_and_bias
        self.offset = diagonal_offset(n_queries, n_keys, problem)
        self.band = Band.of(n_queries, n_keys, problem, mask_and_bias.prefix_lengths)
        mask = mask_and_bias.mask
        self._hidden_keys = None if mask is None else (mask == 0).all(0)
        with torch.autocast(query.device.type, enabled=False):
            self.q, self.k = fold(query, self.groups) * problem.scale, fold(key, self.groups)

    def hides(self, start: int, end: int) -> bool:
        """Whether the mask hides keys ``start`` to ``end`` from everyone."""
        hidden = self._hidden_keys
        return hidden is not None and bool(hidden[start:end].all())

    def rows(self, start: int, end: int) -> slice:
        """Where queries ``start`` to ``end`` are in folded tensors."""
        return slice(start * self.ratio, end * self.ratio)

    def scores(
        self, queries: tuple[int, int], keys: tuple[int, int]
    ) -> tuple[Tensor, Tensor | None]:
        """Scores of one tile, -inf where hidden, and the slope of the soft-cap at each of them.

        Both are (B·G, q·R, k); the slope is None without a soft-cap.
        """
        n_queries, n_keys = queries[1] - queries[0], keys[1] - keys[0]
        k = self.k[:, slice(*keys)]
        scores = torch.bmm(self.q[:, self.rows(*queries)], k.transpose(1, 2))
        slope, softcap = None, self.problem.softcap
        if softcap is not None:
            capped = torch.tanh(scores / softcap)
            scores, slope = capped * softcap, 1 - capped.square()
        added = self.mask_and_bias.added(queries, keys, self.offset, self.q.dtype)
        if added is not None:
            shape = (self.batch, self.heads, n_queries, n_keys)
            scores = scores + fold(added.expand(shape), self.groups)
        hidden = self.band.hidden(queries, keys, k, self.mask_and_bias.prefix_lengths)
        if hidden is not None:
            by_query = (self.batch, self.groups, n_queries, self.ratio, n_keys)
            scores = scores.view(by_query).masked_fill(hidden, float("-inf")).view(scores.shape)
        return scores, slope

    def sinks(self, start: int, end: int) -> Tensor:
        """(B·G, q·R): the sink of each row of queries ``start`` to ``end``, or -inf without any."""
        sinks = self.mask_and_bias.sinks
        if sinks is None:
            return self.q.new_full((len(self.q), (end - start) * self.ratio), float("-inf"))
        rows = sinks.to(self.q.dtype)[:, None].expand(self.batch, self.heads, end - start)
        return fold(rows, self.groups)

    def unfold_tile(self, tile: Tensor, queries: tuple[int, int]) -> Tensor:
        """(B·G, q·R, k) to (B, H, q, k)."""
        return unfold(tile, (self.batch, self.heads, queries[1] - queries[0]), self.groups)
