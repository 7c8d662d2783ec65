"""Accumulation, checkpointing, mixed precision, dtypes, hooks, uneven inputs."""

import dataclasses
import itertools
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from hierarchical_average import HierarchicalAverage
from torch import nn
from torch.utils.checkpoint import checkpoint

from ddp_lite import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP
from ranks import run_case, run_ranks

ALL = (NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP)


def small_buckets(module: nn.Module, **kwargs: object) -> BucketedDDP:
    return BucketedDDP(module, 0.0002, **kwargs)


def copied(module: nn.Module, **kwargs: object) -> BucketedDDP:
    return BucketedDDP(module, 0.0002, copy=True, **kwargs)


EVERY = {wrapper.__name__: wrapper for wrapper in (*ALL, small_buckets, copied)}
EACH_FINISH = [(name, auto_finish) for name in EVERY for auto_finish in (False, True)]
CHECKPOINTS = list(itertools.product(EVERY, (False, True), (False, True)))
DTYPES = [name for name in EVERY if name != "small_buckets"]
COPIES = (False, True)
HOOKS = ("function", "two levels")
COMPILED = ("OverlapDDP", "small_buckets")
UNEVEN = list(itertools.product(EVERY, ("active", "world"), ("skip-if-all", "error")))


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def reference(world_size: int, steps: int = 1) -> list[torch.Tensor]:
    """Mean over ranks of the gradients summed over steps, on one process."""
    model = mlp()
    for step in range(steps):
        for rank in range(world_size):
            (model(batch(rank, step)).sum() / world_size).backward()
    return [p.grad for p in model.parameters()]


def assert_gradients(wrapped: nn.Module, expected: list[torch.Tensor], **tolerance: float) -> None:
    for p, g in zip(wrapped.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g, **(tolerance or {"rtol": 1e-5, "atol": 1e-6}))


def accumulation(rank: int, world_size: int, name: str, auto_finish: bool) -> None:
    wrapped = EVERY[name](mlp(), auto_finish=auto_finish)
    with wrapped.no_sync():
        wrapped(batch(rank, 0)).sum().backward()
    wrapped(batch(rank, 1)).sum().backward()
    wrapped.finish_gradient_synchronization()
    assert_gradients(wrapped, reference(world_size, 2))

    # two forwards, one backward
    wrapped.zero_grad()
    (wrapped(batch(rank, 0)).sum() + wrapped(batch(rank, 1)).sum()).backward()
    wrapped.finish_gradient_synchronization()
    assert_gradients(wrapped, reference(world_size, 2))

    # two forwards, two backwards, nothing in between; then once more on top
    for set_to_none in (True, False):
        wrapped.zero_grad(set_to_none=set_to_none)
        first, second = wrapped(batch(rank, 0)), wrapped(batch(rank, 1))
        first.sum().backward()
        second.sum().backward()
        wrapped.finish_gradient_synchronization()
        assert_gradients(wrapped, reference(world_size, 2))
    wrapped(batch(rank, 2)).sum().backward()
    wrapped.finish_gradient_synchronization()
    assert_gradients(wrapped, reference(world_size, 3))


@pytest.mark.parametrize(("name", "auto_finish"), EACH_FINISH)
def test_accumulation_and_several_backwards(name: str, auto_finish: bool) -> None:
    run_case(accumulation, 2, EACH_FINISH, name, auto_finish)


def returned_gradients(rank: int, world_size: int, name: str) -> None:
    """``torch.autograd.grad`` writes no ``grad``, so there is nothing to average."""
    warnings.filterwarnings("ignore", ".* averages gradients of backward", UserWarning)
    wrapped = EVERY[name](mlp(), missing_gradients="error")
    parameters = list(wrapped.parameters())
    collectives = wrapped._engine.average.collectives
    alone = mlp()
    for asked in ("inputs", "parameters", "one parameter", "outputs"):
        found = []
        for model in (wrapped, alone):
            x = batch(rank).requires_grad_()
            y = model(x)
            own = list(model.parameters())
            wanted = {"inputs": x, "parameters": own, "one parameter": own[-1], "outputs": y}[asked]
            found.append(torch.autograd.grad(y.square().sum(), wanted))
        torch.testing.assert_close(*found)
    x = batch(rank).requires_grad_()
    wrapped(x).sum().backward(inputs=[x])
    assert wrapped._engine.average.collectives == collectives
    assert all(p.grad is None for p in parameters)

    # A gradient penalty: the second backward is the one that ends the step.
    for model, ranks in ((wrapped, [rank]), (alone, range(world_size))):
        for r in ranks:
            x = batch(r).requires_grad_()
            y = model(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            ((y.square().sum() + slope.square().sum()) / len(ranks)).backward()
    assert_gradients(wrapped, [p.grad for p in alone.parameters()])
    wrapped.zero_grad()
    wrapped(batch(rank)).sum().backward(inputs=parameters)
    assert_gradients(wrapped, reference(world_size))

    # On one rank alone, and written into ``grad`` by hand.
    wrapped = EVERY[name](mlp())
    if rank == 0:
        torch.autograd.grad(wrapped(x).sum(), x)
    found = torch.autograd.grad(wrapped(batch(rank)).sum(), list(wrapped.parameters()))
    for p, gradient in zip(wrapped.parameters(), found, strict=True):
        p.grad = gradient
    wrapped.finish_gradient_synchronization()
    assert_gradients(wrapped, reference(world_size))


@pytest.mark.parametrize("name", EVERY)
def test_gradients_that_are_returned_are_no_synchronisation(name: str) -> None:
    run_case(returned_gradients, 2, EVERY, name)


def groups(rank: int, world_size: int, name: str) -> None:
    """Only some ranks train, and their group's ranks are not the world's."""
    some = dist.new_group([1, 2])
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    wrapper = EVERY[name]
    wrapped = wrapper(mlp(seed=rank), process_group=mesh)
    wrapped.load_state_dict(mlp().state_dict())
    wrapped(batch(rank)).sum().backward()
    wrapped.finish_gradient_synchronization()
    assert_gradients(wrapped, reference(world_size))
    if rank == 0:
        return
    wrapped = wrapper(mlp(seed=rank), process_group=some)  # takes rank 1's weights
    for own, first in zip(wrapped.parameters(), mlp(seed=1).parameters(), strict=True):
        assert torch.equal(own, first)
    wrapped.load_state_dict(mlp().state_dict())
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(batch(rank - 1)).sum().backward()
        wrapped.finish_gradient_synchronization()
        assert_gradients(wrapped, reference(2))


@pytest.mark.parametrize("name", EVERY)
def test_any_process_group_or_mesh(name: str) -> None:
    run_case(groups, 3, EVERY, name)


class Checkpointed(nn.Module):
    """One layer is used in two checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = mlp()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        front, twice, back = self.inner[:2], self.inner[2:4], self.inner[4]
        x = front(x)
        for _ in range(2):
            x = checkpoint(twice, x, use_reentrant=self.reentrant)
        return back(x)


def checkpointing(
    rank: int, world_size: int, name: str, reentrant: bool, auto_finish: bool
) -> None:
    model = mlp()
    for r in range(world_size):
        hidden = model[:2](batch(r))
        out = model[4](model[2:4](model[2:4](hidden)))
        (out.sum() / world_size).backward()
    expected = [p.grad for p in model.parameters()]
    wrapped = EVERY[name](Checkpointed(reentrant), auto_finish=auto_finish)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(batch(rank)).sum().backward()
        wrapped.finish_gradient_synchronization()
        assert_gradients(wrapped, expected)


@pytest.mark.parametrize(("name", "reentrant", "auto_finish"), CHECKPOINTS)
def test_both_kinds_of_activation_checkpointing(
    name: str, reentrant: bool, auto_finish: bool
) -> None:
    run_case(checkpointing, 2, CHECKPOINTS, name, reentrant, auto_finish)


def around(rank: int, world_size: int, name: str) -> None:
    """Checkpoints of the wrapper itself, whose forward runs again inside backward."""
    wrapped = EVERY[name](mlp(), missing_gradients="error")
    for first, second in itertools.product((False, True), repeat=2):
        wrapped.zero_grad()
        step = wrapped._engine.ranks.step
        x = batch(rank, 1).requires_grad_()
        y = checkpoint(wrapped, batch(rank).requires_grad_(), use_reentrant=first)
        (
            y + (checkpoint(wrapped, x, use_reentrant=False) if second else wrapped(x))
        ).sum().backward()
        assert_gradients(wrapped, reference(world_size, 2))
        assert first or wrapped._engine.ranks.step == step + 1


@pytest.mark.parametrize("name", EVERY)
def test_checkpoints_around_the_wrapper_make_one_synchronisation(name: str) -> None:
    run_case(around, 2, EVERY, name)


def second_order(rank: int, world_size: int, name: str) -> None:
    """``create_graph=True`` records what is done to gradients, and averages are no part of it."""
    wrapped = EVERY[name](mlp())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True", UserWarning)
        wrapped(batch(rank)).sum().backward(create_graph=True)
    assert_gradients(wrapped, [g.requires_grad_() for g in reference(world_size)])


@pytest.mark.parametrize("name", EVERY)
def test_backward_that_creates_a_graph(name: str) -> None:
    run_case(second_order, 2, EVERY, name)


@dataclasses.dataclass
class Output:
    value: torch.Tensor


class Described(Checkpointed):
    """Returns a data class of its own."""

    def forward(self, x: torch.Tensor) -> Output:
        return Output(super().forward(x))


def data_classes(rank: int, world_size: int, name: str) -> None:
    wrapped = EVERY[name](Described(reentrant=True), missing_gradients="error")
    expected = Checkpointed(reentrant=False)
    for r in range(world_size):
        (expected(batch(r)).sum() / world_size).backward()
    wrapped(batch(rank)).value.sum().backward()
    assert_gradients(wrapped, [p.grad for p in expected.parameters()])


@pytest.mark.parametrize("name", EVERY)
def test_reentrant_checkpoints_in_a_module_that_returns_a_data_class(name: str) -> None:
    run_case(data_classes, 2, EVERY, name)


class Mixed(nn.Module):
    """float32, float64, float16, bfloat16 and complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterDict(
            {
                "single": nn.Parameter(torch.ones(3)),
                "f16": nn.Parameter(torch.ones(4, dtype=torch.float16)),
                "f64": nn.Parameter(torch.ones(5, dtype=torch.float64)),
                "brain": nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)),
                "complex": nn.Parameter(torch.ones(3, dtype=torch.complex64)),
                "second": nn.Parameter(torch.ones(2)),
            }
        )

    def forward(self, scale: float) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for value in self.values.values():
            total = total + ((value.real if value.is_complex() else value) * scale).double().sum()
        return total


def dtypes(rank: int, world_size: int, name: str) -> None:
    wrapped = EVERY[name](Mixed())
    wrapped(float(rank + 1)).backward()
    wrapped.finish_gradient_synchronization()
    for key, p in wrapped.named_parameters():
        assert p.grad.dtype == p.dtype, key
        assert torch.equal(p.grad, torch.full_like(p, (world_size + 1) / 2)), key
    assert "float16" in wrapped.explain()


def gradients_of_another_dtype(rank: int, world_size: int, name: str) -> None:
    """float32 of bfloat16 parameters, whose first mean, 1 + 2⁻⁸, is no bfloat16 number."""
    values = [torch.ones(3, dtype=torch.bfloat16) for _ in range(3)]
    model = nn.ParameterList(values)
    model[0].grad_dtype = model[1].grad_dtype = torch.float32
    wrapped = EVERY[name](model)
    scales = [1 + 2**-7 * rank, float(rank), 1.0]
    used = [0, 2] if rank == 0 else [0, 1, 2]
    sum((model[i].float() * scales[i]).sum() for i in used).backward()
    wrapped.finish_gradient_synchronization()
    for p, mean in zip(wrapped.parameters(), [1 + 2**-8, 0.5, 1.0], strict=True):
        assert p.grad.dtype == p.grad_dtype
        assert torch.equal(p.grad, torch.full_like(p.grad, mean))


@pytest.mark.parametrize("name", EVERY)
def test_gradients_of_another_dtype_than_their_parameters(name: str) -> None:
    run_case(gradients_of_another_dtype, 2, EVERY, name)


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_are_kept_and_averaged_exactly(name: str) -> None:
    run_case(dtypes, 3, DTYPES, name)


def complex_flags(rank: int, world_size: int, name: str) -> None:
    waves = [torch.ones(2, dtype=torch.complex64), torch.ones(1, dtype=torch.complex64)]
    wrapped = EVERY[name](nn.ParameterList(waves))
    wrapped.module[0].grad = torch.full((2,), rank * 1j)
    wrapped.finish_gradient_synchronization()
    assert torch.equal(wrapped.module[0].grad, torch.full((2,), (world_size - 1) / 2 * 1j))
    assert wrapped.module[1].grad is None


@pytest.mark.parametrize("name", DTYPES)
def test_flags_of_missing_gradients_travel_with_complex_ones_too(name: str) -> None:
    run_case(complex_flags, 3, DTYPES, name)


def large_halves(rank: int, world_size: int) -> None:
    wrapped = NaiveDDP(nn.ParameterList([torch.ones(3, dtype=torch.float16)]))
    wrapped.module[0].grad = torch.full((3,), 30000.0, dtype=torch.float16)
    wrapped.finish_gradient_synchronization()
    expected = torch.full((3,), 30000.0, dtype=torch.float16)
    torch.testing.assert_close(wrapped.module[0].grad, expected, rtol=2**-10, atol=0)


def test_sums_of_large_float16_values_overflow_and_means_do_not() -> None:
    run_ranks(large_halves, 3)


def precision(rank: int, world_size: int, name: str) -> None:
    expected = reference(world_size)
    wrapper = EVERY[name]
    wrapped = wrapper(mlp())
    with torch.autocast("cpu", torch.bfloat16):
        loss = wrapped(batch(rank)).float().sum()
    loss.backward()
    wrapped.finish_gradient_synchronization()
    assert_gradients(wrapped, expected, rtol=0.1, atol=0.1)
    assert all(p.grad.dtype == torch.float32 for p in wrapped.parameters())

    wrapped.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(wrapped(batch(rank)).sum()).backward()
    wrapped.finish_gradient_synchronization()
    torch._foreach_mul_([p.grad for p in wrapped.parameters()], 1 / scaler.get_scale())
    assert_gradients(wrapped, expected)
    norm = nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
    alone = torch.stack([g.norm() for g in expected]).norm()
    torch.testing.assert_close(norm, alone)


@pytest.mark.parametrize("name", EVERY)
def test_autocast_scaler_and_clipping(name: str) -> None:
    run_case(precision, 2, EVERY, name)


def overflow(rank: int, world_size: int, name: str) -> None:
    """An infinite gradient on one rank makes every rank's scaler skip the step."""
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    wrapped = EVERY[name](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, finite in enumerate((False, True)):
        optimizer.zero_grad()
        factor = 1.0 if finite or rank != 1 else float("inf")
        scaler.scale(wrapped(batch(rank, step)).sum() * factor).backward()
        wrapped.finish_gradient_synchronization()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 512.0
        changed = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
        assert any(changed) is finite
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    from_rank_0 = weights.clone()
    dist.broadcast(from_rank_0, 0)
    assert torch.equal(weights, from_rank_0)


@pytest.mark.parametrize("name", EVERY)
def test_scalers_skip_together(name: str) -> None:
    run_case(overflow, 2, EVERY, name)


class Delayed(nn.Module):
    """Randomly slow backward, and gradients in a different order on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 1) for _ in range(6)])
        self.generator = torch.Generator().manual_seed(rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for index in torch.randperm(6, generator=self.generator).tolist():
            out = self.parts[index](x).sum()
            wait = float(torch.rand((), generator=self.generator)) * 0.004
            out.register_hook(lambda g, s=wait: time.sleep(s))
            total = total + out
        return total


def delays(rank: int, world_size: int, name: str) -> None:
    wrapped = EVERY[name](Delayed(rank))
    for step in range(4):
        wrapped.zero_grad()
        wrapped(batch(rank, step)).backward()
        wrapped.finish_gradient_synchronization()
        mean = sum(batch(r, step).sum(0) for r in range(world_size)) / world_size
        for part in wrapped.module.parts:
            torch.testing.assert_close(part.weight.grad[0], mean)


@pytest.mark.parametrize("name", EVERY)
def test_order_and_delays_do_not_matter(name: str) -> None:
    run_case(delays, 3, EVERY, name)


class Backwards(nn.Module):
    """Registered in the order opposite to the one in which it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


def rebucketing(rank: int, world_size: int) -> None:
    names = [f"layers.{i}.weight" for i in range(4)]
    wrapped = BucketedDDP(Backwards(), 0.0001)
    assert [bucket.names for bucket in wrapped.buckets] == [(n,) for n in reversed(names)]
    orders, early = [], []
    assert wrapped.stats() is None  # and from here on they are kept
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(batch(rank)).sum().backward()
        wrapped.finish_gradient_synchronization()
        stats = wrapped.stats()
        orders.append([group[0] for group in stats.group_parameters])
        early.append(stats.started_in_backward)
        assert stats.step == len(orders)
        assert stats.exposed_wait_ms >= 0
    assert orders == [names[::-1], names, names]
    assert early == [4, 4, 4]
    fixed = BucketedDDP(Backwards(), 0.0001, rebucket=False)
    fixed(batch(rank)).sum().backward()
    fixed.finish_gradient_synchronization()
    assert [bucket.names for bucket in fixed.buckets] == [(n,) for n in reversed(names)]


def test_buckets_follow_the_observed_order_after_one_step() -> None:
    run_ranks(rebucketing, 2)


def addresses(rank: int, world_size: int, copy: bool) -> None:
    """By default no gradient is copied; with ``copy`` each lies in its bucket's flat tensor."""
    model = mlp()
    produced: dict[nn.Parameter, int] = {}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: produced.update({p: p.grad.data_ptr()}))
    wrapped = BucketedDDP(model, 0.0002, rebucket=False, copy=copy)
    wrapped(batch(rank)).sum().backward()
    wrapped.finish_gradient_synchronization()
    assert_gradients(wrapped, reference(world_size))
    for bucket in wrapped.buckets:
        assert (bucket.flat is None) is not copy
        for p, span in zip(bucket.parameters, bucket.slices, strict=True):
            expected = bucket.flat[span].data_ptr() if copy else produced[p]
            assert p.grad.data_ptr() == expected
    buckets = wrapped.buckets
    wrapped.detach()
    assert all(bucket.flat is None for bucket in buckets)


@pytest.mark.parametrize("copy", COPIES)
def test_gradients_stay_where_autograd_put_them(copy: bool) -> None:
    run_case(addresses, 2, COPIES, copy)


def wire(rank: int, world_size: int) -> None:
    wrapped = BucketedDDP(mlp(), 0.0002, wire_dtype=torch.bfloat16)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(batch(rank)).sum().backward()
        wrapped.finish_gradient_synchronization()
    model = mlp()
    # each rank's gradient is rounded once, their float32 mean once more
    total = [torch.zeros_like(p) for p in model.parameters()]
    for r in range(world_size):
        model.zero_grad()
        model(batch(r)).sum().backward()
        for sum_, p in zip(total, model.parameters(), strict=True):
            sum_ += p.grad.bfloat16().float()
    for p, sum_ in zip(wrapped.parameters(), total, strict=True):
        expected = (sum_ / world_size).bfloat16().float()
        torch.testing.assert_close(p.grad, expected, rtol=2**-8, atol=0)
        assert p.grad.dtype == torch.float32
    gradients = torch.cat([p.grad.flatten() for p in wrapped.parameters()])
    from_rank_0 = gradients.clone()
    dist.broadcast(from_rank_0, 0)
    assert torch.equal(gradients, from_rank_0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_wire_dtype_rounds_only_twice(world_size: int) -> None:
    run_ranks(wire, world_size)


def hooks(rank: int, world_size: int, kind: str) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    seen = []

    def plain(flat: torch.Tensor, bucket) -> object:
        seen.append(bucket.index)
        assert bucket.flat is flat
        assert flat.numel() == bucket.padded_numel
        assert flat.numel() % world_size == 0
        assert not flat[bucket.numel :].any()
        for p, span in zip(bucket.parameters, bucket.slices, strict=True):
            assert p.numel() == span.stop - span.start
        flat.div_(world_size)
        return dist.all_reduce(flat, async_op=True)

    hook = plain if kind == "function" else HierarchicalAverage(mesh)
    wrapped = BucketedDDP(mlp(), 0.0002, comm_hook=hook)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(batch(rank)).sum().backward()
        wrapped.finish_gradient_synchronization()
        assert_gradients(wrapped, reference(world_size))
    assert wrapped.buckets[0].flat is not None
    wrapped.buckets[0].release()
    assert wrapped.buckets[0].flat is None
    assert "comm hook" in wrapped.explain()
    if kind == "function":
        assert seen == [*range(len(wrapped.buckets))] * 2


@pytest.mark.parametrize("kind", HOOKS)
def test_comm_hooks(kind: str) -> None:
    run_case(hooks, 4, HOOKS, kind)


def convergence(rank: int, world_size: int) -> dict[str, float]:
    """Final loss of a regression with each way of sending gradients."""
    teacher = nn.Linear(32, 16, bias=False).requires_grad_(False)
    teacher.weight.copy_(torch.randn(16, 32, generator=torch.Generator().manual_seed(5)) / 6)
    losses = {}
    for name, kwargs in {
        "exact": {},
        "wire": {"wire_dtype": torch.bfloat16},
    }.items():
        torch.manual_seed(1)
        student = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
        wrapped = BucketedDDP(student, 1, **kwargs)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(250):
            x = torch.randn(16, 32, generator=generator)
            wrapped.zero_grad()
            loss = (wrapped(x) - teacher(x)).square().mean()
            loss.backward()
            wrapped.finish_gradient_synchronization()
            with torch.no_grad():
                torch._foreach_add_(
                    list(student.parameters()), [p.grad for p in student.parameters()], alpha=-0.5
                )
        losses[name] = loss.item()
    return losses


def test_compressed_training_converges() -> None:
    for outcome in run_ranks(convergence, 2):
        exact = outcome.value["exact"]
        assert exact < 0.02
        assert outcome.value["wire"] < 1.2 * exact + 1e-3


def uneven(rank: int, world_size: int, name: str, average_over: str, policy: str) -> None:
    wrapped = EVERY[name](mlp(), missing_gradients=policy)
    steps = []

    def update() -> None:
        steps.append(1)
        with torch.no_grad():
            for p in wrapped.parameters():
                p -= 0.1 * p.grad
                p.grad = None

    with wrapped.join(update, average_over=average_over):
        for step in range(1 + 2 * rank):  # 1, 3, 5 batches
            wrapped(batch(rank, step)).sum().backward()
            wrapped.finish_gradient_synchronization()
            update()
            if rank == 2:
                wrapped(batch(rank))  # no step, because no backward follows
    assert len(steps) == 5
    model = mlp()
    for step in range(5):
        active = [r for r in range(world_size) if step < 1 + 2 * r]
        share = len(active) if average_over == "active" else world_size
        for r in active:
            (model(batch(r, step)).sum() / share).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    for p, q in zip(wrapped.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    wrapped(batch(rank)).sum().backward()  # ordinary steps go on afterwards
    wrapped.finish_gradient_synchronization()


@pytest.mark.parametrize(("name", "average_over", "policy"), UNEVEN)
def test_uneven_numbers_of_batches(name: str, average_over: str, policy: str) -> None:
    run_case(uneven, 3, UNEVEN, name, average_over, policy)


def compiled(rank: int, world_size: int, name: str) -> None:
    wrapped = EVERY[name](torch.compile(mlp(), backend="aot_eager"))
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(batch(rank)).sum().backward()
        wrapped.finish_gradient_synchronization()
        assert_gradients(wrapped, reference(world_size))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_inner_module(name: str) -> None:
    run_case(compiled, 2, COMPILED, name)
