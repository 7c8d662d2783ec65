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


def with_mask(
    mask: Tensor, bias: Tensor | None, query: Tensor, key: Tensor, value: Tensor, layout: str
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Mask of keys (..., N_k) uint8, bias, key and value of a call that has a mask.

    Keys and values that the mask hides from all queries are replaced by zeros, because the product
    of a probability 0 with NaN or infinity, as uninitialised memory may hold, is NaN.

    Args:
        mask: bool, broadcastable to (..., H, N_q, N_k), True where the key is visible.
        bias: of the call.
        query: of at least 3 dimensions, as ``key`` and ``value``.
        key: in ``layout``, as ``value``.
        value: see ``key``.
        layout: "bhsd" or "bshd".

    Raises:
        ValueError: naming the argument, what it must be and what was given.
        TypeError: not a tensor.
    """
    check_tensors(mask=mask)
    rows, heads = (-2, -3) if layout == "bhsd" else (-3, -2)
    sizes = (*query.shape[:-3], query.shape[heads], query.shape[rows], key.shape[rows])
    fits = mask.dim() <= len(sizes) and all(
        n in (1, full) for n, full in zip(mask.shape[::-1], sizes[::-1], strict=False)
    )
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
    unseen = ~seen[..., None] if layout == "bhsd" else ~seen.transpose(-1, -2)[..., None]
    key, value = key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0)
    mask = mask[(None,) * (len(sizes) - mask.dim())]
    if mask.shape[-3:-1] == (1, 1):
        mask = mask[..., 0, 0, :].expand(*sizes[:-3], sizes[-1])
        return mask.to(torch.uint8).contiguous(), bias, key, value
    hidden = torch.full((), float("-inf"), dtype=query.dtype, device=query.device)
    bias = torch.where(mask, torch.zeros_like(hidden) if bias is None else bias, hidden)
    return None, bias, key, value
