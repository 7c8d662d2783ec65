"""Errors and warnings for calls that mean something else than they compute.

Arguments that other libraries take under other names, and inputs that are not tensors, are errors.
Where a call may be meant as it stands, one warning is given in a process: both alignments of a
causal mask and both layouts are legitimate, and a GPU works without its fastest kernels.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_given: set[str] = set()  # kinds of warnings that this process has seen


def warn_once(kind: str, message: str, stacklevel: int) -> None:
    """Gives a ``UserWarning``, unless the process has had one of this kind.

    Args:
        kind: what identifies the warning; the message may differ from call to call.
        message: what was expected, what was got and what to do.
        stacklevel: 1 for the line that calls this function, 2 for its caller's, and so on.
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
    """Raises ``TypeError`` unless each argument, given by its name, is a tensor."""
    for name, x in tensors.items():
        if isinstance(x, Tensor):
            continue
        kind = type(x)
        remedy = "torch.from_numpy" if kind.__module__ == "numpy" else "torch.as_tensor"
        raise TypeError(
            f"{name} must be a torch.Tensor, but got {kind.__module__}.{kind.__qualname__}. "
            f"Convert it with {remedy}({name})."
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
