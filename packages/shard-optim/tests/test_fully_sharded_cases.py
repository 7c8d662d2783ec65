"""Parameters in shards where training does something unusual, and where it is asked wrongly."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import nn

from fully_sharded_models import (
    OPTIMIZERS,
    average_gradients,
    batch,
    loss_of,
    net,
    poison,
    replicas,
)
from shard_optim import FullyShardedDataParallel, ShardedGradScaler

SETTINGS = [{}, {"reshard_after_forward": False}]


def sharded(**settings):
    return FullyShardedDataParallel(net(), **settings)


def assert_same(model, expected):
    found = model.full_parameters()
    for name, param in expected.named_parameters():
        assert torch.equal(found[name], param), name


def assert_close(model, expected, **tolerance):
    found = model.full_parameters()
    for name, param in expected.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), **tolerance)


def both(rank, settings, work, *, steps=3):
    """Trains replicas and shards alike: ``work(model, step, backward)`` makes the gradients."""
    expected, model = net(), sharded(**settings)
    for each in (expected, model):
        optimizer = OPTIMIZERS["adamw"](each.parameters())
        for step in range(steps):
            optimizer.zero_grad()
            work(each, step)
            if each is expected:
                average_gradients(each)
            optimizer.step()
    return model, expected


def check_several_forwards(rank, world_size, settings):
    def work(model, step):
        losses = [loss_of(model, 3 * step + part, rank) for part in range(3)]
        sum(losses).backward()

    assert_same(*both(rank, settings, work))


def check_two_backwards_of_one_graph(rank, world_size):
    def work(model, step):
        outputs = model(batch(step, rank))
        outputs.square().mean().backward(retain_graph=True)
        outputs.abs().mean().backward()

    # The sum of two averages, where replicas average the sum.
    assert_close(*both(rank, {}, work), rtol=1e-5, atol=1e-6)


def check_accumulation(rank, world_size, settings, in_place):
    """Every backward adds to the shards; whether gradients start as None or as zeros."""

    def work(model, step):
        if in_place:
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
        for part in range(3):
            loss_of(model, 3 * step + part, rank).backward()

    assert_close(*both(rank, settings, work), rtol=1e-5, atol=1e-6)


def check_no_sync(rank, world_size, settings):
    calls = []

    def work(model, step):
        for part in range(3):
            if part < 2 and isinstance(model, FullyShardedDataParallel):
                with model.no_sync():
                    loss_of(model, 3 * step + part, rank).backward()
                with pytest.raises(RuntimeError, match="must be averaged before they are used"):
                    next(model.parameters()).grad.add_(1)
                calls.append(step)
            else:
                loss_of(model, 3 * step + part, rank).backward()

    assert_same(*both(rank, settings, work))
    assert len(calls) == 6


def check_dropped_accumulation(rank, world_size, settings):
    """``zero_grad()`` drops what ``no_sync`` has accumulated, such as a batch that overflowed."""

    def work(model, step):
        with model.no_sync() if isinstance(model, FullyShardedDataParallel) else nullcontext():
            (loss_of(model, 2 * step, rank) * float("nan")).backward()
        model.zero_grad()
        loss_of(model, 2 * step + 1, rank).backward()

    model, expected = both(rank, settings, work)
    assert_same(model, expected)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        loss_of(model, 0, rank).backward()
    before = [param.detach().clone() for param in model.parameters()]
    for call in (optimizer.step, lambda: optimizer.zero_grad(set_to_none=False)):
        with pytest.raises(RuntimeError, match=r"outside no_sync\(\).*set_to_none=True"):
            call()
    assert all(map(torch.equal, before, model.parameters()))
    # One that is frozen now is not averaged any more.
    frozen = next(param for param in model.parameters() if param.grad is not None)
    frozen.requires_grad_(False)
    loss_of(model, 1, rank).backward()
    with pytest.raises(RuntimeError, match="Freeze parameters after the step, not before"):
        optimizer.step()
    frozen.requires_grad_(True)


def check_returned_parameter(rank, world_size, settings):
    """A parameter that the model returns gets its average, and no hook more in each forward."""

    def work(model, step):
        output, scale = model(batch(step, rank))
        (output.square().mean() * scale if step else (rank + 1) * scale).backward()

    class ReturnsParameter(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = net(), nn.Parameter(torch.ones(()))

        def forward(self, tokens):
            return self.inner(tokens), self.scale

    expected, model = ReturnsParameter(), ReturnsParameter()
    expected.load_state_dict(model.state_dict())
    model = FullyShardedDataParallel(model, **settings)
    for step in range(3):
        work(expected, step)
        average_gradients(expected)
        work(model, step)
        torch.testing.assert_close(model.module.scale.grad, expected.scale.grad)
    assert len(model.module.scale._backward_hooks) == 1


def check_evaluation(rank, world_size, settings):
    """Forwards without gradients between training steps change nothing and give the same."""
    outputs = []

    def work(model, step):
        model.eval()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                outputs.append(model(batch(7, rank)))
        model.train()
        model(batch(8, rank))  # with gradients, but never differentiated
        loss_of(model, step, rank).backward()

    model, expected = both(rank, settings, work)
    assert_same(model, expected)
    half = len(outputs) // 2
    for ours, theirs in zip(outputs[half:], outputs[:half], strict=True):
        assert torch.equal(ours, theirs)


class InterruptionError(RuntimeError):
    pass


def check_exception(rank, world_size, settings, where):
    """An exception on all ranks, caught; the step is tried again."""

    def fail(*_):
        raise InterruptionError

    def work(model, step):
        block = model.blocks[2]
        if step == 1:
            if where == "forward":
                handle = block.up.register_forward_hook(fail)
            else:
                handle = block.up.register_full_backward_hook(fail)
            with pytest.raises(InterruptionError):
                loss_of(model, step, rank).backward()
            handle.remove()
            for param in model.parameters():
                param.grad = None
        loss_of(model, step, rank).backward()

    assert_same(*both(rank, settings, work))


def check_clipping(rank, world_size, norm_type):
    norms = []

    def work(model, step):
        (30 * loss_of(model, step, rank)).backward()
        if isinstance(model, FullyShardedDataParallel):
            norms.append(model.clip_grad_norm_(0.5, norm_type))
        else:
            average_gradients(model)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type))

    model, expected = both(rank, {}, work)
    # The squares are summed in another order.
    torch.testing.assert_close(torch.stack(norms[3:]), torch.stack(norms[:3]))
    assert min(norms) > 0.5
    assert_close(model, expected, rtol=1e-5, atol=1e-5)


def check_scaler(rank, world_size):
    """An overflow on one rank makes every rank skip the step."""
    model = sharded(compute_dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=100)
    before = model.full_parameters()
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        if step == 0 and rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = model.full_parameters()
        moved = [not torch.equal(before[name], after[name]) for name in before]
        assert any(moved) == (step == 1)
    assert scaler.get_scale() == 2.0
    expected = net()
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)
    loss_of(expected, 1, rank).backward()
    average_gradients(expected)
    reference.step()
    assert_close(model, expected, rtol=1e-3, atol=1e-3)  # fp16 has 11 bits


def torch_scaler(model):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(model.parameters()))


REFUSED = {
    "clip": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5),
    "clip one by one": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5, foreach=False),
    "clip by the largest": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5, float("inf")),
    "clip a block": lambda m: nn.utils.clip_grad_norm_(m.blocks[3].parameters(), 0.5),
    "total norm": lambda m: nn.utils.get_total_norm([p.grad for p in m.parameters()]),
    "norm": lambda m: m.head.weight.grad.norm(),
    "torch.norm": lambda m: torch.norm(m.head.weight.grad),
    "scaler": torch_scaler,
}


def check_refused(rank, world_size):
    """What would differ from rank to rank names the right call, and changes nothing.

    Accumulated gradients too, and those of an optimizer that has made state of them.
    """
    remedy = r"Call clip_grad_norm_\(\) of the FullyShardedDataParallel instead of"

    def work(model, step):
        for part in range(1 + step):
            loss_of(model, 3 * step + part, rank).backward()
        if isinstance(model, FullyShardedDataParallel):
            for name, mistake in REFUSED.items():
                with pytest.raises(
                    RuntimeError, match="ShardedGradScaler" if name == "scaler" else remedy
                ):
                    mistake(model)
            own = [param.grad.detach().norm() for param in model.parameters()]
            assert {type(norm) for norm in own} == {torch.Tensor}
            grad = model.head.weight.grad
            for copied in (copy.deepcopy(grad), pickle.loads(pickle.dumps(grad))):
                assert type(copied) is torch.Tensor
                assert torch.equal(copied, grad)
            nn.utils.clip_grad_value_(model.parameters(), 1e6)

    assert_close(*both(rank, {}, work), rtol=1e-5, atol=1e-6)
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, 0, rank).backward()
    optimizer.step()
    states = optimizer.state_dict()["state"].values()
    assert {type(state["momentum_buffer"]) for state in states} == {torch.Tensor}


BY_HAND = {
    "a norm": lambda grads: sum(grad.square().sum() for grad in grads).sqrt(),
    "a norm of data": lambda grads: sum(grad.data.pow(2).sum() for grad in grads),
    "a mean": lambda grads: [grad.abs().mean() for grad in grads],
    "the largest": lambda grads: max(grad.abs().max().item() for grad in grads),
    "infinities": lambda grads: all(torch.isfinite(grad).all() for grad in grads),
    "a product": lambda grads: [torch.dot(grad.view(-1), grad.view(-1)) for grad in grads],
    "rows": lambda grads: [grad.float().square().mean(dim=-1) for grad in grads],
}


def check_by_hand(rank, world_size):
    """Sums over elements are refused, element-wise functions and detached shards are not."""
    model = sharded()
    loss_of(model, 0, rank).backward()
    grads = [param.grad for param in model.parameters()]
    for mistake in BY_HAND.values():
        with pytest.raises(RuntimeError, match=r"must be given whole gradients.*call detach\(\)"):
            mistake(grads)
    for own in BY_HAND.values():
        own([grad.detach() for grad in grads])
    average = [grad * 0.9 + grad.clone() * 0.1 for grad in grads]
    for param, value in zip(model.parameters(), average, strict=True):
        param.data.add_(value, alpha=-0.1)
        assert type(param.data) is torch.Tensor


def check_low_precision(rank, world_size, compute_dtype, reduce_dtype):
    """Against replicas that compute in the same dtype from the same fp32 masters."""
    model = sharded(compute_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = net()
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
        low = net().to(compute_dtype)
        low.load_state_dict(expected.state_dict())
        loss_of(low, step, rank).backward()
        for param, half in zip(expected.parameters(), low.parameters(), strict=True):
            sums = half.grad.to(torch.float32 if half.ndim < 2 else reduce_dtype or half.dtype)
            if sums.dtype == torch.float16:
                sums = sums.float()
            dist.all_reduce(sums, op=dist.ReduceOp.AVG)
            param.grad = sums.float()
        reference.step()
    assert_same(model, expected)


def check_thawing(rank, world_size):
    """Freezing and unfreezing between steps."""

    def work(model, step):
        model.blocks[1].requires_grad_(step != 0)
        model.blocks[3].up.weight.requires_grad_(step != 1)
        loss_of(model, step, rank).backward()

    assert_same(*both(rank, {}, work))


def check_compiled(rank, world_size, how):
    """One graph for all blocks, no graph break; the back end makes graphs but no code."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected = replicas(3, rank)
    module = net()
    for number, block in enumerate(module.blocks):
        if how == "in place":
            block.compile(backend="aot_eager", fullgraph=True)
        else:
            module.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)
    model = FullyShardedDataParallel(module)
    assert [unit.repeated for unit in model.units] == [False, *[True] * 5, False]
    poison(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    found = model.full_parameters().values()
    for ours, param in zip(found, expected.parameters(), strict=True):
        torch.testing.assert_close(ours, param.detach(), rtol=1e-5, atol=1e-6)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def check_units(rank, world_size, units, names):
    expected = replicas(3, rank)
    module = net()
    model = FullyShardedDataParallel(module, units=units(module))
    assert [unit.name for unit in model.units] == names
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    assert_same(model, expected)


BLOCKS = [f"blocks.{number}" for number in range(5)]
UNITS = {
    "one": (lambda m: [m], [""]),
    "some": (lambda m: [m.blocks[1], m.head], ["embed", *BLOCKS, "head"]),
    "nested": (
        lambda m: [*m.blocks, *(block.up for block in m.blocks)],
        ["embed", *(name + part for name in BLOCKS for part in (".up", "")), "head"],
    ),
    "predicate": (
        lambda m: lambda each: isinstance(each, nn.Linear),
        ["embed", *(name + part for name in BLOCKS for part in (".up", ".down")), "head"],
    ),
}


def check_unit_list(rank, world_size, name):
    units, names = UNITS[name]
    check_units(rank, world_size, units, names)


def check_ranks_that_call_different_units(rank, world_size):
    """Blocks of one size would otherwise be mixed up silently; the right order works again."""
    model = sharded(reshard_after_forward=False)
    order = list(model.module.blocks)
    other = [order[0], order[2], order[1], *order[3:]]

    def forward(blocks):
        x = model.module.embed(batch(0, rank))
        for block in blocks:
            x = block(x)
        return model.module.head(x).sum()

    model.module.forward = lambda: forward(other if rank == 1 else order)
    with pytest.raises(
        RuntimeError, match=r"about to run the reduce-scatter of gradients \(blocks\."
    ):
        model().backward()
    for blocks in (order, other):
        model.module.forward = lambda blocks=blocks: forward(blocks)
        model().backward()


def check_a_unit_on_its_own(rank, world_size):
    """A block called directly, outside the model's forward, is gathered too."""
    model, whole = sharded(), net()
    x = torch.randn(2, 3, 8)
    assert torch.equal(model.module.blocks[1](x), whole.blocks[1](x))
    assert model.module.blocks[1].up.weight.ndim == 1


CHECKS = [
    *((f"several forwards {s}", check_several_forwards, (s,)) for s in SETTINGS),
    ("retained graph", check_two_backwards_of_one_graph, ()),
    *(
        (f"accumulation {s} {in_place}", check_accumulation, (s, in_place))
        for s in SETTINGS
        for in_place in (False, True)
    ),
    *((f"no_sync {s}", check_no_sync, (s,)) for s in SETTINGS),
    *((f"returned {s}", check_returned_parameter, (s,)) for s in SETTINGS),
    *((f"dropped {s}", check_dropped_accumulation, (s,)) for s in SETTINGS),
    *((f"evaluation {s}", check_evaluation, (s,)) for s in SETTINGS),
    *(
        (f"exception in {where} {s}", check_exception, (s, where))
        for where in ("forward", "backward")
        for s in SETTINGS
    ),
    *((f"clipping {p}", check_clipping, (p,)) for p in (2.0, float("inf"))),
    ("scaler", check_scaler, ()),
    ("norms of shards", check_refused, ()),
    ("norms by hand", check_by_hand, ()),
    *(
        (f"{compute} reduced in {reduce}", check_low_precision, (compute, reduce))
        for compute, reduce in (
            (torch.bfloat16, None),
            (torch.bfloat16, torch.float32),
            (torch.float16, None),
        )
    ),
    ("thawing", check_thawing, ()),
    *((f"compiled {how}", check_compiled, (how,)) for how in ("in place", "wrapped")),
    *((f"units: {name}", check_unit_list, (name,)) for name in UNITS),
    ("a unit on its own", check_a_unit_on_its_own, ()),
    ("different units", check_ranks_that_call_different_units, ()),
]


@pytest.mark.parametrize("name", [name for name, _, _ in CHECKS])
def test_on_two_ranks(errors_on_two_ranks, name):
    assert not errors_on_two_ranks[name], errors_on_two_ranks[name]
