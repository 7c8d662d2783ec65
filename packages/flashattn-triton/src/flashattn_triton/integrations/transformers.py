"""``attn_implementation="flashattn-triton"`` for Hugging Face transformers.

    from flashattn_triton.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashattn-triton")

transformers asks an attention implementation for two functions. One prepares the mask, once for
each forward pass: :func:`attention_mask`. The other computes attention in every layer:
:func:`attention_forward`. Both are registered, because without the first transformers passes no
mask at all, and padding would be attended to.

Dimensions: B batch, H query heads, G key/value heads, N_q queries, N_k keys (cached ones
included), D head_dim, T tokens that are not padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flashattn_triton.attention import flash_attention, flash_attention_varlen

NAME = "flashattn-triton"

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Arguments that models pass for features that change the result and that are not computed here.
UNSUPPORTED = {
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "cache": "a paged cache",
    "cu_seq_lens_q": "sequences packed into one row",
    "cu_seq_lens_k": "sequences packed into one row",
    "head_mask": "a head mask",
}


def register() -> None:
    """Makes ``attn_implementation="flashattn-triton"`` known to transformers; repeatable.

    Covered: causal and bidirectional self-attention, cross-attention, grouped-query heads, padding
    on either side, sliding windows, soft-caps, decoding with a dynamic cache. Everything else
    raises a ``ValueError`` in the forward pass: dropout, attention sinks, position biases, static
    caches, requests for attention weights, and masks that are not a band of the score matrix (4-D
    masks, prefix and block masks, packed sequences).

    Raises:
        ImportError: if transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "registering with transformers needs transformers >= 5; "
            "install it with: pip install 'flashattn-triton[transformers]'"
        ) from error
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Args:
        module: the layer; its ``is_causal`` decides unless the argument does.
        query: (B, H, N_q, D), the last N_q of the N_k positions (any positions if not causal).
        key: (B, G, N_k, D).
        value: (B, G, N_k, E).
        attention_mask: what :func:`attention_mask` returned.
        dropout: must be 0.
        scaling: factor on the scores; None means 1/sqrt(D).
        sliding_window: a query sees this many keys up to and including its own, and as many on
            the other side if not causal.
        softcap: bound on the scores.
        is_causal: overrides the module's.
        kwargs: what else models pass; a feature that is not supported is refused.

    Returns:
        (B, N_q, H, E), zero for queries that are padding (where attention is causal or has a
        window), and None for the attention weights, which never exist.

    Raises:
        ValueError: if an argument asks for something that is not computed here.
    """
    if dropout:
        raise ValueError(
            f"{NAME} has no dropout, received dropout={dropout}; set attention_dropout=0 in the "
            f"model's configuration, or choose another attn_implementation"
        )
    for name, feature in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{NAME} does not support {feature}, received {name}; "
                f"choose another attn_implementation"
            )
    if kwargs.get("output_attentions"):
        raise ValueError(f"{NAME} never has the attention weights; set output_attentions=False")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = None if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    options: dict[str, Any] = {
        # With a cache the queries are the last of the keys' positions; without one, N_q = N_k.
        "causal": "bottom-right" if causal else False,
        "scale": scaling,
        "window": window,
        "softcap": softcap,
    }
    if attention_mask is None:
        out = flash_attention(query, key, value, **options)
        return out.transpose(1, 2).contiguous(), None
    if attention_mask.dim() != 2 or attention_mask.shape != (key.shape[0], key.shape[2]):
        raise ValueError(
            f"{NAME} takes a padding mask (batch, keys) = {(key.shape[0], key.shape[2])}, "
            f"received shape {tuple(attention_mask.shape)}; choose another attn_implementation "
            f"for custom masks"
        )
    return _attend_unpadded(query, key, value, attention_mask.bool(), options), None


def _attend_unpadded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attention among the tokens that are not padding, packed one sequence after another."""
    batch, _, n_queries, _ = query.shape
    # Positions matter only relative to a diagonal. Then queries that are padding must go, so that
    # the remaining ones keep their distance to the remaining keys; else they may stay.
    if options["causal"] or options["window"]:
        if options["window"] and not _is_contiguous(mask):
            raise ValueError(
                f"{NAME} needs each sequence in one piece where a sliding window counts "
                f"positions, received a padding mask with holes; choose another attn_implementation"
            )
        query_mask = mask[:, -n_queries:]
    else:
        query_mask = mask.new_ones(batch, n_queries)
    query_tokens, key_tokens = (_true_indices(m) for m in (query_mask, mask))
    cu_seqlens_q, max_seqlen_q = _starts(query_mask)
    cu_seqlens_k, max_seqlen_k = _starts(mask)
    packed = flash_attention_varlen(
        _pack(query, query_tokens),
        _pack(key, key_tokens),
        _pack(value, key_tokens),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        **options,
    )
    out = packed.new_zeros(batch * n_queries, *packed.shape[1:])
    return out.index_copy(0, query_tokens, packed).unflatten(0, (batch, n_queries))


def _true_indices(mask: Tensor) -> Tensor:
    return mask.flatten().nonzero().squeeze(1)


def _pack(x: Tensor, tokens: Tensor) -> Tensor:
    """(B, H, N, D) to (T, H, D)."""
    return x.transpose(1, 2).flatten(0, 1).index_select(0, tokens)


def _starts(mask: Tensor) -> tuple[Tensor, int]:
    """Where each row's tokens start when packed (B + 1, int32), and the longest row's length."""
    lengths = mask.sum(dim=1)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=mask.device)
    starts[1:] = lengths.cumsum(0)
    return starts, int(lengths.max())


def _is_contiguous(mask: Tensor) -> bool:
    """Whether the True elements of each row are one run."""
    begins = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
    return bool((begins.sum(dim=1) <= 1).all())


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """The padding mask for :func:`attention_forward`, after a check that it is all there is.

    ``attention_forward`` computes a band of the score matrix from ``is_causal`` and
    ``sliding_window``. The rule that transformers would build the mask from is therefore evaluated
    for every query, at its diagonal and at distances of 1, 2, 4, ... keys from it, and must
    agree with a band: causal or not, and ``local_size`` wide if that is given. While
    ``torch.compile`` traces, values cannot be read, and only rules from the user are refused.

    Args:
        batch_size: B.
        q_length: N_q, the queries at positions ``q_offset`` and up.
        kv_length: N_k, the keys at positions ``kv_offset`` and up.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        mask_function: (batch, head, query position, key position) to visible; None means causal.
        attention_mask: (B, positions) bool, False for padding.
        local_size: width of a sliding window.
        use_vmap: whether the rule came from the user.

    Returns:
        (B, N_k) bool, or None if nothing is padding.

    Raises:
        ValueError: if the mask is not a band, or keys lie beyond the last query (a static cache).
    """
    if use_vmap:
        raise ValueError(
            f"{NAME} does not support custom mask functions; choose another attn_implementation"
        )
    if mask_function is not None and not torch.compiler.is_compiling():
        device = "cpu" if attention_mask is None else attention_mask.device
        queries = torch.arange(q_length, device=device) + int(q_offset)
        first, last = kv_offset, kv_offset + kv_length - 1
        causal = _check_band(mask_function, batch_size, queries, (first, last), local_size)
        if (causal or local_size is not None) and int(q_offset) + q_length != last + 1:
            raise ValueError(
                f"{NAME} needs the last query at the position of the last key, received queries "
                f"up to {int(q_offset) + q_length - 1} and keys up to {last}; use a dynamic cache "
                f"instead of a static one"
            )
    if attention_mask is None:
        return None
    padding = attention_mask[:, -kv_length:]
    if padding.shape[1] < kv_length:
        raise ValueError(
            f"attention_mask must cover all {kv_length} keys, received shape "
            f"{tuple(attention_mask.shape)}"
        )
    return None if bool(padding.all()) else padding


def _check_band(
    mask_function: MaskFunction,
    batch_size: int,
    queries: Tensor,
    keys: tuple[int, int],
    local_size: int | None,
) -> bool:
    """Compares the rule with a band near to and far from each diagonal; returns if it is causal."""
    first, last = keys
    powers = [2**n for n in range((last - first + 1).bit_length())]
    if local_size is not None:
        powers += [local_size - 1, local_size, local_size + 1]
    distances = torch.tensor([*(-p for p in powers), 0, *powers], device=queries.device)
    positions = queries[:, None] + distances  # (N_q, distances)
    exists = (positions >= first) & (positions <= last)
    batch = torch.arange(batch_size, device=queries.device)[:, None, None, None]
    head = torch.zeros_like(batch)
    visible = mask_function(batch, head, queries[:, None], positions.clamp(first, last))
    visible = visible.expand(batch_size, 1, *positions.shape).to(queries.device) & exists
    causal = not visible[..., distances > 0].any()
    band = torch.ones_like(distances, dtype=torch.bool)
    if causal:
        band &= distances <= 0
    if local_size is not None:
        band &= distances > -local_size if causal else distances.abs() <= local_size
    if not torch.equal(visible, (band & exists).expand_as(visible)):
        raise ValueError(
            f"{NAME} supports causal, sliding-window and full masks with padding, received a rule "
            f"that is none of these (packed sequences, blocks or chunks of tokens, a prefix); "
            f"choose another attn_implementation"
        )
    return causal
