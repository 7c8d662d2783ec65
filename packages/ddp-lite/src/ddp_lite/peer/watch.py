"""A thread that finds waits for a lost rank, lets them end, and finds out which rank that is."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Protocol

from ddp_lite.ranks import Ranks

_POLL_SECONDS = 0.05
_SECONDS_TO_END = 5.0  # longer than peers are asked for

_log = logging.getLogger("ddp_lite")


class Waits(Protocol):
    """The waits of kernels for other ranks; see ``Signals``."""

    @property
    def waiting(self) -> int:
        """The number of the wait that is under way, the same on all ranks; 0 if there is none."""

    def release(self) -> None:
        """Ends this wait and all later ones."""


class Watch:
    """Watches the waits of one rank, those in replays of CUDA graphs too.

    The error is logged at once, because the host may be waiting inside CUDA, and raised by
    ``check``.

    Args:
        waits: of this rank's kernels.
        ranks: find out who is lost.
        seconds: how long one wait may last.
    """

    def __init__(self, waits: Waits, ranks: Ranks, seconds: float) -> None:
        self._outcome = _Outcome()
        stop = threading.Event()
        thread = threading.Thread(
            target=_watch,
            args=(waits, ranks, seconds, self._outcome, stop),
            daemon=True,
            name="ddp_lite watch over copies",
        )
        thread.start()
        # Also before the interpreter finalises, which aborts if a thread is inside torch by then.
        weakref.finalize(self, _end, thread, stop)

    def check(self) -> None:
        """Before an exchange is queued.

        Raises:
            PeerFailureError: a wait was too long.
        """
        if self._outcome.failed.is_set():
            self._outcome.named.wait()
            assert self._outcome.error is not None
            raise self._outcome.error


class _Outcome:
    """What the thread tells the ``Watch``, which it does not hold: it ends with it."""

    def __init__(self) -> None:
        self.failed, self.named = threading.Event(), threading.Event()
        self.error: Exception | None = None


def _end(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    thread.join(_SECONDS_TO_END)


def _watch(
    waits: Waits, ranks: Ranks, seconds: float, outcome: _Outcome, stop: threading.Event
) -> None:
    number, begin = 0, 0.0
    while not stop.wait(_POLL_SECONDS):
        before, number = number, waits.waiting
        if number != before:
            begin = time.monotonic()
        waited = time.monotonic() - begin
        if number == 0 or waited <= seconds:
            continue
        outcome.failed.set()
        waits.release()
        cause = TimeoutError(f"not finished after {waited:.0f} s")
        outcome.error = ranks.failure("an exchange between GPUs", number, waited, cause)
        outcome.named.set()
        _log.error("%s", outcome.error)
        return
