"""``attn_implementation="flashattn-triton"`` for Hugging Face transformers.

    from flashattn_triton.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashattn-triton")

transformers asks an attention implementation for two functions. One prepares the mask, once for
each forward pass: :func:`attention_mask`. The other computes attention in every layer:
:func:`attention_forward`. Both are registered, because without the first transformers passes no
mask at all, and padding would be attended to.

Between the two the mask is (B, N_k) integers: 0 for padding, else the number of the sequence that
the token belongs to. Several sequences may be packed in one row.

Dimensions: B batch, H query heads, G key/value heads, N_q queries, N_k keys (cached ones
included), D head_dim, E head_dim of value, T tokens that are not padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashattn_triton import flash_attention, flash_attention_varlen
from flashattn_triton.integrations import model_checks
from flashattn_triton.integrations.flash_attn import pad_input, unpad_input

NAME = "flashattn-triton"
ALIAS = "triton-attention"

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Arguments that models pass for features that change the result and that are not computed here.
UNSUPPORTED = {
    "cache": "a paged cache",
    "head_mask": "a head mask",
    "sinks": "attention sinks of each token",
    "indices": "a selection of keys for each query (sparse attention)",
}

# Errors that traced code raises too, complete before values are known.
PACKED_WHILE_TRACED = (
    "position_ids must number one sequence in each row where the model is traced (torch.compile, "
    f"torch.export) with {NAME}, but got rows of several. Pass where the sequences start as "
    "cu_seq_lens_q and cu_seq_lens_k, call register(packed=True) before the model is traced, or "
    "compile the blocks of the model instead of the model."
)
NO_BAND = (
    f"The mask must be causal, a sliding window or full within sequences for {NAME}, but got a "
    "rule that is none of these (such as blocks or a prefix that see ahead). Choose another "
    "attn_implementation."
)
STATIC_CACHE = (
    f"The last query must be at the position of the last key for {NAME}, but got keys beyond it. "
    "Use a dynamic cache instead of a static one."
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
    on either side, packed sequences, sliding windows on one side or both, soft-caps, attention
    sinks, position biases (T5) except with packed sequences, decoding with a dynamic cache.
    Everything else raises a ``ValueError`` in the forward pass: dropout, static and paged caches,
    requests for attention weights, and masks that are not bands within sequences (4-D masks, prefix
    masks).

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
    forward = functools.partial(
        attention_forward, max_documents=max_documents, context_parallel=context_parallel
    )
    mask = functools.partial(
        attention_mask, packed=packed, context_parallel=context_parallel is not None
    )
    for name in (NAME, ALIAS):
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, mask)
    model_checks.install(modeling_utils.PreTrainedModel, (NAME, ALIAS))
    recognise = modeling_utils.is_flash_attention_requested
    if hasattr(recognise, "leaves_out"):
        return

    @functools.wraps(recognise)
    def recognise_others(
        config: Any = None, requested_attention_implementation: str | None = None, **keywords: Any
    ) -> bool:
        if requested_attention_implementation == NAME:
            return False
        found: bool = recognise(config, requested_attention_implementation, **keywords)
        return found

    recognise_others.leaves_out = NAME  # type: ignore[attr-defined]
    modeling_utils.is_flash_attention_requested = recognise_others


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
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    max_documents: int | None = None,
    context_parallel: Any = None,
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
        cu_seq_lens_q: (sequences + 1,), where each sequence packed in the only row starts.
        cu_seq_lens_k: the same for the keys.
        s_aux: (H,) attention sinks.
        position_bias: added to the scores, broadcastable to (B, H, N_q, N_k), with its gradient.
            With a padding mask as well, a bias for the whole batch is in memory.
        max_documents: as given to :func:`register`, as ``context_parallel``.
        kwargs: what else models pass; a feature that is not supported is refused.

    Returns:
        (B, N_q, H, E), zero for queries that are padding (where attention is causal or has a
        window, and no position bias), and None for the attention weights, which never exist.

    Raises:
        ValueError: if an argument asks for something that is not computed here.
    """
    if dropout:
        found = model_checks.dropout_settings(getattr(module, "config", module))
        settings = " and ".join(f"{name}=0" for name in found) or "attention's dropout to 0"
        raise ValueError(
            f"dropout must be 0 for {NAME}, but got {dropout}. Set {settings} in the model's "
            f"configuration, call model.eval(), or choose another attn_implementation."
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
    if attention_mask is not None and attention_mask.dim() == 0:  # of code that is being traced
        if cu_seq_lens_q is None:
            torch._assert_async(~attention_mask, PACKED_WHILE_TRACED)
        attention_mask = None
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:
        raise ValueError(
            f"{type(module).__name__} must say by is_causal whether it is causal for {NAME}, but "
            "has no such attribute. Choose another attn_implementation."
        )
    rule = getattr(attention_mask, "rule_is_causal", None)
    if rule is not None and rule != causal:
        raise ValueError(
            f"{type(module).__name__}.is_causal must say what its mask does for {NAME}, but got "
            f"{causal} with a mask that is {'' if rule else 'not '}causal. Choose another "
            f"attn_implementation."
        )
    options: dict[str, Any] = {
        # With a cache the queries are the last of the keys' positions; without one, N_q = N_k.
        "causal": "bottom-right" if causal else False,
        "scale": scaling,
        "window": None if sliding_window is None else (sliding_window - 1, sliding_window - 1),
        "softcap": softcap,
        "sinks": s_aux,
    }
    tensors = (query, key, value)
    if context_parallel is not None:
        for name, x in (("attention_mask", attention_mask), ("position_bias", position_bias)):
            if x is not None:
                raise ValueError(
                    f"{name} must be None with {NAME} over ranks, but got a tensor. Register it "
                    f"without context_parallel."
                )
        return _attend_over_ranks(tensors, context_parallel, cu_seq_lens_q, options), None
    traced = torch.compiler.is_compiling() and attention_mask is not None
    documents = attention_mask if traced and attention_mask.dtype == torch.int64 else None  # type: ignore[union-attr]
    if position_bias is not None and (
        cu_seq_lens_q is not None
        or documents is not None
        or (attention_mask is not None and _has_several_sequences(attention_mask))
    ):
        raise ValueError(
            f"position_bias must be None for packed sequences with {NAME}, but got one. Pad the "
            f"sequences instead, or choose another attn_implementation."
        )
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        missing = "cu_seq_lens_q" if cu_seq_lens_q is None else "cu_seq_lens_k"
        raise ValueError(
            f"{missing} must be a tensor where the other one is, but got None. Pass where the "
            f"sequences of queries and of keys start, which may be one tensor."
        )
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if query.shape[0] != 1:
            raise ValueError(
                f"cu_seq_lens_q must come with one row of packed sequences, but got a batch of "
                f"{query.shape[0]}. Flatten the batch into one row."
            )
        q, k, v = (x[0].transpose(0, 1) for x in tensors)
        starts = (cu_seq_lens_q, cu_seq_lens_k)
        longest = (kwargs.get("max_length_q"), kwargs.get("max_length_k"))
        out = flash_attention_varlen(q, k, v, *starts, *longest, **options)
        return out[None], None
    if attention_mask is None or documents is not None:
        if documents is not None:
            options |= {"document_ids": documents, "max_documents": max_documents}
        return _attend_in_place(tensors, bias=position_bias, **options), None
    if attention_mask.dim() != 2 or attention_mask.shape != (key.shape[0], key.shape[2]):
        raise ValueError(
            f"attention_mask must be a padding mask (batch, keys) = "
            f"{(key.shape[0], key.shape[2])}, but got shape {tuple(attention_mask.shape)}. Choose "
            f"another attn_implementation for custom masks."
        )
    # A bias and a window with holes need positions that packing would lose; packing needs the host.
    masked = position_bias is not None or attention_mask.dtype == torch.bool
    if masked or (options["window"] is not None and not _in_one_piece(attention_mask)):
        return _attend_masked(tensors, attention_mask, position_bias, options), None
    return _attend_unpadded(tensors, attention_mask, options), None


def _attend_over_ranks(
    tensors: Sequence[Tensor], group: Any, starts: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Attention to the tokens of all ranks that share the sequences."""
    from flashattn_triton.context_parallel import context_parallel_attention

    if starts is None:
        q, k, v = tensors
        out = context_parallel_attention(q, k, v, group, layout="bhsd", **options)
        return out.transpose(1, 2).contiguous()  # type: ignore[no-any-return]
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in tensors)
    out = context_parallel_attention(q, k, v, group, cu_seqlens=starts, **options)
    return out.unsqueeze(0)  # type: ignore[no-any-return]


def _attend_in_place(tensors: Sequence[Tensor], **options: Any) -> Tensor:
    """Attention (B, N_q, H, E) that leaves every token in its place."""
    out = flash_attention(*tensors, layout="bhsd", **options)
    assert isinstance(out, Tensor)  # no logsumexp was asked for
    return out.transpose(1, 2).contiguous()


def _attend_masked(
    tensors: Sequence[Tensor], mask: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Attention with a mask of keys."""
    if bias is None and _has_several_sequences(mask):
        raise ValueError(
            "attention_mask must leave each sequence in one piece where a sliding window "
            "counts positions of packed sequences, but got one with holes. Choose another "
            "attn_implementation."
        )
    seen = mask != 0
    out = _attend_in_place(tensors, bias=bias, mask=seen[:, None, None, :], **options)
    if bias is None and (options["causal"] or options["window"]):
        return out.masked_fill(~seen[:, -out.shape[1] :, None, None], 0.0)
    return out


def _attend_unpadded(tensors: Sequence[Tensor], mask: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention among the tokens that are not padding, packed one sequence after another."""
    query, key, value = (x.transpose(1, 2) for x in tensors)
    batch, n_queries = query.shape[:2]
    # Positions matter only relative to a diagonal. Then queries that are padding must go, so that
    # the remaining ones keep their distance to the remaining keys; else they may stay.
    if options["causal"] or options["window"]:
        query_mask = mask[:, -n_queries:]
    else:
        query_mask = mask.new_ones(batch, n_queries)
    # One sequence in each row, of which the queries are a part, or several.
    q, query_tokens, starts_q, longest_q, _ = unpad_input(query, query_mask > 0)
    k, key_tokens, starts_k, longest_k, _ = unpad_input(key, mask > 0)
    v = value.flatten(0, 1).index_select(0, key_tokens)
    if n_queries == mask.shape[1] and _has_several_sequences(mask):
        rows = torch.arange(batch, device=mask.device)[:, None]
        numbers = (rows * (mask.max() + 1) + mask).flatten()[key_tokens]
        lengths = torch.unique_consecutive(numbers, return_counts=True)[1]
        starts_q = starts_k = F.pad(lengths.cumsum(0), (1, 0)).int()
        longest_q = longest_k = int(lengths.max())
    packed = flash_attention_varlen(q, k, v, starts_q, starts_k, longest_q, longest_k, **options)
    assert isinstance(packed, Tensor)
    return pad_input(packed, query_tokens, batch, n_queries)


def _has_several_sequences(mask: Tensor) -> bool:
    return mask.dtype != torch.bool and int(mask.max()) > 1


def _in_one_piece(mask: Tensor) -> bool:
    """Whether no sequence of any row is interrupted by padding."""
    begins = (mask > 0) & (F.pad(mask[:, :-1], (1, 0)) == 0)
    return bool((begins.sum(dim=1) <= 1).all())


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    packed: bool = False,
    context_parallel: bool = False,
    **_: Any,
) -> Tensor | None:
    """What :func:`attention_forward` must know of the mask, after a check that it is all there is.

    ``attention_forward`` computes a band of the score matrix from ``is_causal`` and
    ``sliding_window``, within each sequence. The rule that transformers would build the mask from
    is therefore evaluated for every query, at its diagonal and at distances of 1, 2, 4, ... keys
    from it, and must agree with such bands: causal or not, and ``local_size`` wide if that is
    given. While ``torch.compile`` or ``torch.export`` traces, values cannot be read: then the
    compiled code compares on the device (``torch._assert_async``), padding stays in its place under
    a mask of keys, and several sequences in one row are an error of :func:`attention_forward`
    unless ``cu_seq_lens_q`` says where they start.

    Args:
        batch_size: B.
        q_length: N_q, the queries at positions ``q_offset`` and up.
        kv_length: N_k, the keys at positions ``kv_offset`` and up.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        mask_function: (batch, head, query position, key position) to visible; None means causal.
        attention_mask: (B, positions) bool, False for padding.
        local_size: width of a sliding window.
        use_vmap: whether the rule takes single positions only, as those of users may.
        device: where the model computes.
        packed: as given to :func:`register`.
        context_parallel: whether sequences are spread over ranks. Their rule is that of the layer
            then, because positions here are those of a rank's rows.

    Returns:
        (B, N_k) integers, 0 for padding and the number of a token's sequence elsewhere; None if
        each row is one sequence without padding. While a compiler traces, () bool instead: True
        if a row has several sequences; or if ``packed``, the numbers as int64; and (B, N_k) bool
        with padding, False for it.

    Raises:
        ValueError: if the mask is not a band, or keys lie beyond the last query (a static cache).
        RuntimeError: the same, where compiled code finds it.
    """
    if context_parallel:
        if attention_mask is not None or kv_length != q_length:
            raise ValueError(
                f"attention_mask must be None, and caches empty, with {NAME} over ranks, but got "
                f"{'a mask' if attention_mask is not None else 'cached keys'}. Pack sequences "
                f"instead of padding them, and decode without context_parallel."
            )
        return None
    if use_vmap and mask_function is not None:
        mask_function = _of_single_positions(mask_function)
    sequences, is_causal = None, None
    traced = torch.compiler.is_compiling()
    if mask_function is not None:
        queries = torch.arange(q_length, device=device) + (q_offset if traced else int(q_offset))
        keys = (kv_offset, kv_offset + kv_length - 1)
        documents = _recognise(mask_function, batch_size, queries, keys, local_size)
        several = (documents > 1).any()
        if traced:
            if attention_mask is None and packed and q_length == kv_length:
                return documents
            if attention_mask is None:
                return several
            torch._assert_async(~several, PACKED_WHILE_TRACED)
        else:
            sequences = documents.int() if several else None
            if q_length > 1:  # a single query does not tell
                batch = torch.zeros(1, dtype=torch.int64, device=device)
                first, second = queries[:1], queries[1:2]
                is_causal = not bool(mask_function(batch, batch, first, second).all())
    if attention_mask is None:
        return sequences
    padding = attention_mask[:, kv_offset : kv_offset + kv_length]
    if padding.shape[1] < kv_length:
        raise ValueError(
            f"attention_mask must cover all {kv_length} keys, but got shape "
            f"{tuple(attention_mask.shape)}. Include the cached positions."
        )
    if traced:
        return padding.bool()
    if sequences is None and bool(padding.all()):
        return None
    found = padding.int() if sequences is None else sequences * padding
    found.rule_is_causal = is_causal  # type: ignore[attr-defined] # for layers that say otherwise
    return found


def _of_single_positions(rule: MaskFunction) -> MaskFunction:
    """A rule of single positions as one of tensors that broadcast."""

    def of_tensors(*positions: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(*(x.shape for x in positions))
        flat = (x.expand(shape).flatten() for x in positions)
        visible: Tensor = torch.vmap(rule)(*flat)
        return visible.view(shape)

    return of_tensors


def _recognise(
    mask_function: MaskFunction,
    batch_size: int,
    queries: Tensor,
    keys: tuple[int, int],
    local_size: int | None,
) -> Tensor:
    """The sequence of each key, (B, N_k) int64, from 1 on in each row, within which it is a band.

    ``queries`` are positions (N_q,), ``keys`` the first and the last one. The rule is compared with
    the bands that are computed, at distances of 1, 2, 4, ... in both directions. Nothing depends on
    a value of a tensor in compiled code, which raises the errors on the device; lengths may be
    symbols there, so that distances go up to 2**20 in any case.
    """
    traced = torch.compiler.is_compiling()
    powers = 21 if traced else (keys[1] - keys[0] + 1).bit_length()
    first, last = keys
    far = [2**n for n in range(powers)]
    if local_size is not None:
        far += [local_size - 1, local_size, local_size + 1]
    listed = sorted({0, 1, *far, *(-d for d in (1, *far))})
    distances = torch.tensor(listed, device=queries.device)
    positions = queries[:, None] + distances
    exists = (positions >= first) & (positions <= last)
    positions = positions.clamp(first, last)
    batch = torch.arange(batch_size, device=queries.device)[:, None, None, None]
    head = torch.zeros_like(batch)
    visible = mask_function(batch, head, queries[:, None], positions)
    visible = visible.expand(batch_size, 1, *positions.shape)[:, 0].to(queries.device) & exists

    causal = ~(visible & (distances > 0)).any()
    band = ~causal | (distances <= 0)
    if local_size is not None:
        # On both sides some models see local_size keys; their layers pass a window of one more.
        widest = (visible & (distances.abs() == local_size)).any()
        width = local_size - 1 + (widest & ~causal).int()
        band = band & (distances.abs() <= width)
    # A sequence starts where a query does not see the key before its own.
    n_keys = last - first + 1
    sequences = torch.ones(batch_size, n_keys, dtype=torch.int64, device=queries.device)
    if queries.shape[0] == n_keys and (local_size is None or local_size > 1):
        starts = causal & ~visible[..., listed.index(-1)]
        sequences = torch.where(causal, starts.cumsum(dim=1), sequences)
    own = sequences[:, (queries - first).clamp(0, last - first)]
    same = sequences[:, positions - first] == own[..., None]
    agrees = (visible == ((band & exists) & same)).all()
    at_an_end = queries[-1] == last
    if local_size is None:
        at_an_end = at_an_end | ~causal
    for fact, message in ((agrees, NO_BAND), (at_an_end, STATIC_CACHE)):
        if traced:
            torch._assert_async(fact, message)
        elif not fact:
            raise ValueError(message)
    return sequences
