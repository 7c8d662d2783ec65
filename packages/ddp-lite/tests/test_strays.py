"""A rank that strays: whatever it does to its module, its collectives or its loop after wrapping.

gloo ends a process by SIGABRT that receives a message of another size than it expects. So every
test here lets messages of different sizes meet, if they can: buckets of a few parameters, whose
sizes differ. No rank may be aborted, and none may hang or train on.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ddp_lite import (
    BucketedDDP,
    FlatDDP,
    ModelMismatchError,
    NaiveDDP,
    OverlapDDP,
    StepMismatchError,
    SynchronizationError,
)
from ranks import run_case, run_ranks, set_collective_timeout

WRAPPERS = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlap": OverlapDDP,
    "bucketed": lambda m, **kwargs: BucketedDDP(m, 0.002, last_bucket_size_mb=0.002, **kwargs),
    "wire": lambda m, **kwargs: BucketedDDP(m, 0.002, wire_dtype=torch.bfloat16, **kwargs),
}
ALL = tuple(WRAPPERS)
STEPS, FAULTY_STEP = 4, 2
TIMEOUT_S = 2.0


class Net(nn.Module):
    """Layers of different sizes, a buffer, and a layer that may be used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice, self.last = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.register_buffer("steps", torch.zeros(5))

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.twice(x))
        if twice:  # a backward of its own, in which the gradients arrive a second time
            x = checkpoint(self.twice, x, use_reentrant=True)
        return self.last(x)


Stray = Callable[[nn.Module], object]


def usual(wrapped: nn.Module) -> None:
    """A step of training."""
    wrapped.zero_grad()
    dtype = next(wrapped.parameters()).dtype
    wrapped(torch.ones(4, 16, dtype=dtype)).square().mean().backward()
    wrapped.finish_gradient_synchronization()
    update(wrapped)


def update(wrapped: nn.Module) -> None:
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.sub_(0.1 * parameter.grad)


def shrink(wrapped: nn.Module) -> None:
    """Pruning in place: the same memory, fewer elements."""
    for parameter in (wrapped.last.weight, wrapped.last.bias):
        parameter.data = parameter.data[:2]
    usual(wrapped)


def cast(dtype: torch.dtype) -> Stray:
    return lambda wrapped: (wrapped.module.to(dtype), usual(wrapped))


def metric(wrapped: nn.Module) -> None:
    dist.all_reduce(torch.ones(1))
    usual(wrapped)


def metric_in_backward(wrapped: nn.Module) -> None:
    x = wrapped(torch.ones(4, 16))
    x.register_hook(lambda _: dist.all_reduce(torch.ones(3)))
    x.square().mean().backward()


def buffers(wrapped: nn.Module) -> None:
    wrapped.sync_buffers()
    usual(wrapped)


def joins(wrapped: nn.Module) -> None:
    with wrapped.join(lambda: None):
        usual(wrapped)


def two_backwards(wrapped: nn.Module) -> None:
    for _ in range(2):
        wrapped(torch.ones(4, 16)).square().mean().backward()
    update(wrapped)


def twice(wrapped: nn.Module) -> None:
    x = torch.ones(4, 16, requires_grad=True)
    wrapped(x, twice=True).square().mean().backward()


STRAYS: dict[str, Stray] = {
    "casts the module to float64": cast(torch.float64),
    "casts the module to bfloat16": cast(torch.bfloat16),
    "shrinks a parameter in place": shrink,
    "averages a metric of its own": metric,
    "averages a metric in backward": metric_in_backward,
    "sends its buffers": buffers,
    "joins": joins,
    "runs two backwards": two_backwards,
    "uses a layer twice": twice,
}


def stray(rank: int, world_size: int, name: str, what: str) -> str:
    wrapped = WRAPPERS[name](Net())
    usual(wrapped)
    set_collective_timeout(TIMEOUT_S)
    try:
        for step in range(1, STEPS):
            action = STRAYS[what] if rank == world_size - 1 and step == FAULTY_STEP else usual
            action(wrapped)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "finished"


def cases() -> Iterator[Any]:
    for what in STRAYS:
        yield pytest.param("bucketed", what)
        # Over a wire, by default, a cast, and a collective beside those that the wire changes.
        shown = what in ("casts the module to bfloat16", "averages a metric in backward")
        yield pytest.param("wire", what, marks=() if shown else pytest.mark.nightly)


@pytest.mark.parametrize(("name", "what"), list(cases()))
def test_no_rank_is_aborted_and_every_rank_gets_a_named_error(name: str, what: str) -> None:
    begin = time.monotonic()
    innocent, strayed = run_ranks(stray, 2, name, what, check=False)
    assert innocent.ok, innocent
    assert strayed.ok, strayed
    kinds = [each.value.partition(":")[0] for each in (innocent, strayed)]
    assert kinds[0] in ("PeerFailureError", "StepMismatchError"), innocent.value
    named = ("PeerFailureError", "StepMismatchError", "ModelMismatchError")
    # What the program itself calls on the group ends with torch's own error.
    own = ("RuntimeError", "DistBackendError") if "metric" in what else ()
    assert kinds[1] in named + own, strayed.value
    if "casts" in what or "shrinks" in what:
        assert kinds[1] == "ModelMismatchError"
        assert "when BucketedDDP wrapped the module" in innocent.value, "it hears the reason"
    if what == "sends its buffers":
        assert "the broadcast of buffers failed here" in innocent.value, innocent.value
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("name", ["naive", "flat", "overlap"])
def test_the_other_wrappers_hold_back_a_cast_module(name: str) -> None:
    outcomes = run_ranks(stray, 2, name, "casts the module to float64", check=False)
    kinds = [each.value and each.value.partition(":")[0] for each in outcomes]
    assert kinds == ["PeerFailureError", "ModelMismatchError"], outcomes


def all_cast(rank: int, world_size: int) -> None:
    wrapped = BucketedDDP(Net())
    wrapped.module.double()
    with pytest.raises(ModelMismatchError, match=r"last\.bias has 4 elements of torch\.float64"):
        usual(wrapped)


def test_a_module_that_all_ranks_cast_must_be_wrapped_again() -> None:
    run_ranks(all_cast, 2)


# -- weights that differ, on purpose or not ------------------------------------------------------


def late_and_different(rank: int, world_size: int) -> str:
    """Rank 0 gets a late gradient in the last bucket, and the ranks' weights differ."""
    wrapped = BucketedDDP(Net(), 0.002, last_bucket_size_mb=0.002, auto_finish=False)
    usual(wrapped)
    wrapped.zero_grad()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.add_(rank)
    wrapped(torch.ones(4, 16)).square().mean().backward()
    if rank == 0:
        late = wrapped.buckets[-1].parameters[0]
        (late.sum() * 2).backward()
    with pytest.raises(StepMismatchError) as raised:
        wrapped.finish_gradient_synchronization()
    return str(raised.value)


def test_a_difference_is_found_before_a_late_bucket_is_sent_again() -> None:
    begin = time.monotonic()
    for outcome in run_ranks(late_and_different, 2):
        assert "it is making synchronisation 2" in outcome.value
    assert time.monotonic() - begin < 30, "nobody waited for the group's timeout of a minute"


def climb(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Moves weights along their gradients, as sharpness-aware minimisation does."""
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    moves = [p.grad * (0.05 / norm) for p in parameters]
    for parameter, move in zip(parameters, moves, strict=True):
        parameter.data.add_(move)
    return moves


def descend(parameters: list[nn.Parameter], moves: list[torch.Tensor]) -> None:
    for parameter, move in zip(parameters, moves, strict=True):
        parameter.data.sub_(move)


def sam_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(8, 16, generator=generator)).square().mean()


def sharpness_aware(rank: int, world_size: int, name: str) -> None:
    """Each rank climbs by its own gradient; gradients at the different weights are averaged."""
    alone, model = Net(), Net()
    wrapped = WRAPPERS[name](model)
    mine, expected = list(model.parameters()), list(alone.parameters())
    for step in range(3):
        wrapped.zero_grad()
        with wrapped.no_sync():
            sam_loss(wrapped, step, rank).backward()
        moves = climb(mine)
        wrapped.zero_grad()
        with wrapped.different_weights():
            sam_loss(wrapped, step, rank).backward()
        descend(mine, moves)
        averages = [torch.zeros_like(p) for p in expected]
        for each in range(world_size):
            alone.zero_grad()
            sam_loss(alone, step, each).backward()
            moves = climb(expected)
            alone.zero_grad()
            sam_loss(alone, step, each).backward()
            descend(expected, moves)
            torch._foreach_add_(averages, [p.grad for p in expected], alpha=1 / world_size)
        for p, q, average in zip(mine, expected, averages, strict=True):
            torch.testing.assert_close(p.grad, average, rtol=1e-4, atol=1e-6)
            p.data.sub_(0.1 * p.grad)
            q.data.sub_(0.1 * average)
            p.data.copy_(q.data)  # the reference's rounding, so that errors do not add up


@pytest.mark.parametrize("name", ["naive", "flat", "overlap", "bucketed"])
def test_gradients_at_different_weights_are_averaged_when_it_is_said(name: str) -> None:
    run_ranks(sharpness_aware, 2, name)


def unsaid(rank: int, world_size: int, by: int) -> None:
    """Weights differ, and so many ranks say that they do so on purpose."""
    wrapped = NaiveDDP(Net())
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.add_(rank)
    said = wrapped.different_weights() if rank < by else contextlib.nullcontext()
    with said, pytest.raises(StepMismatchError, match=r"`with wrapped\.different_weights\(\):`"):
        usual(wrapped)


@pytest.mark.parametrize("by", [0, 1])
def test_different_weights_are_an_error_that_names_the_way(by: int) -> None:
    run_ranks(unsaid, 2, by)


# -- functional calls, layouts, child processes --------------------------------------------------


def maml(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss after one inner step, differentiable through that step."""
    slow = dict(model.named_parameters())
    inner = functional_call(model, slow, (x,)).square().mean()
    gradients = torch.autograd.grad(inner, list(slow.values()), create_graph=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(slow.items(), gradients, strict=True)}
    return functional_call(model, fast, (x + 1,)).square().mean()


def functional(rank: int, world_size: int, name: str) -> None:
    wrapped = WRAPPERS[name](Net())
    alone = Net()
    inputs = torch.randn(world_size, 3, 16, generator=torch.Generator().manual_seed(1))
    maml(wrapped.module, inputs[rank]).backward()
    (sum(maml(alone, x) for x in inputs) / world_size).backward()
    for p, q in zip(wrapped.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    with pytest.raises(
        ModelMismatchError, match=r"functional_call must be given the plain module, wrapped\.module"
    ):
        maml(wrapped, inputs[rank])
    smaller = {"last.weight": torch.zeros(2, 32), "last.bias": torch.zeros(2)}
    with pytest.raises(ModelMismatchError, match=r"given the plain module, wrapped\.module"):
        functional_call(WRAPPERS[name](Net()), smaller, (inputs[rank],))


@pytest.mark.parametrize("name", ["naive", "flat", "overlap", "bucketed"])
def test_functional_calls_go_to_the_module(name: str) -> None:
    run_ranks(functional, 2, name)


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))


def layout_of(rank: int) -> torch.memory_format:
    return torch.channels_last if rank else torch.contiguous_format


def different_layouts(rank: int, world_size: int) -> None:
    with pytest.raises(
        ModelMismatchError, match=r"rank 1: 0\.weight parameter .* strides \(36, 1, 12, 4\), req"
    ):
        BucketedDDP(convolutions().to(memory_format=layout_of(rank)))


def test_layouts_in_memory_are_compared() -> None:
    run_ranks(different_layouts, 2)


def layouts(rank: int, world_size: int, name: str) -> None:
    inputs = torch.randn(2, 2, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    alone = convolutions()
    alone(inputs.flatten(0, 1)).square().mean().backward()
    wrapped = WRAPPERS[name](convolutions())
    wrapped.module.to(memory_format=layout_of(rank))
    wrapped(inputs[rank]).square().mean().backward()
    for p, q in zip(wrapped.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("name", ALL)
def test_layouts_in_memory_do_no_harm_after_wrapping(name: str) -> None:
    run_case(layouts, 2, ALL, name)


def own_average(flat: torch.Tensor, bucket: object) -> dist.Work:
    return dist.all_reduce(flat, dist.ReduceOp.AVG, async_op=True)


def forked(rank: int, world_size: int, name: str) -> None:
    wrapped = BucketedDDP(Net(), comm_hook=own_average) if name == "hook" else WRAPPERS[name](Net())
    usual(wrapped)
    child = os.fork()
    if child == 0:
        with torch.no_grad():
            wrapped(torch.ones(1, 16))  # evaluation is no collective
        try:
            usual(wrapped)
        except SynchronizationError as error:
            os._exit(0 if "which was forked from it" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    usual(wrapped)  # the ranks themselves train on


@pytest.mark.parametrize("name", ["naive", "bucketed", "hook"])
def test_backward_in_a_forked_child_is_an_error(name: str) -> None:
    run_ranks(forked, 2, name)
