"""flash-attn's functions with its names, arguments and meaning.

    from flashattn_triton.integrations.flash_attn import flash_attn_func

``flash_attn_func`` and ``flash_attn_varlen_func``, their forms for packed tensors
(``flash_attn_qkvpacked_func`` and so on), which pass views and all arguments behind their tensors
on to these two, and ``unpad_input`` and ``pad_input`` of ``flash_attn.bert_padding``. Other names
of flash-attn are errors that say what to write instead.

Code written for flash-attn 2 runs here with that import in place of ``from flash_attn import``.
Positional arguments have flash-attn 2's order; names that only flash-attn 3 has are accepted too.

Tensors are (batch, sequence, heads, head_dim), or (tokens, heads, head_dim) where sequences are
packed. Causal masks and windows are aligned to the bottom right: the last query meets the last key.
-1 means no limit of a window, and 0.0 no soft-cap. An argument that asks for what is not computed
here raises a ``ValueError`` with its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flashattn_triton import flash_attention, flash_attention_varlen
from flashattn_triton.problem import PackedKeywords, as_number, normalise_flag

# flash-attn returns a third value, the probabilities, for tests of its dropout.
Result = Tensor | tuple[Tensor, Tensor, None]

# What else flash-attn takes, with the value that asks for nothing, and what it is.
_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "dropout_p": (0.0, "dropout"),
    "block_table": (None, "paged caches"),
    "page_table": (None, "paged caches"),
    "qv": (None, "a second query for values"),
    "q_descale": (None, "fp8"),
    "k_descale": (None, "fp8"),
    "v_descale": (None, "fp8"),
    "attention_chunk": (0, "chunked attention"),
    "seqused_q": (None, "sequences shorter than cu_seqlens says"),
    "seqused_k": (None, "sequences shorter than cu_seqlens says"),
    "leftpad_k": (None, "padding on the left of keys"),
    "cache_leftpad": (None, "padding on the left of keys"),
    "cache_batch_idx": (None, "caches with rows of other batches"),
    "rotary_cos": (None, "rotary embeddings within attention"),
    "rotary_sin": (None, "rotary embeddings within attention"),
    "rotary_interleaved": (True, "rotary embeddings within attention"),
}
# Advice for flash-attn 3's scheduler that changes no result.
_WITHOUT_EFFECT = ("num_splits", "pack_gqa", "sm_margin")
# What else flash-attn's modules have, and what to write instead.
_REPLACED = {
    "bert_padding": "import unpad_input and pad_input from this module",
    "unpad_input_for_concatenated_sequences": "pass document_ids to flashattn_triton."
    "flash_attention",
    "index_first_axis": "index the tensor: x[indices]",
    "index_put_first_axis": "call pad_input, or assign: x[indices] = values",
}


def __getattr__(name: str) -> Any:
    """Refuses flash-attn's other names, with what to write instead."""
    if name in _REPLACED:
        raise ImportError(f"{name} of flash-attn is not provided here: {_REPLACED[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
    **flash_attn_3: Any,
) -> Result:
    """Attention of (B, N_q, H, D) queries to (B, N_k, G, D) keys; G divides H.

    Args:
        q: (B, N_q, H, D), fp16, bf16 or fp32.
        k: (B, N_k, G, D).
        v: (B, N_k, G, E).
        dropout_p: must be 0.
        softmax_scale: factor on the scores; None means 1/sqrt(D).
        causal: query i sees the keys j <= i + N_k - N_q.
        window_size: (left, right): query i sees the keys from i + N_k - N_q - left to
            i + N_k - N_q + right; -1 means no limit.
        softcap: c > 0 replaces a scaled score s by c·tanh(s/c); 0 means none.
        alibi_slopes: (H,) or (B, H) fp32 constants: slope · |i + N_k - N_q - j| is subtracted from
            the score of query i and key j.
        deterministic: gradients are bit-identical from run to run; None means: as
            ``torch.use_deterministic_algorithms`` says.
        return_attn_probs: also return the logsumexp (B, H, N_q) in fp32, and None in the place of
            the probabilities, which never exist.
        flash_attn_3: further arguments of flash-attn 3.

    Returns:
        (B, N_q, H, E), or a tuple of it and the two values above.

    Raises:
        ValueError: an argument asks for what is not computed here, or is not what is described.
        TypeError: an input is not a tensor, or an argument does not exist.
    """
    options = _options(
        "flash_attn_func", {"dropout_p": dropout_p, **flash_attn_3}, causal, softmax_scale,
        window_size, softcap, alibi_slopes, deterministic,
    )  # fmt: skip
    flag = normalise_flag("return_attn_probs", return_attn_probs)
    _check_rows(q=q)
    result = flash_attention(q, k, v, layout="bshd", return_lse=flag, **options)
    return result if isinstance(result, Tensor) else (*result, None)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool | None = None,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    **flash_attn_3: Any,
) -> Result:
    """:func:`flash_attn_func` of each sequence of a packed batch.

    Args:
        q: (T_q, H, D), the sequences' tokens one after another.
        k: (T_k, G, D).
        v: (T_k, G, E).
        cu_seqlens_q: (sequences + 1,) int32, where each sequence starts in ``q``, and T_q.
        cu_seqlens_k: the same for ``k`` and ``v``.
        max_seqlen_q: at least the length of the longest query sequence. flash-attn needs it; here
            it may be None, as :func:`~flashattn_triton.flash_attention_varlen` says.
        max_seqlen_k: at least the length of the longest key sequence, or None.
        block_table: must be None.

    The other arguments, and the errors, are those of :func:`flash_attn_func`.

    Returns:
        (T_q, H, E); with ``return_attn_probs`` also the logsumexp (H, T_q) in fp32, and None.
    """
    others = {"dropout_p": dropout_p, "block_table": block_table, **flash_attn_3}
    options = _options(
        "flash_attn_varlen_func", others, causal, softmax_scale, window_size, softcap,
        alibi_slopes, deterministic,
    )  # fmt: skip
    flag = normalise_flag("return_attn_probs", return_attn_probs)
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    result = flash_attention_varlen(q, k, v, *starts, *longest, return_lse=flag, **options)
    return result if isinstance(result, Tensor) else (*result, None)


def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **keywords: Any) -> Result:
    """:func:`flash_attn_func` of views of a (B, N, 3, H, D) tensor of queries, keys and values."""
    q, k, v = _unpacked("qkv", qkv, 5, 3)
    return flash_attn_func(q, k, v, *options, **keywords)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **keywords: Any) -> Result:
    """:func:`flash_attn_func` of (B, N_q, H, D) queries and (B, N_k, 2, G, D) keys and values."""
    k, v = _unpacked("kv", kv, 5, 2)
    return flash_attn_func(q, k, v, *options, **keywords)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, *options: Any, **keywords: Any
) -> Result:
    """:func:`flash_attn_varlen_func` of views of one (T, 3, H, D) tensor of packed sequences.

    ``cu_seqlens`` and ``max_seqlen`` are those of queries and of keys.
    """
    q, k, v = _unpacked("qkv", qkv, 4, 3)
    lengths = (max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, *lengths, *options, **keywords)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, *options: Any, **keywords: Any
) -> Result:
    """:func:`flash_attn_varlen_func` of (T_q, H, D) queries and (T_k, 2, G, D) keys and values."""
    k, v = _unpacked("kv", kv, 4, 2)
    return flash_attn_varlen_func(q, k, v, *options, **keywords)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    **flash_attn_3: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to the filled part of a cache, to which new keys and values are added before.

    Args:
        q: (B, N_q, H, D).
        k_cache: (B, places, G, D); ``k`` is written into it.
        v_cache: (B, places, G, E); ``v`` is written into it.
        k: (B, N_new, G, D), or None.
        v: (B, N_new, G, E), or None.
        cache_seqlens: (B,) int32, or one number: how many places are filled before ``k`` is added.
            None: none, or without ``k`` all. Nothing is read on the host; the places behind them
            must hold ``k``.
        return_softmax_lse: also return the logsumexp (B, H, N_q) in fp32.
        rotary_cos: must be None, and so must ``rotary_sin``, ``cache_batch_idx``, ``cache_leftpad``
            and ``block_table``; ``rotary_interleaved`` must be True.
        num_splits: has no effect.
        flash_attn_3: further arguments of flash-attn 3.

    The other arguments, and the errors, are those of :func:`flash_attn_func`; the mask is aligned
    to the last key.

    Returns:
        (B, N_q, H, E), or a pair of it and the logsumexp.
    """
    others = {
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad, "block_table": block_table,
        "rotary_interleaved": rotary_interleaved, "num_splits": num_splits, **flash_attn_3,
    }  # fmt: skip
    options = _options(
        "flash_attn_with_kvcache", others, causal, softmax_scale, window_size, softcap, alibi_slopes
    )
    _check_rows(q=q, k_cache=k_cache, v_cache=v_cache)
    if (k is None) != (v is None):
        missing = "k" if k is None else "v"
        raise ValueError(
            f"{missing} must be a tensor where the other one is, but got None. Pass new keys with "
            f"their values."
        )
    filled = (0 if k is not None else k_cache.shape[1]) if cache_seqlens is None else cache_seqlens
    lengths = torch.as_tensor(filled, device=q.device)
    if lengths.numel() == 1:
        lengths = lengths.reshape(1).expand(len(q))
    if lengths.shape != q.shape[:1] or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cache_seqlens must be one integer, or one for each of {len(q)} rows, but got "
            f"{lengths.dtype} of shape {tuple(lengths.shape)}. Count the places that are filled."
        )
    if k is not None and v is not None:
        _check_rows(k=k, v=v)
        for name, x, cached in (("k", k, k_cache), ("v", v, v_cache)):
            shape = (len(q), k.shape[1], *cached.shape[2:])
            if x.shape != shape or x.dtype != cached.dtype:
                raise ValueError(
                    f"{name} must be {cached.dtype} of shape {shape}, as {name}_cache with k's "
                    f"tokens, but got {x.dtype} of shape {tuple(x.shape)}. Pass one of each row "
                    f"and key head."
                )
        places = (lengths[:, None] + torch.arange(k.shape[1], device=q.device))[..., None, None]
        for cached, x in ((k_cache, k), (v_cache, v)):
            cached.scatter_(1, places.expand_as(x), x)  # places outside are an error
        lengths = lengths + k.shape[1]
    flag = normalise_flag("return_softmax_lse", return_softmax_lse)
    return flash_attention(
        q, k_cache, v_cache, key_lengths=lengths, layout="bshd", return_lse=flag, **options
    )


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Tokens of a padded batch, packed; the host waits for the mask.

    Args:
        hidden_states: (B, N, ...).
        attention_mask: (B, N), bool or integers, 1 for a token and 0 for padding.
        unused_mask: (B, N), 1 for tokens that are kept and belong to no sequence.

    Returns:
        The tokens (T, ...), their places in the flattened batch (T,), ``cu_seqlens`` (B + 1,)
        int32, the length of the longest sequence, and the lengths (B,) int32 without unused
        tokens.
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"{name} must be of shape {tuple(hidden_states.shape[:2])}, as the first two "
                f"dimensions of hidden_states, but got {tuple(mask.shape)}. Slice or pad it."
            )
    kept = tokens = attention_mask != 0
    if unused_mask is not None:
        kept = tokens | (unused_mask != 0)
    lengths = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    starts = F.pad(lengths.cumsum(dim=0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    used = tokens.sum(dim=-1, dtype=torch.int32)
    return hidden_states.flatten(0, 1).index_select(0, indices), indices, starts, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of :func:`unpad_input`: (B, N, ...), with zeros where there was padding.

    Args:
        hidden_states: (T, ...), packed tokens.
        indices: (T,), as ``unpad_input`` returned them.
        batch: B.
        seqlen: N.
    """
    empty = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    padded = empty.index_copy(0, indices, hidden_states)
    return padded.reshape(batch, seqlen, *hidden_states.shape[1:])


def _check_rows(**tensors: object) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor, but got {type(x).__name__}. Convert it with "
                f"torch.as_tensor({name})."
            )
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, sequence, heads, head_dim), but got {x.dim()} dimensions: "
                f"{tuple(x.shape)}. Use flash_attn_varlen_func for packed sequences."
            )


def _unpacked(name: str, packed: Tensor, dims: int, parts: int) -> tuple[Tensor, ...]:
    """Views of queries, keys and values, or of keys and values."""
    if not isinstance(packed, Tensor) or packed.dim() != dims or packed.shape[-3] != parts:
        shape = "(batch, sequence" if dims == 5 else "(tokens"
        given = tuple(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        raise ValueError(
            f"{name} must be a tensor {shape}, {parts}, heads, head_dim), but got {given}. Stack "
            f"its {parts} parts in the dimension before the heads."
        )
    return packed.unbind(-3)


def _options(
    function: str,
    others: dict[str, Any],
    causal: bool,
    softmax_scale: float | None,
    window_size: tuple[int | None, int | None],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool | None = None,
) -> PackedKeywords:
    """This package's keywords for flash-attn's arguments.

    Raises for ``others`` that ask for what is not computed here, and for names of no flash-attn.
    """
    for name, value in others.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in _UNSUPPORTED:
            raise TypeError(
                f"{function} must be called with arguments of flash-attn 2 or 3, but got {name}. "
                f"Leave it out."
            )
        nothing, feature = _UNSUPPORTED[name]
        is_tensor = isinstance(value, Tensor)
        if value is not nothing and as_number(value) != nothing:
            shown = f"a tensor of shape {tuple(value.shape)}" if is_tensor else value
            raise ValueError(
                f"{name} must be {nothing}, because flashattn-triton does not support {feature}, "
                f"but got {shown}. Leave it out, or keep flash-attn for this call."
            )
    normalise_flag("causal", causal)
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise ValueError(
            f"window_size must be a pair (left, right) of integers, but got {window_size!r}. Use "
            f"(-1, -1) for no limit."
        )
    left, right = (None if size == -1 else size for size in window_size)
    return {
        "causal": "bottom-right" if causal else "bottom-right-window",
        "scale": softmax_scale,
        "window": (left, right),
        "softcap": None if softcap == 0 else softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
    }
