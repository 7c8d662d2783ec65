"""Training with every wrapper equals single-process training on the concatenated batch."""

import itertools
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lite import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP
from ranks import run_case, run_ranks

STEPS = 6
# Sums over ranks and over a batch are rounded in different orders; the terms are the same.
TOLERANCE = {torch.float32: {"rtol": 2e-5, "atol": 2e-6}, torch.float64: {"rtol": 0, "atol": 1e-13}}


class Mixture(nn.Module):
    """Frozen, tied, unused, zero-size and unusually strided parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.frozen = nn.Linear(12, 12)
        self.frozen.requires_grad_(False)
        self.middle = nn.Linear(12, 12, bias=False)
        self.tied = nn.Linear(12, 12, bias=False)
        self.tied.weight = self.middle.weight
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.strided = nn.Parameter(torch.randn(5, 12).t())
        self.unused = nn.Parameter(torch.randn(7))
        self.scalar = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = self.tied(torch.relu(self.middle(self.frozen(x))))
        return self.scalar * x @ self.strided


WRAPPERS = {
    "naive": lambda m: NaiveDDP(m),
    "flat": lambda m: FlatDDP(m),
    "overlap": lambda m: OverlapDDP(m),
    "bucketed-0.0001": lambda m: BucketedDDP(m, 0.0001),
    "bucketed-0.0016": lambda m: BucketedDDP(m, 0.0016, last_bucket_size_mb=0.0001),
    "bucketed-0.01": lambda m: BucketedDDP(m, 0.01, rebucket=False),
    "bucketed-None": lambda m: BucketedDDP(m, None),
    "bucketed-copy": lambda m: BucketedDDP(m, 0.0008, copy=True),
    "bucketed-auto": lambda m: BucketedDDP(m, 0.0008, auto_finish=True),
    "bucketed-zeros": lambda m: BucketedDDP(m, 0.0008, copy=True, missing_gradients="zeros"),
}
CASES = list(itertools.product(WRAPPERS, (True, False)))
ALONE = [(name, True) for name in WRAPPERS]


class Momentum:
    """SGD with momentum and weight decay: a parameter with a zero gradient moves, one without
    a gradient does not. (torch.optim takes seconds to import in every rank.)"""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.velocity: dict[nn.Parameter, torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        for p in self.parameters:
            if p.grad is not None:
                v = self.velocity.setdefault(p, torch.zeros_like(p))
                v.mul_(0.9).add_(p.grad).add_(p, alpha=0.01)
                p.sub_(v, alpha=0.05)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.parameters:
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()


def data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(17)
    x = torch.randn(STEPS, 12, 8, generator=generator, dtype=dtype)
    y = torch.randn(STEPS, 12, 5, generator=generator, dtype=dtype)
    return x, y


def train_alone(dtype: torch.dtype, unused_is_zero: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Mixture().to(dtype)
    optimizer = Momentum(model.parameters())
    for x, y in zip(*data(dtype), strict=True):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if unused_is_zero:
            model.unused.grad = torch.zeros_like(model.unused)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def train_wrapped(rank: int, world_size: int, name: str, set_to_none: bool) -> None:
    dtype = torch.float32 if world_size == 2 else torch.float64
    expected = train_alone(dtype, unused_is_zero=name == "bucketed-zeros")
    torch.manual_seed(rank)  # differently seeded ranks: rank 0's weights must win
    model = Mixture().to(dtype)
    wrapped = WRAPPERS[name](model)
    assert wrapped.module is model
    optimizer = Momentum(wrapped.parameters())
    rows = 12 // world_size
    for x, y in zip(*data(dtype), strict=True):
        optimizer.zero_grad(set_to_none=set_to_none)
        mine = slice(rank * rows, (rank + 1) * rows)
        (wrapped(x[mine]) - y[mine]).square().mean().backward()
        wrapped.finish_gradient_synchronization()
        optimizer.step()
    for (key, actual), reference in zip(wrapped.named_parameters(), expected, strict=True):
        torch.testing.assert_close(
            actual.detach(),
            reference,
            **TOLERANCE[dtype],
            msg=lambda m, k=f"{name} {key}": f"{k}: {m}",
        )
    assert_equal_on_all_ranks(list(wrapped.parameters()))
    if name != "bucketed-zeros":
        assert model.unused.grad is None
    elif set_to_none:
        assert torch.equal(model.unused.grad, torch.zeros(7, dtype=dtype))


def assert_equal_on_all_ranks(tensors: list[torch.Tensor]) -> None:
    flat = torch.cat([t.detach().reshape(-1) for t in tensors])
    reference = flat.clone()
    dist.broadcast(reference, 0)
    assert torch.equal(flat, reference)


# BucketedDDP makes a contiguous gradient of a transposed parameter; the next accumulates onto it.
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout:UserWarning")
@pytest.mark.parametrize(("name", "set_to_none"), CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_equals_one_process(world_size: int, name: str, set_to_none: bool) -> None:
    run_case(train_wrapped, world_size, CASES, name, set_to_none)


@pytest.mark.parametrize("name", WRAPPERS)
def test_one_rank_changes_nothing(name: str) -> None:
    run_case(train_wrapped, 1, ALONE, name, True)


def hundred_steps(rank: int, world_size: int) -> None:
    """All variants and bucket sizes end in the same bits, on all ranks, as torch's wrapper."""
    results = {}
    variants = {**WRAPPERS, "torch": lambda m: DistributedDataParallel(m)}
    for name in ("torch", "naive", "flat", "bucketed-0.0001", "bucketed-0.01", "bucketed-copy"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2))
        wrapped = variants[name](model)
        optimizer = Momentum(model.parameters())
        generator = torch.Generator().manual_seed(rank)
        for _ in range(100):
            optimizer.zero_grad()
            wrapped(torch.randn(4, 8, generator=generator)).square().mean().backward()
            if name != "torch":
                wrapped.finish_gradient_synchronization()
            optimizer.step()
        results[name] = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        assert_equal_on_all_ranks([results[name]])
    for name, result in results.items():
        assert torch.equal(result, results["naive"]), name


def test_same_bits_after_100_steps_whatever_the_buckets() -> None:
    run_ranks(hundred_steps, 2, timeout=120)  # torch's wrapper takes long to import


def buffers(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean.fill_(rank + 1.0)
    wrapped = BucketedDDP(model, 1)
    assert torch.equal(model[1].running_mean, torch.full((4,), 1.0))
    for _ in range(2):  # a second forward before backward must not touch what the first saved
        loss = wrapped(torch.randn(8, 4)).square().sum() + wrapped(torch.randn(8, 4)).sum()
        loss.backward()
        wrapped.finish_gradient_synchronization()
    everyone = [torch.empty(4) for _ in range(world_size)]
    dist.all_gather(everyone, model[1].running_mean)
    assert not torch.equal(everyone[0], everyone[1])
    wrapped.sync_buffers()
    assert torch.equal(model[1].running_mean, everyone[0])
    assert model[1].num_batches_tracked.item() == 4


def test_buffers_start_equal_and_synchronise_on_request() -> None:
    run_ranks(buffers, 2)


def buffers_of_any_dtype(rank: int, world_size: int) -> None:
    model = nn.Linear(2, 2)
    names = ("int16", "uint16", "uint32", "bool", "complex64", "bfloat16", "float8_e4m3fn")
    for name in names:
        values = torch.full((3, 2), rank + 1.0).to(getattr(torch, name)).t()
        model.register_buffer(f"{name}_values", values)
        model.register_buffer(f"{name}_number", values[0, 0].clone())
    wrapped = NaiveDDP(model)
    for synchronise in (lambda: None, wrapped.sync_buffers):
        synchronise()
        for name, buffer in model.named_buffers():
            assert bool((buffer.to(torch.complex64) == 1).all()), name
            buffer.copy_(torch.full_like(buffer, rank + 1.0))


def test_buffers_of_dtypes_that_gloo_does_not_know() -> None:
    run_ranks(buffers_of_any_dtype, 2)


def under_a_default_device(rank: int, world_size: int, name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 2))
    inputs = torch.full((2, 8), rank + 1.0)
    with torch.device("meta"):  # a tensor that lands there has no values to send
        wrapped = WRAPPERS[name](model)
        wrapped.stats()
        for _ in range(3):
            wrapped(inputs).square().mean().backward()
    assert all(x.grad is not None and x.grad.device.type == "cpu" for x in model.parameters())


ELSEWHERE = ("naive", "flat", "overlap", "bucketed-auto", "bucketed-zeros")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_default_device_changes_nothing(name: str) -> None:
    """``torch.set_default_device("cuda")`` is common in training scripts."""
    run_case(under_a_default_device, 2, ELSEWHERE, name)
