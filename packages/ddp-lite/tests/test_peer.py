"""The exchange between two peers, its memory shared between two processes on the CPU."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lite import BucketedDDP
from ddp_lite.collectives import Chain
from ddp_lite.peer import HalfExchange, PeerCopyAverage, PeerReduction
from ranks import run_ranks


class Shared:
    """What ``PeerCopyAverage`` does with two GPUs, with two memory-mapped files."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._exchanges: dict[tuple[int, ...], HalfExchange] = {}

    def reduce_gradients(self, bucket, gradients) -> PeerReduction:
        if bucket.indices not in self._exchanges:
            me = dist.get_rank()
            both = [
                torch.from_file(
                    str(self._folder / f"{bucket.index}-{rank}"),
                    shared=True,
                    size=bucket.numel,
                    dtype=bucket.dtype,
                )
                for rank in range(2)
            ]
            dist.barrier()
            self._exchanges[bucket.indices] = HalfExchange(
                bucket, me, both[me], both[1 - me], dist.barrier
            )
        exchange = self._exchanges[bucket.indices]
        return PeerReduction(Chain(exchange.stages(gradients), bucket.device), exchange.views)


class Uneven(nn.Module):
    """Parameters of one element, of odd sizes, strided, and without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.strided = nn.Parameter(torch.randn(3, 5).t())
        self.one = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.first(x)) @ self.strided * self.one).sum()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * step + rank))


def exchange(rank: int, world_size: int, folder: str) -> None:
    torch.manual_seed(0)
    model = Uneven()
    alone = Uneven()
    alone.load_state_dict(model.state_dict())
    for size_mb in (None, 0.0001, 0.00001):
        place = Path(folder) / str(size_mb)
        place.mkdir(exist_ok=True)
        wrapped = BucketedDDP(model, size_mb, comm_hook=Shared(str(place)))
        model.zero_grad()
        alone.zero_grad()
        for step in range(4):
            if step < 2:
                model.zero_grad()
                alone.zero_grad()
            # afterwards gradients accumulate where the averages of the step before lie
            wrapped(batch(rank, step)).backward()
            wrapped.finish_gradient_synchronization()
            for r in range(world_size):
                (alone(batch(r, step)) / world_size).backward()
            assert model.unused.grad is None
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                if q.grad is not None:
                    torch.testing.assert_close(p.grad, q.grad)
                    everyone = [torch.empty(p.shape) for _ in range(world_size)]
                    dist.all_gather(everyone, p.grad.contiguous())
                    assert torch.equal(everyone[0], everyone[1])
        wrapped.detach()


def test_each_rank_averages_its_half(tmp_path: Path) -> None:
    run_ranks(exchange, 2, str(tmp_path))


def wrong_group(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="two CUDA ranks, but got 3 ranks"):
        PeerCopyAverage(dist.group.WORLD)


def test_needs_two_cuda_ranks() -> None:
    run_ranks(wrong_group, 3)
