"""A thread that finds waits for a lost rank, lets them end, and finds out which rank that is."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ddp_lite.ranks import Ranks

if TYPE_CHECKING:
    from ddp_lite.peer.signals import Signals

_POLL_SECONDS = 0.05
_SECONDS_TO_END = 5.0  # longer than peers are asked for

_log = logging.getLogger("ddp_lite")


class Watch:
    """Watches the waits of this rank's kernels, those in replays of CUDA graphs too.

    The error is logged at once, because the host may be waiting inside CUDA, and raised by
    ``check``.

    Args:
        signals: whose waits are watched, without a call of CUDA.
        ranks: find out who is lost.
        seconds: how long one wait may last.
    """

    def __init__(self, signals: Signals, ranks: Ranks, seconds: float) -> None:
        self._error: Future[Exception] = Future()
        stop = threading.Event()
        thread = threading.Thread(
            target=_watch,
            args=(signals, ranks, seconds, self._error, stop),
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
        if self._error.running() or self._error.done():
            raise self._error.result()


def _end(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    thread.join(_SECONDS_TO_END)


def _watch(
    signals: Signals, ranks: Ranks, seconds: float, error: Future[Exception], stop: threading.Event
) -> None:
    number, begin = 0, 0.0
    while not stop.wait(_POLL_SECONDS):
        before, number = number, signals.waiting
        if number != before:
            begin = time.monotonic()
        waited = time.monotonic() - begin
        if number == 0 or waited <= seconds:
            continue
        error.set_running_or_notify_cancel()
        signals.release()
        cause = TimeoutError(f"not finished after {waited:.0f} s")
        try:
            error.set_result(ranks.failure("an exchange between GPUs", number, waited, cause))
        except Exception as other:  # noqa: BLE001 - raised by ``check``, which waits for it
            error.set_exception(other)
        else:
            _log.error("%s", error.result())
        return
