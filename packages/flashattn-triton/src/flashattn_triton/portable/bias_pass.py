# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""The gradient of an additive bias: a kernel whose programs own tiles of the bias.

    dbias = Σ dS,   dS = P ∘ (dO Vᵀ - delta)

summed over the batch elements, heads, queries and keys that share an element of the bias. P and dS
are computed once more, so that neither exists in memory, nothing is added atomically, and every sum
has a fixed order. The formulas and the legend are in :mod:`flashattn_triton.portable.backward`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashattn_triton.configs import Tiling
from flashattn_triton.launch import BackwardTensors, given_addresses, padded
from flashattn_triton.mask_and_bias import Given
from flashattn_triton.portable.launch import KernelInputs
from flashattn_triton.portable.preprocess import ROWS, backward_addresses, preprocess_launch
from flashattn_triton.primitives import (
    added_of,
    dot,
    key_range,
    load_rows,
    loop_bound,
    mask_of,
    probabilities,
    tile_indices,
    tma_load,
)
from flashattn_triton.problem import Problem

# How much of each row is multiplied at a time: one line of the cache.
_BYTES_OF_COLUMNS = 128


@triton.jit
def _product_by_columns(
    a_tile, b_tile, a_rows, b_rows, stride_a, stride_b, n_a_rows, n_b_rows, WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """``a @ bᵀ`` of two tiles in memory, by columns: wide tiles do not fit the registers."""
    COLUMNS: tl.constexpr = OPTIONS.columns
    columns = tl.arange(0, COLUMNS)
    product = tl.zeros([a_rows.shape[0], b_rows.shape[0]], tl.float32)
    for _ in range(0, WIDTH_PADDED, COLUMNS):
        a = load_rows(a_tile, a_rows, columns, stride_a, n_a_rows, WIDTH, True)
        b = load_rows(b_tile, b_rows, columns, stride_b, n_b_rows, WIDTH, True)
        product = dot(a, tl.trans(b), product, OPTIONS)
        columns += COLUMNS
    return product


@triton.jit
def _tile_at(tensor, batch, head, first):
    """A pointer to the tile that begins at row ``first``, and the stride of rows."""
    ptr, stride_batch, stride_head, stride_row = tensor
    return ptr + batch * stride_batch + head * stride_head + first * stride_row, stride_row


@triton.jit
def _gradient_of_scores(
    operands,  # Q, K, V and dO: pointers, or descriptors, with the strides of batch, head and row
    others,  # pointers to statistics, slopes, the bias, with its four strides, and the mask
    sizes,  # queries that have statistics, heads of queries, and of queries for each of keys
    batch,
    head,
    query_start,
    key_start,
    mask,
    factors,
    D: tl.constexpr,
    Q_TILE_SIZE: tl.constexpr,
    K_TILE_SIZE: tl.constexpr,
    is_causal: tl.constexpr,
    OPTIONS: tl.constexpr,
):
    """dS of one tile of one head of one batch element, behind the soft-cap."""
    _, n_queries, n_keys, _, _, _ = mask
    q, k, v, do = operands
    statistics_ptr, slopes_ptr, bias_ptr, bias_strides, mask_ptr = others
    n_padded, n_heads, heads_per_kv = sizes
    b, h = batch.to(tl.int64), head.to(tl.int64)
    kv_h = h // heads_per_kv
    first, first_key = query_start.to(tl.int64), key_start.to(tl.int64)
    rows = tile_indices(Q_TILE_SIZE, OPTIONS.wide)
    key_rows = tile_indices(K_TILE_SIZE, OPTIONS.wide)
    queries = query_start + tl.arange(0, Q_TILE_SIZE)
    statistics = statistics_ptr + (b * n_heads + h) * 2 * n_padded
    logsumexp = tl.load(statistics + queries)
    delta = tl.load(statistics + n_padded + queries)
    added = added_of(
        slopes_ptr, bias_ptr, mask_ptr, bias_strides, batch, n_heads, head, n_keys, OPTIONS
    )
    if OPTIONS.use_tma:  # rows and columns past the end are 0
        kv_head = head // heads_per_kv
        q_tile = tma_load(q[0], batch, head, query_start, Q_TILE_SIZE, OPTIONS.d_padded)
        k_tile = tma_load(k[0], batch, kv_head, key_start, K_TILE_SIZE, OPTIONS.d_padded)
        v_tile = tma_load(v[0], batch, kv_head, key_start, K_TILE_SIZE, OPTIONS.e_padded)
        do_tile = tma_load(do[0], batch, head, query_start, Q_TILE_SIZE, OPTIONS.e_padded)
        s = dot(q_tile, tl.trans(k_tile), None, OPTIONS)
        dp = dot(do_tile, tl.trans(v_tile), None, OPTIONS)
    else:
        n_rows, n_key_rows = n_queries - query_start, n_keys - key_start
        q_tile, stride_qq = _tile_at(q, b, h, first)
        k_tile, stride_kk = _tile_at(k, b, kv_h, first_key)
        v_tile, stride_vk = _tile_at(v, b, kv_h, first_key)
        do_tile, stride_doq = _tile_at(do, b, h, first)
        s = _product_by_columns(
            q_tile, k_tile, rows, key_rows, stride_qq, stride_kk, n_rows, n_key_rows, D,
            OPTIONS.d_padded, OPTIONS,
        )  # fmt: skip
        dp = _product_by_columns(
            do_tile, v_tile, rows, key_rows, stride_doq, stride_vk, n_rows, n_key_rows, OPTIONS.e,
            OPTIONS.e_padded, OPTIONS,
        )  # fmt: skip
    p, _scores = probabilities(
        s, logsumexp, queries, key_start, key_rows, key_start, mask, added, factors, is_causal,
        OPTIONS, True, False,
    )  # fmt: skip
    return p * (dp - delta[:, None])


@triton.jit(
    do_not_specialize=[
        *("N_QUERIES", "N_KEYS", "N_HEADS", "OWN_HEADS", "SHARING_BATCHES", "SHARING_HEADS"),
        *("window_left", "window_right"),
    ]
)
def bias_pass_kernel(
    Q_ptr,  # or if ``use_tma`` a descriptor of (B, H, N_q, D), as are the next three of theirs
    K_ptr,
    V_ptr,
    dO_ptr,
    statistics_ptr,  # (B · H, 2, N_PADDED) fp32, see preprocess_kernel
    slopes_ptr,  # (B, H) fp32, or None without ALiBi
    bias_ptr,  # broadcast to (B, H, N_q, N_k)
    prefix_ptr,  # (B,) int32, or None without a prefix
    mask_ptr,  # (B, N_k) uint8, or None without a mask
    dB_ptr,  # contiguous, with the bias's own dimensions
    stride_qb,
    stride_qh,
    stride_qq,
    stride_kb,
    stride_kh,
    stride_kk,
    stride_vb,
    stride_vh,
    stride_vk,
    stride_dob,
    stride_doh,
    stride_doq,
    stride_bb,
    stride_bh,
    stride_bq,
    stride_bk,
    N_PADDED,
    N_QUERIES,
    N_KEYS,
    N_HEADS,
    HEADS_PER_KV,
    OWN_HEADS,  # of the bias
    SHARING_BATCHES,  # batch elements, and heads, that share one element of the bias
    SHARING_HEADS,
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
    """One tile of the gradient. Grid: query tiles · key tiles · heads · batch, those of the bias.

    A dimension that shares the bias is walked over instead, and the last sum is over a tile.
    """
    query_tiles, key_tiles = 1, 1
    if not OPTIONS.shared_by_queries:
        query_tiles = tl.cdiv(N_QUERIES, Q_TILE_SIZE)
    if not OPTIONS.shared_by_keys:
        key_tiles = tl.cdiv(N_KEYS, K_TILE_SIZE)
    own_key = (tl.program_id(0) % key_tiles) * K_TILE_SIZE
    own_query = (tl.program_id(0) // key_tiles % query_tiles) * Q_TILE_SIZE
    batch_head = tl.program_id(0) // key_tiles // query_tiles
    own_batch, own_head = batch_head // OWN_HEADS, batch_head % OWN_HEADS
    query_end, key_end = N_QUERIES, N_KEYS
    if not OPTIONS.shared_by_queries:
        query_end = tl.minimum(own_query + Q_TILE_SIZE, N_QUERIES)
    if not OPTIONS.shared_by_keys:
        key_end = tl.minimum(own_key + K_TILE_SIZE, N_KEYS)
    operands = (
        (Q_ptr, stride_qb, stride_qh, stride_qq), (K_ptr, stride_kb, stride_kh, stride_kk),
        (V_ptr, stride_vb, stride_vh, stride_vk), (dO_ptr, stride_dob, stride_doh, stride_doq),
    )  # fmt: skip
    bias_strides = (stride_bb, stride_bh, stride_bq, stride_bk)
    others = (statistics_ptr, slopes_ptr, bias_ptr, bias_strides, mask_ptr)
    sizes, factors = (N_PADDED, N_HEADS, HEADS_PER_KV), (scale, softcap)

    n_shared = SHARING_BATCHES * SHARING_HEADS
    total = tl.zeros([Q_TILE_SIZE, K_TILE_SIZE], tl.float32)
    if OPTIONS.shared_by_queries or OPTIONS.shared_by_keys:
        for shared in range(loop_bound(n_shared, OPTIONS)):
            batch = own_batch + shared // SHARING_HEADS
            head = own_head + shared % SHARING_HEADS
            mask = mask_of(batch, N_QUERIES, N_KEYS, window_left, window_right, prefix_ptr, OPTIONS)
            for query_start in range(
                loop_bound(own_query, OPTIONS), loop_bound(query_end, OPTIONS), Q_TILE_SIZE
            ):
                query_start = query_start + 0  # a tensor under the interpreter too
                starts, stops = key_range(
                    query_start, mask, Q_TILE_SIZE, K_TILE_SIZE, is_causal, OPTIONS
                )
                start, stop = tl.maximum(starts[0], own_key), tl.minimum(stops[2], key_end)
                for key_start in range(
                    loop_bound(start, OPTIONS), loop_bound(stop, OPTIONS), K_TILE_SIZE
                ):
                    key_start = key_start + 0
                    total += _gradient_of_scores(
                        operands, others, sizes, batch, head, query_start, key_start, mask,
                        factors, D, Q_TILE_SIZE, K_TILE_SIZE, is_causal, OPTIONS,
                    )  # fmt: skip
    else:
        # One tile for each element that shares the bias: no other loop, so that the next element's
        # operands are loaded meanwhile.
        if not OPTIONS.has_prefix:
            mask = mask_of(0, N_QUERIES, N_KEYS, window_left, window_right, prefix_ptr, OPTIONS)
            starts, stops = key_range(own_query, mask, Q_TILE_SIZE, K_TILE_SIZE, is_causal, OPTIONS)
            n_shared = tl.where((own_key >= starts[0]) & (own_key < stops[2]), n_shared, 0)
        for shared in range(loop_bound(n_shared, OPTIONS)):
            batch = own_batch + shared // SHARING_HEADS
            head = own_head + shared % SHARING_HEADS
            own_mask = mask_of(
                batch, N_QUERIES, N_KEYS, window_left, window_right, prefix_ptr, OPTIONS
            )
            total += _gradient_of_scores(
                operands, others, sizes, batch, head, own_query, own_key, own_mask, factors, D,
                Q_TILE_SIZE, K_TILE_SIZE, is_causal, OPTIONS,
            )  # fmt: skip

    width = 1 if OPTIONS.shared_by_keys else N_KEYS
    height = 1 if OPTIONS.shared_by_queries else N_QUERIES
    dB_ptr += batch_head.to(tl.int64) * height * width
    queries = (own_query + tl.arange(0, Q_TILE_SIZE))[:, None]
    keys = (own_key + tl.arange(0, K_TILE_SIZE))[None, :]
    if OPTIONS.shared_by_queries:
        total = tl.sum(total, 0)[None, :]
        queries = tl.zeros([1, 1], tl.int32)
    if OPTIONS.shared_by_keys:
        total = tl.sum(total, 1)[:, None]
        keys = tl.zeros([1, 1], tl.int32)
    pointers = dB_ptr + queries.to(tl.int64) * width + keys
    inside = (queries < height) & (keys < width)
    tl.store(pointers, total.to(dB_ptr.dtype.element_ty), mask=inside)


class BiasCall:
    """The kernels on one kind of input, as :class:`~.backward.BackwardCall` has its own."""

    def __init__(
        self, tensors: BackwardTensors, problem: Problem, tiling: Tiling, given: Given
    ) -> None:
        query, key, value, out, _, grad_out, grad_logsumexp = tensors
        bias = given.bias
        assert bias is not None
        batch, heads, n_queries, head_dim = query.shape
        n_keys, dtype = key.shape[2], query.dtype
        # The tiles of dQ: operands are the same, and a tile of dS takes no more than one of dQ. By
        # the TMA, narrow operands of the next tile are loaded ahead, and three small programs fit.
        multiple = max(tiling.query_pass.queries, ROWS)
        n_padded = -(-n_queries // multiple) * multiple
        inputs = KernelInputs(query, key, value, problem, given, grad_out, n_padded=n_padded)
        use_tma = dtype.itemsize == 2 and tiling.query_pass.use_tma and inputs.readable_by_tma
        stages = 2 if use_tma and max(head_dim, value.shape[3]) <= 64 else 1
        tiles = replace(tiling.query_pass, use_tma=use_tma, stages=stages)
        if use_tma:
            tiles = replace(tiles, queries=min(tiles.queries, 64), warps=min(tiles.warps, 4))
        own_batch, own_heads, own_queries, own_keys = bias.shape
        rows = 1 if own_queries < n_queries else -(-n_queries // tiles.queries)
        columns = 1 if own_keys < n_keys else -(-n_keys // tiles.keys)
        self.launch = inputs.launch(
            bias_pass_kernel,
            tiles,
            {"dB_ptr": bias.dtype},
            {
                "OWN_HEADS": own_heads,
                "SHARING_BATCHES": batch // own_batch,
                "SHARING_HEADS": heads // own_heads,
            },
            programs=rows * columns * own_heads * own_batch,
            walked=("Q_ptr", "K_ptr", "V_ptr", "dO_ptr"),
            columns=min(
                _BYTES_OF_COLUMNS // dtype.itemsize,
                *(padded(x.shape[3], dtype) for x in (query, value)),
            ),
            shared_by_queries=own_queries < n_queries,
            shared_by_keys=own_keys < n_keys,
        )
        self.preprocess = preprocess_launch(out, grad_out, grad_logsumexp, n_padded=n_padded)
        self.statistics = (batch * heads, 2, n_padded)

    def __call__(self, tensors: BackwardTensors, given: Given) -> Tensor:
        """The bias's gradient, contiguous, in its shape and dtype; inputs' last stride is 1."""
        bias = given.bias
        assert bias is not None
        statistics = tensors[0].new_empty(self.statistics, dtype=torch.float32)
        gradient = bias.new_empty(bias.shape)
        addresses = {
            **backward_addresses(tensors, statistics),
            "dB_ptr": gradient.data_ptr(),
            **given_addresses(given),
        }
        self.preprocess(addresses)
        self.launch(addresses)
        return gradient
