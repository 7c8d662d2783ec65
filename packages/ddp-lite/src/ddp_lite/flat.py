"""Step 2: all gradients in one flat tensor, one all-reduce, after backward.

The fixed cost of a collective is paid once (once per dtype), and large messages use the whole
bandwidth. The price is a copy, and still nothing overlaps with the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp_lite.base import DataParallelBase
from ddp_lite.buckets import Bucket, one_per_kind
from ddp_lite.reduction import FlatReduction, Reduction


class FlatDDP(DataParallelBase):
    """Averages all gradients of one dtype with a single all-reduce, after backward.

    The gradients become views of the flat tensor, which is allocated anew each step; while it is
    filled, gradients exist twice. See ``DataParallelBase`` for the arguments.
    """

    def _plan(self) -> list[tuple[int, ...]]:
        return one_per_kind(self._specs)

    def _reduce(
        self, bucket: Bucket, gradients: Sequence[Tensor | None], extra: Sequence[Tensor]
    ) -> Reduction:
        return FlatReduction(bucket, gradients, lambda flat: self._average([flat, *extra]))

    def _explain_when(self) -> str:
        return "flattened, all at once after backward"
