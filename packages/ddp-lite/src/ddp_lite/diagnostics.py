"""What to say when ranks fall apart: who is missing, what was waited for, since when.

A collective that fails says only "connection closed" or "timed out". Before passing that on,
the surviving ranks hold a short roll call through the process group's store and look at peers'
processes on their own host, so that the error names the rank that died, stopped or strayed.
How long a collective may hang is the process group's own timeout; the roll call adds at most
``ROLL_CALL_SECONDS``.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_lite.errors import MissingGradientError, PeerFailureError
from ddp_lite.exchange import all_gather_json
from ddp_lite.verification import name_ranks

ROLL_CALL_SECONDS = 2.0
_PROCESS_STATES = {"T": "is stopped", "t": "is stopped", "Z": "has exited", "X": "has exited"}


@dataclass(frozen=True)
class Peer:
    """Where a rank runs: enough to look at its process from the same host."""

    host: str
    pid: int
    pid_namespace: str

    @classmethod
    def here(cls) -> Peer:
        """This process."""
        namespace = Path("/proc/self/ns/pid")
        inode = str(namespace.stat().st_ino) if namespace.exists() else ""
        return cls(socket.gethostname(), os.getpid(), inode)

    def is_on_host_of(self, other: Peer) -> bool:
        """Whether the two can see each other's process ids."""
        return (self.host, self.pid_namespace) == (other.host, other.pid_namespace)

    def trouble(self) -> str | None:
        """What ails the process, None if it runs or cannot be looked at. Same host only."""
        if not self.pid_namespace:
            return None
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return "has exited"
        # "pid (command) state ...": the command may itself contain parentheses and spaces
        return _PROCESS_STATES.get(status.rpartition(")")[2].split()[0])


class RollCall:
    """Finds out, after a collective failed, which peers are still there. Collective to build.

    Args:
        group: the ranks concerned.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._me = Peer.here()
        begin = time.monotonic()
        try:
            everyone = all_gather_json([asdict(self._me), uuid.uuid4().hex], group)
        except RuntimeError as error:
            raise PeerFailureError(
                "every rank must construct its wrapper, but the first exchange failed on rank "
                f"{group.rank()} of {group.size()} after {time.monotonic() - begin:.1f} s: a "
                f"peer exited or did something else. The backend reported: {error}"
            ) from error
        self._peers = [Peer(**peer) for peer, _ in everyone]
        self._name = str(everyone[0][1])  # of this roll call, the same on all ranks

    def absentees(self, occasion: str, report: str, step: int, timeout: timedelta) -> list[int]:
        """Waits until all ranks have come to the same place; returns those that have not.

        Nothing is sent through the group, whose collectives the absent ranks may be running.

        Args:
            occasion: names the place, once per roll call.
            report: what ranks whose reductions fail meanwhile are told of this one.
            step: the step that is being made.
            timeout: how long to wait.
        """
        self._reports(step).set(str(self._group.rank()), report)
        here = self._store(f"attendance/{occasion}")
        here.set(str(self._group.rank()), "")
        here.add("count", 1)
        deadline = time.monotonic() + timeout.total_seconds()
        while here.add("count", 0) < self._group.size():
            if time.monotonic() > deadline:
                ranks = range(self._group.size())
                return [rank for rank in ranks if not here.check([str(rank)])]
            time.sleep(0.02)
        return []

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

    def _findings(self, report: str, step: int) -> list[str]:
        me = self._group.rank()
        others = [rank for rank in range(self._group.size()) if rank != me]
        troubles: dict[int, str] = {}
        reports: dict[int, str] = {}
        try:
            answered = self._call(report, step, others, troubles)
            store = self._reports(step)
            reports = {rank: store.get(str(rank)).decode() for rank in sorted(answered)}
        except RuntimeError as error:  # torch's store errors derive from it
            self._look(others, troubles)
            answered = set()
            troubles[-1] = f"the store could not be reached ({type(error).__name__})"
        silent = [rank for rank in others if rank not in answered and rank not in troubles]
        findings = [
            f"rank {rank} (pid {self._peers[rank].pid}) {what}" if rank >= 0 else what
            for rank, what in sorted(troubles.items())
        ]
        findings += [f"rank {rank} says: {text}" for rank, text in reports.items() if text]
        if silent:
            findings.append(f"{name_ranks(silent)} did not answer within {ROLL_CALL_SECONDS:.0f} s")
        if not findings:
            findings.append("all peers answered and failed likewise")
        return findings

    def _call(
        self, report: str, step: int, others: Sequence[int], troubles: dict[int, str]
    ) -> set[int]:
        """Announces this rank and waits for the others; returns the ranks that answered."""
        store = self._reports(step)
        store.set_timeout(timedelta(seconds=ROLL_CALL_SECONDS))  # all stores' from here on
        store.set(str(self._group.rank()), report)
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        answered: set[int] = set()
        while time.monotonic() < deadline and len(answered | troubles.keys()) < len(others):
            self._look(others, troubles)
            answered |= {rank for rank in others if store.check([str(rank)])}
            time.sleep(0.05)
        for rank in answered:
            troubles.pop(rank, None)
        return answered

    def _reports(self, step: int) -> dist.distributed_c10d.PrefixStore:
        return self._store(f"reports/{step}")

    def _store(self, place: str) -> dist.distributed_c10d.PrefixStore:
        return dist.distributed_c10d.PrefixStore(
            f"ddp_lite/{self._name}/{place}", dist.distributed_c10d._get_default_store()
        )

    def _look(self, others: Sequence[int], troubles: dict[int, str]) -> None:
        for rank in others:
            peer = self._peers[rank]
            if peer.is_on_host_of(self._me) and (what := peer.trouble()) is not None:
                troubles[rank] = what


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


def warn_about_environment(device: torch.device) -> None:
    """Warns of settings that keep NCCL from running beside the backward pass."""
    if device.type != "cuda":
        return
    for name, bad in (("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("TORCH_NCCL_ENABLE_TIMING", "1")):
        if os.environ.get(name) == bad:
            warnings.warn(
                f"{name}={bad} is set: it serialises communication with the backward pass, so "
                "nothing will overlap; unset it",
                stacklevel=4,
            )
