"""Calls a function in a process of its own, with a deadline, and ends all that it started.

Processes are forked from a server that has torch imported, so each starts in about a tenth of a
second. The server never initialises CUDA, so a process may.

Two processes belong to a call. The *worker* calls the function. The *supervisor*, its parent, does
nothing but wait. It keeps the end of what the worker prints, ends everything that the worker
started (ranks, compilers, a profiler), and removes what that left in the folder for temporary
files. On Linux it adopts orphans, so it also reaches a process that moved to a session of its own
and whose parent has ended. It does so when the worker ends, however it ends, and when its lifeline
closes: at the deadline, on Ctrl-C, and when the process that waits for the answer is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import psutil

from bench_harness.core import CaseSkipped, JsonValue, Progress, in_one_line

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

#: How a call ends.
Status: TypeAlias = Literal["ok", "oom", "timeout", "error", "skipped"]

#: Imported by the server, also by that of ranks. Nothing here may touch a device.
PRELOAD = [
    "torch",
    "torch._dynamo",  # what making any optimizer imports
    "torch.distributed",
    "bench_harness.process",
    "bench_harness.ranks",
]

#: Name of the workers, in which calls run; :mod:`bench_harness.ranks` knows them by it.
PROCESS_NAME = "bench-case"

_QUIET_TRACKER = "ignore::UserWarning:multiprocessing.resource_tracker"

#: Bytes of output kept from a process that failed. Nothing of it is written to disk.
_TAIL = 4000
#: Seconds a worker gets to leave after it has answered, and a killed process to be gone.
_FAREWELL_S = 10.0
#: ``PR_SET_CHILD_SUBREAPER`` of Linux's prctl: orphans below this process become its children.
_SET_CHILD_SUBREAPER = 36


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
    seconds: float = 0.0


def temporary_prefix(worker: int) -> str:
    """How names of a worker's temporary folders begin, so that its supervisor finds them."""
    return f"bench-ranks-{worker}-"


def start_server() -> None:
    """Starts the fork server; returns at once, while the server is still importing torch."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    # A killed process cannot release its semaphores; the tracker does so, and need not say so.
    sys.warnoptions.append(_QUIET_TRACKER)
    try:
        # First, because starting the tracker unblocks SIGINT.
        multiprocessing.resource_tracker.ensure_running()
        # The server imports with the default handler of SIGINT: without the mask, which it
        # inherits, Ctrl-C would end it with a traceback of its own.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        multiprocessing.forkserver.ensure_running()
    finally:
        sys.warnoptions.remove(_QUIET_TRACKER)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def end_server() -> None:
    """Kills the fork server: until it has imported torch, it would keep standard output open."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "multiprocessing.forkserver" in " ".join(child.cmdline()):
                child.kill()


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
    started = time.monotonic()
    try:
        with _supervised(function, args, str(folder)) as supervisor:
            answer = _await_answer(supervisor.answers, started + timeout_s, on_progress)
            late = answer is None and time.monotonic() >= started + timeout_s
            code, output = supervisor.end(0.0 if late else _FAREWELL_S)
    except ServerDiedError as error:
        return Outcome(status="error", error=str(error), seconds=time.monotonic() - started)
    if late:
        answer = Outcome(status="timeout", error=f"still running after {timeout_s:g} s; killed")
    if answer is None:
        answer = Outcome(status="error", error=_died(code))
    detail = answer.detail
    if answer.status != "ok" and output:
        detail = "\n".join(filter(None, [detail, "--- end of output ---", output]))
    return replace(answer, detail=detail, seconds=time.monotonic() - started)


def asked(function: Callable[..., JsonValue], *args: Any, timeout_s: float) -> JsonValue:
    """What a function returns in a process of its own, for what must not be imported in this one.

    Raises:
        ValueError: it raised; one line says why.
        TimeoutError: it took longer.
    """
    outcome = call(
        function, *args, timeout_s=timeout_s, folder=Path.cwd(), on_progress=lambda text: None
    )
    if outcome.status == "timeout":
        raise TimeoutError(outcome.error)
    if outcome.status != "ok":
        raise ValueError((outcome.error or "").removeprefix("ValueError: "))
    return outcome.value


def _await_answer(answers: Connection, deadline: float, on_progress: Progress) -> Outcome | None:
    """The worker's last message; None if it died, or the deadline passed, before it came."""
    while answers.poll(max(0.0, deadline - time.monotonic())):
        try:
            kind, content = answers.recv()
        except (EOFError, OSError):
            return None
        if kind == "outcome":
            found: Outcome = content
            return found
        on_progress(content)
    return None


def _died(code: int | None) -> str:
    """Why there is no answer."""
    if code is None:
        return "ended, and so did the process that supervised it"
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (SIGKILL often means that the machine ran out of memory)" * (name == "SIGKILL")
        return f"ended by {name}{hint}"
    return f"ended with exit code {code} before it returned a result"


class ServerDiedError(RuntimeError):
    """The fork server ended while it was to start a process."""


@dataclass(frozen=True)
class _Supervisor:
    """What the caller holds of a supervisor.

    Attributes:
        answers: where the worker's messages arrive.
        endings: where the supervisor's only message arrives: the worker's exit code, and the end
            of its output.
        lifeline: closing it ends the call.
    """

    process: multiprocessing.process.BaseProcess
    answers: Connection
    endings: Connection
    lifeline: Connection

    def end(self, patience_s: float) -> tuple[int | None, str]:
        """Ends the worker, which may leave by itself for some seconds, and all it started.

        Returns:
            The worker's exit code, None if unknown, and the end of its output.
        """
        if not self.endings.poll(patience_s):
            self.lifeline.close()
        code, output = None, ""
        with contextlib.suppress(EOFError, OSError):
            if self.endings.poll(2 * _FAREWELL_S):
                code, output = self.endings.recv()
        self.lifeline.close()
        with contextlib.suppress(psutil.Error):
            if code is None:  # stopped or killed from outside: what is left is found by parentage
                root = psutil.Process(self.process.pid)
                _kill([*root.children(recursive=True), root])
        self.process.join()
        return code, output.strip()


@contextlib.contextmanager
def _supervised(*args: Any) -> Iterator[_Supervisor]:
    """Starts a supervisor and its worker; nothing of them is left afterwards."""
    context = multiprocessing.get_context("forkserver")
    with contextlib.ExitStack() as pipes:
        ends = [pipes.enter_context(end) for _ in range(3) for end in context.Pipe(duplex=False)]
        answers, answer, endings, ending, watched, lifeline = ends
        for attempts_left in (1, 0):
            start_server()
            # Holds the fork server's socket; a caller that is killed cannot remove it.
            sockets = multiprocessing.util.get_temp_dir()
            process = context.Process(
                target=_supervise, args=(answer, ending, watched, sockets, *args)
            )
            try:
                with readable_main():
                    process.start()
                break
            except (EOFError, ConnectionError):
                if not attempts_left:
                    raise ServerDiedError(
                        "the fork server must stay alive while it starts a case, but was ended "
                        "twice. Free memory, and give the same command again."
                    ) from None
                time.sleep(1.0)  # until the dead server is seen to be dead
        for end in (answer, ending, watched):
            end.close()
        supervisor = _Supervisor(process, answers, endings, lifeline)
        try:
            yield supervisor
        finally:
            if not lifeline.closed:
                supervisor.end(0.0)


@contextlib.contextmanager
def readable_main() -> Iterator[None]:
    """Keeps a new process from reading the user's program again where that came from stdin."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    try:
        if file is not None and not Path(file).is_file():
            main.__file__ = None
        yield
    finally:
        if file is not None:
            main.__file__ = file


def _supervise(
    answer: Connection, ending: Connection, watched: Connection, sockets: str, *args: Any
) -> None:
    """Runs the worker, and ends with everything below it."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reader, writer = os.pipe()
    worker = multiprocessing.get_context("fork").Process(
        name=PROCESS_NAME, target=_work, args=(answer, writer, *args)
    )
    worker.start()
    answer.close()
    os.close(writer)
    # A worker's sentinel stays open in what it forked, so its end is noticed by SIGCHLD.
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    output = b""
    sources: list[Any] = [reader, woken, watched]
    while worker.exitcode is None:
        ready = multiprocessing.connection.wait(sources)
        if watched in ready:
            break
        if woken in ready:
            os.read(woken, 1 << 12)
        if reader in ready:
            data = os.read(reader, 1 << 16)
            output = (output + data)[-_TAIL:]
            if not data:  # closed by all who could write
                sources.remove(reader)
    _kill_children(worker)
    os.set_blocking(reader, False)
    with contextlib.suppress(BlockingIOError):
        while data := os.read(reader, 1 << 16):
            output = (output + data)[-_TAIL:]
    for folder in Path(tempfile.gettempdir()).glob(f"{temporary_prefix(worker.pid or 0)}*"):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        ending.send((worker.exitcode, output.decode(errors="replace")))
    except OSError:  # nobody waits any more, nor removes the caller's temporary folder
        shutil.rmtree(sockets, ignore_errors=True)


def _kill_children(worker: multiprocessing.process.BaseProcess) -> None:
    """Kills the worker and all below it, and orphans that this process adopted meanwhile."""
    deadline = time.monotonic() + _FAREWELL_S
    while (below := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        _kill(below)
        worker.join(_FAREWELL_S)  # before psutil takes its exit code
        psutil.wait_procs(below, timeout=max(0.0, deadline - time.monotonic()))
    worker.join(0)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _work(
    answer: Connection,
    output: int,
    function: Callable[..., JsonValue],
    args: tuple[Any, ...],
    folder: str,
) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.chdir(folder)
    answer.send(("outcome", _answer(function, args, lambda text: answer.send(("progress", text)))))


def _answer(
    function: Callable[..., JsonValue], args: tuple[Any, ...], progress: Progress
) -> Outcome:
    """What the process reports; the caller knows the seconds."""
    try:
        # Plain JSON: a text of torch's own class, its version, makes who receives it import torch.
        value = json.loads(json.dumps(function(*args, progress), allow_nan=False))
    except CaseSkipped as reason:
        return Outcome(status="skipped", error=str(reason))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - reported, whatever it is
        detail = "".join(traceback.format_exception(error)).strip()
        status: Status = "oom" if _is_out_of_memory(error) else "error"
        return Outcome(status=status, error=in_one_line(error), detail=detail)
    return Outcome(status="ok", value=value)


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
