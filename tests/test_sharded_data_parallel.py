"""ddp-lite and shard-optim together train as torch's DistributedDataParallel does."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lite import BucketedDDP
from ranks import run_ranks
from shard_optim import ShardedOptimizer

# The average of two ranks is exact; kernels may round differently where parameters lie elsewhere.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
SETTINGS = {"lr": 0.05, "weight_decay": 0.1}


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3))
    model[0].bias.requires_grad_(False)
    return model


def pair(model, kind):
    if kind == "torch":
        wrapped = DistributedDataParallel(model)
        return wrapped, torch.optim.AdamW(model.parameters(), **SETTINGS), lambda: None
    if kind == "reduced":
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, reduce_gradients=True, **SETTINGS
        )
        return model, optimizer, lambda: None
    wrapped = BucketedDDP(model, bucket_size_mb=0.0005)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, **SETTINGS)
    return wrapped, optimizer, wrapped.finish_gradient_synchronization


def check(rank, world_size, kind):
    results = []
    for each in ("torch", kind):
        model = build()
        wrapped, optimizer, finish = pair(model, each)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(5):
            optimizer.zero_grad()
            wrapped(torch.randn(4, 6, generator=generator)).square().mean().backward()
            finish()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("kind", ["averaged", "reduced"])
def test_trains_like_torch(kind):
    run_ranks(check, 2, kind)
