"""Runs a function on several ranks, each in its own process: the one launcher of all tests.

Ranks meet through a file store, so no port can be taken; every wait has a deadline; a rank's
traceback reaches the test, as do the stacks of one that is killed because it is still running; a
rank destroys its process group, unless it failed over NCCL. A rank that has stopped itself is
killed as soon as every other rank has ended.

A rank whose function returned keeps its process group until every other rank has returned, raised
or died. On a busy machine one rank may still be connecting when another is done, and gloo reports
a rank that leaves meanwhile as a broken connection. A rank whose function raised leaves at once, as
a failing training script does.

Ranks treat warnings as the test does that launches them: as errors, but for those that
``pyproject.toml`` or a mark of the test excepts.

Ranks on CPU are forked from a server process that has torch imported already, which makes a
two-rank test start in about a tenth of a second. Ranks on GPUs are started afresh: CUDA cannot be
used in a process whose parent has asked for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.forkserver
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

# torch.optim imports torch._dynamo when the first optimizer is made: seconds, in every rank. Test
# files import pytest and what they test, which takes longer than the start of a rank and most
# checks.
_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "pytest"]
_PRELOAD += ["ddp_lite", "shard_optim", "ranks"]

# How long a rank that has reported may take to end, on a machine whose cores are busy.
_SECONDS_TO_EXIT = 60.0
# How long a rank that has not reported may take to say where its threads are.
_SECONDS_TO_ANSWER = 5.0


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended.

    ``value`` is what the function returned; ``error`` the formatted traceback of what it raised;
    ``exitcode`` the process's (negative: killed by that signal); ``seconds`` since the launch.
    """

    rank: int
    value: Any
    error: str | None
    exitcode: int | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return self.error is None and self.exitcode == 0


class RanksFailed(AssertionError):  # noqa: N818 - a failed assertion, named as one
    """At least one rank raised, died, or outlived the timeout."""


def start_server() -> None:
    """Starts the server that ranks on CPU are forked from; returns while it is importing torch."""
    multiprocessing.set_forkserver_preload(_PRELOAD)
    multiprocessing.forkserver.ensure_running()


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float = 120.0,
    collective_timeout: float = 60.0,
    check: bool = True,
) -> list[RankOutcome]:
    """Calls ``function(rank, world_size, *args)`` on every rank of a new process group.

    Args:
        function: a module-level function of a test file.
        args: picklable; tensors should be small.
        backend: "gloo" on CPU; "nccl" also makes rank r use ``cuda:r``.
        timeout: seconds until ranks still running are killed and reported. The default leaves room
            for a machine whose cores are busy with something else.
        collective_timeout: the process group's own timeout in seconds, which its first connections
            need as well. A test of what happens after a timeout shortens it with
            ``set_collective_timeout`` when its ranks have connected.
        check: raise if any rank failed. With False the caller inspects the outcomes (fault tests).

    Returns:
        One outcome per rank, in rank order.

    Raises:
        RanksFailed: with every failed rank's traceback or signal.
    """
    context: multiprocessing.context.SpawnContext | multiprocessing.context.ForkServerContext
    if backend == "nccl":
        context = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        start_server()
    source = (Path(inspect.getfile(function)).resolve(), function.__qualname__)
    filters = [tuple(getattr(part, "pattern", part) for part in each) for each in warnings.filters]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes: list[Any] = []
        pipes = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                about = (theirs, filters, source, rank, world_size, folder, backend)
                process = context.Process(
                    target=_rank_main, args=(*about, collective_timeout, args), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            outcomes = _collect(processes, pipes, start, timeout, Path(folder))
        finally:  # nothing is left to do, unless the test itself was ended
            for process in processes:
                process.kill()
                process.join()
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if check and failed:
        raise RanksFailed("\n\n".join(_describe(outcome) for outcome in failed))
    return outcomes


def set_collective_timeout(seconds: float) -> None:
    """Changes the default process group's own timeout, on the rank that calls it."""
    import torch.distributed as dist

    # torch 2.15 gave it a public name.
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
    set_timeout(timedelta(seconds=seconds), dist.group.WORLD)


def _describe(outcome: RankOutcome) -> str:
    cause = outcome.error or f"exit code {outcome.exitcode}"
    return f"rank {outcome.rank} after {outcome.seconds:.1f} s: {cause}"


def _collect(
    processes: Sequence[Any],
    pipes: Sequence[multiprocessing.connection.Connection],
    start: float,
    timeout: float,
    folder: Path,
) -> list[RankOutcome]:
    messages: dict[int, tuple[Any, str | None, float]] = {}
    while len(messages) < len(pipes) and time.monotonic() - start < timeout:
        waited_for = [rank for rank in range(len(pipes)) if rank not in messages]
        if all(_is_stopped(processes[rank].pid) for rank in waited_for):
            break
        ready = multiprocessing.connection.wait([pipes[rank] for rank in waited_for], timeout=0.2)
        for rank, pipe in enumerate(pipes):
            if pipe not in ready:
                continue
            try:
                value, error = pipe.recv()
            except (EOFError, OSError):
                value, error = None, "died without a report"
            messages[rank] = (value, error, time.monotonic() - start)
    for pipe in pipes:
        pipe.close()  # ranks that have returned wait for this
    outcomes = []
    for rank, process in enumerate(processes):
        late = rank not in messages
        process.join(0 if late else _SECONDS_TO_EXIT)
        late = late or process.is_alive()
        stopped = late and _is_stopped(process.pid)
        stacks = _stacks(process.pid, folder / f"stacks-{rank}") if late and not stopped else ""
        if late:
            process.kill()
            process.join()
        value, error, seconds = messages.get(rank, (None, None, time.monotonic() - start))
        if late and error is None:
            error = f"still running after {timeout:.0f} s; killed\n{stacks}"
            if stopped:
                error = "stopped by SIGSTOP; killed"
        if error == "died without a report":
            error = f"died without a report (exit code {process.exitcode})"
        outcomes.append(RankOutcome(rank, value, error, process.exitcode, seconds))
    return outcomes


def _stacks(pid: int, path: Path) -> str:
    """The stacks of a rank's threads, which it writes itself; empty if it does not in time."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGUSR1)
    deadline, size = time.monotonic() + _SECONDS_TO_ANSWER, -1
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, size = size, path.stat().st_size if path.exists() else 0
        if size == before > 0:
            break
    return path.read_text() if path.exists() else ""


def _is_stopped(pid: int) -> bool:
    """Whether a process waits for SIGCONT; always False where there is no /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _load(path: Path) -> ModuleType:
    """Imports a test file by path: its module name exists only inside pytest's own import mode."""
    name = "rank_" + path.stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _rank_main(
    pipe: multiprocessing.connection.Connection,
    filters: Sequence[tuple[Any, ...]],
    source: tuple[Path, str],
    rank: int,
    world_size: int,
    folder: str,
    backend: str,
    collective_timeout: float,
    args: tuple[Any, ...],
) -> None:
    _set_warning_filters(filters)

    import torch
    import torch.distributed as dist

    stacks = Path(folder, f"stacks-{rank}").open("w")  # noqa: SIM115 - until the process ends
    faulthandler.register(signal.SIGUSR1, stacks)
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported stays; no collection of garbage need look at it again
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=collective_timeout),
            device_id=torch.device("cuda", rank) if backend == "nccl" else None,
        )
        path, name = source
        pipe.send((getattr(_load(path), name)(rank, world_size, *args), None))
        with contextlib.suppress(EOFError, OSError):
            pipe.recv()  # returns when the launcher has heard of every rank, and closes the pipe
    except BaseException:  # noqa: BLE001 - the test must see whatever ended the rank
        pipe.send((None, traceback.format_exc()))
        if backend == "nccl":  # which destroys a group that has lost a rank in about a minute
            sys.stderr.flush()
            os._exit(1)
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _set_warning_filters(filters: Sequence[tuple[Any, ...]]) -> None:
    """Makes these the filters of this process, the first one first."""
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        warnings.filterwarnings(action, message or "", category, module or "", line)
