"""Exact attention of sequences that are spread over ranks: the public functions.

Legend: B batch, H query heads, G key/value heads, n tokens of this rank, D head_dim of query and
key, E head_dim of value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from flashattn_triton import attention
from flashattn_triton.attention import flash_attention, flash_attention_varlen
from flashattn_triton.context_parallel.communication import lost_ranks_named
from flashattn_triton.context_parallel.operator import context_forward, setting_of
from flashattn_triton.context_parallel.schedules import Way, choose, gathered, heads_of_piece
from flashattn_triton.context_parallel.tokens import (
    Group,
    check_end,
    order_of_rank,
    ranks_of,
    starts_of,
)
from flashattn_triton.context_parallel.transfers import in_words
from flashattn_triton.inputs import autocast, check_dense, check_tensors, refuse_unknown
from flashattn_triton.mask_and_bias import check_sinks
from flashattn_triton.problem import (
    DTYPES,
    CausalArgument,
    Implementation,
    Layout,
    Problem,
    Window,
    check_choice,
    heads_first,
    new_problem,
    normalise_flag,
)

#: How the ranks of a ring communicate.
Communication = Literal["auto", "messages", "peer-copy"]


class ContextKeywords(TypedDict, total=False):
    """Keywords of :func:`context_parallel_attention`."""

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
    communication: Communication


def context_parallel_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Group = None,
    **keywords: Unpack[ContextKeywords],
) -> Any:  # fmt: skip
    """Self-attention of sequences that are spread over ranks.

    Every rank calls this with its tokens in zigzag order (:func:`shard_tokens`) and gets its part
    of what one process computes. Differentiable in query, key, value and sinks, once. Gradients are
    summed over the ranks in fp32: the error is that of one call, however many ranks there are.
    Collective, in both passes. :func:`explain` says which way keys and values reach the queries.

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
        return_lse: also return the logsumexp.
        communication: of a ring: "messages" are NCCL's or gloo's, "peer-copy" copies between GPUs
            of one host, which take nothing from the kernels beside them but need memory of their
            own: keys and values of a rank, and three times their gradients in fp32. "auto" copies
            where that is possible.

    Returns:
        This rank's output, in the inputs' layout and dtype; with ``return_lse`` also the
        logsumexp, (B, H, n) or (H, n) fp32.

    Raises:
        ValueError: an argument is not what is described above, or differs between ranks.
        TypeError: not a tensor, not a group, or an unknown keyword.
        RankLostError: a rank is lost, or does not come.
    """
    return _attention("auto", query, key, value, group, **keywords)


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Group = None,
    **keywords: Unpack[ContextKeywords],
) -> Any:  # fmt: skip
    """:func:`context_parallel_attention` to the keys of one rank after another.

    Takes, returns and raises the same. Outputs are joined in fp32. A rank holds the keys of two
    others at a time, and gets none that the mask hides from all of its tokens.
    """
    return _attention("ring", query, key, value, group, **keywords)


def all_gather_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Group = None,
    **keywords: Unpack[ContextKeywords],
) -> Any:  # fmt: skip
    """:func:`context_parallel_attention` to the keys of all ranks, gathered a few heads at a time.

    Takes, returns and raises the same. Every query has all of its keys in one call, so that output
    and gradient of a query are those of one call. A rank holds two of eight parts of the heads of
    all keys at a time, or two heads if there are fewer than eight.
    """
    return _attention("all-gather", query, key, value, group, **keywords)


def explain(
    query: Tensor, key: Tensor, value: Tensor, group: Group = None,
    **keywords: Unpack[ContextKeywords],
) -> str:  # fmt: skip
    """In words: which way :func:`context_parallel_attention` takes, and why. Communicates nothing.

    Takes its arguments, and raises its errors that need no other rank.
    """
    ranks, (_, k, v), problem, starts, rows = packed_problem(query, key, value, group, **keywords)
    if ranks is None:
        return "no other rank: one call of flash_attention"
    order = order_of_rank("query", len(k), ranks, starts, rows)
    heads, width, band = k.shape[1], k.shape[2] + v.shape[2], problem.band
    way, reason = choose(order, band, heads, width, k.element_size())
    if way == "ring":
        calls = sum(len(order.calls(ranks.rank(), x, band)) for x in range(ranks.size()))
        asked = keywords.get("communication", "auto")
        how = in_words(ranks, k.device) if asked == "auto" else f"by {asked}, as asked"
    else:
        calls = -(-heads // heads_of_piece(heads)) * len(order.calls(ranks.rank(), None, band))
        how = "by collectives"
    return f"{way}: {reason}; {calls} calls forward, and as many backward; {how}"


@torch.no_grad()
def largest_scores(
    query: Tensor, key: Tensor, group: Group = None, **keywords: Unpack[ContextKeywords]
) -> Tensor:
    """:func:`flashattn_triton.largest_scores` of sequences that are spread over ranks, for QK-clip.

    Costs one product of queries and keys, and the gathering of the keys, a few heads at a time. All
    ranks get the same result, so that they shrink the same heads. Collective.

    The arguments, and the errors, are those of :func:`context_parallel_attention`; sinks are no
    scores, and ``return_lse`` says nothing here.

    Returns:
        (H,) fp32, over the tokens of all ranks, equal on every rank; -inf where no query sees a
        key.
    """
    ranks, (q, k, _), problem, starts, rows = packed_problem(query, key, key, group, **keywords)
    if ranks is None:
        if starts is None:
            starts = torch.arange(0, len(q) + 1, max(1, len(q) // max(1, rows)))
        starts = starts.to(q.device)
        return attention.largest_scores(
            q, k, cu_seqlens_q=starts, cu_seqlens_k=starts, scale=problem.scale,
            softcap=problem.softcap, implementation=problem.implementation,
            causal=problem.band[1] == 0, window=problem.window,
        )  # fmt: skip
    _, setting = setting_of(
        "largest scores", q, k, k, None, starts, rows, "all-gather", ranks.group_name, "messages",
        *problem.pack(),
    )  # fmt: skip
    found = q.new_full((q.shape[1],), float("-inf")).float()
    for heads, (keys,) in gathered(setting, q, k):
        for call in setting.calls(None):
            starts_q, starts_k = call.starts(q.device)
            part = attention.largest_scores(
                q[call.queries, heads], keys[call.keys], cu_seqlens_q=starts_q,
                cu_seqlens_k=starts_k, **setting.options(call),
            )  # fmt: skip
            found[heads] = torch.maximum(found[heads], part)
    with lost_ranks_named(ranks, "the maximum of the scores"):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=ranks)
    return found


def _attention(
    way: Way,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
    **keywords: Unpack[ContextKeywords],
) -> Any:
    ranks, (q, k, v), problem, starts, rows = packed_problem(query, key, value, group, **keywords)
    if ranks is None:
        dropped = ("cu_seqlens", "communication", "layout" if problem.packed else "")
        options: dict[str, Any] = {name: x for name, x in keywords.items() if name not in dropped}
        if starts is None:
            return flash_attention(query, key, value, **options)
        starts = starts.to(query.device)
        return flash_attention_varlen(query, key, value, starts, starts, **options)
    out, lse = context_forward(
        q, k, v, keywords.get("sinks"), starts, rows, way, ranks.group_name,
        keywords.get("communication", "auto"), *problem.pack(),
    )  # fmt: skip
    if rows:
        out = out.unflatten(0, (rows, -1))  # "bshd"
        out = out.transpose(1, 2) if problem.layout == "bhsd" else out
        lse = lse.unflatten(1, (rows, -1)).transpose(0, 1)
    return (out, lse) if keywords.get("return_lse") else out


def packed_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Group,
    *,
    sinks: Tensor | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    layout: Layout | None = None,
    return_lse: bool = False,
    communication: Communication = "auto",
    **options: Any,
) -> tuple[
    dist.ProcessGroup | None, tuple[Tensor, Tensor, Tensor], Problem, Tensor | None, int
]:  # fmt: skip
    """Ranks, query, key and value as (tokens, heads, head_dim), what is asked for, and sequences.

    Of the latter, starts on the CPU, or None and how many there are of one length. Raises the
    errors that need no other rank.
    """
    refuse_unknown("context_parallel", ContextKeywords.__annotations__, options)
    check_tensors(query=query, key=key, value=value)
    normalise_flag("return_lse", return_lse)
    remedy = "Leave it out to let the ranks choose."
    check_choice("communication", communication, get_args(Communication), remedy)
    ranks = ranks_of(group)
    starts = None
    if cu_seqlens is not None:
        if not isinstance(cu_seqlens, Tensor):
            cu_seqlens = torch.tensor(starts_of(cu_seqlens))
        starts = cu_seqlens.cpu()
    if starts is not None and layout is not None:
        raise ValueError(
            f"layout must be None with cu_seqlens, whose tensors are (tokens, heads, head_dim), "
            f"but got {layout!r}. Leave it out."
        )
    query, key, value = autocast(query, key, value)
    problem = new_problem(layout if starts is None else "thd", query.shape[-1], **options)
    dims = 3 if problem.packed else 4
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != dims or x.dtype not in DTYPES:
            raise ValueError(
                f"{name} must be float16, bfloat16 or float32 with {dims} dimensions, but got "
                f"{x.dtype} of shape {tuple(x.shape)}. Packed tensors come with cu_seqlens, and "
                f"only they have 3 dimensions."
            )
    q, k, v = (heads_first(x, problem.layout) for x in (query, key, value))
    check_dense(q, k, v)
    if k.shape[2] != q.shape[2]:
        raise ValueError(
            f"key must have query's {q.shape[2]} tokens, but got {k.shape[2]}. Every rank passes "
            f"queries, keys and values of its own tokens."
        )
    if sinks is not None:
        check_sinks(sinks, q.shape[1], q.device)
    if starts is not None:
        if ranks is None and not torch.compiler.is_compiling():
            check_end(starts, len(query))
        return ranks, (query, key, value), problem, starts, 0
    if ranks is not None and len(q) == 0:
        raise ValueError(
            "query must have at least one sequence where ranks share them, but got none. Leave the "
            "call out on every rank."
        )
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    return ranks, (query, key, value), problem, None, len(q)
