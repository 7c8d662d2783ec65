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

import triton
import triton.language as tl
from torch import Tensor

from flashattn_triton.configs import Tiles
from flashattn_triton.launch import (
    Layout,
    can_use_tma,
    empty_row_statistic,
    given_addresses,
    in_layout,
    planned_output,
    tile_view,
)
from flashattn_triton.mask_and_bias import NOTHING, Given
from flashattn_triton.portable.launch import KernelInputs
from flashattn_triton.primitives import (
    CAUSAL_ALIBI,
    LN_2,
    LOG2_E,
    added_of,
    alibi_of_rows,
    dot,
    key_range,
    load_rows,
    load_tile,
    loop_bound,
    mask_of,
    rows_of_head,
    scores_tile,
    store_rows,
    tile_indices,
    tile_of_program,
)
from flashattn_triton.problem import Problem
from flashattn_triton.triton_versions import Parameter


@triton.jit(
    do_not_specialize=[
        *("stride_lb", "stride_lh", "N_QUERIES", "N_KEYS", "N_HEADS"),
        *("window_left", "window_right"),
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
    OPTIONS: tl.constexpr,  # portable.launch.KernelOptions
):
    """One query tile of one head. ``is_causal``: no key after diagonal + window_right is visible.

    Grid: one dimension, tiles · B · H. The tiles of one head are neighbours, so that its keys stay
    in L2, and the last tile, which sees most keys under a causal mask, comes first.
    """
    tile, own, other = tile_of_program(
        cu_seqlens_q_ptr, cu_seqlens_k_ptr, N_QUERIES, N_KEYS, N_HEADS, Q_TILE_SIZE, True, OPTIONS
    )
    query_start, batch, head, is_owned = tile
    first_query, N_QUERIES = own
    first_key, N_KEYS = other
    if OPTIONS.packed and query_start >= N_QUERIES:
        return
    D_PADDED: tl.constexpr = OPTIONS.d_padded
    E_PADDED: tl.constexpr = OPTIONS.e_padded
    b, h = batch.to(tl.int64), head.to(tl.int64)
    kv_head = head // HEADS_PER_KV
    kv_h = kv_head.to(tl.int64)
    Q_ptr = rows_of_head(Q_ptr, b, h, first_query, (stride_qb, stride_qh, stride_qq), OPTIONS)
    if not OPTIONS.use_tma:
        K_ptr = rows_of_head(K_ptr, b, kv_h, first_key, (stride_kb, stride_kh, stride_kk), OPTIONS)
        V_ptr = rows_of_head(V_ptr, b, kv_h, first_key, (stride_vb, stride_vh, stride_vk), OPTIONS)
    O_ptr = rows_of_head(O_ptr, b, h, first_query, (stride_ob, stride_oh, stride_oq), OPTIONS)
    L_ptr += b * stride_lb + h * stride_lh
    if OPTIONS.packed:
        L_ptr += first_query
    mask = mask_of(batch, N_QUERIES, N_KEYS, window_left, window_right, prefix_ptr, OPTIONS)
    offset = mask[0]
    bias_strides = (stride_bb, stride_bh, stride_bq, stride_bk)
    added = added_of(
        slopes_ptr, bias_ptr, mask_ptr, bias_strides, batch, N_HEADS, head, N_KEYS, OPTIONS
    )
    bias_batch, bias_head = batch, head
    if OPTIONS.bias_tma:  # of a dimension that shares the bias there is one element
        bias_batch = tl.where(stride_bb == 0, 0, batch)
        bias_head = tl.where(stride_bh == 0, 0, head)

    starts, stops = key_range(query_start, mask, Q_TILE_SIZE, K_TILE_SIZE, is_causal, OPTIONS)
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

    acc = tl.zeros([Q_TILE_SIZE, E_PADDED], tl.float32)  # unnormalised output
    row_sum = tl.zeros([Q_TILE_SIZE], tl.float32)
    row_max = tl.full([Q_TILE_SIZE], float("-inf"), tl.float32)  # in units of log2
    if OPTIONS.has_sinks:  # as if each row had seen one key, with the sink as score and value 0
        row_sum += 1.0
        row_max = row_sum * (tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E)
        if OPTIONS.packed:  # nor do tokens that no sequence owns see a sink
            row_sum = tl.where(is_owned, row_sum, 0.0)
            row_max = tl.where(is_owned, row_max, float("-inf"))
        if OPTIONS.alibi == CAUSAL_ALIBI:
            row_max += alibi_of_rows(queries, offset, query_start + offset, added[0])
    key_source, value_source, position = (K_ptr, stride_kk), (V_ptr, stride_vk), (batch, kv_head)
    first_diagonal = query_start + offset  # the key on the diagonal of the tile's first query
    for part in tl.static_range(3):  # a window's left edge, whole tiles, the right edge
        if part > 0 or OPTIONS.has_left:
            for key_start in range(
                loop_bound(starts[part], OPTIONS), loop_bound(stops[part], OPTIONS), K_TILE_SIZE
            ):
                key_start = key_start + 0  # a tensor under the interpreter too
                k = load_tile(
                    key_source, position, key_start, N_KEYS, keys, columns, D, part != 1, OPTIONS
                )
                s = dot(q, tl.trans(k), None, OPTIONS)  # (Q_TILE_SIZE, K_TILE_SIZE)
                z, unit, _ = scores_tile(
                    s, queries, key_start, keys, first_diagonal, key_start - first_diagonal, mask,
                    added, (bias_batch, bias_head, query_start), (scale, softcap), is_causal,
                    OPTIONS, part != 1, part != 1, False,
                )  # fmt: skip
                # unit >= 0, so the maximum commutes with it, and the scale folds into one
                # multiply-add.
                new_max = tl.maximum(row_max, tl.max(z, 1) * unit)
                if not OPTIONS.largest_only:
                    shift = new_max
                    if part != 1 or OPTIONS.has_bias or OPTIONS.has_mask:
                        # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
                        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
                    p = tl.exp2(z * unit - shift[:, None])
                    correction = tl.exp2(row_max - shift)
                    row_sum = row_sum * correction + tl.sum(p, 1)
                    acc = acc * correction[:, None]
                    v = load_tile(
                        value_source, position, key_start, N_KEYS, keys, value_columns, OPTIONS.e,
                        part != 1, OPTIONS,
                    )  # fmt: skip
                    acc = dot(p.to(v.dtype), v, acc, OPTIONS)
                row_max = new_max

    # A row that saw no key, nor a sink, has sum 0: output 0 / 1, logsumexp -inf + log2(1).
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if OPTIONS.alibi == CAUSAL_ALIBI:
        row_max -= alibi_of_rows(queries, offset, query_start + offset, added[0])
    logsumexp = (row_max + tl.log2(tl.where(row_sum == 0.0, 1.0, row_sum))) * LN_2
    o_tile = O_ptr + query_start.to(tl.int64) * stride_oq
    if not OPTIONS.largest_only:  # else the sum is 0, and this is the largest score
        store_rows(o_tile, out, rows, value_columns, stride_oq, n_rows, OPTIONS.e)
    tl.store(L_ptr + queries, logsumexp, mask=queries < N_QUERIES)


class ForwardCall:
    """The forward kernel on one kind of input, planned for views whose last strides are 1."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        problem: Problem,
        tiles: Tiles,
        given: Given = NOTHING,
    ) -> None:
        out = planned_output(query, value.shape[3], problem.out_dtype)
        logsumexp = empty_row_statistic(out)
        results = {"o": out.stride(), "l": logsumexp.stride()}
        inputs = KernelInputs(query, key, value, problem, given, results=results)
        bias, scores = given.bias, (query.shape[2], key.shape[2])
        use_tma = tiles.use_tma and inputs.readable_by_tma
        bias_tma = use_tma and bias is not None and bias.shape[2:] == scores and can_use_tma(bias)
        parameters: dict[str, Parameter] = {"O_ptr": out.dtype}
        if bias is not None and bias_tma:
            block = [1, 1, tiles.queries, tiles.keys]
            own = [n if stride else 1 for n, stride in zip(bias.shape, bias.stride(), strict=True)]
            parameters["bias_ptr"] = tile_view(own, bias.stride(), block, bias.dtype)
        self.launch = inputs.launch(
            flash_forward_kernel,
            tiles,
            parameters,
            walked=("K_ptr", "V_ptr"),
            bias_tma=bias_tma,
            has_sinks=given.sinks is not None,
            negative_scale=problem.scale < 0,
            largest_only=problem.largest_only,
        )
        none: Layout = ((0,), (1,), out.dtype)
        self.out = none if problem.largest_only else in_layout(out, problem.layout)
        self.logsumexp = in_layout(logsumexp, problem.layout)

    def __call__(
        self, tensors: tuple[Tensor, Tensor, Tensor], given: Given = NOTHING
    ) -> tuple[Tensor, Tensor]:
        """Output and logsumexp of inputs whose last stride is 1."""
        query, key, value = tensors
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
            **given_addresses(given),
        }
        self.launch(addresses)
        return out, logsumexp
