"""Injected faults: every surviving rank ends with an error that names what happened, in time."""

import os
import signal
import time

import pytest
import torch
from torch import nn

from ddp_lite import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP, PeerFailureError
from ranks import run_ranks

WRAPPERS = {"naive": NaiveDDP, "flat": FlatDDP, "overlap": OverlapDDP, "bucketed": BucketedDDP}
COLLECTIVE_TIMEOUT = 3.0  # what the process group is given
# the hung collective, the roll call of 2 s, and a slow machine
BOUND = COLLECTIVE_TIMEOUT + 2.0 + 6.0


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
            os.kill(wrapped._roll_call._peers[victim].pid, signal.SIGKILL)
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "finished", time.monotonic() - begin


@pytest.mark.parametrize(
    ("name", "fault", "world_size"),
    [
        ("bucketed", "kill", 2),
        ("overlap", "kill", 3),
        ("naive", "kill", 2),
        ("flat", "raise", 2),
        ("bucketed", "raise", 3),
        ("bucketed", "stop", 2),
        ("bucketed", "skip", 2),
    ],
)
def test_survivors_name_the_lost_rank(
    name: str, fault: str, world_size: int, record_property
) -> None:
    victim = world_size - 1
    outcomes = run_ranks(
        step_with_fault,
        world_size,
        name,
        fault,
        victim,
        timeout=40,
        collective_timeout=COLLECTIVE_TIMEOUT,
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
        record_property(f"seconds to error on rank {outcome.rank}", round(seconds, 2))
    if fault == "raise":
        assert "injected into backward" in outcomes[victim].error


def construct_or_leave(rank: int, world_size: int) -> str:
    if rank == 1:
        return "left"
    with pytest.raises(PeerFailureError, match=r"construct its wrapper.*on rank 0 of 2") as caught:
        BucketedDDP(nn.Linear(2, 2))
    return str(caught.value)


def test_a_rank_that_never_wraps_is_noticed() -> None:
    outcomes = run_ranks(construct_or_leave, 2, collective_timeout=COLLECTIVE_TIMEOUT)
    assert outcomes[0].seconds < BOUND
