"""A parameter without a gradient on one rank in the first step: zeros, as in every other step."""

import torch
from torch import nn

from fully_sharded_models import average_gradients
from ranks import run_ranks
from shard_optim import FullyShardedDataParallel, ShardedOptimizer


class Branches(nn.Module):
    """Rank 1 leaves the second one out in the first two steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x, rank, step):
        x = self.first(x)
        if rank == 0 or step > 1:
            x = self.second(x)
        return self.last(x)


def train(model, optimizer, rank, after_backward=lambda model: None):
    for step in range(4):
        optimizer.zero_grad()
        x = torch.full((2, 8), 1.0 + rank)
        model(x, rank, step).square().mean().backward()
        after_backward(model)
        optimizer.step()


def averaged_with_zeros(model):
    for param in model.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    average_gradients(model)


def check_first_step(rank, world_size):
    expected = Branches()
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.1), rank, averaged_with_zeros)
    for partition in ("flat", "whole"):
        model = Branches()
        settings = {"lr": 0.1, "partition": partition, "bucket_size_mb": 0.0001}
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.SGD, reduce_gradients=True, **settings
        )
        train(model, optimizer, rank)
        for mine, plain in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, plain)
    model = FullyShardedDataParallel(Branches(), reshard_after_forward=False)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    for name, plain in expected.named_parameters():
        torch.testing.assert_close(model.full_parameters()[name], plain)


def test_a_gradient_that_one_rank_lacks_at_first():
    run_ranks(check_first_step, 2)
