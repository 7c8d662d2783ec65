"""The public functions: attention on dense and on packed batches, and the assignment's class."""

from __future__ import annotations

import math
from typing import Any, Literal, Never, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashattn_triton import eager, ops
from flashattn_triton.calls import found, store
from flashattn_triton.compiled_backward import compiled_flash_backward
from flashattn_triton.configs import Tiling, check_tiling_type
from flashattn_triton.dispatch import Implementation, check_implementation
from flashattn_triton.documents import attend_to_documents, refuse_with_documents
from flashattn_triton.launch import Packing, as_batch, as_tokens
from flashattn_triton.mask_and_bias import (
    MaskAndBias,
    check_prefix_options,
    resolve_mask_and_bias,
)
from flashattn_triton.mistakes import (
    check_tensors,
    refuse_keywords,
    warn_of_alignment,
    warn_of_layout,
)
from flashattn_triton.options import (
    AttentionOptions,
    CausalArgument,
    Layout,
    Window,
    check_dense,
    check_layout,
    check_starts,
    check_varlen,
    in_one_batch,
    normalise_flag,
    resolve_options,
    to_heads_first,
)


class OptionKeywords(TypedDict, total=False):
    """Keywords that are no tensors, layout or ``return_lse``."""

    causal: CausalArgument
    scale: float | None
    window: Window | None
    softcap: float | None
    deterministic: bool
    implementation: Implementation
    tiling: Tiling | None


class PackedKeywords(OptionKeywords, total=False):
    """Keywords of :func:`flash_attention_varlen` beside ``return_lse``, for its overloads."""

    sinks: Tensor | None
    alibi_slopes: Tensor | None
    prefix_lengths: Tensor | None


class Keywords(PackedKeywords, total=False):
    """Keywords of :func:`flash_attention` beside ``return_lse``, for its overloads."""

    layout: Layout | None
    bias: Tensor | None
    document_ids: Tensor | None


class _Tensors(TypedDict):
    """Those of :class:`MaskAndBias`, as callers give them."""

    alibi_slopes: Tensor | None
    bias: Tensor | None
    prefix_lengths: Tensor | None
    sinks: Tensor | None


@overload
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[Keywords],
) -> Tensor: ...


@overload
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: bool,
    **keywords: Unpack[Keywords],
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: CausalArgument = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    document_ids: Tensor | None = None,
    layout: Layout | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    implementation: Implementation = "auto",
    tiling: Tiling | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · Q Kᵀ) V, exactly, without the N_q x N_k matrix (arXiv:2307.08691).

    Differentiable once in query, key, value, sinks and bias, through the output and the logsumexp.
    Scores, sums and all gradients are accumulated in fp32. A query that sees no key has output 0,
    logsumexp -inf and no gradient.

    Args:
        query: (B, H, N_q, D) for layout "bhsd", (B, N_q, H, D) for "bshd"; fp16, bf16 or fp32; D
            and E from 1 to 256; any strides (copied if the last is not 1). The batch may be any
            number of dimensions, also none.
        key: (B, G, N_k, D), G dividing H: query head h reads key head h // (H / G).
        value: (B, G, N_k, E).
        causal: False; True or "top-left": query i sees the keys j <= i; "bottom-right": query i
            sees j <= i + N_k - N_q, as for decoding with a cache. True warns where N_q and N_k
            differ, because flash-attn aligns the mask to the bottom right. "bottom-right-window"
            is not causal: only the window's diagonal is that of "bottom-right".
        scale: factor on the scores, 1/sqrt(D) by default; may be negative.
        window: (left, right): a query sees that many keys before and after its diagonal, which is
            the one of ``causal`` (top-left if that is False). None means no limit. A causal mask
            hides the keys after the diagonal, whatever ``right`` says.
        softcap: c > 0 replaces a scaled score s by c·tanh(s/c).
        sinks: (H,), a logit for each query head that joins the softmax's denominator and has no
            value; differentiable. The logsumexp includes it.
        alibi_slopes: (H,) or (B, H) fp32 constants: slope · |distance| is subtracted from a score,
            where the distance is that of the key from the query's diagonal (arXiv:2108.12409).
        bias: broadcastable to (B, H, N_q, N_k), fp16, bf16 or fp32: is added to the scores, after
            the soft-cap; -inf hides a key. Differentiable; its gradient is summed in a fixed order
            over the dimensions that share it.
        prefix_lengths: (B,) integers, with a causal mask and no window: every query also sees the
            first keys of its sequence, that many.
        document_ids: (B, N) integers, for self-attention within documents that share rows: a token
            sees those with its number, which must be its neighbours. The host waits for the device.
        layout: "bhsd" or "bshd", of inputs and output. None means "bhsd", with a warning if inputs
            look like "bshd".
        return_lse: also return the logsumexp.
        deterministic: gradients are bit-identical from run to run.
        implementation: "auto" (for CUDA tensors "hopper" where that tier can run, else "triton";
            "tiled" PyTorch for all others), one of these, or "reference" (the definition: all
            scores in memory, any number of derivatives).
        tiling: kernel shapes to use instead of the shipped table's.

    Under autocast the inputs are cast to its dtype. fp32 products use TF32 only if
    ``torch.backends.cuda.matmul.fp32_precision`` is "tf32".

    Returns:
        Output in the inputs' layout, leading dimensions and dtype, its last dimension E; with
        ``return_lse`` also the natural-log logsumexp of the scores, (B, H, N_q) fp32.

    Raises:
        ValueError: an argument is not what is described above.
        TypeError: an input is not a tensor, or an argument has another library's name.
    """
    if unknown:
        refuse_keywords("flash_attention", [*Keywords.__annotations__, "return_lse"], unknown)
    normalise_flag("return_lse", return_lse)
    check_tensors(query=query, key=key, value=value)
    tensors: _Tensors = {
        "alibi_slopes": alibi_slopes,
        "bias": bias,
        "prefix_lengths": prefix_lengths,
        "sinks": sinks,
    }
    if document_ids is not None or query.dim() != 4:
        keywords: OptionKeywords = {
            "causal": causal,
            "scale": scale,
            "window": window,
            "softcap": softcap,
            "deterministic": deterministic,
            "implementation": implementation,
            "tiling": tiling,
        }
        check_layout(layout)
        if document_ids is not None:
            refuse_with_documents(bias=bias, prefix_lengths=prefix_lengths)
            out, lse = attend_to_documents(
                query, key, value, document_ids, layout or "bhsd", alibi_slopes, sinks, keywords
            )
        else:
            batch = in_one_batch(query, key, value)
            heads_first = [to_heads_first(x, layout) for x in batch]
            resolved = _resolve(heads_first[0], heads_first[1], query.shape[:-3], **tensors)
            result = flash_attention(
                *batch,
                layout=layout,
                return_lse=True,
                alibi_slopes=resolved.alibi_slopes,
                bias=resolved.bias,
                prefix_lengths=resolved.prefix_lengths,
                sinks=resolved.sinks,
                **keywords,
            )
            out, lse = (x.reshape(*query.shape[:-3], *x.shape[1:]) for x in result)
        return (out, lse) if return_lse else out
    if not query.is_meta and torch.is_autocast_enabled(query.device.type):
        query, key, value = _autocast(query, key, value)
    cache_key = None
    if alibi_slopes is None and bias is None and prefix_lengths is None and sinks is None:
        cache_key = eager.cache_key_of(
            query, key, value,
            causal, scale, window, softcap, layout, deterministic, implementation, tiling,
        )  # fmt: skip
    call: eager.CachedCall | None = None if cache_key is None else found(cache_key)
    if call is None:
        check_layout(layout)
        check_implementation(implementation)
        check_tiling_type(tiling)
    if layout == "bshd" and key.dim() == value.dim() == 4:
        query, key, value = (to_heads_first(x, layout) for x in (query, key, value))
    if call is None:
        check_dense(query, key, value)
        options = resolve_options(
            head_dim=query.shape[-1],
            causal=causal,
            scale=scale,
            window=window,
            softcap=softcap,
            deterministic=deterministic,
        )
        mask_and_bias = _resolve(query, key, query.shape[:1], **tensors)
        if prefix_lengths is not None:
            check_prefix_options(options)
        warn_of_alignment(causal, query.shape[2], key.shape[2], stacklevel=2)
        warn_of_layout(layout, query, key, stacklevel=2)
        if implementation == "reference":
            from flashattn_triton.reference import attention_reference

            with torch.autocast(query.device.type, enabled=False):
                out, lse = attention_reference(query, key, value, options, mask_and_bias)
            out = to_heads_first(out.to(query.dtype), layout)
            return (out, lse) if return_lse else out
        if cache_key is not None:
            call = eager.CachedCall(query, key, value, options, implementation, tiling)
            store(cache_key, call)
    if call is not None:
        out, maybe_lse = call(query, key, value, return_lse)
    else:
        arguments = ops.operator_arguments(
            options, implementation=implementation, tiling=tiling, mask_and_bias=mask_and_bias
        )
        out, maybe_lse = eager.attend(query, key, value, *arguments)
    if layout == "bshd":
        out = to_heads_first(out, layout)
    return out if maybe_lse is None or not return_lse else (out, maybe_lse)


@overload
def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[PackedKeywords],
) -> Tensor: ...


@overload
def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[PackedKeywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: bool,
    **keywords: Unpack[PackedKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...


def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: CausalArgument = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    implementation: Implementation = "auto",
    tiling: Tiling | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attention` of each sequence of a packed batch, without padding.

    The host never waits for the device, so on a GPU the values in ``cu_seqlens`` are not checked:
    they must rise from 0 to the number of tokens, in steps of at most ``max_seqlen``, if that is
    given. Sequences may be empty, on either side.

    Args:
        query: (T_q, H, D), the sequences' tokens one after another.
        key: (T_k, G, D).
        value: (T_k, G, E).
        cu_seqlens_q: (sequences + 1,) int32, where each sequence starts in ``query``, and T_q.
        cu_seqlens_k: the same for ``key`` and ``value``.
        max_seqlen_q: at least the length of the longest query sequence. None stands for T_q, with
            the same results and still without waiting for the device. The portable kernels then
            launch as many programs for every sequence as one of T_q tokens would need, most of
            which return at once, so pass the length if there are many sequences. The Hopper tier's
            launches depend on it only in the shape of their tiles.
        max_seqlen_k: the same for keys; None stands for T_k.
        alibi_slopes: (H,) or (sequences, H) fp32 constants.
        prefix_lengths: (sequences,) integers.

    The other arguments are those of :func:`flash_attention`. There is no bias, whose elements are
    pairs of a query and a key: attend to such sequences one by one, or padded.

    Returns:
        Output (T_q, H, E); with ``return_lse`` also the logsumexp, (H, T_q) fp32.

    Raises:
        ValueError: an argument is not what is described above.
        TypeError: an input is not a tensor, or an argument has another library's name.
    """
    if unknown.get("bias") is not None:
        raise ValueError(
            "bias must be None for packed sequences, but got one. Attend to them one by one, or "
            "padded, with flash_attention."
        )
    if unknown:
        allowed = [*PackedKeywords.__annotations__, "return_lse"]
        refuse_keywords("flash_attention_varlen", allowed, unknown)
    normalise_flag("return_lse", return_lse)
    check_tensors(
        query=query, key=key, value=value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k
    )
    if not query.is_meta and torch.is_autocast_enabled(query.device.type):
        query, key, value = _autocast(query, key, value)
    cache_key = None
    if alibi_slopes is None and prefix_lengths is None and sinks is None:
        cache_key = eager.cache_key_of(
            query, key, value,
            max_seqlen_q, max_seqlen_k, causal, scale, window, softcap, deterministic,
            implementation, tiling,
            cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
        )  # fmt: skip
    call: eager.CachedCall | None = None if cache_key is None else found(cache_key)
    if call is not None:
        check_starts(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        out, maybe_lse = call(query, key, value, return_lse, cu_seqlens_q, cu_seqlens_k)
        return out if maybe_lse is None or not return_lse else (out, maybe_lse)
    check_implementation(implementation)
    check_tiling_type(tiling)
    check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = resolve_options(
        head_dim=query.shape[-1],
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        deterministic=deterministic,
    )
    mask_and_bias = resolve_mask_and_bias(
        alibi_slopes=alibi_slopes,
        bias=None,
        prefix_lengths=prefix_lengths,
        sinks=sinks,
        leading=(cu_seqlens_q.shape[0] - 1,),
        heads=query.shape[1],
        lengths=(query.shape[0], key.shape[0]),
        device=query.device,
    )
    if prefix_lengths is not None:
        check_prefix_options(options)
    if max_seqlen_q is None or max_seqlen_k is None:
        lengths = (query.shape[0], key.shape[0])
        max_seqlen_q = lengths[0] if max_seqlen_q is None else max_seqlen_q
        max_seqlen_k = lengths[1] if max_seqlen_k is None else max_seqlen_k
    else:
        lengths = (max_seqlen_q, max_seqlen_k)
    warn_of_alignment(causal, *lengths, stacklevel=2)
    if implementation == "reference":
        from flashattn_triton.reference import attention_reference_varlen

        starts = (cu_seqlens_q, cu_seqlens_k)
        with torch.autocast(query.device.type, enabled=False):
            out, lse = attention_reference_varlen(
                query, key, value, *starts, options, mask_and_bias
            )
        out = out.to(query.dtype)
        return (out, lse) if return_lse else out
    packing = Packing(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    if cache_key is not None:
        call = eager.CachedCall(query, key, value, options, implementation, tiling, packing)
        store(cache_key, call)
        out, maybe_lse = call(query, key, value, return_lse, cu_seqlens_q, cu_seqlens_k)
        return out if maybe_lse is None or not return_lse else (out, maybe_lse)
    arguments = ops.operator_arguments(
        options,
        implementation=implementation,
        tiling=tiling,
        packing=packing,
        mask_and_bias=mask_and_bias,
    )
    views = (as_batch(x) for x in (query, key, value))
    out, lse = eager.attend(*views, *arguments)
    out, lse = as_tokens(out), lse.squeeze(0)
    return (out, lse) if return_lse else out


def _resolve(
    query: Tensor, key: Tensor, leading: torch.Size, **tensors: Unpack[_Tensors]
) -> MaskAndBias:
    """What is given of ``tensors``, for (B, H, N, D) tensors whose batch has dimensions leading."""
    return resolve_mask_and_bias(
        **tensors,
        leading=leading,
        heads=query.shape[1],
        lengths=(query.shape[2], key.shape[2]),
        device=query.device,
    )


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Floating tensors in autocast's dtype, which is for attention's two matrix products."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in tensors)


class FlashAttention2Triton(torch.autograd.Function):
    """``FlashAttention2Triton.apply(Q, K, V, is_causal=False)``: the Triton kernels as a Function.

    Q is (..., N_q, D), K (..., N_k, D), V (..., N_k, E), with the same leading dimensions (at least
    one); the output is (..., N_q, E). The scale is 1/sqrt(D); ``is_causal`` lets query i see the
    keys j <= i. Saves L, Q, K, V, O; L is the natural-log logsumexp, shaped ``Q.shape[:-1]``.

    CUDA tensors take the tier that ``flash_attention`` chooses, the portable one or Hopper's. CPU
    tensors run in Triton's interpreter if it is active, and are refused if not.
    :class:`FlashAttention2TritonCompiledBackward` is the same with the backward pass in PyTorch.

    Raises:
        ValueError: shapes, dtypes or devices don't fit, or Triton cannot run on the device.
    """

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False) -> Tensor:
        """O, with what the backward pass needs saved on ``ctx``."""
        check_tensors(Q=Q, K=K, V=V)
        for name, x in (("Q", Q), ("K", K), ("V", V)):
            if x.dim() < 3 or x.shape[:-2] != Q.shape[:-2]:
                raise ValueError(
                    f"{name} must be (..., sequence, head_dim) with Q's leading dimensions, at "
                    f"least one, but got {tuple(x.shape)} for Q {tuple(Q.shape)}. Reshape or "
                    f"expand it."
                )
        query, key, value = (_as_heads(x) for x in (Q, K, V))
        check_dense(query, key, value)
        ctx.arguments = ops.operator_arguments(
            _assignment_options(Q, is_causal),
            implementation="auto" if query.is_cuda else "triton",
        )
        out, lse = torch.ops.flashattn_triton.forward(query, key, value, *ctx.arguments)
        O: Tensor = out.view(*Q.shape[:-1], V.shape[-1])  # noqa: E741 - the paper's name
        ctx.save_for_backward(lse.view(Q.shape[:-1]), Q, K, V, O)
        ctx.is_causal = is_causal
        return O

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor | None, ...]:
        """dQ, dK, dV by the Triton kernels."""
        L, Q, K, V, O = ctx.saved_tensors  # noqa: E741 - the paper's name
        query, key, value, out, grad_out = (_as_heads(x) for x in (Q, K, V, O, dO))
        lse = L.view(query.shape[:-1])
        gradients = torch.ops.flashattn_triton.backward(
            query, key, value, out, lse, grad_out, None, *ctx.arguments
        )
        dQ, dK, dV = (g.view(x.shape) for g, x in zip(gradients, (Q, K, V), strict=True))
        return dQ, dK, dV, None


class FlashAttention2TritonCompiledBackward(FlashAttention2Triton):
    """:class:`FlashAttention2Triton` with Eq. 13-19 in compiled PyTorch as its backward pass.

    The step between autograd and the Triton kernels: N_q x N_k elements exist during backward.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor | None, ...]:
        """dQ, dK, dV by :func:`flashattn_triton.compiled_backward.compiled_flash_backward`."""
        # Detached, because a compiler looks at the history of what it is given, and O has one.
        L, Q, K, V, O = (x.detach() for x in ctx.saved_tensors)  # noqa: E741 - the paper's name
        scale = 1.0 / math.sqrt(Q.shape[-1])
        return *compiled_flash_backward(Q, K, V, O, dO, L, ctx.is_causal, scale), None


def _assignment_options(Q: Tensor, is_causal: bool) -> AttentionOptions:
    return resolve_options(head_dim=Q.shape[-1], causal=bool(is_causal))


def _as_heads(x: Tensor) -> Tensor:
    """(..., N, D) to (B, H, N, D): the last leading dimension becomes heads."""
    return x.unsqueeze(1) if x.dim() == 3 else x.flatten(0, -4)
