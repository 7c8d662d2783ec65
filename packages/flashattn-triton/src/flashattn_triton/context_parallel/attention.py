"""Exact attention of sequences that are spread over ranks: the public functions.

Both are one registered operator, ``flashattn_triton::context_forward``, with its derivative.
Compilers see it as a whole, and activation checkpointing with a selective policy can keep its
output, so that keys need not travel once more. As PyTorch's functional collectives, it takes the
name of a process group.

Legend: B batch, H query heads, G key/value heads, n tokens of this rank, D head_dim of query and
key, E head_dim of value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from flashattn_triton.attention import autocast, flash_attention, flash_attention_varlen
from flashattn_triton.context_parallel import schedules
from flashattn_triton.context_parallel.agreement import agree
from flashattn_triton.context_parallel.schedules import Results, Setting
from flashattn_triton.context_parallel.tokens import Group, order_of, ranks_of, starts_of, zigzag
from flashattn_triton.inputs import check_dense
from flashattn_triton.logsumexp import sinks_gradient
from flashattn_triton.mask_and_bias import check_sinks
from flashattn_triton.mistakes import check_tensors
from flashattn_triton.problem import (
    DTYPES,
    CausalArgument,
    Implementation,
    Layout,
    Window,
    heads_first,
    new_problem,
    normalise_flag,
)

Way = Literal["ring", "all-gather"]
# Forward and backward.
_WAYS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ring": (schedules.ring_forward, schedules.ring_backward),
    "all-gather": (schedules.all_gather_forward, schedules.all_gather_backward),
}


class ContextKeywords(TypedDict, total=False):
    """Keywords of :func:`ring_attention` and :func:`all_gather_attention`."""

    causal: CausalArgument
    window: Window | None
    sinks: Tensor | None
    cu_seqlens: Tensor | Sequence[int] | None
    scale: float | None
    softcap: float | None
    layout: Layout | None
    return_lse: bool
    deterministic: bool | None
    implementation: Implementation


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group = None,
    **keywords: Unpack[ContextKeywords],
) -> Any:
    """Self-attention of sequences that are spread over ranks, to one rank's keys after another's.

    Every rank calls this with its tokens in zigzag order (:func:`shard_tokens`) and gets its part
    of what one process computes. Differentiable in query, key, value and sinks, once. Outputs are
    joined, and gradients added, in fp32: the error is that of one call, however many ranks there
    are. A rank holds the keys of two ranks at a time. Collective, in both passes.

    Args:
        query: (B, H, n, D) for layout "bhsd", (B, n, H, D) for "bshd", with the n tokens of this
            rank; packed (n, H, D) with ``cu_seqlens``. fp16, bf16 or fp32.
        key: (B, G, n, D), of the same tokens, G dividing H.
        value: (B, G, n, E).
        group: the ranks: a process group, a mesh of one dimension, or None for all.
        causal: a token sees itself and those before it in its sequence. True, "top-left" and
            "bottom-right" are the same here.
        window: (left, right) numbers of tokens beside its own that a token sees. None: no limit.
        sinks: (H,), equal on all ranks. Their gradient is that of this rank's tokens.
        cu_seqlens: for packed tensors, where each sequence starts among the tokens of all ranks,
            and their number; equal on all ranks. On a GPU, the host waits for it.
        scale: as of :func:`~flashattn_triton.flash_attention`, as are ``softcap``, ``layout``,
            ``deterministic`` and ``implementation``.
        softcap: see ``scale``.
        layout: see ``scale``.
        return_lse: also return the logsumexp.
        deterministic: see ``scale``.
        implementation: see ``scale``.

    Returns:
        This rank's output, in the inputs' layout and dtype; with ``return_lse`` also the
        logsumexp, (B, H, n) or (H, n) fp32.

    Raises:
        ValueError: an argument is not what is described above, or differs between ranks.
        TypeError: not a tensor, or not a group.
        RuntimeError: a rank is lost, or does not come.
    """
    return _attention("ring", query, key, value, group, **keywords)


def all_gather_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group = None,
    **keywords: Unpack[ContextKeywords],
) -> Any:
    """:func:`ring_attention` by gathering the keys of all ranks, a few heads at a time.

    Takes, returns and raises the same. Every query has all of its keys in one call, so that output
    and gradient of a query are those of one call. A rank holds two of eight parts of the heads of
    all keys at a time, or two heads if there are fewer than eight.
    """
    return _attention("all-gather", query, key, value, group, **keywords)


def _attention(
    way: Way,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
    *,
    causal: CausalArgument = False,
    window: Window | None = None,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: Layout | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    implementation: Implementation = "auto",
) -> Any:
    check_tensors(query=query, key=key, value=value)
    normalise_flag("return_lse", return_lse)
    ranks = ranks_of(group)
    starts = None
    if cu_seqlens is not None:
        starts = torch.tensor(starts_of(cu_seqlens), dtype=torch.int32)
        if layout is not None:
            raise ValueError(
                f"layout must be None with cu_seqlens, whose tensors are (tokens, heads, "
                f"head_dim), but got {layout!r}. Leave it out."
            )
    if ranks is None:
        options: Any = {
            "causal": "top-left" if causal is True else causal, "window": window, "sinks": sinks,
            "scale": scale, "softcap": softcap, "deterministic": deterministic,
            "implementation": implementation, "return_lse": return_lse,
        }  # fmt: skip
        if starts is None:
            return flash_attention(query, key, value, layout=layout, **options)
        starts = starts.to(query.device)
        return flash_attention_varlen(query, key, value, starts, starts, **options)
    query, key, value = autocast(query, key, value)
    problem = new_problem(
        "thd" if starts is not None else layout, query.shape[-1], (0, 0), causal, scale, window,
        softcap, deterministic, implementation,
    )  # fmt: skip
    _check(problem.layout, query, key, value, sinks)
    rows = 0 if problem.packed else len(query)
    q, k, v = (_packed(x, problem.layout) for x in (query, key, value))
    left, right = problem.band
    out, lse = context_forward(
        q, k, v, sinks, starts, rows, way, ranks.group_name, -1 if left is None else left,
        -1 if right is None else right, problem.scale, problem.softcap or 0.0,
        problem.deterministic, problem.implementation,
    )  # fmt: skip
    if rows:
        out = out.unflatten(0, (rows, -1))  # "bshd"
        out = out.transpose(1, 2) if problem.layout == "bhsd" else out
        lse = lse.unflatten(1, (rows, -1)).transpose(0, 1)
    return (out, lse) if return_lse else out


def _packed(x: Tensor, layout: str) -> Tensor:
    """(tokens, heads, head_dim)."""
    return x if layout == "thd" else heads_first(x, layout).transpose(1, 2).flatten(0, 1)


def _check(layout: str, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> None:
    """Refuses tensors of which attention of a rank's tokens to themselves is not defined."""
    dims = 3 if layout == "thd" else 4
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != dims or x.dtype not in DTYPES:
            raise ValueError(
                f"{name} must be float16, bfloat16 or float32 with {dims} dimensions, but got "
                f"{x.dtype} of shape {tuple(x.shape)}. Packed tensors come with cu_seqlens, and "
                f"only they have 3 dimensions."
            )
    q, k, v = (heads_first(x, layout) for x in (query, key, value))
    check_dense(q, k, v)
    if k.shape[2] != q.shape[2]:
        raise ValueError(
            f"key must have query's {q.shape[2]} tokens, but got {k.shape[2]}. Every rank passes "
            f"queries, keys and values of its own tokens."
        )
    if sinks is not None:
        check_sinks(sinks, q.shape[1], q.device)


# -- the operator ----------------------------------------------------------------------------------

_ARGUMENTS = (
    "Tensor? sinks, Tensor? cu_seqlens, int rows, str way, str group, int left, int right, "
    "float scale, float softcap, bool deterministic, str implementation"
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
    ``left`` and ``right`` are -1, and ``softcap`` is 0, for none.
    """
    way, setting = _setting("forward", query, key, value, sinks, *rest)
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
    way, setting = _setting("backward", query, key, value, sinks, *rest)
    results = Results(out, lse, grad_out, grad_lse)
    gradients = _WAYS[way][1](setting, query, key, value, results)
    dq, dk, dv = (x.to(query.dtype) for x in gradients)
    if sinks is None:
        return dq, dk, dv, query.new_empty(0)
    o, do = (heads_first(x, "thd") for x in (out, grad_out))
    dl = None if grad_lse is None else grad_lse.unsqueeze(0)
    return dq, dk, dv, sinks_gradient(sinks, o, lse.unsqueeze(0), do, dl)


def _setting(
    direction: str, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
    cu_seqlens: Tensor | None, rows: int, way: str, group: Any, left: int, right: int, scale: float,
    softcap: float, deterministic: bool, implementation: Any,
) -> tuple[str, Setting]:  # fmt: skip
    """The way and what it needs, once all ranks have agreed on it. Collective.

    Raises:
        ValueError: the ranks differ, or a rank does not have the tokens that are its own.
        RuntimeError: a rank is lost.
    """
    ranks = _resolve_process_group(group)
    starts, n = None if cu_seqlens is None else starts_of(cu_seqlens), len(query)
    if starts is None:
        tokens = f"{rows} x {n // rows}"
    else:
        order = zigzag(ranks.size(), starts)
        expected = order.length(ranks.rank())
        tokens = "as cu_seqlens says" if n == expected else f"{n} instead of {expected}"
    facts = (
        ("pass", f"{direction}, {way}"),
        ("tokens of a rank", tokens),
        ("query", f"{query.dtype} {tuple(query.shape[1:])}"),
        ("key", str(tuple(key.shape[1:]))),
        ("value", str(tuple(value.shape[1:]))),
        ("visible positions before and after", f"({left}, {right})"),
        ("scale and softcap", f"({scale}, {softcap})"),
        ("sinks", str(sinks is not None)),
    )
    agree(ranks, facts, starts, query.device)
    if starts is None:
        length = n // rows * ranks.size()
        order_of(ranks, length, None)
        order = zigzag(ranks.size(), tuple(range(0, rows * length + 1, length)))
    elif n != expected:
        raise ValueError(
            f"query must have the {expected} tokens of rank {ranks.rank()}, but got {n}. Pass what "
            f"shard_tokens returns with the same cu_seqlens."
        )
    return way, Setting(
        group=ranks,
        order=order,
        band=(None if left < 0 else left, None if right < 0 else right),
        sinks=sinks,
        options={
            "scale": scale,
            "softcap": softcap or None,
            "deterministic": deterministic,
            "implementation": implementation,
        },
    )


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
