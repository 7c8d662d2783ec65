"""Boolean masks: as a mask of keys or a bias, with the keys that nobody sees set to zero.

A mask that heads and queries share has one byte for each key, beside whatever bias there is. Every
other mask is a bias of 0 and -inf, or joins the bias in one tensor of the shape to which both
broadcast.

Legend: H query heads, G key/value heads, N_q queries, N_k keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashattn_triton.mistakes import check_tensors
from flashattn_triton.operator_rules import Given
from flashattn_triton.problem import Problem, broadcasts, seen_keys


def with_mask(
    mask: Tensor, bias: Tensor | None, query: Tensor, key: Tensor, value: Tensor, layout: str
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Mask of keys (..., N_k) uint8, bias, key and value of a call that has a mask.

    Keys and values that the mask hides from all queries are replaced by zeros, because the product
    of a probability 0 with NaN or infinity, as uninitialised memory may hold, is NaN.

    ``mask`` is bool, broadcastable to (..., H, N_q, N_k), True where the key is visible. Query, key
    and value, of at least 3 dimensions, are in ``layout``, "bhsd" or "bshd".

    Raises:
        ValueError: naming the argument, what it must be and what was given.
        TypeError: not a tensor.
    """
    check_tensors(mask=mask)
    rows, heads = (-2, -3) if layout == "bhsd" else (-3, -2)
    sizes = (*query.shape[:-3], query.shape[heads], query.shape[rows], key.shape[rows])
    fits = broadcasts(mask.shape, sizes)
    if mask.dtype != torch.bool or not fits or mask.device != query.device:
        raise ValueError(
            f"mask must be a bool tensor on {query.device} that broadcasts to {sizes} (batch, "
            f"heads, queries, keys), True where a key is visible, but got {mask.dtype} of shape "
            f"{tuple(mask.shape)} on {mask.device}. Pass mask[:, None, None, :] for one of (batch, "
            f"keys), and numbers as bias."
        )
    seen = mask[(None,) * (3 - mask.dim())].any(-2)  # (..., H or 1, N_k)
    groups = key.shape[heads]
    if seen.shape[-2] > 1 and sizes[-3] % groups == 0:
        seen = seen.unflatten(-2, (groups, -1)).any(-2)
    key, value = _with_zeros(seen, key, value, layout)
    mask = mask[(None,) * (len(sizes) - mask.dim())]
    if mask.shape[-3:-1] == (1, 1):
        mask = mask[..., 0, 0, :].expand(*sizes[:-3], sizes[-1])
        return mask.to(torch.uint8).contiguous(), bias, key, value
    hidden = torch.full((), float("-inf"), dtype=query.dtype, device=query.device)
    bias = torch.where(mask, torch.zeros_like(hidden) if bias is None else bias, hidden)
    return None, bias, key, value


def without_unseen_keys(
    problem: Problem, n_queries: int, key: Tensor, value: Tensor, given: Given
) -> tuple[Tensor, Tensor, Given]:
    """A dense call's key, value and other tensors without keys that its band hides from all.

    The product of a probability 0 with what such keys hold could be NaN, and they cost time. Those
    behind a prefix, whose length is on the device, become zeros instead.
    """
    unchanged = key, value, given
    slopes, bias, prefix_lengths, mask, sinks, *starts = given
    rows = 1 if problem.layout == "bshd" else 2
    n_keys = key.shape[rows]
    columns = 1 if bias is None or bias.dim() == 0 else bias.shape[-1]
    if value.dim() != 4 or value.shape[rows] != n_keys or columns not in (1, n_keys):
        return unchanged  # for the checks that name what does not fit
    first, last = seen_keys(n_queries, n_keys, problem)
    if not torch.compiler.is_compiling() and first == 0 and last == n_keys:
        return unchanged
    if prefix_lengths is not None:
        if prefix_lengths.shape != key.shape[:1] or problem.bottom_right:
            return unchanged
        seen = torch.arange(n_keys, device=key.device) < prefix_lengths.clamp(min=last)[:, None]
        return *_with_zeros(seen[:, None], key, value, problem.layout), given
    key, value = (x.narrow(rows, first, last - first) for x in (key, value))
    if bias is None and mask is None:
        return key, value, given
    if bias is not None and columns > 1:
        bias = bias[..., first:last]
    if mask is not None:
        mask = mask[:, first:last].contiguous()
    return key, value, (slopes, bias, prefix_lengths, mask, sinks, *starts)


def _with_zeros(seen: Tensor, key: Tensor, value: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Key and value with zeros where ``seen``, (..., H or 1, N_k), is False."""
    rows = seen[..., None] if layout == "bhsd" else seen.transpose(-1, -2)[..., None]
    return torch.where(rows, key, 0.0), torch.where(rows, value, 0.0)  # in one pass each
