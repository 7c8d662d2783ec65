"""The backward pass on sm_90: what its three kernels are launched with, found out once per kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashattn_triton.hopper.backward_256 import backward_256_kernel
from flashattn_triton.hopper.backward_kernel import hopper_backward_kernel
from flashattn_triton.hopper.backward_products import OWN, STATISTICS
from flashattn_triton.hopper.backward_wide import wide_backward_kernel
from flashattn_triton.hopper.configs import backward_config, columns_in_use, forward_widths
from flashattn_triton.hopper.launch import FastLaunch, edges, packed_tile_map, tile_map
from flashattn_triton.hopper.packed import (
    PackedTiles,
    packed_tiles,
    without_offset,
)
from flashattn_triton.hopper.preprocess import ROWS, postprocess_kernel, preprocess_kernel
from flashattn_triton.hopper.schedule import FIELDS
from flashattn_triton.launch import (
    Packing,
    Strides,
    can_use_tma,
    current_device,
    empty_output,
    stride_numbers,
    without_repetitions,
)
from flashattn_triton.mask_and_bias import NO_MASK_OR_BIAS, MaskAndBias
from flashattn_triton.options import AttentionOptions

LOG2_E = 1.4426950408889634
# By the width of tiles of Q and K: the kernel, and their columns in one load.
KERNELS: dict[int, tuple[Any, int]] = {
    64: (hopper_backward_kernel, 64),
    128: (hopper_backward_kernel, 128),
    192: (wide_backward_kernel, 64),
    256: (backward_256_kernel, 256),
}


def hopper_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    options: AttentionOptions,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the backward kernels on inputs that ``eligibility`` has not refused.

    Args:
        query: and ``key``, ``value``, ``options``, ``packing``: as given to the forward pass.
        out: its output, (B, H, N_q, D).
        logsumexp: its logsumexp, contiguous (B, H, N_q) fp32.
        grad_out: dO, the shape of ``out``. It and the tensors above may have any strides, and are
            copied where the TMA cannot follow them; what is the same for all heads, as the
            gradient of a sum is, once.
        grad_logsumexp: dL, the shape of ``logsumexp``, or None for zero.

    Returns:
        dQ, dK and dV in the inputs' shapes and dtype. dQ is accumulated in fp32; in any order,
        unless ``options`` ask for deterministic gradients.
    """
    if query.numel() == 0 or key.numel() == 0:
        return no_gradients(query, key, value)
    q, k, v, o, do = tensors = readable_by_tma(query, key, value, out, grad_out)
    call = hopper_backward_call(tensors, grad_logsumexp, options, packing)
    return call(q, k, v, o, logsumexp, do, grad_logsumexp, packing)


def no_gradients(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV where there is no query, or no key: no descriptor can express that."""
    dq, dk, dv = (empty_output(x, x.shape[3]).zero_() for x in (query, key, value))
    return dq, dk, dv


def readable_by_tma(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, grad_out: Tensor
) -> tuple[Tensor, ...]:
    """The tensors, or copies of them that the TMA can read; of dO see :func:`single_head`."""
    inputs = [
        x if can_use_tma(x) else x.clone(memory_format=torch.contiguous_format)
        for x in (query, key, value, out)
    ]
    if not can_use_tma(without_repetitions(grad_out)):
        grad_out = single_head(grad_out)
    return *inputs, grad_out


def single_head(grad_out: Tensor) -> Tensor:
    """A copy of dO that the TMA can read: of one head if all are the same, as of a sum."""
    copy = without_repetitions(grad_out).clone(memory_format=torch.contiguous_format)
    return copy.expand(grad_out.shape)


@dataclass(frozen=True, kw_only=True)
class HopperBackwardCall:
    """The backward kernels on one kind of input: what their launches need, found out once.

    ``gradients``: shapes and strides of dQ, dK and dV. ``shared``: elements of the memory that the
    kernels share. ``statistics``: bytes of it that come before the sum of dQ. ``turns``:
    how many counters of an order there are. ``query_tiles``, ``key_tiles``: of a packed batch; one
    object where both have the same table.
    """

    preprocess: FastLaunch
    main: FastLaunch
    postprocess: FastLaunch
    device: torch.device
    gradients: Sequence[tuple[Sequence[int], Strides]]
    statistics: int
    shared: int
    turns: int = 0
    query_tiles: PackedTiles | None = None
    key_tiles: PackedTiles | None = None

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        grad_out: Tensor,
        grad_logsumexp: Tensor | None,
        packing: Packing | None = None,
        mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of inputs of these strides, aligned to 16 bytes.

        Nothing is needed of ``mask_and_bias``, in which there are sinks at most.
        """
        if self.device.index != current_device():
            with torch.cuda.device(self.device):
                return self(query, key, value, out, logsumexp, grad_out, grad_logsumexp, packing)
        dq, dk, dv = [query.new_empty_strided(*like) for like in self.gradients]
        shared = query.new_empty(self.shared, dtype=torch.float32)
        statistics = shared.data_ptr()
        dq_sum, do = statistics + self.statistics, grad_out.data_ptr()
        dl = () if grad_logsumexp is None else (grad_logsumexp.data_ptr(),)
        turns: list[int] = []
        if self.turns:
            counters = query.new_zeros(self.turns, dtype=torch.int32)
            turns = [counters.data_ptr()]
        of_queries: tuple[int, ...] = ()
        of_keys: tuple[int, ...] = ()
        if packing is not None and self.query_tiles is not None and self.key_tiles is not None:
            tables = [self.query_tiles(packing)]
            if self.key_tiles is not self.query_tiles:
                tables.append(self.key_tiles(packing))
            of_queries, of_keys = (tables[0].data_ptr(),), (tables[-1].data_ptr(),)
        self.preprocess(
            (out.data_ptr(), do, logsumexp.data_ptr(), *dl, statistics, dq_sum, *of_queries)
        )
        inputs = (query.data_ptr(), key.data_ptr(), value.data_ptr())
        self.main((*inputs, do, statistics, dq_sum, dk.data_ptr(), dv.data_ptr(), *of_keys, *turns))
        self.postprocess((dq_sum, dq.data_ptr(), *of_queries))
        return dq, dk, dv


def hopper_backward_call(
    tensors: Sequence[Tensor],
    grad_logsumexp: Tensor | None,
    options: AttentionOptions,
    packing: Packing | None = None,
) -> HopperBackwardCall:
    """The call for Q, K, V, O and dO of these shapes, strides and types."""
    query, key, value, *_ = tensors
    device, dtype = query.device, query.dtype
    shapes = (query.shape, key.shape, value.shape)
    strides = tuple([x.stride() for x in tensors])
    grad_logsumexp_stride = None if grad_logsumexp is None else grad_logsumexp.stride()
    sizes = None if packing is None else packing.sizes
    equal = packing is not None and packing.has_equal_lengths
    options = without_offset(options, equal)
    (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, _), (*_, value_dim) = shapes
    q_stride, k_stride, v_stride, o_stride, do_stride = strides
    gradients = [
        empty_output(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), shape[3])
        for shape, stride in zip(shapes, strides, strict=False)
    ]
    dq_stride, dk_stride, dv_stride = (x.stride() for x in gradients)
    width, values = forward_widths((head_dim, value_dim))
    kernel, loaded = KERNELS[width]
    config = backward_config((head_dim, value_dim), options)
    queries, keys = config.queries, config.keys
    packed = sizes is not None
    if sizes is None:
        query_tiles = key_tiles = None
        rows = -(-n_queries // queries) * queries * batch * heads
        programs = (rows // ROWS, -(-n_keys // keys) * batch * kv_heads)
    else:
        sequences, _, _ = sizes
        query_tiles = packed_tiles(
            n_queries, sequences, rows=queries, of_keys=False, heads=heads, group=1
        )
        # These kernels take heads one by one: with equal lengths and tiles, both tables are equal.
        key_tiles = query_tiles
        if not equal or queries != keys:
            key_tiles = packed_tiles(
                n_keys, sequences, rows=keys, of_keys=True, heads=kv_heads, group=1
            )
        rows = (n_queries // queries + sequences) * queries * heads
        programs = (query_tiles.most * heads * queries // ROWS, key_tiles.most * kv_heads)
    columns, softcap = STATISTICS.value, options.softcap
    sum_width = width if width <= 128 else 64  # of a block of the sum; blocks lie side by side
    numbers = {"N_QUERIES": n_queries, "N_PADDED": rows // (batch * heads), "N_HEADS": heads}
    table = torch.int32 if packed else None
    shape = {
        "ROWS": ROWS,
        "PACKED": packed,
        "FIELDS": FIELDS.value,
        "QUERIES": queries,
        "SUM_PARTS": width // sum_width,
    }
    has_dl = grad_logsumexp_stride is not None

    # Of packed sequences the kernel itself adds the difference of lengths.
    offset, band = edges(0, 0, options) if packed else edges(n_queries, n_keys, options)
    map_of = packed_tile_map if packed else tile_map

    def stride_div8(stride: Strides) -> list[int]:
        return [s // 8 for s in stride[:3]]

    fp32 = torch.float32
    preprocess = FastLaunch(
        preprocess_kernel,
        programs[0],
        [dtype, dtype, fp32, fp32 if has_dl else None, torch.bfloat16, fp32, table],
        {
            **stride_numbers(
                o=stride_div8(o_stride),
                do=stride_div8(do_stride),
                dl=grad_logsumexp_stride or (0, 0, 0),
            ),
            **numbers,
            "D_DIV8": value_dim // 8,
            "factor": -1.0 / (options.scale if softcap is None else softcap),
        },
        {
            **shape,
            "WIDTH": values,
            "NARROW": value_dim < values,
            "SUM_WIDTH": sum_width,
            "HAS_DL": has_dl,
        },
    )
    postprocess = FastLaunch(
        postprocess_kernel,
        programs[0],
        [fp32, dtype, table],
        {
            **stride_numbers(q=stride_div8(dq_stride)),
            **numbers,
            "D_DIV8": head_dim // 8,
            "scale": options.scale,
        },
        {**shape, "WIDTH": sum_width, "NARROW": head_dim < width},
    )
    narrow = {"COLUMNS": columns_in_use(head_dim, width)} if width <= 128 else {}
    main = FastLaunch(
        kernel,
        programs[1],
        [
            map_of(shapes[0], q_stride, [1, 1, queries, loaded], dtype),
            map_of(shapes[1], k_stride, [1, 1, keys, loaded], dtype),
            map_of(shapes[2], v_stride, [1, 1, keys, values], dtype),
            map_of((batch, heads, n_queries, value_dim), do_stride, [1, 1, queries, values], dtype),
            tile_map([rows, columns], [columns, 1], [queries, columns], torch.bfloat16),
            fp32,
            map_of(shapes[1], dk_stride, [1, 1, OWN.value, loaded], dtype),
            map_of(shapes[2], dv_stride, [1, 1, OWN.value, values], dtype),
            table,
            torch.int32 if options.deterministic else None,
        ],
        {
            "N_QUERIES": n_queries,
            "N_KEYS": n_keys,
            "N_KV_HEADS": kv_heads,
            "HEADS_PER_KV": heads // kv_heads,
            "offset": offset,
            "band": band,
            "scale": options.scale,
            "scale_log2": (options.scale if softcap is None else softcap) * LOG2_E,
            "tanh_scale": None if softcap is None else options.scale / softcap,
        },
        {
            **narrow,
            "RAGGED": packed or n_keys % keys != 0,
            "is_causal": options.band[1] is not None,
            "HAS_LEFT": options.band[0] is not None,
            "PACKED": packed,
            "BOTTOM_RIGHT": packed and options.bottom_right,
            "ORDERED": options.deterministic,
        },
    )
    return HopperBackwardCall(
        preprocess=preprocess,
        main=main,
        postprocess=postprocess,
        device=device,
        gradients=[(x.shape, x.stride()) for x in gradients],
        statistics=rows * columns * 2,
        shared=rows * (columns // 2 + width),
        query_tiles=query_tiles,
        key_tiles=key_tiles,
        turns=rows // queries * 2 if options.deterministic else 0,
    )
