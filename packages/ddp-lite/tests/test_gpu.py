"""The same guarantees under NCCL on two GPUs, and the hook that only GPUs can run."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hierarchical_average import HierarchicalAverage
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lite import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP
from ddp_lite.peer import PeerCopyAverage, PeerMemory
from ranks import run_case, run_ranks

pytestmark = pytest.mark.multi_gpu

# The two sums of float32 terms are ordered alike with two ranks; matrix products may not be.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def mlp(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(256, 256), nn.GELU()]
    return nn.Sequential(*layers).to(device)


def batch(rank: int, step: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(32, 256, generator=generator).to(device)


def train(wrapped: nn.Module, rank: int, device: torch.device, steps: int = 4) -> torch.Tensor:
    for step in range(steps):
        for p in wrapped.parameters():
            p.grad = None
        wrapped(batch(rank, step, device)).square().mean().backward()
        if not isinstance(wrapped, DistributedDataParallel):
            wrapped.finish_gradient_synchronization()
        with torch.no_grad():
            for p in wrapped.parameters():
                p -= 0.05 * p.grad
    return torch.cat([p.detach().flatten() for p in wrapped.parameters()])


BUILDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "in place": lambda m: BucketedDDP(m, 0.6),
    "copy": lambda m: BucketedDDP(m, 0.6, copy=True),
    "zeros": lambda m: BucketedDDP(m, 0.6, missing_gradients="zeros"),
    "error": lambda m: BucketedDDP(m, 0.6, missing_gradients="error"),
    "hierarchical": lambda m: BucketedDDP(
        m, 0.6, comm_hook=HierarchicalAverage(dist.device_mesh.init_device_mesh("cuda", (1, 2)))
    ),
    "peer copies": lambda m: BucketedDDP(
        m, 0.6, comm_hook=PeerCopyAverage(PeerMemory(dist.group.WORLD, buffer_mb=4))
    ),
}


def equal_to_torch(rank: int, world_size: int, name: str) -> None:
    device = torch.device("cuda", rank)
    expected = train(DistributedDataParallel(mlp(device)), rank, device)
    wrapped = BUILDS[name](mlp(device))
    assert wrapped.stats() is None
    actual = train(wrapped, rank, device)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    from_rank_0 = actual.clone()
    dist.broadcast(from_rank_0, 0)
    assert torch.equal(actual, from_rank_0)
    stats = wrapped.stats()
    assert stats.exposed_wait_ms >= 0
    if isinstance(wrapped, OverlapDDP):
        assert stats.started_in_backward == stats.reductions


@pytest.mark.xdist_group("equal_to_torch")
@pytest.mark.parametrize("name", BUILDS)
def test_every_variant_equals_torch(name: str) -> None:
    run_case(equal_to_torch, 2, BUILDS, name, backend="nccl")


def wide(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(256, 1024)
    return nn.Sequential(first, *[nn.Linear(1024, 1024) for _ in range(23)]).to(device)


def wire(rank: int, world_size: int) -> None:
    """Every step's gradients, converted on a stream of their own, are those of exact averages."""
    device = torch.device("cuda", rank)
    exact = BucketedDDP(wide(device), 16)
    rounded = BucketedDDP(wide(device), 16, wire_dtype=torch.bfloat16)
    for step in range(8):
        for wrapped in (exact, rounded):
            for p in wrapped.parameters():
                p.grad = None
            wrapped(batch(rank, step, device)).square().mean().backward()
            wrapped.finish_gradient_synchronization()
        for p, q in zip(exact.parameters(), rounded.parameters(), strict=True):
            torch.testing.assert_close(
                q.grad, p.grad, rtol=2e-2, atol=2**-8 * p.grad.abs().max().item()
            )


def test_bf16_on_the_wire() -> None:
    run_ranks(wire, 2, backend="nccl", timeout=120)


def memory(rank: int, world_size: int) -> None:
    """Reducing in place needs no second copy of the gradients."""
    device = torch.device("cuda", rank)

    def peak(wrapped: nn.Module) -> int:
        for step in range(3):
            for p in wrapped.parameters():
                p.grad = None
            torch.cuda.reset_peak_memory_stats()
            wrapped(batch(rank, step, device)).square().mean().backward()
            if isinstance(wrapped, BucketedDDP):
                wrapped.finish_gradient_synchronization()
        return torch.cuda.max_memory_allocated()

    model = wide(device)
    alone = peak(model)
    wrapped = BucketedDDP(model, 16)
    assert peak(wrapped) <= alone * 1.02
    wrapped.detach()
    gradients = sum(p.numel() * 4 for p in model.parameters())
    wrapped = BucketedDDP(model, 16, wire_dtype=torch.bfloat16)
    assert peak(wrapped) <= alone * 1.02 + gradients / 2
    wrapped.detach()
    assert peak(BucketedDDP(model, 16, copy=True)) <= alone + gradients


def test_peak_memory() -> None:
    run_ranks(memory, 2, backend="nccl", timeout=120)


DROPPED = ("naive", "flat", "overlap", "in place")


def dropped(rank: int, world_size: int, name: str) -> None:
    """What ``test_lifetime.py`` shows on CPUs, with NCCL and in the allocator's own count."""
    device = torch.device("cuda", rank)
    gc.disable()  # it must not be needed
    # cuBLAS keeps workspaces for each thread, and a barrier a tensor, from their first use on.
    wide(device)(batch(rank, 0, device)).sum().backward()
    dist.barrier()
    before = torch.cuda.memory_allocated()
    wrapped = BUILDS[name](wide(device))
    batches = [batch(rank, step, device) for step in range(2)]
    for inputs in batches:
        wrapped(inputs).square().mean().backward()
        wrapped.finish_gradient_synchronization()
    module = weakref.ref(wrapped.module)
    del wrapped, batches, inputs
    assert module() is None
    torch.cuda.synchronize()
    dist.barrier()
    held = torch.cuda.memory_allocated() - before
    assert held < 2**20, f"a dropped wrapper keeps {held} bytes"


@pytest.mark.xdist_group("dropped")
@pytest.mark.parametrize("name", DROPPED)
def test_a_dropped_wrapper_frees_its_memory(name: str) -> None:
    run_case(dropped, 2, DROPPED, name, backend="nccl")


def averaged_alone(model: nn.Module, rank: int, step: int, device: torch.device) -> list:
    """The gradients of one step, averaged without a wrapper."""
    loss = model(batch(rank, step, device)).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for gradient in gradients:
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
    return list(gradients)


CAPTURED = ("in place", "copy", "zeros")


def captured(rank: int, world_size: int, name: str) -> None:
    """A whole step in one CUDA graph, replayed: forward, backward, reductions, finish."""
    device = torch.device("cuda", rank)
    wrapped = BUILDS[name](mlp(device))
    inputs = batch(rank, 0, device)

    def step() -> None:
        for p in wrapped.parameters():
            p.grad = None
        wrapped(inputs).square().mean().backward()
        wrapped.finish_gradient_synchronization()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # plans its buckets anew after the first
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    for number in range(1, 4):
        inputs.copy_(batch(rank, number, device))
        graph.replay()
        expected = averaged_alone(mlp(device), rank, number, device)
        for p, g in zip(wrapped.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, g, **TOLERANCE)


@pytest.mark.xdist_group("captured")
@pytest.mark.parametrize("name", CAPTURED)
def test_a_step_in_a_cuda_graph(name: str) -> None:
    run_case(captured, 2, CAPTURED, name, backend="nccl")


def graphed_inside(rank: int, world_size: int) -> None:
    """A module that replays CUDA graphs of its own."""
    device = torch.device("cuda", rank)
    model = mlp(device)
    sample = torch.zeros(32, 256, device=device, requires_grad=True)
    model[2] = torch.cuda.make_graphed_callables(model[2], (sample,))
    wrapped = BucketedDDP(model, 0.6)
    for step in range(3):
        for p in wrapped.parameters():
            p.grad = None
        wrapped(batch(rank, step, device)).square().mean().backward()
        wrapped.finish_gradient_synchronization()
        expected = averaged_alone(mlp(device), rank, step, device)
        for p, g in zip(wrapped.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, g, **TOLERANCE)


# What make_graphed_callables of torch 2.11 itself does, before anything is wrapped.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_cuda_graphs_inside_the_module() -> None:
    run_ranks(graphed_inside, 2, backend="nccl", timeout=120)


def wrong_device(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="serve the module's device"):
        NaiveDDP(nn.Linear(2, 2))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(f"cuda:{rank}"))
    with pytest.raises(ValueError, match=r"on one device, but got 0\.weight on cpu"):
        NaiveDDP(mixed)


def test_wrong_devices_are_named() -> None:
    run_ranks(wrong_device, 2, backend="nccl", timeout=120)
