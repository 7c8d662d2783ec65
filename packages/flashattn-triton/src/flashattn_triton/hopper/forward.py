"""The forward pass on sm_90: what its kernel is launched with, found out once per kind of input."""

from __future__ import annotations

import functools
from dataclasses import fields

import torch
from torch import Tensor

from flashattn_triton.hopper.balance import heads_at_a_time
from flashattn_triton.hopper.configs import (
    ForwardShape,
    columns_in_use,
    forward_config,
    forward_widths,
)
from flashattn_triton.hopper.forward_kernel import ROWS, ForwardOptions, hopper_forward_kernel
from flashattn_triton.hopper.launch import (
    PackedTiles,
    edges,
    hopper_launch,
    tile_map,
    without_offset,
)
from flashattn_triton.launch import (
    allocator,
    current_device,
    empty_row_statistic,
    in_layout,
    planned_output,
    stride_numbers,
)
from flashattn_triton.mask_and_bias import NOTHING, Given
from flashattn_triton.problem import Problem
from flashattn_triton.triton_versions import Parameter

LOG2_E = 1.4426950408889634


class HopperForwardCall:
    """The forward kernel on one kind of input: what its launch needs, found out once.

    It is planned for views (B, H, N_q, D), (B, G, N_k, D) and (B, G, N_k, E), which ``eligibility``
    has not refused, of a packed batch with B = 1; D and E are multiples of 8 up to 256. It takes
    tensors as callers have them; of ``given`` there are sinks and the starts of sequences at most.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        problem: Problem,
        given: Given = NOTHING,
    ) -> None:
        device, dtype, fp32 = query.device, query.dtype, torch.float32
        equal, packed, sinks = given.has_equal_lengths, given.packed, given.sinks
        problem = without_offset(problem, given)
        (batch, heads, n_queries, _), (_, kv_heads, n_keys, _) = query.shape, key.shape
        head_dims = (query.shape[3], value.shape[3])
        in_fp32 = problem.out_dtype is fp32
        out = planned_output(query, head_dims[1], problem.out_dtype)
        lse = empty_row_statistic(out)
        left, right = problem.band
        softcap = problem.softcap
        # Of packed sequences the kernel itself adds the difference of lengths.
        offset, width = edges(0, 0, problem) if packed else edges(n_queries, n_keys, problem)
        sequences, longest = batch, n_queries
        if packed:
            sequences, longest = given.sequences, problem.longest[0]
        alike = not packed or (equal and n_queries == sequences * longest)
        config = forward_config(head_dims, longest, problem, batch * heads * n_queries)
        programs = multiprocessors(device)
        tiles_of_head = max(1, -(-longest // config.queries))
        n_tiles = tiles_of_head * sequences * heads
        all_heads, group = sequences * heads, max(1, -(-config.rounds * programs // tiles_of_head))
        if 2 * all_heads < 3 * group:  # too few are left for a group of their own
            group = all_heads
        if right is not None and left is None and alike and n_tiles > programs:
            stops = (min(config.queries * (i + 1), longest) for i in range(tiles_of_head))
            seen = tuple(min(max(stop + offset, 1), n_keys) for stop in stops)
            head_cost = config.head_cost * kv_heads / heads
            group = heads_at_a_time(
                all_heads, seen, config.keys, programs, head_cost, heads if packed else None
            )
        self.tiles: PackedTiles | None = None
        if packed:
            self.tiles = PackedTiles(
                given, (n_queries, n_keys), (config.queries, config.keys),
                heads=heads, group=group * tiles_of_head if alike else config.rounds * programs,
            )  # fmt: skip
            n_tiles = self.tiles.most[0] * heads
        tile_columns, value_columns = forward_widths(head_dims)
        tile_columns //= config.parts
        numbers: dict[str, float | None] = {
            "N_TILES": n_tiles,
            "N_QUERIES": n_queries,
            "N_HEADS": heads,
            "HEADS_PER_KV": heads // kv_heads,
            "GROUP": group,
            "N_KEYS": n_keys,
            "offset": offset,
            "width": width,
            "scale_log2": (problem.scale if softcap is None else softcap) * LOG2_E,
            "tanh_scale": None if softcap is None else problem.scale / softcap,
        }
        options = ForwardOptions(
            **{shape.name: getattr(config, shape.name) for shape in fields(ForwardShape)},
            columns=columns_in_use(max(head_dims), tile_columns),
            negative=softcap is None and problem.scale < 0,
            shifted=offset != 0 or (packed and problem.bottom_right),
            halved=config.halves and offset == 0 and (equal if packed else n_keys >= n_queries),
            is_causal=right is not None,
            has_left=left is not None,
            packed=packed,
            bottom_right=packed and problem.bottom_right,
            has_sinks=sinks is not None,
            fp16=dtype is torch.float16,
            fp32_out=in_fp32,
        )
        map_of = functools.partial(tile_map, dtype=dtype, packed=packed)
        query_block, key_block = [1, 1, ROWS.value, tile_columns], [1, 1, config.keys, tile_columns]
        o_strides = stride_numbers(o=[stride // 8 for stride in out.stride()[:3]])
        of_rows = {**o_strides, "E_DIV8": head_dims[1] // 8}
        numbers |= of_rows if in_fp32 else dict.fromkeys(of_rows)
        parameters: dict[str, Parameter] = {
            "q_desc": map_of(query.shape, query.stride(), query_block),
            "k_desc": map_of(key.shape, key.stride(), key_block),
            "v_desc": map_of(value.shape, value.stride(), [1, 1, config.keys, value_columns]),
            # In the place of Q, if there is no other, it is as wide as a part of Q.
            "o_out": fp32 if in_fp32 else map_of(out.shape, out.stride(), query_block),
            "L_ptr": fp32,
            "tiles_ptr": torch.int32 if packed else None,
            "sinks_ptr": None if sinks is None else sinks.dtype,
        }
        programs = min(n_tiles, programs)
        constants = {"OPTIONS": options}
        self.launch = hopper_launch(hopper_forward_kernel, programs, parameters, numbers, constants)
        self.device, self.allocate = device.index, allocator(device)
        self.out = in_layout(out, problem.layout)
        self.logsumexp = in_layout(lse, problem.layout)

    def __call__(
        self, tensors: tuple[Tensor, Tensor, Tensor], given: Given = NOTHING
    ) -> tuple[Tensor, Tensor]:
        """Output and logsumexp."""
        if self.device != current_device():
            with torch.cuda.device(self.device):
                return self(tensors, given)
        query, key, value = tensors
        out, logsumexp = self.allocate(*self.out), self.allocate(*self.logsumexp)
        addresses = {
            "q_desc": query.data_ptr(),
            "k_desc": key.data_ptr(),
            "v_desc": value.data_ptr(),
            "o_out": out.data_ptr(),
            "L_ptr": logsumexp.data_ptr(),
        }
        if self.tiles is not None:
            table = self.tiles(given)
            addresses["tiles_ptr"] = table.data_ptr()
        if given.sinks is not None:
            addresses["sinks_ptr"] = given.sinks.data_ptr()
        self.launch(addresses)
        return out, logsumexp


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU: how many programs of these kernels run at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count
