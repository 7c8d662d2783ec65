"""What can go wrong between ranks, and what to say: who is missing, what was waited for.

All errors are ``RuntimeError``s, so a caller that only wants to stop can catch that.

A collective that fails says only "connection closed" or "timed out". Before passing that on,
the surviving ranks probe each other for a short time through the process group's store and look at
peers' processes on their own host, so that the error names the rank that died, stopped or strayed.
How long a collective may hang is the process group's own timeout; the probe adds at most
``PROBE_SECONDS`` and one more for a store that does not answer, because the process that hosts
it has stopped: such calls block in C++ whatever the store's timeout is.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from ddp_lite.collectives import all_gather_json

PROBE_SECONDS = 2.0
_PROCESS_STATES = {"T": "is stopped", "t": "is stopped", "Z": "has exited", "X": "has exited"}

Result = TypeVar("Result")


class SynchronizationError(RuntimeError):
    """Any failure to keep the ranks' models equal."""


class ModelMismatchError(SynchronizationError):
    """The ranks' models or settings differ, or a model is not the one that was wrapped."""


class MissingGradientError(SynchronizationError):
    """A parameter got no gradient on some rank and the policy is ``"error"``."""


class UnfinishedSynchronizationError(SynchronizationError):
    """A forward or backward began although the last backward was never finished."""


class StepMismatchError(SynchronizationError):
    """The ranks are at different points of training, or their weights differ."""


class PeerFailureError(SynchronizationError):
    """A collective failed: a peer died, hangs, or runs something else."""


class StoreTimeoutError(RuntimeError):
    """The process group's store did not answer; like torch's own store errors."""


@dataclass(frozen=True)
class Peer:
    """Where a rank runs: enough to look at its process from the same host."""

    host: str
    pid: int
    pid_namespace: str

    @classmethod
    def here(cls) -> Peer:
        """Describes the process that calls it."""
        namespace = Path("/proc/self/ns/pid")
        inode = str(namespace.stat().st_ino) if namespace.exists() else ""
        return cls(socket.gethostname(), os.getpid(), inode)

    def is_on_host_of(self, other: Peer) -> bool:
        """Whether the two can see each other's process ids."""
        return (self.host, self.pid_namespace) == (other.host, other.pid_namespace)

    def trouble(self) -> str | None:
        """What is wrong with the process, None if it runs or is out of sight. Same host only."""
        if not self.pid_namespace:
            return None
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return "has exited"
        # "pid (command) state ...": the command may itself contain parentheses and spaces
        return _PROCESS_STATES.get(status.rpartition(")")[2].split()[0])


class PeerProbe:
    """Finds out, after a collective failed, which peers are still there. Collective to build.

    Args:
        group: the ranks concerned.
        wrapper: name of the class that is being constructed.
    """

    def __init__(self, group: dist.ProcessGroup, wrapper: str) -> None:
        self._group = group
        self._meetings = 0
        self._me = Peer.here()
        begin = time.monotonic()
        try:
            everyone = all_gather_json([asdict(self._me), uuid.uuid4().hex], group)
        except RuntimeError as error:
            raise PeerFailureError(
                f"every rank must construct its {wrapper}, but the first exchange failed on rank "
                f"{group.rank()} of {group.size()} after {time.monotonic() - begin:.1f} s: a "
                f"peer exited or did something else. The backend reported: {error}"
            ) from error
        self._peers = [Peer(**peer) for peer, _ in everyone]
        self._name = str(everyone[0][1])  # of this probe, the same on all ranks

    def absentees(self, report: str, step: int, timeout: timedelta) -> list[int]:
        """Waits until all ranks have called this as often; returns those that have not.

        Nothing is sent through the group, whose collectives the absent ranks may be running.

        Args:
            report: what ranks whose reductions fail meanwhile are told of this one.
            step: the step that is being made.
            timeout: how long to wait.
        """
        seconds = timeout.total_seconds()
        self._meetings += 1
        occasion = f"attendance/{self._meetings}"

        def meet() -> list[int]:
            self._reports(step).set(str(self._group.rank()), report)
            here = self._store(occasion)
            here.set(str(self._group.rank()), "")
            here.add("count", 1)
            deadline = time.monotonic() + seconds
            while here.add("count", 0) < self._group.size():
                if time.monotonic() > deadline:
                    ranks = range(self._group.size())
                    return [rank for rank in ranks if not here.check([str(rank)])]
                time.sleep(0.02)
            return []

        return _within(seconds + 1, meet)

    def leave_report(self, report: str, step: int) -> None:
        """Tells ranks whose reductions fail in ``step`` what happened here; best effort."""
        with contextlib.suppress(RuntimeError):
            _within(1, lambda: self._reports(step).set(str(self._group.rank()), report))

    def disagreement(self, report: str, step: int) -> StepMismatchError:
        """The error for ranks that are at different points of training. All of them call this.

        Args:
            report: what this rank is doing, in words.
            step: the step that it is making.
        """
        # Ranks count steps differently here, so their reports meet under one name.
        findings = self._findings(report, "disagreement")
        return StepMismatchError(
            "every rank must make the same synchronisations from the same weights, but the ranks "
            f"differ in step {step}: on rank {self._group.rank()} {report}; {'; '.join(findings)}. "
            "Run the same forward and backward passes and the same optimizer steps on every rank, "
            "and restart all ranks from the last checkpoint"
        )

    def failure(self, waited_for: str, step: int, seconds: float, cause: Exception) -> Exception:
        """The error to raise, from ``cause``, naming every peer that did not answer.

        Args:
            waited_for: the collective that failed, in words.
            step: the step in which it did.
            seconds: how long it was waited for.
            cause: what the backend raised.
        """
        findings = self._findings("", step)
        return PeerFailureError(
            f"every rank must take part in every reduction, but {waited_for} failed on rank "
            f"{self._group.rank()} in step {step} after {seconds:.1f} s: {'; '.join(findings)}. "
            f"The backend reported: {cause}. Gradients and the process group are unusable now: "
            "restart all ranks from the last checkpoint"
        )

    def _findings(self, report: str, occasion: int | str) -> list[str]:
        """What this rank finds out about the others, one phrase each; within a bounded time."""
        others = [rank for rank in range(self._group.size()) if rank != self._group.rank()]
        troubles: dict[int, str] = {}
        answers: dict[int, str] = {}
        store_trouble = ""
        try:
            _within(PROBE_SECONDS + 1, lambda: self._call(report, occasion, others, answers))
        except RuntimeError as error:  # torch's store errors derive from it
            store_trouble = f"the store could not be reached ({error or type(error).__name__})"
        answers = dict(answers)  # a call that hangs in the store may still be adding to it
        self._look(others, troubles)
        findings = [
            f"rank {rank} (pid {self._peers[rank].pid}) {what}"
            for rank, what in sorted(troubles.items())
            if rank not in answers
        ]
        findings += [f"rank {rank} says: {text}" for rank, text in sorted(answers.items()) if text]
        silent = [rank for rank in others if rank not in answers and rank not in troubles]
        if store_trouble:
            findings.append(store_trouble)
        elif silent:
            findings.append(f"{name_ranks(silent)} did not answer within {PROBE_SECONDS:.0f} s")
        return findings or ["all peers answered and failed likewise"]

    def _call(
        self, report: str, occasion: int | str, others: Sequence[int], answers: dict[int, str]
    ) -> None:
        """Announces this rank and waits for the others; adds their reports to ``answers``."""
        store = self._reports(occasion)
        store.set_timeout(timedelta(seconds=PROBE_SECONDS))  # all stores' from here on
        store.set(str(self._group.rank()), report)
        deadline = time.monotonic() + PROBE_SECONDS
        troubles: dict[int, str] = {}
        while time.monotonic() < deadline and len(answers.keys() | troubles.keys()) < len(others):
            self._look(others, troubles)
            for rank in others:
                if rank not in answers and store.check([str(rank)]):
                    answers[rank] = store.get(str(rank)).decode()
            time.sleep(0.05)

    def _reports(self, occasion: int | str) -> dist.distributed_c10d.PrefixStore:
        return self._store(f"reports/{occasion}")

    def _store(self, prefix: str) -> dist.distributed_c10d.PrefixStore:
        return dist.distributed_c10d.PrefixStore(
            f"ddp_lite/{self._name}/{prefix}", dist.distributed_c10d._get_default_store()
        )

    def _look(self, others: Sequence[int], troubles: dict[int, str]) -> None:
        for rank in others:
            peer = self._peers[rank]
            if peer.is_on_host_of(self._me) and (what := peer.trouble()) is not None:
                troubles[rank] = what


def _within(seconds: float, call: Callable[[], Result]) -> Result:
    """Calls ``call`` in a thread of its own and waits for it no longer than ``seconds``.

    Raises:
        StoreTimeoutError: it had not returned by then. Nothing can end the thread, so it stays.
        RuntimeError: as ``call`` did.
    """
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
        raise StoreTimeoutError(f"no answer within {seconds:.0f} s")
    return results[0]


def missing_gradients(names_by_rank: Sequence[Sequence[str]], step: int) -> MissingGradientError:
    """The error for parameters that got no gradient, the same on every rank.

    Args:
        names_by_rank: for each rank, the parameters that got none there.
        step: the step in which they did not.
    """
    ranks_by_name: dict[str, list[int]] = {}
    for rank, names in enumerate(names_by_rank):
        for name in names:
            ranks_by_name.setdefault(name, []).append(rank)
    shown = "; ".join(f"{name} on {name_ranks(ranks)}" for name, ranks in ranks_by_name.items())
    return MissingGradientError(
        "with missing_gradients='error' every trainable parameter must get a gradient on every "
        f"rank, but in step {step} these got none: {shown}. Use them in the loss, freeze them "
        "with requires_grad_(False), or choose missing_gradients='skip-if-all' or 'zeros'"
    )


def unfinished(
    arrived: int, rank: int, step: int, auto_finish: bool
) -> UnfinishedSynchronizationError:
    """The error for a backward whose gradients were never synchronised.

    Args:
        arrived: number of parameters whose gradients it produced.
        rank: where.
        step: the last one that was synchronised.
        auto_finish: whether the wrapper finishes by itself.
    """
    remedy = (
        "That backward raised an error. To go on without it, call detach() and wrap the module "
        "again, on all ranks"
        if auto_finish
        else "Call finish_gradient_synchronization() after backward, or use no_sync() or "
        "auto_finish=True"
    )
    return UnfinishedSynchronizationError(
        f"every backward must be finished before the next forward, but after step {step} a "
        f"backward produced gradients of {arrived} parameters on rank {rank} that were never "
        f"synchronised, so an optimizer step would make the ranks differ. {remedy}"
    )


def overlapping_backwards(wrapper: str, rank: int, step: int) -> UnfinishedSynchronizationError:
    """The error for a backward that begins while another one of the same wrapper is under way.

    Args:
        wrapper: its class.
        rank: where.
        step: the step that both belong to.
    """
    return UnfinishedSynchronizationError(
        f"backward passes through one {wrapper} must run one after another, but in step {step} on "
        f"rank {rank} one began while another was under way, or after it had failed. Add the "
        "losses and call backward once, from one thread"
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """'rank 3' or 'ranks 0, 1, 2 and 14 more'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:16]))
    return f"ranks {shown}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
