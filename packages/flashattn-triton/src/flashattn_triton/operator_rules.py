"""The operators' rules for ``torch.func.vmap``, ``FlopCounterMode`` and ``DTensor``.

``forward`` takes query, key, value, tensors named :data:`GIVEN` and the numbers of a problem;
``backward`` takes four results behind the first three, and at its end which gradients are needed.

DTensors: batch and heads shard without communication, because every rank attends with its part.
Where query heads share key heads, heads shard if the mesh divides the number of key heads. A
gradient of what all parts share, a broadcast bias or the sinks, is the sum over the ranks
(``Partial``). Other placements, sequences split over ranks among them, are gathered first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashattn_triton.mask_and_bias import BIAS, GIVEN, SINKS, STARTS

TENSORS = 3 + len(GIVEN)  # of the operator ``forward``
RESULTS = 4  # that ``backward`` takes behind query, key and value

# ---- torch.func.vmap -----------------------------------------------------------------------------


def _fold(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """Moves a batched dimension in front of the batch and merges the two."""
    if x is None:
        return None
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def vmap_rule(operator: Callable[..., Any], n_rows: int) -> Callable[..., tuple[Any, Any]]:
    """The rule of an operator that takes ``n_rows`` tensors of rows before those that are given.

    The mapped dimension becomes a part of the batch; where tensors are given, which may be shared
    or mapped, its elements are computed one after another.
    """

    def rule(info: Any, in_dims: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
        size, rest = info.batch_size, arguments[n_rows:]
        if all(x is None for x in rest[: len(GIVEN)]):
            rows = zip(arguments[:n_rows], in_dims, strict=False)
            results = operator(*(_fold(x, dim, size) for x, dim in rows), *rest)
            found = tuple(x.unflatten(0, (size, len(x) // size)) for x in results)
        else:
            pairs = list(zip(arguments, in_dims, strict=True))
            each = (
                operator(*(x.select(dim, i) if isinstance(dim, int) else x for x, dim in pairs))
                for i in range(size)
            )
            found = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
        return found, (0,) * len(found)

    return rule


# ---- floating-point operations -------------------------------------------------------------------


def _products(query: Tensor, key: Tensor, value: Tensor, rest: Sequence[Any]) -> tuple[int, int]:
    """Operations of one product over D, and over E, of all queries with all keys.

    As PyTorch counts its own attention: without regard to masks, two for each multiplication and
    addition. Lengths of packed sequences count if they can be read, else the longest of them.
    """
    starts, (layout, *longest) = rest[STARTS : len(GIVEN)], rest[len(GIVEN) : len(GIVEN) + 3]
    heads = query.shape[-2 if layout != "bhsd" else -3]
    if layout == "thd":
        lengths = [
            [n] * (x.shape[0] - 1) if x.is_meta else x.diff().tolist()
            for x, n in zip(starts, longest, strict=True)
        ]
        pairs = sum(n_q * n_k for n_q, n_k in zip(*lengths, strict=True))
    else:
        rows = -2 if layout == "bhsd" else -3
        pairs = query.shape[0] * query.shape[rows] * key.shape[rows]
    return 2 * heads * pairs * query.shape[-1], 2 * heads * pairs * value.shape[-1]


def forward_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any) -> int:
    """S is over D; O over E, unless only the largest scores are computed."""
    over_d, over_e = _products(query, key, value, rest)
    return over_d if rest[-2] else over_d + over_e


def backward_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any) -> int:
    """S, dQ and dK are over D; dP and dV over E."""
    over_d, over_e = _products(query, key, value, rest[RESULTS:])
    of_inputs, of_bias, _ = rest[-1]
    total = 3 * over_d + 2 * over_e if of_inputs else 0
    return total + over_d + over_e if of_bias else total


def tangents_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any) -> int:
    """S and two products of its tangent are over D; two of the output's tangent over E."""
    over_d, over_e = _products(query, key, value, rest[7:])
    return 3 * over_d + 2 * over_e


# ---- DTensor -------------------------------------------------------------------------------------

# Placements of outputs, and of inputs, None where an input is no tensor.
Rule = tuple[list[Any], list[Any]]


def register_for(x: Tensor, forward: Any, backward: Any) -> None:
    """Registers the rules of both operators if ``x`` is a DTensor; repeatable.

    ``torch.distributed.tensor`` is imported by the program that makes one, and not by this package.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and isinstance(x, module.DTensor):
        _register(forward, backward)


@functools.cache
def _register(forward: Any, backward: Any) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(forward)(_forward_rules)
    register_sharding(backward)(_backward_rules)
    # Placements depend on what follows the tensors: the layout, and which gradients are needed.
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    known[forward] = RuntimeSchemaInfo(TENSORS, needs_pytree=True)
    known[backward] = RuntimeSchemaInfo(TENSORS + RESULTS, needs_pytree=True)


def _forward_rules(query: Any, key: Any, value: Any, *rest: Any) -> list[Rule]:
    given, layout = rest[: len(GIVEN)], rest[len(GIVEN)]
    rules = []
    for rows, statistic, of_given in _placements(query, key, given, layout):
        own = [None if x is None else p for x, p in zip(given, of_given, strict=True)]
        inputs = [*[rows] * 3, *own]
        rules.append(([rows, statistic], [*inputs, *[None] * (len(rest) - len(GIVEN))]))
    return rules


def _backward_rules(query: Any, key: Any, value: Any, *rest: Any) -> list[Rule]:
    from torch.distributed.tensor import Partial, Replicate

    *_, grad_lse = rest[:RESULTS]
    given, layout = rest[RESULTS : RESULTS + len(GIVEN)], rest[RESULTS + len(GIVEN)]
    needs = rest[-1]
    rules = []
    for rows, statistic, of_given in _placements(query, key, given, layout):
        replicated = rows == Replicate()
        outputs = [rows if needs[0] else Replicate()] * 3
        for i, needed in ((BIAS, needs[1]), (SINKS, needs[2])):
            shared = of_given[i] == Replicate() and not replicated
            of_gradient = Partial() if shared else of_given[i]
            outputs.append(of_gradient if needed else Replicate())
        inputs = [rows] * 4 + [statistic, rows, None if grad_lse is None else statistic]
        inputs += [None if x is None else p for x, p in zip(given, of_given, strict=True)]
        rules.append((outputs, [*inputs, *[None] * (len(rest) - RESULTS - len(GIVEN))]))
    return rules


def _placements(query: Any, key: Any, given: Sequence[Any], layout: str) -> list[Any]:
    """Placements of rows, of the logsumexp, and of the tensors named :data:`GIVEN`."""
    from torch.distributed.tensor import Replicate, Shard

    whole = Replicate()
    placements: list[Any] = [(whole, whole, [whole] * len(GIVEN))]
    bias = given[BIAS]

    def of_bias(dim: int) -> Any:
        return whole if bias is None or bias.shape[dim] == 1 else Shard(dim)

    heads = 2 if layout == "bshd" else 1
    if layout != "thd":
        of_given = [Shard(0), of_bias(0), Shard(0), Shard(0), whole, whole, whole]
        placements.append((Shard(0), Shard(0), of_given))
    if key.shape[heads] % query.mesh.size() == 0:
        of_given = [Shard(1), of_bias(1), whole, whole, Shard(0), whole, whole]
        placements.append((Shard(heads), Shard(0 if layout == "thd" else 1), of_given))
    return placements
