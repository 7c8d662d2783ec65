"""Which gradients have arrived, and which groups are therefore complete.

This runs once per parameter in every backward. It is an object of its own because attributes of
a ``torch.nn.Module`` are slow to read and slower to write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

ABSENT, ACCUMULATED, COUNTED = 0, 1, 2


class Progress:
    """Counts the gradients of one step.

    Groups are started strictly in order: one that is complete early waits for those before it.

    Args:
        parameters: how many parameters there are.
        on_first: called when the first gradient of a step arrives.
        start: called with each group's place as soon as it and all before it are complete.

    Attributes:
        accumulating: gradients that arrive now are not to be reduced yet.
        begun: a gradient has arrived that is to be reduced.
        marks: for each parameter ``ABSENT``, ``ACCUMULATED`` (while accumulating) or ``COUNTED``.
        order: parameters in the order in which they were counted.
        next: the first group that has not been started.
        late: started groups whose parameters got more gradient since.
    """

    __slots__ = (
        "_group_of",
        "_on_first",
        "_outstanding",
        "_sizes",
        "_start",
        "accumulating",
        "begun",
        "late",
        "marks",
        "next",
        "order",
    )

    def __init__(
        self, parameters: int, on_first: Callable[[], None], start: Callable[[int], None]
    ) -> None:
        self._on_first = on_first
        self._start = start
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
            self.begun = True
            self._on_first()
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
        outstanding, start = self._outstanding, self._start
        while self.next < len(outstanding) and not outstanding[self.next]:
            self.next += 1
            start(self.next - 1)
