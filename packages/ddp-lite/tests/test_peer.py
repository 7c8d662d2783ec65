"""Collectives by copies against exact sums: ranks are threads that share memory on the CPU."""

import re
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from hierarchical_average import HierarchicalAverage
from torch import Tensor, nn

from ddp_lite import BucketedDDP, PeerFailureError, hooks
from ddp_lite.peer import PeerCopies, PeerCopyAverage, PeerMemory, choose_communication
from ddp_lite.peer import schedule as peer_schedule
from ddp_lite.peer.watch import Watch
from ddp_lite.ranks import Ranks
from process_memory import ProcessMemory
from ranks import run_ranks
from thread_memory import SECONDS, ThreadMemory, Together, bound, on_threads, values

# more than one window, rows without elements, tensors over several rows, none at all
SHAPES: list[list[tuple[int, ...]]] = [
    [(7, 33), (5,), (0,), (1,)],
    [(1,)],
    [(100, 100), (), (13,)],
    [(2048,)],
    [],
]


@pytest.mark.parametrize("world_size", range(2, 9))
def test_average(world_size: int) -> None:
    def work(memory: ThreadMemory, rank: int) -> list[list[Tensor]]:
        copies = PeerCopies(memory)
        messages = [values(10 * i + rank, shapes, torch.float32) for i, shapes in enumerate(SHAPES)]
        under_way = [copies.average(message) for message in messages]  # several at once
        for each in under_way:
            each.wait()
        return messages

    results = on_threads(world_size, work)
    for i, shapes in enumerate(SHAPES):
        each = [values(10 * i + r, shapes, torch.float32) for r in range(world_size)]
        for place in range(len(shapes)):
            inputs = torch.stack([v[place].double() for v in each])
            exact = inputs.mean(0)
            for rank in range(world_size):
                got = results[rank][i][place]
                assert ((got - exact).abs() <= bound(inputs)).all()
                assert torch.equal(got, results[0][i][place]), "ranks have different bits"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    shapes = [(7, 33), (5,), (900,)]
    for world_size in (2, 3):

        def work(memory: ThreadMemory, rank: int) -> list[Tensor]:
            tensors = values(rank, shapes, dtype)
            PeerCopies(memory).average(tensors).wait()
            return tensors

        results = on_threads(world_size, work)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        for place in range(len(shapes)):
            each = [values(r, shapes, dtype)[place].to(wide) for r in range(world_size)]
            exact = torch.stack(each).mean(0).to(dtype)
            torch.testing.assert_close(results[0][place], exact)
            assert all(torch.equal(result[place], results[0][place]) for result in results)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_reduce_scatter_and_all_gather(world_size: int) -> None:
    parts = [3, 0, 1000, 64]
    shapes = [(n * world_size,) for n in parts]

    def work(memory: ThreadMemory, rank: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        copies = PeerCopies(memory)
        inputs = values(rank, shapes, torch.float32)
        outputs = [torch.full((n,), torch.nan) for n in parts]
        wholes = [torch.full(shape, torch.nan) for shape in shapes]
        own = values(100 + rank, [(n,) for n in parts], torch.float32)
        in_place = [torch.full(shape, torch.nan) for shape in shapes]
        ranges = [t.chunk(world_size)[rank] if len(t) else t for t in in_place]
        for target, source in zip(ranges, own, strict=True):
            target.copy_(source)
        under_way = [
            copies.reduce_scatter(outputs, inputs),
            copies.all_gather(wholes, own),
            copies.all_gather(in_place, ranges),
            copies.reduce_scatter(outputs, inputs),
        ]
        for each in under_way:
            each.wait()
        kept = values(rank, shapes, torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))
        return outputs, wholes, in_place

    results = on_threads(world_size, work)
    for place, numel in enumerate(parts):
        each = [values(r, shapes, torch.float32)[place].double() for r in range(world_size)]
        inputs = torch.stack(each)
        exact = inputs.mean(0)
        most = bound(inputs).view(world_size, numel)
        exact = exact.view(world_size, numel)
        own = [
            values(100 + r, [(n,) for n in parts], torch.float32)[place] for r in range(world_size)
        ]
        for rank in range(world_size):
            outputs, wholes, in_place = results[rank]
            assert ((outputs[place] - exact[rank]).abs() <= most[rank]).all()
            assert torch.equal(wholes[place], torch.cat(own))
            assert torch.equal(in_place[place], torch.cat(own))


def test_wrong_tensors_are_refused() -> None:
    memory = ThreadMemory(Together(2, 1024), 0)
    copies = PeerCopies(memory)
    two = torch.zeros(2)
    with pytest.raises(
        ValueError, match=r"one floating dtype, but got torch\.float32 and torch\.f"
    ):
        copies.average([two, two.double()])
    with pytest.raises(ValueError, match=r"one floating dtype, but got torch\.int64"):
        copies.average([two.long()])
    with pytest.raises(ValueError, match="must be contiguous, but got strides"):
        copies.average([torch.zeros(3, 2).t()])
    with pytest.raises(ValueError, match=r"must be on cpu, .* but got one on meta"):
        copies.average([torch.zeros(2, device="meta")])
    with pytest.raises(ValueError, match=r"elements of its part, but got \(2,\) and \(2,\)"):
        copies.reduce_scatter([two], [two])
    with pytest.raises(ValueError, match="one part for each whole, but got 0 parts and 1"):
        copies.all_gather([two], [])
    with pytest.raises(TypeError, match=r"no argument wire_dtype.*pass wire_dtype= to BucketedDDP"):
        PeerCopies(memory, wire_dtype=torch.bfloat16)  # type: ignore[arg-type] # there was one
    with pytest.raises(TypeError, match=r"must be what the ranks share, but got FakeGroup\. Build"):
        PeerCopies(cast("Any", memory.group))


@pytest.mark.parametrize(
    "build", [PeerMemory, PeerCopyAverage, lambda group: choose_communication(group, 2**30)]
)
def test_a_group_that_does_not_exist_yet_is_explained(build: Callable[[Any], object]) -> None:
    assert dist.group.WORLD is None
    with pytest.raises(ValueError, match=r"must be a process group, but got None, .*Call that fir"):
        build(dist.group.WORLD)


class Streams:
    """The current stream and that of the copies, which joins a recording by waiting."""

    def __init__(self) -> None:
        self.recording = self.joined = False

    def wait_event(self, other: object) -> None:
        self.joined |= self.recording


def test_recordings_begin_with_a_barrier() -> None:
    """Two recordings in a row are told apart."""
    memory = PeerMemory.__new__(PeerMemory)
    streams, signals = Streams(), Mock()
    memory.stream, memory.barrier, memory._watch = cast("Any", streams), signals.barrier, Mock()
    memory._recordings = peer_schedule.Recordings()

    def exchange() -> int:
        """How many barriers it begins with."""
        before = signals.barrier.call_count
        with patch("torch.cuda.is_current_stream_capturing", lambda: streams.joined):
            memory.follow(cast("Any", None))
        return signals.barrier.call_count - before

    assert [exchange(), exchange()] == [0, 0]
    for _ in range(2):
        streams.recording = True
        assert [exchange(), exchange(), exchange()] == [1, 0, 0]
        streams.recording = streams.joined = False
    assert [exchange(), exchange()] == [1, 1], "a graph may have been replayed between"


class Uneven(nn.Module):
    """Parameters of one element, of odd sizes, strided, and without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.strided = nn.Parameter(torch.randn(3, 5).t())
        self.one = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.first(x)) @ self.strided * self.one).sum()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def hooked(rank: int, world_size: int, folder: str, kind: str) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2))
    memory = ProcessMemory(Path(folder), 512, mesh.get_group(1) if kind == "two levels" else None)
    hook = (
        PeerCopyAverage(memory)
        if kind == "one level"
        else HierarchicalAverage(mesh, inside=PeerCopies(memory))
    )
    torch.manual_seed(0)
    model = Uneven()
    alone = Uneven()
    alone.load_state_dict(model.state_dict())
    wrapped = BucketedDDP(model, 0.0001, comm_hook=hook)
    for step in range(3):
        if step < 1:
            model.zero_grad()
            alone.zero_grad()
        # afterwards gradients accumulate onto the averages of the step before
        wrapped(batch(rank, step)).backward()
        wrapped.finish_gradient_synchronization()
        for r in range(world_size):
            (alone(batch(r, step)) / world_size).backward()
        assert model.unused.grad is None
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        mine = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        everyone = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(everyone, mine)
        assert torch.equal(everyone[0], everyone[1])


# BucketedDDP makes a contiguous gradient of a transposed parameter; the next accumulates onto it.
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout:UserWarning")
@pytest.mark.parametrize("kind", ["one level", "two levels"])
def test_the_hook_between_processes(kind: str, tmp_path: Path) -> None:
    run_ranks(hooked, 2, str(tmp_path), kind)


def other_groups(rank: int, world_size: int, folder: str) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2))
    with pytest.raises(ValueError, match="inside must be made with the mesh's second group"):
        HierarchicalAverage(mesh, inside=PeerCopies(ThreadMemory(Together(2, 512), rank)))
    memory = ProcessMemory(Path(folder), 512)
    half = dist.new_group([0, 1])
    other = BucketedDDP(Uneven(), comm_hook=PeerCopyAverage(memory), process_group=half)
    with pytest.raises(ValueError, match="built for the wrapper's process group, but it is for"):
        other(batch(rank, 0)).backward()
    with pytest.raises(ValueError, match=r"access, but got (rank 0 without a GPU|2 ranks on 1 GP)"):
        PeerMemory(dist.group.WORLD, timeout=timedelta(seconds=5))
    choice = choose_communication(dist.group.WORLD, 2**30)
    assert choice.name == "collectives"
    assert re.search("access, but got (rank 0 without a GPU|2 ranks on 1 GPUs)", str(choice))


def test_copies_for_other_groups_are_refused(tmp_path: Path) -> None:
    run_ranks(other_groups, 2, str(tmp_path))


def on_two_nodes(rank: int, world_size: int, folder: str) -> None:
    """Two nodes of two ranks: copies inside a node, all-reduces of shards across."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    node = Path(folder) / f"node {rank // 2}"
    node.mkdir(exist_ok=True)
    inside = PeerCopies(ProcessMemory(node, 512, mesh.get_group(1)))
    torch.manual_seed(0)
    model, alone = Uneven(), Uneven()
    alone.load_state_dict(model.state_dict())
    wrapped = BucketedDDP(model, 0.0001, comm_hook=HierarchicalAverage(mesh, inside=inside))
    wrapped(batch(rank, 0)).backward()
    wrapped.finish_gradient_synchronization()
    for r in range(world_size):
        (alone(batch(r, 0)) / world_size).backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    mine = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(mine, other) for other in everyone)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout:UserWarning")
def test_copies_inside_two_nodes(tmp_path: Path) -> None:
    run_ranks(on_two_nodes, 4, str(tmp_path))


class Waits:
    """Kernels that wait for other ranks: each number stands for a time, 0 for none waiting."""

    def __init__(self) -> None:
        self.waiting, self.released = 0, False

    def release(self) -> None:
        self.released = True


def lost(rank: int, world_size: int) -> str:
    waits = Waits()
    watch = Watch(
        cast("Any", waits), Ranks(dist.group.WORLD, torch.device("cpu"), "PeerMemory"), 0.4
    )
    if rank == 1:
        dist.barrier()
        return ""
    for waits.waiting in (1, 2, 0, 3):  # each shorter than the limit, all together longer
        time.sleep(0.2)
        watch.check()
    dist.barrier()
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.05)
        try:
            watch.check()
        except PeerFailureError as error:
            assert waits.released
            return str(error)
    return "nothing was raised"


def test_a_dropped_watch_ends_its_thread() -> None:
    """Although a kernel waits that will never be done."""
    before, waits = set(threading.enumerate()), Waits()
    watch = Watch(cast("Any", waits), cast("Ranks", None), 600.0)
    (thread,) = set(threading.enumerate()) - before
    waits.waiting = 1
    time.sleep(0.1)
    assert thread.is_alive()
    del watch
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert not waits.released


def test_an_exchange_that_does_not_end_is_named() -> None:
    message = run_ranks(lost, 2)[0].value
    assert "an exchange between GPUs failed on rank 0 in step 3 after" in message, message
    assert "rank 1 did not answer" in message or "rank 1 (pid" in message, message


def one_rank_cannot_map(rank: int, world_size: int) -> None:
    """Everything but the mapping of a peer's memory works, and that on all ranks but the last."""
    from torch._C._distributed_c10d import _SymmetricMemory

    memory: Any = object.__new__(PeerMemory)
    memory.group, memory.device, memory.nbytes = dist.group.WORLD, torch.device("cpu"), 64
    memory._rank, memory._world_size = rank, world_size
    refusal = RuntimeError("no mapping") if rank == world_size - 1 else None
    handle = Mock(get_buffer=Mock(side_effect=refusal))
    with (
        patch("torch.cuda.mem_get_info", return_value=(64, 64)),
        patch.object(_SymmetricMemory, "empty_strided_p2p", return_value=torch.empty(64)),
        patch("torch.distributed._symmetric_memory.rendezvous", return_value=handle),
        pytest.raises(RuntimeError, match=f"but rank {world_size - 1} could not: no mapping. Use"),
    ):
        memory._allocate()


def test_ranks_agree_that_one_cannot_map_its_peers_memory() -> None:
    """If one alone fell back to NCCL, its collectives would not meet the others' copies."""
    run_ranks(one_rank_cannot_map, 2)


class Older:
    """A gradient hook as they were."""

    def reduce_gradients(self, bucket: object, gradients: object) -> None:
        """Would return the averages."""


def one_rank(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r'must be "auto", "collectives" or a hook, but got \'x'):
        BucketedDDP(nn.Linear(2, 2), comm_hook="x")
    with pytest.raises(
        ValueError, match=r'"auto", "collectives" or a hook, but got int\. A hook c'
    ):
        BucketedDDP(nn.Linear(2, 2), comm_hook=3)
    with pytest.raises(ValueError, match=r"got Older\. A hook .* average_in_place\(bucket, grad"):
        BucketedDDP(nn.Linear(2, 2), comm_hook=Older())
    with pytest.raises(ValueError, match=r"wire_dtype must be a floating-point .* got 'bf16'\."):
        BucketedDDP(nn.Linear(2, 2), wire_dtype="bf16")
    for name, instead in (
        ("CompressTo", "wire_dtype="),
        ("PowerSGD", r"examples/power_sgd\.py"),
        ("HierarchicalAverage", r"examples/hierarchical_average\.py"),
    ):
        with pytest.raises(
            ImportError, match=rf"ddp_lite\.hooks has no {name} any more: .*{instead}"
        ):
            getattr(hooks, name)
    assert not hasattr(hooks, "other")
    with pytest.raises(ValueError, match=r"need 2 to 8 CUDA ranks .* but got a group of 1"):
        PeerCopyAverage(dist.group.WORLD)


def test_a_group_of_one_is_refused() -> None:
    run_ranks(one_rank, 1)
