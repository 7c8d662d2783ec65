"""What ``BucketedDDP`` averages with unless it is told, and what it says of that, without GPUs.

Ranks that pretend to have GPUs share the memory of processes, so that copies are really made.
"""

import gc
import os
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._distributed_c10d import _SymmetricMemory

from ddp_lite import BucketedDDP, MissingGradientError, ModelMismatchError, PeerFailureError
from ddp_lite.missing import Policy
from ddp_lite.peer import PeerCopyAverage
from ddp_lite.peer import memory as peer_memory
from pretended_gpus import ROW_BYTES, pretended_gpus
from process_memory import ProcessMemory
from ranks import run_case, run_ranks

ON_CPU = "(collectives: copies are between GPUs, and the messages are on cpu)"


class Mixed(nn.Module):
    """Parameters of four dtypes, each of which takes more than one window."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(17, 31, dtype=dtype)
            for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
        )

    def forward(self, scale: float) -> Tensor:
        parts = [
            layer(torch.full((2, 17), scale, dtype=layer.weight.dtype)) for layer in self.layers
        ]
        return torch.stack([part.abs().double().square().mean() for part in parts]).sum()


def large() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 30))


def trains(wrapped: BucketedDDP, rank: int) -> None:
    """Two steps, whose gradients are the averages."""
    alone = large()
    alone.load_state_dict(wrapped.state_dict())
    for _ in range(2):
        wrapped.zero_grad()
        alone.zero_grad()
        wrapped(torch.full((2, 30), rank + 1.0)).sum().backward()
        for each in range(2):
            (alone(torch.full((2, 30), each + 1.0)).sum() / 2).backward()
        for p, q in zip(wrapped.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def last_bias_only() -> nn.Module:
    """Of 30 gradients, 120 bytes, until more is unfrozen."""
    module = large().requires_grad_(False)
    module[2].bias.requires_grad_(True)
    return module


#: Arguments of ``BucketedDDP`` on CPUs, and the words of ``explain()``.
REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "default": ({}, f"coalesced in place {ON_CPU}"),
    "auto": ({"comm_hook": "auto"}, f"coalesced in place {ON_CPU}"),
    "copy": (
        {"copy": True},
        "copied into a flat tensor (collectives: copy=True asks for one flat tensor",
    ),
    "wire": (
        {"wire_dtype": torch.bfloat16},
        "flattened and sent as bfloat16 (collectives: wire_dtype is sent by them",
    ),
    "by name": (
        {"comm_hook": "collectives"},
        "coalesced in place (collectives: as comm_hook asks)",
    ),
    "None": ({"comm_hook": None}, "coalesced in place (collectives: as comm_hook asks)"),
}


def reasons(rank: int, world_size: int, name: str) -> None:
    arguments, expected = REASONS[name]
    wrapped = BucketedDDP(large(), **arguments)
    assert expected in wrapped.explain()
    assert "\n" not in wrapped.explain()
    if name == "default":
        trains(wrapped, rank)


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_is_always_given(name: str) -> None:
    run_case(reasons, 2, REASONS, name)


def thawed(rank: int, world_size: int) -> None:
    with pytest.warns(UserWarning, match="no trainable parameters"):
        frozen = BucketedDDP(large().requires_grad_(False))
    assert "(collectives: there is nothing to average)" in frozen.explain()
    frozen.module.requires_grad_(True)
    trains(frozen, rank)
    assert ON_CPU in frozen.explain()


def test_the_reason_changes_with_the_parameters() -> None:
    run_ranks(thawed, 2)


def different_hooks(rank: int, world_size: int) -> None:
    with pytest.raises(ModelMismatchError, match="rank 0: comm_hook collectives; rank 1: comm_ho"):
        BucketedDDP(large(), comm_hook="auto" if rank else "collectives")


def test_ranks_must_ask_for_the_same() -> None:
    run_ranks(different_hooks, 2)


def alone(rank: int, world_size: int) -> None:
    on_cpu = BucketedDDP(large())
    assert ON_CPU in on_cpu.explain()
    with pretended_gpus(0) as asked:
        on_gpu = BucketedDDP(large())
    assert "peer access, but got a group of 1)" in on_gpu.explain()
    assert not asked.called, "the group alone answers"
    on_gpu(torch.ones(1, 30)).sum().backward()
    assert torch.equal(on_gpu.module[2].bias.grad, torch.ones(30))


def test_a_group_of_one() -> None:
    run_ranks(alone, 1)


def by_copies(rank: int, world_size: int, folder: str) -> None:
    numbers = iter(range(10))

    def memory(group: dist.ProcessGroup) -> ProcessMemory:
        return ProcessMemory(Path(folder) / str(next(numbers)), ROW_BYTES, group)

    with pretended_gpus(rank, memory=memory) as asked:
        default = BucketedDDP(large())
        assert asked.call_count == 1, "once per wrapper"
        small = BucketedDDP(nn.Linear(2, 2))
        by_name = BucketedDDP(large(), comm_hook="collectives")
        flat = BucketedDDP(large(), copy=True)
        assert asked.call_count == 1, "not where the answer does not matter"
        default.module[0].requires_grad_(False)
        default(torch.ones(1, 30)).sum().backward()
        default.module[0].requires_grad_(True)
        assert asked.call_count == 1, "a new plan changes nothing between the GPUs"
        rounded = BucketedDDP(large(), wire_dtype=torch.bfloat16)
        growing = BucketedDDP(last_bias_only())
        assert "(collectives: messages of 0.0001144 MB are below" in growing.explain()
        assert asked.call_count == 1
        growing.module.requires_grad_(True)
        trains(growing, rank)
        assert asked.call_count == 2, "when messages have become large enough"
    assert "copied between GPUs (peer-copy: 2 GPUs of one host reach each" in default.explain()
    megabytes = 2 * ROW_BYTES / 2**20  # two slots of one row
    assert f"each GPU has {megabytes:.4g} MB of memory that they share" in default.explain()
    assert "flattened and sent as bfloat16 (collectives: wire_dtype is sent" in rounded.explain()
    assert "copied between GPUs (peer-copy: " in growing.explain()
    assert "(collectives: messages of 2.289e-05 MB are below " in small.explain()
    assert "(collectives: copy=True asks" in flat.explain()
    assert "(collectives: as comm_hook asks)" in by_name.explain()
    for wrapped in (default, by_name, flat):
        trains(wrapped, rank)


def test_large_buckets_are_copied_by_default(tmp_path: Path) -> None:
    run_ranks(by_copies, 2, str(tmp_path))


def mixed(rank: int, world_size: int, folder: str) -> None:
    torch.manual_seed(0)
    with pretended_gpus(rank, memory=lambda g: ProcessMemory(Path(folder), ROW_BYTES, g)):
        copied = BucketedDDP(Mixed(), 0.001, missing_gradients="zeros")
    sent = BucketedDDP(Mixed(), 0.001, comm_hook="collectives", missing_gradients="zeros")
    sent.load_state_dict(copied.state_dict())
    assert "copied between GPUs (peer-copy: " in copied.explain()
    assert len({bucket.dtype for bucket in copied.buckets}) == 4
    for step in range(2):
        for wrapped in (copied, sent):
            wrapped.zero_grad()
            wrapped(0.1 * (rank + step + 1)).backward()
        for p, q in zip(copied.parameters(), sent.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
            assert p.grad.dtype == p.dtype


def test_gradients_of_several_dtypes(tmp_path: Path) -> None:
    run_ranks(mixed, 2, str(tmp_path))


class Branches(nn.Module):
    """One layer that every rank uses, one that only rank 0 uses, one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all, self.some, self.none = (nn.Linear(20, 20) for _ in range(3))

    def forward(self, x: Tensor, some: bool, twice: bool = False) -> Tensor:
        y = torch.tanh(self.all(x))
        if twice:  # a backward of its own, in which the gradients arrive a second time
            y = torch.utils.checkpoint.checkpoint(self.all, y, use_reentrant=True)
        return (self.some(y) if some else y).square().sum()


def everything_else(wrapped: BucketedDDP, rank: int) -> list[Tensor | None]:
    """Gradients of steps with absent ones, with accumulation, and without a batch on a rank."""
    found: list[Tensor | None] = []

    def batch(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(3, 20, generator=generator, requires_grad=True)

    def keep() -> None:
        found.extend(None if p.grad is None else p.grad.clone() for p in wrapped.parameters())
        wrapped.zero_grad()

    assert wrapped.stats() is None
    wrapped(batch(0), rank == 0).backward()
    keep()
    with wrapped.no_sync():
        wrapped(batch(1), False).backward()
    wrapped(batch(2), rank == 0).backward()
    wrapped(batch(3), True, twice=True).backward()  # onto the averages of the step before
    keep()
    with wrapped.join(keep):
        for step in range(4, 5 + rank):
            wrapped(batch(step), True).backward()
            keep()
    stats = wrapped.stats()
    assert stats is not None
    assert stats.collectives >= len(wrapped.buckets)
    return found


def all_features(rank: int, world_size: int, folder: str, policy: Policy) -> None:
    files = Path(folder)
    with pretended_gpus(rank, memory=lambda g: ProcessMemory(files, ROW_BYTES, g)):
        copied = BucketedDDP(Branches(), 0.001, missing_gradients=policy)
    assert "copied between GPUs (peer-copy: " in copied.explain()
    sent = BucketedDDP(Branches(), 0.001, comm_hook="collectives", missing_gradients=policy)
    if policy == "error":
        with pytest.raises(
            MissingGradientError,
            match=r"these got none: none\.weight on ranks 0, 1; .* some\.weight on rank 1",
        ):
            everything_else(copied, rank)
        return
    for mine, expected in zip(
        everything_else(copied, rank), everything_else(sent, rank), strict=True
    ):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("policy", ["skip-if-all", "zeros", "error"])
def test_copies_serve_every_feature(tmp_path: Path, policy: Policy) -> None:
    run_ranks(all_features, 2, str(tmp_path), policy)


OBSTACLES: dict[str, tuple[Any, str]] = {
    "two hosts": (
        lambda r: {"host": f"host-{r}"},
        r"ranks on 2 hosts \(host-0, host-1\), inside each of which "
        r"examples/hierarchical_average\.py can copy",
    ),
    "one GPU": (lambda r: {"gpu": 0}, "2 ranks on 1 GPUs"),
    "no access": (lambda r: {"reaches": r == 0}, "rank 1 without access to the GPU of rank 0"),
}


def kept_from_copying(rank: int, world_size: int, name: str) -> None:
    arguments, reason = OBSTACLES[name]
    with pretended_gpus(rank, **arguments(rank)) as asked:
        wrapped = BucketedDDP(large())
        assert asked.call_count == 1
    said = wrapped.explain()
    assert re.search(rf"coalesced in place \(collectives: copies .* but got {reason}\)", said), said
    trains(wrapped, rank)


@pytest.mark.parametrize("name", OBSTACLES)
def test_ranks_that_cannot_copy_use_collectives(name: str) -> None:
    run_ranks(kept_from_copying, 2, name)


def lost_while_choosing(rank: int, world_size: int) -> str:
    with pretended_gpus(rank) as asked:
        if rank == 1:
            asked.side_effect = lambda *_: os._exit(3)
        with pytest.raises(PeerFailureError) as caught:
            BucketedDDP(large())
    return str(caught.value)


def test_a_rank_that_is_lost_while_the_others_choose_is_named() -> None:
    survivor, _ = run_ranks(lost_while_choosing, 2, check=False)
    assert survivor.ok, survivor.error
    message = survivor.value
    assert "but the choice between copies and collectives failed on rank 0" in message, message
    assert re.search(r"rank 1 \(pid \d+\) has exited", message), message


def watches() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "ddp_lite watch over copies"]


@contextmanager
def symmetric_memory(rank: int, fails: str | None) -> Iterator[list[weakref.ref[Tensor]]]:
    """Torch's symmetric memory without GPUs, in which the last rank may fail at one point.

    Yields:
        What was allocated.
    """
    allocated: list[weakref.ref[Tensor]] = []

    def allocate(*_: object) -> Tensor:
        if fails == "allocation" and rank == 1:
            raise RuntimeError("CUDA error: out of memory\nException raised from alloc_block")
        memory = torch.empty(64, dtype=torch.uint8)
        allocated.append(weakref.ref(memory))
        return memory

    class Handle:
        def get_buffer(self, *_: object) -> Tensor:
            if fails == "mapping" and rank == 1:
                raise RuntimeError("no mapping\nException raised from map_block")
            return torch.empty(64, dtype=torch.uint8)

    class Signals:
        waiting = 0

        def __init__(self, handle: object, memory: Tensor) -> None:
            self._memory = memory

        def barrier(self) -> None: ...

        def stagger(self) -> None: ...

    probe = ArithmeticError("no probe") if fails == "probe" else None
    with (
        patch("torch.cuda.mem_get_info", return_value=(2**20, 2**30)),
        patch("torch.cuda.Stream"),
        patch("torch.cuda.stream", lambda stream: nullcontext()),
        patch("torch.cuda.set_device"),
        # Mocks would hold what they are called with.
        patch.object(_SymmetricMemory, "empty_strided_p2p", allocate),
        patch("torch.distributed._symmetric_memory.rendezvous", lambda *_: Handle()),
        patch("ddp_lite.peer.signals.Signals", Signals),
        patch.object(peer_memory, "Ranks", side_effect=probe),
    ):
        yield allocated


FAILURES = {
    "allocation": "every GPU must have 512 MB free for buffer_mb, but rank 1 has 1 MB free (CUDA "
    "error: out of memory). Pass",
    "mapping": "the processes of the ranks must be able to share GPU memory, but rank 1 could not: "
    "no mapping. Use",
}


def without_memory(rank: int, world_size: int, fails: str) -> None:
    with pretended_gpus(rank) as asked, symmetric_memory(rank, fails) as allocated:
        wrapped = BucketedDDP(large())
        assert asked.call_count == {"allocation": 2, "mapping": 3}[fails]
    reason = FAILURES[fails]
    assert f"coalesced in place (collectives: {reason}" in wrapped.explain(), wrapped.explain()
    assert "\n" not in wrapped.explain()
    assert len(allocated) == (fails == "mapping" or rank == 0)
    assert not any(memory() is not None for memory in allocated), "given back"
    assert watches() == []
    trains(wrapped, rank)


@pytest.mark.parametrize("fails", FAILURES)
def test_a_gpu_without_memory_to_share(fails: str) -> None:
    """All ranks fall back, keep nothing, and say which rank could not."""
    run_case(without_memory, 2, FAILURES, fails)


def other_errors(rank: int, world_size: int) -> None:
    with (
        pretended_gpus(rank),
        symmetric_memory(rank, "probe"),
        pytest.raises(ArithmeticError, match="no probe"),
    ):
        BucketedDDP(large())
    assert watches() == []
    with (
        pretended_gpus(rank),
        symmetric_memory(rank, None) as allocated,
        pytest.raises(TypeError, match=r"no argument wire_dtype.*pass wire_dtype= to BucketedDDP"),
    ):
        PeerCopyAverage(dist.group.WORLD, wire_dtype=torch.bfloat16)
    assert (allocated, watches()) == ([], [])


def test_what_is_no_lack_of_memory_is_an_error_and_leaves_nothing_behind() -> None:
    run_ranks(other_errors, 2)


ENDS = ("drop", "detach")


def dropped(rank: int, world_size: int, end: str) -> None:
    gc.disable()  # it must not be needed
    with pretended_gpus(rank), symmetric_memory(rank, None) as allocated:
        wrapped = BucketedDDP(large())
        assert "copied between GPUs (peer-copy: " in wrapped.explain()
        assert len(watches()) == 1
        assert allocated[0]() is not None
        if end == "drop":
            del wrapped
        else:
            wrapped.detach()
        assert allocated[0]() is None
        assert watches() == []


@pytest.mark.parametrize("end", ENDS)
def test_what_ranks_share_is_freed_with_the_wrapper(end: str) -> None:
    run_case(dropped, 2, ENDS, end)
