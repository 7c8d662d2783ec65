"""Trains a wrapped model on shards and a plain one on whole batches, and compares every step."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.toy import BATCH, MODELS, make_batch

STEPS = 5


def train_like_one_process(
    rank: int,
    world_size: int,
    model_name: str,
    wrap: Callable[[nn.Module], nn.Module],
    after_backward: Callable[[Any, torch.optim.Optimizer], None],
    on_batch_start: Callable[[Any, torch.optim.Optimizer], None] | None = None,
) -> None:
    """Asserts that every parameter equals single-process training after each of STEPS steps."""
    torch.manual_seed(rank)  # ranks start from different weights: rank 0's must win
    module = MODELS[model_name]()
    start = [p.detach().clone() for p in module.parameters()]
    wrapped = wrap(module)
    for mine, first in zip(wrapped.parameters(), start, strict=True):
        assert torch.equal(mine, first) == (rank == 0)
    plain = copy.deepcopy(module)
    names = [name for name, _ in plain.named_parameters()]

    ours = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, y = make_batch()
    shard = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    for step in range(STEPS):
        reference.zero_grad()
        F.mse_loss(plain(x), y).backward()
        reference.step()

        if on_batch_start:
            on_batch_start(wrapped, ours)
        ours.zero_grad()
        F.mse_loss(wrapped(x[shard]), y[shard]).backward()
        after_backward(wrapped, ours)
        ours.step()

        pairs = zip(names, wrapped.parameters(), plain.parameters(), strict=True)
        for name, mine, theirs in pairs:
            torch.testing.assert_close(
                mine, theirs, msg=lambda text, n=name, s=step: f"{n}, step {s}: {text}"
            )
        # A different order of the same data each step, so that a wrong shard cannot pass.
        order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(step))
        x, y = x[order], y[order]
