"""Ranks with different numbers of batches: whoever runs out keeps the others company.

Inside ``join`` every synchronised step begins with one small all-reduce in which each rank says
whether it has a batch. A rank that has left its loop answers no, contributes zeros to the
reductions of the others, and runs the caller's optimizer step on the averages, so that weights
and optimizer state stay equal everywhere. When all answer no, all leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

AverageOver = Literal["active", "world"]


class Attendance:
    """Counts, at the beginning of each step, the ranks that have a batch.

    Args:
        group: the ranks that take part.
        device: where the count lives.
        average_over: "active" divides gradients by the number of ranks with a batch, "world" by
            the number of all ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, average_over: AverageOver
    ) -> None:
        if average_over not in ("active", "world"):
            raise ValueError(
                f"average_over must be 'active' or 'world', but got {average_over!r}. Choose one"
            )
        self._group = group
        self._device = device
        self._rescale = average_over == "active"
        self._active: Tensor | None = None

    def begin_step(self) -> None:
        """Says that this rank has a batch, once a step."""
        if self._active is None:
            self._active = self._count(1.0)

    def begin_shadow_step(self) -> bool:
        """Says that this rank has none; returns whether another one has."""
        self._active = self._count(0.0)
        return self._active.item() > 0

    def end_step(self, gradients: Sequence[Tensor]) -> None:
        """Turns averages over all ranks into averages over the ranks with a batch."""
        if self._active is not None and self._rescale and gradients:
            factor = self._group.size() / self._active
            torch._foreach_mul_(list(gradients), factor)
        self._active = None

    def _count(self, mine: float) -> Tensor:
        count = torch.tensor(mine, device=self._device)
        dist.all_reduce(count, group=self._group)
        return count
