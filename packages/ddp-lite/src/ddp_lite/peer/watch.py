"""What happens when an exchange between GPUs does not end because a rank is lost.

A kernel that waits for a signal of the lost rank holds the stream, and with it everything that
waits for the whole GPU: an abort of NCCL inside the driver, the end of the process. When its own
time is over, it ends the CUDA context with an error that names nothing. So a thread of the host
waits for every exchange. If one does not come in time, the thread

1. fills this rank's shared memory with NaN, gives the waiting kernels the signals that they wait
   for, and goes on with that until the exchange has ended: averages of it are NaN;
2. finds out which ranks are lost, and logs the error, which the next exchange raises.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_lite.ranks import Ranks

_POLL_SECONDS = 0.05
_RELEASE_SECONDS = 0.001  # from one round of signals to the next
_LONGEST_RELEASE_SECONDS = 5.0
_SECONDS_TO_END = 5.0  # longer than peers are asked for
_NAN = 0xFFFFFFFF  # of float32, and in each half of bfloat16 and float16; two of them of float64

_log = logging.getLogger("ddp_lite")


class Watch:
    """A thread that releases an exchange which does not come in time, and names lost ranks.

    The error is logged at once, because the host may be waiting inside CUDA, and raised where the
    next exchange is started.

    Args:
        ranks: find out who is lost.
        seconds: how long to wait for an event after the one before it has come.
        device: of the events.
        release: lets an exchange end that waits for a lost rank; called again and again.
    """

    def __init__(
        self, ranks: Ranks, seconds: float, device: torch.device, release: Callable[[], None]
    ) -> None:
        self._exchanges = _Exchanges(ranks, seconds, device, release)
        thread = threading.Thread(
            target=self._exchanges.watch, daemon=True, name="ddp_lite watch over copies"
        )
        thread.start()
        # Also before the interpreter finalises, which aborts if a thread is inside torch by then.
        weakref.finalize(self, self._exchanges.end, thread)

    def add(self, event: torch.cuda.Event) -> None:
        """Waits for ``event`` too, which is that of an exchange that has been queued.

        Raises:
            PeerFailureError: an earlier one did not come in time.
        """
        self._exchanges.events.put(event)  # first, because what has been queued must be released
        self.check()

    def check(self) -> None:
        """Before an exchange is queued.

        Raises:
            PeerFailureError: an earlier one did not come in time.
        """
        self._exchanges.check()


class _Exchanges:
    """The thread's side of a ``Watch``, which it does not hold: it ends with it."""

    def __init__(
        self, ranks: Ranks, seconds: float, device: torch.device, release: Callable[[], None]
    ) -> None:
        self.events: queue.SimpleQueue[torch.cuda.Event | None] = queue.SimpleQueue()
        self._ranks, self._seconds, self._device, self._release = ranks, seconds, device, release
        self._stop, self._failed, self._named = (threading.Event() for _ in range(3))
        self._error: Exception | None = None

    def check(self) -> None:
        if self._failed.is_set():
            self._named.wait()
            if self._error is not None:
                raise self._error

    def end(self, thread: threading.Thread) -> None:
        self._stop.set()
        self.events.put(None)
        thread.join(_SECONDS_TO_END)

    def watch(self) -> None:
        """Runs in the thread."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins with the first GPU
        number = 0
        try:
            while (event := self.events.get()) is not None and not self._failed.is_set():
                number += 1
                begin = time.monotonic()
                if (cause := self._wait(event)) is not None:
                    self._fail(number, time.monotonic() - begin, cause)
            while event is not None:
                self._let_end(event)
                event = self.events.get()
        except RuntimeError as error:  # CUDA's, where the context has ended
            _log.error("exchanges between GPUs are no longer watched: %s", error)
        finally:
            self._named.set()

    def _wait(self, event: torch.cuda.Event) -> RuntimeError | None:
        """Why ``event`` did not come; None if it has come, or nobody needs to know any more."""
        begin = time.monotonic()
        try:
            while not event.query():
                if (waited := time.monotonic() - begin) > self._seconds:
                    self._failed.set()
                    self._let_end(event)
                    return RuntimeError(f"not finished after {waited:.0f} s")
                if self._stop.wait(_POLL_SECONDS):
                    return None
        except RuntimeError as error:  # CUDA's
            self._failed.set()
            return error
        return None

    def _let_end(self, event: torch.cuda.Event) -> None:
        """Releases an exchange until it has ended, whatever keeps it from doing so."""
        deadline = time.monotonic() + _LONGEST_RELEASE_SECONDS
        while not (event.query() or self._stop.is_set() or time.monotonic() > deadline):
            self._release()
            time.sleep(_RELEASE_SECONDS)

    def _fail(self, number: int, waited: float, cause: RuntimeError) -> None:
        self._error = self._ranks.failure("an exchange between GPUs", number, waited, cause)
        self._named.set()
        _log.error("%s", self._error)


class Release:
    """Lets the kernels end that wait for a signal of another rank, on a stream of its own.

    A call gives all signals that they can wait for once, so that it takes several where one kernel
    follows another: each rank's pad has for every channel a word of every rank, which that rank
    sets when it is 0, and this rank clears when it is set. What is sent to a lost rank meanwhile
    stays in its memory.

    Nothing is started but writes of a value, because a kernel that is started for the first time
    may wait for those that run.

    Args:
        handle: torch's, of the symmetric memory.
        memory: this rank's, whose values become NaN: what is exchanged without a rank must not
            look like a result.
        channels: number of channels that signals are sent on.
    """

    def __init__(self, handle: Any, memory: Tensor, *, channels: int) -> None:
        self._write = handle.memset32  # of a tensor: offset in words, value, number of words
        self._stream = torch.cuda.Stream(memory.device)
        self._memory = memory.view(torch.uint32)
        rank, world_size = handle.rank, handle.world_size
        shape, word = (channels * world_size,), torch.uint32
        self._own = handle.get_signal_pad(rank, shape, word)
        self._theirs = [
            (handle.get_signal_pad(peer, shape, word), channel * world_size + rank)
            for peer in range(world_size)
            for channel in range(channels)
            if peer != rank
        ]

    def __call__(self) -> None:
        """Gives every signal once; returns when that has happened."""
        with torch.cuda.stream(self._stream):
            self._write(self._memory, 0, _NAN, self._memory.numel())
            self._write(self._own, 0, 1, self._own.numel())
            for pad, word in self._theirs:
                self._write(pad, word, 0, 1)
        self._stream.synchronize()
