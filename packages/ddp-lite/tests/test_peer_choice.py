"""Why the ranks of a group cannot copy between their GPUs, on a machine without GPUs."""

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ddp_lite.peer import PeerCopyAverage, PeerMemory, choose_communication
from ddp_lite.peer import memory as peer_memory
from ddp_lite.peer.memory import SharedMemory

HERE, THERE = "host-a", "host-b"


class TwoRanks:
    """A group of which this process is rank 0."""

    group_name = "two"

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Host and GPU of each rank, which a test may change; rank 0 sees the GPUs "0" and "1"."""
    found: list[tuple[str, str | None]] = [(HERE, "0"), (HERE, "1")]

    def gathered(value: Any, group: object) -> list[Any]:
        host, gpu = found[1]
        return [value, [host, "" if gpu else "without a GPU", gpu or "", ["0"]]]

    monkeypatch.setattr(peer_memory, "all_gather_json", gathered)
    monkeypatch.setattr(peer_memory, "backend_for", lambda *_: "nccl")
    monkeypatch.setattr(peer_memory.socket, "gethostname", lambda: HERE)
    gpus = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 2,
        "get_device_properties": lambda index: SimpleNamespace(uuid=str(index)),
        "can_device_access_peer": lambda mine, other: True,
    }
    for name, function in gpus.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return found


def test_large_messages_between_gpus_of_one_host_are_copied(ranks: list[Any]) -> None:
    assert choose_communication(cast(Any, TwoRanks()), 2**30).name == "peer-copy"
    assert choose_communication(cast(Any, TwoRanks()), 2**20).name == "collectives"


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (
            (THERE, "1"),
            r"ranks on 2 hosts \(host-a, host-b\), inside each of which "
            r"examples/hierarchical_average\.py can copy",
        ),
        ((HERE, "0"), "2 ranks on 1 GPUs"),
        ((HERE, None), "rank 1 without a GPU"),
        ((HERE, "7"), "rank 0 without access to the GPU of rank 1"),
    ],
)
def test_what_keeps_ranks_from_copying(
    ranks: list[Any], second: tuple[str, str | None], reason: str
) -> None:
    """The choice falls on collectives and says why; memory asked for by name is refused."""
    ranks[1] = second
    choice = choose_communication(cast(Any, TwoRanks()), 2**30)
    assert choice.name == "collectives"
    assert re.search(reason, choice.reason)
    with pytest.raises(ValueError, match=rf"with peer access, but got {reason}\. Use NCCL"):
        PeerMemory(cast(Any, TwoRanks()))


def test_gpus_without_access_to_each_other(
    ranks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda mine, other: mine == other)
    choice = choose_communication(cast(Any, TwoRanks()), 2**30)
    assert str(choice).startswith("collectives: copies between GPUs need 2 to 8 CUDA ranks")
    assert str(choice).endswith("peer access, but got rank 0 without access to the GPU of rank 1")


def test_messages_elsewhere_than_on_the_current_gpu(ranks: list[Any]) -> None:
    """Copies are queued on the current GPU, and their memory is there."""
    elsewhere = torch.device("cuda", 1)
    choice = choose_communication(cast(Any, TwoRanks()), 2**30, elsewhere)
    assert choice.name == "collectives"
    assert "but got rank 0 with messages on cuda:1 while cuda:0 is current" in choice.reason
    on_cpu = choose_communication(cast(Any, TwoRanks()), 2**30, torch.device("cpu"))
    assert str(on_cpu) == "collectives: copies are between GPUs, and the messages are on cpu"


def test_a_hook_of_another_group_is_refused() -> None:
    memory = SimpleNamespace(group=TwoRanks(), device=torch.device("cpu"), row_bytes=256)
    hook = PeerCopyAverage(cast(SharedMemory, memory))
    other = TwoRanks()
    other.group_name = "other"
    bucket: Any = SimpleNamespace(process_group=other, parameters=())
    with pytest.raises(ValueError, match=r"it is for two \(2 ranks\) and the wrapper's is other"):
        hook.average_in_place(bucket, [])
