"""The machines that take part in one launch of ranks, and how their launchers meet.

The launcher of machine 0 holds a store on the network. All launchers write into it that they have
come, and their ranks meet through it. It lasts until the last launcher has said that it is done.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_LOOPBACK = "127.0.0.1"
# How long a launcher waits for another that has come, but has not reached the same stage.
_PATIENCE_S = 10.0
_POLL_S = 0.05


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

    @property
    def on_loopback(self) -> bool:
        """Whether the machines meet on the loopback address, so that all of them are this one."""
        return self.rdzv_endpoint.rpartition(":")[0] in ("localhost", _LOOPBACK)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the store, as this machine reaches it."""
        host, _, port = self.rdzv_endpoint.rpartition(":")
        return _LOOPBACK if self.on_loopback or self.node_rank == 0 else host, int(port)

    def store_of_ranks(self, timeout_s: float) -> Store:
        """The store through which this launch's ranks meet, after the launchers have.

        Args:
            timeout_s: seconds that one operation of the store may take.
        """
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        store: Store = PrefixStore(f"{self.run_id}/ranks", _tcp_store(self, timeout_s))
        return store


@dataclass(frozen=True)
class Meeting:
    """Launchers that have met; ``store`` is None if there is only one."""

    nodes: Nodes
    store: Store | None

    def wait_for_all(self, stage: str) -> None:
        """Says that this launcher has reached ``stage``, and waits for the others.

        Not for long: they may have ended in whatever way.
        """
        if self.store is None:
            return
        keys = [f"{stage}-{node}" for node in range(self.nodes.nnodes)]
        with suppress(RuntimeError):  # of torch.distributed: no connection any more
            self.store.set(keys[self.nodes.node_rank], "")
            deadline = time.monotonic() + _PATIENCE_S
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(_POLL_S)  # waiting inside the store would print a warning when it ends


@contextmanager
def meeting(nodes: Nodes, timeout_s: float) -> Iterator[Meeting]:
    """Holds the machines together: all have come at the beginning, and at the end all are done.

    Raises:
        NodesDidNotMeetError: another machine did not come within ``timeout_s``.
    """
    met = Meeting(nodes, None if nodes.nnodes == 1 else _meet(nodes, timeout_s))
    try:
        yield met
    finally:
        met.wait_for_all("done")


def _meet(nodes: Nodes, timeout_s: float) -> Store:
    """The launchers' part of the store, when every machine has come.

    An early machine may find the store of the launch before, which node 0 is about to close. Then
    the connection breaks, or the store has an entry of this machine already; it tries again.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    deadline = time.monotonic() + timeout_s
    machines = [f"machine-{node}" for node in range(nodes.nnodes)]
    token, got = uuid.uuid4().hex, "no answer"
    while time.monotonic() < deadline:
        try:
            tcp_store = _tcp_store(nodes, timeout_s, is_master=nodes.node_rank == 0)
            store: Store = PrefixStore(f"{nodes.run_id}/launchers", tcp_store)
            own = store.compare_set(machines[nodes.node_rank], "", token) == token.encode()
            got = got if own else f"another node {nodes.node_rank}"
            while own and time.monotonic() < deadline:
                came = [node for node, machine in enumerate(machines) if store.check([machine])]
                if len(came) == nodes.nnodes:
                    return store
                got = f"node {', '.join(map(str, came))} alone"
                time.sleep(_POLL_S)
        except (OSError, RuntimeError) as error:
            got = str(error).partition("\n")[0]
        time.sleep(_POLL_S)
    raise NodesDidNotMeetError(
        f"{nodes.nnodes} machines must meet at {nodes.rdzv_endpoint} within {timeout_s:g} s, but "
        f"got {got}. Give the same command on each, and check that they can reach that address."
    )


def _tcp_store(nodes: Nodes, timeout_s: float, *, is_master: bool = False) -> Store:
    """The store at the endpoint, opened by this process if ``is_master``, else by another one.

    Raises:
        OSError: nobody has opened it yet, or its port is taken.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, port = nodes.address
    listener = None
    if is_master:
        # torch would listen on all interfaces, also where this machine alone takes part.
        listener = _listener(nodes).detach()
    else:
        # torch would print a warning for each attempt in vain.
        socket.create_connection((host, port), timeout=timeout_s).close()
    store: Store = TCPStore(
        host,
        port,
        is_master=is_master,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    return store


def _listener(nodes: Nodes) -> socket.socket:
    """A socket that listens at the endpoint, on the loopback alone if that is where they meet."""
    port = nodes.address[1]
    if nodes.on_loopback:
        return socket.create_server((_LOOPBACK, port))
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both)
