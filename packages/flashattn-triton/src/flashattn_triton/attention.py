"""The public functions: attention on dense and on packed batches, and its largest scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Never, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from flashattn_triton.configs import Tiling
from flashattn_triton.documents import places_of_cache, places_of_documents
from flashattn_triton.inputs import (
    as_length,
    as_starts,
    autocast,
    check_tensors,
    check_varlen,
    given_starts,
    in_one_batch,
    refuse_unknown,
    refuse_with_packed_rows,
    warn_of_alignment,
    warn_of_layout,
)
from flashattn_triton.mask_and_bias import NOTHING, Given, in_four_dimensions, without_unseen_keys
from flashattn_triton.op import PLAIN, attend
from flashattn_triton.problem import (
    CausalArgument,
    Implementation,
    Keywords,
    Layout,
    OptionKeywords,
    PackedKeywords,
    Window,
    check_layout,
    new_problem,
    normalise_flag,
    normalise_length,
)


@overload
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    return_lse: Literal[False] = False, **keywords: Unpack[Keywords],
) -> Tensor: ...  # fmt: skip


@overload
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    return_lse: Literal[True], **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *,
    return_lse: bool, **keywords: Unpack[Keywords],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


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
    mask: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    document_ids: Tensor | None = None,
    max_documents: int | None = None,
    key_lengths: Tensor | None = None,
    layout: Layout | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    implementation: Implementation = "auto",
    tiling: Tiling | None = None,
    out_dtype: torch.dtype | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · Q Kᵀ) V, exactly, without the N_q x N_k matrix (arXiv:2307.08691).

    Differentiable in query, key, value, sinks and bias, through the output and the logsumexp, in
    both modes; derivatives beyond the first are computed in tiles of plain PyTorch.
    Scores, sums and all gradients are accumulated in fp32. A query that sees no key has output 0,
    logsumexp -inf and no gradient. Batches and lengths may be 0.

    Args:
        query: (B, H, N_q, D) for layout "bhsd", (B, N_q, H, D) for "bshd"; fp16, bf16 or fp32; D
            and E from 1 to 256, in half types 512 (D 576, whose gradients are computed by tiles of
            PyTorch); without a limit, and fp64 too, where the implementation is "tiled" (as for CPU
            tensors) or "reference". Any strides (copied if the last is not 1).
            The batch may be any number of dimensions, also none.
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
            the soft-cap; -inf hides a key, and so does what is -8192 or less. Differentiable; its
            gradient is summed in a fixed order over the dimensions that share it.
        mask: bool, broadcastable to (B, H, N_q, N_k), True where a key is visible; joins the other
            masks. One that heads and queries share, (B, 1, 1, N_k), costs a byte for each key,
            beside a bias too; any other is a bias, or joins the bias in the tensor to which both
            broadcast. Keys and values that it hides from all queries are copied as zeros, so that
            they may hold NaN.
        prefix_lengths: (B,) integers, with a causal mask and no window: every query also sees the
            first keys of its sequence, that many.
        document_ids: (B, N) integers, for self-attention within documents that share rows: a token
            sees those with its number, which must be its neighbours. The host waits for the device,
            except in compiled code and with ``max_documents``.
        max_documents: at least the number of documents in all rows, which the device checks. The
            host then waits for nothing, as CUDA graphs need it. In compiled code None means as many
            as tokens; the portable kernels launch a program for each head and possible document.
        key_lengths: (B,) integers on the device, for a cache of fixed size: a row has only its
            first keys, that many, and "bottom-right" aligns the mask to the last of them. Nothing
            is read on the host. Without bias, mask, prefixes and documents. "bshd" needs no copy.
        layout: "bhsd" or "bshd", of inputs and output. None means "bhsd", with a warning if inputs
            look like "bshd".
        return_lse: also return the logsumexp.
        deterministic: gradients are bit-identical from run to run. None means: as
            ``torch.use_deterministic_algorithms`` says, with ``warn_only`` too, because every
            problem has deterministic kernels. True and False decide by themselves.
        implementation: "auto" (for CUDA tensors "hopper" where that tier can run, else "triton";
            "tiled" PyTorch for all others), one of these, or "reference" (the definition: all
            scores in memory, any number of derivatives).
        tiling: kernel shapes to use instead of the shipped table's.
        out_dtype: ``torch.float32`` keeps the output as it was accumulated, for parts that
            :func:`merge` joins; None gives it the inputs' dtype.

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
        refuse_unknown("flash_attention", [*Keywords.__annotations__, "return_lse"], unknown)
    normalise_flag("return_lse", return_lse)
    for x in (query, key, value):
        if type(x) not in PLAIN or x.is_nested:
            check_tensors(query=query, key=key, value=value)
    if max_documents is not None:
        normalise_length("max_documents", max_documents)
    leading, given = None, NOTHING
    if not (alibi_slopes is bias is prefix_lengths is mask is sinks is None):
        given = Given(alibi_slopes, bias, prefix_lengths, mask, sinks)
    if document_ids is not None or key_lengths is not None:
        results = _attend_to_packed_rows(
            query, key, value, document_ids, max_documents, key_lengths, layout, given,
            causal=causal, scale=scale, window=window, softcap=softcap,
            deterministic=deterministic, implementation=implementation, tiling=tiling,
            out_dtype=out_dtype,
        )  # fmt: skip
        return results if return_lse else results[0]
    if mask is not None or query.dim() != 4:
        if query.dim() != 4:
            layout, leading = layout or "bhsd", query.shape[:-3]
        query, key, value, given = in_four_dimensions(layout, query, key, value, given)
    if torch._C._is_any_autocast_enabled():
        query, key, value = autocast(query, key, value)
    _, first, second, head_dim = query.shape
    problem = new_problem(
        layout, head_dim, (0, 0), causal, scale, window, softcap, deterministic, implementation,
        tiling, out_dtype,
    )  # fmt: skip
    rows = 1 if layout == "bshd" else 2
    n_queries = first if rows == 1 else second
    n_keys = key.shape[rows] if key.dim() == 4 else n_queries
    if layout is None and not torch.compiler.is_compiling() and first > second:
        warn_of_layout(query, key, stacklevel=2)
    if n_queries != n_keys and (causal or window is not None):
        (key, value), given = without_unseen_keys(problem, n_queries, (key, value), given)
    out, lse = attend(problem, query, key, value, given, return_lse=return_lse)
    if causal is True and n_queries != n_keys:
        warn_of_alignment(n_queries, n_keys, stacklevel=2)
    if leading is not None:
        out = out.reshape(*leading, *out.shape[1:])
        lse = None if lse is None else lse.reshape(*leading, *lse.shape[1:])
    return (out, lse) if return_lse and lse is not None else out


@overload
def flash_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, *,
    return_lse: Literal[False] = False, **keywords: Unpack[PackedKeywords],
) -> Tensor: ...  # fmt: skip


@overload
def flash_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, *,
    return_lse: Literal[True], **keywords: Unpack[PackedKeywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def flash_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, *,
    return_lse: bool, **keywords: Unpack[PackedKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def flash_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    return_lse: bool = False,
    **keywords: Unpack[OptionKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attention` of each sequence of a packed batch, without padding.

    The host never waits for the device, so on a GPU the values in ``cu_seqlens`` are not checked:
    they must rise from 0 to the number of tokens, in steps of at most ``max_seqlen``, if that is
    given. Sequences may be empty, on either side, and may end before the last token: the tokens
    behind them have output 0, logsumexp -inf and gradients 0, whatever they hold.

    Args:
        query: (T_q, H, D), the sequences' tokens one after another.
        key: (T_k, G, D).
        value: (T_k, G, E).
        cu_seqlens_q: (sequences + 1,) int32, or int64, which costs a copy: where each sequence
            starts in ``query``, and T_q.
        cu_seqlens_k: the same for ``key`` and ``value``.
        max_seqlen_q: at least the length of the longest query sequence. None stands for T_q, with
            the same results and still without waiting for the device. Only the shape of the Hopper
            tier's tiles depends on it, and no result on a GPU. An int, an integer of NumPy or a
            tensor of no dimensions, for which None stands if it is on a GPU or traced.
        max_seqlen_k: the same for keys; None stands for T_k.
        alibi_slopes: (H,) or (sequences, H) fp32 constants.
        prefix_lengths: (sequences,) integers.

    The other arguments, and the errors, are those of :func:`flash_attention`. There is no bias,
    whose elements are pairs of a query and a key: attend to such sequences one by one, or padded.

    Returns:
        Output (T_q, H, E); with ``return_lse`` also the logsumexp, (H, T_q) fp32.
    """
    normalise_flag("return_lse", return_lse)
    for x in (query, key, value, cu_seqlens_q, cu_seqlens_k):
        if type(x) not in PLAIN or x.is_nested:
            check_tensors(
                query=query, key=key, value=value, cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
            )  # fmt: skip
    if (
        cu_seqlens_q.dtype is not torch.int32
        or cu_seqlens_k.dtype is not torch.int32
        or cu_seqlens_q.numel() == 1
        or not cu_seqlens_q.is_contiguous()
        or not cu_seqlens_k.is_contiguous()
    ):
        cu_seqlens_q, cu_seqlens_k = as_starts(cu_seqlens_q, cu_seqlens_k)
    given = Given(alibi_slopes, None, prefix_lengths, None, sinks, cu_seqlens_q, cu_seqlens_k)
    if query.dim() != 3 or key.dim() != 3:
        check_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, 0, 0)
    if torch._C._is_any_autocast_enabled():
        query, key, value = autocast(query, key, value)
    (n_queries, _, head_dim), n_keys = query.shape, key.shape[0]
    longest_q = as_length("max_seqlen_q", max_seqlen_q, n_queries)
    longest = longest_q, as_length("max_seqlen_k", max_seqlen_k, n_keys)
    try:
        problem = new_problem("thd", head_dim, longest, **keywords)
    except TypeError:
        if keywords.get("bias") is not None:
            raise ValueError(
                "bias must be None for packed sequences, but got one. Attend to them one by one, "
                "or padded, with flash_attention."
            ) from None
        allowed = [*PackedKeywords.__annotations__, "return_lse"]
        refuse_unknown("flash_attention_varlen", allowed, {**keywords})
        raise
    out, lse = attend(problem, query, key, value, given, return_lse=return_lse)
    if keywords.get("causal") is True:
        if type(max_seqlen_q) is type(max_seqlen_k) is int:
            n_queries, n_keys = longest
        warn_of_alignment(n_queries, n_keys, stacklevel=2)
    return (out, lse) if return_lse and lse is not None else out


@torch.no_grad()
def largest_scores(
    query: Tensor,
    key: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    layout: Layout | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Tensor:
    """The largest score of each head that its softmax sees, over the batch: scaled, soft-capped.

    By it QK-clip decides whose weights it shrinks: Muon (Kimi K2, arXiv:2507.20534, section 2.1)
    scales the query and key weights of a head down where its largest score is above a threshold.

    Costs one product of queries and keys beside :func:`~flashattn_triton.flash_attention`, and no
    memory but one number for each query and head. Of keys in parts, the largest is the ``maximum``
    of their results. Not differentiable. On a Hopper GPU the portable kernel runs. Sinks are no
    scores.

    Args:
        query: (B, H, N_q, D), (B, N_q, H, D) for layout "bshd", or (T_q, H, D) with ``cu_seqlens``.
            The batch may be any number of dimensions, also none.
        key: (B, G, N_k, D), in the same layout.
        cu_seqlens_q: where packed sequences start, with ``cu_seqlens_k``, as of
            :func:`~flashattn_triton.flash_attention_varlen`.
        bias: and the other arguments, as of :func:`~flashattn_triton.flash_attention`; not with
            ``cu_seqlens``.

    Returns:
        (H,) fp32; -inf for a head no query of which sees a key.

    Raises:
        ValueError: a tensor or an option is not what is described above.
        TypeError: not a tensor.
    """
    refuse_unknown("largest_scores", OptionKeywords.__annotations__, keywords)
    check_tensors(query=query, key=key)
    starts = given_starts(cu_seqlens_q, cu_seqlens_k)
    given = Given(alibi_slopes, bias, prefix_lengths, None, None, *starts)
    packed = starts[0] is not None
    if packed and bias is not None:
        raise ValueError("bias must be None for packed sequences, but got one. Pad them.")
    if not packed:
        query, key, _, given = in_four_dimensions(layout, query, key, key, given)
    if keywords.get("implementation") == "hopper":
        keywords["implementation"] = "triton"
    longest = (query.shape[0], key.shape[0]) if packed else (0, 0)
    problem = new_problem("thd" if packed else layout, query.shape[-1], longest, **keywords)
    problem = replace(problem, largest_only=True, out_dtype=None)
    _, found = attend(problem, query, key, key, given)
    assert found is not None
    of_heads = found if packed else found.movedim(1, 0).flatten(1)
    return F.pad(of_heads, (0, 1), value=float("-inf")).amax(1)  # there may be no query


def _attend_to_packed_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_ids: Tensor | None,
    max_documents: int | None,
    key_lengths: Tensor | None,
    layout: Layout | None,
    given: Given,
    **keywords: Unpack[OptionKeywords],
) -> tuple[Tensor, Tensor]:
    """:func:`flash_attention` of documents or caches: each row becomes packed sequences."""
    check_layout(layout)
    in_one_batch(query, key, value)
    alibi_slopes, bias, prefix_lengths, mask, sinks, _, _ = given
    others = {"bias": bias, "prefix_lengths": prefix_lengths, "mask": mask}
    rows = [x if layout == "bshd" else x.movedim(-3, -2) for x in (query, key, value)]
    if key_lengths is None:
        assert document_ids is not None
        refuse_with_packed_rows("document_ids", **others)
        places = places_of_documents(document_ids, max_documents, rows, alibi_slopes)
    else:
        refuse_with_packed_rows("key_lengths", **others, document_ids=document_ids)
        places = places_of_cache(key_lengths, rows)
        if alibi_slopes is not None and alibi_slopes.shape[:-1] == key_lengths.shape:
            alibi_slopes = alibi_slopes.flatten(0, -2).repeat_interleave(2, 0)  # a row is two
    q, k, v = (x.flatten(0, -3) for x in rows)
    out, lse = flash_attention_varlen(
        q, k, v, *places, return_lse=True, alibi_slopes=alibi_slopes, sinks=sinks, **keywords
    )
    out, lse = (x.unflatten(dim, rows[0].shape[:-2]) for x, dim in ((out, 0), (lse, 1)))
    return out if layout == "bshd" else out.movedim(-2, -3), lse.movedim(0, -2)
