"""A small model with what trips parameter sharding, and training of it without any sharding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shard_optim import FullyShardedDataParallel

VOCAB, WIDTH = 11, 8


class Block(nn.Module):
    """A norm, biases, and matrices whose sizes do not divide by 2, 3 or 4."""

    def __init__(self, hidden: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, WIDTH) to the same."""
        return cast(Tensor, x + self.down(self.up(self.norm(x)).relu()))


class BlockWithUnused(Block):
    """One matrix that nobody uses, and a layer that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.ones(3, 5))
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, WIDTH) to the same."""
        if dist.get_rank() == 0:
            x = x + self.sometimes(x)
        return super().forward(x)


class Net(nn.Module):
    """Embedding, blocks and head.

    Args:
        depth: number of blocks.
        tied: whether the head's weight is the embedding's.
        frozen: whether one block is frozen, and part of another.
        odd: whether one block is larger than the others.
        unused: whether every block holds parameters that some rank does not use.
        how: "plain", or checkpointed: "re-entrant" or "not re-entrant".
    """

    def __init__(
        self,
        *,
        depth: int = 5,
        tied: bool = False,
        frozen: bool = False,
        odd: bool = False,
        unused: bool = False,
        how: str = "plain",
    ) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            BlockWithUnused() if unused else Block(13 + 4 * (odd and number == 2))
            for number in range(depth)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            first, second = cast(Block, self.blocks[1]), self.blocks[2]
            first.up.weight.requires_grad_(False)
            first.norm.weight.requires_grad_(False)
            second.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) int64 to (batch, length, VOCAB)."""
        x = self.embed(tokens)
        for block in self.blocks:
            if self.how == "plain":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.how == "re-entrant")
        return cast(Tensor, self.head(x))


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "odd": {"odd": True},
    "unused": {"unused": True},
    "one block": {"depth": 1},
    "re-entrant": {"how": "re-entrant"},
    "not re-entrant": {"how": "not re-entrant"},
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    # AdamW divides by the size of gradients. Where they almost cancel, its usual eps would show in
    # which order the gradients of three or more ranks were added.
    "adamw, large eps": functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1, eps=1e-3),
}


def net(seed: int = 0, **settings: Any) -> Net:
    """A model with weights of this seed."""
    torch.manual_seed(seed)
    return Net(**settings)


def batch(step: int, rank: int) -> Tensor:
    """A rank's tokens of a step, (3, 5) int64."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, VOCAB, (3, 5), generator=generator)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """A scalar in fp32."""
    return cast(Tensor, model(batch(step, rank)).float().square().mean())


def poison(model: FullyShardedDataParallel) -> None:
    """From now on every buffer is filled with NaN just before a unit is gathered into it."""
    for slot in model.slots:

        def take(unit: Any, generation: int, slot: Any = slot, take: Any = slot.take) -> None:
            take(unit, generation)
            slot.whole.fill_(float("nan"))

        slot.take = take  # type: ignore[method-assign]


def average_gradients(model: nn.Module) -> None:
    """What a data-parallel wrapper does; a parameter without gradients on all ranks has none."""
    params = [param for param in model.parameters() if param.requires_grad]
    present = torch.tensor([float(param.grad is not None) for param in params])
    dist.all_reduce(present)
    params = [param for param, ranks in zip(params, present.tolist(), strict=True) if ranks]
    for dtype in dict.fromkeys(param.dtype for param in params):
        own = [param for param in params if param.dtype == dtype]
        for param in own:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        grads = [cast(Tensor, param.grad) for param in own]
        flat = torch.cat([grad.reshape(-1) for grad in grads])  # one collective, for speed
        dist.all_reduce(flat, op=dist.ReduceOp.AVG)
        for grad, average in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(average.view_as(grad))


def replicas(steps: int, rank: int, optimizer: str = "adamw", **settings: Any) -> Net:
    """This rank's own whole model, trained on averaged gradients."""
    model = net(**settings)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        stepper.zero_grad()
        loss_of(model, step, rank).backward()
        average_gradients(model)
        stepper.step()
    return model
