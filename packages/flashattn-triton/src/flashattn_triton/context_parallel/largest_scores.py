"""The largest score of each head where sequences are spread over ranks, for QK-clip.

Keys are gathered a few heads at a time. A rank's queries meet those that they see, and the largest
scores of all ranks are joined by their maximum, so that every rank shrinks the same heads.
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from flashattn_triton import score_maximum
from flashattn_triton.context_parallel.agreement import lost_ranks_named
from flashattn_triton.context_parallel.attention import ContextKeywords, packed_problem
from flashattn_triton.context_parallel.operator import setting_of
from flashattn_triton.context_parallel.schedules import gathered
from flashattn_triton.context_parallel.tokens import Group, ranks_of


@torch.no_grad()
def largest_scores(
    query: Tensor, key: Tensor, group: Group = None, **keywords: Unpack[ContextKeywords]
) -> Tensor:
    """:func:`flashattn_triton.largest_scores` of sequences that are spread over ranks.

    Costs one product of queries and keys, and the gathering of the keys. Collective.

    Args:
        query: as of :func:`context_parallel_attention`, as are the other arguments; sinks are no
            scores, and ``return_lse`` says nothing here.
        key: see ``query``.
        group: see ``query``.
        keywords: see ``query``.

    Returns:
        (H,) fp32, over the tokens of all ranks, equal on every rank; -inf where no query sees a
        key.

    Raises:
        ValueError: an argument is not what is described above, or differs between ranks.
        TypeError: not a tensor, or not a group.
        RankLostError: a rank is lost, or does not come.
    """
    (q, k, _), problem, starts = packed_problem(query, key, key, **keywords)
    ranks = ranks_of(group)
    rows = 0 if problem.packed else len(query)
    if ranks is None:
        if starts is None:
            starts = torch.arange(0, len(q) + 1, max(1, len(q) // max(1, rows)))
        starts = starts.to(q.device)
        return score_maximum.largest_scores(
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
            part = score_maximum.largest_scores(
                q[call.queries, heads], keys[call.keys], cu_seqlens_q=starts_q,
                cu_seqlens_k=starts_k, **setting.options(call),
            )  # fmt: skip
            found[heads] = torch.maximum(found[heads], part)
    with lost_ranks_named(ranks, "the maximum of the scores"):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=ranks)
    return found
