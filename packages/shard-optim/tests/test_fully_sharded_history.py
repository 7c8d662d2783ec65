"""A rank that trains a sharded model otherwise: named on every rank in the next backward."""

import re

import pytest
import torch

from fully_sharded_models import loss_of, net
from ranks import run_ranks
from shard_optim import FullyShardedDataParallel

WAYS = {
    "lr": (r"lr=0\.1", r"lr=0\.2"),
    "left-out step": ("stepped SGD", "it has run backward"),
    "one more step": ("stepped SGD", r"stepped SGD.*stepped SGD"),
    "left-out zero_grad": ("with 0 gradients", r"with \d\d gradients kept"),
    "scheduler": (r"lr=0\.1", r"lr=0\.05"),
    "momentum": (r"momentum=0", r"momentum=0\.9"),
    "tensor": (r"lr=0\.1", r"lr=0\.25"),
}


def train(rank, world_size, way):
    model = FullyShardedDataParallel(net(depth=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        odd = step == 2 and rank == world_size - 1
        if not (odd and way == "left-out zero_grad"):
            optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        if step == 3:
            raise AssertionError("the difference has not been found in the next backward")
        if odd and way in ("lr", "scheduler", "tensor"):
            rates = {"lr": 0.2, "scheduler": 0.05, "tensor": torch.tensor(0.25)}
            optimizer.param_groups[0]["lr"] = rates[way]
        if odd and way == "momentum":
            optimizer.param_groups[0]["momentum"] = 0.9
        for _ in range(0 if odd and way == "left-out step" else 1 + (odd and "more" in way)):
            optimizer.step()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_difference_is_named_in_the_next_backward(way, world_size):
    usual, odd = WAYS[way]
    for outcome in run_ranks(train, world_size, way, check=False, timeout=60):
        assert "StepMismatchError: every rank must make the same" in outcome.error, outcome.error
        assert re.search(usual, outcome.error), outcome.error
        assert re.search(odd, outcome.error), outcome.error


def alike(rank, world_size):
    """Accumulation, skipped steps and several optimizers, alike on every rank: no error."""
    model = FullyShardedDataParallel(net())
    params = list(model.parameters())
    lr = 1 if rank else 1.0
    optimizers = [torch.optim.SGD(params[::2], lr=lr), torch.optim.AdamW(params[1::2], lr=0.1)]
    for step in range(6):
        with model.no_sync():
            loss_of(model, step, rank).backward()
        loss_of(model, step, rank).backward()
        if step % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.param_groups[0]["lr"] *= 0.9
                optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, step, rank)


def test_ranks_that_train_alike_are_left_alone():
    run_ranks(alike, 2)
