"""The operators' sharding rules for ``torch.distributed.tensor.DTensor``.

Batch and heads shard without communication: every rank attends with its part. Where query heads
share key heads, heads shard if the mesh divides the number of key heads. A gradient of what all
parts share, a broadcast bias or the sinks, is the sum over the ranks (``Partial``). Other
placements, sequences split over ranks among them, are gathered first.

The rules are registered when the first DTensor is seen: ``torch.distributed.tensor`` is imported by
the program that makes one, and not by this package.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flashattn_triton.operator_rules import BIAS, GIVEN, RESULTS, SINKS, TENSORS

# Placements of outputs, and of inputs, None where an input is no tensor.
Rule = tuple[list[Any], list[Any]]


def register_for(x: Tensor, forward: Any, backward: Any) -> None:
    """Registers the rules of both operators if ``x`` is a DTensor; repeatable."""
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
