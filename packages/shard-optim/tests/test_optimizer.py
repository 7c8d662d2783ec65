"""The sharded optimizer against the plain one: same parameters, same behaviour as an Optimizer."""

import copy
import inspect
import pickle
import re
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import run_ranks
from shard_optim import ShardedOptimizer, load, save
from shard_optim.optimizer_class import SHAPE_DEPENDENT, UNSUPPORTED


class Lion(torch.optim.Optimizer):
    """A user's own element-wise optimizer (sign of an interpolated momentum)."""

    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "calls": 0})

    @torch.no_grad()
    def step(self, closure=None, *, scale=1.0):
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_(momentum.lerp(p.grad, 1 - group["beta"]).sign(), alpha=-group["lr"] * scale)
                momentum.lerp_(p.grad, 0.01)


class CountsInGroups(torch.optim.Optimizer):
    """Counts steps in its groups, and passes over groups without parameters, as Apex's Adam."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["step"])


class RowNorm(torch.optim.Optimizer):
    """Keeps one number per row: it cannot work on flat slices, and we have never heard of it."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    rows = self.state[p].setdefault("rows", torch.zeros(p.shape[0], 2))
                    rows += 1
                    p.sub_(p.grad, alpha=group["lr"])


class Lamb(torch.optim.Optimizer):
    """A user's own shape-dependent optimizer: each step is scaled by the norms of its parameter."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 0.1)
                    ratio = p.norm() / (momentum.norm() + 1e-6)
                    p.sub_(momentum * (group["lr"] * ratio))


ELEMENTWISE = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-6}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.NAdam, {"weight_decay": 0.1}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (Lion, {}),
]


def test_every_torch_optimizer_is_compared_or_known_to_need_more():
    known = {*SHAPE_DEPENDENT, *UNSUPPORTED, *(cls for cls, _ in ELEMENTWISE)} - {Lion}
    optimizers = {
        cls
        for cls in vars(torch.optim).values()
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)
    }
    assert optimizers - {torch.optim.Optimizer} == known


class Toy(nn.Module):
    """Frozen, tied, ragged and empty parameters, and one that no loss reaches."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.inner = nn.Linear(7, 13, bias=False)
        self.norm = nn.LayerNorm(13)
        self.outer = nn.Linear(13, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, tokens):
        hidden = self.norm(self.inner(self.embed(tokens))).relu()
        return self.head(self.outer(hidden)) * self.frozen.sum() + self.empty.sum()


def toy():
    torch.manual_seed(0)
    return Toy()


def backward(model, step):
    """The same gradients on every rank."""
    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step))
    loss = model(tokens).square().mean()
    loss.backward()
    return loss


def pair(cls, *, model=None, groups=None, sharded=None, **kwargs):
    """The same model twice, under the plain and under the sharded optimizer."""
    models = [model or toy()]
    models.append(copy.deepcopy(models[0]))
    groups = groups or (lambda m: m.parameters())
    plain = cls(groups(models[0]), **kwargs)
    return models, plain, ShardedOptimizer(groups(models[1]), cls, **(sharded or {}), **kwargs)


def train(models, optimizers, steps, start=0):
    """Both optimizers get the first model's gradients: matrix kernels may round differently on
    the second model, whose parameters lie elsewhere in memory."""
    for step in range(start, start + steps):
        optimizers[0].zero_grad()
        backward(models[0], step)
        for source, target in zip(models[0].parameters(), models[1].parameters(), strict=True):
            target.grad = None if source.grad is None else source.grad.clone()
        for optimizer in optimizers:
            optimizer.step()


def assert_same(models, what=""):
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b), f"{what} {name} differs by {(a - b).abs().max()}"


def check_class(rank, world_size, names):
    for name in names:
        cls, kwargs = next((c, k) for c, k in ELEMENTWISE if c.__name__ == name)
        accepts_foreach = "foreach" in inspect.signature(cls).parameters
        for variant in [{"foreach": False}, {"foreach": True}] if accepts_foreach else [{}]:
            models, plain, sharded = pair(
                cls, sharded={"bucket_size_mb": 0.0002}, **kwargs, **variant
            )
            train(models, (plain, sharded), 5)
            assert_same(models, f"{name} {variant}")


def check_fused(rank, world_size):
    for cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        models, plain, sharded = pair(cls, lr=0.01, fused=True)
        train(models, (plain, sharded), 10)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            # The fused CPU kernels round the tail of a tensor differently from the vectorised
            # body, so where a slice ends is visible in the last bits.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def split_groups(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    return [
        {"params": matrices, "lr": 0.05, "weight_decay": 0.3},
        {"params": vectors, "betas": (0.5, 0.6)},
    ]


def check_schedule(rank, world_size):
    models, plain, sharded = pair(torch.optim.AdamW, groups=split_groups, lr=0.1)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=8) for o in (plain, sharded)]
    kept = list(sharded.param_groups)
    for step in range(8):
        train(models, (plain, sharded), 1, start=step)
        for scheduler in schedulers:
            scheduler.step()
    assert_same(models)
    assert all(a is b for a, b in zip(kept, sharded.param_groups, strict=True))
    assert [g["lr"] for g in plain.param_groups] == [g["lr"] for g in sharded.param_groups]


def check_counts(rank, world_size):
    """Of the small second group one rank owns everything, or each rank a part of it."""
    for partition in ("flat", "whole"):
        models, plain, sharded = pair(
            CountsInGroups, groups=split_groups, lr=0.1, sharded={"partition": partition}
        )
        train(models, (plain, sharded), 3)
        assert_same(models, partition)
        assert [group["step"] for group in sharded.param_groups] == [3, 3]
        owned = sharded.local.step_groups[0].all_fused()
        assert {fused.group for fused in owned} != {0, 1} or rank


def check_equal_numbers(rank, world_size):
    """Ranks that write a number otherwise have the same settings; a tensor is compared too."""
    lr, weight_decay = [(1, 0.0), (1.0, 0)][rank]
    models, plain, sharded = pair(torch.optim.AdamW, lr=lr, weight_decay=weight_decay)
    train(models, (plain, sharded), 2)
    assert_same(models)
    lr = torch.tensor(0.1 * (1 + rank))
    with pytest.raises(RuntimeError, match=r"lr = 0\.1000.* lr = 0\.2000"):
        ShardedOptimizer(toy().parameters(), torch.optim.AdamW, lr=lr, foreach=False)


def check_own_entries(rank, world_size):
    """Functions and objects that users keep in groups lie elsewhere on each rank."""
    elsewhere = [object() for _ in range(1000 * rank)]
    model = toy()
    own = {"params": model.parameters(), "schedule": lambda step: step, "owner": Lion}
    optimizer = ShardedOptimizer([own | {"tags": (object(),)}], torch.optim.AdamW)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    del elsewhere


def check_forgotten_state(rank, world_size):
    """An empty state that is assigned begins anew, with the same master copies."""
    for partition in ("flat", "whole"):
        models, plain, sharded = pair(torch.optim.AdamW, lr=0.1, sharded={"partition": partition})
        for step in range(0, 6, 2):
            train(models, (plain, sharded), 2, start=step)
            plain.state, sharded.state = defaultdict(dict), {}
            assert not sharded.state
        assert_same(models, partition)
    train(models, (plain, sharded), 1)
    held = next(p for p, own in sharded.state.items() if own["exp_avg"].numel())
    others = torch.full_like(sharded.state[held]["exp_avg"], 7.0)
    other = nn.Parameter(torch.zeros(2))
    for change in (
        lambda: sharded.state.clear(),
        lambda: sharded.state.pop(held),
        lambda: sharded.state.update({held: {}}),
        lambda: sharded.state.__setitem__(held, {"exp_avg": others}),
        lambda: sharded.state.__setitem__(other, {}),
        lambda: sharded.state[held].__setitem__("exp_avg", others),
        lambda: sharded.state[held].__setitem__("exp_avg", sharded.state[held]["exp_avg"].half()),
        lambda: sharded.state[held].update(exp_avg=others),
        lambda: sharded.state[other].__setitem__("exp_avg", others),
    ):
        with pytest.raises(TypeError, match=r"must be changed as a whole.*load_state_dict"):
            change()
    for own in sharded.state.values():  # as Lightning moves state
        for key, value in own.items():
            own[key] = value.clone()
    assert not sharded.state[other]
    with pytest.raises(KeyError):
        sharded.state[held]["missing"]
    copied = copy.deepcopy(sharded.state)
    assert type(copied) is dict
    assert len(copied) == len(sharded.state)
    sharded.state[held]["exp_avg"].zero_()  # in place, as before
    assert not sharded.state[held]["exp_avg"].any()
    model = nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-4, master_dtype=torch.float32
    )
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    masters = {n: state["master_param"].clone() for n, state in optimizer.local.states().items()}
    optimizer.state = {}
    for number, state in optimizer.local.states().items():
        assert state.keys() == {"master_param"}
        assert torch.equal(state["master_param"], masters[number])


def check_edited_lists(rank, world_size):
    """Parameters are known by their places in the lists of the groups."""

    def move(groups):
        groups[1]["params"].append(groups[0]["params"].pop())

    edits = (lambda groups: groups[0]["params"].pop(), lambda groups: groups.reverse(), move)
    for edit in edits:
        model = toy()
        optimizer = ShardedOptimizer(split_groups(model), torch.optim.AdamW)
        for step in range(2):
            optimizer.zero_grad()
            backward(model, step)
            if step:
                edit(optimizer.param_groups)
                with pytest.raises(RuntimeError, match="must list the parameters that they were"):
                    optimizer.step()
            else:
                optimizer.step()


def check_growth(rank, world_size):
    def start(model):
        return [p for name, p in model.named_parameters() if not name.startswith("outer")]

    models, plain, sharded = pair(torch.optim.Adam, groups=start, lr=0.01)
    train(models, (plain, sharded), 3)
    for model, optimizer in zip(models, (plain, sharded), strict=True):
        optimizer.add_param_group({"params": model.outer.parameters(), "lr": 0.1})
    train(models, (plain, sharded), 3, start=3)
    for model in models:
        model.frozen.requires_grad_(True)
    train(models, (plain, sharded), 3, start=6)
    assert_same(models)
    assert not torch.equal(models[1].frozen, toy().frozen)


def check_tiny(rank, world_size):
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.fill_(1.0)
    models, plain, sharded = pair(torch.optim.AdamW, model=model, lr=0.1)
    for _ in range(4):
        for m, optimizer in zip(models, (plain, sharded), strict=True):
            m(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(models)
    return len(sharded.state)


@pytest.mark.parametrize("world_size", [1, 4])
def test_fewer_elements_than_ranks(world_size):
    outcomes = run_ranks(check_tiny, world_size)
    assert sum(outcome.value for outcome in outcomes) == 2


def check_mixed(rank, world_size):
    model = nn.Sequential(
        nn.Linear(5, 9), nn.Linear(9, 3).to(torch.float64), nn.Linear(3, 2).to(torch.bfloat16)
    )
    model.append(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))
    models, plain, sharded = pair(torch.optim.AdamW, model=model, lr=0.1)
    for step in range(5):
        for m, optimizer in zip(models, (plain, sharded), strict=True):
            generator = torch.Generator().manual_seed(step)
            for p in m.parameters():
                noise = torch.randn(p.shape, generator=generator)
                p.grad = noise.to(p.dtype) if p.ndim == 4 else noise.to(p)
            optimizer.step()
    assert_same(models)
    assert models[1][3].weight.stride() == models[0][3].weight.stride()


def check_whole(rank, world_size):
    model = nn.Sequential(nn.Linear(6, 9, bias=False), nn.Linear(9, 5, bias=False))
    for cls in (torch.optim.Adafactor, torch.optim.Muon, Lamb, torch.optim.AdamW):
        models, plain, sharded = pair(cls, model=model, sharded={"partition": "whole"}, lr=0.1)
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            for pa, pb in zip(models[0].parameters(), models[1].parameters(), strict=True):
                pa.grad = torch.randn(pa.shape, generator=generator)
                pb.grad = pa.grad.clone()
            plain.step()
            sharded.step()
        assert_same(models)
        assert len(sharded.state) == 1


def check_behaviour(rank, world_size):
    model = toy()
    optimizer = ShardedOptimizer(model.named_parameters(), Lion, lr=0.01)
    assert isinstance(optimizer, torch.optim.Optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        optimizer.zero_grad()
        return backward(model, 0)

    before = [p.detach().clone() for p in model.parameters()]
    loss = optimizer.step(closure, scale=0.0)
    assert loss.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.step(closure, scale=1.0)
    assert not torch.equal(before[0], model.embed.weight)
    assert calls == ["before", "after"] * 2
    assert optimizer.param_groups[0]["calls"] == 2
    owned = sum(state["momentum"].numel() for state in optimizer.state.values())
    total = sum(p.numel() for p in model.parameters() if p.requires_grad and p.grad is not None)
    assert owned < total
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.name_of(3) == "embed.weight"


def check_masters(rank, world_size):
    model = nn.Linear(16, 16, bias=False).to(torch.bfloat16)
    start = model.weight.detach().float()
    optimizer = ShardedOptimizer(
        model.parameters(), torch.optim.SGD, lr=1e-4, master_dtype=torch.float32
    )
    for _ in range(200):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    expected = torch.nn.Parameter(start.clone())
    reference = torch.optim.SGD([expected], lr=1e-4)
    for _ in range(200):
        expected.grad = torch.ones_like(expected)
        reference.step()
    assert torch.equal(model.weight, expected.to(torch.bfloat16))
    assert not torch.equal(model.weight.float(), start)

    # What is written into parameters counts; elements that keep their value keep their master.
    with torch.no_grad():
        model.weight[:8] *= 2
        expected[:8] = 2 * expected[:8].to(torch.bfloat16)
    for _ in range(50):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        expected.grad = torch.ones_like(expected)
        reference.step()
    assert torch.equal(model.weight, expected.to(torch.bfloat16))
    again = nn.Linear(16, 16, bias=False).to(torch.bfloat16)
    model.load_state_dict(again.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert torch.equal(model.weight, again.weight)


def check_refusals(rank, world_size):
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match='Pass partition="whole"'):
        ShardedOptimizer([weight], torch.optim.Muon)
    with pytest.raises(ValueError, match="but got LBFGS, which does not"):
        ShardedOptimizer([weight], torch.optim.LBFGS, partition="whole")
    with pytest.raises(ValueError, match="differentiable must be False"):
        ShardedOptimizer([weight], torch.optim.SGD, differentiable=True)
    with pytest.raises(ValueError, match="'flat', 'whole'"):
        ShardedOptimizer([weight], torch.optim.SGD, partition="rows")
    for size in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="bucket_size_mb must be positive and finite, but got"):
            ShardedOptimizer([weight], torch.optim.SGD, bucket_size_mb=size)
    for dtype in ("fp32", torch.int32):
        with pytest.raises(ValueError, match=r"master_dtype must be None or a floating-point"):
            ShardedOptimizer([weight], torch.optim.SGD, master_dtype=dtype)
    with pytest.raises(TypeError, match=r"communication must have the methods .*, but got int"):
        ShardedOptimizer([weight], torch.optim.SGD, communication=3)
    for params in (nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)), None):
        with pytest.raises(TypeError, match=rf"but got one {type(params).__name__}\. Pass model"):
            ShardedOptimizer(params, torch.optim.SGD)
    with pytest.raises(TypeError, match=r"subclass of torch\.optim\.Optimizer"):
        ShardedOptimizer([weight], "AdamW")
    with pytest.raises(TypeError, match="learning_rate"):
        ShardedOptimizer([weight], torch.optim.SGD, learning_rate=1.0)
    with pytest.raises(TypeError, match="got one tensor"):
        ShardedOptimizer(weight, torch.optim.SGD)
    for params in ([], [{"params": []}, {"params": iter([])}]):
        with pytest.raises(ValueError, match="at least one parameter, but got none"):
            ShardedOptimizer(params, torch.optim.SGD)
    with pytest.raises(ValueError, match=r"must be real, but got .* of torch\.complex64"):
        ShardedOptimizer([nn.Parameter(weight.to(torch.complex64))], torch.optim.SGD)
    for refuse in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match=r"shard_optim\.save\(\) or full_state\(\)"):
            refuse(ShardedOptimizer([nn.Parameter(torch.zeros(4))], torch.optim.SGD))
    gaps = nn.Parameter(torch.zeros(4, 8)[:, ::2])
    with pytest.raises(ValueError, match="one dense block"):
        ShardedOptimizer([gaps], torch.optim.SGD)
    optimizer = ShardedOptimizer([weight], torch.optim.SGD, overlap="next-forward")
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, but got str"):
        optimizer.attach("model")
    for max_norm in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm must be at least 0, but got"):
            optimizer.clip_grad_norm_(max_norm)
    with pytest.raises(TypeError, match=r"state_dict must be what .*, but got NoneType"):
        optimizer.load_state_dict(None)
    for number in (-1, 1):
        with pytest.raises(IndexError, match=rf"index must be .*, but got {number}\."):
            optimizer.name_of(number)
    plain = torch.optim.SGD([weight])
    for call in (save, load):
        with pytest.raises(TypeError, match=r"optimizer must be a ShardedOptimizer.*, but got SGD"):
            call("folder", optimizer=plain)
    optimizer = ShardedOptimizer([weight], RowNorm)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="RowNorm keeps 'rows'"):
        optimizer.step()
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [weight]})
    torch.manual_seed(0)
    table = nn.Embedding(8, 2, sparse=True)
    optimizer = ShardedOptimizer(table.parameters(), torch.optim.SGD)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


def test_a_process_group_is_required():
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"Call torch\.distributed\.init_process_group"):
        ShardedOptimizer([nn.Parameter(torch.zeros(2))], torch.optim.SGD)


def check_disagreement(rank, world_size, what):
    sizes = [4, 5] if what == "shape" and rank == 1 else [4, 6]
    params = [nn.Parameter(torch.zeros(size)) for size in sizes]
    cls = torch.optim.Adam if what == "class" and rank == 1 else torch.optim.AdamW
    lr = 0.2 if what == "lr" and rank == 1 else 0.1
    params = params[:1] if what == "count" and rank == 1 else params
    if what == "strides":  # one rank's in another memory format
        matrix = torch.zeros(2, 3)
        params.append(nn.Parameter(matrix if rank == 0 else matrix.T.contiguous().T))
    if what == "group":
        optimizer = ShardedOptimizer(params, cls, lr=lr)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(rank + 1))]})
    else:
        size = 2 if what == "bucket" and rank == 1 else 1
        ShardedOptimizer(params, cls, lr=lr, bucket_size_mb=size)


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("shape", r"rank 0: group 0: parameter 1  \(6,\).*; rank 1: .*parameter 1  \(5,\)"),
        ("class", r"rank 0: .*AdamW, .*; rank 1: .*Adam,"),
        ("lr", r"rank 0: .*lr = 0\.1; rank 1: .*lr = 0\.2"),
        ("count", r"rank 0: .*parameter 1 .*; rank 1: nothing"),
        ("strides", r"rank 0: .*strides \(3, 1\).*; rank 1: .*strides \(1, 2\)"),
        ("bucket", r"rank 0: .*bucket_size_mb 1, .*; rank 1: .*bucket_size_mb 2,"),
        ("group", r"rank 0: group 1: parameter 0  \(1,\).*; rank 1: .*\(2,\)"),
    ],
)
def test_every_rank_names_the_first_disagreement(what, difference):
    # The launcher ends ranks before the group's timeout, so no collective waits for it.
    outcomes = run_ranks(check_disagreement, 2, what, check=False, collective_timeout=600)
    for outcome in outcomes:
        assert outcome.error is not None
        assert re.search(difference, outcome.error), outcome.error


def test_every_element_wise_optimizer_matches_bitwise_on_three_ranks():
    run_ranks(check_class, 3, [cls.__name__ for cls, _ in ELEMENTWISE], timeout=120.0)


CHECKS = [
    *((f"bitwise {cls.__name__}", check_class, ([cls.__name__],)) for cls, _ in ELEMENTWISE),
    ("fused CPU kernels match to rounding", check_fused, ()),
    ("groups and schedulers", check_schedule, ()),
    ("counts in groups", check_counts, ()),
    ("equal numbers", check_equal_numbers, ()),
    ("own entries of groups", check_own_entries, ()),
    ("forgotten state", check_forgotten_state, ()),
    ("edited lists of parameters", check_edited_lists, ()),
    ("a group added and a parameter unfrozen mid-training", check_growth, ()),
    ("mixed dtypes and memory formats", check_mixed, ()),
    ("whole parameters for shape-dependent optimizers", check_whole, ()),
    ("behaves like an optimizer", check_behaviour, ()),
    ("master copies keep small updates", check_masters, ()),
    ("refusals name the remedy", check_refusals, ()),
]


@pytest.mark.parametrize("check", [name for name, _, _ in CHECKS])
def test_on_two_ranks(check, errors_on_two_ranks):
    assert not errors_on_two_ranks[check], errors_on_two_ranks[check]
