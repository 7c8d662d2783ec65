"""The backward pass on sm_90: what its three kernels are launched with, found out once per kind."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flashattn_triton.hopper import forward
from flashattn_triton.hopper.backward_common import OWN, STATISTICS, BackwardOptions
from flashattn_triton.hopper.backward_kernel import hopper_backward_kernel
from flashattn_triton.hopper.backward_wide import wide_backward_kernel
from flashattn_triton.hopper.configs import backward_config, columns_in_use, forward_widths
from flashattn_triton.hopper.key_pass import TILE, key_pass_kernel
from flashattn_triton.hopper.launch import (
    PackedTiles,
    edges,
    hopper_launch,
    tile_map,
    without_offset,
)
from flashattn_triton.hopper.preprocess import ROWS, postprocess_kernel, preprocess_kernel
from flashattn_triton.hopper.query_pass import query_pass_kernel
from flashattn_triton.hopper.schedule import FIELDS, RINGS
from flashattn_triton.launch import (
    BackwardTensors,
    Layout,
    Strides,
    allocator,
    current_device,
    in_layout,
    planned_output,
    stride_numbers,
    tma_refusal,
)
from flashattn_triton.mask_and_bias import NOTHING, Given
from flashattn_triton.problem import Problem
from flashattn_triton.triton_versions import Parameter

# Up to so many bytes, a GPU writes a whole tensor in less time than a view of it takes the host.
_SMALL_COPY = 2**20
# By the width of tiles of Q and K: the kernel, and their columns in one load.
KERNELS: dict[int, tuple[Any, int]] = {
    64: (hopper_backward_kernel, 64),
    128: (hopper_backward_kernel, 128),
    192: (wide_backward_kernel, 64),
    256: (key_pass_kernel, 256),
}


# Shape and strides of what is copied of a tensor; an empty tuple stands for all of it.
Part = tuple[tuple[int, ...], Strides] | tuple[()]


def copied_part(x: Tensor, *, may_repeat: bool, viewed: bool) -> tuple[Part | None, Strides]:
    """What must be copied of a (B, H, N, D) tensor for the TMA to read it, and the copy's strides.

    Args:
        x: the tensor.
        may_repeat: whether the strides of batch and heads may be 0, as those of a sum's gradient
            are. One head is then copied for all that are the same, if there are many.
        viewed: whether launches get tensors in another layout, of which ``x`` is a view.

    Returns:
        None if nothing must be copied, and the strides with which the tensor or its copy is read.
    """
    shape, strides = tuple(x.shape), x.stride()
    own = shape
    if may_repeat:
        own = tuple([1 if i < 2 and stride == 0 else shape[i] for i, stride in enumerate(strides)])
    # Strides are counted in units of 8 elements, also those of an output in fp32.
    if tma_refusal("", torch.Size(own), strides, x.data_ptr() % 16, itemsize=2) is None:
        return None, strides
    if not viewed and (own == shape or x.numel() * x.element_size() <= _SMALL_COPY):
        return (), torch.empty(shape, device="meta").stride()
    copy = torch.empty(own, device="meta").stride()
    return (own, strides), tuple(
        [0 if n < whole else stride for n, whole, stride in zip(own, shape, copy, strict=True)]
    )


def copy_of(x: Tensor, part: Part) -> Tensor:
    """A contiguous copy of a part of ``x``; see :func:`copied_part`."""
    return (x.as_strided(*part) if part else x).clone(memory_format=torch.contiguous_format)


class HopperBackwardCall:
    """The backward kernels on one kind of input.

    A call returns dQ, dK and dV in the inputs' shapes and dtype, or adds them to fp32 tensors with
    the strides of ``into`` (:func:`can_add`). dQ is accumulated in fp32; in any order, unless
    ``problem`` asks for deterministic gradients, or dQ has a pass of its own.

    ``tensors`` may have any strides, and are copied where the TMA cannot follow them; what is the
    same for all heads, as the gradient of a sum is, once.
    """

    def __init__(
        self,
        tensors: BackwardTensors,
        problem: Problem,
        given: Given = NOTHING,
        into: Sequence[Tensor] = (),
    ) -> None:
        query, key, value, out, _, grad_out, grad_logsumexp = tensors
        device, dtype = query.device, query.dtype
        shapes = (query.shape, key.shape, value.shape)
        packed = given.packed
        viewed = problem.layout != "bhsd"
        read = (query, key, value, out, grad_out)
        copies = [copied_part(x, may_repeat=i == 4, viewed=viewed) for i, x in enumerate(read)]
        # What is copied for the TMA of these; None if nothing is of any.
        copied = [part for part, _ in copies]
        self.copied = None if all(part is None for part in copied) else copied
        dl_stride = (0, 0, 0) if grad_logsumexp is None else grad_logsumexp.stride()
        problem = without_offset(problem, given)
        (batch, heads, n_queries, head_dim), (_, kv_heads, n_keys, _), (*_, value_dim) = shapes
        q_stride, k_stride, v_stride, o_stride, do_stride = (stride for _, stride in copies)
        dq, dk, dv = (planned_output(x, x.shape[3]) for x in (query, key, value))
        dq_stride, dk_stride, dv_stride = (x.stride() for x in into or (dq, dk, dv))
        width, values = forward_widths((head_dim, value_dim))
        kernel, loaded = KERNELS[width]
        config = backward_config((head_dim, value_dim), problem)
        queries, keys = config.queries, config.keys
        two_passes = config.two_passes
        step = TILE.value if two_passes else queries
        ordered = problem.deterministic and not two_passes
        persistent = kernel is hopper_backward_kernel
        self.tiles: PackedTiles | None = None
        if not packed:
            rows = -(-n_queries // queries) * queries * batch * heads
            programs = (rows // ROWS, -(-n_keys // keys) * batch * kv_heads)
        else:
            self.tiles = PackedTiles(
                given, (n_queries, n_keys), (queries, keys), heads=heads, of_keys=True
            )
            rows = self.tiles.most[0] * queries * heads
            programs = (rows // ROWS, self.tiles.most[1] * kv_heads)
        columns, softcap = STATISTICS.value, problem.softcap
        sum_width = width if width <= 128 else 64  # of a block of the sum; blocks lie side by side
        sum_parts = 0 if two_passes else width // sum_width
        numbers = {"N_QUERIES": n_queries, "N_PADDED": rows // (batch * heads), "N_HEADS": heads}
        table = torch.int32 if packed else None
        shape = {
            "ROWS": ROWS,
            "PACKED": packed,
            "FIELDS": FIELDS.value,
            "QUERIES": queries,
            "SUM_PARTS": sum_parts,
        }
        has_dl = grad_logsumexp is not None

        # Of packed sequences the kernel itself adds the difference of lengths.
        offset, band = edges(0, 0, problem) if packed else edges(n_queries, n_keys, problem)
        map_of = functools.partial(tile_map, dtype=dtype, packed=packed)

        def stride_div8(stride: Strides) -> list[int]:
            return [s // 8 for s in stride[:3]]

        fp32 = torch.float32
        left, right = problem.band
        # Under a causal mask the first of few tiles of keys is all that a good part of the queries
        # see. In longer sequences zeros cost less than the choice in each step.
        short = not packed and (left, right) == (None, 0) and n_keys <= 1024
        stores = persistent and (ordered or short)
        self.preprocess = hopper_launch(
            preprocess_kernel,
            programs[0],
            {
                "O_ptr": out.dtype,
                "dO_ptr": dtype,
                "L_ptr": fp32,
                "dL_ptr": fp32 if has_dl else None,
                "statistics_ptr": torch.bfloat16,
                "dq_ptr": fp32 if sum_parts else None,
                "counters_ptr": torch.int32,
                "tiles_ptr": table,
            },
            {
                **stride_numbers(o=stride_div8(o_stride), do=stride_div8(do_stride), dl=dl_stride),
                **numbers,
                "N_KEYS": n_keys,
                "offset": offset,
                "band": band,
                "D_DIV8": value_dim // 8,
                "factor": -1.0 / (problem.scale if softcap is None else softcap),
            },
            {
                **shape,
                "WIDTH": values,
                "NARROW": value_dim < values,
                "SUM_WIDTH": sum_width,
                "HAS_DL": has_dl,
                "ORDERED": ordered,
                "STORES": stores,
                "EARLY": two_passes,
                "KEYS": keys,
                "IS_CAUSAL": stores and right is not None,
                "HAS_LEFT": stores and left is not None,
                "BOTTOM_RIGHT": stores and packed and problem.bottom_right,
            },
        )
        dk_out: Parameter = fp32
        dv_out: Parameter = fp32
        of_sums: dict[str, int | None] = {}
        if persistent:  # the one that adds to sums
            of_sums |= stride_numbers(dk=stride_div8(dk_stride), dv=stride_div8(dv_stride))
            of_sums["D_DIV8"] = head_dim // 8
        if not into:
            of_sums = dict.fromkeys(of_sums)
            dk_out = map_of(shapes[1], dk_stride, [1, 1, OWN.value, loaded])
            dv_out = map_of(shapes[2], dv_stride, [1, 1, OWN.value, values])
        most_in_ring = at_once = 0
        # Programs of neighbouring tiles of keys begin one tile of queries apart, so that each adds
        # a step after the one that it waits for. With more heads together it begins later.
        close = ordered and queries == keys
        if ordered and left is right is None:
            most_in_ring = forward.multiprocessors(device) // RINGS.value
        # Of packed sequences, the longest come first, and short ones end the launch.
        elif right is not None and (left is None or close) and not (ordered and packed):
            at_once = forward.multiprocessors(device) * (2 if close else 1)
        maps: dict[str, Parameter] = {
            "q_desc": map_of(shapes[0], q_stride, [1, 1, step, loaded]),
            "k_desc": map_of(shapes[1], k_stride, [1, 1, keys, loaded]),
            "v_desc": map_of(shapes[2], v_stride, [1, 1, keys, values]),
            "do_desc": map_of(out.shape, do_stride, [1, 1, step, values]),
        }
        scales = {
            "scale": problem.scale,
            "scale_log2": (problem.scale if softcap is None else softcap) * forward.LOG2_E,
            "tanh_scale": None if softcap is None else problem.scale / softcap,
        }
        options = BackwardOptions(
            columns=columns_in_use(head_dim, width),
            padding=queries,
            ragged=packed or n_keys % keys != 0,
            is_causal=right is not None,
            has_left=left is not None,
            packed=packed,
            bottom_right=packed and problem.bottom_right,
            ordered=ordered,
            stores=stores,
            adds=bool(into),
            ring=most_in_ring,
            at_once=at_once,
        )
        statistics = tile_map([rows, columns], [columns, 1], [step, columns], torch.bfloat16)
        added: dict[str, Parameter] = {} if two_passes else {"dq_ptr": fp32}
        counters: dict[str, Parameter] = {}
        of_tiles: dict[str, int] = {}
        if persistent:  # programs go from tile to tile of keys
            counters["counters_ptr"] = torch.int32
            of_tiles["N_TILES"] = programs[1]
        elif not two_passes:
            counters["order_counters_ptr"] = torch.int32 if ordered else None
        few_registers = softcap is None  # with a soft-cap, kernels spill more that way
        self.main = hopper_launch(
            kernel,
            min(programs[1], forward.multiprocessors(device)) if persistent else programs[1],
            {
                **maps,
                "statistics_desc": statistics,
                **added,
                "dk_out": dk_out,
                "dv_out": dv_out,
                "key_tiles_ptr": table,
                **counters,
            },
            {
                "N_QUERIES": n_queries,
                "N_KEYS": n_keys,
                **of_tiles,
                "N_KV_HEADS": kv_heads,
                "HEADS_PER_KV": heads // kv_heads,
                "offset": offset,
                "band": band,
                **scales,
                **of_sums,
            },
            {"OPTIONS": options},
            few_registers=few_registers,
            early=two_passes,
        )
        if two_passes:
            tiles_of_head = -(-n_queries // queries)
            self.last = hopper_launch(
                query_pass_kernel,
                rows // queries,
                {
                    **maps,
                    "statistics_ptr": torch.bfloat16,
                    "dq_out": map_of(shapes[0], dq_stride, [1, 1, step, loaded]),
                    "tiles_ptr": table,
                },
                {
                    "N_TILES": rows // queries,
                    "N_QUERIES": n_queries,
                    "N_HEADS": heads,
                    "HEADS_PER_KV": heads // kv_heads,
                    # So many run at the same time.
                    "GROUP": max(1, forward.multiprocessors(device) // tiles_of_head),
                    "N_KEYS": n_keys,
                    "offset": offset,
                    "width": band,
                    **scales,
                },
                {"OPTIONS": options},
                few_registers=few_registers,
                # Without keys nothing is launched that has waited for preprocess_kernel.
                early=programs[1] > 0,
            )
        else:
            self.last = hopper_launch(
                postprocess_kernel,
                programs[0],
                {"dq_ptr": fp32, "dq_out": fp32 if into else dtype, "tiles_ptr": table},
                {
                    **stride_numbers(q=stride_div8(dq_stride)),
                    **numbers,
                    "D_DIV8": head_dim // 8,
                    "scale": problem.scale,
                },
                {**shape, "WIDTH": sum_width, "NARROW": head_dim < width, "ADDS": bool(into)},
            )
        self.device, self.allocate = device.index, allocator(device)
        self.gradients = [in_layout(x, problem.layout) for x in (dq, dk, dv)]
        # Memory that the kernels share: bytes of the statistics, then of the sum of dQ, counters.
        self.statistics = rows * columns * 2
        self.sum = rows * sum_parts * sum_width * 4
        order_counters = rows // queries if ordered else 0
        elements = (self.statistics + self.sum) // 4 + 1 + order_counters
        self.shared: Layout = ((elements,), (1,), fp32)

    def __call__(
        self,
        tensors: BackwardTensors,
        given: Given = NOTHING,
        into: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of inputs of these strides and alignments, added to ``into`` if given.

        Of ``given``, only the starts of sequences are needed: the logsumexp includes sinks.
        """
        if self.device != current_device():
            with torch.cuda.device(self.device):
                return self(tensors, given, into)
        query, key, value, out, logsumexp, grad_out, grad_logsumexp = tensors
        if self.copied is not None:
            query, key, value, out, grad_out = [
                x if part is None else copy_of(x, part)
                for x, part in zip((query, key, value, out, grad_out), self.copied, strict=True)
            ]
        allocate, (dq_layout, dk_layout, dv_layout) = self.allocate, self.gradients
        if into:
            dq, dk, dv = into
        else:
            dq, dk, dv = allocate(*dq_layout), allocate(*dk_layout), allocate(*dv_layout)
        shared = allocate(*self.shared)
        statistics, do = shared.data_ptr(), grad_out.data_ptr()
        addresses = {
            "q_desc": query.data_ptr(),
            "k_desc": key.data_ptr(),
            "v_desc": value.data_ptr(),
            "O_ptr": out.data_ptr(),
            "L_ptr": logsumexp.data_ptr(),
            "dO_ptr": do,
            "do_desc": do,
            "statistics_ptr": statistics,
            "statistics_desc": statistics,
            "dq_ptr": statistics + self.statistics,
            "counters_ptr": statistics + self.statistics + self.sum,
            "order_counters_ptr": statistics + self.statistics + self.sum + 4,
            "dq_out": dq.data_ptr(),
            "dk_out": dk.data_ptr(),
            "dv_out": dv.data_ptr(),
        }
        if grad_logsumexp is not None:
            addresses["dL_ptr"] = grad_logsumexp.data_ptr()
        if self.tiles is not None:
            table = self.tiles(given)
            addresses["tiles_ptr"] = table.data_ptr()
            addresses["key_tiles_ptr"] = table.data_ptr() + self.tiles.key_table
        self.preprocess(addresses)
        self.main(addresses)
        self.last(addresses)
        return dq, dk, dv


def can_add(head_dims: tuple[int, int], into: Sequence[Tensor]) -> bool:
    """Whether a kernel here adds gradients to these fp32 (B, H, N, D) views: to 128 columns."""
    aligned = all(
        x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(s % 8 == 0 for s in x.stride()[:3])
        for x in into
    )
    return aligned and forward_widths(head_dims)[0] <= 128
