"""Step 1: one all-reduce per parameter, after backward.

Nothing is hidden: each all-reduce waits for the one before, and all of them for the backward
pass. It pays the fixed cost of a collective once per parameter. It is the oracle of the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddp_lite.base import DataParallelBase
from ddp_lite.buckets import ParameterSpec, one_per_parameter
from ddp_lite.reduction import InPlaceReduction


class NaiveDDP(DataParallelBase):
    """Averages gradients one parameter at a time, after backward.

    See ``DataParallelBase`` for the arguments.
    """

    def _plan(self, specs: Sequence[ParameterSpec]) -> list[tuple[int, ...]]:
        return one_per_parameter(specs)

    def _backward_ended(self) -> None:
        step = self._step
        for bucket in step.buckets:
            with step.taking(bucket) as (gradients, messages):
                average = self._average
                step.in_flight[bucket] = InPlaceReduction(bucket, gradients, average, messages)
            with step.waiting(bucket) as reduction:  # before the next one starts
                averages = reduction.wait()
            step.put_back(bucket, averages)

    def _explain_when(self) -> str:
        return "one after another after backward"
