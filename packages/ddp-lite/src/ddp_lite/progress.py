"""Which gradients have arrived, and which groups are therefore complete.

This runs once per parameter in every backward. It is an object of its own because attributes of
a ``torch.nn.Module`` are slow to read and slower to write.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_lite.base import DataParallelBase

ABSENT, ACCUMULATED, COUNTED = 0, 1, 2


class Progress:
    """Counts the gradients of one step.

    Groups are started strictly in order: one that is complete early waits for those before it.

    Parameters hold this object through their hooks, so it must not hold the wrapper: a wrapper that
    its user has dropped is freed, and gradients that still arrive are ignored.

    Args:
        parameters: how many parameters there are.
        owner: the wrapper. Its ``_on_first_gradient`` is called when the first gradient of a step
            arrives, its ``_start_in_backward`` with each group's place as soon as that group and
            all before it are complete.

    Attributes:
        owner: as a weak reference.
        accumulating: gradients that arrive now are not to be reduced yet.
        begun: a gradient has arrived that is to be reduced.
        marks: for each parameter ``ABSENT``, ``ACCUMULATED`` (while accumulating) or ``COUNTED``.
        order: parameters in the order in which they were counted.
        next: the first group that has not been started.
        late: started groups whose parameters got more gradient since.
    """

    __slots__ = (
        "_group_of",
        "_outstanding",
        "_sizes",
        "accumulating",
        "begun",
        "late",
        "marks",
        "next",
        "order",
        "owner",
    )

    def __init__(self, parameters: int, owner: DataParallelBase) -> None:
        self.owner = weakref.ref(owner)
        self._group_of = [0] * parameters
        self.accumulating = False
        self.plan([])

    def plan(self, groups: Sequence[Sequence[int]]) -> None:
        """Sets the parameter indices of each group, in the order of reduction, and resets."""
        self._sizes = [len(indices) for indices in groups]
        for place, indices in enumerate(groups):
            for index in indices:
                self._group_of[index] = place
        self.reset()

    def reset(self) -> None:
        """Back to the state before a backward."""
        self.marks = bytearray(len(self._group_of))
        self.order: list[int] = []
        self.begun = False
        self.next = 0
        self.late: set[int] = set()
        self._outstanding = self._sizes.copy()

    def arrived(self, index: int, _parameter: object) -> None:
        """Parameter ``index`` has accumulated a gradient: the hook on every parameter."""
        if self.accumulating:
            self.marks[index] |= ACCUMULATED
            return
        if not self.begun:
            owner = self.owner()
            if owner is None:
                return
            self.begun = True
            owner._on_first_gradient()
        place = self._group_of[index]
        if place < self.next:
            self.late.add(place)
        elif self.marks[index] < COUNTED:
            self.marks[index] = COUNTED
            self.order.append(index)
            self._outstanding[place] -= 1
            if place == self.next and not self._outstanding[place]:
                self._start_complete()

    def _start_complete(self) -> None:
        outstanding, owner = self._outstanding, self.owner()
        while owner is not None and self.next < len(outstanding) and not outstanding[self.next]:
            self.next += 1
            owner._start_in_backward(self.next - 1)
