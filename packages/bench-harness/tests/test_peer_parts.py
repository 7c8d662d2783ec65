"""Exchanges of which parts are left out: which operations remain, and what is refused."""

from __future__ import annotations

import typing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench_harness import presets
from bench_harness.training import build
from bench_harness.training import settings as of
from bench_harness.training.peer_parts import PartialCopies
from bench_harness.training.peer_ways import copies_without
from ddp_lite.peer import PeerCopies
from ddp_lite.peer import copies as peer_copies
from ddp_lite.peer import schedule as peer_schedule

CONFIG = {
    "size": "custom", "d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2,
    "vocab_size": 32, "batch": 2, "sequence": 8,
}  # fmt: skip


class Rank0:
    """The first of two ranks."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


class AloneMemory:
    """Memory that two ranks would share, as the first of them sees it without the other."""

    def __init__(self) -> None:
        self.group: Any = Rank0()
        self.device, self.stream, self.row_bytes = torch.device("cpu"), None, 256
        self.memory = [torch.full((peer_schedule.SLOTS * 256,), 255, dtype=torch.uint8)] * 2

    def next_slot(self) -> int:
        return 0

    def slot(self, rank: int, number: int, dtype: torch.dtype) -> Tensor:
        return self.memory[rank].view(dtype).view(peer_schedule.SLOTS, 1, -1)[number]

    def barrier(self) -> None:
        raise AssertionError("the other rank never comes")

    def stagger(self) -> None:
        raise AssertionError("the other rank never comes")

    def queued(self, event: object) -> None:
        assert event is None


@pytest.mark.parametrize(
    ("parts", "remain"),
    [
        ("none", []),
        ("barriers", ["BARRIER", "BARRIER"]),
        ("barriers+averaging", ["BARRIER", "REDUCE", "BARRIER"]),
        ("barriers+copies", ["PUSH", "BARRIER", "BARRIER", "PULL"]),
    ],
)
def test_the_named_parts_remain(parts: of.PeerParts, remain: list[str]) -> None:
    copies = PartialCopies(AloneMemory(), parts)
    kinds = [each.kind.name for each in copies.operations(peer_schedule.average)]
    assert kinds == remain


def test_gradients_stay_finite() -> None:
    """Memory whose old content is not a number would make every later product faster."""
    tensor = torch.full((300,), 1 / 3)
    memory = AloneMemory()
    memory.barrier = lambda: None  # type: ignore[method-assign]
    PartialCopies(memory, "barriers+averaging").average([tensor]).wait()
    assert torch.isfinite(tensor).all()
    PartialCopies(AloneMemory(), "none").average([tensor]).wait()
    assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("parts", [None, "none", "barriers+copies"])
def test_what_is_not_averaged_leaves_the_weights(
    parts: of.PeerParts | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that each rank updates by itself would differ, and ddp-lite refuses such ranks."""

    def hook(wrapper: of.Bucketed, *_: object) -> Any:
        memory = AloneMemory()
        memory.barrier = lambda: None  # type: ignore[method-assign]
        copies = PeerCopies(memory) if parts is None else PartialCopies(memory, parts)
        return lambda flat, bucket: copies.average([flat])

    monkeypatch.setattr(build, "peer_hook", hook)
    table: dict[str, Any] = {"name": "bucketed", "comm_hook": "peer-copy"}
    if parts is not None:
        table["peer_parts"] = parts
    variant = of.read({"wrapper": table}, {})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with build.training(variant, CONFIG, torch.device("cpu")) as steps:
            before = {name: value.clone() for name, value in steps.parameters().items()}
            for _ in range(2):
                steps.step()
            after = steps.parameters()
            gradients = [p.grad for p in steps.workload.module.parameters()]
            kept = [torch.equal(after[name], value) for name, value in before.items()]
    finally:
        dist.destroy_process_group()
    assert any(g is not None and bool(g.any()) for g in gradients), "backward has run"
    assert all(kept) if parts else not any(kept)


def test_each_way_lacks_one_improvement(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: list[tuple[object, ...]] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *given: streams.append(given))
    ways: tuple[of.PeerWay, ...] = typing.get_args(of.PeerWay)
    monkeypatch.setattr(peer_copies, "driver_call", lambda: lambda *_: 0)
    for way in ways:
        memory: Any = AloneMemory()
        memory.device = torch.device("cuda", 0)
        whole = PeerCopies(memory)
        assert whole.fused, "what is left out is there"
        assert whole.batched
        copies = copies_without(memory, way)
        assert copies.fused == (way != "torch-sums")
        assert copies.batched == (way != "single-copies")
    assert streams == [(torch.device("cuda", 0),)], "of default priority"


def test_parts_belong_to_copies() -> None:
    with pytest.raises(ValueError, match="peer_parts must be left out where comm_hook is None"):
        of.read({"wrapper": {"name": "bucketed", "peer_parts": "barriers"}}, {})
    both = {"peer_parts": "barriers", "peer_way": "torch-sums"}
    with pytest.raises(ValueError, match="peer_way must be left out beside peer_parts"):
        of.read({"wrapper": {"name": "bucketed", "comm_hook": "peer-copy", **both}}, {})
    table = {"name": "bucketed", "comm_hook": "peer-copy", "peer_parts": "barriers+copies"}
    variant = of.read({"wrapper": table}, {})
    assert variant.label() == "BucketedDDP(comm_hook=peer-copy, peer_parts=barriers+copies)"
    assert variant.communicates
    assert not variant.averages
    assert of.read("bucketed", {}).averages
    assert not of.read("none", {}).averages


def test_the_preset_leaves_out_each_part() -> None:
    cases = presets.load("peer-copies").cases()
    read = [of.read(table, {}) for table in cases[0].config["variants"]]
    parts = {each.wrapper.peer_parts for each in read if isinstance(each.wrapper, of.Bucketed)}
    assert parts == {None, *typing.get_args(of.PeerParts)}
    unmoved = [each.label() for each in read if not each.communicates]
    assert "no communication + AdamW(lr=0)" in unmoved, "what the parts are compared with"
    ways = {each.wrapper.peer_way for each in read if isinstance(each.wrapper, of.Bucketed)}
    assert ways == {None, *typing.get_args(of.PeerWay)}
