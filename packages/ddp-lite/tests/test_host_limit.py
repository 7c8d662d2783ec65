"""Collectives take the place of copies while the hosts limit the steps, on all ranks at once."""

from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn

from ddp_lite import BucketedDDP, ModelMismatchError
from ddp_lite.host_limit import HostLimit
from pretended_gpus import ROW_BYTES, Stream, pretend, pretended_gpus
from process_memory import ProcessMemory
from ranks import run_ranks

LAYERS = 8


def one_step(limit: HostLimit, stream: Stream, waits: list[bool], average: float | None) -> float:
    """A step of as many buckets; its share, and on all ranks ``average`` or the same."""
    step: Any = Mock(device=torch.device("cpu"))
    limit.reset(step)
    for stream.waits in waits:
        limit.gradients_taken(step, cast("Any", None), [], False)
    message = limit.message(step, torch.float64, False)
    assert message is not None
    share = message.item()
    if average is not None:
        message.fill_(average)
    limit.backward_ended(step)
    limit.messages_averaged(step)
    limit.ended(step)
    return share


def test_shares_and_when_they_count() -> None:
    with patch("ddp_lite.host_limit.torch", torch):  # given back what it is after the test
        stream = pretend()
        limit = HostLimit(torch.device("cuda", 0))
        never, always = [False] * 5, [True] * 5
        assert one_step(limit, stream, [True], None) == 0, "one bucket says nothing"
        assert one_step(limit, stream, [True, True, False, False, True], None) == 0.5
        assert one_step(limit, stream, always, None) == 1
        assert not limit.found, "the share of the step before, 0.5, is read now"
        assert one_step(limit, stream, never, None) == 0
        assert limit.found, "0.625: the half of 0.25, and of 1"
        found = []
        for average in (0.5, 0.5, 0.3, 0.3, 0.9, 0.9):
            one_step(limit, stream, never, average)
            found.append(limit.found)
        # 0.31, 0.41, 0.45, 0.38, 0.34, 0.62
        assert found == [False, False, False, False, False, True]
        assert stream.synchronized == 9, "never in the first step, when nothing has arrived"


def test_recordings_are_not_asked() -> None:
    with patch("ddp_lite.host_limit.torch", torch):
        stream = pretend()
        limit = HostLimit(torch.device("cuda", 0))
        for _ in range(4):
            one_step(limit, stream, [True] * 5, None)
        assert limit.found
        stream.recording = True
        for _ in range(4):
            assert one_step(limit, stream, [False] * 5, None) == 0
        assert limit.found


class Deep(nn.Module):
    """A bucket for each layer; rank 1 leaves the last one out in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(LAYERS))

    def forward(self, x: Tensor, layers: int = LAYERS) -> Tensor:
        for layer in self.layers[:layers]:
            x = torch.tanh(layer(x))
        return x.square().sum()


def switching(rank: int, world_size: int, folder: str, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    with pretended_gpus(rank, memory=lambda g: ProcessMemory(Path(folder), ROW_BYTES, g)):
        wrapped = BucketedDDP(Deep(), 0.001)
    hook = wrapped._transport._gradient_hook
    assert hook is not None
    stream = pretend()
    sent = BucketedDDP(Deep(), 0.001, comm_hook="collectives")
    copied: list[bool] = []
    said: list[bool] = []
    with patch.object(hook, "reduce_gradients", side_effect=hook.reduce_gradients) as copies:
        for number in range(16):
            # No GPU waits, then that of rank 0 alone, then all, then none
            stream.waits = rank == 0 if 3 <= number < 6 else 6 <= number < 11
            before = copies.call_count
            layers = LAYERS - (rank == 1 and number % 2)
            for each in (wrapped, sent):
                each.zero_grad()
                generator = torch.Generator().manual_seed(10 * number + rank)
                each(torch.randn(3, 20, generator=generator), layers).backward()
            copied.append(copies.call_count > before)
            assert copies.call_count - before in (0, len(wrapped.buckets))
            for p, q in zip(wrapped.parameters(), sent.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
            said.append("by collectives while the hosts limit the steps" in wrapped.explain())
    assert said[:-1] == [not copy for copy in copied[1:]], "it speaks of the next step"
    if deterministic:
        assert all(copied)
    else:
        # Steps 3 to 6 bring the share to 0.44, step 7 reads the first 1: from step 8 on. Steps 11
        # and 12 read 1 and 0, and the share is below 0.4 from step 13 on.
        assert copied == [not 8 <= number < 14 for number in range(16)], copied


@pytest.mark.parametrize("deterministic", [False, True])
def test_collectives_while_the_hosts_limit(tmp_path: Path, deterministic: bool) -> None:
    run_ranks(switching, 2, str(tmp_path), deterministic)


def different(rank: int, world_size: int, folder: str) -> None:
    torch.use_deterministic_algorithms(rank == 1)
    with pytest.raises(ModelMismatchError, match="comm_hook auto, with deterministic algorithms"):
        BucketedDDP(Deep())


def test_ranks_agree_on_determinism(tmp_path: Path) -> None:
    run_ranks(different, 2, str(tmp_path))
