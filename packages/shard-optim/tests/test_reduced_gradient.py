"""Under ``reduce_gradients=True`` gradients are in shards after backward: reading them is refused.

One rank is enough: what stands in ``grad`` does not depend on the number of ranks.
"""

import copy
import gc
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shard_optim import ShardedOptimizer


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def made():
    """A model, its optimizer, an input, and the same without sharding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    plain = copy.deepcopy(model)
    optimizer = ShardedOptimizer(
        model.named_parameters(), torch.optim.SGD, lr=0.1, reduce_gradients=True
    )
    return model, optimizer, torch.randn(3, 6), plain, torch.optim.SGD(plain.parameters(), lr=0.1)


def assert_same(model, plain):
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.grad is None or not ours.grad.any()  # zeros, until zero_grad()


READS = {
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "one by one": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=False),
    "largest": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, float("inf")),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "a norm": lambda m: [p.grad.norm() for p in m.parameters() if p.grad is not None],
    "zeros": lambda m: m.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("read", READS)
def test_refused_and_the_step_is_right(read):
    model, optimizer, x, plain, stepper = made()
    for each in (model, plain):
        each(x).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"Call optimizer\.clip_grad_norm_\(\) instead of"):
        READS[read](model)
    assert model[0].bias.grad.shape == (6,)
    norm = optimizer.clip_grad_norm_(0.01)
    # One sum over the buffer of all shards, and torch's over norms of tensors: two orders.
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
    optimizer.step()
    stepper.step()
    stepper.zero_grad()
    assert_same(model, plain)


@pytest.mark.parametrize("pause", [False, True])
def test_further_backwards(pause):
    """Into shards, or into whole gradients; some parameters are unused in some of them."""
    model, optimizer, x, plain, stepper = made()
    for each in (model, plain):
        each(x).square().mean().backward()
        if pause and each is model:
            with optimizer.no_sync():
                each(x).square().mean().backward()
        else:
            each(x).square().mean().backward()
        each[2](x).square().mean().backward()
    optimizer.step()
    stepper.step()
    stepper.zero_grad()
    assert_same(model, plain)


def test_compiling_between_two_backwards():
    """The compiler looks at ``grad`` of the parameters that it traces."""
    model, optimizer, x, plain, stepper = made()
    model[0](x).square().mean().backward()
    model[0].compile(backend="aot_eager", fullgraph=True)
    model[0](x).square().mean().backward()
    optimizer.step()
    for _ in range(2):
        plain[0](x).square().mean().backward()
    stepper.step()
    stepper.zero_grad()
    assert_same(model, plain)


ZEROS = {
    "optimizer": lambda m, o: o.zero_grad(),
    "optimizer, in place": lambda m, o: o.zero_grad(set_to_none=False),
    "model": lambda m, o: m.zero_grad(),
    "model, in place": lambda m, o: m.zero_grad(set_to_none=False),
    "by hand": lambda m, o: [setattr(p, "grad", None) for p in m.parameters()],
}


@pytest.mark.parametrize("zero", ZEROS)
def test_a_left_out_zero_grad_is_named_by_the_next_step(zero):
    """A plain optimizer would add to the gradients that the step has used; nothing has changed."""
    model, optimizer, x, plain, stepper = made()
    for step in range(3):
        for each, own in ((model, optimizer), (plain, stepper)):
            if own is optimizer and step:
                model.float().cpu()  # of a trainer that moves a model which is there already
                ZEROS[zero](model, optimizer)
            elif step:
                stepper.zero_grad()
            with nullcontext() if own is stepper else optimizer.no_sync():
                each(x).square().mean().backward()
            each(x).square().mean().backward()
            own.step()
    for pause in (nullcontext, optimizer.no_sync, optimizer.no_sync):
        with pause():
            model(x).square().mean().backward()
        for refused in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            with pytest.raises(RuntimeError, match=r"^zero_grad\(\) must come between two steps"):
                refused()
    optimizer.zero_grad()
    assert_same(model, plain)


@pytest.mark.parametrize("pause", [False, True])
@pytest.mark.parametrize("zero", ["optimizer", "model", "by hand"])
def test_gradients_of_another_loss_are_dropped_before_backward(zero, pause):
    """As those that a GAN's generator, or an actor, makes for its discriminator, or its critic."""
    model, optimizer, x, plain, stepper = made()
    for step in range(3):
        for each, own in ((model, optimizer), (plain, stepper)):
            ZEROS[zero](each, own)
            each(x + step).square().mean().backward()
            own.step()
            with own.no_sync() if pause and own is optimizer else nullcontext():
                each(x - step).abs().mean().backward()
    ZEROS[zero](model, optimizer)
    assert_same(model, plain)


@pytest.mark.parametrize("zero", ["optimizer", "model", "by hand"])
@pytest.mark.parametrize("reduce_gradients", [False, True])
def test_a_batch_whose_step_was_skipped(reduce_gradients, zero):
    """It has been clipped, and was dropped after that."""
    _, _, x, plain, stepper = made()
    model = copy.deepcopy(plain)
    optimizer = ShardedOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, reduce_gradients=reduce_gradients
    )
    for factor in (1.0, float("inf"), 2.0):
        ZEROS[zero](model, optimizer)
        stepper.zero_grad()
        for each in (model, plain):
            (each(x).square().mean() * factor).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(optimizer.clip_grad_norm_(0.1), norm, equal_nan=True)
        if norm.isfinite():
            optimizer.step()
            stepper.step()
    ZEROS[zero](model, optimizer)
    assert_same(model, plain)


@pytest.mark.parametrize("bucket_size_mb", [None, 1e-6])
def test_other_parameters_after_gradients_were_dropped(bucket_size_mb):
    """By the model, when some had been reduced and others waited for it."""
    _, _, x, plain, stepper = made()
    model = copy.deepcopy(plain)
    optimizer = ShardedOptimizer(
        model.parameters(),
        torch.optim.SGD,
        lr=0.1,
        reduce_gradients=True,
        bucket_size_mb=bucket_size_mb,
    )
    for each in (model, plain):
        each(x).square().mean().backward()
        each[0](x).square().mean().backward()
        each.zero_grad()
        each[2](x).square().mean().backward()
    optimizer.step()
    stepper.step()
    model.zero_grad()
    assert_same(model, plain)


def test_a_step_without_gradients_after_zero_grad_of_the_model():
    """Nothing, as in torch: another part of the model is trained in this iteration."""
    model, optimizer, x, plain, stepper = made()
    for step in range(4):
        for each, own in ((model, optimizer), (plain, stepper)):
            each.zero_grad()
            if step % 2 == 0:
                each(x).square().mean().backward()
            own.step()
    model.zero_grad()
    assert_same(model, plain)


def test_gradients_of_other_parameters_need_no_zero_grad():
    """Parts of a model trained in turns, of which only the trained one is zeroed."""
    model, optimizer, x, plain, stepper = made()
    for number in (0, 2, 0, 2):
        for each, own in ((model, optimizer), (plain, stepper)):
            each[number](x).square().mean().backward()
            own.step()
            each[number].zero_grad()
    assert_same(model, plain)


def test_a_dropped_optimizer_leaves_no_stand_in():
    model, optimizer, x, _, _ = made()
    model(x).sum().backward()
    optimizer.step()
    del optimizer
    gc.collect()
    assert all(param.grad is None for param in model.parameters())


def test_a_model_that_is_all_frozen_may_step_again():
    model, optimizer, *_ = made()
    model.requires_grad_(False)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, reduce_gradients=True)
    for _ in range(2):
        optimizer.step()  # nothing, as in torch
