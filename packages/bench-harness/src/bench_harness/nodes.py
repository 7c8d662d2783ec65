"""The machines that take part in one launch of ranks, and how their launchers meet.

The launcher of machine 0 holds a store on the network. All launchers write into it that they have
come, and their ranks meet through it. It lasts until the last launcher has said that it is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

# How long a launcher waits for another that has come, but has not reached the same stage.
_PATIENCE_S = 10.0
# The store of the launch before may still be there, on its way out.
_RETRY_S = 0.2


class NodesDidNotMeetError(RuntimeError):
    """Not all machines came to the rendezvous in time."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The machines that take part in a launch; the default is this one alone.

    Attributes:
        nnodes: number of machines, each running the same command.
        rdzv_endpoint: ``host:port`` of the machine that hosts the rendezvous; port 0 means free.
        node_rank: this machine's number; that of 0 hosts the rendezvous.
        run_id: name that the machines share, and that no other launch has; None for one machine.
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

    def store(self, timeout_s: float, *, is_master: bool = False) -> TCPStore:
        """Connects to the store at the endpoint, which ``is_master`` opens first."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, _, port = self.rdzv_endpoint.rpartition(":")
        return TCPStore(
            host,
            int(port),
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )

    def store_of_ranks(self, timeout_s: float) -> Store:
        """The store through which this launch's ranks meet."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(f"{self.run_id}/ranks", self.store(timeout_s))


@dataclass(frozen=True)
class Meeting:
    """Launchers that have met; ``store`` is None if there is only one."""

    nodes: Nodes
    store: TCPStore | None

    def wait_for_all(self, stage: str) -> None:
        """Says that this launcher has reached ``stage``, and waits for the others.

        Not for long: they may have ended in whatever way.
        """
        if self.store is None:
            return
        keys = [f"{self.nodes.run_id}/{stage}-{i}" for i in range(self.nodes.nnodes)]
        with suppress(RuntimeError):
            self.store.set(keys[self.nodes.node_rank], "")
            self.store.wait(keys, timedelta(seconds=_PATIENCE_S))


@contextmanager
def meeting(nodes: Nodes, timeout_s: float) -> Iterator[Meeting]:
    """Holds the machines together: all have come at the beginning, and at the end all are done.

    Raises:
        NodesDidNotMeetError: another machine did not come within ``timeout_s``.
    """
    met = Meeting(nodes, None if nodes.nnodes == 1 else _met(nodes, timeout_s))
    try:
        yield met
    finally:
        met.wait_for_all("done")


def _met(nodes: Nodes, timeout_s: float) -> TCPStore:
    """The store, when all launchers have written into it."""
    deadline = time.monotonic() + timeout_s
    everyone = [f"{nodes.run_id}/node-{i}" for i in range(nodes.nnodes)]
    store: TCPStore | None = None
    while (left := deadline - time.monotonic()) > 0:
        try:
            if store is None or nodes.node_rank != 0:
                store = nodes.store(left, is_master=nodes.node_rank == 0)
            store.set(everyone[nodes.node_rank], "")
            store.wait(everyone, timedelta(seconds=max(0.01, deadline - time.monotonic())))
            return store
        except RuntimeError:  # of torch.distributed: no connection, or not in time
            time.sleep(_RETRY_S)
    raise NodesDidNotMeetError(
        f"{nodes.nnodes} machines must meet at {nodes.rdzv_endpoint} within {timeout_s:g} s, but "
        "not all came. Give the same command on each, and check that they can reach that address."
    )
