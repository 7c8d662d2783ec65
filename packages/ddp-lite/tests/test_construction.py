"""What cannot be wrapped is refused at once, clearly; what differs between ranks is named."""

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lite import BucketedDDP, FlatDDP, ModelMismatchError, NaiveDDP, OverlapDDP
from ddp_lite.model import check_backend, common_device
from ranks import run_case, run_ranks

ALL = {wrapper.__name__: wrapper for wrapper in (NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP)}


def expect(error: type[Exception], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=words):
        call()


def test_a_process_group_must_exist() -> None:
    for wrapper in ALL.values():
        expect(RuntimeError, "init_process_group", lambda w=wrapper: w(nn.Linear(2, 2)))


def bad_modules(rank: int, world_size: int, name: str) -> None:
    wrapper, plain = ALL[name], nn.Linear(3, 3)
    expect(TypeError, "must be a torch.nn.Module, but got int", lambda: wrapper(3))
    wrapped = wrapper(plain)
    expect(TypeError, "wrapped already", lambda: wrapper(wrapped))
    inside = nn.Sequential(nn.Linear(3, 3), wrapped)
    expect(TypeError, "submodule '1'", lambda: wrapper(inside))
    wrapped.detach()
    with torch.device("meta"):
        hollow = nn.Linear(3, 3)
    expect(ValueError, "weight is on the meta device", lambda: wrapper(hollow))
    expect(ValueError, "weight is uninitialised", lambda: wrapper(nn.LazyLinear(3)))
    expect(ValueError, "sparse=False", lambda: wrapper(nn.Embedding(3, 3, sparse=True)))
    with pytest.warns(UserWarning, match="no trainable parameters"):
        wrapper(nn.Embedding(3, 3, sparse=True).requires_grad_(False))
    told = nn.Linear(3, 3)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(told, ["bias"])
    expect(ValueError, "told to ignore bias", lambda: wrapper(told))
    for buffer in (torch.ones(1).expand(3, 3), torch.eye(3).to_sparse()):
        plain.register_buffer("mask", buffer)
        expect(ValueError, "mask is sparse or expanded.*contiguous copy", lambda: wrapper(plain))
        del plain.mask
    words = "one of .*'skip-if-all'.*but got 'ignore'"
    expect(ValueError, words, lambda: wrapper(plain, missing_gradients="ignore"))


@pytest.mark.parametrize("name", ALL)
def test_bad_modules_are_refused_before_anything_is_sent(name: str) -> None:
    run_case(bad_modules, 2, ALL, name)


def frozen(rank: int, world_size: int, name: str) -> None:
    with pytest.warns(UserWarning, match="no trainable parameters") as caught:
        idle = ALL[name](nn.Linear(2, 2).requires_grad_(False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warned once, not again
        idle(torch.ones(1, 2))
        idle.finish_gradient_synchronization()
    assert len(caught) == 1


@pytest.mark.parametrize("name", ALL)
def test_a_module_without_trainable_parameters_is_warned_of_once(name: str) -> None:
    run_case(frozen, 2, ALL, name)


BAD_ARGUMENTS: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
    "no size": ("bucket_size_mb", lambda m: BucketedDDP(m, 0)),
    "negative size": ("bucket_size_mb", lambda m: BucketedDDP(m, -1)),
    "NaN": ("bucket_size_mb", lambda m: BucketedDDP(m, float("nan"))),
    "size in words": ("bucket_size_mb", lambda m: BucketedDDP(m, "large")),
    "last size": ("last_bucket", lambda m: BucketedDDP(m, 1, last_bucket_size_mb=0)),
    "wire_dtype": ("floating-point", lambda m: BucketedDDP(m, wire_dtype=torch.int8)),
    "wire_dtype and hook": (
        "exclude each other",
        lambda m: BucketedDDP(m, wire_dtype=torch.bfloat16, comm_hook=lambda flat, bucket: None),
    ),
    "complex on the wire": (
        "0 is torch.complex64",
        lambda _: BucketedDDP(
            nn.ParameterList([torch.ones(2, dtype=torch.complex64)]), wire_dtype=torch.half
        ),
    ),
}


def bad_arguments(rank: int, world_size: int, name: str) -> None:
    words, build = BAD_ARGUMENTS[name]
    expect(ValueError, words, lambda: build(nn.Linear(3, 3)))


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_are_named(name: str) -> None:
    run_case(bad_arguments, 2, BAD_ARGUMENTS, name)


def torchs(rank: int, world_size: int) -> None:
    other = DistributedDataParallel.__new__(DistributedDataParallel)  # its constructor is slow
    nn.Module.__init__(other)
    expect(TypeError, "is a DistributedDataParallel", lambda: BucketedDDP(other))


def test_torchs_wrapper_is_wrapped_already() -> None:
    run_ranks(torchs, 2)


def bad_groups(rank: int, world_size: int) -> None:
    plain = nn.Linear(3, 3)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, world_size), mesh_dim_names=("a", "b"))
    expect(ValueError, "one dimension, but got 2", lambda: NaiveDDP(plain, process_group=mesh))
    assert NaiveDDP(plain, process_group=mesh["b"]).process_group.size() == world_size
    for_cpu = dist.new_group(backend="cpu:gloo")
    words = "serve the module's device, but the module is on cuda"
    expect(ValueError, words, lambda: check_backend(for_cpu, torch.device("cuda")))
    alone = [dist.new_group([r]) for r in range(world_size)]
    words = "belong to the process group"
    expect(ValueError, words, lambda: NaiveDDP(plain, process_group=alone[1 - rank]))


def test_bad_groups_are_refused() -> None:
    run_ranks(bad_groups, 2)


def test_modules_must_be_on_one_device() -> None:
    # one machine without GPUs has no second device that could hold data
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    words = "on one device, but got 0.weight on cpu, 1.weight on meta. Move"
    expect(ValueError, words, lambda: common_device(mixed))


def reordered(odd: bool) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in ("ab" if odd else "ba")})


def tied(odd: bool) -> nn.Module:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "ab"})
    if odd:
        model["b"].weight = model["a"].weight
    return model


DIFFERENT: dict[str, tuple[Callable[[bool], nn.Module], list[str]]] = {
    "shape": (
        lambda odd: nn.Linear(3, 4 if odd else 5),
        ["ranks 0, 2: weight", "(5, 3)", "rank 1", "(4, 3)"],
    ),
    "dtype": (
        lambda odd: nn.Linear(3, 3).to(torch.float64 if odd else torch.float32),
        ["torch.float64"],
    ),
    "one more": (lambda odd: nn.Linear(3, 3, bias=not odd), ["rank 1: nothing", "bias"]),
    "frozen": (lambda odd: nn.Linear(3, 3).requires_grad_(not odd), ["requires grad"]),
    "order": (reordered, ["a.weight", "b.weight"]),
    "sharing": (tied, ["tied to a.weight"]),
}
DIFFER = [(name, what) for name in ("NaiveDDP", "BucketedDDP") for what in DIFFERENT]


def mismatches(rank: int, world_size: int, name: str, what: str) -> None:
    build, words = DIFFERENT[what]
    model = build(rank == 1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ModelMismatchError) as caught:
        ALL[name](model)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])  # nothing had moved


@pytest.mark.parametrize(("name", "what"), DIFFER)
def test_different_models_are_named_on_every_rank(name: str, what: str) -> None:
    run_case(mismatches, 3, DIFFER, name, what)


class Described(nn.Linear):
    answer = 42

    def twice(self) -> int:
        return 2 * self.answer


def transparent(rank: int, world_size: int, name: str) -> None:
    wrapper = ALL[name]
    model = nn.Sequential(Described(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model.label = "inner"
    wrapped = wrapper(model)
    assert wrapped.module is model
    assert wrapped.label == "inner"
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in wrapped.named_buffers()] == [n for n, _ in model.named_buffers()]
    assert all(a is b for a, b in zip(wrapped.parameters(), model.parameters(), strict=True))
    assert wrapper(Described(2, 2)).twice() == 84
    with pytest.raises(AttributeError, match="missing_name"):
        _ = wrapped.missing_name

    saved = {k: v.clone() for k, v in wrapped.state_dict().items()}
    assert saved.keys() == model.state_dict().keys()
    for checkpoint in (saved, {f"module.{k}": v for k, v in saved.items()}):
        with torch.no_grad():
            model[0].weight.fill_(9)
        wrapped.load_state_dict(checkpoint)
        assert torch.equal(model[0].weight, saved["0.weight"])
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapped.load_state_dict({"0.weight": saved["0.weight"]})

    parent = nn.ModuleDict({"inside": wrapped})
    whole = {k: v.clone() for k, v in parent.state_dict().items()}
    assert whole.keys() == {f"inside.{k}" for k in saved}
    with torch.no_grad():
        model[0].weight.fill_(9)
    parent.load_state_dict(whole)
    assert torch.equal(model[0].weight, saved["0.weight"])
    assert {n for n, _ in [*parent.named_parameters(), *parent.named_buffers()]} == whole.keys()
    assert dict(wrapped.named_modules()).keys() == dict(model.named_modules()).keys()
    assert {wrapped, model} < {*parent.modules()}

    wrapped.label = "outer"
    assert model.label == "outer"
    wrapped.register_buffer("scale", torch.ones(1))
    assert model.state_dict().keys() == wrapped.state_dict().keys() == {*saved, "scale"}
    wrapped.own = 1
    assert "own" not in vars(model)
    head = model[2]
    wrapped.add_module("2", nn.Linear(3, 2))
    with pytest.raises(ModelMismatchError, match=r"2\.weight was replaced"):
        wrapped(torch.ones(2, 3))
    model[2] = head
    wrapped.extra = nn.Linear(1, 1)
    with pytest.raises(ModelMismatchError, match=r"extra\.weight was added"):
        wrapped(torch.ones(2, 3))
    del model.extra
    with pytest.raises(TypeError, match=r"cannot be replaced.*Wrap the new module"):
        wrapped.module = copy.deepcopy(model)
    wrapped.module = model
    assert wrapped.module is model

    for refuse in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match=r"wrapped\.state_dict\(\)"):
            refuse(wrapped)
    wrapped.eval()
    assert not model[1].training
    wrapped.train()

    assert wrapped.detach() is model
    again = wrapper(model)
    assert again.stats() is None
    again(torch.ones(2, 3)).sum().backward()
    again.finish_gradient_synchronization()
    assert again.stats().reductions == len(again._engine.buckets)
    again.detach()
    model.zero_grad()


@pytest.mark.parametrize("name", ALL)
def test_the_module_shines_through(name: str) -> None:
    run_case(transparent, 2, ALL, name)
