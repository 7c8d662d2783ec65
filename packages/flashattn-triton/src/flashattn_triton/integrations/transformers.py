"""``attn_implementation="flashattn-triton"`` for Hugging Face transformers.

    from flashattn_triton.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashattn-triton")

``"triton-attention"`` is the same implementation under a name without "flash" in it, for models
that take every name with that word for one of flash-attn's kernels.

transformers asks an attention implementation for two functions. One prepares the mask, once for
each forward pass: :func:`~flashattn_triton.integrations.mask_rules.attention_mask`. The other
computes attention in every layer: :func:`attention_forward`. Both are registered, because without
the first transformers passes no mask at all, and padding would be attended to.

Between the two the mask is a :class:`~flashattn_triton.integrations.mask_rules.MaskRule`. As with
transformers' own implementations the mask decides, and a layer's ``is_causal`` and
``sliding_window`` count only where a model makes no mask.

Dimensions: B batch, H query heads, G key/value heads, N_q queries, N_k keys (cached ones
included), D head_dim, E head_dim of value, T tokens that are not padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flashattn_triton import flash_attention, flash_attention_varlen
from flashattn_triton.integrations import model_checks
from flashattn_triton.integrations.mask_rules import MaskRule, Packing, attention_mask

NAME = "flashattn-triton"
ALIAS = "triton-attention"

# Arguments that models pass for features that change the result and that are not computed here.
UNSUPPORTED = {
    "cache": "a paged cache",
    "head_mask": "a head mask",
    "sinks": "attention sinks of each token",
    "indices": "a selection of keys for each query (sparse attention)",
}

# An error of traced code, which must be complete before values are known.
PACKED_WHILE_TRACED = (
    "position_ids must number one sequence in each row where the model is traced (torch.compile, "
    f"torch.export) with {NAME}, but got rows of several. Pass where the sequences start as "
    "cu_seq_lens_q and cu_seq_lens_k, call register(packed=True) before the model is traced, or "
    "compile the blocks of the model instead of the model."
)


def register(
    *, packed: bool = False, max_documents: int | None = None, context_parallel: Any = None
) -> None:
    """Makes ``attn_implementation="flashattn-triton"`` known to transformers; repeatable.

    So is the alias ``"triton-attention"``. Some models ask whether the name of their implementation
    has "flash" in it: they then pass the starts of packed images instead of a mask, or refuse what
    flash-attn cannot compute, such as Falcon with ALiBi. The alias answers no.

    Args:
        packed: models that are compiled or exported whole take rows of several sequences, which
            ``position_ids`` number. No value of a tensor tells such a model from others while it is
            traced, and packed batches cost more, so that it must be asked for.
        max_documents: at least the number of sequences in all rows of a batch, if ``packed``; see
            :func:`~flashattn_triton.flash_attention`.
        context_parallel: the ranks that share each sequence, a process group or a mesh of one
            dimension: models then take ``input_ids``, ``labels`` and ``position_ids`` of this
            rank's tokens (:mod:`~flashattn_triton.context_parallel`), and for packed sequences
            ``cu_seq_lens_q`` and ``cu_seq_lens_k``, the starts among all ranks' tokens. There is
            no padding and no cache.

    Covered: causal and bidirectional self-attention, cross-attention, grouped-query heads, padding
    on either side, packed sequences, sliding windows on one side or both, chunks, soft-caps,
    attention sinks, position biases (T5) except with packed sequences, decoding with dynamic and
    static caches. Any other mask is computed as a boolean mask of all queries and keys, and 4-D
    masks of a user's own are taken as they are. Everything else raises a ``ValueError`` in the
    forward pass: dropout, paged caches and requests for attention weights.

    transformers takes every name with "flash" in it for a kernel that it must load before use, and
    replaces it in models that list the kernels they accept, as gpt-oss does. There is nothing to
    load for this one, so the function that recognises such names is wrapped to leave this one out.
    Models that compute attention themselves are refused when they are built, and dropout in
    attention is warned of there (:mod:`~flashattn_triton.integrations.model_checks`).

    Raises:
        ImportError: if transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils
    except ImportError as error:
        raise ImportError(
            "registering with transformers needs the transformers package; "
            "install it with: pip install 'flashattn-triton[transformers]'"
        ) from error
    forward = functools.partial(attention_forward, context_parallel=context_parallel)
    mask = functools.partial(
        attention_mask,
        packed=packed,
        max_documents=max_documents,
        context_parallel=context_parallel is not None,
    )
    for name in (NAME, ALIAS):
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, mask)
    model_checks.install(modeling_utils.PreTrainedModel, (NAME, ALIAS))
    recognise = modeling_utils.is_flash_attention_requested
    if not hasattr(recognise, "leaves_out"):
        modeling_utils.is_flash_attention_requested = _leaving_out(NAME, recognise)


def _leaving_out(name: str, recognise: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(recognise)
    def recognise_others(
        config: Any = None, requested_attention_implementation: str | None = None, **keywords: Any
    ) -> bool:
        if requested_attention_implementation == name:
            return False
        return recognise(config, requested_attention_implementation, **keywords)

    recognise_others.leaves_out = name  # type: ignore[attr-defined]
    return recognise_others


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskRule | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    context_parallel: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as transformers calls it.

    Args:
        module: the layer; its ``is_causal`` decides where there is no mask and no argument.
        query: (B, H, N_q, D).
        key: (B, G, N_k, D).
        value: (B, G, N_k, E).
        attention_mask: the model's rule; or a tensor broadcastable to (B, H, N_q, N_k), bool, True
            where a key is visible, or of numbers that are added to the scores. None: the layer
            says by ``is_causal`` and ``sliding_window`` what it computes.
        dropout: must be 0.
        scaling: factor on the scores; None means 1/sqrt(D).
        sliding_window: without a mask, a query sees this many keys up to and including its own,
            and as many on the other side if not causal.
        softcap: bound on the scores.
        is_causal: overrides the module's.
        cu_seq_lens_q: (sequences + 1,), where each sequence packed in the only row starts.
        cu_seq_lens_k: the same for the keys.
        s_aux: (H,) attention sinks.
        position_bias: added to the scores, broadcastable to (B, H, N_q, N_k), with its gradient.
            With a padding mask as well, a bias for the whole batch is in memory.
        context_parallel: as given to :func:`register`.
        kwargs: what else models pass; a feature that is not supported is refused.

    Returns:
        (B, N_q, H, E), and None for the attention weights, which never exist. Queries that are
        padding may be zero, or attend as others do.

    Raises:
        ValueError: if an argument asks for something that is not computed here.
    """
    if dropout:
        raise ValueError(
            f"dropout must be 0 for {NAME}, but got {dropout}. Set {_dropout_settings(module)} in "
            f"the model's configuration, call model.eval(), or choose another attn_implementation."
        )
    for name, feature in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} must be None, because {NAME} does not support {feature}, but got one. "
                f"Choose another attn_implementation."
            )
    if kwargs.get("output_attentions"):
        raise ValueError(
            f"output_attentions must be False, because {NAME} never has the attention weights, but "
            f"got True. Leave it out, or use attn_implementation='eager'."
        )
    rule = attention_mask
    if rule is None:
        rule = _rule_of_layer(module, is_causal, sliding_window)
    elif isinstance(rule, Tensor):
        if rule.dim() != 4 or not (rule.dtype == torch.bool or rule.is_floating_point()):
            raise ValueError(
                f"attention_mask must be (batch, heads, queries, keys), bool or added to the "
                f"scores, where it is no rule, but got {rule.dtype} of shape {tuple(rule.shape)}. "
                f"Choose another attn_implementation, or pass mask[:, None, None, :].bool()."
            )
        if rule.is_floating_point():
            position_bias = rule if position_bias is None else position_bias + rule
        rule = MaskRule(mask=rule if rule.dtype == torch.bool else None)
    lengths = (query.shape[2], key.shape[2])
    if rule.lengths not in (None, lengths):
        raise ValueError(
            f"attention_mask must be for the layer's {lengths} queries and keys, but got one for "
            f"{rule.lengths}. Choose another attn_implementation."
        )
    left, right = rule.band
    causal = "bottom-right" if right == 0 else False
    if not causal and rule.band != (None, None) and lengths[0] != lengths[1]:
        causal = "bottom-right-window"
    options: dict[str, Any] = {
        "causal": causal,
        "scale": scaling,
        "window": None if left is None and right in (None, 0) else rule.band,
        "softcap": softcap,
        "sinks": s_aux,
    }
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        missing = "cu_seq_lens_q" if cu_seq_lens_q is None else "cu_seq_lens_k"
        raise ValueError(
            f"{missing} must be a tensor where the other one is, but got None. Pass where the "
            f"sequences of queries and of keys start, which may be one tensor."
        )
    if context_parallel is not None:
        for name, x in (("attention_mask", rule.mask), ("position_bias", position_bias)):
            if x is not None:
                raise ValueError(
                    f"{name} must be None with {NAME} over ranks, but got a tensor. Register it "
                    f"without context_parallel."
                )
        starts = cu_seq_lens_q
        return _attend_over_ranks(query, key, value, context_parallel, starts, options), None
    packing = rule.packing
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        longest = (kwargs.get("max_length_q"), kwargs.get("max_length_k"))
        packing = _packing_of_row(rule, len(query), (cu_seq_lens_q, cu_seq_lens_k), longest)
    elif rule.several is not None:
        torch._assert_async(~rule.several.to(query.device), PACKED_WHILE_TRACED)
    if packing is not None and position_bias is None:
        return _attend_packed(query, key, value, packing, options), None
    if packing is not None and rule.mask is None:
        raise ValueError(
            f"position_bias must be None for packed sequences with {NAME}, but got one. Pad the "
            f"sequences instead, or choose another attn_implementation."
        )
    # A bias needs the pairs of positions that packing would lose.
    mask = None if rule.mask is None else rule.mask.to(query.device)
    out = flash_attention(
        query, key, value, layout="bhsd", bias=position_bias, mask=mask, **options
    )
    assert isinstance(out, Tensor)  # no logsumexp was asked for
    return out.transpose(1, 2).contiguous(), None


def _rule_of_layer(
    module: nn.Module, is_causal: bool | None, sliding_window: int | None
) -> MaskRule:
    """The rule of a layer whose model makes no mask."""
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:
        raise ValueError(
            f"{type(module).__name__} must say by is_causal whether it is causal for {NAME}, but "
            "has no such attribute. Choose another attn_implementation."
        )
    width = None if sliding_window is None else sliding_window - 1
    return MaskRule(band=(width, 0 if causal else width))


def _packing_of_row(
    rule: MaskRule,
    batch_size: int,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int | None, int | None],
) -> Packing:
    """Sequences in the only row of a batch, by their starts."""
    if batch_size != 1:
        raise ValueError(
            f"cu_seq_lens_q must come with one row of packed sequences, but got a batch of "
            f"{batch_size}. Flatten the batch into one row."
        )
    if rule.mask is not None or (rule.packing is not None and rule.packing.tokens is not None):
        raise ValueError(
            "attention_mask must be None, and a model's masks bands, beside cu_seq_lens_q, but "
            "got padding or another rule. Leave one of them out."
        )
    # Without them the kernels launch for the longest sequence that is possible.
    longest_q, longest_k = (None if limit is None else int(limit) for limit in longest)
    starts_q, starts_k = (x.int() for x in starts)
    return Packing(starts=(starts_q, starts_k), longest=(longest_q, longest_k))


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, options: dict[str, Any]
) -> Tensor:
    """Attention among the tokens of packed sequences; zeros for the others."""
    batch, _, n_queries, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    starts_q, starts_k = (x.to(q.device) for x in packing.starts)
    if packing.tokens is not None:
        tokens_q, tokens_k = (x.to(q.device) for x in packing.tokens)
        q, k, v = q.index_select(0, tokens_q), *(x.index_select(0, tokens_k) for x in (k, v))
    out = flash_attention_varlen(q, k, v, starts_q, starts_k, *packing.longest, **options)
    assert isinstance(out, Tensor)
    if packing.tokens is not None:
        out = out.new_zeros(batch * n_queries, *out.shape[1:]).index_copy(0, tokens_q, out)
    return out.view(batch, n_queries, *out.shape[1:])


def _dropout_settings(module: nn.Module) -> str:
    """The settings of the layer's model that cause dropout in attention, each set to 0."""
    found = model_checks.dropout_settings(getattr(module, "config", module))
    return " and ".join(f"{name}=0" for name in found) or "attention's dropout to 0"


def _attend_over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: Any,
    starts: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Attention to the tokens of all ranks that share the sequences."""
    from flashattn_triton.context_parallel import context_parallel_attention

    if starts is None:
        out = context_parallel_attention(query, key, value, group, layout="bhsd", **options)
        return out.transpose(1, 2).contiguous()  # type: ignore[no-any-return]
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out = context_parallel_attention(q, k, v, group, cu_seqlens=starts, **options)
    return out.unsqueeze(0)  # type: ignore[no-any-return]
