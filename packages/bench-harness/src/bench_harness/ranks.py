"""Runs a function on several ranks through torch's own elastic launcher.

Ranks are forked from a process that has torch imported. Those of one machine meet through a file,
those of several through a store on the network. They end together: a rank that raises, dies or
outlives the deadline ends the launch with one error that names it and carries its traceback.

The process of a case was itself forked from a server with torch imported and has not computed
anything yet, so ranks are forked from it directly. Any other process may hold thread pools that a
fork would break, so its ranks come from a fork server, at the price of one more import of torch.
There they are the server's children, not the launcher's, so each rank also watches the launcher
and ends when that is gone.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import json
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from bench_harness.process import PROCESS_NAME, Progress, temporary_prefix

_LIFELINE = "launcher-is-alive"
#: Of the file through which the ranks of one machine meet.
_STORE = "store"
#: The name under which torch's launcher finds :func:`_one_machine`.
_RENDEZVOUS = "bench-one-machine"


class RankError(RuntimeError):
    """A rank failed; the message names it and holds its traceback."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines that take part in a launch; the default is this one alone.

    Attributes:
        nnodes: number of machines, each running the same command.
        rdzv_endpoint: ``host:port`` of the machine that hosts the rendezvous; port 0 means free.
        node_rank: this machine's number; that of 0 hosts the rendezvous.
        run_id: name that the machines share; None makes a fresh one (one machine only).
    """

    nnodes: int = 1
    rdzv_endpoint: str = "localhost:0"
    node_rank: int = 0
    run_id: str | None = None

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise ValueError(f"nnodes must be at least 1, but got {self.nnodes}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"node_rank must be from 0 to {self.nnodes - 1}, but got {self.node_rank}"
            )
        if self.nnodes == 1:
            return
        host, _, port = self.rdzv_endpoint.rpartition(":")
        if self.run_id is None or not host or not port.isdigit() or int(port) == 0:
            raise ValueError(
                "several nodes must share run_id and a rdzv_endpoint host:port with a fixed port, "
                f"but got run_id={self.run_id!r}, rdzv_endpoint={self.rdzv_endpoint!r}"
            )

    @property
    def on_loopback(self) -> bool:
        """Whether the machines meet on the loopback address, so that all of them are this one."""
        return self.rdzv_endpoint.rpartition(":")[0] in ("localhost", "127.0.0.1")


def launch(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 300.0,
    nodes: Nodes | None = None,
    start_method: Literal["fork", "forkserver", "spawn"] | None = None,
    progress: Progress | None = None,
) -> list[Any]:
    """Calls ``function(rank, world_size, device, *args)`` on every rank of a new process group.

    Args:
        function: importable (module-level) function; ``device`` is the rank's ``torch.device``.
        world_size: ranks over all nodes; must be a multiple of the number of nodes.
        args: picklable arguments.
        backend: "gloo" (CPU tensors) or "nccl" (local rank r uses ``cuda:r``).
        timeout_s: seconds after which a rank prints where it is and ends; also the process
            group's own timeout for one collective.
        nodes: machines that take part.
        start_method: how ranks come to be; None chooses fork or forkserver, as above. A profiler
            that follows programs rather than forks needs "spawn".
        progress: shows one line of text. If given, the function also gets ``progress=``, whose
            lines begin with ``rank N:``. Only forked ranks can reach it; others are silent.

    Returns:
        The functions' results in rank order, those of other machines included.

    Raises:
        ValueError: unknown backend, or a world size that the nodes cannot share evenly.
        torch.OutOfMemoryError: a rank ran out of device memory.
        RankError: a rank raised, died or outlived the deadline, or a machine did not come.
    """
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend must be gloo or nccl, but got {backend!r}")
    nodes = nodes or Nodes()
    if world_size < 1 or world_size % nodes.nnodes:
        raise ValueError(
            f"world_size must be a positive multiple of {nodes.nnodes} nodes, but got {world_size}"
        )
    if start_method is None:
        fresh = multiprocessing.current_process().name == PROCESS_NAME
        start_method = "fork" if fresh else "forkserver"
    if start_method == "forkserver":
        # Before torch is imported here, so that both imports overlap. torch._dynamo is what making
        # any torch optimizer imports.
        multiprocessing.set_forkserver_preload(
            ["torch", "torch.distributed", "torch._dynamo", __name__]
        )

    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError, rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    from torch.numa.binding import AffinityMode, NumaOptions

    with (
        tempfile.TemporaryDirectory(prefix=temporary_prefix(os.getpid())) as folder,
        _held_lock(Path(folder) / _LIFELINE),
        _quiet_launcher(),
    ):
        alone = nodes.nnodes == 1
        if alone:
            rendezvous_handler_registry.register(_RENDEZVOUS, _one_machine)
        config = LaunchConfig(
            min_nodes=nodes.nnodes,
            max_nodes=nodes.nnodes,
            nproc_per_node=world_size // nodes.nnodes,
            run_id=nodes.run_id or uuid.uuid4().hex,
            rdzv_backend=_RENDEZVOUS if alone else "c10d",
            rdzv_endpoint=str(Path(folder) / _STORE) if alone else nodes.rdzv_endpoint,
            rdzv_configs={
                "timeout": max(1, int(timeout_s)),
                "join_timeout": max(1, int(timeout_s)),
                "is_host": nodes.node_rank == 0,
            },
            max_restarts=0,
            monitor_interval=0.05,
            start_method=start_method,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
            local_addr="127.0.0.1" if alone or nodes.on_loopback else None,
            # Without any, the configuration would count CUDA devices to choose a default, and then
            # no fork of this process may use CUDA. Ranks are not bound, as by that default.
            numa_options=NumaOptions(affinity_mode=AffinityMode.NODE),
        )
        config.numa_options = None
        try:
            reach = progress if start_method == "fork" or progress is None else _silent
            results = elastic_launch(config, _rank_main)(
                function, backend, timeout_s, folder, not alone, args, reach
            )
        except RendezvousError as error:
            raise RankError(
                f"{nodes.nnodes} machines must meet at {nodes.rdzv_endpoint} within "
                f"{timeout_s:g} s, but got {error or type(error).__name__}. Give the same command "
                "on each, and check that they can reach that address."
            ) from None
        except ChildFailedError as error:
            message = _describe(error, Path(folder), world_size, timeout_s)
            if torch.OutOfMemoryError.__name__ in message.rstrip().rpartition("\n")[2]:
                raise torch.OutOfMemoryError(message) from None
            raise RankError(message) from None
    if not alone:
        everyone: list[Any] = next(iter(results.values()))
        return everyone
    return [results[rank] for rank in sorted(results)]


def _rank_main(
    function: Callable[..., Any],
    backend: str,
    timeout_s: float,
    folder: str,
    several_machines: bool,
    args: tuple[Any, ...],
    progress: Progress | None,
) -> Any:
    """What every rank runs: deadline, process group, the function, and an orderly end.

    Args:
        several_machines: the ranks meet through the network, and each returns the results of all,
            so that those of other machines reach the launcher.
    """
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    threading.Thread(target=_end_with_launcher, args=(Path(folder),), daemon=True).start()
    with (Path(folder) / f"late-{rank}").open("w", encoding="utf-8") as late:
        # Ends the process from a thread that needs no interpreter lock: a hang cannot block it.
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=late)
        try:
            if backend == "nccl":
                device = torch.device("cuda", local_rank)
                torch.cuda.set_device(device)
            else:
                device = torch.device("cpu")
                torch.set_num_threads(max(1, _cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
            meeting: dict[str, Any] = {}
            if not several_machines:
                # A store on a port would be open to the network, and torch cannot bind it to the
                # loopback.
                meeting_point = str(Path(folder) / f"{_STORE}-of-ranks")
                store = dist.FileStore(meeting_point, world_size)  # type: ignore[attr-defined]
                meeting = {"store": store, "rank": rank, "world_size": world_size}
            dist.init_process_group(
                backend,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if backend == "nccl" else None,
                **meeting,
            )
            extra: dict[str, Any] = {}
            if progress is not None:
                # Lines shorter than a page are written to a pipe as a whole, from any process.
                extra["progress"] = lambda text: progress(f"rank {rank}: {text}"[:1000])
            # What has been imported stays; looking through it takes most of a collection's time.
            gc.freeze()
            result = function(rank, world_size, device, *args, **extra)
            if several_machines:
                everyone: list[Any] = [None] * world_size
                dist.all_gather_object(everyone, result)
                result = everyone
            (Path(folder) / f"done-{rank}").touch()
            return result
        except BaseException:  # noqa: BLE001 - whatever it is, the rank has failed
            # Before the group is destroyed: that makes the peers fail too, with errors that would
            # otherwise be older than this one.
            report = {"time_ns": time.time_ns(), "traceback": traceback.format_exc()}
            (Path(folder) / f"error-{rank}").write_text(json.dumps(report), encoding="utf-8")
            # Any other exception would make torch leave a file in the folder for temporary files.
            raise SystemExit(1) from None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            faulthandler.cancel_dump_traceback_later()


def _silent(text: str) -> None:
    """Shows nothing."""


def _one_machine(parameters: Any) -> Any:
    """The rendezvous of a launch that has this machine alone, which is over when it begins.

    torch's own would open a port on all interfaces, and wait up to 0.3 seconds for other machines.

    Args:
        parameters: torch's ``RendezvousParameters``, whose endpoint is the path of a file.
    """
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import (
        RendezvousHandler,
        RendezvousInfo,
        RendezvousStoreInfo,
    )

    class OneMachine(RendezvousHandler):
        """Answers the launcher like a rendezvous in which this machine is the only participant."""

        closed = False

        def get_backend(self) -> str:
            return _RENDEZVOUS

        def get_run_id(self) -> str:
            return str(parameters.run_id)

        def next_rendezvous(self) -> RendezvousInfo:
            store = dist.FileStore(parameters.endpoint)  # type: ignore[attr-defined]
            nowhere = RendezvousStoreInfo("127.0.0.1", 0)  # ranks meet through a file too
            return RendezvousInfo(store, 0, 1, nowhere)

        def num_nodes_waiting(self) -> int:
            return 0

        def is_closed(self) -> bool:
            return self.closed

        def set_closed(self) -> None:
            self.closed = True

        def shutdown(self) -> bool:
            return True

    return OneMachine()


@contextmanager
def _held_lock(path: Path) -> Iterator[None]:
    """Holds a lock that the kernel releases when this process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _end_with_launcher(folder: Path) -> None:
    """Waits for the launcher's lock. A rank gets it once the launcher is gone; removes its folder.

    A rank that finds no lock has come too late: the folder is gone already.
    """
    with suppress(FileNotFoundError), (folder / _LIFELINE).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _describe(error: Any, folder: Path, world_size: int, timeout_s: float) -> str:
    """One message for a failed launch: the rank that failed first, why, and who left no word."""
    for rank in range(world_size):
        late = folder / f"late-{rank}"
        if late.is_file() and (stack := late.read_text(encoding="utf-8")):
            return f"rank {rank} was still running after {timeout_s:g} s and was ended at:\n{stack}"
    reports = {
        int(file.name.partition("-")[2]): json.loads(file.read_text(encoding="utf-8"))
        for file in folder.glob("error-*")
    }
    silent = [
        rank
        for rank in range(world_size)
        if rank not in reports and not (folder / f"done-{rank}").exists()
    ]
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        return f"rank {rank} was ended by signal {failure.signal_name()}\n{_output(folder, rank)}"
    if not reports:
        return f"rank {rank} ended with exit code {failure.exitcode}\n{_output(folder, rank)}"
    first = min(reports, key=lambda rank: int(reports[rank]["time_ns"]))
    others = ""
    if silent:
        others = (
            f" (rank {', '.join(map(str, silent))} left no report: "
            "killed, or still running when the launch was ended)"
        )
    return f"rank {first} failed{others}:\n{reports[first]['traceback']}"


def _output(folder: Path, rank: int) -> str:
    """The end of what the rank wrote to its standard error."""
    texts = [
        file.read_text(encoding="utf-8", errors="replace")
        for file in folder.glob(f"**/{rank}/stderr.log")
    ]
    return "".join(texts)[-4000:].strip()


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """The launcher logs each failure that is raised here anyway; keeps that off the terminal."""
    loggers = [
        logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")
    ]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
