"""Forward mode and second derivatives, in tiles of plain PyTorch on any device.

Let θ be query, key, value, bias and sinks, F(θ) the output O and the logsumexp L, J its Jacobian
and u = (dO, dL). Two functions of a direction θ̇ are enough for all derivatives beyond the first:

    T(θ, θ̇)    = J θ̇                    :func:`forward_tangents`
    B(θ, θ̇, u) = d/dε J(θ + ε θ̇)ᵀ u     :func:`backward_tangents`

    F               has the tangent          T(θ, θ̇)
    Jᵀ u            has the tangent          B(θ, θ̇, u) + Jᵀ u̇
    <w, Jᵀ u>       has the gradients        B(θ, w, u) in θ, T(θ, w) in u
    <u, T(θ, θ̇)>    has the gradients        B(θ, θ̇, u) in θ, Jᵀ u in θ̇

Jᵀ u is the backward pass, by kernels where there are any. With S the scores behind soft-cap and
bias, P = exp(S - L), dP = dO Vᵀ and D = rowsum(dO ∘ O) - dL, as in :mod:`flashattn_triton.tiled`:

    L̇ = rowsum(P ∘ Ṡ)                    Ṗ = P ∘ (Ṡ - L̇)                   Ȯ = Ṗ V + P V̇
    dS = P ∘ (dP - D)                    Ḋ = rowsum(dO ∘ Ȯ)                ḋP = dO V̇ᵀ
    ḋS = Ṗ ∘ (dP - D) + P ∘ (ḋP - Ḋ)

T computes five products of the size of S, where the forward pass computes two; B is given what T
computes, and computes ten, where the backward pass computes five. Both compute in fp32 (fp64) and
hold a few tiles of scores at a time.
They are made of PyTorch's operators alone, so that autograd differentiates them again; then, and
only then, all scores are in memory. The host reads the starts of packed sequences and prefixes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flashattn_triton.mask_and_bias import Given, bias_of_tile, joined_parts, parts_of_batch
from flashattn_triton.problem import Problem, as_given, heads_first, without_autocast
from flashattn_triton.tiled import ScoreTiles, fold, tiles, unfold

Tensors = Sequence[Tensor | None]
Range = tuple[int, int]

# Queries, and keys, of a tile. On a GPU a few large operators are faster than many small ones.
TILE, TILE_ON_GPU = 256, 1024


def forward_tangents(
    inputs: Tensors, direction: Tensors, out: Tensor, lse: Tensor, given: Tensors, problem: Problem
) -> tuple[Tensor, Tensor]:
    """T: tangents of output and logsumexp.

    Args:
        inputs: query, key and value; tensors are in the layout of ``problem``.
        direction: tangents of ``inputs``, bias and sinks; None for zero.
        out: the output.
        lse: (B, H, N_q), or (H, T_q) of packed sequences.
        given: the tensors of a call as operators take them.
        problem: what is computed.

    Returns:
        The tangents, in layout and dtype those of the output and of the logsumexp.
    """
    parts = [part.forward() for part in _parts(inputs, direction, out, lse, given, problem)]
    outs, lses = zip(*parts, strict=True)
    return _joined(outs, out, problem), _joined(lses, lse, problem)


def backward_tangents(
    inputs: Tensors, direction: Tensors, out: Tensor, lse: Tensor, tangents: tuple[Tensor, Tensor],
    grad_out: Tensor, grad_lse: Tensor | None, given: Tensors, problem: Problem,
) -> list[Tensor | None]:  # fmt: skip
    """B: tangents of the inputs' gradients, while those of output and logsumexp are fixed.

    Takes the arguments of :func:`forward_tangents`, the ``tangents`` that it returns, and the
    gradients of output and logsumexp, of which the latter may be None for zero. Returns tensors
    like query, key, value, bias and sinks; None for those that are not given.
    """
    results: list[Tensor | None] = []
    gradients = (grad_out, grad_lse)
    parts = _parts(inputs, direction, out, lse, given, problem, *tangents, *gradients)
    lists = zip(*(part.backward() for part in parts), strict=True)
    _, bias, _, _, sinks, *_ = given
    for i, (x, of_parts) in enumerate(zip((*inputs, bias, sinks), lists, strict=True)):
        if x is None:
            results.append(None)
        elif i < 3:
            results.append(_joined(of_parts, x, problem))
        else:
            results.append(torch.stack(of_parts).sum(0).to(x.dtype))
    return results


def _joined(parts: Sequence[Tensor], like: Tensor, problem: Problem) -> Tensor:
    """Results (B, H, N, ...) of all parts, in layout and dtype of ``like``."""
    n_rows = heads_first(like, problem.layout).shape[2]
    return as_given(joined_parts(parts, n_rows), problem.layout).to(like.dtype)


def _parts(
    inputs: Tensors, direction: Tensors, out: Tensor, lse: Tensor, given: Tensors, problem: Problem,
    *results: Tensor | None,
) -> Iterator[_Part]:  # fmt: skip
    """The batch, or each packed sequence.

    ``results``: Ȯ, L̇, dO and dL for the backward pass.
    """
    of_queries = (inputs[0], direction[0], out, lse, *results)
    of_keys = (*inputs[1:], *direction[1:3])
    for rows, columns, own in parts_of_batch(problem, Given(*given), of_queries, of_keys):
        yield _Part(rows, columns, direction[3:], problem, own)


class _Part(ScoreTiles):
    """(B, H, N, ...) tensors, folded as :mod:`flashattn_triton.tiled` says."""

    def __init__(
        self, rows: Sequence[Any], columns: Sequence[Any], others: Tensors, problem: Problem,
        given: Given,
    ) -> None:  # fmt: skip
        """Takes tensors with a row for each query, and with one for each key.

        ``rows``: Q, its tangent, O, L, and for the backward pass Ȯ, L̇, dO and dL. ``columns``: K, V
        and their tangents. ``others``: tangents of bias and sinks.
        """
        (query, tq, *rows), (key, value, tk, tv) = rows, columns
        self.inputs = query, key, value
        super().__init__(query, key, problem, given)
        self.tbias, tsinks = others
        self.tile = TILE_ON_GPU if query.is_cuda else TILE
        self.v = self._folded(value)
        self.tq, self.tk, self.tv = (
            torch.zeros_like(folded) if x is None else self._folded(x)
            for folded, x in zip((self.q, self.k, self.v), (tq, tk, tv), strict=True)
        )
        self.tq = self.tq * problem.scale  # as q is
        of_rows: list[Any] = [None if x is None else self._folded(x) for x in rows]
        self.out, self.lse, *results = of_rows
        empty = torch.isneginf(self.lse)
        self.lse = self.lse.masked_fill(empty, float("inf"))  # P = exp(S - L) is 0 there
        self.sink_share = torch.exp(self.sinks(0, self.n_queries) - self.lse)  # 0 without sinks
        self.tsink = 0.0 if tsinks is None else self.of_heads(tsinks, self.n_queries)
        if results:
            self.tout, self.tlse, self.grad_out, grad_lse = results
            self.delta = (self.grad_out * self.out).sum(-1)
            if grad_lse is not None:
                self.delta = self.delta - grad_lse
            self.delta = self.delta.masked_fill(empty, 0.0)

    def _folded(self, x: Tensor) -> Tensor:
        return fold(x, self.groups)

    def _visible(self) -> Iterator[tuple[Range, slice, Range]]:
        """Queries, their rows, and keys of each tile in which some key is visible.

        Keys are cut alike for all queries.
        """
        for queries in tiles(self.n_queries, self.tile):
            for start, _ in self.key_tiles(*queries, self.tile):
                end = min(start + self.tile, self.n_keys)
                yield queries, self.rows(*queries), (start, end)

    def _tangent(
        self, queries: Range, keys: Range
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """P, Ṡ, and with a soft-cap its slope and the tangent of the slope."""
        rows, columns = self.rows(*queries), slice(*keys)
        scores, slope = self.scores(queries, keys)
        p = torch.exp(scores - self.lse[:, rows, None])
        k = self.k[:, columns].transpose(1, 2)
        tangent = self.tq[:, rows] @ k + self.q[:, rows] @ self.tk[:, columns].transpose(1, 2)
        curvature = None
        if slope is not None:
            softcap = self.problem.softcap
            assert softcap is not None
            capped = torch.tanh(self.q[:, rows] @ k / softcap)
            curvature = -2 / softcap * capped * slope * tangent
            tangent = tangent * slope
        if self.tbias is not None:
            lengths = (queries[1] - queries[0], keys[1] - keys[0])
            tbias = bias_of_tile(self.tbias, queries, keys)
            tbias = tbias.expand(self.batch, self.heads, *lengths)
            tangent = tangent + self._folded(tbias)
        return p, tangent, slope, curvature

    def _concatenated(self, pieces: dict[int, Tensor], like: Tensor, ratio: int = 1) -> Tensor:
        """Tiles, by their first query or key, as one tensor like ``like``; 0 where there is none.

        ``ratio``: rows of ``like`` for each of them.
        """
        spans = tiles(like.shape[1] // ratio, self.tile)
        found = [pieces[i].expand_as(like[:, i * ratio : end * ratio]) for i, end in spans]
        return torch.cat(found, dim=1) if found else torch.zeros_like(like)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Ȯ (B, H, N_q, E) and L̇ (B, H, N_q)."""
        query = self.inputs[0]
        zero = self.q.new_zeros(())
        lses: dict[int, Tensor] = defaultdict(lambda: zero)
        outs: dict[int, Tensor] = defaultdict(lambda: zero)
        with without_autocast(query):
            for queries, _, keys in self._visible():
                p, tangent, _, _ = self._tangent(queries, keys)
                weighted, columns, i = p * tangent, slice(*keys), queries[0]
                lses[i] = lses[i] + weighted.sum(-1)
                outs[i] = outs[i] + weighted @ self.v[:, columns] + p @ self.tv[:, columns]
            lse = self._concatenated(lses, self.lse, self.ratio)
            lse = lse + self.sink_share * self.tsink
            out = self._concatenated(outs, self.out, self.ratio) - lse[..., None] * self.out
            return unfold(out, query.shape, self.groups), unfold(lse, query.shape, self.groups)

    def backward(self) -> tuple[Tensor, ...]:
        """Tangents of dQ, dK, dV (B, H, N, ...), and of the gradients of bias and sinks."""
        query, key, value = self.inputs
        bias = self.given.bias
        zero = query.new_zeros(())
        dbias = zero if bias is None else torch.zeros_like(bias, dtype=self.q.dtype)
        with without_autocast(query):
            tlse, tdelta = self.tlse, (self.grad_out * self.tout).sum(-1)
            dq: dict[int, Tensor] = defaultdict(lambda: zero)
            dk: dict[int, Tensor] = defaultdict(lambda: zero)
            dv: dict[int, Tensor] = defaultdict(lambda: zero)
            for queries, rows, keys in self._visible():
                columns, i, j = slice(*keys), queries[0], keys[0]
                q, tq, do = self.q[:, rows], self.tq[:, rows], self.grad_out[:, rows]
                k, tk = self.k[:, columns], self.tk[:, columns]
                p, ts, slope, curvature = self._tangent(queries, keys)
                tp = p * (ts - tlse[:, rows, None])
                dp = do @ self.v[:, columns].transpose(1, 2) - self.delta[:, rows, None]
                tdp = do @ self.tv[:, columns].transpose(1, 2) - tdelta[:, rows, None]
                ds, tds = p * dp, tp * dp + p * tdp
                dv[j] = dv[j] + tp.transpose(1, 2) @ do
                if bias is not None:
                    cut = bias_of_tile(dbias, queries, keys)
                    cut += self.unfold_tile(tds, queries).sum_to_size(cut.shape)
                if slope is not None and curvature is not None:
                    ds, tds = ds * slope, tds * slope + ds * curvature
                dq[i] = dq[i] + tds @ k + ds @ tk
                dk[j] = dk[j] + tds.transpose(1, 2) @ q + ds.transpose(1, 2) @ tq
            dq_rows = self._concatenated(dq, self.q, self.ratio)
            gradients = (
                unfold(dq_rows * self.problem.scale, query.shape, self.groups),
                unfold(self._concatenated(dk, self.k), key.shape, self.groups),
                unfold(self._concatenated(dv, self.v), value.shape, self.groups),
            )
            of_rows = -self.sink_share * ((self.tsink - tlse) * self.delta + tdelta)
            dsinks = unfold(of_rows, query.shape, self.groups).sum((0, 2))
        return *gradients, dbias, dsinks
