"""The command line: what the installed script runs, and ``python -m bench_harness``."""

from __future__ import annotations

import io
import os
import signal
import sys

TYPE_CHECKING = False  # typing takes a while to import
if TYPE_CHECKING:
    from typing import Any, Never, TextIO


class _Output(io.FileIO):
    """A standard stream whose reader may leave, as ``head`` does: what follows is dropped."""

    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if not isinstance(error, BrokenPipeError):
                raise
            return len(data)


def _opened(stream: TextIO | None, number: int) -> TextIO:
    """A standard stream whose reader may leave, and in which a label's dash ends no run."""
    if stream is None:  # closed, as by >&-
        return os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    raw = io.BufferedWriter(_Output(number, "wb", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, "replace", line_buffering=True)


def run() -> None:
    """Runs the command line and exits with its code; Ctrl-C ends it cleanly from the first moment.

    SIGTERM, as of a cancelled job, ends it in the same way, with exit code 143.

    The command line is imported in here, because importing it takes a noticeable time too. Ctrl-C
    may end an import, above all of compiled code, in an error of another class: it counts as Ctrl-C
    as well.
    """
    interrupts = []

    def interrupt(number: int, frame: object) -> Never:
        interrupts.append(number)
        raise KeyboardInterrupt

    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, interrupt)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, interrupt)
        if os.environ.get("COLUMNS") == "0":  # as some terminals say; it would leave no room
            del os.environ["COLUMNS"]
        sys.stdout, sys.stderr = _opened(sys.stdout, 1), _opened(sys.stderr, 2)
        from bench_harness.cli import BAD_INPUT, main

        code = main()
        code = 128 + interrupts[0] if interrupts and code in (BAD_INPUT, 130) else code
    except BaseException as error:
        if not interrupts and not isinstance(error, KeyboardInterrupt):
            raise
        code = 128 + (interrupts or [signal.SIGINT])[0]
    # A second signal must not interrupt what ends with the interpreter.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if code > 128 and "bench_harness.process" in sys.modules:
        sys.modules["bench_harness.process"].end_server()
    sys.exit(code)


if __name__ == "__main__":
    run()
