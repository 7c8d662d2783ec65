"""One rank's part of the state, loaded where it does not belong: refused on every rank."""

import copy
import io
import logging
import re
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from ranks import run_ranks
from shard_optim import (
    FullyShardedDataParallel,
    ShardedOptimizer,
    full_state,
    load,
    load_full_state,
)

TWO_LINES = r"on rank 1 it is the part of rank 0 of 2\.\nSave the parts of all ranks by shard_optim"


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4), nn.LayerNorm(4))


def step(model, optimizer, rank=0):
    optimizer.zero_grad()
    model(torch.full((2, 8), 1.0 + rank)).square().mean().backward()
    optimizer.step()


def stage_3(optimizer_cls=torch.optim.AdamW):
    model = FullyShardedDataParallel(build())
    return model, optimizer_cls(model.parameters(), lr=0.1)


def offloaded(params, lr):
    return ShardedOptimizer(params, torch.optim.AdamW, lr=lr, offload_state=True)


def stage_2():
    model = build()
    return model, ShardedOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.1, reduce_gradients=True
    )


def of_rank_0(value):
    """What rank 0 saves and every rank reads, as of replicas."""
    file = io.BytesIO()
    torch.save(value, file)
    data = [file.getvalue()]
    dist.broadcast_object_list(data, src=0)
    return torch.load(io.BytesIO(data[0]), weights_only=True)


def snapshot(model, optimizer):
    values = [param.detach().clone() for param in model.parameters()]
    return values, str(optimizer.state_dict()["state"])


def assert_unchanged(model, optimizer, before):
    values, state = snapshot(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(values, before[0], strict=True))
    assert state == before[1]


def check_distributed_checkpoint(rank, world_size):
    """``torch.distributed.checkpoint`` would give both ranks the shard of one of them."""
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders, src=0)
    folder = folders[0]
    model, optimizer = stage_3()
    step(model, optimizer, rank)
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointException, match=r"all ranks by shard_optim\.save\(\)"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    dcp.save({"0.weight": torch.zeros(8 * 64 // 2)}, checkpoint_id=folder)
    with pytest.raises(FileNotFoundError, match=r"contents\.json.* missing.*load_full_state"):
        load(folder, model, optimizer)
    with pytest.raises(CheckpointException, match=r"all ranks by shard_optim\.save\(\)"):
        dcp.load({"0.weight": model.state_dict()["0.weight"]}, checkpoint_id=folder)
    assert_unchanged(model, optimizer, before)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert_unchanged(model, optimizer, before)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert {type(value) for value in torch.load(file, weights_only=True).values()} == {torch.Tensor}


COPIES = {
    "clone": torch.clone,
    "CPU": torch.Tensor.cpu,
    "dtype": lambda value: value.to(torch.bfloat16),
    "detached": lambda value: value.detach().cpu(),
    "average": lambda value: 0.9 * torch.zeros_like(value) + 0.1 * value,
    "deepcopy": copy.deepcopy,
}


def check_copies_for_dcp(rank, world_size):
    """Copies of shards are shards too, and so is an optimizer's state of any stage."""
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders, src=0)
    folder = folders[0]
    model, optimizer = stage_3()
    step(model, optimizer, rank)
    before = snapshot(model, optimizer)
    others = stage_2()
    step(*others, rank)
    states = {
        name: {key: copied(value) for key, value in model.state_dict().items()}
        for name, copied in COPIES.items()
    }
    states["parameters"] = dict(model.named_parameters())
    states["optimizer of shards"] = optimizer.state_dict()
    states["stage 2"] = others[1].state_dict()
    for name, state in states.items():
        with pytest.raises(CheckpointException, match=r"all ranks by shard_optim\.save\(\)"):
            dcp.save({"state": state}, checkpoint_id=f"{folder}/{name}")
    with pytest.raises(CheckpointException, match=r"all ranks by shard_optim\.save\(\)"):
        dcp.async_save({"state": model.state_dict()}, checkpoint_id=f"{folder}/later").result()
    dcp.save({"0.weight": torch.zeros(8 * 64 // 2)}, checkpoint_id=f"{folder}/whole")
    for target in (states["clone"]["0.weight"], states["parameters"]["0.weight"]):
        with pytest.raises(CheckpointException, match=r"all ranks by shard_optim\.save\(\)"):
            dcp.load({"0.weight": target}, checkpoint_id=f"{folder}/whole")
    assert_unchanged(model, optimizer, before)
    dcp.save(others[0].state_dict(), checkpoint_id=f"{folder}/replicas")

    for state in (optimizer.state_dict(), others[1].state_dict()):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    # What a program puts together from all ranks' shards is whole.
    own = model.state_dict()["0.weight"]
    parts = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(parts, own)
    dcp.save({"whole": torch.cat(parts).view(64, 8)}, checkpoint_id=f"{folder}/gathered")


def check_parts_of_rank_0(rank, world_size):
    """The habit of replicas: rank 0 saves ``state_dict()``, every rank loads it."""
    for make in (stage_3, lambda: stage_3(offloaded)):
        model, optimizer = make()
        step(model, optimizer, rank)
        saved = of_rank_0({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        before = snapshot(model, optimizer)
        for target in (model, model.module):
            with pytest.raises(ValueError, match=TWO_LINES) as caught:
                target.load_state_dict(saved["model"])
            assert str(caught.value).count("\n") == 1
        with pytest.raises(ValueError, match=TWO_LINES):
            optimizer.load_state_dict(saved["optimizer"])
        assert_unchanged(model, optimizer, before)

        # A resumed run loads before its first step. A plain class knows of its ranks only there: it
        # raises then and updates nothing.
        model, optimizer = make()
        before = [param.detach().clone() for param in model.parameters()]

        def resume(model=model, optimizer=optimizer, saved=saved):
            optimizer.load_state_dict(saved["optimizer"])
            step(model, optimizer, rank)

        with pytest.raises(ValueError, match=TWO_LINES):
            resume()
        assert all(map(torch.equal, before, model.parameters()))

    model, optimizer = stage_2()
    step(model, optimizer, rank)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=TWO_LINES):
        optimizer.load_state_dict(of_rank_0(optimizer.state_dict()))
    assert_unchanged(model, optimizer, before)


def check_part_of_a_part(rank, world_size):
    """A submodule's state dict, and one that has lost what torch keeps beside it."""
    model, optimizer = stage_3()
    step(model, optimizer, rank)
    before = snapshot(model, optimizer)
    part = of_rank_0(model.module[0].state_dict())
    with pytest.raises(ValueError, match="rank 1 it is the part of rank 0"):
        model.module[0].load_state_dict(part)
    with pytest.raises(ValueError, match="rank 0 it does not say which rank's part it is"):
        model.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    assert_unchanged(model, optimizer, before)
    model.module[0].load_state_dict(model.module[0].state_dict())
    model.load_state_dict(build().state_dict())


def check_own_parts(rank, world_size):
    """Each rank's own file, of this run and in a new one, before and after its first step."""
    for make in (stage_3, lambda: stage_3(offloaded), stage_2):
        model, optimizer = make()
        step(model, optimizer, rank)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        step(model, optimizer, rank)
        expected = full_state(model, optimizer)
        for steps in (0, 1):
            other, other_optimizer = make()
            for _ in range(steps):
                step(other, other_optimizer, rank)
            other.load_state_dict(copy.deepcopy(saved["model"]))
            other_optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
            step(other, other_optimizer, rank)
            found = full_state(other, other_optimizer)
            if rank == 0:
                assert str(found) == str(expected)


def check_two_moments(rank, world_size):
    for make in (stage_3, stage_2):
        model, optimizer = make()
        states = []
        for _ in range(2):
            step(model, optimizer, rank)
            state = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
            states.append(copy.deepcopy(state))
        before = snapshot(model, optimizer)
        other = states[rank]
        with pytest.raises(ValueError, match="rank 1 has got another moment's than rank 0"):
            optimizer.load_state_dict(other["optimizer"])
        if make is stage_3:
            with pytest.raises(ValueError, match="rank 1 has got another moment's than rank 0"):
                model.load_state_dict(other["model"])
            whole = {name: value + rank for name, value in build().state_dict().items()}
            with pytest.raises(ValueError, match="rank 1 has got another moment's than rank 0"):
                model.load_state_dict(whole)
        assert_unchanged(model, optimizer, before)


def check_stages(rank, world_size):
    """State of another stage, and whole state that is not given as such."""
    model, first = stage_2()
    step(model, first, rank)
    other = ShardedOptimizer(build().parameters(), torch.optim.AdamW, lr=0.1)
    with pytest.raises(ValueError, match="it is of stage 2, not 1"):
        other.load_state_dict(first.state_dict())
    sgd = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, reduce_gradients=True)
    with pytest.raises(ValueError, match="it is of optimizer AdamW, not SGD"):
        sgd.load_state_dict(first.state_dict())
    lacking = first.state_dict()
    del lacking["shard"]["spans"]
    with pytest.raises(ValueError, match="it does not say which rank's part it is"):
        first.load_state_dict(lacking)
    model, optimizer = stage_3()
    step(model, optimizer, rank)
    plain = torch.optim.AdamW(build().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="it does not say which rank's part it is"):
        optimizer.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match=r"hold \['model', 'optimizer'\], but got \['model'\]"):
        load_full_state({"model": build().state_dict()}, model, optimizer)


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def check_said(rank, world_size):
    heard = Heard()
    logging.getLogger("shard_optim").addHandler(heard)
    for make in (stage_3, stage_2):
        model, optimizer = make()
        optimizer.state_dict()  # as accelerate's prepare does: there is nothing to lose yet
        step(model, optimizer, rank)
        full_state(model, optimizer)
        assert not heard.messages  # the whole state is no part
        for _ in range(2):
            model.state_dict()
            optimizer.state_dict()
        said = [re.search(r"of the (\w+) is the part of rank", text)[1] for text in heard.messages]
        assert said == (["model", "optimizer"] if make is stage_3 else ["optimizer"])
        assert all("shard_optim.save()" in text for text in heard.messages)
        heard.messages.clear()


def check_world_sizes(rank, world_size):
    """Parts of two ranks, loaded by three: other shapes or another rank's."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1, 2])]
    saved = None
    if rank < 2:
        model = FullyShardedDataParallel(build(), process_group=groups[0])
        saved = model.state_dict()
    model = FullyShardedDataParallel(build(), process_group=groups[1])
    before = [param.detach().clone() for param in model.parameters()]
    if saved is None:
        saved = model.state_dict()
    with pytest.raises(ValueError, match=r"on rank 0 .*must have its whole shape"):
        model.load_state_dict(saved)
    assert all(map(torch.equal, before, model.parameters()))


def test_parts_of_two_ranks_on_three():
    run_ranks(check_world_sizes, 3)


CHECKS = [
    ("parts of rank 0", check_parts_of_rank_0, ()),
    ("part of a part", check_part_of_a_part, ()),
    ("torch.distributed.checkpoint", check_distributed_checkpoint, ()),
    ("copies for torch.distributed.checkpoint", check_copies_for_dcp, ()),
    ("own parts", check_own_parts, ()),
    ("two moments", check_two_moments, ()),
    ("stages", check_stages, ()),
    ("said", check_said, ()),
]


@pytest.mark.parametrize("name", [name for name, _, _ in CHECKS])
def test_on_two_ranks(name, errors_on_two_ranks):
    assert not errors_on_two_ranks[name], errors_on_two_ranks[name]
