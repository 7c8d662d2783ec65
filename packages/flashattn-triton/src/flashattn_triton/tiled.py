"""FlashAttention-2 in plain PyTorch, tile by tile: the readable version, and the CPU tier.

Algorithm 1 (forward, online softmax) and Algorithm 2 (backward, P recomputed from the logsumexp)
of FlashAttention-2 (Dao 2023, arXiv:2307.08691), with every mask and option of the Triton
kernels. One tile of scores exists at a time; tiles in which no key is visible are never visited;
all arithmetic is fp32 (fp64 for fp64 inputs), whatever the dtype of the inputs.

The functions take and return data: gradients are computed by ``tiled_backward``, not by autograd.

Dimensions: B batch, H query heads, G key/value heads, R = H / G, N_q queries, N_k keys,
D head_dim of query and key, E head_dim of value. The heads that share a key head become rows of one
matrix, so that keys and values are never repeated: folded queries are (B·G, N_q·R, D), with row
i·R + r for query i of the r-th head of the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flashattn_triton.launch import BackwardTensors
from flashattn_triton.mask_and_bias import NOTHING, Given, bias_of_tile
from flashattn_triton.problem import Problem, accumulated, diagonal_offset, without_autocast

# Large enough that the matrix products, not the Python loop, take the time on a CPU; small enough
# that a causal mask still skips nearly half of the tiles of a few hundred tokens.
QUERY_TILE = 128
KEY_TILE = 256


@torch.no_grad()
def tiled_forward(
    query: Tensor, key: Tensor, value: Tensor, problem: Problem, given: Given = NOTHING, /, *,
    query_tile: int = QUERY_TILE, key_tile: int = KEY_TILE,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Algorithm 1: attention output and logsumexp, one tile of scores at a time.

    Takes the arguments of :func:`~flashattn_triton.reference.attention_reference`, with any
    strides, and the sizes of a tile. ``deterministic`` changes nothing: the order of all sums is
    fixed.

    Returns:
        Output (B, H, N_q, E) in the problem's or the query's dtype, and natural-log logsumexp
        (B, H, N_q) in fp32 (fp64 for fp64 inputs). A query that sees no key has output 0 and
        logsumexp -inf.
    """
    score_tiles = ScoreTiles(query, key, problem, given)
    with without_autocast(query):
        v = fold(value, score_tiles.groups)
        out = v.new_zeros(*score_tiles.q.shape[:2], v.shape[-1])
        lse = v.new_full(score_tiles.q.shape[:2], float("-inf"))
        for start, end in tiles(query.shape[2], query_tile):
            rows = score_tiles.rows(start, end)
            row_max = score_tiles.sinks(start, end)  # m
            row_sum = (~torch.isneginf(row_max)).to(row_max.dtype)  # l: a sink is a key before all
            acc = torch.zeros_like(out[:, rows])
            for keys in score_tiles.key_tiles(start, end, key_tile):
                scores, _ = score_tiles.scores((start, end), keys)
                new_max = torch.maximum(row_max, scores.amax(dim=-1))
                # A row that has seen no key yet has m = -inf, and -inf - (-inf) is NaN.
                shift = new_max.masked_fill(torch.isneginf(new_max), 0.0)
                p = torch.exp(scores - shift[..., None])
                decay = torch.exp(row_max - shift)
                row_sum = row_sum * decay + p.sum(dim=-1)
                acc = torch.baddbmm(acc * decay[..., None], p, v[:, slice(*keys)])
                row_max = new_max
            # Rows without visible keys: 0 / 1 = 0, and -inf + log 0 = -inf.
            out[:, rows] = acc / row_sum.masked_fill(row_sum == 0, 1.0)[..., None]
            lse[:, rows] = row_max + (0.0 if problem.largest_only else torch.log(row_sum))
        groups = score_tiles.groups
        out = unfold(out, query.shape, groups).to(problem.out_dtype or query.dtype)
        return out, unfold(lse, query.shape, groups)


@torch.no_grad()
def tiled_backward(
    tensors: BackwardTensors, problem: Problem, given: Given = NOTHING, /, *,
    of_bias: bool = False, query_tile: int = QUERY_TILE, key_tile: int = KEY_TILE,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Algorithm 2: gradients of query, key and value, with P recomputed from the logsumexp.

    The gradient of the logsumexp enters through D: with dL given, dS = P ∘ (dP - (D - dL)). That of
    a bias is dS, summed over the dimensions that share it.

    ``tensors``: those of :func:`tiled_forward`, its results, and their gradients.

    Returns:
        dQ, dK, dV, and dbias if ``of_bias``, shaped and typed like query, key, value and the bias,
        accumulated in fp32 (fp64).
    """
    query, key, value, _, _, _, grad_lse = tensors
    score_tiles = ScoreTiles(query, key, problem, given)
    groups, q, k = score_tiles.groups, score_tiles.q, score_tiles.k
    inputs, bias = [query, key, value], given.bias
    with without_autocast(query):
        v, out, lse, do = (fold(x, groups) for x in tensors[2:6])
        delta = (do * out).sum(dim=-1)  # D = rowsum(dO ∘ O)
        if grad_lse is not None:
            delta = delta - fold(grad_lse, groups)
        empty = torch.isneginf(lse)
        delta = delta.masked_fill(empty, 0.0)
        lse = lse.masked_fill(empty, float("inf"))  # makes P = exp(S - L) zero in such rows
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dbias = q.new_zeros(bias.shape) if of_bias and bias is not None else None
        for queries in tiles(score_tiles.n_queries, query_tile):
            rows = score_tiles.rows(*queries)
            for keys in score_tiles.key_tiles(*queries, key_tile):
                columns = slice(*keys)
                scores, slope = score_tiles.scores(queries, keys)
                p = torch.exp(scores - lse[:, rows, None])
                dp = torch.bmm(do[:, rows], v[:, columns].transpose(1, 2))
                ds = p * (dp - delta[:, rows, None])
                dv[:, columns] += torch.bmm(p.transpose(1, 2), do[:, rows])
                if dbias is not None:
                    target = bias_of_tile(dbias, queries, keys)
                    target += score_tiles.unfold_tile(ds, queries).sum_to_size(target.shape)
                if slope is not None:
                    ds = ds * slope
                dq[:, rows] += torch.bmm(ds, k[:, columns])
                dk[:, columns] += torch.bmm(ds.transpose(1, 2), q[:, rows])
        dq *= problem.scale  # q was scaled in advance, which serves S and dK; dQ needs its own
        gradients = [unfold(x, y.shape, groups) for x, y in zip((dq, dk, dv), inputs, strict=True)]
        if dbias is not None and bias is not None:
            gradients.append(dbias)
            inputs.append(bias)
        return tuple(x.to(y.dtype) for x, y in zip(gradients, inputs, strict=True))


def sinks_gradient(
    sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """The gradient of sinks: -Σ exp(s - L) · (rowsum(O ∘ dO) - dL) over the rows of each head.

    Args:
        sinks: (H,).
        out: (B, H, N, E), with the sinks; ``grad_out`` is its gradient.
        lse: (B, H, N), with the sinks; ``grad_lse`` is its gradient, or None for zero.
    """
    delta = (accumulated(out) * accumulated(grad_out)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    empty = lse == float("-inf")  # of which no gradient is needed, whatever is given
    share = torch.exp(accumulated(sinks)[:, None] - lse).masked_fill(empty, 0.0)
    return -(share * delta.masked_fill(empty, 0.0)).sum((0, 2)).to(sinks.dtype)


def tiles(length: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges that cut ``length`` into pieces of at most ``size``."""
    for start in range(0, length, size):
        yield start, min(start + size, length)


# ---- tiles of scores: which of them exist, and what is in them -----------------------------------


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
    """Queries and keys folded and scaled, and the scores of their tiles.

    Query i sees the keys from i + low to i + high: causal masks and windows are both such a band.
    Beyond i + high it also sees the keys below its batch element's prefix, which comes without a
    window. The host reads prefixes: the shortest and the longest decide what tiles there are.
    """

    def __init__(self, query: Tensor, key: Tensor, problem: Problem, given: Given) -> None:
        self.batch, self.heads, self.n_queries, _ = query.shape
        self.groups, self.n_keys = key.shape[1:3]
        self.ratio = self.heads // self.groups
        self.problem, self.given = problem, given
        self.offset = diagonal_offset(self.n_queries, self.n_keys, problem)
        left, right = problem.band
        # With low = -N_q, or high = N_k, no key is out of any query's sight.
        self.low = -self.n_queries if left is None else self.offset - left
        self.high = self.n_keys if right is None else self.offset + right
        prefixes = [] if given.prefix_lengths is None else given.prefix_lengths.tolist()
        prefixes = prefixes or [0]
        self.prefix = min(*prefixes, self.n_keys), min(max(prefixes), self.n_keys)
        mask = given.mask
        self._hidden_keys = None if mask is None else (mask == 0).all(0)
        with without_autocast(query):
            self.q, self.k = fold(query, self.groups) * problem.scale, fold(key, self.groups)

    def key_tiles(self, query_start: int, query_end: int, size: int) -> Iterator[tuple[int, int]]:
        """Key ranges of which some key is visible to some of the given queries.

        They start at multiples of ``size``. A mask may hide keys of a range, but not all of them.
        """
        first = max(0, query_start + self.low) // size * size
        last = max(min(self.n_keys, query_end + self.high), self.prefix[1])
        for start in range(first, last, size):
            end = min(start + size, last)
            if self._hidden_keys is None or not self._hidden_keys[start:end].all():
                yield start, end

    def hidden(self, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor | None:
        """(B or 1, 1, queries, 1, keys) bool, True for a key outside the band; None if all are in.

        What a mask hides is not in it.
        """
        (q_start, q_end), (k_start, k_end) = queries, keys
        reached = k_end - 1 <= q_start + self.high or k_end <= self.prefix[0]
        if k_start >= q_end - 1 + self.low and reached:
            return None
        i = torch.arange(q_start, q_end, device=self.k.device)[None, None, :, None, None]
        j = torch.arange(k_start, k_end, device=self.k.device)
        beyond = j > i + self.high
        if self.given.prefix_lengths is not None:
            beyond = beyond & (j >= self.given.prefix_lengths[:, None, None, None, None])
        return (j < i + self.low) | beyond

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
        added = self.given.added(queries, keys, self.offset, self.q.dtype)
        if added is not None:
            shape = (self.batch, self.heads, n_queries, n_keys)
            scores = scores + fold(added.expand(shape), self.groups)
        hidden = self.hidden(queries, keys)
        if hidden is not None:
            by_query = (self.batch, self.groups, n_queries, self.ratio, n_keys)
            scores = scores.view(by_query).masked_fill(hidden, float("-inf")).view(scores.shape)
        return scores, slope

    def sinks(self, start: int, end: int) -> Tensor:
        """(B·G, q·R): the sink of each row of queries ``start`` to ``end``, or -inf without any."""
        sinks = self.given.sinks
        if sinks is None:
            return self.q.new_full((len(self.q), (end - start) * self.ratio), float("-inf"))
        return self.of_heads(sinks, end - start)

    def of_heads(self, x: Tensor, n_queries: int) -> Tensor:
        """(H,) to (B·G, n_queries·R), one number for each row."""
        rows = x.to(self.q.dtype)[:, None].expand(self.batch, self.heads, n_queries)
        return fold(rows, self.groups)

    def unfold_tile(self, tile: Tensor, queries: tuple[int, int]) -> Tensor:
        """(B·G, q·R, k) to (B, H, q, k)."""
        return unfold(tile, (self.batch, self.heads, queries[1] - queries[0]), self.groups)
