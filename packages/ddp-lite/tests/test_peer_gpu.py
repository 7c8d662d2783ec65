"""Collectives by copies between GPUs, against NCCL and exact sums, on all GPUs of the host."""

import gc
import itertools
import subprocess
import sys
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hierarchical_average import HierarchicalAverage
from torch import Tensor, nn
from torch._C._distributed_c10d import _SymmetricMemory

from ddp_lite import BucketedDDP
from ddp_lite.peer import PeerCopies, PeerCopyAverage, PeerMemory, choose_communication
from ddp_lite.peer import kernel as peer_kernel
from ranks import run_case, run_ranks

pytestmark = pytest.mark.multi_gpu


def gpus() -> int:
    return min(8, torch.cuda.device_count())


def values(rank: int, step: int, numels: list[int], device: torch.device) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(100 * step + rank)
    return [torch.randn(n, generator=generator, device=device) for n in numels]


def bound(inputs: Tensor) -> Tensor:
    """The largest error of an average of float32 inputs, stacked; see ``test_peer.py``."""
    return 2.0**-24 * (len(inputs) + 1) * inputs.abs().mean(0)


def collectives(rank: int, world_size: int) -> None:
    """Ragged sizes, many windows and one, messages in flight, ranks that are late by turns."""
    device = torch.device("cuda", rank)
    group = dist.group.WORLD
    assert group is not None
    numels = [333_333, 1, 0, 4_000_000, 77]
    choice = choose_communication(group, 2**30)
    assert choice.name == "peer-copy", str(choice)
    assert choose_communication(group, 2**20).name == "collectives"
    for buffer_mb in (64, 2):
        memory = PeerMemory(group, buffer_mb=buffer_mb, timeout=timedelta(seconds=60))
        assert 0.9 * buffer_mb * 2**20 < memory.nbytes <= buffer_mb * 2**20
        slots = memory.slot(rank, 0, torch.uint8).untyped_storage().nbytes()
        assert memory.nbytes == slots, "the memory that is reported is the memory that is held"
        copies = PeerCopies(memory)
        under_way = []
        for step in range(6):
            if (step + rank) % 2:
                torch.cuda._sleep(5_000_000)  # about 3 ms
            tensors = values(rank, step, numels, device)
            wholes = values(rank, step, [n * world_size for n in numels], device)
            parts = [torch.full((n,), torch.nan, device=device) for n in numels]
            gathered = [torch.full_like(whole, torch.nan) for whole in wholes]
            works = [
                copies.average(tensors),
                copies.reduce_scatter(parts, wholes),
                copies.all_gather(
                    gathered, [whole[:n] for whole, n in zip(wholes, numels, strict=True)]
                ),
            ]
            under_way.append((works, tensors, parts, gathered))
            # memory that a copy might still read must not be given to somebody else
            torch.full((8_000_000,), torch.nan, device=device)
        for step, (works, tensors, parts, gathered) in enumerate(under_way):
            for work in works:
                work.wait()
            each = [values(r, step, numels, device) for r in range(world_size)]
            scattered = [
                values(r, step, [n * world_size for n in numels], device) for r in range(world_size)
            ]
            for place, numel in enumerate(numels):
                if not numel:
                    continue
                inputs = torch.stack([v[place].double() for v in each])
                error = (tensors[place] - inputs.mean(0)).abs()
                assert (error <= bound(inputs)).all(), (buffer_mb, step, place)
                from_rank_0 = tensors[place].clone()
                dist.broadcast(from_rank_0, 0)
                assert torch.equal(from_rank_0, tensors[place]), "ranks have different bits"
                mine = slice(rank * numel, (rank + 1) * numel)
                inputs = torch.stack([v[place][mine].double() for v in scattered])
                error = (parts[place] - inputs.mean(0)).abs()
                assert (error <= bound(inputs)).all(), (buffer_mb, step, place)
                assert torch.equal(
                    gathered[place], torch.cat([v[place][:numel] for v in scattered])
                )


def test_collectives() -> None:
    run_ranks(collectives, gpus(), backend="nccl", timeout=120)


def by_one_kernel(rank: int, world_size: int) -> None:
    """Large float32 tensors, of which rows begin anywhere: the bits of exact sums, twice.

    So do torch's sums after single copies, which recorded exchanges and old drivers use.
    """
    device = torch.device("cuda", rank)
    group = dist.group.WORLD
    assert group is not None
    numels = [5, 3 * 2**20 + 1, 2**20, 4 * 2**20, 7]
    copies = PeerCopies(PeerMemory(group, buffer_mb=16, timeout=timedelta(seconds=60)))
    assert copies.fused
    assert copies.batched, "which needs a driver of CUDA 12.8 or later"
    torch_alone = PeerCopies(copies.memory)
    torch_alone.fused = torch_alone.batched = False
    launched = []
    count = patch.object(peer_kernel, "average", side_effect=peer_kernel.average)
    for step in range(2):
        tensors = values(rank, step, numels, device)
        again = [tensor.clone() for tensor in tensors]
        with count as average:
            copies.average(tensors).wait()
            launched.append(average.call_count)
        torch_alone.average(again).wait()
        each = [values(r, step, numels, device) for r in range(world_size)]
        for place in range(len(numels)):
            inputs = torch.stack([v[place].double() for v in each])
            error = (tensors[place] - inputs.mean(0)).abs()
            assert (error <= bound(inputs)).all(), (step, place)
            torch.testing.assert_close(tensors[place], again[place], rtol=1e-5, atol=1e-6)
            from_rank_0 = tensors[place].clone()
            dist.broadcast(from_rank_0, 0)
            assert torch.equal(from_rank_0, tensors[place]), "ranks have different bits"
    assert launched[0] == launched[1] > 1


def test_the_kernel_averages() -> None:
    run_ranks(by_one_kernel, gpus(), backend="nccl", timeout=120)


def recorded(rank: int, world_size: int) -> None:
    """Graphs with an odd number of windows, replayed by late ranks, with exchanges between."""
    device = torch.device("cuda", rank)
    group = dist.group.WORLD
    assert group is not None
    memory = PeerMemory(group, buffer_mb=2, timeout=timedelta(seconds=60))
    copies = PeerCopies(memory)
    numel = 700_001
    tensor = torch.empty(numel, device=device)
    part = torch.empty(numel, device=device)
    whole = torch.empty(numel * world_size, device=device)

    def exchange() -> list[Tensor]:
        if rank == 1:
            torch.cuda._sleep(2_000_000)
        averaged = tensor.clone()
        works = [copies.average([averaged]), copies.all_gather([whole], [tensor])]
        for work in works:
            work.wait()
        copies.reduce_scatter([part], [whole]).wait()
        return [averaged, whole, part]

    def fill(step: int) -> None:
        tensor.copy_(values(rank, step, [numel], device)[0])

    with torch.cuda.stream(torch.cuda.Stream()):
        fill(0)
        exchange()
        graphs, outputs = [], []
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ):
                outputs.append(exchange())
            graphs.append(graph)
        for step in range(12):
            fill(step)
            number = step % 3 % 2
            for _ in range(2):  # twice in a row, of which the first may still be read by others
                graphs[number].replay()
                memory.watch()
            replayed = [output.clone() for output in outputs[number]]
            for one, other in zip(replayed, exchange(), strict=True):
                assert torch.equal(one, other), step


def test_recorded_exchanges() -> None:
    run_ranks(recorded, gpus(), backend="nccl", timeout=120)


def layers(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Linear(256, 333), nn.GELU(), nn.Linear(333, 1), nn.Linear(1, 77)]
    return nn.Sequential(*parts).to(device)


HOOKED = list(itertools.product(("one level", "two levels"), (None, 0.2, 0.001)))


def hooked(rank: int, world_size: int, name: str, size_mb: float | None) -> None:
    """Gradients that accumulate, several buckets, two levels; same bits."""
    device = torch.device("cuda", rank)
    group = dist.group.WORLD
    assert group is not None
    mesh = dist.device_mesh.init_device_mesh("cuda", (1, world_size))
    hook = (
        PeerCopyAverage(PeerMemory(group, buffer_mb=1))
        if name == "one level"
        else HierarchicalAverage(
            mesh, inside=PeerCopies(PeerMemory(mesh.get_group(1), buffer_mb=1))
        )
    )
    tolerance = 2.0**-14  # of the largest gradient of a parameter
    model, alone = layers(device), layers(device)
    wrapped = BucketedDDP(model, size_mb, comm_hook=hook)
    for step in range(4):
        if step % 2 == 0:
            model.zero_grad()
            alone.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(32, 256, generator=generator).to(device)
        wrapped(inputs).square().mean().backward()
        loss = alone(inputs).square().mean()
        for p, g in zip(
            alone.parameters(),
            torch.autograd.grad(loss, list(alone.parameters())),
            strict=True,
        ):
            dist.all_reduce(g, dist.ReduceOp.AVG)
            p.grad = g if p.grad is None else p.grad + g
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            difference, largest = (p.grad - q.grad).abs().max(), q.grad.abs().max()
            assert difference <= tolerance * largest, step
            from_rank_0 = p.grad.clone()
            dist.broadcast(from_rank_0, 0)
            assert torch.equal(p.grad, from_rank_0)


@pytest.mark.xdist_group("hooked")
@pytest.mark.parametrize(("name", "size_mb"), HOOKED)
def test_gradients(name: str, size_mb: float | None) -> None:
    run_case(hooked, gpus(), HOOKED, name, size_mb, backend="nccl")


def refused(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(
        torch.OutOfMemoryError, match=r"must have [\d,]+ MB free for buffer_mb, but rank 0"
    ):
        PeerMemory(group, buffer_mb=10_000_000)
    with pytest.raises(ValueError, match="buffer_mb must be at least"):
        PeerMemory(group, buffer_mb=1e-6)
    copies = PeerCopies(PeerMemory(group, buffer_mb=1))
    with pytest.raises(ValueError, match=rf"must be on cuda:{rank}, .* but got one on cpu"):
        copies.average([torch.zeros(2)])
    tensor = torch.full((3,), float(rank), device="cuda")
    copies.average([tensor]).wait()  # it goes on after that
    assert tensor.tolist() == [(world_size - 1) / 2] * 3


def beside_cached_blocks(rank: int, world_size: int) -> None:
    """Torch keeps nearly all of the device's memory for reuse, of which nothing is in use."""
    group = dist.group.WORLD
    assert group is not None
    gathered = [torch.zeros(1, device="cuda") for _ in range(world_size)]
    dist.all_gather(gathered, gathered[0])  # NCCL takes its own memory now
    torch.cuda.synchronize()
    blocks = torch.empty(
        torch.cuda.mem_get_info()[0] - (256 << 20), dtype=torch.uint8, device="cuda"
    )
    del blocks
    assert torch.cuda.mem_get_info()[0] < 512 << 20
    tensor = torch.full((3,), float(rank), device="cuda")
    PeerCopies(PeerMemory(group, buffer_mb=512)).average([tensor]).wait()
    assert tensor.tolist() == [(world_size - 1) / 2] * 3


def test_memory_that_torch_caches_is_given_back_for_it() -> None:
    run_ranks(beside_cached_blocks, gpus(), backend="nccl", timeout=120)


def test_bad_input_is_refused_on_every_rank() -> None:
    run_ranks(refused, 2, backend="nccl", timeout=120)


def automatic(rank: int, world_size: int) -> None:
    """Large buckets are copied, small ones and too little memory lead to NCCL; ``explain``."""
    device = torch.device("cuda", rank)
    small = BucketedDDP(layers(device))
    assert "(collectives: messages of 0.3" in small.explain(), small.explain()
    large = nn.Linear(8192, 4096, device=device)  # 128 MB
    over_nccl = BucketedDDP(large, comm_hook="collectives")
    assert "coalesced in place (collectives: as comm_hook asks)" in over_nccl.explain()
    over_nccl.detach()
    wrapped = BucketedDDP(large)
    assert "copied between GPUs (peer-copy: " in wrapped.explain(), wrapped.explain()
    wrapped(torch.full((1, 8192), rank + 1.0, device=device)).sum().backward()
    assert large.weight.grad is not None
    assert (large.weight.grad == (world_size + 1) / 2).all()
    wrapped.detach()
    # One rank's allocator refuses; filling the GPU instead would end whatever else runs on it.
    refuses = patch.object(_SymmetricMemory, "empty_strided_p2p", side_effect=RuntimeError("full"))
    with refuses if rank == 1 else nullcontext():
        wrapped = BucketedDDP(large)
    said = wrapped.explain()
    assert "(collectives: every GPU must have 512 MB free" in said, said
    assert "but rank 1 has " in said, said
    wrapped.detach()
    with patch("torch.distributed._symmetric_memory.rendezvous", side_effect=RuntimeError("no")):
        wrapped = BucketedDDP(large)
    assert "(collectives: the processes of the ranks must be able to share" in wrapped.explain()


def test_the_automatic_choice() -> None:
    run_ranks(automatic, 2, backend="nccl", timeout=120)


def recorded_by_default(rank: int, world_size: int) -> None:
    """A step of the default wrapper, forward to averages, recorded and replayed."""
    device = torch.device("cuda", rank)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8192), nn.Tanh(), nn.Linear(8192, 4096)).to(device)
    alone = nn.Sequential(nn.Linear(64, 8192), nn.Tanh(), nn.Linear(8192, 4096)).to(device)
    wrapped = BucketedDDP(model)
    alone.load_state_dict(wrapped.state_dict())
    assert "copied between GPUs (peer-copy: " in wrapped.explain(), wrapped.explain()
    inputs = torch.empty(16, 64, device=device)

    def fill(step: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs.copy_(torch.randn(16, 64, generator=generator))

    def step() -> None:
        for p in wrapped.parameters():
            p.grad = None
        wrapped(inputs).square().mean().backward()

    with torch.cuda.stream(torch.cuda.Stream()):
        fill(0)
        for _ in range(3):  # plans its buckets anew after the first
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            step()
        for number in range(1, 6):
            fill(number)
            graph.replay()
            loss = alone(inputs).square().mean()
            expected = torch.autograd.grad(loss, list(alone.parameters()))
            for p, g in zip(wrapped.parameters(), expected, strict=True):
                dist.all_reduce(g, dist.ReduceOp.AVG)
                assert (p.grad - g).abs().max() <= 2.0**-14 * g.abs().max(), number
        torch.cuda.synchronize()
    del graph
    wrapped.detach()


def test_a_recorded_step_of_the_default() -> None:
    run_ranks(recorded_by_default, 2, backend="nccl", timeout=120)


def freed(rank: int, world_size: int) -> None:
    """Memory that the allocator does not count, and the thread that watches it."""

    def held() -> int:
        dist.barrier()
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def watches() -> int:
        return sum(thread.name == "ddp_lite watch over copies" for thread in threading.enumerate())

    gc.disable()  # it must not be needed
    large = nn.Linear(8192, 4096, device=torch.device("cuda", rank))
    x = torch.ones(1, 8192, device=torch.device("cuda", rank))

    def trained() -> BucketedDDP:
        wrapped = BucketedDDP(large)
        for _ in range(3):
            large.zero_grad()
            wrapped(x).sum().backward()
        assert watches() == 1
        return wrapped

    trained()  # contexts and communicators stay
    grown, dropped, detached = [], [], []
    for _ in range(4):  # other processes on this GPU come and go: the least counts
        before = held()
        wrapped = trained()
        grown.append(held() - before)
        del wrapped
        dropped.append(held() - before)
        wrapped = trained()
        wrapped.detach()
        detached.append(held() - before)
        assert watches() == 0
        del wrapped
    assert max(grown) > 500 * 2**20
    assert min(dropped) < 50 * 2**20, f"a dropped wrapper keeps memory: {dropped}"
    assert min(detached) < 50 * 2**20, f"a detached wrapper keeps memory: {detached}"


def test_shared_memory_is_freed_with_the_wrapper() -> None:
    run_ranks(freed, 2, backend="nccl", timeout=120)


def outlived(rank: int, world_size: int) -> None:
    """Rank 0 drops messages under way.

    Nobody gets the tensor's memory meanwhile: rank 1 would receive what is written there next, as
    the copies are late. Rank 1 joins only when rank 0 has looked, so nothing has ended by then.
    """
    store = dist.distributed_c10d._get_default_store()
    group = dist.group.WORLD
    assert group is not None
    memory = PeerMemory(group, buffer_mb=64, timeout=timedelta(seconds=60))
    copies = PeerCopies(memory)
    numel = 2**20

    # CUDA loads a kernel at its first launch, and waits for the GPU meanwhile; and the allocator
    # has room from now on. Later nothing but an exchange waits for rank 1.
    kept = [torch.full((numel,), 1.0, device="cuda") for _ in range(6)]
    copies.average(kept[:1]).wait()
    torch.cuda.synchronize()
    del kept
    for step in range(5):
        tensor = torch.full((numel,), float(rank + step), device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(memory.stream):
            torch.cuda._sleep(50_000_000)  # about 30 ms
        if rank == 0:
            place = tensor.data_ptr()
            copies.average([tensor])
            del tensor
            others = [torch.full((numel,), torch.nan, device="cuda") for _ in range(4)]
            assert place not in [other.data_ptr() for other in others]
            store.set(f"looked {step}", "")
        else:
            store.wait([f"looked {step}"])
            copies.average([tensor]).wait()
            assert (tensor == step + 0.5).all()
        torch.cuda.synchronize()
        dist.barrier()


def test_tensors_outlive_messages_that_nobody_waits_for() -> None:
    run_ranks(outlived, 2, backend="nccl", timeout=120)


ENDS = """
import torch
import torch.distributed as dist
from ddp_lite import BucketedDDP

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
wrapped = BucketedDDP(torch.nn.Linear(8192, 4096, device="cuda"))
assert "(peer-copy: " in wrapped.explain(), wrapped.explain()
for _ in range(3):
    wrapped(torch.ones(1, 8192, device="cuda")).sum().backward()
dist.destroy_process_group()
"""


def test_a_program_may_end_with_its_wrapper_alive(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ENDS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run([*command, str(program)], stderr=subprocess.PIPE, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
