"""Compiled modules under overlap="next-forward": they wait before their graph, which stays whole.

The back end "aot_eager" makes the graphs that the default one makes, and generates no code.
"""

import copy

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import nn

from shard_optim import ShardedOptimizer

# Against the same training without a compiler and without sharding, in fp32.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net():
    torch.manual_seed(0)
    return Net()


def compile_blocks(model, how):
    for number, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(backend="aot_eager")
        else:
            model.blocks[number] = torch.compile(block, backend="aot_eager")


def sharded(model):
    """Buckets smaller than a block, so that every block waits for several."""
    return ShardedOptimizer(
        model.named_parameters(),
        torch.optim.AdamW,
        lr=0.05,
        bucket_size_mb=0.0002,
        reduce_gradients=True,
        overlap="next-forward",
    )


def batch(step, rank):
    return torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def check_training(rank, world_size, how):
    expected = net()
    plain = torch.optim.AdamW(expected.parameters(), lr=0.05)
    for step in range(4):
        plain.zero_grad()
        for peer in range(world_size):
            (expected(batch(step, peer)).square().mean() / world_size).backward()
        plain.step()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = net()
    compile_blocks(model, how)
    optimizer = sharded(model)
    optimizer.attach(model)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
    optimizer.wait()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def check_waits_are_the_blocks_own(rank, world_size, how):
    model = net()
    compile_blocks(model, how)
    optimizer = sharded(model)
    optimizer.attach(model)
    model(batch(0, rank)).square().mean().backward()
    optimizer.step()
    states = []
    for part in model.blocks[:2]:
        states.append([gathering(optimizer, block) for block in model.blocks])
        with torch.no_grad():
            part(torch.zeros(2, 6))
    states.append([gathering(optimizer, block) for block in model.blocks])
    assert states == [[True, True, True], [False, True, True], [False, False, True]]
    optimizer.wait()


def gathering(optimizer, block):
    """Whether parameters of a block may still be old. Buckets here are smaller than a matrix."""
    own = {id(p) for p in (block.up.weight, block.down.weight)}
    found = [
        bucket._gather is not None
        for bucket in optimizer.buckets
        if own & {id(p) for p in bucket.params}
    ]
    return any(found)


def check_compiled_too_late(rank, world_size):
    """A graph made without waits serves a block that should wait: found, not trained through."""
    torch._dynamo.reset()
    other = net()
    compile_blocks(other, "in place")
    other(batch(0, 0)).square().mean().backward()
    model = net()
    optimizer = sharded(model)
    optimizer.attach(model)
    compile_blocks(model, "in place")
    model(batch(0, rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"blocks\.2\..* received a gradient .* compiled after"):
        model(batch(1, rank)).square().mean().backward()
    optimizer.wait()
    dist.barrier()


class Owner(nn.Module):
    """Parameters of its own, and a child."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.child = nn.Linear(8, 8)

    def forward(self, x):
        return self.child(x @ self.weight)


def check_modules_are_not_taken_for_compiled(rank, world_size):
    """A module that waits already waits on its own after parameters were added; copies do not."""
    model = nn.Sequential(Owner())
    optimizer = ShardedOptimizer(
        [model[0].weight], torch.optim.SGD, lr=0.1, reduce_gradients=True, overlap="next-forward"
    )
    optimizer.attach(model)
    optimizer.add_param_group({"params": model[0].child.parameters(), "lr": 0.2})
    copied = copy.deepcopy(model)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    own, childs = optimizer.buckets
    copied[0](torch.ones(2, 8))
    assert own._gather is not None
    model[0].child(torch.ones(2, 8))
    assert own._gather is not None
    assert childs._gather is None
    model(torch.ones(2, 8))
    assert own._gather is None


CHECKS = [
    ("not compiled", check_modules_are_not_taken_for_compiled, ()),
    *((f"training-{how}", check_training, (how,)) for how in ("in place", "wrapped")),
    *((f"waits-{how}", check_waits_are_the_blocks_own, (how,)) for how in ("in place", "wrapped")),
    ("compiled too late", check_compiled_too_late, ()),
]


@pytest.mark.parametrize("name", [name for name, _, _ in CHECKS])
def test_on_two_ranks(errors_on_two_ranks, name):
    assert not errors_on_two_ranks[name], errors_on_two_ranks[name]
