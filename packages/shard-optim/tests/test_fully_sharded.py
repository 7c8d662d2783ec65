"""Parameters in shards: the same training as averaged replicas, bit for bit in fp32."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranks import run_ranks
from shard_optim import FullyShardedDataParallel

VOCAB, WIDTH = 11, 8


class Block(nn.Module):
    """A norm, biases, and matrices whose sizes do not divide by 2, 3 or 4."""

    def __init__(self, hidden=13):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Embedding, blocks and head, with what trips sharding, by keyword."""

    def __init__(self, *, depth=5, tied=False, frozen=False, unused=False, how="plain", odd=False):
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            Block(13 + 4 * (odd and number == 2)) for number in range(depth)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.blocks[1].up.weight.requires_grad_(False)
            self.blocks[1].norm.weight.requires_grad_(False)
            self.blocks[2].requires_grad_(False)
        if unused:
            self.blocks[3].never = nn.Parameter(torch.ones(3, 5))
            self.blocks[3].sometimes = nn.Linear(WIDTH, WIDTH)
            self.blocks[3].forward = functools.partial(_with_sometimes, self.blocks[3])

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            if self.how == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "re-entrant")
        return self.head(x)


def _with_sometimes(block, x):
    if dist.is_initialized() and dist.get_rank() == 0:
        x = x + block.sometimes(x)
    return Block.forward(block, x)


MODELS = {
    "plain": {},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "odd": {"odd": True},
    "unused": {"unused": True},
    "one block": {"depth": 1},
    "re-entrant": {"how": "re-entrant"},
    "not re-entrant": {"how": "not re-entrant"},
}

OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
}


def net(seed=0, **settings):
    torch.manual_seed(seed)
    return Net(**settings)


def batch(step, rank):
    return torch.randint(
        0, VOCAB, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank)
    )


def loss_of(model, step, rank):
    return model(batch(step, rank)).float().square().mean()


def average_gradients(model):
    """What a data-parallel wrapper does; a parameter without gradients on all ranks has none."""
    for p in model.parameters():
        if p.requires_grad:
            present = torch.tensor([float(p.grad is not None)])
            dist.all_reduce(present)
            if present.item() > 0:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


def replicas(steps, rank, optimizer="adamw", micro=1, **settings):
    """Every rank's own replica, trained on averaged gradients."""
    model = net(**settings)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            loss_of(model, step * micro + part, rank).backward()
        average_gradients(model)
        optimizer.step()
    return model


def poison(model):
    """Fills every buffer that a later gather must overwrite."""
    for slot in model.slots:
        slot.whole.fill_(float("nan"))
        slot.cast.fill_(float("nan"))


def assert_resting(model):
    for name, param in model.named_parameters():
        if param.grad is not None:
            assert param.grad.shape == param.shape, name
            assert param.grad.dtype == param.dtype, name
    for unit in model.units:
        for param, shard in zip(unit.params, unit.shard_views, strict=True):
            assert param.data_ptr() == shard.data_ptr()
            assert param.ndim == 1


def train(model, steps, rank, optimizer="adamw"):
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        poison(model)
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        assert_resting(model)
        optimizer.step()


def assert_equal(model, expected, *, exact=True):
    found = model.full_parameters()
    assert list(found) == [name for name, _ in expected.named_parameters()]
    for name, param in expected.named_parameters():
        if exact:
            assert torch.equal(found[name], param), f"{name}: {(found[name] - param).abs().max()}"
        else:
            # Three or more summands are added in another order.
            torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)


def check_training(rank, world_size, name, optimizer, settings):
    expected = replicas(4, rank, optimizer, **MODELS[name])
    model = FullyShardedDataParallel(net(seed=rank, **MODELS[name]), **settings)
    train(model, 4, rank, optimizer)
    assert_equal(model, expected, exact=world_size <= 2)


TRAINING = [
    (f"{name}-{optimizer}-{'keep' if settings else 'reshard'}", (name, optimizer, settings))
    for name in MODELS
    for optimizer in OPTIMIZERS
    for settings in ({}, {"reshard_after_forward": False})
]

CHECKS = [
    *((name, check_training, arguments) for name, arguments in TRAINING),
    ("prefetch 2", check_training, ("plain", "adamw", {"prefetch": 2})),
]


@pytest.mark.parametrize("name", [name for name, _, _ in CHECKS])
def test_on_two_ranks(errors_on_two_ranks, name):
    assert not errors_on_two_ranks[name], errors_on_two_ranks[name]


def check_several(rank, world_size):
    for name in MODELS:
        check_training(rank, world_size, name, "adamw", {})


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_world_sizes(world_size):
    run_ranks(check_several, world_size)
