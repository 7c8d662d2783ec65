"""The tiles of a packed batch, which a kernel finds on the device; see :mod:`schedule`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashattn_triton.hopper.launch import hopper_launch
from flashattn_triton.hopper.schedule import (
    FIELDS,
    SEQUENCES,
    most_tiles,
    packed_tiles_kernel,
)
from flashattn_triton.launch import Launch, Packing
from flashattn_triton.problem import Problem


def without_offset(problem: Problem, equal: bool) -> Problem:
    """The same problem if ``equal`` says that sequences have as many keys as queries.

    Their last query meets the last key on the diagonal that starts at the first of both.
    """
    if not equal or not problem.bottom_right:
        return problem
    return replace(problem, causal="top-left" if problem.causal == "bottom-right" else "none")


@dataclass(frozen=True, kw_only=True)
class PackedTiles:
    """The kernel that writes a packed batch's table of tiles. ``most``: how many there can be."""

    launch: Launch
    most: int

    def __call__(self, packing: Packing) -> Tensor:
        """The table, (1 + most, FIELDS) int32; its first element says how many tiles follow."""
        starts_q, starts_k = packing.cu_seqlens_q, packing.cu_seqlens_k
        table = starts_q.new_empty((1 + self.most) * FIELDS.value)
        self.launch(
            {
                "starts_q_ptr": starts_q.data_ptr(),
                "starts_k_ptr": starts_k.data_ptr(),
                "tiles_ptr": table.data_ptr(),
            }
        )
        return table


def packed_tiles(
    tokens: int, sequences: int, *, rows: int, of_keys: bool, heads: int, group: int
) -> PackedTiles:
    """The tiles of the queries, or of the keys, of one kind of packed batch.

    Args:
        tokens: of all sequences.
        sequences: how many there are.
        rows: tokens of a tile.
        of_keys: whether tiles are of keys.
        heads: how many there are.
        group: how many tiles of one sequence are computed at the same time, see
            :func:`~flashattn_triton.hopper.schedule.packed_tiles_kernel`.
    """
    launch = hopper_launch(
        packed_tiles_kernel,
        -(-sequences // SEQUENCES),
        {"starts_q_ptr": torch.int32, "starts_k_ptr": torch.int32, "tiles_ptr": torch.int32},
        {"N_SEQUENCES": sequences, "N_HEADS": heads, "GROUP": group},
        {
            "ROWS_PER_TILE": rows,
            "OF_KEYS": of_keys,
            "FIELDS": FIELDS.value,
            "SEQUENCES": SEQUENCES,
        },
    )
    return PackedTiles(launch=launch, most=most_tiles(tokens, sequences, rows))
