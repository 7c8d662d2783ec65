"""The command line: what the installed script runs, and ``python -m bench_harness``."""

import signal
import sys


def run() -> None:
    """Runs the command line and exits with its code; Ctrl-C ends it cleanly from the first moment.

    The command line is imported in here, because importing it takes a noticeable time too.
    """
    for stream in (sys.stdout, sys.stderr):  # a label's dash must not end a run
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        from bench_harness.cli import main

        code = main()
    except KeyboardInterrupt:
        code = 130
    if code == 130:  # a second Ctrl-C must not interrupt what ends with the interpreter
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    run()
