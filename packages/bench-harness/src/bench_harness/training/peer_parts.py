"""Exchanges by copies between GPUs of which only parts are carried out, to see what each costs.

They leave wrong gradients, but finite ones: the shared memory begins as zeros. The weights stay as
they are (see ``build.py``), so that ranks agree on them without having exchanged anything.
"""

from __future__ import annotations

import torch

from bench_harness.training.settings import PeerParts
from ddp_lite.peer import PeerCopies
from ddp_lite.peer.copies import Program
from ddp_lite.peer.memory import SharedMemory
from ddp_lite.peer.schedule import SLOTS, Kind, Operation

#: The operations that each part is made of.
PARTS = {
    "barriers": (Kind.BARRIER, Kind.STAGGER),
    "averaging": (Kind.REDUCE, Kind.PUBLISH),
    "copies": (Kind.PUSH, Kind.PULL),
}


class PartialCopies(PeerCopies):
    """Carries out some operations of every exchange, and leaves out all others.

    Args:
        memory: see ``PeerCopies``.
        parts: keys of :data:`PARTS` with "+" between, or "none".
    """

    def __init__(self, memory: SharedMemory, parts: PeerParts) -> None:
        super().__init__(memory)
        self._kinds = {kind for part in parts.split("+") for kind in PARTS.get(part, ())}
        for number in range(SLOTS):
            memory.slot(memory.group.rank(), number, torch.uint8).zero_()

    def operations(self, program: Program) -> list[Operation]:
        """What this rank does in one window, as far as it is measured."""
        return [each for each in super().operations(program) if each.kind in self._kinds]
