"""Side task: ranks with different numbers of batches. Loaded by ``join`` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.buckets import Bucket
from ddp_lite.engine import ACCUMULATED, Engine, SideTask
from ddp_lite.ranks import all_reduce

AverageOver = Literal["active", "world"]


class Join(SideTask):
    """Lets ranks train on different numbers of batches.

    Every step begins with one small all-reduce in which each rank says if it has a batch. A
    rank that has left its loop answers no, contributes zeros to the reductions of the others, and
    runs the caller's optimizer step on the averages, so that weights and optimizer state stay equal
    everywhere. When all answer no, all leave.

    Args:
        average_over: see ``DataParallelBase.join``.

    Raises:
        ValueError: ``average_over`` is neither.
    """

    def __init__(self, average_over: AverageOver) -> None:
        if average_over not in ("active", "world"):
            raise ValueError(
                f"average_over must be 'active' or 'world', but got {average_over!r}. Choose one"
            )
        self._rescale = average_over == "active"
        self._active: Tensor | None = None  # number of ranks with a batch in this step

    def taken(self, engine: Engine, bucket: Bucket, absent: Sequence[int], again: bool) -> None:
        """Says that this rank has a batch, once a step, before the first reduction."""
        if self._active is None:
            self._active = self._count(1.0, engine)

    def shadow(self, engine: Engine, shadow_step: Callable[[], object]) -> None:
        """Takes part, without a batch, in the steps of the ranks that still have one."""
        while (active := self._count(0.0, engine)).item() > 0:
            self._active = active
            for parameter in engine.parameters:
                parameter.grad = None
            engine.arrivals.marks = bytearray([ACCUMULATED] * len(engine.specs))  # none is absent
            engine.finish()
            shadow_step()

    def averaged(self, engine: Engine) -> None:
        """Turns averages over all ranks into averages over the ranks with a batch."""
        gradients = [p.grad for p in engine.parameters if p.grad is not None]
        if self._active is not None and self._rescale and gradients:
            torch._foreach_mul_(gradients, engine.ranks.size / self._active)
        self._active = None

    def _count(self, mine: float, engine: Engine) -> Tensor:
        ranks = engine.ranks
        count = torch.full((), mine, device=ranks.device)  # a copy from the host would wait
        what = "the count of ranks that have a batch"
        ranks.together(what, all_reduce, ranks.control, count, dist.ReduceOp.SUM)
        return count
