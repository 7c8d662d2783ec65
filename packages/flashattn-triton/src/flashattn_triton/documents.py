"""Several documents in one row of tokens: each token attends within its own document.

Document masks need no mask: rows become one packed batch whose sequences are the documents, and
tiles of keys of other documents are never visited. Legend: B rows, H query heads, G key/value
heads, N tokens of a row, D head_dim, E head_dim of value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from flashattn_triton.mistakes import check_tensors
from flashattn_triton.problem import OptionKeywords

_SCATTERED = (
    "document_ids must have each document's tokens next to each other, but got a document in "
    "several pieces"
)
_REMEDY = "Sort the tokens by document, or give every piece a number of its own."


@overload
def cu_seqlens_of(document_ids: Tensor, max_documents: None = None) -> tuple[Tensor, int]: ...


@overload
def cu_seqlens_of(document_ids: Tensor, max_documents: int | None) -> tuple[Tensor, int | None]: ...


def cu_seqlens_of(
    document_ids: Tensor, max_documents: int | None = None
) -> tuple[Tensor, int | None]:
    """Where each document starts if rows are packed one after another.

    The host waits for the device, because how many documents there are decides the result's shape.
    In compiled code and with ``max_documents`` it does not, so that compilers, exporters and CUDA
    graphs can take part: the starts are followed by those of empty documents, at a fixed size, and
    mistakes are errors of the device.

    Args:
        document_ids: (..., N) integers. Tokens of one document are neighbours and have the same
            number; the same number in another row is another document.
        max_documents: at least as many as there are, in all rows; in compiled code None means as
            many as tokens.

    Returns:
        (documents + 1,) int32 starts, which end with the number of tokens, and the length of the
        longest document, or None where the host does not wait: what ``flash_attention_varlen``
        takes.

    Raises:
        ValueError: not integers, or a document in several pieces.
        TypeError: not a tensor.
        RuntimeError: where the host does not wait: a document in several pieces, or more than
            ``max_documents``.
    """
    rows, begins, in_one_piece = _rows(document_ids)
    n_tokens = rows.numel()
    if max_documents is None and not torch.compiler.is_compiling():
        scattered = (~in_one_piece).nonzero().flatten()
        if len(scattered):
            raise ValueError(f"{_SCATTERED} in row {int(scattered[0])}. {_REMEDY}")
        starts = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=n_tokens)
        return starts.int(), int(starts.diff().max()) if n_tokens else 0
    torch._assert_async(in_one_piece.all(), f"{_SCATTERED}. {_REMEDY}")
    positions = torch.arange(n_tokens, device=rows.device)
    starts = torch.where(begins.flatten(), positions, n_tokens).sort().values
    if max_documents is not None:
        torch._assert_async(
            begins.sum() <= max_documents,
            f"max_documents must be at least the number of documents in all rows, but got "
            f"{max_documents}, and there are more. Leave it out, or pass more.",
        )
        starts = starts[:max_documents]
    return F.pad(starts, (0, 1), value=n_tokens).int(), None


def _rows(document_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of numbers, where documents begin in them, and whether each row's are in one piece."""
    check_tensors(document_ids=document_ids)
    integers = not document_ids.is_floating_point() and not document_ids.is_complex()
    if not integers or document_ids.dtype == torch.bool or document_ids.dim() < 1:
        raise ValueError(
            f"document_ids must be integers (..., sequence), but got {document_ids.dtype} of shape "
            f"{tuple(document_ids.shape)}. Number each token's document."
        )
    rows = document_ids[None] if document_ids.dim() == 1 else document_ids.flatten(0, -2)
    begins, distinct = (
        F.pad(x[:, 1:] != x[:, :-1], (1, 0), value=True)[:, : x.shape[1]]
        for x in (rows, rows.sort(dim=1).values)
    )
    return rows, begins, begins.sum(dim=1) == distinct.sum(dim=1)


def attend_to_documents(
    attend: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_ids: Tensor,
    layout: str,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    max_documents: int | None = None,
    **keywords: Unpack[OptionKeywords],
) -> tuple[Tensor, Tensor]:
    """``flash_attention`` of (B, H, N, D) or (B, N, H, D) tensors, within documents.

    Args:
        attend: ``flash_attention_varlen``, which calls this module's functions in its turn.
        query: and ``key``, ``value``, ``document_ids``, ``alibi_slopes``, ``sinks``, ``keywords``:
            as given to ``flash_attention``.
        layout: "bhsd" or "bshd".
        max_documents: as given to ``flash_attention``.

    Returns:
        Output in the layout of the inputs, and logsumexp (B, H, N).
    """
    check_tensors(document_ids=document_ids)
    tokens_first = [x.movedim(-3, -2) if layout == "bhsd" else x for x in (query, key, value)]
    for name, x in zip(("query", "key", "value"), tokens_first, strict=True):
        if x.dim() < 3 or x.shape[:-2] != document_ids.shape or x.device != document_ids.device:
            raise ValueError(
                f"document_ids must be one number for each token of {name}, "
                f"{tuple(x.shape[:-2])} on {x.device}, but got shape {tuple(document_ids.shape)} "
                f"on {document_ids.device}. Queries and keys are the same tokens."
            )
    if alibi_slopes is not None and alibi_slopes.dim() != 1:
        raise ValueError(
            f"alibi_slopes must be of shape ({query.shape[-3 if layout == 'bhsd' else -2]},) where "
            f"document_ids are given, but got {tuple(alibi_slopes.shape)}. All documents have the "
            f"same slopes."
        )
    cu_seqlens, longest = cu_seqlens_of(document_ids, max_documents)
    attend = functools.partial(attend, alibi_slopes=alibi_slopes, sinks=sinks)
    places = (cu_seqlens, cu_seqlens, longest, longest)
    return attend_in_joined_rows(attend, tokens_first, places, layout, **keywords)


def attend_in_joined_rows(
    attend: Callable[..., Any],
    tensors: Sequence[Tensor],
    places: tuple[Any, ...],
    layout: str,
    **keywords: Any,
) -> tuple[Tensor, Tensor]:
    """Output in ``layout`` and logsumexp (..., H, N_q) of (..., N, H, D) tensors.

    Args:
        attend: ``flash_attention_varlen``, which gets all rows as one.
        tensors: query, key and value.
        places: of sequences in joined rows: its two ``cu_seqlens`` and ``max_seqlen``.
        layout: "bhsd" or "bshd".
    """
    rows = tensors[0].shape[:-2]
    joined = (x.reshape(-1, *x.shape[-2:]) for x in tensors)
    out, lse = attend(*joined, *places, return_lse=True, **keywords)
    out = out.reshape(*rows, *out.shape[1:])
    lse = lse.reshape(lse.shape[0], *rows).movedim(0, -2)
    return out.movedim(-2, -3) if layout == "bhsd" else out, lse
