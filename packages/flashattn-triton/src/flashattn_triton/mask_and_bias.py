"""Tensors that come with query, key and value: masks, prefixes, ALiBi slopes, a bias and sinks.

For query i and key j of one head, where ``offset`` is
:func:`~flashattn_triton.problem.diagonal_offset`,

    S_ij = softcap(scale · q_i · k_j) - slope · |i + offset - j| + bias_ij

and a bias_ij of :data:`HIDDEN_BIAS` or less counts as -inf: it hides key j from query i.
ALiBi (Press et al. 2021, arXiv:2108.12409) has one slope for each head and needs no memory for its
bias. In a prefix language model (Raffel et al. 2019, arXiv:1910.10683) every query sees the keys of
its sequence's prefix, and beyond it the mask is causal. An attention sink is one more score of each
row, without a key or a value: it takes its share of the softmax and adds nothing to the output.

A boolean mask that heads and queries share has one byte for each key, beside whatever bias there
is. Every other mask is a bias of 0 and -inf, or joins the bias in one tensor of the shape to which
both broadcast.

Legend: B batch, or sequences of a packed batch, H query heads, G key/value heads, N_q queries, N_k
keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flashattn_triton.inputs import as_int32, check_equal, check_tensors, in_one_batch
from flashattn_triton.problem import (
    DTYPES,
    Problem,
    broadcasts,
    check_layout,
    heads_first,
    seen_keys,
)

# A bias at or below this number counts as -inf. The logsumexp is one fp32 number: that of a row in
# which every key has -1e9 would lose log(N), and the row's P would sum to N instead of 1.
HIDDEN_BIAS = -8192.0


class Given(NamedTuple):
    """The tensors of one call besides query, key and value; None where there is none.

    They come in the order of the operators' arguments: as callers give them, or brought into one
    shape by :func:`normalised`. ``alibi_slopes`` is (B, H) fp32 then and ``prefix_lengths`` (B,)
    int32, both contiguous; ``bias`` has four dimensions, those of (B, H, N_q, N_k) or 1, and any
    strides; ``mask`` is (B, N_k) uint8, 0 for a key that no query sees, and ``sinks`` (H,), both
    contiguous. ``cu_seqlens_q`` and ``cu_seqlens_k``, (B + 1,) int32, say where packed sequences
    start.
    """

    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    prefix_lengths: Tensor | None = None
    mask: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Which tensors :data:`NAMES` there are."""
        return tuple([n for n, x in zip(NAMES, self, strict=False) if x is not None])

    @property
    def packed(self) -> bool:
        """Whether sequences are packed one after another."""
        return self.cu_seqlens_q is not None

    @property
    def sequences(self) -> int:
        """B of a packed batch."""
        assert self.cu_seqlens_q is not None
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def has_equal_lengths(self) -> bool:
        """Whether packed queries and keys start at the same places, because ``cu_seqlens`` is one
        tensor: then each sequence has as many keys as queries."""
        starts_q, starts_k = self.cu_seqlens_q, self.cu_seqlens_k
        if starts_q is None or starts_k is None:
            return False
        return starts_q.data_ptr() == starts_k.data_ptr()

    def sequence(self, index: int) -> Given:
        """The tensors of one packed sequence, a batch of one that is not packed."""
        slopes, bias, prefix_lengths, mask = (
            x if x is None or len(x) == 1 else x[index : index + 1] for x in self[:SINKS]
        )
        return Given(slopes, bias, prefix_lengths, mask, self.sinks)

    def added(
        self, queries: tuple[int, int], keys: tuple[int, int], offset: int, dtype: torch.dtype
    ) -> Tensor | None:
        """What is added to scores of a range of queries and of keys; None for nothing.

        Returns:
            A tensor of ``dtype``, broadcastable to (B, H, queries, keys).
        """
        total = None
        if self.bias is not None:
            bias = bias_of_tile(self.bias, queries, keys)
            total = bias.masked_fill(bias <= HIDDEN_BIAS, float("-inf")).to(dtype)
        if self.alibi_slopes is not None:
            device = self.alibi_slopes.device
            distances = torch.arange(*queries, device=device)[:, None] + offset
            distances = (distances - torch.arange(*keys, device=device)).abs().to(dtype)
            alibi = self.alibi_slopes[:, :, None, None].to(dtype) * -distances
            total = alibi if total is None else total + alibi
        if self.mask is not None:
            seen = self.mask[:, None, None, slice(*keys)] != 0
            total = seen.new_zeros(1, dtype=dtype) if total is None else total
            total = torch.where(seen, total, float("-inf"))
        return total


NOTHING = Given()
GIVEN = Given._fields
BIAS, SINKS, STARTS = GIVEN.index("bias"), GIVEN.index("sinks"), GIVEN.index("cu_seqlens_q")
# Those that change the softmax: keywords of the public functions.
NAMES = GIVEN[:STARTS]


def bias_of_tile(bias: Tensor, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
    """The part of a bias, or its gradient, for ranges of queries and keys, which may share it."""
    rows, columns = (
        slice(None) if n == 1 else slice(*span)
        for n, span in zip(bias.shape[2:], (queries, keys), strict=True)
    )
    return bias[:, :, rows, columns]


def parts_of_batch(
    problem: Problem, given: Given, *tensors: Sequence[Tensor | None]
) -> Iterator[tuple[list[Any], list[Any], Given]]:
    """(B, H, N, ...) views of tensors: of each packed sequence, or of the whole batch.

    ``tensors``: those with a row for each query, and those with a row for each key, all in the
    layout of ``problem``. Each part also has its own ``given``. Starts are read on the host. Empty
    sequences are left out, but for the first one.
    """
    rows, columns = (
        [None if x is None else heads_first(x, problem.layout) for x in of_side]
        for of_side in tensors
    )
    starts = [x.tolist() for x in given[STARTS:] if x is not None]
    if not starts:
        yield rows, columns, given
        return
    spans = ([slice(*x) for x in itertools.pairwise(values)] for values in starts)
    for i, (of_q, of_k) in enumerate(zip(*spans, strict=True)):
        if i == 0 or of_q.start < of_q.stop or of_k.start < of_k.stop:
            own_rows, own_columns = (
                [None if x is None else x[:, :, span] for x in of_side]
                for of_side, span in ((rows, of_q), (columns, of_k))
            )
            yield own_rows, own_columns, given.sequence(i)


def joined_parts(parts: Sequence[Tensor], n_rows: int, unowned: float = 0.0) -> Tensor:
    """Results (B, H, N, ...) of all :func:`parts_of_batch`, of ``n_rows``.

    Packed tokens behind the last sequence have the value ``unowned``.
    """
    if len(parts) == 1 and parts[0].shape[2] == n_rows:
        return parts[0]
    joined = torch.cat(list(parts), dim=2)
    missing = n_rows - joined.shape[2]
    return F.pad(joined, (*(0, 0) * (joined.dim() - 3), 0, missing), value=unowned)


def resolve_mask_and_bias(
    given: Given, layout: str, leading: Sequence[int], query: Tensor, key: Tensor
) -> Given:
    """Checks user arguments and brings them into one shape.

    Args:
        given: as ``flash_attention`` takes it, with dimensions ``leading`` in the place of B. Of
            prefix lengths, what is below 0 counts as 0, and what is above N_k as N_k, so that
            values need not be read on the host; a mask is (*leading, N_k) uint8, as
            :func:`with_mask` returns it. Starts are returned as given.
        layout: of query and key, "bhsd" or another one in which heads follow the sequence.
        leading: dimensions of query before its last three, or (sequences,) of a packed batch.
        query: checked, as ``key``.
        key: of it, only the length is looked at.
    """
    alibi_slopes, bias, prefix_lengths, mask, sinks, *starts = given
    rows, of_heads = (-2, -3) if layout == "bhsd" else (-3, -2)
    heads, device = query.shape[of_heads], query.device
    lengths = (query.shape[rows], key.shape[rows])
    if sinks is not None:
        check_sinks(sinks, heads, device)
        sinks = sinks.contiguous()
    for name, x in zip(NAMES, (alibi_slopes, bias, prefix_lengths), strict=False):
        if x is not None:
            check_tensors(**{name: x})
            check_equal((name, "be on query's device {}", device, x.device, "Move it there."))
    batch = math.prod(leading)
    if alibi_slopes is not None:
        allowed, slopes = ((heads,), (*leading, heads)), alibi_slopes
        if tuple(slopes.shape) not in allowed or slopes.dtype != torch.float32:
            raise ValueError(
                f"alibi_slopes must be a float32 tensor of shape {allowed[0]} or {allowed[1]}, but "
                f"got {slopes.dtype} of shape {tuple(slopes.shape)}. Use one slope for each head "
                f"of query."
            )
        if slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "alibi_slopes must be constants, but got a tensor that requires a gradient. Detach "
                "it, or pass what is learned as bias, which has one."
            )
        alibi_slopes = alibi_slopes.reshape(-1, heads).expand(batch, heads).contiguous()
    if bias is not None:
        sizes, full = tuple(bias.shape), (*leading, heads, *lengths)
        if not broadcasts(sizes, full) or bias.dtype not in (*DTYPES, torch.float64):
            raise ValueError(
                f"bias must be a float16, bfloat16 or float32 tensor that broadcasts to {full} "
                f"(batch, heads, queries, keys), but got {bias.dtype} of shape {sizes}. Give it "
                f"size 1 in the dimensions that share it."
            )
        if bias.dim() > 3 and len(leading) != 1:
            bias = bias.expand(*leading, *bias.shape[-3:]).flatten(0, -4)
        if bias.dim() < 4:
            bias = bias[(None,) * (4 - bias.dim())]
    if prefix_lengths is not None:
        shape, expected = tuple(prefix_lengths.shape), tuple(leading)
        if prefix_lengths.dtype not in (torch.int32, torch.int64) or shape != expected:
            raise ValueError(
                f"prefix_lengths must be int32 or int64 of shape {expected}, one length for each "
                f"sequence, but got {prefix_lengths.dtype} of shape {shape}. Count the keys that "
                f"every query sees."
            )
        prefix_lengths = as_int32(prefix_lengths.reshape(batch)).contiguous()
    if mask is not None and mask.dim() != 2:
        mask = mask.reshape(batch, lengths[1])
    return Given(alibi_slopes, bias, prefix_lengths, mask, sinks, *starts)


def in_four_dimensions(
    layout: str | None, query: Tensor, key: Tensor, value: Tensor, given: Given
) -> tuple[Tensor, Tensor, Tensor, Given]:
    """Query, key and value with one batch dimension, and what is given for it.

    The dimensions before their last three become the batch. Keys and values that a mask hides from
    all queries become zeros.
    """
    check_layout(layout)
    layout = layout or "bhsd"
    batch = in_one_batch(query, key, value)
    if given.mask is not None:
        mask, bias, key, value = with_mask(given.mask, given.bias, query, key, value, layout)
        given = Given(given.alibi_slopes, bias, given.prefix_lengths, mask, given.sinks)
        if query.dim() == 4:
            return query, key, value, given
        batch = in_one_batch(query, key, value)
    return *batch, resolve_mask_and_bias(given, layout, query.shape[:-3], query, key)


def normalised(problem: Problem, query: Tensor, key: Tensor, given: Given) -> Given:
    """The tensors :data:`NAMES` of a call, checked and in one shape; the others as they are.

    ``query`` and ``key`` have been checked, and have the layout of ``problem``.
    """
    alibi_slopes, bias, prefix_lengths, mask, sinks, starts, _ = given
    if alibi_slopes is bias is prefix_lengths is mask is sinks is None:
        return given
    batch = query.shape[0] if starts is None else starts.shape[0] - 1
    resolved = resolve_mask_and_bias(given, problem.layout, (batch,), query, key)
    if prefix_lengths is None:
        return resolved
    if problem.causal not in ("top-left", "bottom-right"):
        causal = False if problem.causal == "none" else problem.causal
        raise ValueError(
            f"causal must be 'top-left' or 'bottom-right' where prefix_lengths are given, but got "
            f"{causal!r}. Without a causal mask every query sees the prefix: leave "
            f"prefix_lengths out."
        )
    if problem.window != (None, None):
        raise ValueError(
            f"window must be None where prefix_lengths are given, but got {problem.window}. Leave "
            f"one of them out."
        )
    return resolved


def check_sinks(sinks: Tensor, heads: int, device: torch.device) -> None:
    """Raises ``ValueError`` unless sinks are one logit for each query head, on ``device``."""
    check_tensors(sinks=sinks)
    if sinks.shape != (heads,) or not sinks.is_floating_point() or sinks.device != device:
        raise ValueError(
            f"sinks must be a floating tensor of shape ({heads},), one logit for each head of "
            f"query, on {device}, but got {sinks.dtype} of shape {tuple(sinks.shape)} on "
            f"{sinks.device}. Use one parameter of {heads} numbers per layer."
        )


# ---- boolean masks -------------------------------------------------------------------------------


def with_mask(
    mask: Tensor, bias: Tensor | None, query: Tensor, key: Tensor, value: Tensor, layout: str
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Mask of keys (..., N_k) uint8, bias, key and value of a call that has a mask.

    Keys and values that the mask hides from all queries are replaced by zeros, because the product
    of a probability 0 with NaN or infinity, as uninitialised memory may hold, is NaN.

    ``mask`` is bool, broadcastable to (..., H, N_q, N_k), True where the key is visible. Query, key
    and value, of at least 3 dimensions, are in ``layout``, "bhsd" or "bshd".
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
    problem: Problem, n_queries: int, tensors: Sequence[Tensor], given: Given
) -> tuple[Sequence[Tensor], Given]:
    """A dense call's tensors without keys that its band hides from all.

    The product of a probability 0 with what such keys hold could be NaN, and they cost time. Those
    behind a prefix, whose length is on the device, become zeros instead. ``tensors``: key and
    value, and others with a row for each key, which are never copied.
    """
    unchanged = tensors, given
    key, value, *others = tensors
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
        return (*_with_zeros(seen[:, None], key, value, problem.layout), *others), given
    tensors = [x.narrow(rows, first, last - first) for x in tensors]
    if bias is None and mask is None:
        return tensors, given
    if bias is not None and columns > 1:
        bias = bias[..., first:last]
    if mask is not None:
        mask = mask[:, first:last].contiguous()
    return tensors, Given(slopes, bias, prefix_lengths, mask, sinks, *starts)


def _with_zeros(seen: Tensor, key: Tensor, value: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Key and value with zeros where ``seen``, (..., H or 1, N_k), is False."""
    rows = seen[..., None] if layout == "bhsd" else seen.transpose(-1, -2)[..., None]
    return torch.where(rows, key, 0.0), torch.where(rows, value, 0.0)  # in one pass each
