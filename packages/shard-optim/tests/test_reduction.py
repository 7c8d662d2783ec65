"""Gradients reduced into shards, updated parameters gathered late: same training, less memory."""

import copy
import os
import pickle
import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_lite import BucketedDDP, ModelMismatchError
from ranks import run_ranks
from shard_optim import ShardedOptimizer
from shard_optim.refused_gradient import ReducedGradient
from whole_state import whole_optimizer

# Against plain training on the averaged gradients in fp32: the sharded model's parameters lie
# elsewhere in memory, which matrix kernels may answer with another rounding.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

VARIANTS = {
    "reduce": {"reduce_gradients": True},
    "overlap": {"overlap": "next-forward"},
    "both": {"reduce_gradients": True, "overlap": "next-forward"},
    "whole": {"reduce_gradients": True, "partition": "whole"},
}


class Net(nn.Module):
    """Tied and frozen weights; one parameter that nobody uses and one that only rank 0 uses."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].bias.requires_grad_(False)
        self.sometimes = nn.Linear(6, 6, bias=False)
        self.never = nn.Linear(2, 3)

    def forward(self, tokens, use_all=True):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x).relu()
        if use_all:
            x = x + self.sometimes(x)
        return self.head(x)


def net():
    torch.manual_seed(0)
    return Net()


def batch(step, rank):
    return torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model, step, rank):
    return model(batch(step, rank), use_all=rank == 0).square().mean()


def reference(world_size, steps, *, cls=torch.optim.AdamW, lr=0.05, micro=1, max_norm=None):
    """Plain training on the mean over ranks of their gradients."""
    model = net()
    optimizer = cls(model.parameters(), lr=lr)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            for rank in range(world_size):
                (loss_of(model, step * micro + part, rank) / world_size).backward()
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
    return model, norms


def make(model, variant, *, bucket_size_mb=0.0002, cls=torch.optim.AdamW, lr=0.05):
    settings = VARIANTS[variant]
    optimizer = ShardedOptimizer(
        model.named_parameters(), cls, lr=lr, bucket_size_mb=bucket_size_mb, **settings
    )
    if "overlap" in settings:
        optimizer.attach(model)
    return optimizer


def average(model, world_size):
    """What a data-parallel wrapper does, for variants that do not reduce."""
    for p in model.parameters():
        if p.requires_grad:
            present = torch.tensor([float(p.grad is not None)])
            dist.all_reduce(present)
            if present.item() > 0:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= world_size


def assert_close(model, expected):
    for (name, a), b in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")


def check_training(rank, world_size, variant):
    model = net()
    optimizer = make(model, variant)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        if variant == "overlap":
            average(model, world_size)
        else:
            assert any(p.grad is None for p in model.parameters() if p.requires_grad)
        optimizer.step()
    optimizer.wait()
    assert_close(model, reference(world_size, 4)[0])
    assert torch.equal(model.never.weight, net().never.weight)


def test_three_ranks():
    run_ranks(check_training, 3, "both")


def check_accumulation(rank, world_size):
    expected, _ = reference(world_size, 2, micro=2)
    for quiet in (True, False):
        model = net()
        optimizer = make(model, "both")
        for step in range(2):
            optimizer.zero_grad()
            if quiet:
                with optimizer.no_sync():
                    loss_of(model, 2 * step, rank).backward()
                assert model.embed.weight.grad is not None
            else:
                loss_of(model, 2 * step, rank).backward()
            loss_of(model, 2 * step + 1, rank).backward()
            optimizer.step()
        optimizer.wait()
        assert_close(model, expected)
    optimizer.zero_grad()
    with optimizer.no_sync():
        loss_of(model, 0, rank).backward()
    optimizer.step()  # nothing was reduced since the last step, so this reduces what is there
    optimizer.zero_grad()
    loss_of(model, 0, rank).backward()
    optimizer.local_gradients()
    optimizer._reducer.complete = False
    with optimizer.no_sync():
        loss_of(model, 0, rank).backward()
    with pytest.raises(RuntimeError, match=r"out of no_sync\(\)"):
        optimizer.step()


def check_clipping(rank, world_size):
    expected, norms = reference(world_size, 3, cls=torch.optim.SGD, lr=0.5, max_norm=0.1)
    model = net()
    optimizer = make(model, "both", cls=torch.optim.SGD, lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        norm = optimizer.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, norms[step], **CLOSE)
        assert norm > 0.1
        optimizer.step()
    optimizer.wait()
    assert_close(model, expected)

    model = net()
    optimizer = make(model, "reduce")
    loss_of(model, 0, 0).backward()
    largest = optimizer.clip_grad_norm_(1e9, norm_type=float("inf"))
    plain = net()
    loss_of(plain, 0, 0).backward()
    grads = [p.grad.abs().max() for p in plain.parameters() if p.grad is not None]
    torch.testing.assert_close(largest, torch.stack(grads).max(), **CLOSE)
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match="clip after the last backward"):
        optimizer.step()
    with pytest.raises(ValueError, match="norm_type must be positive, but got 0"):
        optimizer.clip_grad_norm_(1.0, norm_type=0)


def check_dropped_by_the_module(rank, world_size):
    """A batch is dropped by ``zero_grad()`` of the module, as in a program for replicas."""
    plain = net()
    reference_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    model = net()
    optimizer = make(model, "both")
    for step in range(4):
        for r in range(world_size):
            (loss_of(plain, step, r) / world_size).backward()
        loss_of(model, step, rank).backward()
        if step != 1:
            reference_optimizer.step()
            optimizer.step()
        plain.zero_grad()
        if step % 2:
            model.zero_grad()
        else:
            for param in model.parameters():
                param.grad = None
    optimizer.wait()
    assert_close(model, plain)

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = ShardedOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, reduce_gradients=True, bucket_size_mb=1e-4
    )
    model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) dropped them"):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    carries = next(p for p in model.parameters() if type(p.grad) is ReducedGradient)
    carries.grad = None
    with pytest.raises(RuntimeError, match="some parameters was set to None after"):
        optimizer.step()


def check_clipping_of_pending_gradients(rank, world_size):
    """An unused parameter keeps all gradients from being reduced before the step."""
    model = net()
    optimizer = make(model, "reduce")
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    for _ in range(2):
        scaler.scale(loss_of(model, 0, rank)).backward()
        for use in (
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
            lambda: nn.utils.clip_grad_value_(model.parameters(), 0.1),
            lambda: scaler.unscale_(torch.optim.SGD(model.parameters())),
        ):
            with pytest.raises(RuntimeError, match="is reduced into shards"):
                use()
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, 0, rank).backward()
    optimizer.step()
    assert_close(model, reference(world_size, 1)[0])


def check_returned_gradients(rank, world_size):
    """``torch.autograd.grad`` leaves what has been reduced as it is, and it is still refused."""
    model = net()
    optimizer = make(model, "reduce")
    loss_of(model, 0, rank).backward()
    trainable = [param for param in model.parameters() if param.requires_grad]
    torch.autograd.grad(loss_of(model, 1, rank), trainable, allow_unused=True)
    with pytest.raises(RuntimeError, match=r"optimizer\.clip_grad_norm_\(\)"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    assert_close(model, reference(world_size, 1)[0])


def check_double_precision(rank, world_size):
    norms = []
    for reduce in (True, False):
        model = net().double()
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.1, reduce_gradients=reduce
        )
        loss_of(model, 0, 0).backward()
        norms.append(optimizer.clip_grad_norm_(0.1))
        assert norms[-1].dtype == torch.float32
    plain = net().double()
    loss_of(plain, 0, 0).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1).float()
    for norm in norms:
        torch.testing.assert_close(norm, expected, **CLOSE)


class Recomputed(nn.Module):
    """One weight used by two re-entrant checkpoints: its hook fires twice in one backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x


def check_reentrant(rank, world_size):
    models = Recomputed(), Recomputed()
    plain = torch.optim.SGD(models[0].parameters(), lr=0.1)
    optimizer = ShardedOptimizer(
        models[1].parameters(), torch.optim.SGD, lr=0.1, reduce_gradients=True, bucket_size_mb=1e-5
    )
    for _ in range(3):
        for model, o in zip(models, (plain, optimizer), strict=True):
            o.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            o.step()
    assert_close(models[1], models[0])


def check_exact(rank, world_size):
    """The average of two ranks is exact, so the update must be too; NaN reaches every rank."""
    torch.manual_seed(0)
    start = [torch.randn(7, 3), torch.randn(5), torch.randn(())]
    params = [nn.Parameter(t.clone()) for t in start]
    expected = [nn.Parameter(t.clone()) for t in start]
    optimizer = ShardedOptimizer(
        params, torch.optim.AdamW, reduce_gradients=True, lr=0.1, bucket_size_mb=1e-4
    )
    plain = torch.optim.AdamW(expected, lr=0.1)
    for step in range(5):
        drawn = [
            [
                torch.randn(t.shape, generator=torch.Generator().manual_seed(10 * step + r))
                for t in start
            ]
            for r in range(2)
        ]
        for position, (p, e) in enumerate(zip(params, expected, strict=True)):
            p.grad = drawn[rank][position].clone()
            e.grad = (drawn[0][position] + drawn[1][position]) / 2
        optimizer.step()
        plain.step()
    optimizer.zero_grad()
    for p, e in zip(params, expected, strict=True):
        assert torch.equal(p, e)
        assert p.grad is None
    for p in params:
        p.grad = torch.full_like(p, float("nan") if rank == 1 else 1.0)
    optimizer.step()
    assert all(p.isnan().all() for p in params)


class Sneaky(nn.Module):
    """Reads a submodule's weight without calling the submodule."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, x):
        return nn.functional.linear(self.outer(x), self.inner.weight)


def check_late_reads(rank, world_size):
    settings = {"lr": 0.1, "overlap": "next-forward"}
    model = net()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, **settings)
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"Call attach\(module\)"):
        optimizer.step()
    with pytest.raises(ValueError, match="is not in it"):
        optimizer.attach(nn.Linear(2, 2))
    optimizer.attach(model)
    with pytest.raises(RuntimeError, match="was called before"):
        optimizer.attach(model)
    optimizer.step()
    assert any(bucket._gather is not None for bucket in optimizer.buckets)
    saved = copy.deepcopy(model.state_dict())
    assert not any(bucket._gather is not None for bucket in optimizer.buckets)
    plain = net()
    reference_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    loss_of(plain, 0, 0).backward()
    reference_optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(saved[name], value, **CLOSE)

    with pytest.raises(RuntimeError, match="overlap is None"):
        ShardedOptimizer(net().parameters(), torch.optim.SGD, lr=0.1).attach(model)
    with pytest.raises(ValueError, match="overlap must be None or 'next-forward'"):
        ShardedOptimizer(net().parameters(), torch.optim.SGD, overlap="step")

    sneaky = Sneaky()
    optimizer = ShardedOptimizer(sneaky.named_parameters(), torch.optim.SGD, **settings)
    optimizer.attach(sneaky)
    sneaky(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"inner\.weight received a gradient although"):
        sneaky(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.wait()
    sneaky(torch.ones(1, 4)).sum().backward()


def check_copies_of_the_model(rank, world_size):
    """Copies and pickles wait, and do without the optimizer."""
    settings = {"lr": 0.1, "overlap": "next-forward", "reduce_gradients": True}
    for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        model = net()
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, **settings)
        optimizer.attach(model)
        loss_of(model, 0, 0).backward()
        optimizer.step()
        assert any(bucket._gather is not None for bucket in optimizer.buckets)
        other = copied(model)
        assert not any(bucket._gather is not None for bucket in optimizer.buckets)
        assert_close(model, other)
        loss_of(other, 1, 0).backward()
        other.load_state_dict(net().state_dict())
        assert other.state_dict().keys() == model.state_dict().keys()


def check_two_optimizers(rank, world_size):
    """Of one module: whoever lists its parameters waits for both."""
    settings = {"lr": 0.1, "overlap": "next-forward", "reduce_gradients": True}
    model = net()
    params = list(model.parameters())
    optimizers = [
        ShardedOptimizer(own, torch.optim.AdamW, **settings) for own in (params[:3], params[3:])
    ]
    for optimizer in optimizers:
        optimizer.attach(model)
    for read in (nn.Module.state_dict, copy.deepcopy, lambda model: list(model.parameters())):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, 0, 0).backward()
        for optimizer in optimizers:
            optimizer.step()
            assert any(bucket._gather is not None for bucket in optimizer.buckets)
        read(model)
        for optimizer in optimizers:
            assert not any(bucket._gather is not None for bucket in optimizer.buckets)


READS = {
    "state dict of the wrapper": lambda wrapped, _: wrapped.state_dict(),
    "parameters of the wrapper": lambda wrapped, _: list(wrapped.parameters()),
    "state dict of the module": lambda _, model: model.state_dict(),
    "state dict of a block": lambda _, model: model.blocks[1].state_dict(),
    "parameters of a list": lambda _, model: list(model.blocks.parameters()),
    "a copy of a block": lambda _, model: copy.deepcopy(model.blocks[1]),
    "loading a block": lambda _, model: model.head.load_state_dict(model.head.state_dict()),
}


def check_reads_inside(rank, world_size):
    """Parameters of modules inside the attached one, which is a data-parallel wrapper here."""
    for wrapper in (BucketedDDP, DistributedDataParallel):
        model = net()
        model.sometimes.requires_grad_(False)
        model.never.requires_grad_(False)
        wrapped = wrapper(model)
        optimizer = ShardedOptimizer(
            model.parameters(), torch.optim.AdamW, lr=0.1, overlap="next-forward"
        )
        optimizer.attach(wrapped)
        for name, read in READS.items():
            optimizer.zero_grad()
            loss_of(wrapped, 0, rank).backward()
            optimizer.step()
            assert any(bucket._gather is not None for bucket in optimizer.buckets)
            read(wrapped, model)
            assert not any(bucket._gather is not None for bucket in optimizer.buckets), name
        if wrapper is BucketedDDP:
            model.head.weight = nn.Parameter(torch.ones(11, 6))  # not through the old table
            with pytest.raises(ModelMismatchError, match=r"head\.weight was replaced"):
                loss_of(wrapped, 0, rank)


class Listing(nn.Module):
    """Reads parameters of modules that have no forward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.lists = nn.ModuleList(
            nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(2)) for _ in range(2)
        )
        self.table = nn.ParameterDict({"bias": nn.Parameter(torch.randn(4))})

    def forward(self, x):
        for each in (matrix for matrices in self.lists for matrix in matrices):
            x = (x @ each).tanh()
        return x * self.scale + self.table["bias"]


def check_lists_of_parameters(rank, world_size):
    settings = {"lr": 0.1, "overlap": "next-forward", "reduce_gradients": True}
    inner = Listing()
    models = [nn.Sequential(nn.Linear(4, 4), m) for m in (inner, copy.deepcopy(inner))]
    models[1][0].load_state_dict(models[0][0].state_dict())
    sharded = ShardedOptimizer(
        models[0].parameters(), torch.optim.AdamW, bucket_size_mb=1e-4, **settings
    )
    sharded.attach(models[0])
    plain = torch.optim.AdamW(models[1].parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip(models, (sharded, plain), strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert_close(*models)


def check_unfreezing(rank, world_size):
    model = net()
    optimizer = make(model, "both")
    expected = net()
    plain = torch.optim.AdamW(expected.parameters(), lr=0.05)
    for step in range(4):
        if step == 2:
            model.blocks[1].bias.requires_grad_(True)
            expected.blocks[1].bias.requires_grad_(True)
        for m, o in ((model, optimizer), (expected, plain)):
            o.zero_grad()
            loss_of(m, step, 0).backward()
            o.step()
    optimizer.wait()
    assert_close(model, expected)


def check_growing(rank, world_size):
    """A module added after attach() waits for its own group."""
    model, expected = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    settings = {"lr": 0.1, "overlap": "next-forward", "reduce_gradients": True}
    dist.broadcast(model[0].weight.data, 0)
    dist.broadcast(model[0].bias.data, 0)
    expected.load_state_dict(model.state_dict())
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, **settings)
    optimizer.attach(model)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            torch.manual_seed(1)
            model.append(nn.Linear(4, 2))
            expected.append(copy.deepcopy(model[1]))
            optimizer.add_param_group({"params": model[1].parameters()})
            plain.add_param_group({"params": expected[1].parameters()})
        for m, o in ((model, optimizer), (expected, plain)):
            o.zero_grad()
            m(torch.ones(2, 4)).square().sum().backward()
            o.step()
    assert any(bucket._gather is not None for bucket in optimizer.buckets)
    model(torch.ones(2, 4))
    assert not any(bucket._gather is not None for bucket in optimizer.buckets)
    assert_close(model, expected)


def check_killed(rank, world_size, where):
    model = net()
    optimizer = make(model, "reduce")
    loss_of(model, 0, rank).backward()
    optimizer.step()
    if where == "step" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss_of(model, 1, rank).backward()
    optimizer.step()
    if where == "save":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        whole_optimizer(optimizer)


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("step", r"the reduce-scatter of gradients .* rank 1 \(pid \d+\) has exited"),
        ("save", "the exchange of optimizer state descriptions"),
    ],
)
def test_a_killed_rank_ends_in_a_named_error(where, what):
    # The launcher ends ranks before the group's timeout, so only the broken connection can tell.
    survivor, killed = run_ranks(check_killed, 2, where, check=False, collective_timeout=600)
    assert killed.exitcode == -signal.SIGKILL
    assert survivor.error is not None
    assert re.search(rf"CollectiveError: .*{what}", survivor.error), survivor.error


CHECKS = [
    *((f"trains like plain: {variant}", check_training, (variant,)) for variant in VARIANTS),
    ("gradient accumulation", check_accumulation, ()),
    ("clipping by the norm over all ranks", check_clipping, ()),
    ("dropped by zero_grad() of the module", check_dropped_by_the_module, ()),
    ("clipping of pending gradients", check_clipping_of_pending_gradients, ()),
    ("gradients that are returned", check_returned_gradients, ()),
    ("clipping in double precision", check_double_precision, ()),
    ("a weight shared by re-entrant checkpoints", check_reentrant, ()),
    ("two ranks average exactly and NaN reaches all", check_exact, ()),
    ("early reads wait and hidden reads are found", check_late_reads, ()),
    ("copies of the model", check_copies_of_the_model, ()),
    ("two optimizers", check_two_optimizers, ()),
    ("reads inside the attached module", check_reads_inside, ()),
    ("lists of parameters", check_lists_of_parameters, ()),
    ("a parameter unfrozen mid-training", check_unfreezing, ()),
    ("a module added mid-training", check_growing, ()),
]


@pytest.mark.parametrize("check", [name for name, _, _ in CHECKS])
def test_on_two_ranks(check, errors_on_two_ranks):
    assert not errors_on_two_ranks[check], errors_on_two_ranks[check]
