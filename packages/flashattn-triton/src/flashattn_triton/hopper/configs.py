"""Kernel shapes of the Hopper tier, and what its compile test allows them to spill. See LOG.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flashattn_triton.problem import Problem


@dataclass(frozen=True, kw_only=True)
class ForwardShape:
    """The part of the forward kernel's shape that it is compiled for, whatever the problem.

    consumers: warp groups of 4 warps, each with 64 rows of queries.
    stages: tiles of K and of V that are in shared memory at a time.
    registers: of a consumer's thread.
    parts: of equal width, into which tiles of Q and K are cut; widths of parts are powers of two.
    q_slots: 2, so that the next tile of Q is loaded ahead, or 1.
    over_queries: the output takes the place of Q in shared memory. With two slots, one is free for
        another tile only when the next tile has begun, which is too late in short sequences.
    in_order: P·V of a tile is added before the next tile's scores, not beside its softmax.
    products_first: a step's softmax begins when both its products are complete; the tensor cores
        have those of other consumers then.
    """

    consumers: int
    stages: int
    registers: int
    parts: int = 1
    q_slots: int = 2
    over_queries: bool = False
    in_order: bool = False
    products_first: bool = False


@dataclass(frozen=True, kw_only=True)
class ForwardConfig(ForwardShape):
    """The forward kernel's shape, and how its programs go through the tiles.

    keys: per tile.
    halves: of a tile on an aligned diagonal, the first of two consumers computes the half that its
        queries see.
    rounds: of all programs on one group of heads, of packed sequences and under a window: with few,
        K and V of a group stay in L2. 0 means one head at a time.
    head_cost: of a dense batch under a causal mask, see ``balance.py``.
    spills: bytes that one thread may spill, as ptxas counts them (stores and loads).
    """

    keys: int
    halves: bool = False
    rounds: int = 0
    head_cost: float = 0.003
    spills: int = 0

    @property
    def queries(self) -> int:
        """Rows of one program."""
        return 64 * self.consumers


@dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """The backward kernel's shape: two consumers, two stages, 240 registers.

    queries: per step, so many that a consumer's half of a tile of dQ is 64 x 64; or, where dQ has a
        pass of its own, of a program there.
    spills: bytes that one thread may spill, as ptxas counts them (stores and loads).
    keys: of a program. Consumers own 64 of 128; of 64, one computes dV and the other dK.
    """

    queries: int
    spills: int
    keys: int = 128

    @property
    def two_passes(self) -> bool:
        """Whether dQ has a pass of its own, and every sum one order."""
        return self.keys == 64


# With 240 registers for each consumer the producer has 24, with 232 it has 40 and spills nothing.
_TWO = ForwardConfig(consumers=2, keys=128, stages=2, registers=232)
_TWO_64 = replace(_TWO, registers=240)  # of the time with 232, 512 tokens take 0.98
_THREE = replace(_TWO, consumers=3, registers=160, products_first=True, head_cost=0.001)
# One consumer's softmax beside two others' products, not beside its own.
_IN_ORDER = replace(_THREE, products_first=False, in_order=True, over_queries=True)
# 192 columns of Q and K, 128 of V.
_NARROW_VALUES = replace(_TWO, parts=3, q_slots=1, over_queries=True, head_cost=0.004)
_WIDE = replace(_TWO, keys=64, q_slots=1, over_queries=True, head_cost=0.004)
# Tiles of 128 of so many rows of queries, over all heads, run at once on 132 SMs. The longest tile
# then decides, and a tile of 192 queries takes longer.
ROWS_AT_ONCE = 132 * 128
# Keys: columns in use of a tile (96 is also 80), whether there is a causal mask. Rows: up to how
# many queries, which shape. Tiles of 128 queries leave less of the last tile empty than of 192.
FORWARD: dict[tuple[int, bool], tuple[tuple[float, ForwardConfig], ...]] = {
    (64, True): (
        (1024, replace(_TWO_64, rounds=2, halves=True, head_cost=0.001, spills=12)),
        (math.inf, replace(_THREE, rounds=8)),
    ),
    (64, False): ((1024, _TWO_64), (math.inf, _THREE)),
    (96, True): (
        (2048, replace(_TWO, rounds=2)),
        (math.inf, replace(_IN_ORDER, rounds=4)),
    ),
    (96, False): ((1024, _TWO), (math.inf, _IN_ORDER)),
    (128, True): ((2048, replace(_TWO, rounds=2)), (math.inf, replace(_TWO, rounds=4))),
    (128, False): ((2048, _TWO), (math.inf, replace(_TWO, over_queries=True))),
    (192, True): ((math.inf, replace(_NARROW_VALUES, rounds=4)),),
    (192, False): ((math.inf, _NARROW_VALUES),),
    (256, True): ((math.inf, replace(_WIDE, rounds=4, spills=12)),),
    (256, False): ((math.inf, replace(_WIDE, spills=12)),),
}
# Keys: width of tiles, whether there is a causal mask.
BACKWARD = {
    (64, True): BackwardConfig(queries=128, spills=100),
    (64, False): BackwardConfig(queries=128, spills=48),
    (128, True): BackwardConfig(queries=64, spills=0),
    (128, False): BackwardConfig(queries=64, spills=0),
    # Queries are computed in halves, dK and dV take two thirds of the registers.
    (192, True): BackwardConfig(queries=64, spills=648),
    (192, False): BackwardConfig(queries=64, spills=148),
    (256, True): BackwardConfig(queries=128, spills=0, keys=64),
    (256, False): BackwardConfig(queries=128, spills=0, keys=64),
}
# Where a window has a left edge, whatever the mask. Keys: width of tiles.
FORWARD_WINDOW = {
    64: replace(_TWO_64, rounds=2, products_first=True, spills=108),
    128: replace(_TWO, rounds=2, spills=88),
    192: replace(_NARROW_VALUES, rounds=2, spills=196),
    256: replace(_WIDE, rounds=2, registers=240, spills=136),  # with 232 consumers spill 280
}
BACKWARD_WINDOW = {
    64: BackwardConfig(queries=128, spills=120),
    128: BackwardConfig(queries=64, spills=0),
    192: BackwardConfig(queries=64, spills=624),
    256: BackwardConfig(queries=128, spills=0, keys=64),
}


def columns_in_use(head_dim: int, width: int) -> int:
    """Columns of a tile that are multiplied. The others are zeros, or hold no result."""
    if width == 128 and head_dim <= 96:
        return 80 if head_dim <= 80 else 96
    return width


def forward_widths(head_dims: tuple[int, int]) -> tuple[int, int]:
    """Columns of tiles of Q and K, and of V and the output; the TMA fills up zeros."""
    head_dim, value_dim = head_dims
    if max(head_dims) <= 128:
        return (64, 64) if max(head_dims) <= 64 else (128, 128)
    return (192, 128) if head_dim <= 192 and value_dim <= 128 else (256, 256)


def forward_config(
    head_dims: tuple[int, int], n_queries: int, problem: Problem, n_rows: float = math.inf
) -> ForwardConfig:
    """The shipped table's entry. ``n_rows``: of queries, over all heads and batch elements."""
    left, right = problem.band
    width, _ = forward_widths(head_dims)
    if left is not None:
        return FORWARD_WINDOW[width]
    in_use = columns_in_use(max(head_dims), width)
    rows = FORWARD[in_use if in_use == width else 96, right is not None]
    return next(config for n, config in rows if n_queries <= n or n_rows <= ROWS_AT_ONCE)


def backward_config(head_dims: tuple[int, int], problem: Problem) -> BackwardConfig:
    """The shipped table's entry."""
    left, right = problem.band
    width, _ = forward_widths(head_dims)
    if left is not None:
        return BACKWARD_WINDOW[width]
    return BACKWARD[width, right is not None]
