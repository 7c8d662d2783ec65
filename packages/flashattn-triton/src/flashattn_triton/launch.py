"""What all launchers share: how tensors, options and packed batches become arguments.

Launchers take (B, H, N, D) views with any strides. A packed batch comes as (1, H, T, D), a view of
its (T, H, D), together with a :class:`Packing`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from flashattn_triton.options import AttentionOptions

# Windows wider than any sequence mean the same as this one; sums with it stay within 32 bits.
_WIDEST_WINDOW = 2**29
_LARGEST_TILE = 256


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where the sequences of a packed batch start, and the longest of them."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def n_sequences(self) -> int:
        """B."""
        return self.cu_seqlens_q.shape[0] - 1


def padded(width: int) -> int:
    """The power of two that a head_dim is computed at; matrix units need 16."""
    return max(16, 1 << (width - 1).bit_length())


def unit_last_stride(x: Tensor) -> Tensor:
    """``x``, copied if elements of one row are not neighbours: rows are read 16 bytes at a time."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def is_wide(*tensors: Tensor) -> bool:
    """Whether the rows of one tile can be more than 2^31 elements apart."""
    return any(abs(x.stride(-2)) * _LARGEST_TILE >= 2**31 for x in tensors)


def strides(x: Tensor, packing: Packing | None) -> tuple[int, int, int]:
    """Batch, head and row stride; the sequences of a packed batch start where it says."""
    batch, head, row, _ = x.stride()
    return (batch if packing is None else 0), head, row


def empty_output(like: Tensor, width: int) -> Tensor:
    """(B, H, N, width) in ``like``'s dtype, its memory in ``like``'s order of heads and rows."""
    batch, heads, rows, _ = like.shape
    if like.stride(1) < like.stride(2):
        return like.new_empty(batch, rows, heads, width).transpose(1, 2)
    return like.new_empty(batch, heads, rows, width)


def empty_row_statistic(like: Tensor) -> Tensor:
    """(B, H, N) fp32, contiguous: the logsumexp, or delta."""
    return like.new_empty(like.shape[:3], dtype=torch.float32)


def mask_arguments(options: AttentionOptions) -> dict[str, int | bool | float]:
    """The kernel arguments that say which keys a query sees, and the soft-cap."""
    left, right = options.band
    return {
        "softcap": 1.0 if options.softcap is None else options.softcap,
        "window_left": 0 if left is None else min(left, _WIDEST_WINDOW),
        "window_right": 0 if right is None else min(right, _WIDEST_WINDOW),
        "HAS_SOFTCAP": options.softcap is not None,
        "HAS_LEFT": left is not None,
        "is_causal": right is not None,
        "BOTTOM_RIGHT": options.causal == "bottom-right",
    }


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes ``x``'s GPU current: Triton launches on the current device and its current stream."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def dot_precision(dtype: torch.dtype) -> str:
    """How fp32 products are computed: TF32 only if PyTorch's own matrix products may use it."""
    if dtype != torch.float32:
        return "ieee"  # half operands have exact products
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"
