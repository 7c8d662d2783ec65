"""What tests ask about other processes, any of which may end between two questions; a free port."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterable

import psutil


def is_running(pid: int) -> bool:
    """Whether a process with this id runs; one that has ended and waits for its parent does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def all_end(pids: Iterable[int], *, within_s: float = 60.0) -> bool:
    """Waits until none of the processes runs, and says whether that came true in time."""
    left = set(pids)
    deadline = time.monotonic() + within_s
    while left := {pid for pid in left if is_running(pid)}:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def free_port() -> int:
    """A port of this machine that nobody has, for a program that must be told one.

    It lies below those that the system chooses by itself. One of these could be given to a
    connection of another test before the program listens on it.
    """
    for _ in range(100):
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("one of 100 ports between 20000 and 32000 must be free, but none was")
