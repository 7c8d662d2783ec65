"""What a rank does to a model or an optimizer, compared over the ranks without waiting for a GPU.

Ranks that train differently do not fail: each updates its own shards, and its own copy of what all
hold whole, and these drift apart. So what a rank does becomes a number, and all ranks' numbers are
averaged: one that differs from the mean has been somewhere else.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from dataclasses import dataclass

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


@dataclass(kw_only=True)
class _Exchange:
    """Numbers that have been averaged, and not yet compared."""

    own: tuple[int, int]  # this rank's
    words: str  # what this rank has done
    mean: Tensor  # of all ranks' numbers, on the CPU
    copied: torch.cuda.Event | None  # when ``mean`` may be read; None for at once


class LateComparison:
    """Compares two numbers of each rank with their mean, as soon as reading it makes nobody wait.

    On CUDA that is in a later step. While a CUDA graph is recorded the host cannot read, and
    nothing is compared: the graph keeps what it has recorded.

    Args:
        ranks: that must do the same.
        device: where collectives run.
        remedy: a sentence for errors.
    """

    def __init__(self, ranks: Mesh, device: torch.device, remedy: str = "") -> None:
        self._ranks, self._device, self._remedy = ranks, device, remedy
        self._exchanges: deque[_Exchange] = deque()

    @property
    def recording(self) -> bool:
        """Whether a CUDA graph is being recorded."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def message(self, digest: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """What to average over the ranks for a digest: two numbers, exact in fp32, shape (2,)."""
        # Filled by kernels: a copy from ordinary host memory could wait for the device.
        filled = [torch.full((1,), n, dtype=dtype, device=self._device) for n in _split(digest)]
        return torch.cat(filled)

    def averaged(self, digest: int, words: str, mean: Tensor) -> None:
        """Takes the average of the messages, and compares what has arrived.

        Raises:
            StepMismatchError: on every rank, if one has sent another message.
        """
        if self.recording:
            return
        arrived, copied = mean.to("cpu", non_blocking=True), None
        if self._device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self._device))
        exchange = _Exchange(own=_split(digest), words=words, mean=arrived, copied=copied)
        self._exchanges.append(exchange)
        self.compare()

    def exchange(self, words: str) -> None:
        """Compares the words, by an all-reduce of 8 bytes."""
        if not self.recording:
            digest = zlib.crc32(words.encode())
            mean, ranks = self.message(digest), self._ranks.shards
            ranks.call(
                "the comparison of steps", all_reduce, ranks.communicator, mean, dist.ReduceOp.AVG
            )
            self.averaged(digest, words, mean)

    def compare(self) -> None:
        """Compares what has arrived; raises as ``averaged`` does."""
        # One rank of N that differs moves the mean by at least 1 / N.
        tolerance = 0.5 / math.prod(ranks.size for ranks in self._ranks.levels)
        while self._exchanges and not self.recording:
            oldest = self._exchanges[0]
            if oldest.copied is not None and not oldest.copied.query():
                return
            self._exchanges.popleft()
            pairs = zip(oldest.mean.tolist(), oldest.own, strict=True)
            if any(abs(mean - own) > tolerance for mean, own in pairs):
                raise self._ranks.shards.disagreement(f"it has {oldest.words}", self._remedy)


def _split(digest: int) -> tuple[int, int]:
    return digest % 2048, digest // 2048 % 2048
