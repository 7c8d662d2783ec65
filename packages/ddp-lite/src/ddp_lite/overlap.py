"""Step 3: one asynchronous all-reduce per parameter, during backward.

As soon as a gradient has been accumulated its reduction starts, and the backward pass of earlier
layers runs meanwhile. What stays exposed is what starts last, plus the fixed cost of as many
collectives as there are parameters.

Ranks may produce gradients in different orders, but collectives must be started in the same
order everywhere. So reductions start strictly in the plan's order: a gradient that arrives early
waits until those before it have been started.
"""

from __future__ import annotations

from ddp_lite.base import DataParallelBase
from ddp_lite.buckets import one_per_parameter


class OverlapDDP(DataParallelBase):
    """Averages each gradient as soon as backward has produced it.

    See ``DataParallelBase`` for the arguments.
    """

    def _plan(self) -> list[tuple[int, ...]]:
        # Backward meets the last registered parameters first.
        return one_per_parameter(reversed(self._specs))

    def _start_in_backward(self, place: int) -> None:
        self._start(place)

    def _start_remaining(self) -> None:
        for place in range(self._progress.next, len(self._groups)):
            self._start(place)
        for place in sorted(self._progress.late):
            # The earlier average joins the later gradient; averaging an average changes nothing.
            self._complete(place)
            self._start(place, again=True)

    def _explain_when(self) -> str:
        return "each started during backward, in reverse registration order"
