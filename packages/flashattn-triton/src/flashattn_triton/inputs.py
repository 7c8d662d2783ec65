"""The checks that query, key, value and the starts of packed sequences pass before a launch.

Each raises a ``ValueError`` that names the argument, what it must be and what was given, here and
in the modules that check other tensors. What is no tensor is a ``TypeError``, and so are arguments
that other libraries take under other names.

Where a call may mean something else than it computes, one warning is given in a process: both
alignments of a causal mask and both layouts are legitimate, and a GPU works without its fastest
kernels.

Legend as in :mod:`flashattn_triton.problem`.
"""

from __future__ import annotations

import difflib
import itertools
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flashattn_triton.problem import DTYPES, Problem, check_layout, heads_first, normalise_length

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


def as_length(name: str, length: Any, tokens: int) -> Any:
    """A ``max_seqlen`` as an int, or a compiler's symbol.

    A tensor is read only where the host need not wait for it. Else ``tokens`` stands for it, and
    for None.
    """
    if length is None:
        return tokens
    if type(length) is int:  # checked by new_problem
        return length
    is_number = isinstance(length, Tensor) and length.dim() == 0 and not length.is_floating_point()
    traced = torch.compiler.is_compiling() or isinstance(length, FakeTensor)
    if is_number and (traced or not length.is_cpu):
        return tokens
    return normalise_length(name, length)


def given_starts(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Both :func:`as_starts`, or neither; one alone is an error."""
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        return as_starts(cu_seqlens_q, cu_seqlens_k)
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_q and cu_seqlens_k must both be given, but got one. Pass two.")
    return None, None


def as_starts(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous starts of packed sequences in int32, of one empty one if there are none.

    One tensor for both stays one.
    """
    same = cu_seqlens_k is cu_seqlens_q
    if cu_seqlens_q.shape == cu_seqlens_k.shape == (1,):
        cu_seqlens_q, cu_seqlens_k = F.pad(cu_seqlens_q, (0, 1)), F.pad(cu_seqlens_k, (0, 1))
    starts_q, starts_k = (as_int32(x).contiguous() for x in (cu_seqlens_q, cu_seqlens_k))
    return starts_q, starts_q if same else starts_k


def as_int32(x: Tensor) -> Tensor:
    """int64 as int32; what does not fit becomes -1 or the largest number, which no caller may give.

    Other dtypes are left as they are.
    """
    return x.clamp(-1, 2**31 - 1).int() if x.dtype == torch.int64 else x


def check_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int,
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
        if x.shape[0] >= 2**31:
            raise ValueError(
                f"{name} must have less than 2^31 tokens, which cu_seqlens count in int32, but got "
                f"{x.shape[0]}. Attend to some of its sequences at a time."
            )
    _check_fit(query, key, value, rows=0)
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
    max_seqlen_q: int, max_seqlen_k: int,
) -> None:  # fmt: skip
    """Checks the values of ``cu_seqlens`` of CPU tensors that :func:`check_varlen` has accepted."""
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if any(type(x) is not Tensor or wrapped(x) for x in (cu_seqlens_q, cu_seqlens_k)):
        return  # the operator checks what a transform or a DTensor hands to it
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
        if max(lengths) > limit:
            raise ValueError(
                f"max_seqlen_{side} must be at least the longest sequence, {max(lengths)}, but got "
                f"{limit}. Pass that length, or leave it out."
            )


def _check_fit(query: Tensor, key: Tensor, value: Tensor, rows: int) -> None:
    """Kind, heads, head_dims and length of tensors whose sequence is dimension ``rows``."""
    check_tensors(query=query, key=key, value=value)
    if query.dtype not in (*DTYPES, torch.float64):
        raise ValueError(
            f"query must be float16, bfloat16 or float32, or float64 where implementation is "
            f"'tiled' or 'reference', but got {query.dtype}. Convert it."
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.shape[1] < 1 or x.shape[-1] < 1:
            raise ValueError(
                f"{name} must have at least one head, and a head_dim of at least 1, but got "
                f"{x.shape[1]} and {x.shape[-1]}. Leave such a call out; if the sequence is empty, "
                f"say by layout which dimension it is."
            )
    heads, kv_heads, value_heads = query.shape[1], key.shape[1], value.shape[1]
    if value_heads == kv_heads and heads % kv_heads:
        raise ValueError(
            f"query's head count must be a multiple of key's, but got {heads} and {kv_heads}. Pass "
            f"layout='bshd' if that dimension is the sequence."
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
    if cu_seqlens_q is None or cu_seqlens_k is None:
        check_layout(problem.layout)
        check_dense(*(heads_first(x, problem.layout) for x in (query, key, value)))
    else:
        check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, *problem.longest)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Floating tensors in autocast's dtype, which is for attention's two matrix products.

    As they are where autocast is on for another kind of device, or of float64 as in PyTorch.
    """
    first = tensors[0]
    if first.is_meta or not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    kept = [not x.is_floating_point() or x.dtype == torch.float64 for x in tensors]
    return tuple(x if keep else x.to(dtype) for x, keep in zip(tensors, kept, strict=True))


# ---- calls that mean something else than they compute --------------------------------------------

_given: set[str] = set()  # kinds of warnings that this process has seen


def warn_once(kind: str, message: str, stacklevel: int) -> None:
    """Gives a ``UserWarning``, unless the process has had one of this kind.

    ``stacklevel``: 1 for the line that calls this function, 2 for its caller's, and so on.
    """
    if kind not in _given:
        # A filter may turn this into an error, and then the next call is to see it too.
        warnings.warn(message, UserWarning, stacklevel=stacklevel + 1)
        _given.add(kind)


def warn_of_alignment(n_queries: int, n_keys: int, stacklevel: int) -> None:
    """Warns of ``causal=True`` if the lengths differ: flash-attn aligns the mask otherwise."""
    if not torch.compiler.is_compiling() and n_queries != n_keys:
        warn_once(
            "alignment",
            f"causal must say where the mask is aligned if there are not as many queries as keys, "
            f"but got True for {n_queries} queries and {n_keys} keys: taken as 'top-left' (query i "
            f"sees keys 0 to i), as in PyTorch. flash-attn means 'bottom-right' (the last query "
            f"sees every key). Pass one of the two names.",
            stacklevel + 1,
        )


def warn_of_layout(query: Tensor, key: Tensor, stacklevel: int) -> None:
    """Warns if (B, H, N, D) tensors, whose layout is not given, look like (B, N, H, D)."""
    if query.shape[1] > query.shape[2] and key.dim() == 4 and key.shape[1] > key.shape[2]:
        warn_once(
            "layout",
            f"layout must be given if there are more heads than positions, but got None for query "
            f"{tuple(query.shape)} and key {tuple(key.shape)}: taken as 'bhsd' (batch, heads, "
            f"sequence, head_dim). Pass layout='bshd' if they are (batch, sequence, heads, "
            f"head_dim), as flash-attn's are, or layout='bhsd' to confirm.",
            stacklevel + 1,
        )


def check_tensors(**tensors: object) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless each, by its name, is a strided tensor."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            kind = type(x)
            remedy = "torch.from_numpy" if kind.__module__ == "numpy" else "torch.as_tensor"
            raise TypeError(
                f"{name} must be a torch.Tensor, but got {kind.__module__}.{kind.__qualname__}. "
                f"Convert it with {remedy}({name})."
            )
        if x.is_nested or x.layout != torch.strided:
            got = f"{'a nested one' if x.is_nested else 'one'} of layout {x.layout}"
            raise ValueError(
                f"{name} must be a strided tensor, but got {got}. Use to_dense() of sparse "
                f"tensors, and flash_attention_varlen for sequences of different lengths, with "
                f"torch.cat of their tensors, or the values() and offsets() of a jagged one."
            )


_NO_PAGES = "There is no support for paged caches. Leave the argument out."
# What flash-attn and PyTorch's scaled_dot_product_attention call things, and what to do instead; {}
# stands for the value.
_ELSEWHERE = {
    "softmax_scale": ("flash-attn", "Use scale={!r}."),
    "sm_scale": ("flash-attn", "Use scale={!r}."),
    "window_size": ("flash-attn", "Use window={!r}, where None, not -1, means no limit."),
    "dropout_p": (
        "flash-attn and PyTorch",
        "There is no dropout. Leave the argument out, and apply dropout elsewhere.",
    ),
    "return_attn_probs": ("flash-attn", "Use return_lse={!r}."),
    "return_softmax_lse": ("flash-attn", "Use return_lse={!r}."),
    "block_table": ("flash-attn", _NO_PAGES),
    "page_table": ("flash-attn", _NO_PAGES),
    "is_causal": ("PyTorch", "Use causal={!r}, whose True aligns the mask to the top left."),
    "attn_mask": (
        "PyTorch",
        "Use causal, window or prefix_lengths, mask if it is boolean, or bias if it is numbers.",
    ),
    "enable_gqa": ("PyTorch", "Leave it out: grouped heads need no argument."),
}


_OF_PACKED_ROWS = {
    "document_ids": "Pass documents as rows of their own.",
    "key_lengths": "Hide the keys behind the lengths by a mask instead.",
}


def refuse_with_packed_rows(packed: str, **tensors: object) -> None:
    """Raises ``ValueError`` for an argument that has no meaning where rows are packed.

    They are packed for the argument ``packed``, "document_ids" or "key_lengths".
    """
    for name, x in tensors.items():
        if x is not None:
            raise ValueError(
                f"{name} must be None where {packed} are given, but got one. "
                f"{_OF_PACKED_ROWS[packed]}"
            )


def refuse_unknown(function: str, allowed: Collection[str], given: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` for the first unknown keyword, naming this package's argument."""
    name = next((name for name in given if name not in allowed), None)
    if name is None:
        return
    value = given[name]
    if name in _ELSEWHERE:
        library, remedy = _ELSEWHERE[name]
        if name == "window_size":
            sides = value if isinstance(value, Sequence) else (value, value)
            value = tuple(None if side == -1 else side for side in sides)
        raise TypeError(
            f"{function} must be called by its own argument names, but got {name}, a name of "
            f"{library}. {remedy.format(value)}"
        )
    similar = difflib.get_close_matches(name, allowed, n=1)
    hint = f"Did you mean {similar[0]}?" if similar else f"Choose from {', '.join(allowed)}."
    raise TypeError(f"{function} must be called by its own argument names, but got {name}. {hint}")
