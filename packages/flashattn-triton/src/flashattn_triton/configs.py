"""Tile sizes per GPU family, head_dim and dtype, and why they are what they are.

Nothing here looks at a GPU: the tables are indexed by what :func:`flashattn_triton.dispatch.choose`
finds out. ``python -m flashattn_triton.tune`` measures a table for another GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch


@dataclass(frozen=True)
class Tiles:
    """The shape of one kernel: rows of queries and of keys per tile, warps, pipeline stages.

    ``use_tma``: where strides allow it, what the kernel walks over is read as whole tiles by the
    TMA of sm_90 and later, and the program spends no instructions on addresses.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    use_tma: bool = False


KERNELS = ("forward", "key_pass", "query_pass", "fused")


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The shapes of all kernels for one kind of problem.

    ``forward``: a program owns query rows. ``key_pass``: a program owns keys and computes dK, dV.
    ``query_pass``: a program owns query rows and computes dQ. ``fused``: a program owns keys,
    computes dK, dV and adds its part of dQ to an fp32 buffer; None if the two passes are faster.
    ``tma_reduce``: it adds whole tiles with the TMA's reductions (sm_90 and later), not with atomic
    additions.
    """

    forward: Tiles
    key_pass: Tiles
    query_pass: Tiles
    fused: Tiles | None = None
    tma_reduce: bool = False

    def __post_init__(self) -> None:
        """Refuses what no kernel can be compiled with."""
        for kernel, tiles in self.kernels.items():
            if not isinstance(tiles, Tiles):
                raise TypeError(
                    f"tiling.{kernel} must be Tiles, but got {tiles!r}. Use Tiles(queries, keys, "
                    f"warps, stages)."
                )
            for name, least in (("queries", 16), ("keys", 16), ("warps", 1)):
                size = getattr(tiles, name)
                if not isinstance(size, int) or size < least or size & (size - 1):
                    raise ValueError(
                        f"tiling.{kernel}.{name} must be a power of two and at least {least}, but "
                        f"got {size!r}. Working shapes are in flashattn_triton.configs.TABLE."
                    )
            if not isinstance(tiles.stages, int) or tiles.stages < 1:
                raise ValueError(
                    f"tiling.{kernel}.stages must be an integer >= 1, but got {tiles.stages!r}. "
                    f"Use 1 for no pipeline."
                )

    @property
    def kernels(self) -> dict[str, Tiles]:
        """Shapes by the names of :data:`KERNELS`, of those that there are."""
        shapes = {name: getattr(self, name) for name in KERNELS}
        return {k: tiles for k, tiles in shapes.items() if k != "fused" or tiles is not None}

    def pack(self) -> list[int]:
        """As the flat list that the operators take; an absent ``fused`` is five zeros."""
        kernels = (self.forward, self.key_pass, self.query_pass, self.fused or Tiles(0, 0, 0, 0))
        return [*(int(n) for tiles in kernels for n in astuple(tiles)), int(self.tma_reduce)]

    @classmethod
    def unpack(cls, numbers: Sequence[int]) -> Tiling:
        """The tiling that :meth:`pack` wrote as numbers."""
        kernels = [(*numbers[i : i + 4], bool(numbers[i + 4])) for i in range(0, 20, 5)]
        return _tiling(*(x for x in kernels if any(x)), tma_reduce=bool(numbers[20]))


def _tiling(*kernels: tuple[int, ...], tma_reduce: bool = False) -> Tiling:
    """Shapes of the forward kernel, the key pass, the query pass, and the fused form if any."""
    tiles = dict(zip(KERNELS, (Tiles(*numbers) for numbers in kernels), strict=False))  # type: ignore[arg-type]
    return Tiling(**tiles, tma_reduce=tma_reduce)


# Keys: KB of shared memory of one block, widest head_dim, bytes of an element. Shapes are
# (queries, keys, warps, stages) of forward, key pass, query pass, fused; a fifth element _TMA means
# that the TMA loads the kernel's tiles where strides allow it (Tiles.use_tma).
#
# sm_90 rows are measured (LOG.md). What they have in common: 64 rows for each warp group of 4 warps
# (64 rows with 8 warps would be computed twice, and Triton 3.6 then reads past the operand), and
# several blocks per multiprocessor where registers allow, because within a block softmax and matrix
# products take turns. Half types take two passes backward: the additions to dQ of the fused form
# take longer than two more products. fp32 has dearer products, so there it is the other way round;
# and fp32 keeps to 32 rows, which leaves wgmma aside: its operands are split into bf16 parts in
# shared memory that Triton 3.6 reuses while wgmma still reads them.
# Rows for other GPUs are chosen from compiled registers and shared memory, and not measured. Warps
# split a tile of scores by rows of 16 or by columns of 8; more warps than that repeat each other's
# work, so tiles of 32 by 32 have 4 warps where registers allow.
_LARGE = 220  # sm_90, sm_100
_MEDIUM = 160  # sm_80
_SMALL = 96  # sm_86, sm_89, sm_120
_TMA = True
# Above head_dim 512, where no kernel computes gradients.
_NO_BACKWARD = ((16, 16, 8, 1), (16, 16, 8, 1))

TABLE = {
    (_LARGE, 64, 2): _tiling((64, 128, 4, 2, _TMA), (64, 64, 4, 3, _TMA), (64, 64, 4, 3, _TMA)),
    (_LARGE, 128, 2): _tiling((64, 64, 4, 3, _TMA), (32, 64, 4, 3, _TMA), (128, 64, 8, 3, _TMA)),
    (_LARGE, 256, 2): _tiling((128, 64, 8, 2, _TMA), (32, 32, 4, 2), (64, 32, 4, 3, _TMA)),
    (_LARGE, 64, 4): _tiling(
        (32, 128, 4, 2, _TMA), (32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 3, _TMA)
    ),
    (_LARGE, 128, 4): _tiling(
        (32, 64, 4, 2, _TMA), (32, 32, 4, 2), (32, 32, 8, 2), (32, 32, 4, 1, _TMA), tma_reduce=True
    ),
    (_LARGE, 256, 4): _tiling(
        (32, 64, 8, 2, _TMA),
        (32, 16, 4, 1, _TMA),
        (32, 64, 8, 1, _TMA),
        (32, 16, 4, 1, _TMA),
        tma_reduce=True,
    ),
    (_LARGE, 512, 2): _tiling((32, 32, 8, 2), (16, 32, 8, 2), (32, 32, 8, 2)),
    (_LARGE, 576, 2): _tiling((16, 16, 8, 2), *_NO_BACKWARD),
    (_MEDIUM, 64, 2): _tiling((128, 64, 8, 3), (64, 128, 8, 2), (64, 64, 4, 2)),
    (_MEDIUM, 128, 2): _tiling((128, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2)),
    (_MEDIUM, 256, 2): _tiling((64, 32, 8, 2), (32, 64, 8, 2), (64, 32, 8, 2)),
    (_MEDIUM, 512, 2): _tiling((32, 32, 8, 2), (16, 32, 8, 2), (32, 32, 8, 2)),
    (_MEDIUM, 576, 2): _tiling((16, 16, 8, 2), *_NO_BACKWARD),
    (_MEDIUM, 64, 4): _tiling((32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    (_MEDIUM, 128, 4): _tiling((32, 32, 4, 2), (16, 32, 4, 2), (32, 32, 8, 2)),
    (_MEDIUM, 256, 4): _tiling((32, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    (_SMALL, 64, 2): _tiling((64, 64, 4, 3), (32, 64, 4, 2), (64, 32, 4, 2)),
    (_SMALL, 128, 2): _tiling((64, 32, 4, 2), (32, 64, 4, 2), (64, 32, 4, 2)),
    (_SMALL, 256, 2): _tiling((64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 1)),
    (_SMALL, 512, 2): _tiling((32, 32, 8, 1), (16, 16, 8, 1), (32, 16, 8, 1)),
    (_SMALL, 576, 2): _tiling((16, 16, 8, 1), *_NO_BACKWARD),
    (_SMALL, 64, 4): _tiling((32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    (_SMALL, 128, 4): _tiling((32, 32, 4, 2), (32, 32, 8, 1), (32, 32, 8, 1)),
    (_SMALL, 256, 4): _tiling((32, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}
# Forward with a bias, whose tiles need registers, room in shared memory and L2's bandwidth as well:
# the fastest of seven and of six shapes in turns (tools/compare_tiles.py).
FORWARD_WITH_BIAS = {
    (_LARGE, 64, 2): Tiles(64, 64, 4, 2, _TMA),
    (_LARGE, 128, 2): Tiles(128, 64, 8, 3, _TMA),
}
# What is left when less shared memory than in any row is to be had.
SMALLEST = _tiling((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1))
# The interpreter pays per operation, not per element; small problems still make several tiles.
INTERPRETER = _tiling((64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1))


def tiling_for(
    shared_memory: int, head_dim: int, dtype: torch.dtype, *, bias: bool = False
) -> Tiling:
    """The tiles that the package ships for a problem and a GPU's shared memory.

    Args:
        shared_memory: bytes that one block may have.
        head_dim: the larger of D and E.
        dtype: of the inputs.
        bias: whether there is an additive bias.
    """
    for kilobytes in (_LARGE, _MEDIUM, _SMALL):
        if shared_memory >= kilobytes * 1024:
            width = next(width for width in (64, 128, 256, 512, 576) if head_dim <= width)
            kind = (kilobytes, width, dtype.itemsize)
            tiling = TABLE[kind]
            if bias and kind in FORWARD_WITH_BIAS:
                tiling = replace(tiling, forward=FORWARD_WITH_BIAS[kind])
            return tiling
    return SMALLEST
