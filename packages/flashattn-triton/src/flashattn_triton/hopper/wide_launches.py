"""What the backward kernels of wide heads are launched with: they differ in tiles alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashattn_triton.hopper.backward_256 import backward_256_kernel
from flashattn_triton.hopper.backward_products import OWN, STATISTICS
from flashattn_triton.hopper.backward_wide import wide_backward_kernel
from flashattn_triton.hopper.configs import forward_widths
from flashattn_triton.hopper.launch import FastLaunch, edges, tile_map
from flashattn_triton.hopper.preprocess import ROWS, postprocess_kernel, preprocess_kernel
from flashattn_triton.hopper.schedule import FIELDS
from flashattn_triton.hopper.scores import LOG2_E
from flashattn_triton.launch import Strides, stride_numbers
from flashattn_triton.options import AttentionOptions

SUM_PART = 64  # columns of a block of the sum of dQ


@dataclass(frozen=True, kw_only=True)
class WideTiles:
    """A backward kernel of wide heads and its tiles.

    ``keys`` of a program, ``queries`` of a step; ``columns`` of Q and K that the TMA loads at a
    time, ``values`` of V and dO; ``sum_parts``: blocks of the sum of dQ side by side.
    """

    kernel: Any
    keys: int
    queries: int
    columns: int
    values: int
    sum_parts: int


_UP_TO_192 = WideTiles(
    kernel=wide_backward_kernel, keys=128, queries=64, columns=64, values=128, sum_parts=3
)
_UP_TO_256 = WideTiles(
    kernel=backward_256_kernel, keys=64, queries=64, columns=256, values=256, sum_parts=4
)


def wide_tiles(head_dims: tuple[int, int]) -> WideTiles:
    """The kernel for D of query and key, and E of value."""
    width, _ = forward_widths(head_dims)
    return _UP_TO_192 if width == 192 else _UP_TO_256


@dataclass(frozen=True, kw_only=True)
class WideLaunches:
    """The three kernels; ``statistics``: bytes before the sum of dQ in the memory that they share,
    ``shared``: its fp32 elements."""

    preprocess: FastLaunch
    main: FastLaunch
    postprocess: FastLaunch
    statistics: int
    shared: int


def wide_launches(
    tiles: WideTiles,
    dtype: torch.dtype,
    shapes: Sequence[torch.Size],
    strides: Sequence[Strides],
    gradient_strides: Sequence[Strides],
    grad_logsumexp_stride: Strides | None,
    options: AttentionOptions,
) -> WideLaunches:
    """The launches for one kind of input.

    Args:
        tiles: of the backward kernel.
        dtype: of all tensors.
        shapes: of Q, K and V.
        strides: of Q, K, V, O and dO.
        gradient_strides: of dQ, dK and dV.
        grad_logsumexp_stride: of dL, or None for zero.
        options: without a window's left edge, soft-cap, and order.
    """
    (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, _), (*_, value_dim) = shapes
    q_stride, k_stride, v_stride, o_stride, do_stride = strides
    dq_stride, dk_stride, dv_stride = gradient_strides
    do_shape = (batch, heads, n_queries, value_dim)
    queries, keys, part = tiles.queries, tiles.keys, SUM_PART
    padded = -(-n_queries // queries) * queries
    rows = padded * batch * heads
    columns = STATISTICS.value
    fp32 = torch.float32
    numbers = {"N_QUERIES": n_queries, "N_PADDED": padded, "N_HEADS": heads}
    dense = {"ROWS": ROWS, "PACKED": False, "FIELDS": FIELDS.value, "QUERIES": queries}

    def stride_div8(stride: Strides) -> list[int]:
        return [s // 8 for s in stride[:3]]

    has_dl = grad_logsumexp_stride is not None
    preprocess = FastLaunch(
        preprocess_kernel,
        rows // ROWS,
        [dtype, dtype, fp32, fp32 if has_dl else None, torch.bfloat16, fp32, None],
        {
            **stride_numbers(
                o=stride_div8(o_stride),
                do=stride_div8(do_stride),
                dl=grad_logsumexp_stride or (0, 0, 0),
            ),
            **numbers,
            "D_DIV8": value_dim // 8,
            "factor": -1.0 / options.scale,
        },
        {
            **dense,
            "WIDTH": tiles.values,
            "NARROW": value_dim < tiles.values,
            "SUM_PARTS": tiles.sum_parts,
            "SUM_WIDTH": part,
            "HAS_DL": has_dl,
        },
    )
    postprocess = FastLaunch(
        postprocess_kernel,
        rows // ROWS,
        [fp32, dtype, None],
        {
            **stride_numbers(q=stride_div8(dq_stride)),
            **numbers,
            "D_DIV8": head_dim // 8,
            "scale": options.scale,
        },
        {
            **dense,
            "WIDTH": part,
            "NARROW": head_dim < tiles.sum_parts * part,
            "SUM_PARTS": tiles.sum_parts,
        },
    )
    offset, _ = edges(n_queries, n_keys, options)
    main = FastLaunch(
        tiles.kernel,
        -(-n_keys // keys) * batch * kv_heads,
        [
            tile_map(shapes[0], q_stride, [1, 1, queries, tiles.columns], dtype),
            tile_map(shapes[1], k_stride, [1, 1, keys, tiles.columns], dtype),
            tile_map(shapes[2], v_stride, [1, 1, keys, tiles.values], dtype),
            tile_map(do_shape, do_stride, [1, 1, queries, tiles.values], dtype),
            tile_map([rows, columns], [columns, 1], [queries, columns], torch.bfloat16),
            fp32,
            tile_map(shapes[1], dk_stride, [1, 1, OWN.value, tiles.columns], dtype),
            tile_map(shapes[2], dv_stride, [1, 1, OWN.value, tiles.values], dtype),
        ],
        {
            "N_QUERIES": n_queries,
            "N_KEYS": n_keys,
            "N_KV_HEADS": kv_heads,
            "HEADS_PER_KV": heads // kv_heads,
            "offset": offset,
            "scale": options.scale,
            "scale_log2": options.scale * LOG2_E.value,
        },
        {"RAGGED": n_keys % keys != 0, "is_causal": options.band[1] is not None},
    )
    return WideLaunches(
        preprocess=preprocess,
        main=main,
        postprocess=postprocess,
        statistics=rows * columns * 2,
        shared=rows * (columns // 2 + tiles.sum_parts * part),
    )
