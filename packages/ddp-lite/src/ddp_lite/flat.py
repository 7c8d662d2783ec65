"""Step 2: all gradients in one flat tensor, one all-reduce, after backward.

The fixed cost of a collective is paid once (once per dtype), and large messages use the whole
bandwidth. The price is a copy, and still nothing overlaps with the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddp_lite.base import DataParallelBase
from ddp_lite.buckets import ParameterSpec, one_per_kind
from ddp_lite.reduction import FlatReduction, pack


class FlatDDP(DataParallelBase):
    """Averages all gradients of one dtype with a single all-reduce, after backward.

    The gradients become views of the flat tensor, which is allocated anew each step; while it is
    filled, gradients exist twice. See ``DataParallelBase`` for the arguments.
    """

    def _plan(self, specs: Sequence[ParameterSpec]) -> list[tuple[int, ...]]:
        return one_per_kind(specs)

    def _backward_ended(self) -> None:
        step = self._step
        for bucket in step.buckets:  # one for each dtype
            with step.taking(bucket) as (gradients, messages):
                flat = bucket.parameters[0].new_empty(bucket.numel)
                views = pack(bucket, gradients, flat)
                step.in_flight[bucket] = FlatReduction(self._average([flat, *messages]), views)
        for bucket in step.buckets:
            with step.waiting(bucket) as reduction:
                averages = reduction.wait()
            step.put_back(bucket, averages)

    def _explain_when(self) -> str:
        return "flattened, all at once after backward"
