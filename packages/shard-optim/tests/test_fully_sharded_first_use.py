"""Situations that programs meet when they move to a sharded model, against unsharded training."""

import copy
import logging
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fully_sharded_models import average_gradients, loss_of, net
from shard_optim import (
    FullyShardedDataParallel,
    ShardedOptimizer,
    full_state,
    load,
    load_full_state,
    save,
)


class Encoder(nn.Module):
    """A forward, a method beside it, and a matrix that only the method reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.weight = nn.Parameter(torch.randn(5, 8))

    def forward(self, x):
        return self.layers(x)

    def training_loss(self, x):
        return F.linear(self.layers(x).tanh(), self.weight).square().mean()


def inputs(step, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def check_method(rank, world_size):
    """A registered method trains as on replicas."""
    expected, model = Encoder(), FullyShardedDataParallel(Encoder())
    with pytest.raises(ValueError, match="name must be a method of the wrapped Encoder, but got"):
        model.register_forward_method("nothing")
    model.register_forward_method("training_loss")
    theirs = torch.optim.AdamW(expected.parameters(), lr=0.1)
    ours = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        expected.training_loss(inputs(step, rank)).backward()
        average_gradients(expected)
        model.training_loss(inputs(step, rank)).backward()
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.full_parameters().items():
        torch.testing.assert_close(value, expected.get_parameter(name))


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    times: torch.Tensor
    length: int


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))

    def forward(self, batch):
        self.seen = batch
        return self.layers(batch.x.bfloat16())


def check_cast(rank, world_size):
    """Data classes are cast, unless the caller says not to; what was passed in stays as it was."""
    times = torch.tensor([901.0, 903.0])
    batch = Batch(inputs(0, rank), times, 2)
    for cast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        model = FullyShardedDataParallel(
            Timed(), compute_dtype=torch.bfloat16, cast_inputs=cast, units=lambda m: False
        )
        model(batch).sum().backward()
        seen = model.module.seen
        assert (seen.x.dtype, seen.times.dtype, seen.length) == (dtype, dtype, 2)
        assert (batch.x.dtype, batch.times.dtype) == (torch.float32, torch.float32)
    assert torch.equal(seen.times, times)
    with pytest.raises(TypeError, match="cast_inputs must be True or False, but got 'no'"):
        FullyShardedDataParallel(Timed(), cast_inputs="no")


def check_step_in_a_hook(rank, world_size):
    """Gradients are not averaged yet there."""
    model = FullyShardedDataParallel(net())
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)
        param.register_hook(lambda _, step=optimizer.step: step())
    with pytest.raises(RuntimeError, match="must step after backward, but SGD stepped in a hook"):
        loss_of(model, 0, rank).backward()


def check_post_accumulate_hooks(rank, world_size):
    """They see averaged shards, whenever they were registered: an optimizer or an update by hand"""

    def by_optimizer(param):
        optimizer = torch.optim.SGD([param], lr=0.1)

        def step(_param):
            optimizer.step()
            optimizer.zero_grad()

        return step

    def by_hand(param):
        def step(param):
            param.data.add_(param.grad, alpha=-0.1)
            param.grad = None

        return step

    for update in (by_optimizer, by_hand):
        expected, module = net(), net()
        plain = torch.optim.SGD(expected.parameters(), lr=0.1)
        seen = []
        early = module.head.weight.register_post_accumulate_grad_hook(seen.append)
        model = FullyShardedDataParallel(module)
        for step in range(3):
            plain.zero_grad()
            loss_of(expected, step, rank).backward()
            average_gradients(expected)
            plain.step()
            loss = loss_of(model, step, rank)
            if step == 0:  # also between forward and backward
                for param in model.parameters():
                    param.register_post_accumulate_grad_hook(update(param))
            with model.no_sync() if step == 2 else nullcontext():
                loss.backward()
            if step == 2:  # not averaged, so nobody is called
                break
            found = model.full_parameters()
            for name, param in expected.named_parameters():
                assert torch.equal(found[name], param), name
        assert len(seen) == 2
        early.remove()


def check_groups_by_ndim(rank, world_size):
    model = FullyShardedDataParallel(net())
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    others = [param for param in model.parameters() if param.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.5},
        {"params": others, "weight_decay": 0.0},
    ]
    loss_of(model, 0, rank).backward()
    with pytest.raises(ValueError, match=r"must hold parameters, but got an empty one.*by name"):
        torch.optim.AdamW(groups).step()
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("shard_optim").addHandler(handler)
    torch.optim.AdamW(groups[1:]).step()
    assert any("weight_decay is 0 for every matrix" in text for text in said)
    said.clear()
    torch.optim.AdamW(others).step()
    torch.optim.SGD(others, lr=0.1).step()
    assert not said


def check_compile_around(rank, world_size):
    model = torch.compile(FullyShardedDataParallel(net()), backend="eager")
    with pytest.raises(RuntimeError, match=r"units must be compiled.*Call compile\(\) of each"):
        loss_of(model, 0, rank).backward()


def check_average_of_weights(rank, world_size):
    """Listing parameters waits for them under ``overlap="next-forward"``."""
    model, expected = net(), net()
    ours = ShardedOptimizer(
        model.named_parameters(),
        torch.optim.AdamW,
        lr=0.1,
        reduce_gradients=True,
        overlap="next-forward",
    )
    ours.attach(model)
    theirs = torch.optim.AdamW(expected.parameters(), lr=0.1)
    averages = [AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for m in (model, expected)]
    for step in range(4):
        loss_of(model, step, rank).backward()
        loss_of(expected, step, rank).backward()
        average_gradients(expected)
        for optimizer, module, average in zip(
            (ours, theirs), (model, expected), averages, strict=True
        ):
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(module)
    mine, reference = (average.module.parameters() for average in averages)
    for value, expected_value in zip(mine, reference, strict=True):
        torch.testing.assert_close(value, expected_value)
    assert type(copy.deepcopy(model)._parameters) is dict


class Quantised(nn.Module):
    """A frozen matrix of few bits under a trainable one of low rank."""

    def __init__(self, dtype) -> None:
        super().__init__()
        weight = torch.randn(7, 7)
        values = (weight * 20).round() if dtype == torch.int8 else weight
        self.low = nn.Parameter(values.to(dtype), requires_grad=False)
        self.up, self.down = nn.Linear(7, 2), nn.Linear(2, 7)

    def forward(self, x):
        return x @ (self.low.to(x.dtype) / 20) + self.down(self.up(x))


def quantised(dtype, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(Quantised(dtype) for _ in range(3)))


def check_quantised(rank, world_size, dtype):
    """Gathered as bytes, never cast; saved, loaded and handed out like any parameter."""
    expected, model = quantised(dtype), FullyShardedDataParallel(quantised(dtype, seed=rank))
    theirs = torch.optim.SGD([p for p in expected.parameters() if p.requires_grad], lr=0.1)
    ours = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(3):
        x = inputs(step, rank)[:, :7]
        for each, optimizer in ((expected, theirs), (model, ours)):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            if each is expected:
                average_gradients(expected)
            optimizer.step()
    whole = model.full_parameters()
    for name, value in expected.named_parameters():
        assert whole[name].dtype == value.dtype
        torch.testing.assert_close(whole[name].float(), value.float())
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    save(folder[0], model)
    state = full_state(model)
    for load_it in (
        lambda other: load(folder[0], other),
        lambda other: load_full_state(state, other),
    ):
        other = FullyShardedDataParallel(quantised(dtype, seed=5), compute_dtype=torch.bfloat16)
        load_it(other)
        for name, value in other.full_parameters().items():
            assert torch.equal(value.view(torch.uint8), whole[name].view(torch.uint8)), name
        other(x).sum().backward()


def with_rope(seed=0):
    torch.manual_seed(seed)
    model = net(seed=seed)
    model.rope = Rope()
    return model


class Rope(nn.Module):
    """A buffer that is not saved, and no reset_parameters()."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(4.0) + 1, persistent=False)


def check_meta_on_others(rank, world_size):
    """Rank 0 holds the model, the others its shapes: they get rank 0's values."""
    with torch.device("cpu" if rank == 0 else "meta"):
        module = with_rope()
    model = FullyShardedDataParallel(module, device="cpu")
    expected = with_rope()
    for name, value in model.full_parameters().items():
        assert torch.equal(value, expected.get_parameter(name)), name
    assert torch.equal(model.module.rope.frequencies, expected.rope.frequencies)
    loss_of(model, 0, rank).backward()


# Every class of torch.optim that treats all elements alike.
ELEMENT_WISE = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    *((name, {"weight_decay": 0.1}) for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax")),
    *((name, {"weight_decay": 0.1}) for name in ("ASGD", "NAdam", "RAdam")),
    ("RMSprop", {"weight_decay": 0.1, "momentum": 0.9}),
    ("Rprop", {}),
]


def check_classes_of_torch(rank, world_size):
    """None looks beyond one element, and none makes refusing tensors of its state."""
    for name, settings in ELEMENT_WISE:
        cls = getattr(torch.optim, name)
        for foreach in (False, True):
            expected, model = net(depth=1), FullyShardedDataParallel(net(depth=1))
            theirs = cls(expected.parameters(), foreach=foreach, **settings)
            ours = cls(model.parameters(), foreach=foreach, **settings)
            for step in range(3):
                for each, optimizer in ((expected, theirs), (model, ours)):
                    optimizer.zero_grad()
                    loss_of(each, step, rank).backward()
                    if each is expected:
                        average_gradients(expected)
                    optimizer.step()
            for name, value in model.full_parameters().items():
                assert torch.equal(value, expected.get_parameter(name)), (cls, foreach, name)
            kept = (value for state in ours.state.values() for value in state.values())
            assert {type(value) for value in kept} <= {torch.Tensor, int, float}, cls


CHECKS = [
    ("every class of torch", check_classes_of_torch, ()),
    ("int8", check_quantised, (torch.int8,)),
    ("float8", check_quantised, (torch.float8_e4m3fn,)),
    ("meta on the others", check_meta_on_others, ()),
    ("a method", check_method, ()),
    ("inputs that are cast", check_cast, ()),
    ("a step in a hook", check_step_in_a_hook, ()),
    ("post-accumulate hooks", check_post_accumulate_hooks, ()),
    ("groups by ndim", check_groups_by_ndim, ()),
    ("torch.compile around", check_compile_around, ()),
    ("an average of weights", check_average_of_weights, ()),
]


@pytest.mark.parametrize("name", [name for name, _, _ in CHECKS])
def test_on_two_ranks(errors_on_two_ranks, name):
    assert not errors_on_two_ranks[name], errors_on_two_ranks[name]
