"""GPUs for ``ddp_lite`` on CPUs: what it asks of them, and a stream that waits or does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor

from ddp_lite.peer import PeerMemory
from ddp_lite.peer import hook as peer_hook
from ddp_lite.peer import memory as peer_memory
from ddp_lite.ranks import Peer, all_gather_json

ROW_BYTES = 512
LARGE = 1000  # bytes of a message that is large enough here


class Stream:
    """Stands for the stream, for its events, and for ``torch.cuda``.

    Attributes:
        waits: whether the GPU has come to each event by the time it is asked.
        recording: whether the stream is being recorded in a graph.
        synchronized: how often the host has waited for an event.
    """

    def __init__(self) -> None:
        self.waits = self.recording = False
        self.synchronized = 0

    def current_stream(self, device: object) -> Stream:
        """See ``torch.cuda``."""
        assert not self.recording
        return self

    def is_current_stream_capturing(self) -> bool:
        """See ``torch.cuda``."""
        return self.recording

    def record_event(self) -> Stream:
        """See ``torch.cuda.Stream``."""
        return self

    def Event(self) -> Stream:  # noqa: N802 # as in torch.cuda
        """See ``torch.cuda``."""
        return self

    def record(self, stream: Stream) -> None:
        """See ``torch.cuda.Event``."""
        assert stream is self

    def query(self) -> bool:
        """See ``torch.cuda.Event``."""
        return self.waits

    def synchronize(self) -> None:
        """See ``torch.cuda.Event``."""
        self.synchronized += 1


def pretend() -> Stream:
    """Has every ``HostLimit`` of this process use one such stream, from here on."""
    stream = Stream()

    def zeros(size: int, *, pin_memory: bool) -> Tensor:
        assert pin_memory, "which a copy that nobody waits for needs"
        return torch.zeros(size)

    fake = SimpleNamespace(cuda=stream, full=torch.full, zeros=zeros)
    patch("ddp_lite.host_limit.torch", fake).start()
    return stream


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
    pretend()  # of a GPU that never waits
    gpu = rank if gpu is None else gpu
    here = replace(Peer.here(), host=host)
    asked = Mock(side_effect=all_gather_json)
    choose = peer_hook.chosen_hook

    def chosen(group: Any, message_bytes: int, _device: object, wire_dtype: Any) -> Any:
        return choose(group, message_bytes, torch.device("cuda", gpu), wire_dtype)

    with ExitStack() as patches:
        for target, name, value in (
            (peer_memory, "all_gather_json", asked),
            (peer_memory, "backend_for", lambda *_: "nccl"),
            (peer_hook, "SMALLEST_MESSAGE_BYTES", LARGE),
            (Peer, "here", lambda: here),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "current_device", lambda: gpu),
            (torch.cuda, "device_count", lambda: 2),
            (torch.cuda, "can_device_access_peer", lambda mine, other: reaches),
            (torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=str(i))),
        ):
            patches.enter_context(patch.object(target, name, value))
        patches.enter_context(patch("ddp_lite.reduction.chosen_hook", chosen))
        patches.enter_context(patch("ddp_lite.reduction.SMALLEST_MESSAGE_BYTES", LARGE))
        if memory is not None:
            patches.enter_context(patch.object(PeerMemory, "without_asking", memory))
        yield asked
