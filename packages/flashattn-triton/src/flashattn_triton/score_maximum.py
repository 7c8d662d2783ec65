"""The largest score of each head, by which QK-clip decides whose weights it shrinks.

Muon with QK-clip (Kimi K2, arXiv:2507.20534, section 2.1) scales the query and key weights of a
head down where its largest score of a batch is above a threshold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from flashattn_triton.inputs import given_starts
from flashattn_triton.mask_and_bias import Given
from flashattn_triton.mistakes import check_tensors
from flashattn_triton.op import attend
from flashattn_triton.operator_rules import NOTHING
from flashattn_triton.problem import Layout, OptionKeywords, new_problem


@torch.no_grad()
def largest_scores(
    query: Tensor,
    key: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    layout: Layout | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Tensor:
    """The largest score of each head that its softmax sees, over the batch: scaled, soft-capped.

    Costs one product of queries and keys beside :func:`~flashattn_triton.flash_attention`, and no
    memory but one number for each query and head. Of keys in parts, the largest is the ``maximum``
    of their results. Not differentiable. On a Hopper GPU the portable kernel runs. Sinks are no
    scores.

    Args:
        query: (B, H, N_q, D), (B, N_q, H, D) for layout "bshd", or (T_q, H, D) with ``cu_seqlens``.
        key: (B, G, N_k, D), in the same layout.
        cu_seqlens_q: where packed sequences start, with ``cu_seqlens_k``, as of
            :func:`~flashattn_triton.flash_attention_varlen`.
        bias: and the other arguments, as of :func:`~flashattn_triton.flash_attention`; not with
            ``cu_seqlens``.

    Returns:
        (H,) fp32; -inf for a head no query of which sees a key.

    Raises:
        ValueError: a tensor or an option is not what is described above.
        TypeError: not a tensor.
    """
    check_tensors(query=query, key=key)
    starts = given_starts(cu_seqlens_q, cu_seqlens_k)
    given: Given = (alibi_slopes, bias, prefix_lengths, None, None, *starts)
    packed = starts[0] is not None
    if packed and bias is not None:
        raise ValueError("bias must be None for packed sequences, but got one. Pad them.")
    if keywords.get("implementation") == "hopper":
        keywords["implementation"] = "triton"
    longest = (query.shape[0], key.shape[0]) if packed else (0, 0)
    problem = new_problem("thd" if packed else layout, query.shape[-1], longest, **keywords)
    problem = replace(problem, largest_only=True, out_dtype=None)
    if all(x is None for x in given):
        given = NOTHING
    _, of_rows = attend(problem, query, key, key, given)
    assert of_rows is not None
    spare = of_rows.new_full((*of_rows.shape[:-1], 1), float("-inf"))  # where there is no query
    of_heads = torch.cat([of_rows, spare], -1).amax(-1)
    return of_heads if packed else torch.cat([of_heads, spare[:1, :, 0]]).amax(0)
