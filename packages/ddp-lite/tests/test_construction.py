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
from ranks import run_ranks

ALL = (NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP)


def expect(error: type[Exception], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=words):
        call()


def test_a_process_group_must_exist() -> None:
    for wrapper in ALL:
        expect(RuntimeError, "init_process_group", lambda w=wrapper: w(nn.Linear(2, 2)))


def bad_input(rank: int, world_size: int) -> None:
    plain = nn.Linear(3, 3)
    for wrapper in ALL:
        expect(TypeError, "must be a torch.nn.Module, but got int", lambda w=wrapper: w(3))
        wrapped = wrapper(plain)
        expect(TypeError, "wrapped already", lambda w=wrapper, m=wrapped: w(m))
        inside = nn.Sequential(nn.Linear(3, 3), wrapped)
        expect(TypeError, "submodule '1'", lambda w=wrapper, m=inside: w(m))
        wrapped.detach()
        with torch.device("meta"):
            hollow = nn.Linear(3, 3)
        expect(ValueError, "weight is on the meta device", lambda w=wrapper, m=hollow: w(m))
        lazy = nn.LazyLinear(3)
        expect(ValueError, "weight is uninitialised", lambda w=wrapper, m=lazy: w(m))
        sparse = nn.Embedding(3, 3, sparse=True)
        expect(ValueError, "sparse=False", lambda w=wrapper, m=sparse: w(m))
        expect(
            ValueError,
            "one of .*'skip-if-all'.*but got 'ignore'",
            lambda w=wrapper: w(plain, missing_gradients="ignore"),
        )
        frozen = nn.Linear(2, 2).requires_grad_(False)
        with pytest.warns(UserWarning, match="no trainable parameters") as caught:
            idle = wrapper(frozen)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it warned once, not again
            idle(torch.ones(1, 2))
            idle.finish_gradient_synchronization()
        assert len(caught) == 1
    other = DistributedDataParallel.__new__(DistributedDataParallel)  # its constructor is slow
    nn.Module.__init__(other)
    expect(TypeError, "is a DistributedDataParallel", lambda: BucketedDDP(other))
    for size in (0, -1, float("nan"), "large"):
        expect(ValueError, "bucket_size_mb", lambda s=size: BucketedDDP(plain, s))
    expect(ValueError, "last_bucket", lambda: BucketedDDP(plain, 1, last_bucket_size_mb=0))
    expect(ValueError, "floating-point", lambda: BucketedDDP(plain, wire_dtype=torch.int8))
    expect(
        ValueError,
        "exclude each other",
        lambda: BucketedDDP(plain, wire_dtype=torch.bfloat16, comm_hook=lambda flat, bucket: None),
    )
    waves = nn.ParameterList([torch.ones(2, dtype=torch.complex64)])
    expect(ValueError, "0 is torch.complex64", lambda: BucketedDDP(waves, wire_dtype=torch.half))
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, world_size), mesh_dim_names=("a", "b"))
    expect(ValueError, "one dimension, but got 2", lambda: NaiveDDP(plain, process_group=mesh))
    assert NaiveDDP(plain, process_group=mesh["b"]).process_group.size() == world_size
    # one machine without GPUs has no second device that could hold data
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, device="meta"))
    words = "on one device, but got 0.weight on cpu, 1.weight on meta. Move"
    expect(ValueError, words, lambda: common_device(mixed))
    for_cpu = dist.new_group(backend="cpu:gloo")
    words = "serve the module's device, but the module is on cuda"
    expect(ValueError, words, lambda: check_backend(for_cpu, torch.device("cuda")))
    alone = [dist.new_group([r]) for r in range(world_size)]
    other_group = alone[1 - rank]
    expect(
        ValueError,
        "belong to the process group",
        lambda: NaiveDDP(plain, process_group=other_group),
    )


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    run_ranks(bad_input, 2)


def mismatches(rank: int, world_size: int) -> None:
    def check(build: Callable[[], nn.Module], *words: str) -> None:
        model = build()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        for wrapper in (NaiveDDP, BucketedDDP):
            with pytest.raises(ModelMismatchError) as caught:
                wrapper(model)
            for word in words:
                assert word in str(caught.value), (word, str(caught.value))
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key])  # nothing had moved

    odd = rank == 1
    check(lambda: nn.Linear(3, 4 if odd else 5), "ranks 0, 2: weight", "(5, 3)", "rank 1", "(4, 3)")
    check(lambda: nn.Linear(3, 3).to(torch.float64 if odd else torch.float32), "torch.float64")
    check(lambda: nn.Linear(3, 3, bias=not odd), "rank 1: nothing", "bias")
    check(lambda: nn.Linear(3, 3).requires_grad_(not odd), "requires grad")

    def reordered() -> nn.Module:
        names = ["a", "b"] if odd else ["b", "a"]
        return nn.ModuleDict({name: nn.Linear(2, 2) for name in names})

    check(reordered, "a.weight", "b.weight")

    def tied() -> nn.Module:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "ab"})
        if odd:
            model["b"].weight = model["a"].weight
        return model

    check(tied, "tied to a.weight")


def test_different_models_are_named_on_every_rank() -> None:
    run_ranks(mismatches, 3)


class Described(nn.Linear):
    answer = 42

    def twice(self) -> int:
        return 2 * self.answer


def transparent(rank: int, world_size: int) -> None:
    for wrapper in ALL:
        model = nn.Sequential(Described(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        model.label = "inner"
        wrapped = wrapper(model)
        assert wrapped.module is model
        assert wrapped.label == "inner"
        assert [n for n, _ in wrapped.named_parameters()] == [
            n for n, _ in model.named_parameters()
        ]
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


def test_the_module_shines_through() -> None:
    run_ranks(transparent, 2)
