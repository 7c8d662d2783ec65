"""Step 1: one all-reduce per parameter, after backward.

Nothing is hidden: each all-reduce waits for the one before, and all of them for the backward
pass. It pays the fixed cost of a collective once per parameter. It is the oracle of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp_lite.base import DataParallelBase
from ddp_lite.buckets import Bucket, one_per_parameter
from ddp_lite.reduction import Reduction


class NaiveDDP(DataParallelBase):
    """Averages gradients one parameter at a time, after backward.

    See ``DataParallelBase`` for the arguments.
    """

    def _plan(self) -> list[tuple[int, ...]]:
        return one_per_parameter(self._specs)

    def _reduce(
        self, bucket: Bucket, gradients: Sequence[Tensor | None], extra: Sequence[Tensor]
    ) -> Reduction:
        reduction = super()._reduce(bucket, gradients, extra)
        reduction.wait()  # before the next one starts
        return reduction
