"""The backward pass: which kernels of :mod:`flashattn_triton.backward_kernels` run, and on what."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashattn_triton.backward_kernels import (
    ATOMIC,
    BULK,
    NONE,
    delta_kernel,
    key_pass_kernel,
    query_pass_kernel,
)
from flashattn_triton.configs import Tiles, Tiling
from flashattn_triton.launch import (
    Launch,
    Packing,
    Sizes,
    Strides,
    dot_precision,
    empty_output,
    empty_row_statistic,
    is_wide,
    on_device_of,
    option_constants,
    option_numbers,
    outer,
    padded,
    unit_last_stride,
)
from flashattn_triton.options import AttentionOptions

DELTA_TILES = Tiles(64, 1, 4, 1)


def triton_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    options: AttentionOptions,
    tiling: Tiling,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the backward kernels.

    Args:
        query: and ``key``, ``value``, ``options``, ``packing``: as given to the forward pass.
        out: its output, (B, H, N_q, E).
        logsumexp: its logsumexp, contiguous (B, H, N_q) fp32.
        grad_out: dO, the shape of ``out``, any strides (copied if the last is not 1).
        grad_logsumexp: dL, the shape of ``logsumexp``, or None for zero.
        tiling: kernel shapes; the fused form is used if it has one, unless a fixed order of every
            sum is asked for by ``options.deterministic``.

    Returns:
        dQ, dK and dV in the inputs' shapes and dtype. dQ is accumulated in fp32.
    """
    query, key, value, out, grad_out = map(unit_last_stride, (query, key, value, out, grad_out))
    delta = empty_row_statistic(query)
    dq, dk, dv = (empty_output(x, x.shape[3]) for x in (query, key, value))
    fused = None if options.deterministic else tiling.fused
    dq_sum = dq
    if fused is not None:
        # Padded, so that a tile is one block of memory.
        width = padded(query.shape[3], query.dtype)
        dq_sum = query.new_zeros(*query.shape[:3], width, dtype=torch.float32)
    inputs = (query, key, value, grad_out, logsumexp, delta)
    delta_launch, key_launch, query_launch = _backward_launches(
        query.device,
        query.dtype,
        (query.shape, key.shape, value.shape),
        tuple([x.stride() for x in (*inputs[:4], dq_sum, dk, dv, delta, out)]),
        None if grad_logsumexp is None else grad_logsumexp.stride(),
        options,
        tiling,
        dot_precision(query.dtype),
        None if packing is None else packing.sizes,
    )
    starts = (None, None) if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)
    with on_device_of(query):
        delta_launch(out, grad_out, grad_logsumexp, logsumexp, delta)
        if fused is None:
            key_launch(*inputs, dq, dk, dv, *starts)
            query_launch(*inputs, dq, *starts)
            return dq, dk, dv
        target = dq_sum
        if tiling.bulk:
            rows = dq_sum.flatten(0, 2)
            target = TensorDescriptor.from_tensor(rows, [fused.queries, rows.shape[1]])
        key_launch(*inputs, target, dk, dv, *starts)
        # One elementwise kernel: scale and cast.
        torch.mul(dq_sum[..., : query.shape[3]], options.scale, out=dq)
        return dq, dk, dv


@functools.lru_cache(maxsize=4096)
def _backward_launches(
    device: torch.device,
    dtype: torch.dtype,
    shapes: tuple[torch.Size, ...],
    strides: tuple[Strides, ...],
    grad_logsumexp_stride: Strides | None,
    options: AttentionOptions,
    tiling: Tiling,
    precision: str,
    sizes: Sizes | None,
) -> tuple[Launch, Launch, Launch]:
    """Delta, key pass, query pass. ``device`` only tells apart what is compiled separately."""
    (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, _), (*_, value_dim) = shapes
    *matrices, row_stride, out_stride = strides
    delta_launch = Launch(
        delta_kernel,
        -(-n_queries // DELTA_TILES.queries) * batch * heads,
        [
            *out_stride[:3],
            *matrices[3][:3],
            *(grad_logsumexp_stride or (0, 0, 0)),
            *row_stride[:2],
            *(n_queries, heads),
        ],
        {
            "E": value_dim,
            "E_PADDED": padded(value_dim, dtype),
            "ROWS": DELTA_TILES.queries,
            "HAS_DL": grad_logsumexp_stride is not None,
        },
        DELTA_TILES,
    )
    if sizes is not None:
        batch, n_queries, n_keys = sizes
    *inputs, dq, dk, dv = [outer(stride, sizes) for stride in matrices]
    statistic = ((row_stride[0] if sizes is None else 0), row_stride[1])
    constants = {
        "D": head_dim,
        "E": value_dim,
        "D_PADDED": padded(head_dim, dtype),
        "E_PADDED": padded(value_dim, dtype),
        "PACKED": sizes is not None,
        "WIDE": is_wide(*matrices),
        "PRECISION": precision,
        "INTERPRETED": not isinstance(key_pass_kernel, triton.JITFunction),
        **option_constants(options),
    }

    def launch(kernel: Any, tiles: Tiles, programs: int, outputs: list[Strides], n_heads: int,
               **more: Any) -> Launch:  # fmt: skip
        numbers = [
            *itertools.chain.from_iterable((*inputs, *outputs, statistic)),
            *(n_queries, n_keys, n_heads, heads // kv_heads),
            *option_numbers(options),
        ]
        shape = {"Q_TILE_SIZE": tiles.queries, "K_TILE_SIZE": tiles.keys}
        return Launch(kernel, programs, numbers, constants | shape | more, tiles)

    fused = None if options.deterministic else tiling.fused
    mode = NONE if fused is None else BULK if tiling.bulk else ATOMIC
    # A descriptor counts rows, a pointer elements.
    unit = padded(head_dim, dtype) if mode is BULK else 1
    target = tuple(stride // unit for stride in dq)
    tiles = fused or tiling.key_pass
    programs = -(-n_keys // tiles.keys) * batch * kv_heads
    key_launch = launch(
        key_pass_kernel, tiles, programs, [target, dk, dv], kv_heads, DQ_MODE=mode.value
    )
    tiles = tiling.query_pass
    programs = -(-n_queries // tiles.queries) * batch * heads
    return delta_launch, key_launch, launch(query_pass_kernel, tiles, programs, [dq], heads)
