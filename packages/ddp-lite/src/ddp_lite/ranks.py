"""The ranks of a process group: messages between them, agreement, and errors that name who failed.

This module knows nothing of gradients. Every package that keeps replicas or shards equal needs it:

===============================  ================================================================
``resolve_group(group)``         the process group meant by a group, a one-dimensional mesh or None
``Ranks(group, device, owner)``  collective; one per wrapper or optimizer, made in its constructor
``ranks.call(what, f, *args)``   runs a collective; a failure names ``what`` and the lost ranks
``ranks.together(what, ...)``    the same for a call that some ranks might not make
``ranks.agree(facts, ...)``      raises the same error on every rank if the ranks' facts differ
``ranks.gather(value)``          one JSON value from each rank
``ranks.overwrite_with_rank_0``  tensors take rank 0's values
``ranks.absentees(report)``      the ranks that do not come to the same point, without a collective
===============================  ================================================================

**Naming failures.** A collective that fails says only "connection closed" or "timed out". Before
that error is passed on, the surviving ranks look for each other through the process group's store,
and at the processes of ranks on their own host, so that the error names the rank that died, stopped
or strayed. A collective may hang for as long as the process group's timeout; the search adds at
most ``PROBE_SECONDS``, and one second more if the store does not answer because the process that
hosts it has stopped: such calls block in C++ whatever the store's timeout is.

**Collectives that do not meet.** gloo matches the collectives of one group by their order alone. If
ranks differ in what they call, messages of different sizes meet, and gloo ends the process that
receives the wrong one by SIGABRT. So on gloo a ``Ranks`` sends over connections of its own, as MPI
libraries duplicate their communicator: ``communicator`` for collectives whose order and sizes the
ranks have agreed on, ``control`` for all others. ``together`` begins on ``control`` with a message
of fixed size that says what follows. A rank that calls something else is then a named error.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors
from torch.distributed.device_mesh import DeviceMesh

from ddp_lite.errors import (
    ModelMismatchError,
    PeerFailureError,
    StepMismatchError,
    SynchronizationError,
)

MEBIBYTE = 1024**2
PROBE_SECONDS = 2.0
_BROADCAST_CHUNK_BYTES = 256 * MEBIBYTE
_MOST_MESSAGE_BYTES = 256 * MEBIBYTE  # a rank holds the messages of all ranks at once
_PAUSE_BEFORE_EXIT_SECONDS = 0.1
_PROCESS_STATES = {"T": "is stopped", "t": "is stopped", "Z": "has exited", "X": "has exited"}

Result = TypeVar("Result")


# -- groups ------------------------------------------------------------------------------------


def resolve_group(
    group: dist.ProcessGroup | DeviceMesh | None, *, before: str = "a module is wrapped"
) -> dist.ProcessGroup:
    """The process group meant by a group, a one-dimensional mesh, or None (the default group).

    Args:
        group: as a user gave it.
        before: the action that needs the group, for the error.

    Raises:
        RuntimeError: no process group is initialised.
        ValueError: the mesh has several dimensions, or this rank is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"a process group must exist before {before}. Call "
            "torch.distributed.init_process_group() first."
        )
    _pause_before_exit()
    if group is None:
        default = dist.group.WORLD
        assert default is not None
        return default
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"a device mesh must have one dimension, but got {group.ndim} "
                f"({group.mesh_dim_names}). Pass one of them, mesh['name']"
            )
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "this rank must belong to the process group, but got a group it is not part of. "
            "Wrap only on the ranks of the group"
        )
    return group


@functools.cache
def _pause_before_exit() -> None:
    """Gives gloo's threads a moment before the interpreter finalises; works once per process.

    A collective that is started during backward keeps a Python object of torch's, the context in
    which backward runs. The gloo thread that carried the collective out releases it afterwards, for
    which it needs Python's global lock. If the program has begun to exit by then, the interpreter
    ends that thread and the process aborts with "terminate called without an active exception"
    after all its work is done (seen with torch 2.15). A sleeping main thread hands over the lock.
    """
    atexit.register(time.sleep, _PAUSE_BEFORE_EXIT_SECONDS)


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The name of the backend that serves ``device`` in ``group``, None if none does."""
    for pair in dist.get_backend_config(group).split(","):
        kind, _, name = pair.partition(":")
        if kind == device.type:
            return name
    return None


def finish(work: dist.Work | None) -> None:
    """Waits for a collective that was started asynchronously, and must have ended by now.

    torch heeds TORCH_NCCL_BLOCKING_WAIT in asynchronous collectives alone: after a synchronous one
    the host would wait without end for messages of a lost rank.
    """
    if work is not None:
        work.wait()


# -- the interface -----------------------------------------------------------------------------


class Ranks:
    """The ranks that synchronise with each other, seen from one of them. Collective to build.

    Build one in the constructor of each wrapper or optimizer and keep it there: a cache by process
    group would hold it for ever, and building one lazily would be a collective in a surprising
    place.

    Args:
        group: the ranks.
        device: where the group's collectives run.
        owner: name of the class that is being constructed, for errors.
        error: raised when a collective fails.

    Attributes:
        group, device, owner: as given.
        rank, size: of this process in the group, and of the group.
        step: the number of the step that is being made, which errors name and under which reports
            are left. Whoever makes steps counts it up, alike on every rank.
        communicator: takes the collectives whose order and sizes all ranks have agreed on. It has
            the methods of a ``ProcessGroup`` (``allreduce``, ``broadcast``, ...).
        control: takes all other collectives; see ``together``.
        has_own_connections: these two are connections of its own, not the group itself.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        owner: str,
        *,
        error: type[PeerFailureError] = PeerFailureError,
    ) -> None:
        self.group, self.device, self.owner = group, device, owner
        self.rank, self.size = group.rank(), group.size()
        self.step = 0
        self._error = error
        self._meetings = 0
        self.has_own_connections = self.size > 1 and backend_for(group, device) == "gloo"
        self._used_timeout: timedelta | None = None
        begin = time.monotonic()
        try:
            everyone = all_gather_json([os.getpid(), _where(), uuid.uuid4().hex], group)
            self._pids, self._places, names = zip(*everyone, strict=True)
            self._name = str(names[0])  # the same on all ranks, and of no other object
            self.communicator = self._connect("communicator")
            self.control = self._connect("control")
        except RuntimeError as failure:
            raise self._error(
                f"every rank must construct its {owner}, but the first exchange failed on rank "
                f"{self.rank} of {self.size} after {time.monotonic() - begin:.1f} s: a "
                f"peer exited or did something else. The backend reported: {failure}"
            ) from failure

    def _connect(self, purpose: str) -> Any:
        """Connections of the ranks that nothing else uses, on gloo; elsewhere the group itself."""
        if not self.has_own_connections:
            return self.group
        from torch.distributed import ProcessGroupGloo  # only some builds of torch have it

        timeout = self.group._get_backend(self.device).options._timeout
        return ProcessGroupGloo(self._store(purpose), self.rank, self.size, timeout=timeout)

    # -- running collectives -------------------------------------------------------------------

    def call(self, what: str, call: Callable[..., Result], *arguments: Any) -> Result:
        """Calls ``call(*arguments)``, a collective named ``what`` in errors.

        Raises:
            PeerFailureError: from the backend's own error; see ``error``.
            SynchronizationError: this process is a child that was forked after construction.
        """
        self.require_same_process()
        self.follow_timeout()
        begin = time.monotonic()
        try:
            return call(*arguments)
        except RuntimeError as error:
            self.raise_named(what, begin, error)

    def together(self, what: str, call: Callable[..., Result], *arguments: Any) -> Result:
        """Like ``call``, for a collective on ``control`` that some ranks might not run.

        On gloo the ranks first compare what they are about to run, by 16 bytes.

        Raises:
            StepMismatchError: on every rank, if a rank is about to run something else.
        """
        if self.has_own_connections:
            self.call(what, self._compare, what)
        return self.call(what, call, *arguments)

    def _compare(self, what: str) -> None:
        digest = hashlib.sha256(f"{what} {self.step}".encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        # max(x) == -max(-x) exactly when every rank sent the same x.
        bounds = torch.tensor([number, -number], dtype=torch.int64, device="cpu")
        all_reduce(self.control, bounds, dist.ReduceOp.MAX)
        if bounds[0] != -bounds[1]:
            raise self.disagreement(f"it is about to run {what}")

    def raise_named(self, what: str, begin: float, error: RuntimeError) -> NoReturn:
        """Raises a backend's error with names, and any other as it is, like lack of memory.

        Args:
            what: the collective, in words.
            begin: when it began, by ``time.monotonic()``.
            error: raised by the backend.
        """
        if isinstance(error, SynchronizationError | torch.OutOfMemoryError):
            raise error
        raise self.failure(what, self.step, time.monotonic() - begin, error) from error

    def require_same_process(self) -> None:
        """Refuses a child process, whose messages no rank would answer.

        Raises:
            SynchronizationError: this process was forked from the one that built this object.
        """
        if os.getpid() != self._pids[self.rank] and self.size > 1:
            raise SynchronizationError(
                f"the {self.owner} of process {self._pids[self.rank]} cannot synchronise in "
                f"process {os.getpid()}, which was forked from it and is no rank. Run "
                "backward there on the plain module (wrapped.detach()), or start the process with "
                'the method "spawn"'
            )

    def follow_timeout(self) -> None:
        """The group's timeout, which a program may change, holds for own connections from here on.

        Call once in every step in which collectives do not go through ``call``.
        """
        if not self.has_own_connections:
            return
        timeout: timedelta = self.group._get_backend(self.device).options._timeout
        if timeout != self._used_timeout:
            self._used_timeout = timeout
            self.communicator._set_default_timeout(timeout)
            self.control._set_default_timeout(timeout)

    # -- messages ------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """One JSON value from each rank, in rank order; see ``all_gather_json``. Collective."""
        return all_gather_json(value, self.control)

    def agree(
        self,
        facts: Sequence[tuple[str, str]],
        *,
        must: str,
        remedy: str,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        """Compares facts over the ranks. Collective.

        Facts are compared by digest, so that a thousand ranks that agree exchange 64 bytes each.
        Only when digests differ are the facts themselves gathered.

        Args:
            facts: (name, text) pairs of this rank, the most general first.
            must: the duty of every rank, for the error: "every rank must ...".
            remedy: the way out, for the error.
            gather: gives one JSON value from each rank that must agree; None for these ranks.

        Raises:
            ModelMismatchError: on every rank, naming the differences and their ranks.
        """
        gather = gather or self.gather
        if len(set(gather(hashlib.sha256(repr(list(facts)).encode()).hexdigest()))) == 1:
            return
        differences = _differences(gather(list(facts)))
        shown = shortened(differences, separator="\n  ")
        raise ModelMismatchError(
            f"every rank must {must}, but {len(differences)} entries differ:\n  {shown}\n{remedy}"
        )

    def overwrite_with_rank_0(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites tensors with rank 0's values, many tensors per broadcast. Collective.

        Tensors of one dtype and device are packed into chunks of at most 256 MB, so the extra
        memory is bounded whatever the model's size.

        Args:
            tensors: the same shapes and dtypes in the same order on every rank.
        """
        if self.size == 1:
            return
        with torch.no_grad():
            for chunk in _take_tensors([t for t in tensors if t.numel()], _BROADCAST_CHUNK_BYTES):
                flat = _flatten_dense_tensors(chunk)
                broadcast(self.control, flat.view(torch.uint8))  # back ends lack some dtypes
                torch._foreach_copy_(chunk, list(_unflatten_dense_tensors(flat, chunk)))

    # -- ranks that fail, stray or stay away -----------------------------------------------------

    def failure(self, what: str, step: int, seconds: float, cause: Exception) -> Exception:
        """The error for a failed collective, which names every rank that did not answer.

        Args:
            what: the collective, in words.
            step: the step in which it failed.
            seconds: how long it was waited for.
            cause: raised by the backend; raise the result from it.
        """
        findings = self._findings(f"{what} failed here", step)
        return self._error(
            f"every rank must take part in every collective, but {what} failed on rank "
            f"{self.rank} in step {step} after {seconds:.1f} s: {'; '.join(findings)}. "
            f"The backend reported: {cause}. Gradients and the process group are unusable now: "
            "restart all ranks from the last checkpoint"
        )

    def disagreement(self, report: str, remedy: str = "") -> StepMismatchError:
        """The error for ranks that are at different points of training. All of them call this.

        Args:
            report: this rank's point, in words.
            remedy: a further way out, a sentence.
        """
        # Ranks count steps differently here, so their reports meet under one name.
        findings = self._findings(report, "disagreement")
        return StepMismatchError(
            "every rank must make the same synchronisations from the same weights, but the ranks "
            f"differ in step {self.step}: on rank {self.rank} {report}; {'; '.join(findings)}. "
            "Run the same forward and backward passes and the same optimizer steps on every rank, "
            f"and restart all ranks from the last checkpoint{remedy}"
        )

    def tell(self, report: str) -> None:
        """Leaves a report for ranks whose collectives fail in this step; best effort."""
        with contextlib.suppress(RuntimeError):
            _within(1, lambda: self._store(f"reports/{self.step}").set(str(self.rank), report))

    def absentees(self, report: str) -> list[int]:
        """Waits until all ranks have called this as often; returns those that have not in time.

        Nothing is sent through the group, whose collectives the absent ranks may be running. The
        group's timeout holds here too.

        Args:
            report: shown in the errors of ranks whose collectives fail meanwhile.
        """
        timeout: timedelta = self.group._get_backend(self.device).options._timeout
        seconds = timeout.total_seconds()
        self._meetings += 1
        occasion = f"attendance/{self._meetings}"

        def meet() -> list[int]:
            self._store(f"reports/{self.step}").set(str(self.rank), report)
            here = self._store(occasion)
            here.set(str(self.rank), "")
            deadline = time.monotonic() + seconds
            while not here.check(list(map(str, range(self.size)))):
                if time.monotonic() > deadline:
                    return [rank for rank in range(self.size) if not here.check([str(rank)])]
                time.sleep(0.02)
            return []

        return _within(seconds + 1, meet)

    def _findings(self, report: str, occasion: int | str) -> list[str]:
        """Finds out about the other ranks, one phrase each, within a bounded time."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        answers: dict[int, str] = {}
        store_trouble = ""
        try:
            _within(PROBE_SECONDS + 1, lambda: self._ask(report, occasion, others, answers))
        except RuntimeError as error:  # torch's store errors derive from it
            store_trouble = f"the store could not be reached ({error or type(error).__name__})"
        answers = dict(answers)  # a call that hangs in the store may still be adding to it
        troubles = self._troubles(others)
        findings = [
            f"rank {rank} (pid {self._pids[rank]}) {trouble}"
            for rank, trouble in sorted(troubles.items())
            if rank not in answers
        ]
        findings += [
            f"rank {rank} says: {text}"
            for rank, text in sorted(answers.items())
            if text not in ("", report)
        ]
        silent = [rank for rank in others if rank not in answers and rank not in troubles]
        if store_trouble:
            findings.append(store_trouble)
        elif silent:
            findings.append(f"{name_ranks(silent)} did not answer within {PROBE_SECONDS:.0f} s")
        return findings or ["all peers answered and failed likewise"]

    def _ask(
        self, report: str, occasion: int | str, others: Sequence[int], answers: dict[int, str]
    ) -> None:
        """Leaves this rank's report and waits for those of the others; adds them to ``answers``."""
        store = self._store(f"reports/{occasion}")
        store.set_timeout(timedelta(seconds=PROBE_SECONDS))  # all stores' from here on
        store.set(str(self.rank), report)
        deadline = time.monotonic() + PROBE_SECONDS
        while True:
            troubles = self._troubles(others)  # looked at first: a rank may report and then exit
            for rank in others:
                if rank not in answers and store.check([str(rank)]):
                    answers[rank] = store.get(str(rank)).decode()
            known = answers.keys() | troubles.keys()
            if len(known) == len(others) or time.monotonic() > deadline:
                return
            time.sleep(0.05)

    def _troubles(self, others: Sequence[int]) -> dict[int, str]:
        """The troubles of processes on this host, in words."""
        near = [rank for rank in others if self._places[rank] == self._places[self.rank] != ""]
        found = {rank: _trouble(self._pids[rank]) for rank in near}
        return {rank: trouble for rank, trouble in found.items() if trouble is not None}

    def _store(self, prefix: str) -> dist.distributed_c10d.PrefixStore:
        return dist.distributed_c10d.PrefixStore(
            f"ddp_lite/{self._name}/{prefix}", dist.distributed_c10d._get_default_store()
        )


def _where() -> str:
    """The host and its namespace of process ids; empty where processes cannot be looked at."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace.stat().st_ino}" if namespace.exists() else ""


def _trouble(pid: int) -> str | None:
    """Trouble of a process of this host in words, None if it runs."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "has exited"
    # "pid (command) state ...": the command may itself contain parentheses and spaces
    return _PROCESS_STATES.get(status.rpartition(")")[2].split()[0])


def _within(seconds: float, call: Callable[[], Result]) -> Result:
    """Calls in a thread, which nothing can end; a DistStoreError after ``seconds``."""
    results: list[Result] = []
    errors: list[RuntimeError] = []

    def run() -> None:
        try:
            results.append(call())
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="ddp_lite peer probe")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise dist.DistStoreError(f"no answer within {seconds:.0f} s")
    return results[0]


# -- collectives over a group or a communicator, finished when they return ---------------------


def asynchronous(options: Any, operation: dist.ReduceOp.RedOpType | None = None) -> Any:
    """Options of a communicator's own method, which starts a collective.

    The functions of ``torch.distributed`` would check their arguments again at every call.
    """
    options.asyncOp = True
    if operation is not None:
        options.reduceOp = dist.ReduceOp(operation)
    return options


def start_all_reduce(
    communicator: Any, tensor: Tensor, operation: dist.ReduceOp.RedOpType
) -> dist.Work:
    """Starts reducing ``tensor`` over the ranks, in place."""
    options = asynchronous(dist.AllreduceOptions(), operation)
    work: dist.Work = communicator.allreduce([tensor], options)
    return work


def all_reduce(communicator: Any, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
    """Reduces ``tensor`` over the ranks, in place."""
    finish(start_all_reduce(communicator, tensor, operation))


def broadcast(communicator: Any, tensor: Tensor) -> None:
    """Overwrites ``tensor`` with rank 0's."""
    options = asynchronous(dist.BroadcastOptions())
    options.rootRank = 0
    finish(communicator.broadcast([tensor], options))


def all_gather(communicator: Any, tensor: Tensor) -> list[Tensor]:
    """Every rank's ``tensor``, of equal shapes, in rank order."""
    from torch._C._distributed_c10d import AllgatherOptions  # dist has the others

    options = asynchronous(AllgatherOptions())
    received = [torch.empty_like(tensor) for _ in range(communicator.size())]
    finish(communicator.allgather([received], [tensor], options))
    return received


def all_gather_json(value: Any, communicator: Any) -> list[Any]:
    """Gathers one JSON value from every rank. Collective.

    torch's object collectives unpickle data of other ranks, which can run code, and they need
    NumPy, which torch does not require. JSON can do no harm.

    Args:
        value: None, a bool, number or string, or lists and string-keyed dictionaries of these.
        communicator: a process group, or a communicator of a ``Ranks``.

    Returns:
        Each rank's value in rank order. Tuples have become lists.

    Raises:
        ValueError: on every rank, if the messages need more than 256 MiB in all.
    """
    device = torch.device("cpu")
    if isinstance(communicator, dist.ProcessGroup) and not backend_for(communicator, device):
        device = torch.device("cuda", torch.cuda.current_device())
    message = bytearray(json.dumps(value).encode())
    size = torch.tensor([len(message)], device=device)
    lengths = [int(each) for each in torch.cat(all_gather(communicator, size)).tolist()]
    longest = max(lengths)
    if longest * communicator.size() > _MOST_MESSAGE_BYTES:
        raise ValueError(
            f"messages between ranks must fit into {_MOST_MESSAGE_BYTES // MEBIBYTE} MiB in all, "
            f"but got {longest:,} bytes from rank {lengths.index(longest)} and as much room for "
            f"each of {communicator.size()} ranks. Wrap a model with fewer or shorter parameter "
            "names"
        )
    padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    padded[: len(message)] = torch.frombuffer(message, dtype=torch.uint8)
    received = all_gather(communicator, padded.to(device))
    found = []
    for part, length in zip(received, lengths, strict=True):
        text = bytearray(length)  # memory that both torch and Python can use
        torch.frombuffer(text, dtype=torch.uint8).copy_(part[:length])
        found.append(json.loads(text))
    return found


# -- words -------------------------------------------------------------------------------------


def name_ranks(ranks: Sequence[int]) -> str:
    """'rank 3' or 'ranks 0, 1, 2 and 14 more'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:16]))
    return f"ranks {shown}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


def shortened(names: Sequence[str], most: int = 8, separator: str = ", ") -> str:
    """The first few names, and how many more there are."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return separator.join([*names[:most], *more])


def _differences(facts_of_ranks: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    """One line per position at which not all ranks agree, the facts grouped by rank."""
    lines = []
    for facts in zip_longest(*facts_of_ranks, fillvalue=["nothing"]):
        ranks_by_fact: dict[str, list[int]] = {}
        for rank, fact in enumerate(facts):
            ranks_by_fact.setdefault(" ".join(fact), []).append(rank)
        if len(ranks_by_fact) > 1:
            pairs = ranks_by_fact.items()
            lines.append("; ".join(f"{name_ranks(ranks)}: {fact}" for fact, ranks in pairs))
    return lines
