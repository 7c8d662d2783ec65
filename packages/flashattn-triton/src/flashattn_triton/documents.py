"""Rows as one packed batch: of documents that share them, or of caches that are filled in part.

A document mask needs no mask: the sequences are the documents, and tiles of keys of other documents
are never visited. A row of a cache is two sequences: its keys, with the row's queries, and the rest
of the row, which has no queries. Its starts have a fixed size and none is read on the host, so that
one compiled program or CUDA graph serves every length, and keys behind the length are never read.

Legend: B rows, H query heads, G key/value heads, N tokens of a row (N_q queries, N_k places for
keys), D head_dim, E head_dim of value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flashattn_triton.inputs import check_equal, check_tensors
from flashattn_triton.problem import normalise_length

_SCATTERED = (
    "document_ids must have each document's tokens next to each other, but got a document in "
    "several pieces"
)
_REMEDY = "Sort the tokens by document, or give every piece a number of its own."


def cu_seqlens_of(document_ids: Tensor, max_documents: int | None = None) -> tuple[Tensor, int]:
    """Where each document starts if rows are packed one after another.

    The host waits for the device, because how many documents there are decides the result's shape.
    In compiled code, without values ("meta" and fake tensors) and with ``max_documents`` it does
    not, so that compilers, exporters and CUDA graphs can take part: the starts are followed by
    those of empty documents, at a fixed size, and mistakes are errors of the device.

    Args:
        document_ids: (..., N) integers. Tokens of one document are neighbours and have the same
            number; the same number in another row is another document.
        max_documents: at least as many as there are, in all rows; in compiled code None means as
            many as tokens.

    Returns:
        (documents + 1,) int32 starts, which end with the number of tokens, and the length of the
        longest document, or where the host does not wait N, which no document exceeds: what
        ``flash_attention_varlen`` takes.

    Raises:
        ValueError: not integers, or mapped over by ``torch.vmap``, or a document in several pieces,
            or ``max_documents`` is none.
        TypeError: not a tensor.
        RuntimeError: where the host does not wait: a document in several pieces, or more than
            ``max_documents``.
    """
    check_tensors(document_ids=document_ids)
    if max_documents is not None:
        max_documents = normalise_length("max_documents", max_documents)
    integers = not document_ids.is_floating_point() and not document_ids.is_complex()
    if not integers or document_ids.dtype == torch.bool or document_ids.dim() < 1:
        raise ValueError(
            f"document_ids must be integers (..., sequence), but got {document_ids.dtype} of shape "
            f"{tuple(document_ids.shape)}. Number each token's document."
        )
    if torch._C._functorch.is_batchedtensor(document_ids):
        raise ValueError(
            "document_ids must be the same for all that torch.vmap maps over, but got mapped ones. "
            "Make the mapped dimension a part of the batch."
        )
    rows = document_ids[None] if document_ids.dim() == 1 else document_ids.flatten(0, -2)
    begins, distinct = (
        F.pad(x[:, 1:] != x[:, :-1], (1, 0), value=True)[:, : x.shape[1]]
        for x in (rows, rows.sort(dim=1).values)
    )
    in_one_piece = begins.sum(dim=1) == distinct.sum(dim=1)  # of each row
    n_tokens = rows.numel()
    traced = torch.compiler.is_compiling() or rows.is_meta or isinstance(rows, FakeTensor)
    if max_documents is None and not traced:
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
    return F.pad(starts, (0, 1), value=n_tokens).int(), rows.shape[1]


def places_of_documents(
    document_ids: Tensor,
    max_documents: int | None,
    tensors: Sequence[Tensor],
    alibi_slopes: Tensor | None,
) -> tuple[Tensor, Tensor, int, int]:
    """Where documents are among the tokens of all rows: two ``cu_seqlens`` and ``max_seqlen``.

    ``tensors`` are query, key and value, (..., N, H, D); the other arguments are those of
    ``flash_attention``.
    """
    check_tensors(document_ids=document_ids)
    for name, x in zip(("query", "key", "value"), tensors, strict=True):
        if x.dim() < 3 or x.shape[:-2] != document_ids.shape or x.device != document_ids.device:
            raise ValueError(
                f"document_ids must be one number for each token of {name}, "
                f"{tuple(x.shape[:-2])} on {x.device}, but got shape {tuple(document_ids.shape)} "
                f"on {document_ids.device}. Queries and keys are the same tokens."
            )
    if alibi_slopes is not None and alibi_slopes.dim() != 1:
        raise ValueError(
            f"alibi_slopes must be of shape ({tensors[0].shape[-2]},) where document_ids are "
            f"given, but got {tuple(alibi_slopes.shape)}. All documents have the same slopes."
        )
    cu_seqlens, longest = cu_seqlens_of(document_ids, max_documents)
    return cu_seqlens, cu_seqlens, longest, longest


def places_of_cache(
    key_lengths: Tensor, tensors: Sequence[Tensor]
) -> tuple[Tensor, Tensor, int, int]:
    """Where the sequences of all rows are: their two ``cu_seqlens`` and ``max_seqlen``.

    Args:
        key_lengths: (B,) integers; what is below 0 counts as 0, what is above N_k as N_k.
        tensors: query, key and value, (B, N, H, D), B being any number of dimensions.
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
    # Starts are not read on the host: rows of another shape would be read past their end.
    places, what = (*leading, n_keys), "have rows and places {}, those of key_lengths and key"
    check_equal(
        *((name, what, places, tuple(x.shape[:-2]), "Slice or expand it.")
          for name, x in zip(("key", "value"), tensors[1:], strict=True))
    )  # fmt: skip
    lengths = key_lengths.reshape(-1)
    rows = torch.arange(1, len(lengths) + 1, device=device)
    filled = (rows - 1) * n_keys + lengths.clamp(0, n_keys)
    queries = (rows * n_queries).repeat_interleave(2)
    keys = torch.stack([filled, rows * n_keys], dim=1).flatten()
    return F.pad(queries, (1, 0)).int(), F.pad(keys, (1, 0)).int(), n_queries, n_keys
