"""Random models: whatever they are made of, every wrapper gives one process's gradients."""

import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_lite import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP
from ranks import run_ranks

MODELS = 15
WIDTH = 6
KINDS = ("plain", "plain", "frozen", "unused", "twice", "reentrant", "checkpointed")


class RandomModel(nn.Module):
    """A chain of layers, each tied, frozen, unused, used twice or checkpointed by chance."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList()
        self.plan: list[tuple[int, str]] = []
        for index in range(choose.randint(1, 6)):
            if index and choose.random() < 0.25:
                self.layers.append(self.layers[choose.randrange(index)])
            else:
                self.layers.append(nn.Linear(WIDTH, WIDTH, bias=choose.random() < 0.5))
            kind = choose.choice(KINDS)
            if kind == "frozen":
                self.layers[-1].requires_grad_(False)
            self.plan.append((index, kind))
        choose.shuffle(self.plan)
        self.nothing = nn.Parameter(torch.empty(0))
        self.scale = nn.Parameter(torch.ones(choose.choice([(), (1,), (WIDTH,)])))
        self.double()
        self.single = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for index, kind in self.plan:
            layer = self.layers[index]
            if kind in ("reentrant", "checkpointed"):
                x = checkpoint(layer, x, use_reentrant=kind == "reentrant")
            elif kind == "twice":
                x = layer(layer(x))
            elif kind != "unused":
                x = layer(x)
        return torch.tanh(x).sum() * self.single.sum()


def batch(seed: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(2, WIDTH, generator=generator, dtype=torch.float64)


def compare(rank: int, world_size: int) -> None:
    for seed in range(MODELS):
        model = RandomModel(seed)
        for r in range(world_size):
            (model(batch(seed, r)) / world_size).backward()
        expected = [p.grad for p in model.parameters()]
        for build in (
            NaiveDDP,
            FlatDDP,
            OverlapDDP,
            lambda m: BucketedDDP(m, 0.0003, auto_finish=True),
            lambda m: BucketedDDP(m, 0.0003, last_bucket_size_mb=None, copy=True),
        ):
            wrapped = build(RandomModel(seed))
            for _ in range(2):
                wrapped.zero_grad()
                wrapped(batch(seed, rank)).backward()
                wrapped.finish_gradient_synchronization()
                for (name, p), g in zip(wrapped.named_parameters(), expected, strict=True):
                    assert (p.grad is None) == (g is None), (seed, name)
                    if g is not None:
                        torch.testing.assert_close(
                            p.grad, g, msg=lambda m, n=name, s=seed: f"model {s}, {n}: {m}"
                        )


def test_random_models() -> None:
    run_ranks(compare, 2)
