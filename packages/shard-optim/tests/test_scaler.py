"""Gradient scalers: all ranks skip a step, or none does."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shard_optim import FullyShardedDataParallel, ShardedGradScaler, ShardedOptimizer


def check_scaler(rank, world_size, stage):
    model, plain_model = nn.Linear(6, 4), nn.Linear(6, 4)
    plain_model.load_state_dict(model.state_dict())
    dist.broadcast(model.weight.data, 0)
    dist.broadcast(model.bias.data, 0)
    plain_model.load_state_dict(model.state_dict())
    options = {"reduce_gradients": True} if stage == 2 else {"offload_state": stage == 3}
    if stage == 3:
        model = FullyShardedDataParallel(nn.Sequential(model))
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, **options)
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.1)
    settings = {"init_scale": 1024.0, "growth_interval": 1000}
    scaler = ShardedGradScaler("cpu", **settings)
    plain_scaler = torch.amp.GradScaler("cpu", **settings)
    for step in range(4):
        for m, o, s in ((model, optimizer, scaler), (plain_model, plain, plain_scaler)):
            o.zero_grad()
            x = torch.full((2, 6), 0.1 * step + 0.1)
            if step == 2 and stage > 1:
                x[0, 0] = float("inf")
            s.scale(m(x).square().mean()).backward()
            if step == 2 and stage == 1:  # an element that only one rank owns
                m.weight.grad[-1, -1] = float("inf")
            s.unscale_(o)
            s.step(o)
            s.update()
        assert scaler.get_scale() == plain_scaler.get_scale()
    assert scaler.get_scale() == 512.0
    found = model.full_parameters().values() if stage == 3 else model.parameters()
    for p, q in zip(found, plain_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    other = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    scaler.scale(plain_model(torch.ones(1, 6)).sum()).backward()
    scaler.step(other)


CHECKS = [
    ("all ranks skip infinite gradients, averaged", check_scaler, (1,)),
    ("all ranks skip infinite gradients, reduced", check_scaler, (2,)),
    ("all ranks skip infinite gradients, parameters in shards", check_scaler, (3,)),
]


@pytest.mark.parametrize("check", [name for name, _, _ in CHECKS])
def test_on_two_ranks(check, errors_on_two_ranks):
    assert not errors_on_two_ranks[check], errors_on_two_ranks[check]
