"""What users get wrong: said on every rank, at the first step at the latest. One test a mistake."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ranks import run_ranks
from shard_optim import FullyShardedDataParallel, ShardedOptimizer
from whole_state import load_whole_optimizer


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    return model(torch.full((2, 4), rank + 1.0)).square().sum()


def sharded(model: nn.Module, **kwargs: object) -> ShardedOptimizer:
    return ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1, **kwargs)


def check_conversion(rank: int, world_size: int) -> None:
    """Converted after construction, at the first step or later."""
    for convert in (
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double().float(),
        lambda m: setattr(m[0].weight, "data", m[0].weight.data.clone()),
    ):
        for steps in (0, 2):
            model = mlp()
            optimizer = sharded(model, reduce_gradients=True)
            for _ in range(steps):
                optimizer.zero_grad()
                loss_of(model, rank).backward()
                optimizer.step()
            convert(model)
            model.zero_grad()
            x = torch.ones(2, 4, dtype=model[0].weight.dtype)
            model[0](x).sum().backward()
            with pytest.raises(RuntimeError, match=r"0\.weight was moved or converted since"):
                optimizer.step()
    model = mlp()  # found in backward where a whole bucket has gradients
    optimizer = sharded(model, reduce_gradients=True)
    model.half()
    with pytest.raises(RuntimeError, match=r"0\.weight was moved or converted since"):
        model(torch.ones(2, 4, dtype=torch.half)).sum().backward()


def check_other_weights(rank: int, world_size: int) -> None:
    for kwargs in ({}, {"reduce_gradients": True}, {"partition": "whole"}):
        model = mlp(seed=rank)
        optimizer = sharded(model, **kwargs)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if "reduce_gradients" in kwargs:
            optimizer.zero_grad()
            loss_of(model, rank).backward()
        with pytest.raises(
            RuntimeError, match=r"start from the same weights, .* norm of 0\.weight"
        ):
            optimizer.step()


def check_nobody_averages(rank: int, world_size: int) -> None:
    model = mlp()
    optimizer = sharded(model)
    loss_of(model, rank).backward()
    with pytest.raises(RuntimeError, match=r"must have been averaged .* that of 0\.weight differs"):
        optimizer.step()
    model = mlp()
    optimizer = sharded(model)
    loss_of(model, 0).backward()
    if rank == 1:
        model[2].bias.grad = None
    with pytest.raises(RuntimeError, match=r"2\.bias differs: it has none on some ranks"):
        optimizer.clip_grad_norm_(1.0)


def check_both_average(rank: int, world_size: int) -> None:
    model = mlp()
    optimizer = sharded(model, reduce_gradients=True)
    wrapped = DistributedDataParallel(model)
    loss_of(wrapped, rank).backward()
    with pytest.raises(RuntimeError, match=r"averaged once, .* data-parallel wrapper"):
        optimizer.step()
    model = mlp()
    optimizer = sharded(model, reduce_gradients=True)
    loss_of(model, rank).backward()
    with optimizer.no_sync():
        loss_of(model, rank).backward()
    with pytest.raises(RuntimeError, match=r"out of no_sync\(\)"):
        optimizer.step()


def check_dropped(rank: int, world_size: int) -> None:
    """zero_grad() between backward and step; then a right step."""
    model = mlp()
    optimizer = sharded(model, reduce_gradients=True)
    loss_of(model, rank).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) dropped them on this rank"):
        optimizer.step()
    loss_of(model, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, rank).backward()
    optimizer.step()


class Lars(torch.optim.Optimizer):
    """Scales each step by the norm of the parameter: element-wise state, layer-wise update."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("momentum", torch.zeros_like(p)).add_(p.grad)
                    scale = p.norm() / (p.grad.norm() + 1e-6)
                    p.sub_(group["lr"] * scale * self.state[p]["momentum"])


class Rows(Lars):
    """Divides by the mean square of each row."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / p.grad.square().mean(-1, keepdim=True).sqrt())


class MatricesOnly(Lars):
    """Orthogonalises matrices, and cannot update vectors of more than eight elements."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    whole = p.grad if p.ndim == 2 else p.grad.view(-1, 4)
                    update = (whole @ whole.T @ whole).view(p.shape)
                    p.sub_(group["lr"] * update)


class ClipsAll(Lars):
    """Clips by the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            norm = sum(p.grad.detach().square().sum() for p in held).sqrt()
            for p in held:
                p.sub_(group["lr"] * p.grad / norm)


class Signs(Lars):
    """The same without the norms."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.sign())


def check_layer_wise(rank: int, world_size: int) -> None:
    for lr in (0.1, 0.0):
        with pytest.raises(
            ValueError, match=r'Lars updates .* in two parts\. Pass partition="whole"'
        ):
            ShardedOptimizer(mlp().parameters(), Lars, lr=lr)
    ShardedOptimizer(mlp().parameters(), Lars, partition="whole")
    ShardedOptimizer(mlp().parameters(), Signs)
    for cls in (Rows, MatricesOnly):
        with pytest.raises(ValueError, match=r'every element alike, but .*Pass partition="whole"'):
            ShardedOptimizer(mlp().parameters(), cls)
        ShardedOptimizer(mlp().parameters(), cls, partition="whole")
    for partition in ("flat", "whole"):
        with pytest.raises(ValueError, match="ClipsAll updates a parameter otherwise when it is"):
            ShardedOptimizer(mlp().parameters(), ClipsAll, partition=partition)


def check_layer_wise_over_shards(rank: int, world_size: int) -> None:
    """The same trial before the first step at stage 3."""
    for cls, message in (
        (
            Lars,
            r"in two parts\. Make it by ShardedOptimizer\(matrices, Lars, partition=",
        ),
        (Rows, r"every element alike, but Rows"),
        (ClipsAll, "otherwise when it is given others too"),
        (torch.optim.Adafactor, "Adafactor looks at the shape of each parameter"),
        (torch.optim.LBFGS, "but got LBFGS, which does not"),
    ):
        model = FullyShardedDataParallel(mlp())
        loss_of(model, rank).backward()
        before = model.full_parameters()
        with pytest.raises(ValueError, match=message):
            cls(model.parameters(), lr=0.1).step(*[lambda: 0.0] * (cls is torch.optim.LBFGS))
        for name, value in model.full_parameters().items():
            assert torch.equal(value, before[name])
    model = FullyShardedDataParallel(mlp())
    loss_of(model, rank).backward()
    Signs(model.parameters()).step()
    matrices = [param for param in model.parameters() if param.grad is not None]
    for partition in ("flat", "whole"):
        with pytest.raises(ValueError, match=f'"{partition}" needs an optimizer that updates'):
            ShardedOptimizer(matrices, ClipsAll, partition=partition)


def classes() -> list[type[torch.optim.Optimizer]]:
    left_out = (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Optimizer)
    found = [c for c in vars(torch.optim).values() if isinstance(c, type)]
    return [c for c in found if issubclass(c, torch.optim.Optimizer) and c not in left_out]


def check_other_classes(rank: int, world_size: int) -> None:
    """Each class of torch's loads its own state and no other's."""
    model = nn.Linear(3, 2, bias=False)
    saved = {}
    for cls in classes():
        optimizer = cls(model.parameters(), lr=0.01)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        saved[cls] = optimizer.state_dict()
    accepted = []
    for cls in classes():
        ours = ShardedOptimizer(model.parameters(), cls, lr=0.01, partition="whole")
        load_whole_optimizer(ours, saved[cls])
        for other, state in saved.items():
            if other is cls:
                continue
            try:
                load_whole_optimizer(ours, state)
            except ValueError as error:
                assert "full state dict must be of this model" in str(error)  # noqa: PT017
            else:
                accepted.append((other.__name__, cls.__name__))
    assert not accepted


def test_a_state_of_another_class_is_refused() -> None:
    run_ranks(check_other_classes, 1)


def check_other_moments(rank: int, world_size: int) -> None:
    """One rank's moment has another shape: no rank loads."""
    model = mlp()
    optimizer = sharded(model, reduce_gradients=True)
    loss_of(model, 0).backward()
    optimizer.step()
    before, given = optimizer.state_dict(), optimizer.state_dict()
    if rank == 1:
        index, state = next(iter(given["state"].items()))
        given["state"][index] = {**state, "exp_avg": state["exp_avg"][1:]}
    with pytest.raises(ValueError, match=r"'exp_avg' of .* has shape .* this rank's part is"):
        optimizer.load_state_dict(given)
    after = optimizer.state_dict()
    for index, state in before["state"].items():
        assert torch.equal(state["exp_avg"], after["state"][index]["exp_avg"])


def check_freed(rank: int, world_size: int) -> None:
    for kwargs in ({}, {"reduce_gradients": True}, {"overlap": "next-forward"}):
        model = mlp()
        optimizer = sharded(model, **kwargs)
        if "overlap" in kwargs:
            optimizer.attach(model)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, 0).backward()
            optimizer.step()
        bucket = weakref.ref(optimizer.buckets[0])
        alive = weakref.ref(optimizer)
        del optimizer
        if "overlap" in kwargs:
            del model  # which waits for the optimizer's all-gathers, and so holds it
        gc.collect()
        assert alive() is None, kwargs
        assert bucket() is None, kwargs


def check_two_optimizers(rank: int, world_size: int) -> None:
    """The last one made trains on; an earlier one is refused before anything is sent."""
    model = mlp()
    earlier = sharded(model, reduce_gradients=True)
    later = sharded(model, reduce_gradients=True)
    twin = mlp()
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for _ in range(2):
        later.zero_grad()
        loss_of(model, rank).backward()
        with pytest.raises(RuntimeError, match=r"0\.weight was moved .* and only one over these"):
            earlier.step()
        later.step()
        plain.zero_grad()
        (sum(loss_of(twin, r) for r in range(world_size)) / world_size).backward()
        plain.step()
    for ours, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


def check_step_again(rank: int, world_size: int) -> None:
    """A step without gradients on any rank, after one that used them up; nothing changes."""
    model = mlp()
    optimizer = sharded(model, reduce_gradients=True)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, rank).backward()
        optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        for again in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            with pytest.raises(RuntimeError, match="no rank has a gradient since the last step"):
                again()
        for p, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, value)
    optimizer.zero_grad()
    optimizer.step()  # as after zero_grad() of a plain optimizer
    if rank == 0:  # a rank without a batch
        loss_of(model, rank).backward()
    optimizer.step()


CHECKS = [
    ("converted after construction", check_conversion, ()),
    ("other weights", check_other_weights, ()),
    ("nobody averages", check_nobody_averages, ()),
    ("both average", check_both_average, ()),
    ("gradients dropped before the step", check_dropped, ()),
    ("a layer-wise optimizer", check_layer_wise, ()),
    ("a layer-wise optimizer over shards", check_layer_wise_over_shards, ()),
    ("two optimizers over the same parameters", check_two_optimizers, ()),
    ("a second step without gradients", check_step_again, ()),
    ("moments of another shape", check_other_moments, ()),
    ("dropped optimizers are freed", check_freed, ()),
]


@pytest.mark.parametrize("check", [name for name, _, _ in CHECKS])
def test_on_two_ranks(check: str, errors_on_two_ranks: dict[str, str]) -> None:
    assert not errors_on_two_ranks[check], errors_on_two_ranks[check]


def drops_alone(rank: int, world_size: int) -> str:
    model = mlp()
    optimizer = sharded(model, reduce_gradients=True)
    loss_of(model, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_of(model, rank).backward()
    if rank == 1:
        optimizer.zero_grad()
        optimizer.step()  # raises, and the rank leaves
    try:
        optimizer.step()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_that_drops_its_gradients_alone_aborts_nobody() -> None:
    healthy, wrong = run_ranks(drops_alone, 2, check=False)
    assert "zero_grad() dropped them on this rank" in wrong.error
    assert healthy.ok, healthy.error
    assert healthy.value.startswith("CollectiveError: every rank must take part")
