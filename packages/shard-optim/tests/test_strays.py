"""Stages 1 and 2: one rank strays, and no rank is aborted, hangs, or trains on without an error.

Buckets have different sizes, so that gloo would end a process that receives another one's message.
"""

import re

import pytest
import torch
from torch import nn

from ranks import run_ranks, set_collective_timeout
from shard_optim import ShardedOptimizer, full_state, load_full_state, save

STEPS, FAULTY_STEP, TIMEOUT_S, BOUND_S = 5, 2, 4, 60


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 4)
    )


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def backward_once_more(model, optimizer):
    optimizer.zero_grad()
    for step in (0, 1):
        model(batch(step, 0)).square().mean().backward()


def another_rate(_model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.1


def another_tensor(_model, optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)


# What one rank does before a step, and what every rank's error says.
FAULTS = {
    "runs backward once more": (backward_once_more, "about to run the reduce-scatter of gradients"),
    "clips": (lambda _, o: o.clip_grad_norm_(1.0), "about to run the all-reduce of the gradient"),
    "collects whole state": (lambda m, o: full_state(m, o), "about to run the exchange of"),
    "loads whole state": (lambda m, o: load_full_state({}, m, o), "exchange of what is loaded"),
    "loads its state": (lambda _, o: o.load_state_dict(o.state_dict()), "of what the ranks load"),
    "takes another learning rate": (another_rate, r"a step after 1 reductions, with .*lr=0\.1"),
    "takes a tensor as learning rate": (another_tensor, r"with .*lr=0\.25"),
    "saves": (lambda m, o: save("/nonexistent/nowhere", m, o), "about to run saving a checkpoint"),
}


def train(rank, world_size, fault, overlap, late=False, reduce_gradients=True):
    model = network()
    optimizer = ShardedOptimizer(
        model.named_parameters(),
        torch.optim.AdamW,
        lr=0.05,
        reduce_gradients=reduce_gradients,
        bucket_size_mb=0.002,
        overlap=overlap,
    )
    if overlap:
        optimizer.attach(model)
    if late:  # as over NCCL, where nothing is compared before a collective
        optimizer.ranks.has_own_connections = False
    for step in range(STEPS):
        if step == FAULTY_STEP:
            set_collective_timeout(TIMEOUT_S)
            if rank == world_size - 1:
                FAULTS[fault][0](model, optimizer)
        optimizer.zero_grad()
        model(batch(step, rank if reduce_gradients else 0)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_strays(fault: str) -> None:
    overlap = "next-forward" if fault == "clips" else None
    for outcome in run_ranks(train, 2, fault, overlap, check=False, timeout=BOUND_S):
        assert not outcome.killed, f"{outcome.rank} hung"
        assert not outcome.died, f"{outcome.rank} was ended by signal {outcome.exitcode}"
        assert outcome.error is not None, f"{outcome.rank} trained on"
        assert re.search(FAULTS[fault][1], outcome.error), outcome.error


def drop_alone(rank, world_size):
    """One rank drops a batch, and the others add the next one to it."""
    model = network()
    optimizer = ShardedOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.05, reduce_gradients=True, bucket_size_mb=0.002
    )
    for number in range(2):
        if rank:
            optimizer.zero_grad()
        model(batch(number, rank)).square().mean().backward()
    optimizer.step()


def test_a_rank_that_drops_a_batch_alone() -> None:
    for outcome in run_ranks(drop_alone, 2, check=False, timeout=BOUND_S):
        assert outcome.error is not None, f"{outcome.rank} trained on"
        assert re.search("StepMismatchError.*a step after 2 reductions", outcome.error)


@pytest.mark.parametrize("reduce_gradients", [False, True])
def test_another_learning_rate_where_nothing_is_compared_before_a_collective(reduce_gradients):
    """Named by the numbers that the ranks average in every step; equal ranks are left alone."""
    fault = "takes another learning rate"
    for outcome in run_ranks(train, 2, fault, None, True, reduce_gradients, check=False):
        assert outcome.error is not None, f"{outcome.rank} trained on"
        for rate in (r"0\.05", r"0\.1"):
            words = rf"StepMismatchError.* has made a step after \d reductions, with .*lr={rate}"
            assert re.search(words, outcome.error), outcome.error
        assert "differ in step 2" in outcome.error
