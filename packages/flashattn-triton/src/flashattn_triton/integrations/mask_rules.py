"""A model's mask as a rule: what its layers need to compute it without a matrix of scores.

transformers describes a mask as a function of positions, put together from a few known ones, and
asks for it once in each forward pass. :func:`attention_mask` takes the function apart: a band of
the score matrix, sequences packed in rows, chunks and padding become a :class:`MaskRule`; any other
function is evaluated for every query and key, and the rule holds the boolean mask. Layers compute
what the rule says and nothing else.

Nothing is taken from the values of a function, so that tracing (``torch.compile``,
``torch.export``) finds the same rules. Padding, and sequences that are packed, are read on the host
once in each eager forward pass.

Dimensions: B batch, N_q queries, N_k keys (cached ones included).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Never

import torch
from torch import Tensor
from torch.nn import functional as F

from flashattn_triton import cu_seqlens_of

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Keys that a query sees before and after its own position; None means all. (None, 0) is causal.
Band = tuple[int | None, int | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Sequences of a batch, one after another in rows that are joined.

    ``starts`` are two (sequences + 1,) int32 tensors, of queries and keys, and ``longest`` the
    lengths of their longest sequences, or None. ``tokens`` are the places of queries and of keys in
    the joined rows, two int64 tensors; None means all.
    """

    starts: tuple[Tensor, Tensor]
    longest: tuple[int | None, int | None] = (None, None)
    tokens: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskRule:
    """The mask of some layers; a key is visible if all fields allow it.

    Models hand it on from :func:`attention_mask` to their layers as they hand on a tensor, which it
    is not: any use as one is an error.

    Args:
        band: aligned so that the last query is at the last key.
        packing: sequences that do not see each other, and tokens that are no padding.
        mask: bool, (B, 1, N_q, N_k) or (B, 1, 1, N_k). Beside ``packing``: the same padding.
        several: () bool on the device, True if a row holds several sequences, which was not known
            while the model was traced.
        lengths: N_q and N_k that the rule was made for; None means any.
    """

    band: Band = (None, None)
    packing: Packing | None = None
    mask: Tensor | None = None
    several: Tensor | None = None
    lengths: tuple[int, int] | None = None

    ndim = 4  # generate() asks masks for it, and for contiguous()

    def contiguous(self) -> MaskRule:
        """The rule itself."""
        return self

    @property
    def causal(self) -> bool:
        """Whether no query sees a key behind its own."""
        return self.band[1] == 0

    def __getattr__(self, name: str) -> Never:
        raise AttributeError(_NO_TENSOR.format(f"asked for {name}"))

    def __getitem__(self, index: Any) -> Never:
        raise TypeError(_NO_TENSOR.format("indexed it"))

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Never:
        raise ValueError(_NO_TENSOR.format(f"passed it to {function.__name__}"))


_NO_TENSOR = (
    "attn_implementation must be 'eager' or one of transformers' own for a model that computes "
    "with its mask, because this package's mask is a rule and no tensor, but the model {}. Leave "
    "attn_implementation out."
)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | MaskRule | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    packed: bool = False,
    max_documents: int | None = None,
    context_parallel: bool = False,
    **_: Any,
) -> MaskRule | Tensor:
    """The rule of a mask, as transformers asks for it.

    Args are those of transformers' ``masking_utils.sdpa_mask``: ``q_length`` queries at positions
    ``q_offset`` (a tensor for static caches) and up, and ``kv_length`` keys; ``mask_function`` of
    batch, head, query position and key position; ``attention_mask`` (B, positions) bool, False for
    padding, or a rule, which is returned. With ``use_vmap`` parts of the function are a user's. A
    model that changes its mask before layers get it allows neither skip: the mask is then a bool
    tensor (B, 1, N_q, N_k). ``packed`` and ``max_documents`` are as given to
    :func:`~flashattn_triton.integrations.transformers.register`; with ``context_parallel``
    positions are those of a rank's rows, and ``cu_seq_lens_q`` says where sequences start.

    Raises:
        ValueError: a mask that cannot be computed over ranks.
    """
    from transformers import masking_utils

    if isinstance(attention_mask, MaskRule):  # made by generate()
        return attention_mask
    function = masking_utils.causal_mask_function if mask_function is None else mask_function
    read = _read(function, masking_utils.__file__, not use_vmap, (kv_offset, kv_length, device))
    if context_parallel:
        alone = attention_mask is None and q_length == kv_length
        if not alone or read is None or read.chunks:
            found = "chunks, or a rule that is no band" if alone else "a mask or cached keys"
            raise ValueError(
                f"attention_mask must be None, and caches empty, over ranks, but got {found}. Pack "
                f"sequences instead of padding them, and decode without context_parallel."
            )
        return MaskRule(band=read.band)
    traced = torch.compiler.is_compiling()
    if isinstance(q_offset, Tensor) and q_length > 1 and not traced:
        q_offset = int(q_offset)
    # Keys up to the position of the last query. A static cache has more, in places that are empty.
    end = None if isinstance(q_offset, Tensor) else q_offset + q_length - kv_offset
    padding = _padding(attention_mask, kv_offset, kv_length, end)
    lengths = (q_length, kv_length)

    def evaluated() -> Tensor:
        visible: Tensor = masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask,
            allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip
        return visible

    if read is None:
        return MaskRule(mask=evaluated(), lengths=lengths)
    if not (read.documents or allow_is_causal_skip or allow_is_bidirectional_skip):
        return evaluated()
    band, ids = read.band, read.sequences(batch_size)
    everywhere = band == (None, None) and ids is None
    aligned = everywhere or (
        end == kv_length and (q_length == kv_length or (band[1] == 0 and ids is None))
    )
    if not aligned:
        prefill = q_length > 1 and band[1] == 0 and ids is None and not traced
        if end is None or not prefill or not 0 < end < kv_length:
            return MaskRule(mask=evaluated(), lengths=lengths)
        filled = (torch.arange(kv_length, device=device) < end).expand(batch_size, -1)
        padding = filled if padding is None else padding & filled
    if padding is not None and not traced and bool(padding.all()):
        padding = None
    packing = several = mask = None
    if padding is None and ids is not None:
        if traced and read.documents and not packed:
            several = torch.stack([(x != x[:, :1]).any() for x in read.documents]).any()
            ids = _Reading(chunks=read.chunks).sequences(batch_size)
        if ids is not None:
            limit = max_documents if traced else None
            if traced and read.chunks:  # in each row as many as whole ones and two more
                sizes = [size for _, size in read.chunks]
                limit = None if read.documents else batch_size * (kv_length // min(sizes) + 2)
            starts, longest = cu_seqlens_of(ids, limit)
            packing = Packing(starts=(starts, starts), longest=(longest, longest))
    elif padding is not None:
        # A window counts positions, which packing would change where padding is within a sequence.
        if ids is None and not traced and (band[0] is None or _in_one_piece(padding)):
            packing = _without_padding(padding, q_length, None if everywhere else end)
        if ids is None and aligned:
            mask = padding[:, None, None, :]
        elif packing is None:
            return MaskRule(mask=evaluated(), lengths=lengths)
    if everywhere and padding is None:
        return MaskRule()
    return MaskRule(band=band, packing=packing, mask=mask, several=several, lengths=lengths)


def _padding(mask: Tensor | None, kv_offset: int, kv_length: int, end: int | None) -> Tensor | None:
    """(B, N_k) bool, False for padding and for keys behind ``mask``; None without a mask."""
    if mask is None:
        return None
    missing = kv_offset + kv_length - mask.shape[1]
    if missing > 0:
        if end is not None and mask.shape[1] < kv_offset + min(end, kv_length):
            raise ValueError(
                f"attention_mask must cover all {kv_offset + min(end, kv_length)} keys, but got "
                f"shape {tuple(mask.shape)}. Include the cached positions."
            )
        mask = F.pad(mask, (0, missing))
    return mask[:, kv_offset : kv_offset + kv_length].bool()


def _without_padding(padding: Tensor, n_queries: int, end: int | None) -> Packing:
    """The tokens of each row that are no padding.

    Where positions matter, queries that are padding go, so that the others keep their distance to
    the keys: ``end`` is the number of keys up to the last query's position, else None.
    """
    kept = padding.new_ones(len(padding), n_queries)
    if end is not None:
        kept = padding[:, end - n_queries : end]
    tokens = (kept.flatten().nonzero().squeeze(1), padding.flatten().nonzero().squeeze(1))
    counts = kept.sum(dim=1), padding.sum(dim=1)
    starts_q, starts_k = (F.pad(n.cumsum(0), (1, 0)).int() for n in counts)
    longest_q, longest_k = (int(n.max()) for n in counts)
    return Packing(starts=(starts_q, starts_k), longest=(longest_q, longest_k), tokens=tokens)


def _in_one_piece(padding: Tensor) -> bool:
    """Whether no sequence of any row is interrupted by padding."""
    begins = padding & ~F.pad(padding[:, :-1], (1, 0))
    return bool((begins.sum(dim=1) <= 1).all())


@dataclass(frozen=True, kw_only=True, eq=False)
class _Reading:
    """A function of positions as a band, within documents and chunks of so many positions.

    Both are (B, N_k) integers, one number for each document or chunk of a row.
    """

    band: Band = (None, None)
    documents: tuple[Tensor, ...] = ()
    chunks: tuple[tuple[Tensor, int], ...] = ()

    def sequences(self, batch_size: int) -> Tensor | None:
        """(B, N_k) numbers of what is within the same documents and chunks; None for all."""
        labels = [*self.documents, *(numbers for numbers, _ in self.chunks)]
        if not labels:
            return None
        begins = torch.stack([x[:, 1:] != x[:, :-1] for x in labels]).any(0)
        return F.pad(begins, (1, 0)).cumsum(1).expand(batch_size, -1)


def _read(
    function: Any,
    file: str,
    own: bool,
    keys: tuple[int, int, torch.device | str],
    positions: Tensor | None = None,
) -> _Reading | None:
    """A function in parts; None if one of them is none of transformers' own, defined in ``file``.

    ``own``: its documents are those that transformers finds, which are in one piece. ``keys``: the
    first position, how many there are, and where; ``positions`` (B, N_k) take their place.
    """
    code = getattr(function, "__code__", None)
    if code is None or code.co_filename != file:
        return None
    cells = function.__closure__ or ()
    given = {n: c.cell_contents for n, c in zip(code.co_freevars, cells, strict=True)}
    match code.co_qualname:
        case "causal_mask_function":
            return _Reading(band=(None, 0))
        case "bidirectional_mask_function":
            return _Reading()
        case "sliding_window_overlay.<locals>.inner_mask":
            return _Reading(band=(given["sliding_window"] - 1, None))
        case "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            return _Reading(band=(given["sliding_window"], given["sliding_window"]))
        case "packed_sequence_mask_function.<locals>.inner_mask" if own:
            return _Reading(documents=(given["packed_sequence_mask"],))
        case "remap_positions_for_packed_sequence.<locals>.inner_mask" if own:
            return _read(given["mask_function"], file, own, keys, given["position_ids"])
        case "chunked_overlay.<locals>.inner_mask":
            size, (first, length, device) = given["chunk_size"], keys
            if positions is None and first + length <= size:
                return _Reading()
            if positions is None:
                positions = torch.arange(first, first + length, device=device)
            numbers = (positions - given["left_padding"][:, None]) // size
            return _Reading(chunks=((numbers, size),))
        case "and_masks.<locals>.and_mask":
            parts = [_read(part, file, own, keys, positions) for part in given["mask_functions"]]
            total = _Reading()
            for part in parts:
                if part is None:
                    return None
                left, right = (
                    a if b is None else b if a is None else min(a, b)
                    for a, b in zip(total.band, part.band, strict=True)
                )
                total = _Reading(
                    band=(left, right),
                    documents=total.documents + part.documents,
                    chunks=total.chunks + part.chunks,
                )
            return total
    return None
