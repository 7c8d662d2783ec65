"""What a rank does to a model or an optimizer, compared over the ranks without waiting for a GPU.

Ranks that train differently do not fail: each updates its own shards, and its own copy of what all
hold whole, and these drift apart. So what a rank does becomes a number, and all ranks' numbers are
averaged: one that differs from the mean has been somewhere else.
"""

from __future__ import annotations

import math
import zlib
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.ranks import all_reduce
from shard_optim.mesh import Mesh


class History:
    """Events since the last comparison, which must be the same on every rank."""

    def __init__(self) -> None:
        self._events: list[str] = []
        self.in_backward = False  # a backward pass has begun and not ended

    def note(self, event: str) -> None:
        """Adds an event, in words that follow "it has"."""
        self._events.append(event)

    def take(self) -> str:
        """All events in words; begins anew."""
        words = ", ".join(self._events) or "done nothing"
        self._events.clear()
        return words


class LateComparison:
    """Compares two numbers of each rank with their mean, as soon as reading it makes nobody wait.

    On CUDA that is in a later step. While a CUDA graph is recorded the host cannot read, and
    nothing is compared: the graph keeps what it has recorded.
    """

    def __init__(self, ranks: Mesh, device: torch.device, remedy: str = "") -> None:
        self._ranks, self._device, self._remedy = ranks.shards, device, remedy
        # One rank of N that differs moves the mean by at least 1 / N.
        self._tolerance = 0.5 / math.prod(level.size for level in ranks.levels)
        # This rank's numbers, what it has done, the mean, and when that may be read if not at once.
        self._averaged: deque[tuple[tuple[int, int], str, Tensor, torch.cuda.Event | None]]
        self._averaged = deque()

    @property
    def recording(self) -> bool:
        """Whether a CUDA graph is being recorded."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def message(self, digest: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """What to average over the ranks for a digest: two numbers that are exact in fp32."""
        # Filled by kernels: a copy from ordinary host memory could wait for the device.
        return [torch.full((1,), n, dtype=dtype, device=self._device) for n in _split(digest)]

    def averaged(self, digest: int, words: str, mean: Tensor) -> None:
        """Takes the average of the messages, and compares what has arrived as ``compare`` does."""
        if self.recording:
            return
        arrived, copied = mean.to("cpu", non_blocking=True), None
        if self._device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self._device))
        self._averaged.append((_split(digest), words, arrived, copied))
        self.compare()

    def exchange(self, words: str) -> None:
        """Compares the words, by an all-reduce of 8 bytes."""
        if not self.recording:
            digest = zlib.crc32(words.encode())
            mean, ranks = torch.cat(self.message(digest)), self._ranks
            ranks.call(
                "the comparison of steps", all_reduce, ranks.communicator, mean, dist.ReduceOp.AVG
            )
            self.averaged(digest, words, mean)

    def compare(self) -> None:
        """StepMismatchError on every rank if one has sent another message, and it has arrived."""
        while self._averaged and not self.recording:
            own, words, mean, copied = self._averaged[0]
            if copied is not None and not copied.query():
                return
            self._averaged.popleft()
            if any(abs(m - n) > self._tolerance for m, n in zip(mean.tolist(), own, strict=True)):
                raise self._ranks.disagreement(f"it has {words}", self._remedy)


def _split(digest: int) -> tuple[int, int]:
    return digest % 2048, digest // 2048 % 2048
