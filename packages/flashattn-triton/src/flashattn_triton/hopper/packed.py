"""The tiles of a packed batch, which a kernel finds on the device; see :mod:`schedule`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashattn_triton.hopper.launch import FastLaunch
from flashattn_triton.hopper.schedule import (
    FIELDS,
    SEQUENCES,
    most_tiles,
    packed_tiles_kernel,
)
from flashattn_triton.launch import Packing


@dataclass(frozen=True, kw_only=True)
class PackedTiles:
    """The kernel that writes a packed batch's table of tiles. ``most``: how many there can be."""

    launch: FastLaunch
    most: int

    def __call__(self, packing: Packing) -> Tensor:
        """The table, (1 + most, FIELDS) int32; its first element says how many tiles follow."""
        starts = packing.cu_seqlens_q, packing.cu_seqlens_k
        table = starts[0].new_empty((1 + self.most) * FIELDS.value)
        self.launch((starts[0].data_ptr(), starts[1].data_ptr(), table.data_ptr()))
        return table


def packed_tiles(
    sizes: tuple[int, int, int], *, rows: int, of_keys: bool, heads: int, group: int
) -> PackedTiles:
    """The tiles of the queries, or of the keys, of one kind of packed batch.

    Args:
        sizes: tokens, sequences, and the longest sequence.
        rows: tokens of a tile.
        of_keys: whether tiles are of keys.
        heads: how many there are.
        group: tiles that heads computed at the same time shall have together.
    """
    tokens, sequences, longest = sizes
    launch = FastLaunch(
        packed_tiles_kernel,
        -(-sequences // SEQUENCES),
        [torch.int32, torch.int32, torch.int32],
        {"N_SEQUENCES": sequences, "N_HEADS": heads, "GROUP": group},
        {
            "ROWS_PER_TILE": rows,
            "OF_KEYS": of_keys,
            "FIELDS": FIELDS.value,
            "SEQUENCES": SEQUENCES,
        },
    )
    return PackedTiles(launch=launch, most=most_tiles(tokens, sequences, longest, rows))
