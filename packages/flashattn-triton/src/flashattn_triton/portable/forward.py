# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""The forward pass as a portable Triton kernel: FlashAttention-2, Algorithm 1.

One program computes one tile of query rows: it walks the key tiles that these rows can see and
keeps, per row, the running maximum, the running sum and the unnormalised output (Dao 2023,
arXiv:2307.08691). Scores are kept in units of log2, so that the exponential is the hardware's
exp2 and the scale folds into one multiply-add; the stored logsumexp is a natural logarithm
(assignment, Eq. 12).

    s = Q Kᵀ                        raw scores, tile by tile
    z = s · scale · log2(e)         or soft-capped: cap · tanh(s · scale / cap) · log2(e)
    O = Σ exp2(z - max) V / Σ exp2(z - max)
    L = (max + log2 Σ exp2(z - max)) · ln(2)

Legend: B batch, H query heads, G key/value heads, N_q queries, N_k keys, D head_dim of query and
key, E head_dim of value, T tokens of a packed batch. Capital ``_PADDED`` widths are powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashattn_triton.configs import Tiles
from flashattn_triton.launch import (
    Launch,
    Layout,
    Packing,
    Parameter,
    can_use_tma,
    empty_output,
    empty_row_statistic,
    given_addresses,
    given_parameters,
    in_layout,
    option_numbers,
    outer,
    register_limit,
    stride_numbers,
    tile_view,
    tiles_of_head,
)
from flashattn_triton.mask_and_bias import NO_MASK_OR_BIAS, MaskAndBias
from flashattn_triton.portable.options import ForwardOptions, kernel_options
from flashattn_triton.primitives import (
    CAUSAL_ALIBI,
    LN_2,
    LOG2_E,
    alibi_of_rows,
    dot,
    key_range,
    load_rows,
    loop_bound,
    mask_of,
    packed_tile_of_program,
    scores_tile,
    slope_of,
    store_rows,
    tile_indices,
    tile_of_program,
    tma_load,
)
from flashattn_triton.problem import Problem


@triton.jit
def _attend(
    acc,  # (Q_TILE_SIZE, E_PADDED) fp32, unnormalised output
    row_sum,  # (Q_TILE_SIZE,) fp32
    row_max,  # (Q_TILE_SIZE,) fp32, in units of log2
    q,  # (Q_TILE_SIZE, D_PADDED)
    K,  # a pointer to this head, or a descriptor of all of (B, G, N_k, D); so is V
    V,
    kv_position,  # batch element and head in the descriptors
    kv_strides,  # of a row of K and of V
    start,
    stop,
    queries,
    first_diagonal,  # the key on the diagonal of the tile's first query
    keys,
    columns,
    value_columns,
    mask,
    added,
    bias_position,
    factors,
    D: tl.constexpr,
    is_causal: tl.constexpr,
    OPTIONS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Folds keys ``start`` to ``stop`` into the accumulators."""
    offset, n_keys = mask[0], mask[2]
    batch, kv_head = kv_position
    stride_kk, stride_vk = kv_strides
    bias_batch, bias_head = bias_position
    K_TILE_SIZE: tl.constexpr = keys.shape[0]
    INTERPRETED: tl.constexpr = OPTIONS.interpreted
    PRECISION: tl.constexpr = OPTIONS.precision
    for key_start in range(
        loop_bound(start, INTERPRETED), loop_bound(stop, INTERPRETED), K_TILE_SIZE
    ):
        key_start = key_start + 0  # a tensor under the interpreter too
        if OPTIONS.use_tma:
            k = tma_load(K, batch, kv_head, key_start, K_TILE_SIZE, columns.shape[0])
        else:
            k_tile = K + key_start.to(tl.int64) * stride_kk
            k = load_rows(k_tile, keys, columns, stride_kk, n_keys - key_start, D, MASKED)
        s = dot(q, tl.trans(k), None, PRECISION, INTERPRETED)  # (Q_TILE_SIZE, K_TILE_SIZE)
        z, unit, _ = scores_tile(
            s, queries, key_start, keys, first_diagonal, key_start - first_diagonal, mask, added,
            (bias_batch, bias_head, first_diagonal - offset), factors, is_causal, OPTIONS, MASKED,
            MASKED, False,
        )  # fmt: skip
        # unit >= 0, so the maximum commutes with it, and the scale folds into one multiply-add.
        new_max = tl.maximum(row_max, tl.max(z, 1) * unit)
        if not OPTIONS.largest_only:
            shift = new_max
            if MASKED or OPTIONS.has_bias or OPTIONS.has_mask:
                # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
                shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp2(z * unit - shift[:, None])
            correction = tl.exp2(row_max - shift)
            row_sum = row_sum * correction + tl.sum(p, 1)
            acc = acc * correction[:, None]
            if OPTIONS.use_tma:
                v = tma_load(V, batch, kv_head, key_start, K_TILE_SIZE, value_columns.shape[0])
            else:
                v_tile = V + key_start.to(tl.int64) * stride_vk
                v = load_rows(
                    v_tile, keys, value_columns, stride_vk, n_keys - key_start, OPTIONS.e, MASKED
                )
            acc = dot(p.to(v.dtype), v, acc, PRECISION, INTERPRETED)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit(
    do_not_specialize=[
        "stride_lb",
        "stride_lh",
        "N_QUERIES",
        "N_KEYS",
        "N_HEADS",
        "window_left",
        "window_right",
    ]
)
def flash_forward_kernel(
    Q_ptr,
    K_ptr,  # or if ``use_tma`` a descriptor of (B, G, N_k, D); so is V_ptr
    V_ptr,
    O_ptr,
    L_ptr,  # (B, H, N_q) or (H, T_q) fp32
    cu_seqlens_q_ptr,  # (B + 1,) int32, or None for a dense batch
    cu_seqlens_k_ptr,
    slopes_ptr,  # (B, H) fp32, or None without ALiBi
    bias_ptr,  # broadcast to (B, H, N_q, N_k), if ``bias_tma`` a descriptor of it, or None
    prefix_ptr,  # (B,) int32, or None without a prefix
    mask_ptr,  # (B, N_k) uint8, or None without a mask
    sinks_ptr,  # (H,), or None without sinks
    stride_qb,
    stride_qh,
    stride_qq,
    stride_kb,
    stride_kh,
    stride_kk,
    stride_vb,
    stride_vh,
    stride_vk,
    stride_ob,
    stride_oh,
    stride_oq,
    stride_lb,
    stride_lh,
    stride_bb,  # None without a bias, as are the other three
    stride_bh,
    stride_bq,
    stride_bk,
    N_QUERIES,
    N_KEYS,
    N_HEADS,
    HEADS_PER_KV,
    scale,
    softcap,
    window_left,
    window_right,
    D: tl.constexpr,
    Q_TILE_SIZE: tl.constexpr,
    K_TILE_SIZE: tl.constexpr,
    is_causal: tl.constexpr,
    OPTIONS: tl.constexpr,  # portable.options.ForwardOptions
):
    """One query tile of one head. ``is_causal``: no key after diagonal + window_right is visible.

    Grid: one dimension, tiles · B · H. The tiles of one head are neighbours, so that its keys stay
    in L2, and the last tile, which sees most keys under a causal mask, comes first.
    """
    if OPTIONS.packed:
        tile, own, other = packed_tile_of_program(
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, N_QUERIES, N_HEADS, Q_TILE_SIZE, True
        )
        query_start, batch, head, is_owned = tile
        first_query, N_QUERIES = own
        first_key, N_KEYS = other
        if query_start >= N_QUERIES:
            return
    else:
        query_start, batch, head = tile_of_program(N_QUERIES, N_HEADS, Q_TILE_SIZE, True, OPTIONS)
    D_PADDED: tl.constexpr = OPTIONS.d_padded
    E_PADDED: tl.constexpr = OPTIONS.e_padded
    b, h = batch.to(tl.int64), head.to(tl.int64)
    kv_head = head // HEADS_PER_KV
    Q_ptr += b * stride_qb + h * stride_qh
    if not OPTIONS.use_tma:
        K_ptr += b * stride_kb + kv_head.to(tl.int64) * stride_kh
        V_ptr += b * stride_vb + kv_head.to(tl.int64) * stride_vh
    O_ptr += b * stride_ob + h * stride_oh
    L_ptr += b * stride_lb + h * stride_lh
    if OPTIONS.packed:
        Q_ptr += first_query.to(tl.int64) * stride_qq
        K_ptr += first_key.to(tl.int64) * stride_kk
        V_ptr += first_key.to(tl.int64) * stride_vk
        O_ptr += first_query.to(tl.int64) * stride_oq
        L_ptr += first_query
    mask = mask_of(batch, N_QUERIES, N_KEYS, window_left, window_right, prefix_ptr, OPTIONS)
    offset = mask[0]
    slope = slope_of(slopes_ptr, batch, N_HEADS, head, OPTIONS)
    bias_batch, bias_head = batch, head
    if OPTIONS.bias_tma:  # of a dimension that shares the bias there is one element
        bias_batch = tl.where(stride_bb == 0, 0, batch)
        bias_head = tl.where(stride_bh == 0, 0, head)
    elif OPTIONS.has_bias:
        bias_ptr += b * stride_bb + h * stride_bh
    if OPTIONS.has_mask:
        mask_ptr += b * N_KEYS

    start, full_start, full_stop, stop = key_range(
        query_start, mask, Q_TILE_SIZE, K_TILE_SIZE, is_causal, OPTIONS
    )
    rows = tile_indices(Q_TILE_SIZE, OPTIONS.wide)
    keys = tile_indices(K_TILE_SIZE, OPTIONS.wide)
    columns = tl.arange(0, D_PADDED)
    value_columns = tl.arange(0, E_PADDED)
    queries = query_start + tl.arange(0, Q_TILE_SIZE)
    n_rows = N_QUERIES - query_start
    q_tile = Q_ptr + query_start.to(tl.int64) * stride_qq
    q = load_rows(q_tile, rows, columns, stride_qq, n_rows, D, True)
    if OPTIONS.negative_scale:
        q = (-q.to(tl.float32)).to(q.dtype)
    scale = tl.abs(scale)

    acc = tl.zeros([Q_TILE_SIZE, E_PADDED], tl.float32)
    row_sum = tl.zeros([Q_TILE_SIZE], tl.float32)
    row_max = tl.full([Q_TILE_SIZE], float("-inf"), tl.float32)
    if OPTIONS.has_sinks:  # as if each row had seen one key, with the sink as score and value 0
        row_sum += 1.0
        row_max = row_sum * (tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E)
        if OPTIONS.packed:  # nor do tokens that no sequence owns see a sink
            row_sum = tl.where(is_owned, row_sum, 0.0)
            row_max = tl.where(is_owned, row_max, float("-inf"))
        if OPTIONS.alibi == CAUSAL_ALIBI:
            row_max += alibi_of_rows(queries, offset, query_start + offset, slope)
    starts = (start, full_start, tl.maximum(full_start, full_stop))
    stops = (tl.minimum(full_start, stop), full_stop, stop)
    for part in tl.static_range(3):  # a window's left edge, whole tiles, the right edge
        if part > 0 or OPTIONS.has_left:
            acc, row_sum, row_max = _attend(
                acc, row_sum, row_max, q, K_ptr, V_ptr, (batch, kv_head), (stride_kk, stride_vk),
                starts[part], stops[part], queries, query_start + offset, keys, columns,
                value_columns, mask, (slope, bias_ptr, stride_bq, stride_bk, mask_ptr),
                (bias_batch, bias_head), (scale, softcap), D, is_causal, OPTIONS, part != 1,
            )  # fmt: skip

    # A row that saw no key, nor a sink, has sum 0: output 0 / 1, logsumexp -inf + log2(1).
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if OPTIONS.alibi == CAUSAL_ALIBI:
        row_max -= alibi_of_rows(queries, offset, query_start + offset, slope)
    logsumexp = (row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum))) * LN_2
    o_tile = O_ptr + query_start.to(tl.int64) * stride_oq
    if not OPTIONS.largest_only:  # else the sum is 0, and this is the largest score
        store_rows(o_tile, out, rows, value_columns, stride_oq, n_rows, OPTIONS.e)
    tl.store(L_ptr + queries, logsumexp, mask=queries < N_QUERIES)


@dataclass(frozen=True, kw_only=True)
class ForwardCall:
    """The forward kernel on one kind of input: what its launch needs, found out once."""

    launch: Launch
    out: Layout
    logsumexp: Layout

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packing: Packing | None = None,
        mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
    ) -> tuple[Tensor, Tensor]:
        """Output and logsumexp of inputs whose last stride is 1."""
        out, logsumexp = (
            query.new_empty_strided(shape, strides, dtype=dtype)
            for shape, strides, dtype in (self.out, self.logsumexp)
        )
        addresses = {
            "Q_ptr": query.data_ptr(),
            "K_ptr": key.data_ptr(),
            "V_ptr": value.data_ptr(),
            "O_ptr": out.data_ptr(),
            "L_ptr": logsumexp.data_ptr(),
            **given_addresses(packing, mask_and_bias),
        }
        if mask_and_bias.sinks is not None:
            addresses["sinks_ptr"] = mask_and_bias.sinks.data_ptr()
        self.launch(addresses)
        return out, logsumexp


def forward_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    problem: Problem,
    tiles: Tiles,
    packing: Packing | None = None,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> ForwardCall:
    """The call for views of these shapes, strides and types, whose last stride is 1.

    It takes tensors as callers have them.

    Args:
        query: (B, H, N_q, D), or (1, H, T_q, D) of a packed batch; fp16, bf16 or fp32.
        key: (B, G, N_k, D), or (1, G, T_k, D).
        value: (B, G, N_k, E), or (1, G, T_k, E).
        problem: mask, scale and soft-cap.
        tiles: the kernel's shape.
        packing: where packed sequences start; None for a dense batch.
        mask_and_bias: ALiBi slopes, a bias, prefixes and sinks, as :func:`resolve_mask_and_bias`
            returns them.
    """
    bias, scores = mask_and_bias.bias, (query.shape[2], key.shape[2])
    use_tma = tiles.use_tma and packing is None and can_use_tma(key) and can_use_tma(value)
    bias_tma = use_tma and bias is not None and bias.shape[2:] == scores and can_use_tma(bias)
    device, dtype, specialization = query.device, query.dtype, mask_and_bias.specialization
    shapes = (query.shape, key.shape, value.shape)
    strides = (query.stride(), key.stride(), value.stride())
    like = torch.empty_strided(shapes[0], strides[0], dtype=dtype, device="meta")
    out, logsumexp = empty_output(like, shapes[2][3], problem.out_dtype), empty_row_statistic(like)
    (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, _), (*_, value_dim) = shapes
    matrices = [*strides, out.stride()]
    q, k, v, o, lse = (
        outer(stride, packing is not None) for stride in (*matrices, logsumexp.stride())
    )
    numbers = {
        **stride_numbers(q=q, k=k, v=v, o=o, l=lse[:2]),
        **specialization.numbers,
        "N_QUERIES": n_queries,
        "N_KEYS": n_keys,
        "N_HEADS": heads,
        "HEADS_PER_KV": heads // kv_heads,
        **option_numbers(problem),
    }
    options = kernel_options(
        ForwardOptions,
        flash_forward_kernel,
        problem,
        specialization,
        (head_dim, value_dim),
        dtype,
        tuple(matrices),
        packed=packing is not None,
        use_tma=use_tma,
        bias_tma=bias_tma,
        has_sinks=specialization.sinks,
        negative_scale=problem.scale < 0,
        largest_only=problem.largest_only,
    )
    constants = {
        "D": head_dim,
        "Q_TILE_SIZE": tiles.queries,
        "K_TILE_SIZE": tiles.keys,
        "is_causal": problem.band[1] is not None,
        "OPTIONS": options,
    }
    sinks = mask_and_bias.sinks
    parameters: dict[str, Parameter] = {
        **dict.fromkeys(("Q_ptr", "K_ptr", "V_ptr"), dtype),
        "O_ptr": out.dtype,
        "L_ptr": torch.float32,
        **given_parameters(packing, mask_and_bias),
        "sinks_ptr": None if sinks is None else sinks.dtype,
    }
    if use_tma:
        k_block = [1, 1, tiles.keys, options.d_padded]
        v_block = [1, 1, tiles.keys, options.e_padded]
        parameters["K_ptr"] = tile_view(shapes[1], strides[1], k_block, dtype)
        parameters["V_ptr"] = tile_view(shapes[2], strides[2], v_block, dtype)
    if bias is not None and bias_tma:
        own_strides = [stride or 0 for stride in specialization.bias_strides]
        full = (batch, heads, n_queries, n_keys)
        own = [n if stride else 1 for n, stride in zip(full, own_strides, strict=True)]
        block = [1, 1, tiles.queries, tiles.keys]
        parameters["bias_ptr"] = tile_view(own, own_strides, block, bias.dtype)
    launch = Launch(
        flash_forward_kernel,
        device,
        tiles_of_head(query.shape, tiles.queries, packing) * heads,
        parameters,
        numbers,
        constants,
        warps=tiles.warps,
        stages=tiles.stages,
        registers=register_limit(specialization, tiles, dtype, max(head_dim, value_dim)),
    )
    layout = problem.layout
    none: Layout = ((0,), (1,), out.dtype)
    return ForwardCall(
        launch=launch,
        out=none if problem.largest_only else in_layout(out, layout),
        logsumexp=in_layout(logsumexp, layout),
    )
