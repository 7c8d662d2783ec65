"""Parameters in shards of unusual modules: trained like averaged replicas, bit for bit in fp32."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fully_sharded_models import average_gradients, poison
from ranks import run_ranks
from shard_optim import FullyShardedDataParallel

WIDTH = 8


class Block(nn.Module):
    def __init__(self, hidden=13):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def blocks(kind=Block, depth=3):
    return nn.Sequential(*(kind() for _ in range(depth)))


class Repeats(nn.Module):
    """One block called several times and under two names, between others (ALBERT)."""

    def __init__(self):
        super().__init__()
        first, second = Block(), Block()
        self.blocks = nn.ModuleList([first, second, first])

    def forward(self, x):
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return x


class Crumbs(Block):
    """Parameters without elements, without dimensions, and with fewer elements than ranks."""

    def __init__(self):
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.single = nn.Parameter(torch.ones(1, 1))
        self.row = nn.Parameter(torch.ones(1, 3))

    def forward(self, x):
        x = x * self.scale + self.nothing.sum() + self.row.sum()
        return super().forward(x) * self.single


class TwoDtypes(Block):
    def __init__(self):
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, x):
        return super().forward(x) + self.low(x.bfloat16()).float()


class Adapted(Block):
    """A frozen matrix and a trainable product of two thin ones (LoRA)."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH))
        self.b = nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.a.t() @ self.b.t()


class SharedInside(Block):
    """One matrix under two names in a block, read without a call of the layer that holds it."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(WIDTH, 13)
        self.again.weight = self.up.weight

    def forward(self, x):
        return super().forward(x) + nn.functional.linear(x, self.again.weight) @ self.up.weight


class Strided(Block):
    def __init__(self):
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(WIDTH, 5).t())

    def forward(self, x):
        return super().forward(x) + x @ self.transposed.t() @ self.transposed


class Normed(Block):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.up)
        nn.utils.parametrizations.orthogonal(self.down)


class Statistics(Block):
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(x) + self.batch_norm(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    """Torch's own, which reads its children's weights without calling them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return x + self.layer(x)[0]


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    note: str = "a note"


class Named(NamedTuple):
    value: torch.Tensor
    nothing: None = None


class Returns(Block):
    """A block whose outputs are in a container, of which the next block takes the value."""

    make = staticmethod(lambda x: x)
    take = staticmethod(lambda x: x)

    def forward(self, x):
        x = x if isinstance(x, torch.Tensor) else self.take(x)
        return self.make(super().forward(x))


class ReturnsDict(Returns):
    make = staticmethod(lambda x: {"value": x, "nothing": None, "numbers": [1, x.detach()]})
    take = staticmethod(lambda x: x["value"])


class ReturnsDataclass(Returns):
    make = staticmethod(lambda x: {"results": [Result(x)]})
    take = staticmethod(lambda x: x["results"][0].value)


class ReturnsNamed(Returns):
    make = Named
    take = staticmethod(lambda x: x.value)


class TwoOutputs(Block):
    """The second output is in no loss."""

    def forward(self, x):
        x = x[0] if isinstance(x, tuple) else x
        return super().forward(x), self.up(x)


class Detached(Block):
    """Only its own parameters get gradients, none the blocks before."""

    def forward(self, x):
        return super().forward(x.detach())


class InPlace(Block):
    def forward(self, x):
        x = super().forward(x)
        return x.mul_(0.5).relu_()


class Passes(Block):
    """Hands its input through, beside what it computes."""

    def forward(self, x):
        x = x[0] if isinstance(x, tuple) else x
        return super().forward(x), x


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class OnlySmall(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x)


class Nested(nn.Module):
    """Blocks in blocks, and a matrix of the model's own between them."""

    def __init__(self):
        super().__init__()
        self.outer = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(3))
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        for each in self.outer:
            x = each(x) @ self.mix
        return x


MODULES = {
    "plain": blocks,
    "repeats": Repeats,
    "crumbs": lambda: blocks(Crumbs),
    "two dtypes": lambda: blocks(TwoDtypes),
    "adapters": lambda: blocks(Adapted),
    "shared inside": lambda: blocks(SharedInside),
    "strided": lambda: blocks(Strided),
    "parametrized": lambda: blocks(Normed),
    "statistics": lambda: blocks(Statistics),
    "attention": lambda: blocks(Attention),
    "recurrent": lambda: blocks(Recurrent),
    "dict": lambda: blocks(ReturnsDict),
    "data class": lambda: blocks(ReturnsDataclass),
    "named tuple": lambda: blocks(ReturnsNamed),
    "two outputs": lambda: blocks(TwoOutputs),
    "detached": lambda: blocks(Detached),
    "in place": lambda: blocks(InPlace),
    "input passed on": lambda: blocks(Passes),
    "checkpointed": lambda: blocks(Checkpointed),
    "only small": OnlySmall,
    "one matrix": lambda: nn.Linear(WIDTH, WIDTH),
    "nested": Nested,
}


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 5, WIDTH, generator=generator)


def tensor_of(outputs):
    while not isinstance(outputs, torch.Tensor):
        if dataclasses.is_dataclass(outputs):
            outputs = outputs.value
        elif isinstance(outputs, dict):
            outputs = next(iter(outputs.values()))
        else:
            outputs = outputs[0]
    return outputs


def made(name):
    torch.manual_seed(0)
    return MODULES[name]()


def check_module(rank, world_size, name, settings):
    expected, model = made(name), FullyShardedDataParallel(made(name), **settings)
    poison(model)
    for each in (expected, model):
        trainable = [param for param in each.parameters() if param.requires_grad]
        # A small rate and a large eps, because more than two ranks may add up in another order.
        optimizer = torch.optim.AdamW(trainable, lr=0.005, eps=1e-3)
        for step in range(3):
            optimizer.zero_grad()
            tensor_of(each(batch(step, rank))).float().square().mean().backward()
            if each is expected:
                average_gradients(each)
            optimizer.step()
    found = model.full_parameters()
    assert list(found) == [name for name, _ in expected.named_parameters()]
    for key, param in expected.named_parameters():
        if world_size <= 2:
            assert torch.equal(found[key], param), (key, (found[key] - param).abs().max())
        else:
            torch.testing.assert_close(found[key], param.detach(), rtol=1e-5, atol=1e-6)


def trained_alike(rank, train, **settings):
    """``train(model, average)`` of replicas and of shards, whose parameters must be equal then."""
    expected, model = made("plain"), FullyShardedDataParallel(made("plain"), **settings)
    train(expected, lambda: average_gradients(expected))
    train(model, lambda: None)
    found = model.full_parameters()
    for name, param in expected.named_parameters():
        assert torch.equal(found[name], param), name


def check_two_optimizers(rank, world_size):
    """Each over a part of the parameters, of large and small ones alike."""

    def train(model, average):
        params = list(model.parameters())
        optimizers = [torch.optim.SGD(params[::2], 0.1), torch.optim.AdamW(params[1::2], 0.05)]
        for step in range(3):
            model.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            average()
            for optimizer in optimizers:
                optimizer.step()

    trained_alike(rank, train)


def check_two_models(rank, world_size):
    """One model's output is the other's input: one backward passes through both."""
    plain = [made("plain"), made("attention")]
    models = [FullyShardedDataParallel(made(name)) for name in ("plain", "attention")]
    for first, second in (plain, models):
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (first, second)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            second(first(batch(step, rank))).square().mean().backward()
            for each in plain:
                average_gradients(each)
            for optimizer in optimizers:
                optimizer.step()
    for expected, model in zip(plain, models, strict=True):
        found = model.full_parameters()
        for name, param in expected.named_parameters():
            assert torch.equal(found[name], param), name


def check_checkpoint_around_all(rank, world_size, use_reentrant):
    def train(model, average):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            x = batch(step, rank).requires_grad_()
            checkpoint(model, x, use_reentrant=use_reentrant).square().mean().backward()
            average()
            optimizer.step()

    trained_alike(rank, train)


def check_gradient_of_inputs(rank, world_size):
    """It changes no parameter's gradient, and the next step is as if it had not been asked for."""

    def train(model, average):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            x = batch(9, rank).requires_grad_()
            (grad,) = torch.autograd.grad(model(x).square().mean(), x)
            assert grad.count_nonzero() == grad.numel()
            assert all(param.grad is None for param in model.parameters())
            model(batch(step, rank)).square().mean().backward()
            average()
            optimizer.step()
            optimizer.zero_grad()

    trained_alike(rank, train)


def check_gradients_of_gradients(rank, world_size):
    """A penalty on the gradient: right where all weights are kept, refused where they are not."""

    def train(model, average):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            x = batch(step, rank).requires_grad_()
            loss = model(x).square().mean()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + grad.square().sum()).backward()
            average()
            optimizer.step()

    trained_alike(rank, train, reshard_after_forward=False)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*Pass reshard_after_forward=False"):
        trained_alike(rank, train)


def check_derivatives_of_torch_func(rank, world_size):
    """Refused before anything is sent; many inputs at a time are computed, and training goes on."""

    def train(model, average):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            x = batch(step, rank)
            if isinstance(model, FullyShardedDataParallel):
                with pytest.raises(
                    RuntimeError, match=r"derivative of torch\.func\. Call backward"
                ):
                    torch.func.grad(lambda x: model(x).sum())(x)
                with pytest.raises(
                    RuntimeError, match=r"derivative of torch\.func\. Call backward"
                ):
                    torch.func.jvp(model, (x,), (x,))
                with torch.no_grad():
                    torch.testing.assert_close(torch.func.vmap(model)(x), model(x))
            model(x).square().mean().backward()
            average()
            optimizer.step()

    trained_alike(rank, train)


def check_hooks_that_raise(rank, world_size):
    """A hook on the output, on a parameter, on a block: the next step is a new one."""

    def fail(*_):
        raise ArithmeticError

    def train(model, average):
        block = model.module[2] if isinstance(model, FullyShardedDataParallel) else model[2]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            for hooked in (0, 1, 2, None):
                optimizer.zero_grad()
                outputs = model(batch(step, rank))
                if hooked == 0:
                    handle = outputs.register_hook(fail)
                elif hooked == 1:
                    handle = block.up.weight.register_post_accumulate_grad_hook(fail)
                elif hooked == 2:
                    handle = block.down.register_full_backward_hook(fail)
                    outputs = model(batch(step, rank))
                if hooked is None:
                    outputs.square().mean().backward()
                else:
                    with pytest.raises(ArithmeticError):
                        outputs.square().mean().backward()
                    handle.remove()
            average()
            optimizer.step()

    trained_alike(rank, train)


class Box:
    """Hides a tensor from torch's pytree utilities."""

    def __init__(self, value):
        self.value = value


class Boxed(Returns):
    make = Box
    take = staticmethod(lambda box: box.value)


class Stores(nn.Linear):
    """Keeps its output as an attribute."""

    def forward(self, x):
        self.output = super().forward(x)


class StoresLoss(nn.Module):
    """A whole model whose forward returns nothing."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x):
        self.inner(x @ self.scale)
        self.loss = self.inner.output.square().mean()


def check_outputs_of_none(rank, world_size):
    """Refused where gradients are needed, before anything reads weights that are gone."""
    for module, name in (
        (nn.Sequential(Stores(WIDTH, WIDTH)), "0"),
        (StoresLoss(Stores(WIDTH, WIDTH)), ""),
    ):
        model = FullyShardedDataParallel(module, units=[*module.children()])
        before = model.full_parameters()
        words = rf"{name}.* returned a NoneType. Return a tuple, .*no_grad"
        with pytest.raises(TypeError, match=words):
            model(batch(0, rank))
        with torch.no_grad():
            model(batch(0, rank))
        for key, value in model.full_parameters().items():
            assert torch.equal(value, before[key])


def check_hidden_outputs(rank, world_size):
    """A unit's must be found, whether its weights or its inputs get the gradient; others may."""
    with pytest.raises(TypeError, match=r"'0' returned a Box. Return a tuple, a dictionary or"):
        FullyShardedDataParallel(blocks(Boxed))(batch(0, rank))
    frozen = blocks(Boxed).requires_grad_(False)
    with pytest.raises(TypeError, match="'0' returned a Box"):
        FullyShardedDataParallel(frozen)(batch(0, rank).requires_grad_())
    frozen = FullyShardedDataParallel(blocks(Boxed).requires_grad_(False))
    assert frozen(batch(0, rank)).value.shape == (3, 5, WIDTH)

    class Around(nn.Module):
        """Holds no parameters of its own, and hides what its blocks return."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = blocks()

        def forward(self, x):
            return Box(self.blocks(x))

    model = FullyShardedDataParallel(Around())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(batch(0, rank)).value.sum().backward()
    with pytest.raises(RuntimeError, match=r"hide their tensors.*finish_gradient_synchronization"):
        optimizer.step()

    expected, model = Around(), FullyShardedDataParallel(Around())
    for each in (expected, model):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            each(batch(step, rank)).value.square().mean().backward()
            if each is expected:
                average_gradients(expected)
            else:
                model.finish_gradient_synchronization()
            optimizer.step()
    found = model.full_parameters()
    for name, param in expected.named_parameters():
        assert torch.equal(found[name], param), name


KEPT = ("repeats", "two outputs", "input passed on", "checkpointed", "shared inside")

CHECKS = [
    ("outputs of None", check_outputs_of_none, ()),
    *((name, check_module, (name, {})) for name in MODULES),
    *((f"{name}, kept", check_module, (name, {"reshard_after_forward": False})) for name in KEPT),
    ("two optimizers", check_two_optimizers, ()),
    ("two models", check_two_models, ()),
    ("checkpoint around all", check_checkpoint_around_all, (False,)),
    ("re-entrant checkpoint around all", check_checkpoint_around_all, (True,)),
    ("gradient of inputs", check_gradient_of_inputs, ()),
    ("gradients of gradients", check_gradients_of_gradients, ()),
    ("derivatives of torch.func", check_derivatives_of_torch_func, ()),
    ("hooks that raise", check_hooks_that_raise, ()),
    ("hidden outputs", check_hidden_outputs, ()),
]


@pytest.mark.parametrize("name", [name for name, _, _ in CHECKS])
def test_on_two_ranks(errors_on_two_ranks, name):
    assert not errors_on_two_ranks[name], errors_on_two_ranks[name]


def check_all(rank, world_size):
    for name in ("crumbs", "strided", "repeats"):
        check_module(rank, world_size, name, {})


@pytest.mark.parametrize("world_size", [1, 4])
def test_more_ranks_than_elements(world_size):
    run_ranks(check_all, world_size)
