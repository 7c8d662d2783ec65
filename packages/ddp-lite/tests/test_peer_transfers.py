"""What carries out the copies and averages of an exchange: kernels, and calls of the driver."""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from ddp_lite.peer import PeerCopies
from ddp_lite.peer import copies as peer_copies
from ddp_lite.peer import memcpy as peer_memcpy
from thread_memory import ThreadMemory, Together, bound, on_threads, values


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the kernel average on CPUs; holds how many elements it did each time."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter must be chosen before any kernel is imported")
    peer_kernel = pytest.importorskip("ddp_lite.peer.kernel", reason="needs Triton")
    launched: list[int] = []
    lock, average = threading.Lock(), peer_kernel.average

    def one_at_a_time(entries: Sequence[tuple[int, int, int, int]], *arguments: Any) -> None:
        with lock:  # the interpreter keeps state that threads share
            launched.extend(numel for *_, numel in entries)
            average(entries, *arguments)

    monkeypatch.setattr(peer_kernel, "average", one_at_a_time)
    monkeypatch.setattr(peer_copies, "_FUSED_NUMEL", 30)
    return launched


def fused(memory: ThreadMemory) -> PeerCopies:
    copies = PeerCopies(memory)
    assert not copies.fused, "not chosen on CPUs"
    copies.fused = True
    return copies


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_kernel_averages(world_size: int, dtype: torch.dtype, launches: list[int]) -> None:
    """Small and large tensors in one message, several windows, rows that begin anywhere."""
    shapes = [(7, 33), (5,), (1,), (400,), (0,), (13,)]

    def work(memory: ThreadMemory, rank: int) -> list[Tensor]:
        tensors = values(rank, shapes, dtype)
        fused(memory).average(tensors).wait()
        return tensors

    # Half of a last place, or a whole one where Triton's interpreter cuts off instead of rounding.
    rounding = torch.finfo(dtype).eps * (1.0 if dtype == torch.bfloat16 else 0.5)
    results = on_threads(world_size, work, row_bytes=512)
    numel = 7 * 33 + 5 + 1 + 400 + 13
    assert 400 < sum(launches) < numel if world_size == 2 else sum(launches) == numel
    for place in range(len(shapes)):
        each = [values(r, shapes, dtype)[place].double() for r in range(world_size)]
        inputs = torch.stack(each)
        exact = inputs.mean(0)
        error = (results[0][place] - exact).abs()
        assert (error <= bound(inputs) + rounding * exact.abs()).all()
        for result in results:
            assert torch.equal(result[place], results[0][place]), "ranks have different bits"


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_averages_of_16_bits_in_float32(
    world_size: int, by_kernel: bool, launches: list[int]
) -> None:
    """They are not rounded to 16 bits, inputs stay, and the kernel computes them all."""
    numels = [33, 400, 1, 0]

    def inputs_of(rank: int) -> list[Tensor]:
        return values(rank, [(world_size * numel,) for numel in numels], torch.bfloat16)

    def work(memory: ThreadMemory, rank: int) -> list[Tensor]:
        parts = [torch.full((numel,), torch.nan) for numel in numels]
        inputs = inputs_of(rank)
        copies = fused(memory) if by_kernel else PeerCopies(memory)
        copies.reduce_scatter(parts, inputs).wait()
        assert all(map(torch.equal, inputs, inputs_of(rank)))
        return parts

    for rank, parts in enumerate(on_threads(world_size, work, row_bytes=512)):
        for place, numel in enumerate(numels):
            mine = slice(rank * numel, (rank + 1) * numel)
            inputs = torch.stack([inputs_of(r)[place][mine].double() for r in range(world_size)])
            assert ((parts[place] - inputs.mean(0)).abs() <= bound(inputs)).all()
    assert sum(launches) == (world_size * sum(numels) if by_kernel else 0)


@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shards_of_32_bits_gathered_in_16(
    world_size: int, by_kernel: bool, launches: list[int]
) -> None:
    """Every rank has the values that a cast makes, and the shards stay."""
    numels = [33, 400, 1, 0]

    def shards(rank: int) -> list[Tensor]:  # values that half precision has
        return [part.half().float() for part in values(rank, [(n,) for n in numels], torch.float32)]

    def work(memory: ThreadMemory, rank: int) -> list[Tensor]:
        wholes = [torch.full((world_size * n,), torch.nan, dtype=torch.half) for n in numels]
        parts = shards(rank)
        (fused(memory) if by_kernel else PeerCopies(memory)).all_gather(wholes, parts).wait()
        assert all(map(torch.equal, parts, shards(rank)))
        return wholes

    for wholes in on_threads(world_size, work, row_bytes=512):
        for place, whole in enumerate(wholes):
            expected = torch.cat([shards(rank)[place] for rank in range(world_size)])
            assert torch.equal(whole.float(), expected)
    assert sum(launches) == (world_size * sum(numels) if by_kernel else 0)


def test_bytes_are_gathered_and_not_averaged() -> None:
    def work(memory: ThreadMemory, rank: int) -> Tensor:
        whole, part = torch.zeros(10, dtype=torch.uint8), torch.arange(5, dtype=torch.uint8) + rank
        copies = PeerCopies(memory)
        copies.all_gather([whole], [part]).wait()
        with pytest.raises(ValueError, match=r"one floating dtype, but got torch\.uint8"):
            copies.reduce_scatter([part], [whole])
        with pytest.raises(ValueError, match=r"one floating dtype, but got torch\.uint8"):
            copies.all_gather([whole], [part.float()])
        return whole

    for whole in on_threads(2, work):
        assert whole.tolist() == [0, 1, 2, 3, 4, 1, 2, 3, 4, 5]


def test_the_kernel_leaves_small_tensors_to_torch(launches: list[int]) -> None:
    """Between two ranks, where they cannot share a launch."""

    def work(memory: ThreadMemory, rank: int) -> Tensor:
        small = torch.full((29,), float(rank))
        fused(memory).average([small]).wait()
        return small

    for small in on_threads(2, work):
        assert (small == 0.5).all()
    assert launches == []


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands for the driver's functions on CPUs; holds how many copies each call started."""
    started: list[int] = []

    def copy_now(targets: Any, sources: Any, sizes: Any, count: int, *rest: Any) -> int:
        assert len(targets) == len(sources) == len(sizes) == count
        assert all(size > 0 for size in sizes)
        peer_memcpy.copy_on_host(targets, sources, sizes, 0)
        started.append(count)
        return 0

    def copy_one(target: int, source: int, size: int, stream: int) -> int:
        return copy_now([target], [source], [size], 1)

    calls = {"cuMemcpyAsync": copy_one, "cuMemcpyBatchAsync": copy_now}
    monkeypatch.setattr(
        peer_memcpy, "driver_call", lambda name="cuMemcpyBatchAsync": calls.get(name)
    )
    return started


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_copies_at_once(world_size: int, dtype: torch.dtype, batches: list[int]) -> None:
    """What one call copies is what single copies bring."""
    shapes = [(7, 33), (5,), (1,), (400,), (0,), (13,)]

    def work(memory: ThreadMemory, rank: int) -> list[Tensor]:
        together, single = PeerCopies(memory), PeerCopies(memory)
        assert not together.batched, "not chosen on CPUs"
        together._transfer = peer_memcpy.copy_batch
        found = []
        for copies in (together, single):
            tensors = values(rank, shapes, dtype)
            copies.average(tensors).wait()
            parts = [tensor.view(-1) for tensor in tensors]
            wholes = [torch.full((part.numel() * world_size,), torch.nan) for part in parts]
            wholes = [whole.to(dtype) for whole in wholes]
            copies.all_gather(wholes, parts).wait()
            again = [torch.full_like(part, torch.nan) for part in parts]
            copies.reduce_scatter(again, wholes).wait()
            found.append([*tensors, *wholes, *again])
        assert all(map(torch.equal, *found))
        return found[0]

    on_threads(world_size, work, row_bytes=512)
    assert max(batches) > 1


def test_recordings_hold_single_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Mock(return_value=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", recording)
    memory = ThreadMemory(Together(2, 1024), 0)
    memory.device = torch.device("cuda", 0)
    copies = PeerCopies(memory)
    for batched in (True, False):
        copies.batched = batched
        expected = peer_memcpy.copy_batch if batched else peer_memcpy.copy_each
        assert copies._choose_transfer() is expected
        recording.return_value = True
        assert copies._choose_transfer() is peer_memcpy.copy_each
        recording.return_value = False


def addresses(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_a_driver_without_batches_for_this_gpu(
    monkeypatch: pytest.MonkeyPatch, batches: list[int]
) -> None:
    single = peer_memcpy.driver_call("cuMemcpyAsync")
    monkeypatch.setattr(
        peer_memcpy, "driver_call", lambda *name: single if name else lambda *_: 801
    )
    targets, sources = list(torch.zeros(3, 5)), list(torch.rand(3, 5))
    peer_memcpy.copy_batch(addresses(*targets), addresses(*sources), [20] * 3, 0)
    assert all(map(torch.equal, targets, sources))
    assert batches == [1, 1, 1]


@pytest.mark.parametrize("name", ["cuMemcpyAsync", "cuMemcpyBatchAsync"])
def test_copies_that_the_driver_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_memcpy, "driver_call", lambda *_: lambda *_: 719)
    copy = peer_memcpy.copy_each if name == "cuMemcpyAsync" else peer_memcpy.copy_batch
    with pytest.raises(RuntimeError, match=rf"accept 1 copies .* but {name} returned error 719"):
        copy([1], [2], [4], 0)


def test_a_host_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError))
    peer_memcpy.driver_call.cache_clear()
    try:
        assert peer_memcpy.driver_call() is None
    finally:
        peer_memcpy.driver_call.cache_clear()


def test_signals_and_their_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 3 sets the others' words, clears its own, and waits no longer than it may."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter must be chosen before any kernel is imported")
    peer_signals = pytest.importorskip("ddp_lite.peer.signals", reason="needs Triton")
    pads = [torch.zeros(512, dtype=torch.int32) for _ in range(3)]
    handle = Mock(rank=1, world_size=3, signal_pad_ptrs=[pad.data_ptr() for pad in pads])
    memory = torch.zeros(5000)

    def words() -> list[list[int]]:
        """Those of both channels, by rank; all are 0 again."""
        found = [pad[:6].tolist() for pad in pads]
        for pad in pads:
            pad[:6] = 0
        return found

    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    signals = peer_signals.Signals(handle, memory.view(torch.uint8))
    pads[1][0] = pads[1][2] = 1
    signals.barrier()
    assert words() == [[0, 1, 0, 0, 0, 0], [0] * 6, [0, 1, 0, 0, 0, 0]]
    pads[1][5] = 1  # rank 2's turn is over
    signals.stagger()
    assert words() == [[0, 0, 0, 0, 1, 0], [0] * 6, [0] * 6]
    assert not memory.isnan().any()
    signals.release()
    for _ in range(2):
        signals.barrier()  # for which no rank comes
        assert signals.waiting == 0
        assert memory.isnan().all()
