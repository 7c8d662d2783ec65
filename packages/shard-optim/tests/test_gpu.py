"""On devices: the same update through NCCL and through gloo, overlap that is really asynchronous,
and memory as predicted."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from shard_optim import ShardedOptimizer
from shard_optim.accounting import rank_memory
from shard_optim.offload import offloaded
from whole_state import load_whole_optimizer, whole_optimizer


def stack(device, width=256, layers=6):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(device)


def check_update(rank, world_size):
    """With the same gradients on all ranks, sharding changes no bit."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    for variant in (
        {"fused": True},
        {"foreach": True},
        {"foreach": False},
        {"capturable": True},
    ):
        plain_model = stack(device)
        model = copy.deepcopy(plain_model)
        plain = torch.optim.AdamW(plain_model.parameters(), lr=0.1, **variant)
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, lr=0.1, bucket_size_mb=0.3, **variant
        )
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            for p, q in zip(plain_model.parameters(), model.parameters(), strict=True):
                p.grad = torch.randn(p.shape, generator=generator).to(device)
                q.grad = p.grad.clone()
            plain.step()
            optimizer.step()
        for p, q in zip(plain_model.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q), variant
        full = whole_optimizer(optimizer)
        if rank == 0:
            for index, state in plain.state_dict()["state"].items():
                for key, value in state.items():
                    assert torch.equal(full["state"][index][key], value.cpu())
        resumed = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, **variant)
        load_whole_optimizer(resumed, full)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_update_is_bitwise_the_plain_one(backend):
    run_ranks(check_update, 2, backend=backend, timeout=120)


def check_training(rank, world_size):
    """Reduce-scatter in backward and all-gather under the next forward, with autocast."""
    device = torch.device("cuda", rank)
    models = [stack(device), stack(device)]
    plain = torch.optim.AdamW(models[0].parameters(), lr=1e-3, fused=True)
    optimizer = ShardedOptimizer(
        models[1].parameters(),
        torch.optim.AdamW,
        lr=1e-3,
        fused=True,
        bucket_size_mb=0.5,
        reduce_gradients=True,
        overlap="next-forward",
    )
    optimizer.attach(models[1])
    generator = torch.Generator().manual_seed(rank)
    for _ in range(10):
        x = torch.randn(32, 256, generator=generator).to(device)
        for model, o in zip(models, (plain, optimizer), strict=True):
            o.zero_grad()
            model(x).square().mean().backward()
            if o is plain:
                for p in model.parameters():
                    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            o.step()
    optimizer.wait()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        # The average of two ranks is exact; Adam amplifies what rounding matrix kernels differ by.
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    optimizer.zero_grad()
    norm = optimizer.clip_grad_norm_(1.0)
    assert norm.item() == 0.0


@pytest.mark.multi_gpu
def test_reduce_and_overlap_over_nccl():
    run_ranks(check_training, 2, backend="nccl", timeout=120)


def check_memory(rank, world_size):
    device = torch.device("cuda", rank)
    model = stack(device, width=1024, layers=16)
    numel = sum(p.numel() for p in model.parameters())
    dist.all_reduce(torch.zeros(1, device=device))
    # The matrix library allocates its workspaces, one per thread that calls it, on first use.
    model(torch.ones(1, 1024, device=device)).sum().backward()
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    optimizer = ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, bucket_size_mb=8, reduce_gradients=True
    )
    after_init = torch.cuda.memory_allocated()
    assert abs(after_init - before) < 0.01 * 4 * numel
    predicted = rank_memory(numel, world_size=world_size, stage=2)
    model(torch.ones(1, 1024, device=device)).sum().backward()
    optimizer.local_gradients()
    torch.cuda.synchronize()
    gradients = torch.cuda.memory_allocated() - after_init
    assert abs(gradients - predicted.gradients) < 0.03 * predicted.gradients, gradients
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    expected = predicted.parameters + predicted.optimizer_state
    others = before - 4 * numel
    measured = torch.cuda.memory_allocated() - others
    assert abs(measured - expected) < 0.03 * expected, (measured, expected)


@pytest.mark.multi_gpu
def test_memory_is_as_predicted():
    run_ranks(check_memory, 2, backend="nccl", timeout=120)


@pytest.mark.gpu
def test_offloaded_state_on_a_gpu():
    """The bits of the plain class; pinned memory; the device holds two chunks' state at most."""
    count, numel, chunk = 16, 2**20, 2
    torch.manual_seed(0)
    sets = [[nn.Parameter(torch.randn(numel, device="cuda")) for _ in range(count)]]
    sets.append([nn.Parameter(p.detach().clone()) for p in sets[0]])
    plain = torch.optim.AdamW(sets[0], fused=True)
    offloading_cls = offloaded(torch.optim.AdamW, chunk_size_mb=chunk * numel * 4 / 2**20)
    optimizer = offloading_cls(sets[1], fused=True)
    for _ in range(4):
        for first, second in zip(*sets, strict=True):
            first.grad = torch.randn_like(first)
            second.grad = first.grad.clone()
        plain.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        peak = torch.cuda.max_memory_allocated() - before
        assert torch.cuda.memory_allocated() - before < 2**16  # counts of steps, the first time
    predicted = rank_memory(
        count * numel, world_size=1, stage=0, offloaded_chunk=chunk * numel
    ).optimizer_state
    assert abs(peak - predicted) < 0.03 * predicted, (peak, predicted)
    for first, second in zip(*sets, strict=True):
        assert torch.equal(first, second)
        for key in ("exp_avg", "exp_avg_sq"):
            resting = optimizer.state[second][key]
            assert resting.is_pinned()
            assert torch.equal(resting, plain.state[first][key].cpu())
