"""Step 3: one asynchronous all-reduce per parameter, during backward.

As soon as a gradient has been accumulated its reduction starts, and the backward pass of earlier
layers runs meanwhile. What stays exposed is what starts last, plus the fixed cost of as many
collectives as there are parameters.

Ranks may produce gradients in different orders, but collectives must be started in the same
order everywhere. So reductions start strictly in the plan's order: a gradient that arrives early
waits until those before it have been started.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddp_lite.base import DataParallelBase
from ddp_lite.buckets import Bucket, ParameterSpec, one_per_parameter
from ddp_lite.reduction import InPlaceReduction


class OverlapDDP(DataParallelBase):
    """Averages each gradient as soon as backward has produced it.

    See ``DataParallelBase`` for the arguments.
    """

    def _plan(self, specs: Sequence[ParameterSpec]) -> list[tuple[int, ...]]:
        return one_per_parameter(reversed(specs))  # backward meets the last registered ones first

    def _bucket_ready(self, bucket: Bucket) -> None:
        self._start(bucket)

    def _start(self, bucket: Bucket, again: bool = False) -> None:
        step = self._step
        with step.taking(bucket, again) as (gradients, messages):
            step.in_flight[bucket] = InPlaceReduction(bucket, gradients, self._average, messages)

    def _backward_ended(self) -> None:
        step = self._step
        for bucket in step.not_started():
            self._start(bucket)
        for bucket in step.late():
            # The earlier average joins the later gradient; averaging an average changes nothing.
            self._wait(bucket)
            self._start(bucket, again=True)
        for bucket in list(step.in_flight):
            self._wait(bucket)

    def _wait(self, bucket: Bucket) -> None:
        with self._step.waiting(bucket) as reduction:
            averages = reduction.wait()
        self._step.put_back(bucket, averages)

    def _explain_when(self) -> str:
        return "each started during backward, in reverse registration order"
