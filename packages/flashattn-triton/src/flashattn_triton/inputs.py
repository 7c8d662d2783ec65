"""The checks that query, key, value and the starts of packed sequences pass before a launch.

Each raises a ``ValueError`` that names the argument, what it must be and what was given, here and
in the modules that check other tensors. What is no tensor is a ``TypeError``.

Legend as in :mod:`flashattn_triton.problem`.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flashattn_triton.problem import DTYPES, Problem, heads_first

# What tensors must be, and the remedies, in the words of errors.
_DTYPE, _BATCH = "have query's dtype {}", "have query's batch size {}"
_DEVICE, _MOVE = "be on query's device {}", "Move it there."


def check_equal(*facts: tuple[str, str, object, object, str]) -> None:
    """Raises ``ValueError`` for the first fact whose third and fourth element are not equal.

    A fact is the name of an argument, what it must (``{}`` stands for the third element), what is
    expected, what was given, and the remedy.
    """
    for name, what, expected, got, remedy in facts:
        if got != expected:
            raise ValueError(f"{name} must {what.format(expected)}, but got {got}. {remedy}")


def in_one_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of 4 dimensions: those before the last three are one, the batch."""
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
    """Checks (B, H, N_q, D), (B, G, N_k, D), (B, G, N_k, E)."""
    in_one_batch(query, key, value)
    _check_fit(query, key, value, rows=2)


def as_length(length: object) -> Any:
    """A ``max_seqlen`` as an int or None; what is neither a number nor a tensor stays as it is.

    A tensor is read only where the host need not wait for it. Else None stands for it, which means
    the number of tokens.
    """
    if isinstance(length, Tensor) and length.dim() == 0 and not length.is_floating_point():
        traced = torch.compiler.is_compiling() or isinstance(length, FakeTensor)
        return None if traced or length.device.type != "cpu" else int(length)
    if isinstance(length, int | torch.SymInt | None):
        return length
    try:
        return operator.index(length)  # type: ignore[arg-type]
    except TypeError:
        return length


def given_starts(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Both :func:`as_starts`, or neither.

    Raises:
        ValueError: one of them is given alone.
    """
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        return as_starts(cu_seqlens_q, cu_seqlens_k)
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_q and cu_seqlens_k must both be given, but got one. Pass two.")
    return None, None


def as_starts(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """Starts of packed sequences in int32, of one empty one if there are none.

    One tensor for both stays one.
    """
    same = cu_seqlens_k is cu_seqlens_q
    if cu_seqlens_q.shape == cu_seqlens_k.shape == (1,):
        cu_seqlens_q, cu_seqlens_k = F.pad(cu_seqlens_q, (0, 1)), F.pad(cu_seqlens_k, (0, 1))
    starts_q, starts_k = (
        x.int() if x.dtype == torch.int64 else x for x in (cu_seqlens_q, cu_seqlens_k)
    )
    return starts_q, starts_q if same else starts_k


def check_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | None, max_seqlen_k: int | None,
) -> None:  # fmt: skip
    """Checks packed (T_q, H, D), (T_k, G, D), (T_k, G, E) and where their sequences start.

    The *values* of ``cu_seqlens`` are checked when they are on the CPU. On a GPU reading them
    would stop the host until the device catches up, so there they are the caller's responsibility.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 3:
            raise ValueError(
                f"{name} must have 3 dimensions (tokens, heads, head_dim), but got shape "
                f"{tuple(x.shape)}. Use flash_attention for batches that are not packed."
            )
    _check_fit(query, key, value, rows=0)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if length is None:
            continue
        known = isinstance(length, int) and not torch.compiler.is_compiling()  # no symbol
        if (
            isinstance(length, bool)
            or not isinstance(length, int | torch.SymInt)
            or (known and length < 0)
        ):
            raise ValueError(
                f"{name} must be an integer >= 0 or None, but got {length!r}. Pass the longest "
                f"length as a Python int, or leave it out."
            )
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x.dim() != 1 or x.shape[0] < 2 or x.dtype != torch.int32 or not x.is_contiguous():
            raise ValueError(
                f"{name} must be a contiguous int32 or int64 tensor of shape (sequences + 1,) with "
                f"at least one sequence, but got shape {tuple(x.shape)}, dtype {x.dtype}. Start "
                f"with 0 and end with the number of tokens."
            )
    sequences, as_many = cu_seqlens_q.shape[0] - 1, "have as many sequences as cu_seqlens_q ({})"
    empty = "Sequences may be empty on either side."
    check_equal(
        ("cu_seqlens_q", _DEVICE, query.device, cu_seqlens_q.device, _MOVE),
        ("cu_seqlens_k", _DEVICE, query.device, cu_seqlens_k.device, _MOVE),
        ("cu_seqlens_k", as_many, sequences, cu_seqlens_k.shape[0] - 1, empty),
    )
    check_starts(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def check_starts(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | None, max_seqlen_k: int | None,
) -> None:  # fmt: skip
    """Checks the values of ``cu_seqlens`` of CPU tensors that :func:`check_varlen` has accepted."""
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if type(cu_seqlens_q) is not Tensor or type(cu_seqlens_k) is not Tensor:
        return  # fake tensors have no values; those of DTensors are checked where they are local
    for side, starts, total, limit in (
        ("q", cu_seqlens_q, query.shape[0], max_seqlen_q),
        ("k", cu_seqlens_k, key.shape[0], max_seqlen_k),
    ):
        values = starts.tolist()
        lengths = [end - start for start, end in itertools.pairwise(values)]
        if values[0] != 0 or values[-1] > total or min(lengths) < 0:
            raise ValueError(
                f"cu_seqlens_{side} must rise from 0 to the number of tokens, {total}, and never "
                f"fall, but got {values}. Use the cumulative sum of the lengths, with 0 before it."
            )
        if limit is not None and max(lengths) > limit:
            raise ValueError(
                f"max_seqlen_{side} must be at least the longest sequence, {max(lengths)}, but got "
                f"{limit}. Pass that length, or leave it out."
            )


def _check_fit(query: Tensor, key: Tensor, value: Tensor, rows: int) -> None:
    """Kind, heads, head_dims and length of tensors whose sequence is dimension ``rows``."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.layout != torch.strided:
            raise ValueError(
                f"{name} must be a strided tensor, but got one of layout {x.layout}. Use "
                f"flash_attention_varlen for sequences of different lengths, with the values() and "
                f"offsets() of jagged tensors."
            )
    if query.dtype not in (*DTYPES, torch.float64):
        raise ValueError(
            f"query must be float16, bfloat16 or float32, or float64 where implementation is "
            f"'tiled' or 'reference', but got {query.dtype}. Convert it."
        )
    heads, kv_heads, value_heads = query.shape[1], key.shape[1], value.shape[1]
    if value_heads == kv_heads and (heads < 1 or kv_heads < 1 or heads % kv_heads):
        raise ValueError(
            f"query's head count must be a multiple of key's, but got {heads} and {kv_heads}. Pass "
            f"layout='bshd' if that dimension is the sequence."
        )
    for name, x in (("query", query), ("value", value)):
        if x.shape[-1] < 1:
            raise ValueError(
                f"{name} must have a head_dim of at least 1, but got {x.shape[-1]}. Leave empty "
                f"heads out."
            )
    batch = query.shape[0] if rows else 0  # of a packed batch there is none
    n_keys, dim, same = key.shape[rows], query.shape[-1], "Pass the same positions of both."
    check_equal(
        ("key", _DTYPE, query.dtype, key.dtype, "Convert it."),
        ("value", _DTYPE, query.dtype, value.dtype, "Convert it."),
        ("key", _DEVICE, query.device, key.device, _MOVE),
        ("value", _DEVICE, query.device, value.device, _MOVE),
        ("key", _BATCH, batch, key.shape[0] if rows else 0, "Expand it."),
        ("value", _BATCH, batch, value.shape[0] if rows else 0, "Expand it."),
        ("value", "have key's {} heads", kv_heads, value_heads, "Grouped heads share both."),
        ("key", "have query's head_dim {}", dim, key.shape[-1], "Only value's may differ."),
        ("value", "have key's sequence length {}", n_keys, value.shape[rows], same),
    )


def check_inputs(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> None:  # fmt: skip
    """Checks tensors in the layout of ``problem``: :func:`check_dense` or :func:`check_varlen`."""
    if problem.packed:
        assert cu_seqlens_q is not None
        assert cu_seqlens_k is not None
        check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, *problem.longest)
    else:
        check_dense(*(heads_first(x, problem.layout) for x in (query, key, value)))
