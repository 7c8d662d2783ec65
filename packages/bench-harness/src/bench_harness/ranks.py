"""Runs a function on several ranks, each in a process of its own, and tells how each rank ended.

:func:`launch` is for measurements: its ranks end together, and it returns their results or raises
one error, which names the rank that failed first. :func:`launch_each` is what it is built on, and
what tests of faults need: it reports every rank's own end.

Ranks meet through a file. A rank whose function has returned keeps its process group until every
other rank has returned, raised or died. On a busy machine one rank may still be connecting when
another is done, and gloo reports a rank that leaves meanwhile as a broken connection. A rank whose
function raises leaves at once, as a failing training script does.

The process of a case was itself forked from a server with torch imported and has not computed
anything yet, so ranks are forked from it directly. Any other process may hold thread pools that a
fork would break, so its ranks come from a fork server, at the price of one more import of torch.
There they are the server's children, not the launcher's, so each rank also watches the launcher
and ends when that is gone.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from bench_harness.core import Progress, in_one_line
from bench_harness.process import PRELOAD, PROCESS_NAME, readable_main, temporary_prefix

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

StartMethod: TypeAlias = Literal["fork", "forkserver", "spawn"]

# Bytes kept from the end of what a rank printed.
_TAIL = 4000
# How long a rank that has reported may take to end, on a machine whose cores are busy.
_SECONDS_TO_EXIT = 60.0
# How long a rank that has not reported may take to say where its threads are.
_SECONDS_TO_ANSWER = 5.0
# How long other ranks that are to end with the first one may take to report their own errors.
_SECONDS_TO_FOLLOW = 0.5


class RankError(RuntimeError):
    """A rank failed; the message names it and holds its traceback."""


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        rank: its number, over all machines.
        value: what its function returned.
        error: formatted traceback of what it raised, or one line about how else it ended; None if
            the function returned.
        stacks: of its threads, if it was killed because it was still running.
        exitcode: of its process; negative if a signal killed it.
        seconds: from when all ranks had been started until it reported or ended.
        died: whether it ended without a report, and the launcher had not killed it.
        killed: whether the launcher killed it.
        output: the end of what it printed.
    """

    rank: int
    value: Any = None
    error: str | None = None
    stacks: str = ""
    exitcode: int | None = None
    seconds: float = 0.0
    died: bool = False
    killed: bool = False
    output: str = ""

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.exitcode == 0


def launch(function: Callable[..., Any], world_size: int, *args: Any, **how: Any) -> list[Any]:
    """Calls ``function(rank, world_size, device, *args)`` on every rank of a new process group.

    The ranks end together: when one has raised or died, the others are killed.

    Args:
        function, world_size, args, how: of :func:`launch_each`, but for ``end_together``.

    Returns:
        The functions' results in rank order.

    Raises:
        ValueError: unknown backend, or no rank.
        torch.OutOfMemoryError: a rank ran out of device memory.
        RankError: a rank raised, died or outlived the deadline.
    """
    outcomes = launch_each(function, world_size, *args, end_together=True, **how)
    if any(outcome.error is not None for outcome in outcomes):
        import torch

        message = _describe(outcomes)
        if torch.OutOfMemoryError.__name__ in message.rstrip().rpartition("\n")[2]:
            raise torch.OutOfMemoryError(message)
        raise RankError(message)
    return [outcome.value for outcome in outcomes]


def launch_each(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 300.0,
    collective_timeout_s: float | None = None,
    end_together: bool = False,
    start_method: StartMethod | None = None,
    progress: Progress | None = None,
) -> list[RankOutcome]:
    """Calls ``function(rank, world_size, device, *args)`` on every rank, and tells how each ended.

    A rank that has stopped itself (SIGSTOP) is killed as soon as every other rank has ended.

    Args:
        function: importable (module-level) function; ``device`` is the rank's ``torch.device``.
        world_size: number of ranks, at least 1.
        args: picklable arguments.
        backend: "gloo" (CPU tensors) or "nccl" (local rank r uses ``cuda:r``).
        timeout_s: seconds after which a rank prints where it is and is killed.
        collective_timeout_s: the process group's own timeout, which its first connections need as
            well; None for ``timeout_s``.
        end_together: kill the other ranks when one has raised or died. Otherwise they live on to
            their own ends.
        start_method: how ranks come to be; None chooses fork or forkserver, as above. A profiler
            that follows programs rather than forks needs "spawn".
        progress: shows one line of text. If given, the function also gets ``progress=``, whose
            lines begin with ``rank N:``.

    Returns:
        One outcome for each rank, in rank order.

    Raises:
        ValueError: unknown backend, or no rank.
    """
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend must be gloo or nccl, but got {backend!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, but got {world_size}")
    if start_method is None:
        fresh = multiprocessing.current_process().name == PROCESS_NAME
        start_method = "fork" if fresh else "forkserver"
    if start_method == "forkserver":
        multiprocessing.set_forkserver_preload(PRELOAD)  # unless the server runs already
    context: Any = multiprocessing.get_context(start_method)
    processes: list[Any] = []
    pipes: list[Connection] = []
    prefix = temporary_prefix(os.getpid())
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        try:
            for number in range(world_size):
                ours, theirs = context.Pipe()
                # A forked rank inherits the other ends of the pipes before it, which would keep
                # them open when the launcher closes its own.
                inherited = [*pipes, ours] if start_method == "fork" else []
                process = context.Process(
                    target=_rank_main,
                    args=(number, world_size, theirs, inherited, function, args),
                    kwargs={
                        "backend": backend,
                        "timeout_s": collective_timeout_s or timeout_s,
                        "folder": Path(name),
                        "reports_progress": progress is not None,
                    },
                )
                with readable_main():
                    process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            start = time.monotonic()  # a fork server may have imported torch before
            launched = _Launched(processes, pipes, start, timeout_s, Path(name))
            return launched.outcomes(end_together, progress or (lambda text: None))
        finally:  # nothing is left to do, unless the launch itself was ended
            for process in processes:
                process.kill()
                process.join()


# ---- launcher ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Launched:
    """Ranks that run, and the launcher's ends of their pipes."""

    processes: Sequence[Any]
    pipes: Sequence[Connection]
    start: float
    timeout_s: float
    folder: Path

    def outcomes(self, end_together: bool, progress: Progress) -> list[RankOutcome]:
        """Waits until all ranks have ended, or kills them at the deadline."""
        found = self._reports(end_together, progress)
        failed = any(each.error is not None for each in found.values())
        for i, process in enumerate(self.processes):
            if i not in found:
                stacks = ""
                if _is_stopped(process.pid):
                    error = "stopped by SIGSTOP; killed"
                elif end_together and failed:
                    error = "killed, because another rank had failed"
                else:
                    error = f"still running after {self.timeout_s:g} s; killed"
                    stacks = _stacks(process.pid, self.folder / f"stacks-{i}")
                process.kill()  # before its pipe is closed, which it would take for our end
                process.join()
                seconds = time.monotonic() - self.start
                found[i] = RankOutcome(
                    rank=i, error=error, stacks=stacks, seconds=seconds, killed=True
                )
        for pipe in self.pipes:
            pipe.close()  # ranks that have returned wait for this
        return [self._ended(found[i]) for i in range(len(self.processes))]

    def _ended(self, rank: RankOutcome) -> RankOutcome:
        """The outcome of a rank that has reported or was killed, once its process has ended."""
        process, error = self.processes[rank.rank], rank.error
        process.join(_SECONDS_TO_EXIT)
        late = process.is_alive()
        process.kill()
        process.join()
        if late and error is None:
            error = f"still running {_SECONDS_TO_EXIT:g} s after it had reported; killed"
        if rank.died:
            error = f"{error} (exit code {process.exitcode})"
        return dataclasses.replace(
            rank,
            error=error,
            exitcode=process.exitcode,
            killed=rank.killed or (late and rank.error is None),
            output=_output(self.folder / f"output-{rank.rank}") if error else "",
        )

    def _reports(self, end_together: bool, progress: Progress) -> dict[int, RankOutcome]:
        """What ranks report until all have, or until the deadline; see ``end_together``."""
        reports: dict[int, RankOutcome] = {}
        deadline = self.start + self.timeout_s
        while len(reports) < len(self.pipes) and (left := deadline - time.monotonic()) > 0:
            waited_for = [i for i in range(len(self.pipes)) if i not in reports]
            if all(_is_stopped(self.processes[i].pid) for i in waited_for):
                break
            # Asked before the pipes, in which ranks that have ended may have left their reports.
            # What a rank forked may keep its pipe open.
            ended = [i for i in waited_for if self.processes[i].exitcode is not None]
            ready = multiprocessing.connection.wait(
                [self.pipes[i] for i in waited_for], timeout=0.0 if ended else min(0.2, left)
            )
            for i in waited_for:
                if self.pipes[i] not in ready and i not in ended:
                    continue
                try:
                    if not self.pipes[i].poll():
                        raise EOFError
                    kind, *content = self.pipes[i].recv()
                except (EOFError, OSError):
                    kind, content = "died", [None, "died without a report"]
                if kind == "progress":
                    progress(f"rank {i}: {content[0]}")
                    continue
                value, error = content
                seconds, died = time.monotonic() - self.start, kind == "died"
                reports[i] = RankOutcome(
                    rank=i, value=value, error=error, seconds=seconds, died=died
                )
                if error is not None and end_together:
                    deadline = min(deadline, time.monotonic() + _SECONDS_TO_FOLLOW)
        return reports


def _is_stopped(pid: int) -> bool:
    """Whether a process waits for SIGCONT; always False where there is no /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _stacks(pid: int, path: Path) -> str:
    """The stacks of a rank's threads, which it writes itself; empty if it does not in time."""
    with suppress(OSError):
        os.kill(pid, signal.SIGUSR1)
    deadline, size = time.monotonic() + _SECONDS_TO_ANSWER, -1
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, size = size, path.stat().st_size if path.exists() else 0
        if size == before > 0:
            break
    return path.read_text() if path.exists() else ""


def _output(path: Path) -> str:
    """The end of what a rank printed."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            return file.read().decode(errors="replace").strip()
    except FileNotFoundError:  # it died before it was ready
        return ""


def _describe(outcomes: Sequence[RankOutcome]) -> str:
    """One message for ranks that ended together: which failed first, why, and who did not report.

    Others that lose the connection to a dead rank may report that before the launcher learns of the
    death, so a death counts as earlier than it was noticed.
    """
    own = [o for o in outcomes if o.error is not None and not o.killed]
    killed = [outcome for outcome in outcomes if outcome.killed]
    if not own:
        return f"rank {killed[0].rank} was {killed[0].error}\n{killed[0].stacks}"
    first = min(own, key=lambda o: o.seconds - (_SECONDS_TO_FOLLOW if o.died else 0.0))
    if first.died:
        code = first.exitcode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        return f"rank {first.rank} {how}\n{first.output}"
    others = ""
    if killed:
        others = f" (rank {', '.join(str(o.rank) for o in killed)} left no report, and was killed)"
    return f"rank {first.rank} failed{others}: {first.error}"


# ---- rank ----------------------------------------------------------------------------------------


def _rank_main(
    rank: int,
    world_size: int,
    pipe: Connection,
    inherited: Sequence[Connection],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    backend: str,
    timeout_s: float,
    folder: Path,
    reports_progress: bool,
) -> None:
    """Runs a rank: the process group, the function, and an orderly end."""
    for other in inherited:
        other.close()
    # As torchrun sets them, for code that asks.
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    with (folder / f"output-{rank}").open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    stacks = (folder / f"stacks-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, stacks)
    faulthandler.enable(sys.__stderr__ or stacks)
    done = threading.Event()
    watch = threading.Thread(target=_watch_launcher, args=(pipe, done, folder), daemon=True)
    watch.start()

    import torch.distributed as dist

    # What has been imported stays; looking through it takes most of a collection's time.
    gc.freeze()
    try:
        device = _device(rank, world_size, backend)
        dist.init_process_group(
            backend,
            # In a file, because a port would be open to the network.
            store=dist.FileStore(str(folder / "store"), world_size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if backend == "nccl" else None,
        )
        extra: dict[str, Any] = {}
        if reports_progress:
            extra["progress"] = lambda text: pipe.send(("progress", text[:1000]))
        value = function(rank, world_size, device, *args, **extra)
        done.set()
        pipe.send(("returned", value, None))
        watch.join()  # until the launcher has heard of every rank, and closes the pipe
    except BaseException as error:  # noqa: BLE001 - whatever it is, the rank has failed
        # Before the group is destroyed: that makes the peers fail too, with errors that would
        # otherwise be older than this one.
        done.set()
        pipe.send(("raised", None, f"{in_one_line(error)}\n{traceback.format_exc()}"))
        if backend == "nccl":  # which destroys a group that has lost a rank in about a minute
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _device(rank: int, world_size: int, backend: str) -> Any:
    """The rank's ``torch.device``, which is made the current one; a CPU's cores are shared."""
    import torch

    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        return device
    known = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // world_size))
    return torch.device("cpu")


def _watch_launcher(pipe: Connection, done: threading.Event, folder: Path) -> None:
    """Waits until the launcher closes the pipe; ends a rank that has not reported by then."""
    with suppress(EOFError, OSError):
        pipe.recv()
    if not done.is_set():  # the launcher is gone, so this rank removes its folder
        shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)
