"""Wrong arguments of everything that takes a sharded model: errors that say what to write."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fully_sharded_models import batch, loss_of, net
from ranks import run_ranks
from shard_optim import (
    FullyShardedDataParallel,
    ShardedOptimizer,
    full_state,
    load,
    load_full_state,
    save,
)
from whole_state import load_whole_model, load_whole_optimizer

NOT_WRAPPED = "model must be a FullyShardedDataParallel, but got Net. Pass the wrapper itself"
NO_OPTIMIZER = "optimizer must be a ShardedOptimizer, or a torch.optim.Optimizer over .*, but got"
NOT_THE_MODELS = r"optimizer must hold parameters of the sharded model only.*parameters\(\)"
NO_PATH = "folder must be a path, but got 3. Pass the same one on every rank"

WRAPPING = [
    ({"compute_dtype": torch.int32}, ValueError, "must be a floating-point dtype, but got .*int32"),
    ({"compute_dtype": torch.complex64}, ValueError, "must be a floating-point dtype"),
    ({"compute_dtype": "bf16"}, TypeError, "compute_dtype must be a torch.dtype or None, but got"),
    ({"reduce_dtype": "bf16"}, TypeError, "reduce_dtype must be a torch.dtype or None, but got"),
    ({"reduce_dtype": torch.float16}, ValueError, "reduce_dtype must be None, .*overflow"),
    ({"reshard_after_forward": "no"}, TypeError, "must be True or False, but got 'no'"),
    ({"reshard_after_forward": 2}, TypeError, "must be True or False, but got 2"),
    ({"prefetch": 3}, ValueError, "prefetch must be 1 or 2, but got 3"),
    ({"prefetch": True}, ValueError, "prefetch must be 1 or 2, but got True"),
    ({"process_group": "gloo"}, TypeError, "process_group must be a process group.*got 'gloo'"),
    ({"process_group": -100}, TypeError, "process_group must be .* that this rank belongs to"),
    ({"device": 3.5}, TypeError, "device must be a torch.device or a string, but got 3.5"),
    ({"device": "meta"}, ValueError, "must be where the module is, which is cpu, but got meta"),
    ({"units": "blocks"}, TypeError, r"units must be a list of modules.*list\(model.blocks\)"),
    ({"units": ["embed"]}, TypeError, "units must be a list of modules.*but got 'embed'"),
    ({"units": nn.Linear(2, 2)}, TypeError, "but got Linear.*Pass a list"),
    ({"units": 3}, TypeError, "units must be a list of modules or a predicate.*but got 3"),
    ({"communication": "nccl"}, TypeError, 'must have the methods.*Pass "peer-copy"'),
    ({"communication": "peer-copy"}, ValueError, "copies between GPUs need .*, but got"),
]


def partly_elsewhere():
    module = net()
    module.head.to("meta")
    return module


def check_wrapping(rank, world_size):
    for settings, error, text in WRAPPING:
        with pytest.raises(error, match=text):
            FullyShardedDataParallel(net(), **settings)
    with pytest.raises(TypeError, match=r"module must be a torch.nn.Module, but got SGD"):
        FullyShardedDataParallel(torch.optim.SGD(net().parameters()))
    with pytest.raises(ValueError, match=r"weight has none yet. Call the module once before"):
        FullyShardedDataParallel(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(ValueError, match="device must be given for a module on the meta device"):
        FullyShardedDataParallel(partly_elsewhere())
    model = FullyShardedDataParallel(net(), device="cpu")
    loss_of(model, 0, rank).backward()


def check_functions(rank, world_size, folder):
    plain, model = net(), FullyShardedDataParallel(net())
    theirs = torch.optim.AdamW(plain.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    state = optimizer.state_dict()
    own = dist.group.WORLD
    cases = [
        (TypeError, NOT_WRAPPED, lambda: save(folder, plain, theirs)),
        (TypeError, NOT_WRAPPED, lambda: save(folder, model.module, optimizer)),
        (TypeError, "but got AdamW", lambda: save(folder, optimizer, model)),
        (TypeError, NO_OPTIMIZER, lambda: save(folder, model, state)),
        (ValueError, NOT_THE_MODELS, lambda: save(folder, model, theirs)),
        (
            ValueError,
            NOT_THE_MODELS,
            lambda: save(folder, model, ShardedOptimizer(net().parameters(), torch.optim.AdamW)),
        ),
        (TypeError, NO_PATH, lambda: save(3, model, optimizer)),
        (
            TypeError,
            r"background_group must be a process group, but got True.*new_group\(backend=",
            lambda: save(folder, model, optimizer, background_group=True),
        ),
        (
            ValueError,
            "background_group must be a group that nothing else uses, but got the model's own",
            lambda: save(folder, model, optimizer, background_group=own),
        ),
        (TypeError, NOT_WRAPPED, lambda: load(folder, plain, theirs)),
        (TypeError, NO_OPTIMIZER, lambda: load(folder, model, "adamw")),
        (ValueError, NOT_THE_MODELS, lambda: load(folder, model, theirs)),
        (TypeError, NO_PATH, lambda: load(3, model, optimizer)),
        (
            FileNotFoundError,
            "which a save writes last, is missing",
            lambda: load(f"{folder}/nothing", model, optimizer),
        ),
        (TypeError, NOT_WRAPPED, lambda: full_state(plain, theirs)),
        (TypeError, "but got AdamW", lambda: full_state(optimizer, model)),
        (TypeError, NO_OPTIMIZER, lambda: full_state(model, 3)),
        (TypeError, "but got AdamW", lambda: full_state(optimizer=theirs)),
        (TypeError, "model must be .*, but got NoneType", lambda: full_state()),
        (ValueError, NOT_THE_MODELS, lambda: full_state(model, theirs)),
        (TypeError, NOT_WRAPPED, lambda: load_full_state(state, plain, theirs)),
        (TypeError, NO_OPTIMIZER, lambda: load_full_state(state, model, 3)),
        (
            TypeError,
            r"but got one Fully.*\. Pass model\.parameters\(\)",
            lambda: ShardedOptimizer(model, torch.optim.Muon, partition="whole"),
        ),
        (
            TypeError,
            "optimizer_cls must be a subclass of torch.optim.Optimizer, but got 'muon'",
            lambda: ShardedOptimizer(model.parameters(), "muon", partition="whole"),
        ),
        (
            ValueError,
            "params must be sharded parameters of the model.*Give small and foreign parameters to",
            lambda: ShardedOptimizer(model.parameters(), torch.optim.Muon, partition="whole"),
        ),
        (TypeError, "max_norm must be a number, but got '1'", lambda: model.clip_grad_norm_("1")),
        (
            ValueError,
            "assign must be False.*Leave it out",
            lambda: model.load_state_dict(plain.state_dict(), assign=True),
        ),
        (RuntimeError, r"Call compile\(\) of each block, then wrap", lambda: model.compile()),
        (AttributeError, "full_parameters", lambda: plain.full_parameters()),
    ]
    for error, text, mistake in cases:
        with pytest.raises(error, match=text):
            mistake()
    loss_of(model, 0, rank).backward()  # nothing has changed


def only_on_the_first(rank, value):
    return value if rank == 0 else None


def check_wrong_full_states(rank, world_size):
    """What only the first rank can see is an error on every rank, at once."""
    model = FullyShardedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters())
    plain = net().state_dict()
    for wrong, text in (
        ([1, 2], "got list"),
        (dict.fromkeys(plain, 3), r"embed\.weight is no tensor with values, but int"),
        (dict.fromkeys(plain, torch.empty(2, device="meta")), "no tensor with values"),
        ({}, r"embed\.weight is missing"),
        (plain | {"embed.weight": plain["embed.weight"].flatten()}, r"embed\.weight has shape"),
        (plain | {"more": torch.ones(1)}, "it holds more, which the model does not"),
    ):
        with pytest.raises(ValueError, match=text):
            load_whole_model(model, only_on_the_first(rank, wrong))
    groups = optimizer.state_dict()["param_groups"]
    for wrong, text in (
        ([1], "got list without state and param_groups"),
        ({"state": {0: 3}, "param_groups": groups}, "without state and param_groups"),
        ({"state": [3], "param_groups": groups}, "without state and param_groups"),
        ({"state": {}, "param_groups": [1]}, "without state and param_groups"),
        (
            {"state": {99: {}}, "param_groups": groups},
            "state of parameter 99, which is .*in none of its groups",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            load_whole_optimizer(optimizer, only_on_the_first(rank, wrong))


def check_moved_parameters(rank, world_size):
    """The memory of shards is gathered; a parameter that left it would not be updated any more."""
    message = r"sharded parameter must stay in the memory.*{}.*copy_\(\) or load_state_dict"

    def cast(model):
        model.module.blocks[2].half()

    def assign(model):
        weight = model.module.blocks[1].up.weight
        weight.data = weight.data + 1

    for move, name in ((cast, r"blocks\.2\.up\.weight"), (assign, r"blocks\.1\.up\.weight")):
        model = FullyShardedDataParallel(net())
        move(model)
        with pytest.raises(RuntimeError, match=message.format(name)):
            model(batch(0, rank))
    model = FullyShardedDataParallel(net())
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param + 1)
    whole = model.full_parameters()
    assert torch.equal(whole["head.weight"], net().head.weight + 1)


CHECKS = [
    ("wrapping", check_wrapping, ()),
    ("functions", check_functions, ("nowhere",)),
    ("full states", check_wrong_full_states, ()),
    ("moved parameters", check_moved_parameters, ()),
]


@pytest.mark.parametrize("name", [name for name, _, _ in CHECKS])
def test_on_two_ranks(errors_on_two_ranks, name):
    assert not errors_on_two_ranks[name], errors_on_two_ranks[name]


def save_over_part_of_the_ranks(rank, world_size, folder):
    model = FullyShardedDataParallel(net())
    part = dist.new_group([0, 1])
    with pytest.raises((TypeError, ValueError), match="background_group must"):
        save(folder, model, background_group=part)


def test_a_background_group_of_other_ranks(tmp_path):
    run_ranks(save_over_part_of_the_ranks, 3, str(tmp_path / "folder"))


SETTINGS = {
    "units": lambda module: {"units": list(module.blocks)[:2]},
    "reshard_after_forward": lambda module: {"reshard_after_forward": False},
    "prefetch": lambda module: {"prefetch": 2},
    "compute_dtype": lambda module: {"compute_dtype": torch.bfloat16},
    "strides": lambda module: {},
}


def settings_that_differ(rank, world_size):
    for name, settings in SETTINGS.items():
        module = net()
        if name == "strides" and rank == 1:
            weight = module.embed.weight
            weight.data = weight.data.t().contiguous().t()
        word = "unit" if name == "units" else name
        with pytest.raises(RuntimeError, match=rf"rank 0: .*{word}.*; rank 1: .*"):
            FullyShardedDataParallel(module, **(settings(module) if rank == 1 else {}))
    model = FullyShardedDataParallel(net())
    loss_of(model, 0, rank).backward()


def test_settings_that_differ_between_ranks_are_named():
    run_ranks(settings_that_differ, 2)
