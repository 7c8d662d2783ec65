"""``examples/power_sgd.py``: a comm hook that a user would write."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from power_sgd import PowerSGD, train
from torch import nn

from ddp_lite import BucketedDDP
from ranks import run_ranks


def exact(rank: int, world_size: int) -> None:
    """As many columns as the matrices have: nothing is lost."""
    torch.manual_seed(0)
    model, alone = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2))
    wrapped = BucketedDDP(model, 0.0002, comm_hook=PowerSGD(rank=8))
    alone.load_state_dict(model.state_dict())
    inputs = torch.randn(world_size, 3, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(inputs[rank]).sum().backward()
    (alone(inputs.flatten(0, 1)).sum() / world_size).backward()
    for p, q in zip(wrapped.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


def test_with_enough_columns_the_average_is_exact() -> None:
    run_ranks(exact, 4)


def converges(rank: int, world_size: int) -> tuple[float, float]:
    return train(None), train(PowerSGD(rank=1))


def test_compressed_training_converges() -> None:
    for outcome in run_ranks(converges, 2):
        without, compressed = outcome.value
        assert without < 0.02
        assert compressed < 0.1  # the untrained loss is about 1


def freed(rank: int, world_size: int) -> None:
    gc.disable()
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    wrapped = BucketedDDP(model, comm_hook=PowerSGD(rank=1))
    wrapped(torch.ones(2, 4)).sum().backward()
    alive = weakref.ref(wrapped)
    del wrapped
    assert alive() is None
    assert not model[0].weight._post_accumulate_grad_hooks


def test_a_dropped_wrapper_is_freed_with_its_hook() -> None:
    run_ranks(freed, 1)


def differ(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="rank must be an integer of at least 1, but got 0"):
        PowerSGD(rank=0)
    with pytest.raises(RuntimeError, match="PowerSGD rank 1, seed 0; rank 1: comm_hook Power"):
        BucketedDDP(nn.Linear(2, 2), comm_hook=PowerSGD(rank=1 + dist.get_rank()))


def test_ranks_compare_its_settings() -> None:
    run_ranks(differ, 2)
