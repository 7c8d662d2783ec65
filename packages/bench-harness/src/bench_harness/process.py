"""One function call in a process of its own: with a deadline, and nothing left behind.

Processes are forked from a server that has torch imported, so each starts in about a tenth of a
second. The server never initialises CUDA, so a process may. Each process leads its own session:
whatever it starts (ranks, compilers, a profiler) is ended with it, at the deadline, on Ctrl-C, and
even when the parent is killed, which closes the lifeline that the process watches.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import psutil

from bench_harness.case import JsonValue
from bench_harness.experiments.base import CaseSkipped

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

#: Shows one line of text while a call runs.
Progress: TypeAlias = Callable[[str], None]

Status: TypeAlias = Literal["ok", "oom", "timeout", "error", "skipped"]

#: Imported by the server. Nothing here may touch a device.
_PRELOAD = [
    "torch",
    "torch._dynamo",  # what making any optimizer imports
    "torch.distributed.launcher.api",
    "bench_harness.process",
    "bench_harness.ranks",
]

#: Name of the processes in which calls run; :mod:`bench_harness.ranks` knows them by it.
PROCESS_NAME = "bench-case"

_QUIET_TRACKER = "ignore::UserWarning:multiprocessing.resource_tracker"

#: Characters of output kept from a process that failed.
_TAIL = 4000
#: Seconds a process gets to leave after it has answered.
_FAREWELL_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call ended.

    Attributes:
        status: "ok" with a value; "skipped", "oom", "error", "timeout" with an error.
        value: what the function returned.
        error: one line.
        detail: traceback and the end of the process's output.
        seconds: wall time including the start of the process.
    """

    status: Status
    value: JsonValue = None
    error: str | None = None
    detail: str | None = None
    seconds: float


def start_server() -> None:
    """Starts the fork server; returns at once, while the server is still importing torch."""
    multiprocessing.set_forkserver_preload(_PRELOAD)
    # The server imports with the default handler of SIGINT: without the mask, which it inherits,
    # Ctrl-C would end it with a traceback of its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    # A killed process cannot release its semaphores; the tracker does so, and need not say so.
    sys.warnoptions.append(_QUIET_TRACKER)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        sys.warnoptions.remove(_QUIET_TRACKER)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def call(
    function: Callable[..., JsonValue],
    *args: Any,
    timeout_s: float,
    folder: Path,
    on_progress: Progress,
) -> Outcome:
    """Calls ``function(*args, progress)`` in a new process with ``folder`` as current directory.

    Args:
        function: module-level; returns JSON; ``progress(text)`` reaches ``on_progress``.
        args: picklable.
        timeout_s: seconds until the process and all it started are killed.
        folder: exists.
    """
    start_server()
    started = time.monotonic()
    with tempfile.NamedTemporaryFile(prefix="bench-case-") as log:
        answer: Outcome | None = None
        with _process(_main, function, args, log.name, str(folder)) as (process, pipe):
            while answer is None:
                left = max(0.0, timeout_s - (time.monotonic() - started))
                ready = multiprocessing.connection.wait([pipe, process.sentinel], left)
                if not ready:
                    answer = _failure("timeout", f"still running after {timeout_s:g} s; killed")
                elif pipe in ready:
                    answer = _receive(pipe, process, on_progress)
                else:
                    answer = _died(process)
            if answer.status != "timeout":
                process.join(_FAREWELL_S)
        output = Path(log.name).read_text(errors="replace")[-_TAIL:].strip()
    detail = answer.detail
    if answer.status != "ok" and output:
        detail = "\n".join(filter(None, [detail, "--- end of output ---", output]))
    return Outcome(
        status=answer.status,
        value=answer.value,
        error=answer.error,
        detail=detail,
        seconds=time.monotonic() - started,
    )


def _failure(status: Status, error: str, detail: str | None = None) -> Outcome:
    return Outcome(status=status, error=error, detail=detail, seconds=0.0)


def _receive(
    pipe: Connection,
    process: multiprocessing.process.BaseProcess,
    on_progress: Progress,
) -> Outcome | None:
    """One message: a progress line gives None, the last message an outcome."""
    try:
        kind, content = pipe.recv()
    except EOFError:
        return _died(process)
    if kind == "progress":
        on_progress(content)
        return None
    return Outcome(**content)


def _died(process: multiprocessing.process.BaseProcess) -> Outcome:
    process.join(_FAREWELL_S)
    code = process.exitcode
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (SIGKILL often means that the machine ran out of memory)" * (name == "SIGKILL")
        return _failure("error", f"ended by {name}{hint}")
    return _failure("error", f"ended with exit code {code} before it returned a result")


@contextlib.contextmanager
def _process(
    target: Callable[..., None], *args: Any
) -> Iterator[tuple[multiprocessing.process.BaseProcess, Connection]]:
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    watched, lifeline = context.Pipe(duplex=False)
    process = context.Process(name=PROCESS_NAME, target=target, args=(sender, watched, *args))
    try:
        process.start()
        sender.close()
        watched.close()
        yield process, receiver
    finally:
        if process.pid is not None:
            _end(process)
        for pipe in (receiver, sender, watched, lifeline):
            pipe.close()


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """Kills the process, its session, and children that moved to a session of their own."""
    assert process.pid is not None
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _main(
    pipe: Connection,
    watched: Connection,
    function: Callable[..., JsonValue],
    args: tuple[Any, ...],
    log: str,
    folder: str,
) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    threading.Thread(target=_die_with_parent, args=(watched,), daemon=True).start()
    with Path(log).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    pipe.send(("outcome", _answer(function, args, lambda text: pipe.send(("progress", text)))))


def _die_with_parent(watched: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        watched.recv()
    os.killpg(0, signal.SIGKILL)


def _answer(
    function: Callable[..., JsonValue], args: tuple[Any, ...], progress: Progress
) -> dict[str, Any]:
    """What the process reports: the fields of its outcome."""
    try:
        value = function(*args, progress)
        json.dumps(value, allow_nan=False)  # a value that cannot be stored is this call's error
    except CaseSkipped as reason:
        return {"status": "skipped", "error": str(reason), "seconds": 0.0}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - reported, whatever it is
        status = "oom" if _is_out_of_memory(error) else "error"
        line = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        detail = "".join(traceback.format_exception(error)).strip()
        return {"status": status, "error": line, "detail": detail, "seconds": 0.0}
    return {"status": "ok", "value": value, "seconds": 0.0}


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, on a device or on the host, in this error or in what caused it."""
    import torch

    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        # The host allocator has no exception class of its own.
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
