"""Attention to the filled part of a cache of fixed size, whose lengths are on the device.

Each row of the cache is packed as two sequences: its keys, with the row's queries, and the rest of
the row, which has no queries. All starts have a fixed size and none is read on the host, so that
one compiled program or CUDA graph serves every length, and keys behind the length are never read.

Legend: B rows, H query heads, G key/value heads, N_q queries and N_k places for keys of each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from flashattn_triton.mistakes import check_tensors


def places_of_cache(
    key_lengths: Tensor, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor, int, int]:
    """Where the sequences of all rows are: their two ``cu_seqlens`` and ``max_seqlen``.

    Args:
        key_lengths: (B,) integers; what is below 0 counts as 0, what is above N_k as N_k.
        tensors: query, key and value, (B, N, H, D), B being any number of dimensions.

    Raises:
        ValueError: naming the argument, what it must be and what was given.
        TypeError: not a tensor.
    """
    check_tensors(key_lengths=key_lengths)
    (*leading, n_queries, _, _), n_keys = tensors[0].shape, tensors[1].shape[-3]
    device = tensors[0].device
    if (
        key_lengths.dtype not in (torch.int32, torch.int64)
        or key_lengths.shape != tuple(leading)
        or key_lengths.device != device
    ):
        raise ValueError(
            f"key_lengths must be int32 or int64 of shape {tuple(leading)} on {device}, one "
            f"length for each row, but got {key_lengths.dtype} of shape "
            f"{tuple(key_lengths.shape)} on {key_lengths.device}. Count the keys that are filled."
        )
    lengths = key_lengths.reshape(-1)
    rows = torch.arange(1, len(lengths) + 1, device=device)
    filled = (rows - 1) * n_keys + lengths.clamp(0, n_keys)
    queries = (rows * n_queries).repeat_interleave(2)
    keys = torch.stack([filled, rows * n_keys], dim=1).flatten()
    return F.pad(queries, (1, 0)).int(), F.pad(keys, (1, 0)).int(), n_queries, n_keys
