"""Optimizers that keep moments in a tensor class of their own, and those that are compiled."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shard_optim import (
    FullyShardedDataParallel,
    ShardedOptimizer,
    full_state,
    load,
    load_full_state,
    save,
)

optim = pytest.importorskip("torchao.optim")
LR = 1e-2


def net():
    torch.manual_seed(0)
    layers = [nn.Linear(*sizes, bias=False) for sizes in ((128, 256), (256, 128))]
    return nn.Sequential(layers[0], nn.GELU(), layers[1])


def losses(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)  # equal data, so that stage 1 needs no average
    found = []
    for _ in range(steps):
        x = torch.randn(32, 128, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def made(stage):
    model = net()
    if stage == 3:
        model = FullyShardedDataParallel(model)
        return model, optim.AdamW8bit(model.parameters(), lr=LR)
    named = list(model.named_parameters())
    return model, ShardedOptimizer(named, optim.AdamW8bit, lr=LR, reduce_gradients=stage == 2)


def forms(optimizer):
    """Classes of the first moments."""
    inner = getattr(optimizer, "local", None)
    groups = [optimizer] if inner is None else [each.optimizer for each in inner.step_groups]
    return {type(state["exp_avg"]).__name__ for each in groups for state in each.state.values()}


def without_compiler(monkeypatch):
    """The class compiles its step for each shape, which takes seconds and changes no value."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def check_saved_by_value(rank, world_size, stage):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        folder = f"{folders[0]}/checkpoint"
        without_compiler(patch)
        model, optimizer = made(stage)
        before = losses(model, optimizer, 3, 0)
        assert before.isfinite().all()
        assert forms(optimizer) == {"OptimState8bit"}
        save(folder, model, optimizer)
        whole = full_state(model, optimizer)
        if rank == 0:
            moment = whole["optimizer"]["state"][0]["exp_avg"]
            assert type(moment) is torch.Tensor
            assert moment.shape == (256, 128)
            assert moment.any()
        expected = losses(model, optimizer, 3, 5)
        for how in ("folder", "whole"):
            other, resumed = made(stage)
            if how == "folder":
                load(folder, other, resumed)
            else:
                load_full_state(whole, other, resumed)
            assert forms(resumed) == forms(optimizer)
            again = losses(other, resumed, 3, 5)
            torch.testing.assert_close(again, expected, rtol=1e-3, atol=0)
            fresh = losses(*made(stage), 3, 5)
            assert ((fresh - expected).abs() > 1e-2 * expected).all()  # moments and weights matter
        dist.barrier()  # then rank 0 removes its folder


def check_updates(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        without_compiler(patch)
        found = []
        for early in (False, True):
            model, optimizer = made(3)
            if early:
                model.update_in_backward(optimizer)
            found.append(losses(model, optimizer, 3, 0))
        assert torch.equal(*found)


def check_compiled(rank, world_size):
    model = FullyShardedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    expected = losses(model, optimizer, 3, 0)
    model = FullyShardedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    torch.testing.assert_close(losses(model, optimizer, 3, 0), expected)
    model(torch.randn(32, 128)).sum().backward()
    doubled = torch.compile(lambda x: 2 * x.float(), backend="eager", fullgraph=True)
    for param in model.parameters():
        assert torch.equal(doubled(param.grad), 2 * param.grad.detach())


CHECKS = [
    *((f"8 bits saved by value, stage {s}", check_saved_by_value, (s,)) for s in (1, 2, 3)),
    ("8 bits of units updated in backward", check_updates, ()),
    ("gradients of shards in compiled functions", check_compiled, ()),
]


@pytest.mark.parametrize("name", [name for name, _, _ in CHECKS])
def test_on_two_ranks(errors_on_two_ranks, name):
    assert not errors_on_two_ranks[name], errors_on_two_ranks[name]
