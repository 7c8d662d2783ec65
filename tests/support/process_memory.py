"""Memory that processes share on CPUs, in place of the memory that GPUs share."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.peer.schedule import SLOTS, rows_in_slot


class ProcessMemory:
    """``ddp_lite.peer.PeerMemory`` for processes, in memory-mapped files. Collective to build.

    Args:
        folder: of the files, the same on every rank and used by nobody else.
        row_bytes: room of one row.
        group: the ranks; None for all.
    """

    def __init__(
        self, folder: Path, row_bytes: int, group: dist.ProcessGroup | None = None
    ) -> None:
        resolved = group or dist.group.WORLD
        assert resolved is not None
        self.group = resolved
        self.device, self.row_bytes = torch.device("cpu"), row_bytes
        self.stream: torch.cuda.Stream | None = None
        self._windows = 0
        folder.mkdir(exist_ok=True)
        size = SLOTS * rows_in_slot(self.group.size()) * row_bytes
        self._mapped = [
            torch.from_file(str(folder / str(r)), shared=True, size=size, dtype=torch.uint8)
            for r in range(self.group.size())
        ]
        self.barrier()

    def next_slot(self) -> int:
        """The number of the slot that the next window uses."""
        self._windows += 1
        return self._windows % SLOTS

    def slot(self, rank: int, number: int, dtype: torch.dtype) -> Tensor:
        """A slot of ``rank``'s memory, shape (rows, elements in ``row_bytes``)."""
        memory = self._mapped[rank].view(dtype)
        return memory.view(SLOTS, -1, self.row_bytes // dtype.itemsize)[number]

    def barrier(self) -> None:
        """Waits for all ranks, for the group's timeout at most."""
        dist.barrier(self.group)

    def stagger(self) -> None:
        """Signals rank - 1 and waits for rank + 1, for the group's timeout at most."""
        rank, world_size = self.group.rank(), self.group.size()
        sent, received = torch.zeros(1), torch.zeros(1)
        signals = [
            dist.isend(sent, group=self.group, group_dst=(rank - 1) % world_size),
            dist.irecv(received, group=self.group, group_src=(rank + 1) % world_size),
        ]
        # Messages between two ranks keep the timeout that the group was made with.
        timeout = self.group._get_backend(self.device).options._timeout
        for signal in signals:
            assert signal is not None
            signal.wait(timeout)

    def follow(self, start: torch.cuda.Event) -> None:
        """Does nothing: there is no stream."""
