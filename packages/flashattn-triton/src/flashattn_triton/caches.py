"""Attention to the filled part of a cache of fixed size, whose lengths are on the device.

Each row of the cache is packed as two sequences: its keys, with the row's queries, and the rest of
the row, which has no queries. All starts have a fixed size and none is read on the host, so that
one compiled program or CUDA graph serves every length, and keys behind the length are never read.

Legend: B rows, H query heads, G key/value heads, N_q queries and N_k places for keys of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from flashattn_triton.documents import attend_in_joined_rows
from flashattn_triton.mistakes import check_tensors
from flashattn_triton.problem import OptionKeywords


def starts_of_cache(key_lengths: Tensor, n_queries: int, n_keys: int) -> tuple[Tensor, Tensor]:
    """Where the sequences of all rows start among packed queries and among packed keys.

    Args:
        key_lengths: (B,) integers; what is below 0 counts as 0, what is above N_k as N_k.
        n_queries: N_q.
        n_keys: N_k.

    Returns:
        Two (2 B + 1,) int32 tensors.
    """
    rows = torch.arange(1, len(key_lengths) + 1, device=key_lengths.device)
    filled = (rows - 1) * n_keys + key_lengths.clamp(0, n_keys)
    queries = (rows * n_queries).repeat_interleave(2)
    keys = torch.stack([filled, rows * n_keys], dim=1).flatten()
    return F.pad(queries, (1, 0)).int(), F.pad(keys, (1, 0)).int()


def attend_to_cache(
    attend: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lengths: Tensor,
    layout: str,
    **keywords: Unpack[OptionKeywords],
) -> tuple[Tensor, Tensor]:
    """``flash_attention`` of (B, H, N, D) or (B, N, H, D) tensors, to the first keys of each row.

    Args:
        attend: ``flash_attention_varlen``, which calls this module's functions in its turn.
        query: and ``key``, ``value``, ``key_lengths``, ``keywords``: as given to
            ``flash_attention``.
        layout: "bhsd" or "bshd", which needs no copy of the cache.

    Returns:
        Output in the layout of the inputs, and logsumexp (B, H, N_q).

    Raises:
        ValueError: naming the argument, what it must be and what was given.
        TypeError: not a tensor.
    """
    check_tensors(key_lengths=key_lengths)
    leading = query.shape[:-3]
    if (
        key_lengths.dtype not in (torch.int32, torch.int64)
        or key_lengths.shape != leading
        or key_lengths.device != query.device
    ):
        raise ValueError(
            f"key_lengths must be int32 or int64 of shape {tuple(leading)} on {query.device}, one "
            f"length for each row, but got {key_lengths.dtype} of shape "
            f"{tuple(key_lengths.shape)} on {key_lengths.device}. Count the keys that are filled."
        )
    tensors = [x.transpose(-3, -2) if layout == "bhsd" else x for x in (query, key, value)]
    n_queries, n_keys = tensors[0].shape[-3], tensors[1].shape[-3]
    starts = starts_of_cache(key_lengths.reshape(-1), n_queries, n_keys)
    places = (*starts, n_queries, n_keys)
    return attend_in_joined_rows(attend, tensors, places, layout, **keywords)
