"""Units updated during backward: the same training as by one step after it, bit for bit."""

import copy
import logging
import re
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fully_sharded_models import MODELS, Block, loss_of, net, poison
from ranks import run_ranks
from shard_optim import FullyShardedDataParallel, ShardedGradScaler, ShardedOptimizer, load, save

ADAMW = ("AdamW", {"lr": 0.05, "weight_decay": 0.1})
CLASSES = [
    *(("AdamW", {"lr": 0.05, "weight_decay": 0.1, how: True}) for how in ("foreach", "fused")),
    ("AdamW", {"lr": 0.05, "foreach": False, "amsgrad": True}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    *((name, {}) for name in ("Adagrad", "RMSprop", "NAdam", "ASGD", "Rprop")),
]


def made(module=None, how=ADAMW, *, early, settings=None, groups=False):
    """A sharded model, and its optimizer, which updates units in backward or not."""
    model = FullyShardedDataParallel(net() if module is None else module, **(settings or {}))
    poison(model)
    params = list(model.parameters())
    if groups:  # every unit has parameters in both
        params = [{"params": params[::2], "lr": 0.02}, {"params": params[1::2]}]
    optimizer = getattr(torch.optim, how[0])(params, **how[1])
    if early:
        model.update_in_backward(optimizer)
    return model, optimizer


def take_step(model, optimizer, step, rank):
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()


def assert_equal(model, expected):
    found, other = model.full_parameters(), expected.full_parameters()
    for name, value in other.items():
        assert torch.equal(found[name], value), f"{name}: {(found[name] - value).abs().max()}"


def assert_equal_state(optimizer, expected):
    ours, theirs = optimizer.state_dict(), expected.state_dict()
    assert set(ours["state"]) == set(theirs["state"])
    for number, state in theirs["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(ours["state"][number][key]), torch.as_tensor(value))
    for group in (*ours["param_groups"], *theirs["param_groups"]):
        group.pop("shard")["version"] = None
    assert ours["param_groups"] == theirs["param_groups"]


def check_same(rank, world_size, build, how=ADAMW, settings=None, groups=False):
    pairs = [
        made(build(), how, early=early, settings=settings, groups=groups) for early in (False, True)
    ]
    for step in range(3):
        for pair in pairs:
            take_step(*pair, step, rank)
    assert_equal(pairs[1][0], pairs[0][0])
    assert_equal_state(pairs[1][1], pairs[0][1])


def check_models(rank, world_size, names, settings):
    for name in names:
        check_same(rank, world_size, lambda name=name: small(**MODELS[name]), settings=settings)


def small(**settings):
    """Three blocks, so that two of them are gathered into one buffer."""
    return net(**{"depth": 3} | settings)


def check_classes(rank, world_size):
    for how in CLASSES:
        check_same(rank, world_size, small, how)
    check_same(rank, world_size, small, groups=True)


def check_dtypes(rank, world_size):
    for settings in (
        {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16},
        {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "prefetch": 2},
    ):
        check_same(rank, world_size, net, settings=settings)


def check_most_are_early(rank, world_size):
    """During backward all gradients of units are used; a rank without one leaves it to step()."""
    model, optimizer = made(net(unused=True), early=True)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    loss_of(model, 0, rank).backward()
    changed = {
        name for name, param in model.named_parameters() if not torch.equal(param, before[name])
    }
    own = re.compile(r"(embed|head|blocks\.\d\.(up|down)|blocks\.\d\.sometimes)\.weight")
    expected = {name for name in before if own.fullmatch(name)}
    if rank:
        expected = {name for name in expected if "sometimes" not in name}
    assert changed == expected, changed ^ expected
    left = {name for name, param in model.named_parameters() if type(param.grad) is torch.Tensor}
    assert all("bias" in name or "norm" in name for name in left), left
    optimizer.step()
    after = {
        name for name, param in model.named_parameters() if not torch.equal(param, before[name])
    }
    assert set(before) - after == {name for name in before if "never" in name}


def check_gradients_go_at_once(rank, world_size):
    """No more than three units have gradients at any time."""
    model, optimizer = made(net(depth=8), early=True)
    living = []

    def count(*_):
        stores = [unit.gradients for unit in model.units]
        living.append(sum(any(grad is not None for grad in store._reduced) for store in stores))

    optimizer.register_step_pre_hook(count)
    take_step(model, optimizer, 0, rank)
    assert len(living) == len(model.units) + 1
    assert max(living) <= 1


def check_accumulation(rank, world_size):
    pairs = [made(early=early) for early in (False, True)]
    for step in range(3):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            for part in range(2):
                with model.no_sync():
                    loss_of(model, 3 * step + part, rank).backward()
            loss_of(model, 3 * step + 2, rank).backward()
            optimizer.step()
    assert_equal(pairs[1][0], pairs[0][0])


def check_scheduler(rank, world_size):
    schedules = []
    for early in (False, True):
        model, optimizer = made(early=early)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
        for step in range(4):
            take_step(model, optimizer, step, rank)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                scheduler.step()
        schedules.append((model, scheduler.get_last_lr()))
    assert schedules[0][1] == schedules[1][1]
    assert_equal(schedules[1][0], schedules[0][0])


def check_freezing_later(rank, world_size):
    """Also a group that is added later, and hyperparameters that change."""
    pairs = [made(net(frozen=True), early=early) for early in (False, True)]
    for step in range(4):
        for model, optimizer in pairs:
            if step == 1:
                model.module.blocks[2].requires_grad_(True)
                model.module.blocks[0].up.weight.requires_grad_(False)
            if step == 2:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 7.0})
                optimizer.param_groups[0]["lr"] = 0.01
            take_step(model, optimizer, step, rank)
    assert_equal(pairs[1][0], pairs[0][0])


def check_resumed(rank, world_size, folder):
    """Saved with and loaded without, and the other way round."""
    for early in (False, True):
        model, optimizer = made(early=early)
        for step in range(2):
            take_step(model, optimizer, step, rank)
        save(f"{folder}/{early}", model, optimizer)
        part = copy.deepcopy(optimizer.state_dict())
        again, resumed = made(net(seed=1), early=not early)
        load(f"{folder}/{early}", again, resumed)
        third, loaded = made(net(seed=2), early=False)
        third.load_state_dict(model.state_dict())
        loaded.load_state_dict(part)
        if not early:
            third.update_in_backward(loaded)  # checks what was loaded before the first step
        for step in range(2, 4):
            for pair in ((model, optimizer), (again, resumed), (third, loaded)):
                take_step(*pair, step, rank)
        assert_equal(again, model)
        assert_equal(third, model)


class Counting(torch.optim.SGD):
    """Keeps a count in its groups, and shrinks its steps by it."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(param.grad, alpha=group["lr"] / group["count"])


def check_counts_in_groups(rank, world_size):
    models = []
    for early in (False, True):
        model = FullyShardedDataParallel(net())
        optimizer = Counting(model.parameters(), lr=0.1)
        if early:
            model.update_in_backward(optimizer)
        for step in range(3):
            take_step(model, optimizer, step, rank)
        assert optimizer.param_groups[0]["count"] == 3
        models.append(model)
    assert_equal(models[1], models[0])


def check_hooks(rank, world_size):
    """Hooks of parameters see averaged shards; an optimizer's own hooks run once for a unit."""
    models = []
    for early in (False, True):
        model, optimizer = made(early=early)
        seen, steps = set(), []
        for name, param in model.named_parameters():

            def halve(param, name=name, seen=seen):
                assert param.grad.shape == param.shape
                param.grad.mul_(0.5)
                seen.add(name)

            param.register_post_accumulate_grad_hook(halve)
        optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        for step in range(2):
            take_step(model, optimizer, step, rank)
        assert seen == {name for name, _ in model.named_parameters()}
        assert len(steps) == 2 * (1 + len(model.units) * early)
        models.append(model)
    assert_equal(models[1], models[0])


READS = {
    "torch's clipping": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "the model's clipping": lambda m, o: m.clip_grad_norm_(1.0),
    "torch's scaler": lambda m, o: scaled(torch.amp.GradScaler, o),
    "the sharded scaler": lambda m, o: scaled(ShardedGradScaler, o),
    "a sum": lambda m, o: [p.grad.sum() for p in m.parameters() if p.grad is not None],
    "zeros": lambda m, o: m.zero_grad(set_to_none=False),
}


def scaled(scaler, optimizer):
    scaler = scaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def check_reads(rank, world_size):
    model, optimizer = made(early=True)
    loss_of(model, 0, rank).backward()
    for name, read in READS.items():
        with pytest.raises(RuntimeError, match=r"after update_in_backward\(\), but got \w+\(\)"):
            read(model, optimizer)
        assert name
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # what is left are zeros
    model.zero_grad()
    take_step(model, optimizer, 1, rank)


def check_order(rank, world_size):
    """A second backward, a left-out zero_grad, a closure, gradients of gradients: refused."""
    expected, other = made(early=False)
    model, optimizer = made(early=True, settings={"reshard_after_forward": False})
    loss_of(model, 0, rank).backward()
    weights = [param.detach().clone() for param in model.parameters()]
    for zero in (False, True):
        if zero:
            optimizer.zero_grad()
            loss_of(expected, 0, rank).backward()
        with pytest.raises(RuntimeError, match=r"another backward before step\(\).*under no_sync"):
            loss_of(model, 0, rank).backward()
        with model.no_sync(), pytest.raises(RuntimeError, match="another backward before step"):
            loss_of(model, 0, rank).backward()
    assert all(map(torch.equal, weights, model.parameters()))
    model, optimizer = made(early=True, settings={"reshard_after_forward": False})
    loss_of(model, 0, rank).backward()
    for each in (optimizer, other):
        each.step()
    with pytest.raises(RuntimeError, match=r"another backward before zero_grad\(\)"):
        loss_of(model, 0, rank).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*leave update_in_backward"):
        loss_of(model, 0, rank).backward(create_graph=True)
    with pytest.raises(RuntimeError, match="Call the closure first"):
        optimizer.step(lambda: None)
    assert_equal(model, expected)
    for pair in ((model, optimizer), (expected, other)):
        take_step(*pair, 1, rank)
    assert_equal(model, expected)


def check_settings_after_backward(rank, world_size):
    """A setting that changes between backward and step is refused; then the step is right."""
    pairs = [made(early=early, groups=True) for early in (False, True)]
    (expected, other), (model, optimizer) = pairs
    for each in (other, optimizer):
        each.param_groups[1]["lr"] = torch.tensor(0.05)
    rate = optimizer.param_groups[1]["lr"]
    away = torch.zeros((), device="meta")  # as a tensor on a GPU, it cannot be read here
    optimizer.param_groups[0]["away"] = away
    for step, (number, key, change, back) in enumerate(
        (
            (0, "lr", 0.5, 0.02),
            (1, "weight_decay", 0.0, 0.1),
            (0, "betas", (0.5, 0.9), (0.9, 0.999)),
            (1, "lr", torch.tensor(0.1), rate),
            (0, "away", torch.zeros((), device="meta"), away),
        )
    ):
        group = optimizer.param_groups[number]
        for each in pairs:
            each[1].zero_grad()
            loss_of(each[0], step, rank).backward()
        group[key] = change
        before = [param.detach().clone() for param in model.parameters()]
        words = rf"{key} must be set before backward .* with {key}=.*, but got {key}="
        with pytest.raises(RuntimeError, match=words):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
        group[key] = back
        for each in pairs:
            each[1].step()
            each[1].param_groups[1]["lr"].mul_(0.9)  # as schedulers do, after the step
    assert_equal(model, expected)
    optimizer.zero_grad()
    loss_of(model, 9, rank).backward()
    rate.mul_(2)  # in place
    with pytest.raises(RuntimeError, match="lr must be set before backward"):
        optimizer.step()
    rate.div_(2)
    away.add_(1)
    with pytest.raises(RuntimeError, match="away must be set before backward"):
        optimizer.step()


class SharedBlock(nn.Module):
    """One block in two re-entrant checkpoints, each of which is a backward of its own."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(11, 8), Block()
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for _ in range(3):
            x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=True)
        return self.head(x)


def check_late_gradient(rank, world_size):
    torch.manual_seed(0)
    module = SharedBlock()
    model, _ = made(module, early=True, settings={"units": [module.block]})
    with pytest.raises(RuntimeError, match=r"block\.\w+\.weight in 'block' grew after its reduct"):
        loss_of(model, 0, rank).backward()


class Failing(torch.optim.SGD):
    fail = 0

    def step(self, closure=None):
        if self.fail:
            self.fail -= 1
            if not self.fail:
                raise ArithmeticError("the step of a unit")
        return super().step()


def check_failure(rank, world_size):
    """The optimizer is whole again, and training goes on."""
    model = FullyShardedDataParallel(net())
    optimizer = Failing(model.parameters(), lr=0.1)
    model.update_in_backward(optimizer)
    take_step(model, optimizer, 0, rank)
    groups, texts = optimizer.param_groups, []
    optimizer.zero_grad()
    optimizer.fail = 3
    loss = loss_of(model, 1, rank)
    with pytest.raises(ArithmeticError):
        loss.backward()
    assert optimizer.param_groups is groups
    assert len(groups[0]["params"]) == len(list(model.parameters()))
    log = logging.getLogger("shard_optim")
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    log.addHandler(handler)
    for step in range(2, 4):
        take_step(model, optimizer, step, rank)
    log.removeHandler(handler)
    assert len(texts) == 1
    assert "interrupted after it had updated 3 units" in texts[0], texts
    assert all(param.isfinite().all() for param in model.parameters())


def check_refused(rank, world_size):
    model = FullyShardedDataParallel(net())
    params, small = list(model.parameters()), list(model.replicated.params)
    matrices = [param for unit in model.units for param in unit.params]
    whole = {"partition": "whole"}
    for optimizer, error, text in (
        ("adamw", TypeError, "must be a plain torch.optim.Optimizer .*, but got str"),
        (
            ShardedOptimizer(params, torch.optim.SGD, lr=0.1),
            TypeError,
            "but got ShardedOptimizer",
        ),
        (
            ShardedOptimizer(params, torch.optim.SGD, lr=0.1, offload_state=True),
            TypeError,
            "but got ShardedOptimizer",
        ),
        (ShardedOptimizer(matrices, torch.optim.Muon, **whole), TypeError, "a plain torch.optim"),
        (torch.optim.SGD(matrices[1:]), ValueError, "SGD without embed.weight"),
        (torch.optim.SGD(small), ValueError, "SGD without embed.weight"),
        (torch.optim.SGD(nn.Linear(2, 2).parameters()), TypeError, "over the model's parameters"),
        (torch.optim.LBFGS(params), ValueError, "but got LBFGS, which does not"),
        (torch.optim.Adafactor(params), ValueError, 'partition="whole"'),
        (torch.optim.SGD(params, differentiable=True), ValueError, "differentiable must be False"),
    ):
        with pytest.raises(error, match=text):
            model.update_in_backward(optimizer)
    optimizer = torch.optim.SGD(matrices, lr=0.1)
    model.update_in_backward(optimizer)
    with pytest.raises(RuntimeError, match="must be called once"):
        model.update_in_backward(optimizer)
    rest = torch.optim.SGD(small, lr=0.1)
    expected, plain = made(how=("SGD", {"lr": 0.1}), early=False)
    for step in range(2):
        loss_of(model, step, rank).backward()
        for each in (optimizer, rest):
            each.step()
            each.zero_grad()
        take_step(expected, plain, step, rank)
    assert_equal(model, expected)


KEPT = ("tied", "frozen", "unused", "re-entrant", "not re-entrant")

CHECKS = [
    ("models", check_models, (tuple(MODELS), {})),
    ("models, kept", check_models, (KEPT, {"reshard_after_forward": False})),
    ("classes", check_classes, ()),
    ("dtypes", check_dtypes, ()),
    ("reads", check_reads, ()),
    ("order", check_order, ()),
    ("settings after backward", check_settings_after_backward, ()),
    *(
        (function.__name__.removeprefix("check_").replace("_", " "), function, ())
        for function in (
            check_most_are_early,
            check_gradients_go_at_once,
            check_accumulation,
            check_scheduler,
            check_freezing_later,
            check_counts_in_groups,
            check_hooks,
            check_failure,
            check_refused,
            check_late_gradient,
        )
    ),
]


@pytest.mark.parametrize("name", [name for name, _, _ in CHECKS])
def test_on_two_ranks(errors_on_two_ranks, name):
    assert not errors_on_two_ranks[name], errors_on_two_ranks[name]


def test_resumed(tmp_path):
    run_ranks(check_resumed, 2, str(tmp_path))


def check_four_ranks(rank, world_size):
    """Two pairs of replicas."""
    mesh = init_device_mesh("cpu", (2, 2))
    for name in ("tied", "unused"):
        build = lambda name=name: net(**MODELS[name])  # noqa: E731
        check_same(rank, world_size, build, settings={"process_group": mesh})


def test_on_four_ranks():
    run_ranks(check_four_ranks, 4)


def check_one_rank_without(rank, world_size):
    model = FullyShardedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 0:
        model.update_in_backward(optimizer)
    for step in range(2):
        take_step(model, optimizer, step, rank)


def test_a_rank_that_did_not_call_it_is_named():
    for outcome in run_ranks(check_one_rank_without, 2, check=False, timeout=60):
        assert re.search(r"called update_in_backward\(SGD\)", outcome.error), outcome.error
