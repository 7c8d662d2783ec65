"""Parameters without a gradient, forgotten calls, changed ``requires_grad``: named or handled."""

import pytest
import torch
from torch import nn

from ddp_lite import (
    BucketedDDP,
    FlatDDP,
    MissingGradientError,
    ModelMismatchError,
    NaiveDDP,
    OverlapDDP,
    UnfinishedSynchronizationError,
)
from ranks import run_case, run_ranks

ALL = {wrapper.__name__: wrapper for wrapper in (NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP)}


class Branches(nn.Module):
    """One path or the other; ``never`` takes no part in any."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 3)
        self.right = nn.Linear(3, 3)
        self.shared = nn.Linear(3, 1)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        return self.shared((self.left if left else self.right)(x))


VARIANTS = {
    **ALL,
    "copied": lambda m, **kwargs: BucketedDDP(m, 0.00002, copy=True, **kwargs),
    "wire": lambda m, **kwargs: BucketedDDP(m, 0.00002, wire_dtype=torch.bfloat16, **kwargs),
}


def skip_if_all(rank: int, world_size: int, name: str) -> None:
    wrapped = VARIANTS[name](Branches(), auto_finish=False)
    model = wrapped.module
    for step in range(3):
        model.zero_grad()
        # both ranks take the same branch in step 0, different ones later
        wrapped(torch.ones(2, 3), left=step == 0 or rank == 0).sum().backward()
        local = model.left.bias.grad  # None once its reduction has started
        wrapped.finish_gradient_synchronization()
        assert model.never.grad is None
        if step == 0:
            assert model.right.weight.grad is None
            assert model.left.weight.grad is not None
        else:
            # a rank without a gradient got the average of the others' and its zeros
            whole = model.shared.weight.sum(0).detach() * 0 + 2 * model.shared.weight[0].detach()
            expected = {"rtol": 1e-2, "atol": 0} if local is None else {}
            for branch in (model.left, model.right):
                torch.testing.assert_close(branch.bias.grad, whole / 2, **expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_skip_if_all_agrees_across_ranks(name: str) -> None:
    run_case(skip_if_all, 2, VARIANTS, name)


def error(rank: int, world_size: int, name: str) -> None:
    wrapped = VARIANTS[name](Branches(), auto_finish=False, missing_gradients="error")
    wrapped.module.never.requires_grad_(False)
    for _ in range(2):
        wrapped.module.zero_grad()
        out = wrapped(torch.ones(2, 3), True) + wrapped(torch.ones(2, 3), False)
        out.sum().backward()
        wrapped.finish_gradient_synchronization()
    wrapped(torch.ones(2, 3), left=rank == 0).sum().backward()
    with pytest.raises(MissingGradientError) as caught:
        wrapped.finish_gradient_synchronization()
    message = str(caught.value)
    assert "in step 3" in message
    assert "left.weight on rank 1" in message
    assert "right.bias on rank 0" in message
    assert "shared" not in message


@pytest.mark.parametrize("name", VARIANTS)
def test_error_names_parameters_ranks_and_step_on_every_rank(name: str) -> None:
    run_case(error, 2, VARIANTS, name)


def zeros(rank: int, world_size: int, name: str) -> None:
    wrapped = VARIANTS[name](Branches(), auto_finish=False, missing_gradients="zeros")
    wrapped(torch.ones(2, 3), left=True).sum().backward()
    wrapped.finish_gradient_synchronization()
    assert torch.equal(wrapped.module.never.grad, torch.zeros(2))
    assert torch.equal(wrapped.module.right.bias.grad, torch.zeros(3))


@pytest.mark.parametrize("name", VARIANTS)
def test_zeros_gives_everyone_a_gradient(name: str) -> None:
    run_case(zeros, 2, VARIANTS, name)


def forgotten(rank: int, world_size: int, name: str) -> None:
    wrapped = ALL[name](nn.Linear(2, 1), auto_finish=False)
    wrapped(torch.ones(1, 2)).sum().backward()
    if rank == 0:
        with torch.no_grad():
            wrapped(torch.ones(1, 2))  # evaluation on one rank, even here, is harmless
    with pytest.raises(UnfinishedSynchronizationError, match=r"after step 0 .*2 parameters"):
        wrapped(torch.ones(1, 2))
    wrapped.finish_gradient_synchronization()
    with wrapped.no_sync():
        wrapped(torch.ones(1, 2)).sum().backward()
        wrapped(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match=r"outside no_sync\(\)"):
            wrapped.finish_gradient_synchronization()
    wrapped.finish_gradient_synchronization()  # sends what was accumulated
    assert torch.equal(wrapped.module.bias.grad, torch.full((1,), 3.0))


@pytest.mark.parametrize("name", ALL)
def test_a_forgotten_finish_is_named_at_the_next_forward(name: str) -> None:
    run_case(forgotten, 2, ALL, name)


def no_sync_survives_errors(rank: int, world_size: int) -> None:
    wrapped = OverlapDDP(nn.Linear(2, 1, bias=False))
    assert wrapped.stats() is None
    with pytest.raises(ZeroDivisionError), wrapped.no_sync():
        _ = 1 / 0
    (wrapped(torch.ones(1, 2)) * (rank + 1)).sum().backward()
    wrapped.finish_gradient_synchronization()
    assert torch.equal(wrapped.module.weight.grad, torch.full((1, 2), 1.5))
    assert wrapped.stats().collectives == 1


def test_no_sync_ends_with_its_block() -> None:
    run_ranks(no_sync_survives_errors, 2)


def flips(rank: int, world_size: int, name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    wrapped = ALL[name](model)
    assert wrapped.stats() is None
    for trainable in (False, True, False):
        model[0].requires_grad_(trainable)
        model.zero_grad()
        (wrapped(torch.ones(1, 2)) * (rank + 1)).sum().backward()
        wrapped.finish_gradient_synchronization()
        names = {name for group in wrapped.stats().group_parameters for name in group}
        assert ("0.weight" in names) is trainable
        assert (model[0].weight.grad is not None) is trainable
        torch.testing.assert_close(model[1].bias.grad, torch.tensor([1.5]))
        if trainable:
            expected = 1.5 * model[1].weight.detach()
            torch.testing.assert_close(model[0].bias.grad, expected[0])


@pytest.mark.parametrize("name", ALL)
def test_requires_grad_may_change_on_all_ranks(name: str) -> None:
    run_case(flips, 2, ALL, name)


def flips_differently(rank: int, world_size: int) -> None:
    wrapped = BucketedDDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    wrapped.module[rank].requires_grad_(False)
    with pytest.raises(ModelMismatchError, match=r"0\.weight"):
        wrapped(torch.ones(1, 2))


def test_requires_grad_changed_differently_is_named() -> None:
    run_ranks(flips_differently, 2)


class Lookup(nn.Module):
    """A table that only its own forward knows to be sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, 2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.table, sparse=True)


def sparse(rank: int, world_size: int, name: str) -> None:
    wrapped = ALL[name](Lookup())
    out = wrapped(torch.tensor([0, 1])).sum()
    with pytest.raises(ValueError, match=r"table got a torch\.sparse_coo.*in step 1"):
        (out.backward(), wrapped.finish_gradient_synchronization())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ALL)
def test_sparse_gradients_are_refused_by_name(name: str) -> None:
    run_case(sparse, 2, ALL, name)


def frozen_while_accumulating(rank: int, world_size: int, name: str) -> None:
    wrapped = ALL[name](Branches())
    with wrapped.no_sync():
        wrapped(torch.full((2, 3), rank + 1.0), left=True).sum().backward()
    wrapped.module.left.requires_grad_(False)
    with pytest.raises(UnfinishedSynchronizationError, match=r"left\.weight was frozen before"):
        wrapped(torch.ones(2, 3), left=True)

    wrapped = ALL[name](wrapped.detach().requires_grad_())
    with wrapped.no_sync():
        wrapped(torch.ones(2, 3), left=True).sum().backward()
    wrapped.zero_grad()
    wrapped.module.left.requires_grad_(False)
    wrapped(torch.full((2, 3), rank + 1.0), left=True).sum().backward()
    assert wrapped.module.left.weight.grad is None
    assert wrapped.module.shared.bias.grad.item() == 2


@pytest.mark.parametrize("name", ALL)
def test_a_parameter_that_is_frozen_while_it_accumulates_is_named(name: str) -> None:
    run_case(frozen_while_accumulating, 2, ALL, name)
