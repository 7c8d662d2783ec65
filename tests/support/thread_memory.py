"""Memory that threads share on CPUs; each thread stands for a rank and its GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ddp_lite.peer.schedule import SLOTS, rows_in_slot

SECONDS = 60.0


class FakeGroup:
    """A process group of threads."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.group_name = "fake"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Together:
    """What the threads of one test share; floating-point memory begins as NaN."""

    def __init__(self, world_size: int, row_bytes: int) -> None:
        rows = SLOTS * rows_in_slot(world_size)
        self.memory = [
            torch.full((rows * row_bytes,), 255, dtype=torch.uint8) for _ in range(world_size)
        ]
        self.row_bytes = row_bytes
        self.barrier = threading.Barrier(world_size)
        self.signals = [threading.Semaphore(0) for _ in range(world_size)]


class ThreadMemory:
    """``PeerMemory`` for threads."""

    def __init__(self, together: Together, rank: int) -> None:
        self.group: Any = FakeGroup(rank, len(together.memory))
        self.device = torch.device("cpu")
        self.stream: Any = None
        self.row_bytes = together.row_bytes
        self._together, self._rank, self._windows = together, rank, 0

    def next_slot(self) -> int:
        """See ``SharedMemory``."""
        self._windows += 1
        return self._windows % SLOTS

    def slot(self, rank: int, number: int, dtype: torch.dtype) -> Tensor:
        """See ``SharedMemory``."""
        memory = self._together.memory[rank].view(dtype)
        return memory.view(SLOTS, -1, self.row_bytes // dtype.itemsize)[number]

    def barrier(self) -> None:
        """See ``SharedMemory``."""
        self._together.barrier.wait(SECONDS)

    def stagger(self) -> None:
        """See ``SharedMemory``."""
        signals = self._together.signals
        signals[self._rank - 1].release()
        assert signals[self._rank].acquire(timeout=SECONDS)


def on_threads(
    world_size: int, work: Callable[[ThreadMemory, int], Any], row_bytes: int = 1024
) -> list[Any]:
    """Calls ``work(memory, rank)`` on a thread for each rank; returns all results, by rank."""
    together = Together(world_size, row_bytes)

    def guarded(rank: int) -> Any:
        try:
            return work(ThreadMemory(together, rank), rank)
        except BaseException:
            together.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return [
            each.result(SECONDS) for each in [pool.submit(guarded, r) for r in range(world_size)]
        ]


def values(rank: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """A rank's random tensors."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def bound(inputs: Tensor) -> Tensor:
    """The largest error of an average, from its inputs, stacked in float64: N roundings."""
    return 2.0**-24 * (len(inputs) + 1) * inputs.abs().mean(0)
