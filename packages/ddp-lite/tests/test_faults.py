"""Injected faults: every surviving rank ends with an error that names what happened, in time.

``fault_suite.py`` injects many more; these tests look at the words of the errors.
"""

import os
import re
import signal
import time

import pytest
import torch
from torch import nn

from ddp_lite import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP, PeerFailureError
from ranks import run_ranks, set_collective_timeout

WRAPPERS = {"naive": NaiveDDP, "flat": FlatDDP, "overlap": OverlapDDP, "bucketed": BucketedDDP}
# What the process group is given once all ranks have connected: connecting takes longer than this
# on a machine whose cores are busy.
COLLECTIVE_TIMEOUT = 3.0
# The hung collective, the peer probe of 2 s, and a busy machine: nothing waits for the minute that
# the process group began with.
BOUND = COLLECTIVE_TIMEOUT + 2.0 + 40.0


class Fails(torch.autograd.Function):
    """Identity whose backward does something terrible."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, fault: str) -> torch.Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if ctx.fault == "raise":
            raise ArithmeticError("injected into backward")
        return grad, None


def step_with_fault(rank: int, world_size: int, name: str, fault: str, victim: int) -> tuple:
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    wrapped = WRAPPERS[name](model)

    def step(broken: str) -> None:
        hidden = wrapped.module[0](torch.ones(2, 4))
        wrapped.module[2](wrapped.module[1](Fails.apply(hidden, broken))).sum().backward()
        wrapped.finish_gradient_synchronization()

    step("")
    set_collective_timeout(COLLECTIVE_TIMEOUT)
    if fault == "skip" and rank == victim:
        time.sleep(COLLECTIVE_TIMEOUT + 4)  # busy with something else: no step at all
        return "skipped", 0.0
    begin = time.monotonic()
    try:
        step(fault if rank == victim else "")
    except ArithmeticError:
        raise
    except RuntimeError as error:
        if fault == "stop":  # nothing else ends a stopped process
            os.kill(wrapped._ranks._pids[victim], signal.SIGKILL)
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "finished", time.monotonic() - begin


@pytest.mark.parametrize(
    ("name", "fault", "world_size"),
    [
        ("bucketed", "kill", 2),
        ("overlap", "kill", 3),
        ("bucketed", "kill", 4),
        ("naive", "kill", 2),
        ("flat", "kill", 2),
        ("flat", "raise", 2),
        ("bucketed", "raise", 3),
        ("bucketed", "stop", 2),
        ("overlap", "stop", 2),
        ("bucketed", "skip", 2),
    ],
)
def test_survivors_name_the_lost_rank(name: str, fault: str, world_size: int) -> None:
    victim = world_size - 1
    outcomes = run_ranks(
        step_with_fault,
        world_size,
        name,
        fault,
        victim,
        check=False,
    )
    words = {"kill": "has exited", "raise": "", "stop": "is stopped", "skip": "did not answer"}
    for outcome in outcomes[:victim]:
        assert outcome.error is None, outcome.error
        message, seconds = outcome.value
        assert message.startswith("PeerFailureError: every rank must take part"), message
        assert f"rank {victim}" in message
        assert words[fault] in message
        assert f"on rank {outcome.rank} in step 2" in message
        assert seconds < BOUND, message
    if fault == "raise":
        assert "injected into backward" in outcomes[victim].error


def thaw_alone(rank: int, world_size: int, before: bool) -> tuple[str, float]:
    """Rank 1 alone changes ``requires_grad`` between steps."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[1].requires_grad_(before)
    wrapped = BucketedDDP(model, 0.00005)

    def step() -> None:
        wrapped(torch.ones(2, 4)).sum().backward()
        wrapped.finish_gradient_synchronization()

    step()
    set_collective_timeout(COLLECTIVE_TIMEOUT)
    if rank == 1:
        model[1].requires_grad_(not before)
    begin = time.monotonic()
    try:
        step()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "finished", time.monotonic() - begin


@pytest.mark.parametrize("before", [True, False], ids=["freeze", "thaw"])
def test_requires_grad_changed_on_one_rank_is_named_on_all(before: bool) -> None:
    outcomes = run_ranks(thaw_alone, 3, before)
    for outcome in outcomes:
        message, seconds = outcome.value
        assert "1.weight, 1.bias" in message, message
        if outcome.rank == 1:
            assert message.startswith("ModelMismatchError")
            assert "changed on rank 1 before step 2 and not on ranks 0, 2" in message
        else:
            assert message.startswith("PeerFailureError"), message
            assert "rank 1 says: requires_grad of" in message, message
        assert seconds < BOUND, message


def construct_or_leave(rank: int, world_size: int) -> tuple[str, float]:
    if rank == 1:
        return "left", 0.0
    set_collective_timeout(COLLECTIVE_TIMEOUT)
    begin = time.monotonic()
    with pytest.raises(
        PeerFailureError, match=r"construct its BucketedDDP.*on rank 0 of 2"
    ) as caught:
        BucketedDDP(nn.Linear(2, 2))
    return f"{caught.typename}: {caught.value}", time.monotonic() - begin


def test_a_rank_that_never_wraps_is_noticed() -> None:
    outcomes = run_ranks(construct_or_leave, 2)
    assert outcomes[0].value[1] < BOUND


def differ(rank: int, world_size: int, name: str, what: str) -> tuple[str, float]:
    """A model of another shape, a parameter without gradient, a forgotten finish."""
    odd = rank == world_size - 1
    kwargs = {"missing_gradients": "error"} if what == "parameter" else {}
    begin = time.monotonic()
    try:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if odd and what == "shape" else 6))
        wrapped = WRAPPERS[name](model, auto_finish=what != "finish", **kwargs)
        if what == "parameter" and odd:
            model[0](torch.ones(2, 4)).sum().backward()
        else:
            wrapped(torch.ones(2, 4)).sum().backward()
        if what == "finish":
            wrapped(torch.ones(2, 4))
        wrapped.finish_gradient_synchronization()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "finished", time.monotonic() - begin


@pytest.mark.parametrize("name", list(WRAPPERS))
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("shape", "ModelMismatchError.*1.weight.*rank 2"),
        ("parameter", "MissingGradientError.*1.weight on rank 2"),
        ("finish", "UnfinishedSynchronizationError.*after step 0"),
    ],
)
def test_what_ranks_do_differently_is_named_on_all(name: str, what: str, words: str) -> None:
    outcomes = run_ranks(differ, 3, name, what)
    for outcome in outcomes:
        message, seconds = outcome.value
        assert re.search(words, message, re.S), message
        assert seconds < BOUND
