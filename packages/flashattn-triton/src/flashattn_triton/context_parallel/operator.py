"""The operator of attention over ranks, ``flashattn_triton::context_forward``, and its derivative.

Compilers see it as a whole, and activation checkpointing with a selective policy can keep its
output, so that keys need not travel once more. As PyTorch's functional collectives, it takes the
name of a process group.

Legend: H query heads, G key/value heads, n tokens of this rank, D head_dim of query and key, E
head_dim of value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils.flop_counter import register_flop_formula

from flashattn_triton.context_parallel import schedules
from flashattn_triton.context_parallel.communication import agree
from flashattn_triton.context_parallel.schedules import Results, Setting, choose
from flashattn_triton.context_parallel.tokens import order_of_rank, starts_of, zigzag
from flashattn_triton.op import NUMBERS
from flashattn_triton.problem import Problem, heads_first
from flashattn_triton.tiled import sinks_gradient

# Forward and backward.
_WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ring": (schedules.ring_forward, schedules.ring_backward),
    "all-gather": (schedules.all_gather_forward, schedules.all_gather_backward),
}

_ARGUMENTS = (
    f"Tensor? sinks, Tensor? cu_seqlens, int rows, str way, str group, str communication, {NUMBERS}"
)


@torch.library.custom_op(
    "flashattn_triton::context_forward",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_ARGUMENTS}) -> (Tensor out, Tensor lse)",
)
def context_forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Output (n, H, E) in query's dtype and logsumexp (H, n) of packed tensors.

    ``cu_seqlens`` is on the CPU, or None for as many sequences of one length as there are ``rows``.
    The last arguments are those of :meth:`~flashattn_triton.Problem.pack`.
    """
    way, setting = setting_of("forward", query, key, value, sinks, *rest)
    out, lse = _WAYS[way][0](setting, query, key, value)
    return out, lse


@torch.library.custom_op(
    "flashattn_triton::context_backward",
    mutates_args=(),
    schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor grad_out, "
        f"Tensor? grad_lse, {_ARGUMENTS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
    ),
)
def context_backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
    grad_lse: Tensor | None, sinks: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the inputs of ``context_forward``; that of sinks is empty if there are none."""
    way, setting = setting_of("backward", query, key, value, sinks, *rest)
    results = Results(out, lse, grad_out, grad_lse)
    gradients = _WAYS[way][1](setting, query, key, value, results)
    dq, dk, dv = (x.to(query.dtype) for x in gradients)
    if sinks is None:
        return dq, dk, dv, query.new_empty(0)
    o, do = (heads_first(x, "thd") for x in (out, grad_out))
    dl = None if grad_lse is None else grad_lse.unsqueeze(0)
    return dq, dk, dv, sinks_gradient(sinks, o, lse.unsqueeze(0), do, dl)


def setting_of(
    direction: str, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
    cu_seqlens: Tensor | None, rows: int, way: str, group: Any, communication: str, *numbers: Any,
) -> tuple[str, Setting]:  # fmt: skip
    """The way and what it needs, once all ranks have agreed on it. Collective."""
    ranks: dist.ProcessGroup = _resolve_process_group(group)
    problem = Problem.unpack(numbers)
    left, right = (-1 if x is None else x for x in problem.band)
    starts, n = None if cu_seqlens is None else starts_of(cu_seqlens), len(query)
    if starts is None:
        tokens = f"{rows} x {n // rows}"
    else:
        expected = zigzag(ranks.size(), starts).length(ranks.rank())
        tokens = "as cu_seqlens says" if n == expected else f"{n} instead of {expected}"
    facts = (
        ("pass", f"{direction}, {way}"),
        ("communication", communication),
        ("tokens of a rank", tokens),
        ("query", f"{query.dtype} {tuple(query.shape[1:])}"),
        ("key", str(tuple(key.shape[1:]))),
        ("value", str(tuple(value.shape[1:]))),
        ("visible positions before and after", f"({left}, {right})"),
        ("scale and softcap", f"({problem.scale}, {problem.softcap or 0.0})"),
        ("sinks", str(sinks is not None)),
    )
    agree(ranks, facts, starts, query.device)
    order = order_of_rank("query", n, ranks, starts, rows)
    if way == "auto":
        width = key.shape[2] + value.shape[2]
        way, _ = choose(order, problem.band, key.shape[1], width, key.element_size())
    return way, Setting(ranks, order, problem, sinks, communication)


@context_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:2], value.shape[-1])
    return out, query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


@context_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    sinks = rest[4]
    dsinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return *(x.new_empty(x.shape) for x in (query, key, value)), dsinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, cu_seqlens, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, sinks, cu_seqlens)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    query, key, value, out, lse, sinks, cu_seqlens = ctx.saved_tensors
    none = (None,) * (1 + len(ctx.rest))
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    results = (out, lse, grad_out, grad_lse)
    dq, dk, dv, dsinks = context_backward(query, key, value, *results, sinks, cu_seqlens, *ctx.rest)
    return dq, dk, dv, None if sinks is None else dsinks, *none


context_forward.register_autograd(_backward, setup_context=_save)


def _flops(
    skipped: int, over_d: int, over_e: int, query: Tensor, key: Tensor, value: Tensor, *rest: Any,
    out_val: Any,
) -> int:  # fmt: skip
    """Operations of a rank: products over D and over E of its queries with all keys.

    As :mod:`~flashattn_triton.operator_rules` counts those of one process: without regard to masks.
    ``skipped``: tensors between value and sinks.
    """
    _, starts, rows, _, group, *_ = rest[skipped:]
    size = _resolve_process_group(group).size()
    if starts is None:
        pairs = len(query) * (len(query) // rows) * size
    else:
        pairs = int(starts.diff().square().sum()) // size
    total: int = 2 * query.shape[1] * pairs * (over_d * query.shape[2] + over_e * value.shape[2])
    return total


for _name, _counts in (("forward", (0, 1, 1)), ("backward", (4, 3, 2))):
    _operator = getattr(torch.ops.flashattn_triton, f"context_{_name}")
    register_flop_formula(_operator, get_raw=True)(functools.partial(_flops, *_counts))
