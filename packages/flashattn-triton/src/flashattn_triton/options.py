"""What attention computes apart from its inputs, and the checks that inputs pass before a launch.

Legend: B batch, H query heads, G key/value heads (G divides H), N_q queries, N_k keys,
D head_dim of query and key, E head_dim of value, T tokens of a packed batch.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Causal = Literal["none", "top-left", "bottom-right", "bottom-right-window"]
Layout = Literal["bhsd", "bshd"]
# What callers write for ``causal``; True is "top-left".
CausalArgument = bool | Literal["top-left", "bottom-right", "bottom-right-window"]
Window = tuple[int | None, int | None]

LAYOUTS = get_args(Layout)
MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Of scale and soft-cap: kernels compute in fp32 with either, its inverse, and their product or
# quotient, all times log2(e).
_LARGEST_FACTOR = 1e18


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Mask, scale and soft-cap, normalised: every default is resolved.

    Query i and key j meet on the diagonal where j = i + :func:`diagonal_offset`. A query sees the
    keys from ``window[0]`` before its diagonal to ``window[1]`` after it (None: no limit); a causal
    mask ("top-left" or "bottom-right") also hides every key after the diagonal.
    """

    causal: Causal = "none"
    scale: float
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    deterministic: bool = False

    @property
    def bottom_right(self) -> bool:
        """Whether the last query's diagonal ends at the last key."""
        return self.causal in ("bottom-right", "bottom-right-window")

    @property
    def band(self) -> tuple[int | None, int | None]:
        """Visible keys before and after the diagonal, the causal mask included (None: no limit)."""
        left, right = self.window
        return left, 0 if self.causal in ("top-left", "bottom-right") else right


def diagonal_offset(n_queries: int, n_keys: int, options: AttentionOptions) -> int:
    """Key index minus query index on the diagonal that masks and windows refer to.

    Zero, or ``n_keys - n_queries`` for "bottom-right" and "bottom-right-window", where the last
    query meets the last key.
    """
    return n_keys - n_queries if options.bottom_right else 0


def resolve_options(
    *,
    head_dim: int,
    causal: CausalArgument = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    deterministic: bool = False,
) -> AttentionOptions:
    """User arguments to normalised options.

    Args:
        head_dim: D, for the default scale 1/sqrt(D).
        causal: False, True (= "top-left"), "top-left", "bottom-right" or "bottom-right-window".
        scale: factor on Q·K before the softmax; any finite number, negative ones included.
        window: (left, right) numbers of visible keys beside the diagonal; None means no limit.
        softcap: c > 0 maps a scaled score s to c·tanh(s/c).
        deterministic: gradients are bit-identical from run to run.

    Raises:
        ValueError: an argument is outside what is listed above.
    """
    return AttentionOptions(
        causal=_normalise_causal(causal),
        scale=_normalise_scale(scale, head_dim),
        window=_normalise_window(window),
        softcap=_normalise_softcap(softcap),
        deterministic=normalise_flag("deterministic", deterministic),
    )


def normalise_flag(name: str, flag: object) -> bool:
    """``flag``; raises ``ValueError`` with its name unless it is a bool."""
    if not isinstance(flag, bool):
        raise ValueError(f"{name} must be True or False, but got {flag!r}. Pass a bool.")
    return flag


def _normalise_causal(causal: bool | str) -> Causal:
    if causal is False or causal == "none":
        return "none"
    if causal is True or causal == "top-left":
        return "top-left"
    if causal == "bottom-right":
        return "bottom-right"
    if causal == "bottom-right-window":
        return "bottom-right-window"
    raise ValueError(
        f"causal must be False, True, 'top-left', 'bottom-right' or 'bottom-right-window', but got "
        f"{causal!r}. Use 'top-left' for PyTorch's is_causal=True, 'bottom-right' for flash-attn's "
        f"causal=True."
    )


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _normalise_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not _is_number(scale) or not abs(scale) <= _LARGEST_FACTOR:
        raise ValueError(
            f"scale must be a finite number of at most {_LARGEST_FACTOR:.0e} in size, or None, "
            f"but got {scale!r}. Use scale=None for 1/sqrt(head_dim)."
        )
    return float(scale)


def _normalise_window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return (None, None)
    if not isinstance(window, tuple | list) or len(window) != 2:
        size = window if isinstance(window, int) and window > 1 else 128
        raise ValueError(
            f"window must be None or a pair (left, right) of integers >= 0 or None, but got "
            f"{window!r}. Use ({size}, 0) for {size} keys before a query's own."
        )
    for side, size in zip(("left", "right"), window, strict=True):
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
            raise ValueError(
                f"window {side} must be an integer >= 0, or None, but got {size!r}. Use None for "
                f"no limit, which is -1 in flash-attn."
            )
    return (window[0], window[1])


def _normalise_softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    if not _is_number(softcap) or not 1 / _LARGEST_FACTOR <= softcap <= _LARGEST_FACTOR:
        raise ValueError(
            f"softcap must be a finite number > 0 (from {1 / _LARGEST_FACTOR:.0e} to "
            f"{_LARGEST_FACTOR:.0e}), or None, but got {softcap!r}. Use softcap=None for no "
            f"soft-cap, which is 0.0 in flash-attn."
        )
    return float(softcap)


def check_layout(layout: str | None) -> None:
    """Raises ``ValueError`` unless ``layout`` is one of "bhsd" and "bshd", or None for "bhsd"."""
    if layout is not None and layout not in LAYOUTS:
        raise ValueError(
            f"layout must be one of {', '.join(LAYOUTS)}, but got {layout!r}. b is the batch, h "
            f"heads, s the sequence, d head_dim."
        )


def in_one_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of 4 dimensions: those before the last three are one, the batch.

    Raises:
        ValueError: naming the argument, what it must be and what was given.
    """
    dims = query.dim()
    for name, x in (("query", query), ("key", key), ("value", value)):
        if dims < 3 or x.dim() != dims:
            raise ValueError(
                f"{name} must have {max(dims, 3)} dimensions, as query and at least 3 (heads, "
                f"sequence, head_dim), but got shape {tuple(x.shape)}. Reshape it."
            )
        if x.shape[:-3] != query.shape[:-3] and dims != 4:
            raise ValueError(
                f"{name} must have query's leading dimensions {tuple(query.shape[:-3])}, "
                f"but got {tuple(x.shape[:-3])}. Expand it."
            )
    if dims == 4:
        return query, key, value
    if dims == 3:
        return query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    return query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4)


def check_dense(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Checks (B, H, N_q, D), (B, G, N_k, D), (B, G, N_k, E).

    Raises:
        ValueError: naming the argument, what it must be and what was given.
    """
    in_one_batch(query, key, value)
    _check_kind(query, key, value)
    for name, x in (("key", key), ("value", value)):
        if x.shape[0] != query.shape[0]:
            raise ValueError(
                f"{name} must have query's batch size {query.shape[0]}, but got "
                f"{x.shape[0]}. Expand it."
            )
    _check_heads(query.shape[1], key.shape[1], value.shape[1])
    _check_head_dims(query.shape[3], key.shape[3], value.shape[3])
    if value.shape[2] != key.shape[2]:
        raise ValueError(
            f"value must have key's sequence length {key.shape[2]}, but got {value.shape[2]}. Pass "
            f"the same positions of both."
        )
    for name, x in (("query", query), ("key", key)):
        if x.shape[0] < 1 or x.shape[2] < 1:
            raise ValueError(
                f"{name} must have a batch and a sequence of length >= 1, but got shape "
                f"{tuple(x.shape)}. Leave empty batches out."
            )


def check_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> None:
    """Checks packed (T_q, H, D), (T_k, G, D), (T_k, G, E) and where their sequences start.

    The *values* of ``cu_seqlens`` are checked when they are on the CPU. On a GPU reading them
    would stop the host until the device catches up, so there they are the caller's responsibility.

    Raises:
        ValueError: naming the argument, what it must be and what was given.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise ValueError(
                f"{name} must have 3 dimensions (tokens, heads, head_dim), but got shape "
                f"{tuple(x.shape)}. Use flash_attention for batches that are not packed."
            )
    _check_kind(query, key, value)
    _check_heads(query.shape[1], key.shape[1], value.shape[1])
    _check_head_dims(query.shape[2], key.shape[2], value.shape[2])
    if value.shape[0] != key.shape[0]:
        raise ValueError(
            f"value must have key's {key.shape[0]} tokens, but got {value.shape[0]}. Pass the same "
            f"positions of both."
        )
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if length is None:
            continue
        if isinstance(length, bool) or not isinstance(length, int | torch.SymInt) or length < 0:
            raise ValueError(
                f"{name} must be an integer >= 0 or None, but got {length!r}. Pass the longest "
                f"length as a Python int, or leave it out."
            )
    starts = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    for name, x in starts:
        if x.dim() != 1 or x.shape[0] < 2 or x.dtype != torch.int32 or not x.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous int32 tensor of shape (sequences + 1,) with at least "
                f"one sequence, but got shape {tuple(x.shape)}, dtype {x.dtype}. Start with 0 "
                f"and end "
                f"with the number of tokens."
            )
        if x.device != query.device:
            raise ValueError(
                f"{name} must be on query's device {query.device}, but got {x.device}. Move it "
                f"there."
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k must have as many sequences as cu_seqlens_q "
            f"({cu_seqlens_q.shape[0] - 1}), but got {cu_seqlens_k.shape[0] - 1}. Sequences may be "
            f"empty on either side."
        )
    check_starts(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def check_starts(
    query: Tensor,
    key: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> None:
    """Checks the values of ``cu_seqlens`` of CPU tensors, which :func:`check_varlen` has accepted.

    Raises:
        ValueError: naming the argument, what it must be and what was given.
    """
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if isinstance(cu_seqlens_q, FakeTensor) or isinstance(cu_seqlens_k, FakeTensor):
        return  # which have no values
    starts = (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k))
    tokens = (query.shape[0], key.shape[0])
    longest = (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
    for (name, x), total, limit in zip(starts, tokens, longest, strict=True):
        _check_starts(name, x, total, *limit)


def _check_starts(
    name: str, starts: Tensor, total: int, limit_name: str, limit: int | None
) -> None:
    values = starts.tolist()
    lengths = [end - start for start, end in itertools.pairwise(values)]
    if values[0] != 0 or values[-1] != total or min(lengths) < 0:
        raise ValueError(
            f"{name} must rise from 0 to the number of tokens, {total}, and never fall, but got "
            f"{values}. Use the cumulative sum of the lengths, with 0 before it."
        )
    if limit is not None and max(lengths) > limit:
        raise ValueError(
            f"{limit_name} must be at least the longest sequence, {max(lengths)}, but got {limit}. "
            f"Pass that length, or leave it out."
        )


def _check_kind(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.layout != torch.strided:
            raise ValueError(
                f"{name} must be a strided tensor, but got one of layout {x.layout}. Use "
                f"flash_attention_varlen for sequences of different lengths, with the values() and "
                f"offsets() of jagged tensors."
            )
    if query.dtype not in DTYPES:
        raise ValueError(
            f"query must be float16, bfloat16 or float32, but got {query.dtype}. Convert it."
        )
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise ValueError(
                f"{name} must have query's dtype {query.dtype}, but got {x.dtype}. Convert it."
            )
        if x.device != query.device:
            raise ValueError(
                f"{name} must be on query's device {query.device}, but got {x.device}. Move it "
                f"there."
            )


def _check_heads(heads: int, kv_heads: int, value_heads: int) -> None:
    if value_heads != kv_heads:
        raise ValueError(
            f"value must have key's {kv_heads} heads, but got {value_heads}. Grouped heads share "
            f"both."
        )
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"query's head count must be a multiple of key's, but got {heads} and {kv_heads}. Pass "
            f"layout='bshd' if that dimension is the sequence."
        )


def _check_head_dims(query_dim: int, key_dim: int, value_dim: int) -> None:
    if key_dim != query_dim:
        raise ValueError(
            f"key must have query's head_dim {query_dim}, but got {key_dim}. Only value's may "
            f"differ."
        )
    for name, dim in (("query", query_dim), ("value", value_dim)):
        if not 1 <= dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name} must have a head_dim from 1 to {MAX_HEAD_DIM}, but got {dim}. Split it "
                f"into more heads."
            )


def to_heads_first(x: Tensor, layout: str | None) -> Tensor:
    """(B, H, N, D) view of a 4-D tensor in ``layout``; the same function undoes it."""
    check_layout(layout)
    return x.transpose(1, 2) if layout == "bshd" else x
