"""GPUs for ``ddp_lite`` on CPUs: answers to the questions that it asks about them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch

from ddp_lite.peer import PeerMemory
from ddp_lite.peer import hook as peer_hook
from ddp_lite.peer import memory as peer_memory
from ddp_lite.ranks import all_gather_json

ROW_BYTES = 512
LARGE = 1000  # bytes of a message that is large enough here


@contextmanager
def pretended_gpus(
    rank: int,
    *,
    host: str = "host",
    gpu: int | None = None,
    reaches: bool = True,
    memory: Any = None,
) -> Iterator[Mock]:
    """Wrappers that are built inside see modules on CPUs as if they were on one GPU per rank.

    Yields:
        Counts the messages by which ranks ask each other about hosts and GPUs.
    """
    gpu = rank if gpu is None else gpu
    asked = Mock(side_effect=all_gather_json)
    choose = peer_hook.chosen_hook

    def chosen(group: Any, bucket_bytes: Any, _device: object) -> Any:
        return choose(group, bucket_bytes, torch.device("cuda", gpu))

    with ExitStack() as patches:
        for target, name, value in (
            (peer_memory, "all_gather_json", asked),
            (peer_memory, "backend_for", lambda *_: "nccl"),
            (peer_hook, "SMALLEST_MESSAGE_BYTES", LARGE),
            (socket, "gethostname", lambda: host),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "current_device", lambda: gpu),
            (torch.cuda, "device_count", lambda: 2),
            (torch.cuda, "can_device_access_peer", lambda mine, other: reaches),
            (torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=str(i))),
        ):
            patches.enter_context(patch.object(target, name, value))
        patches.enter_context(patch.object(peer_hook, "chosen_hook", chosen))
        patches.enter_context(patch("ddp_lite.wrappers._is_gpu", lambda _device: True))
        if memory is not None:
            patches.enter_context(patch.object(PeerMemory, "without_asking", memory))
        yield asked
