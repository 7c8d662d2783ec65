"""Whole parameters out of shards and back, and checkpoints for any number of ranks."""

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lite import BucketedDDP
from fully_sharded_models import OPTIMIZERS, batch, loss_of, net
from ranks import run_ranks
from shard_optim import FullyShardedDataParallel, ShardedOptimizer, load, save
from shard_optim.fully_sharded.unit import Unit
from shard_optim.origin import sharded_of
from shard_optim.place import flat_slice
from whole_state import load_whole_model, load_whole_optimizer, whole_model, whole_optimizer


def model_with_everything():
    """Matrices that no world size divides, tied weights, a buffer, channels-last memory."""
    model = net(tied=True)
    model.register_buffer("calls", torch.tensor([3.0, 4.0]))
    model.register_buffer("scratch", torch.tensor([1.0]), persistent=False)
    model.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    return model


def whole_gradient(shape, step, index):
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(shape, generator=generator)


def update(model, optimizer, steps, *, reduced=False):
    """The same whole gradients on every rank, so that the number of ranks changes no bit.

    Args:
        reduced: whether the optimizer reduces the gradients of a backward pass.
    """
    for step in steps:
        if reduced:
            pairs = [
                (param, whole_gradient(param.shape, step, index))
                for index, param in enumerate(model.parameters())
            ]
            sum((param * grad).sum() for param, grad in pairs).backward()
            optimizer.step()
            continue
        for index, param in enumerate(model.parameters()):
            found = sharded_of(param)
            if found is not None and not found.place.replicated:
                place = found.place
                grad = whole_gradient(place.size, step, index)
                param.grad = flat_slice(grad, place.size, place.stride, *place.span)
            else:
                param.grad = torch.empty_like(param).copy_(whole_gradient(param.shape, step, index))
        optimizer.step()


def assert_same(model, expected):
    found = model.full_parameters()
    for name, param in expected.named_parameters():
        assert torch.equal(found[name], param), name


def check_leg(rank, world_size, folder, leg):
    """Loads what another number of ranks saved, compares it with plain training, trains on."""
    expected = model_with_everything()
    plain = OPTIMIZERS["adamw"](expected.parameters())
    update(expected, plain, range(2 * leg))
    module = model_with_everything()
    module.calls.zero_()
    model = FullyShardedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7, weight_decay=0.1)
    if leg:
        load(f"{folder}/{leg - 1}", model, optimizer)
        assert model.module.calls.tolist() == [3.0, 4.0]
        assert optimizer.param_groups[0]["lr"] == 0.05
    else:
        model.load_state_dict(model_with_everything().state_dict())
        optimizer.param_groups[0]["lr"] = 0.05
    assert_same(model, expected)
    update(model, optimizer, range(2 * leg, 2 * leg + 2))
    update(expected, plain, range(2 * leg, 2 * leg + 2))
    assert_same(model, expected)
    group = dist.new_group(backend="gloo")
    saving = save(f"{folder}/{leg}", model, optimizer, background_group=group)
    update(model, optimizer, [99])  # what is being saved does not change any more
    saving.result()
    with pytest.raises(FileExistsError, match="Save to a new folder"):
        save(f"{folder}/{leg}", model, optimizer)


def test_one_to_four_ranks_and_back(tmp_path):
    for leg, world_size in enumerate([1, 2, 3, 4, 2, 1]):
        run_ranks(check_leg, world_size, str(tmp_path), leg)


def check_exchange(rank, world_size, folder, stage):
    expected = model_with_everything()
    plain = OPTIMIZERS["adamw"](expected.parameters())
    update(expected, plain, range(2))

    model = FullyShardedDataParallel(model_with_everything())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    update(model, optimizer, range(2))
    save(f"{folder}/3", model, optimizer)
    smaller, larger = net(tied=True), model_with_everything()
    larger.more = nn.Linear(3, 3)
    for other, name in ((smaller, "conv.weight"), (larger, "more.weight")):
        with pytest.raises(ValueError, match=rf"of the same model|must hold model\.{name}"):
            load(f"{folder}/3", FullyShardedDataParallel(other))

    second = model_with_everything()
    second.load_state_dict(expected.state_dict())
    sharded = ShardedOptimizer(
        second.parameters(), torch.optim.AdamW, lr=0.7, reduce_gradients=stage == 2
    )
    load(f"{folder}/3", optimizer=sharded)
    update(second, sharded, [2], reduced=stage == 2)
    update(expected, plain, [2])
    for (name, a), b in zip(second.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(a, b), name
    save(f"{folder}/{stage}", optimizer=sharded)

    full = expected.state_dict()
    load_whole_model(model, full if rank == 0 else None)
    load(f"{folder}/{stage}", optimizer=optimizer)
    update(model, optimizer, [3])
    update(expected, plain, [3])
    assert_same(model, expected)


@pytest.mark.parametrize("stage", [1, 2])
def test_exchange_with_stages_1_and_2(tmp_path, stage):
    run_ranks(check_exchange, 2, str(tmp_path), stage)


def check_state_dicts(rank, world_size):
    whole = model_with_everything()
    model = FullyShardedDataParallel(model_with_everything())
    full = whole_model(model)
    if rank == 0:
        assert list(full) == list(whole.state_dict())
        for name, value in whole.state_dict().items():
            assert torch.equal(full[name], value), name
            assert full[name].stride() == value.stride(), name
    else:
        assert full is None
    if rank == 1:  # needs no other rank
        own = model.state_dict()
        assert list(own) == list(whole.state_dict())
        assert own["embed.weight"].shape == (44,)
    changed = {name: value + 1 for name, value in whole.state_dict().items()}
    model.load_state_dict(changed)
    for name, value in model.full_parameters().items():
        assert torch.equal(value, changed[name]), name
    model.load_state_dict(model.state_dict())  # a rank's own shards
    for name, value in model.full_parameters().items():
        assert torch.equal(value, changed[name]), name
    assert torch.equal(model.module.calls, changed["calls"])


def check_optimizer_state(rank, world_size):
    """To the plain class and back: a plain optimizer continues like the sharded one."""
    expected = model_with_everything()
    plain = torch.optim.AdamW(expected.parameters(), lr=0.05, weight_decay=0.1)
    model = FullyShardedDataParallel(model_with_everything())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    update(expected, plain, range(2))
    update(model, optimizer, range(2))
    full = whole_optimizer(optimizer)
    assert (full is None) == (rank > 0)
    if full is not None:
        for index, state in plain.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(full["state"][index][key], value), (index, key)
                assert full["state"][index][key].stride() == value.stride(), (index, key)
        plain.load_state_dict(full)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.7)
    load_whole_optimizer(fresh, plain.state_dict() if rank == 0 else None)
    assert fresh.param_groups[0]["lr"] == 0.05
    update(model, fresh, [2])
    update(expected, plain, [2])
    assert_same(model, expected)

    offloaded = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.7, offload_state=True)
    load_whole_optimizer(offloaded, plain.state_dict() if rank == 0 else None)
    full = whole_optimizer(offloaded)
    if full is not None:
        for index, state in plain.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(full["state"][index][key], value), (index, key)

    wrong = plain.state_dict()
    wrong["state"][0] = wrong["state"][0] | {"exp_avg": torch.zeros(2, 3)}
    for bad, message in (
        (wrong, r"'exp_avg' of parameter 0 has shape \(2, 3\)"),
        (torch.optim.SGD(net().blocks.parameters()).state_dict(), "groups of"),
        (None, "got NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            load_whole_optimizer(fresh, bad if rank == 0 else None)
    update(model, fresh, [3])
    update(expected, plain, [3])
    assert_same(model, expected)


def check_wrong_state_dicts(rank, world_size):
    model = FullyShardedDataParallel(net())
    before = model.full_parameters()
    wrong = net().state_dict()
    wrong["blocks.1.up.weight"] = torch.zeros(13, 9)
    with pytest.raises(
        ValueError, match=r"blocks\.1\.up\.weight must have its whole shape \(13, 8\).*\(13, 9\)"
    ):
        model.load_state_dict(wrong)
    with pytest.raises(ValueError, match=r"blocks\.1\.up\.weight has shape \(13, 9\)"):
        load_whole_model(model, wrong if rank == 0 else None)
    del wrong["blocks.1.up.weight"]
    with pytest.raises(ValueError, match=r"blocks\.1\.up\.weight is missing"):
        load_whole_model(model, wrong if rank == 0 else None)
    for name, value in model.full_parameters().items():
        assert torch.equal(value, before[name])


def check_bad_input(rank, world_size):
    def refused(error, text, **settings):
        with pytest.raises(error, match=text):
            FullyShardedDataParallel(settings.pop("module", None) or net(), **settings)

    model = FullyShardedDataParallel(net())
    refused(ValueError, "wrapped already.*once", module=model)
    refused(ValueError, "wrapped already.*once", module=model.module)
    refused(ValueError, "wrapped already.*once", module=nn.Sequential(model))
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    refused(ValueError, "before an optimizer is made.*SGD holds.*parameters", module=module)
    del optimizer
    FullyShardedDataParallel(module)
    module = net()
    twice = [module.blocks[0], module.blocks[1], module.blocks[0]]
    refused(
        ValueError,
        r"units must name every module once, but got 'blocks\.0' 2 times",
        module=module,
        units=twice,
    )
    refused(ValueError, "not in it. List modules of this model", units=[nn.Linear(2, 2)])
    module.compile(backend="eager")
    refused(ValueError, "inside a compiled module", module=module, units=[module.blocks[0]])
    module = net()
    module.numbers = nn.Parameter(torch.ones(3, 3, dtype=torch.complex64))
    refused(ValueError, "must be floating-point.* got numbers of torch.complex64", module=module)

    with pytest.raises(RuntimeError, match="moved or cast before it is wrapped"):
        model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner, param = model.module.blocks[0], next(model.parameters())
    for copied in (copy.deepcopy, copy.copy, pickle.dumps, torch.optim.swa_utils.AveragedModel):
        pickled = (optimizer, param) if copied is pickle.dumps else ()
        for thing in (model, model.module, inner, *pickled):
            with pytest.raises(TypeError, match=r"one rank cannot be copied, pickled.*\(EMA\)"):
                copied(thing)
    with pytest.raises(TypeError, match="cannot be replaced by one with other parameters"):
        model.module = net()
    with pytest.raises(ValueError, match="max_norm must be at least 0, but got -1"):
        model.clip_grad_norm_(-1.0)
    with pytest.raises(ValueError, match="norm_type must be positive"):
        model.clip_grad_norm_(1.0, 0.0)
    model.module.blocks[1].compile(backend="eager")
    with pytest.raises(RuntimeError, match="compiled before the model is wrapped"):
        model(batch(0, rank))


def check_other_wrappers(rank, world_size):
    """Parameters that another wrapper shards or averages, which both would overwrite."""
    plain = net()
    wrapped = BucketedDDP(plain)
    for module in (wrapped, plain, nn.Sequential(wrapped)):
        with pytest.raises(TypeError, match="synchronised by a BucketedDDP"):
            FullyShardedDataParallel(module)
    with pytest.raises(ValueError, match="wrapped already"):
        FullyShardedDataParallel(nn.Sequential(DistributedDataParallel(net())))
    sharded = FullyShardedDataParallel(wrapped.detach())
    shared = nn.Sequential(nn.Linear(3, 3), sharded.module.blocks[0])
    for module in (sharded, plain, shared):
        with pytest.raises(TypeError, match="synchronised by a FullyShardedDataParallel"):
            BucketedDDP(module)
    tied = nn.Linear(3, 3)
    tied.weight = next(iter(sharded.parameters()))
    with pytest.raises(TypeError, match="weight is synchronised by a FullyShardedDataParallel"):
        FullyShardedDataParallel(tied)


def check_buffers_without_memory(rank, world_size):
    """They are refused before a parameter is cut."""
    for buffer in (torch.eye(3).to_sparse(), torch.ones(1).expand(3), torch.ones(3, 4)[:, :2]):
        module = net()
        module.register_buffer("mask", buffer)
        before = {name: param.detach().clone() for name, param in module.named_parameters()}
        with pytest.raises(ValueError, match=r"but mask has layout.*to_dense.*contiguous"):
            FullyShardedDataParallel(module)
        assert all(torch.equal(param, before[n]) for n, param in module.named_parameters())
        module.mask = buffer.to_dense().contiguous().clone()
        FullyShardedDataParallel(module)


def check_tied_by_memory(rank, world_size):
    """Two parameters in one memory would be moved apart, and trained apart."""
    module = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    module[1].weight.data = module[0].weight.data
    words = r"{} lies where {} does.*giving both one parameter"
    with pytest.raises(ValueError, match=words.format(r"1\.weight", r"0\.weight")):
        FullyShardedDataParallel(module)
    for reduce in (False, True):
        groups = [
            {"params": [("first", module[0].weight)]},
            {"params": [("second", module[1].weight)]},
        ]
        with pytest.raises(ValueError, match=words.format("second", "first")):
            ShardedOptimizer(groups, torch.optim.AdamW, reduce_gradients=reduce)
    module[1].weight = module[0].weight
    cache = torch.ones(4, 4)
    for each in module:  # buffers stay where they are
        each.register_buffer("cache", cache[:2])
    FullyShardedDataParallel(module)


class ReadsAnother(nn.Module):
    def __init__(self, other, read):
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.other = [other]  # not registered: the other block's
        self.read = read

    def forward(self, x):
        return self.own(x) + self.read(x, self.other[0].weight)


READS = {
    "linear": F.linear,
    "product": torch.matmul,
    "embedding": lambda x, weight: F.embedding(torch.zeros(2, dtype=torch.int64), weight),
    "indexing": lambda x, weight: weight[:2, 0, None],
    "view": lambda x, weight: weight.view(8, 8)[:2],
}


def check_reading_a_shard(rank, world_size):
    """A weight that is whole only during another unit's call: an error that says so."""
    for name, read in READS.items():
        layers = [nn.Linear(8, 8) for _ in range(2)]
        module = nn.Sequential(layers[0], ReadsAnother(layers[0], read), layers[1])
        model = FullyShardedDataParallel(module, units=list(module))
        with pytest.raises((RuntimeError, IndexError)) as caught:
            model(torch.ones(2, 8))
        (note,) = caught.value.__notes__
        assert "one-dimensional shard" in note, name
        assert "pass units=" in note, name
        model = FullyShardedDataParallel(
            nn.Sequential(layer := nn.Linear(8, 8), ReadsAnother(layer, read)),
            units=lambda m: len(list(m.children())) == 2,
        )
        assert model(torch.ones(2, 8)).shape == (2, 8), name


class Rotary(nn.Module):
    """A buffer that is no part of checkpoints."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.empty(5), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.table.copy_(torch.arange(5.0))


def check_meta_device(rank, world_size):
    """Each unit gets memory on its own; tied weights stay tied; ranks need no common seed."""
    with torch.device("meta"):
        module = net(tied=True)
        module.rotary = Rotary()
    biggest = 0
    original = Unit.__init__

    def watched(unit, plan, **settings):
        nonlocal biggest
        real = [param for param in module.parameters() if not param.is_meta]
        whole = sum(param.numel() for param in real if param.ndim > 1)
        biggest = max(biggest, whole)
        original(unit, plan, **settings)

    Unit.__init__ = watched
    torch.manual_seed(rank)
    try:
        model = FullyShardedDataParallel(module, device="cpu")
    finally:
        Unit.__init__ = original
    assert biggest == 2 * 8 * 13  # the matrices of one block
    assert model.module.head.weight is model.module.embed.weight
    assert model.module.rotary.table.tolist() == [0, 1, 2, 3, 4]
    values = model.full_parameters()
    assert values["embed.weight"].std() > 0.5
    assert values["blocks.1.norm.weight"].tolist() == [1] * 8
    expected = net(tied=True)
    expected.load_state_dict(values, strict=False)
    for each in (model, expected):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        loss_of(each, 0, 0).backward()
        optimizer.step()
    assert_same(model, expected)

    with torch.device("meta"):
        module = net()
    with pytest.raises(ValueError, match="device must be given"):
        FullyShardedDataParallel(module)
    with torch.device("meta"):
        module.extra = nn.ParameterList([nn.Parameter(torch.ones(3, 3))])
    with pytest.raises(ValueError, match=r"reset_parameters\(\).*ParameterList"):
        FullyShardedDataParallel(module, device="cpu")


CHECKS = [
    ("state dicts", check_state_dicts, ()),
    ("optimizer state", check_optimizer_state, ()),
    ("wrong state dicts", check_wrong_state_dicts, ()),
    ("bad input", check_bad_input, ()),
    ("other wrappers", check_other_wrappers, ()),
    ("buffers without memory", check_buffers_without_memory, ()),
    ("tied by memory", check_tied_by_memory, ()),
    ("reading a shard", check_reading_a_shard, ()),
    ("meta device", check_meta_device, ()),
]


@pytest.mark.parametrize("name", [name for name, _, _ in CHECKS])
def test_on_two_ranks(errors_on_two_ranks, name):
    assert not errors_on_two_ranks[name], errors_on_two_ranks[name]


def build_different(rank, world_size):
    module = net(depth=5 if rank == 0 else 4)
    FullyShardedDataParallel(module)


def test_mismatched_models_are_named_on_every_rank():
    expected = r"ModelMismatchError: every rank must wrap the same model.*blocks\.4"
    for outcome in run_ranks(build_different, 2, check=False):
        assert re.search(expected, outcome.error, re.S), outcome.error
