"""Where the optimizer meets others: a wrapper's flat buckets, and gradient scalers."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from shard_optim import ReduceScatterHook, ShardedGradScaler, ShardedOptimizer


@dataclass
class WrapperBucket:
    """What a bucketed wrapper publishes: parameters in reverse order, packed, padded."""

    parameters: list
    slices: list
    padded_numel: int


def wrapper_buckets(model, world_size):
    buckets = []
    params = [p for p in reversed(list(model.parameters())) if p.requires_grad]
    for start in range(0, len(params), 2):
        members, slices, used = params[start : start + 2], [], 0
        for p in members:
            slices.append(slice(used, used + p.numel()))
            used += p.numel()
        buckets.append(WrapperBucket(members, slices, -(-used // world_size) * world_size))
    return buckets


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    model[1].bias.requires_grad_(False)
    return model


def draw(params, step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(p.shape, generator=generator) for p in params]


def check_handoff(rank, world_size):
    model, plain_model = net(), net()
    buckets = wrapper_buckets(model, world_size)
    hook = ReduceScatterHook()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, layout=buckets)
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.1)
    for step in range(4):
        for number, bucket in enumerate(buckets):
            flat = torch.zeros(bucket.padded_numel)
            drawn = draw(bucket.parameters, 100 * number + step, rank)
            for p, part, grad in zip(bucket.parameters, bucket.slices, drawn, strict=True):
                flat[part] = grad.flatten()
                p.grad = flat[part].view(p.shape)
            hook(flat, bucket).wait()
        for number, bucket in enumerate(wrapper_buckets(plain_model, world_size)):
            drawn = [draw(bucket.parameters, 100 * number + step, r) for r in range(world_size)]
            for position, p in enumerate(bucket.parameters):
                p.grad = sum(d[position] for d in drawn) / world_size
        optimizer.step()
        plain.step()
    for p, q in zip(model.parameters(), plain_model.parameters(), strict=True):
        # Three ranks sum in an order of the back end's choice.
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert world_size != 2 or torch.equal(p, q)


def test_a_wrappers_buckets_are_taken_over_on_three_ranks():
    run_ranks(check_handoff, 3)


def check_bad_layouts(rank, world_size):
    model = net()
    buckets = wrapper_buckets(model, world_size)
    with pytest.raises(ValueError, match="are not in it"):
        ShardedOptimizer(model.parameters(), torch.optim.AdamW, layout=buckets[1:])
    with pytest.raises(ValueError, match="foreign to it or appears twice"):
        ShardedOptimizer(model.parameters(), torch.optim.AdamW, layout=[*buckets, buckets[0]])
    with pytest.raises(ValueError, match="leave both out"):
        ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, layout=buckets, reduce_gradients=True
        )
    odd = copy.copy(buckets[0])
    odd.padded_numel += 1
    with pytest.raises(ValueError, match="pad it"):
        ShardedOptimizer(model.parameters(), torch.optim.AdamW, layout=[odd, *buckets[1:]])
    with pytest.raises(ValueError, match="3 elements for 2 ranks"):
        ReduceScatterHook()(torch.zeros(3), None)


def check_scaler(rank, world_size, reduce_gradients):
    model, plain_model = nn.Linear(6, 4), nn.Linear(6, 4)
    plain_model.load_state_dict(model.state_dict())
    dist.broadcast(model.weight.data, 0)
    dist.broadcast(model.bias.data, 0)
    plain_model.load_state_dict(model.state_dict())
    optimizer = ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.1, reduce_gradients=reduce_gradients
    )
    plain = torch.optim.AdamW(plain_model.parameters(), lr=0.1)
    settings = {"init_scale": 1024.0, "growth_interval": 1000}
    scaler = ShardedGradScaler("cpu", **settings)
    plain_scaler = torch.amp.GradScaler("cpu", **settings)
    for step in range(4):
        for m, o, s in ((model, optimizer, scaler), (plain_model, plain, plain_scaler)):
            o.zero_grad()
            x = torch.full((2, 6), 0.1 * step + 0.1)
            if step == 2 and reduce_gradients:
                x[0, 0] = float("inf")
            s.scale(m(x).square().mean()).backward()
            if step == 2 and not reduce_gradients:  # an element that only one rank owns
                m.weight.grad[-1, -1] = float("inf")
            s.unscale_(o)
            s.step(o)
            s.update()
        assert scaler.get_scale() == plain_scaler.get_scale()
    assert scaler.get_scale() == 512.0
    for p, q in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    other = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    scaler.scale(plain_model(torch.ones(1, 6)).sum()).backward()
    scaler.step(other)


CHECKS = [
    ("a wrapper's buckets are taken over", check_handoff, ()),
    ("layouts that do not fit are refused", check_bad_layouts, ()),
    ("all ranks skip infinite gradients, averaged", check_scaler, (False,)),
    ("all ranks skip infinite gradients, reduced", check_scaler, (True,)),
]


@pytest.mark.parametrize("check", [name for name, _, _ in CHECKS])
def test_on_two_ranks(check, errors_on_two_ranks):
    assert not errors_on_two_ranks[check], errors_on_two_ranks[check]
