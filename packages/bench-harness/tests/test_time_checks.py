"""The developer tool that times the checks of ddp-lite and shard-optim finds what it takes out."""

import importlib
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield importlib.import_module("time_checks")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("package", "check"),
    [
        ("ddp_lite", ("SameStep", "backward_ended")),
        ("ddp_lite", ("ModuleWatch", "has_changed")),
        ("shard_optim", ("Bucket", "check_storage")),
        ("shard_optim", ("LateComparison", "exchange")),
    ],
)
def test_blocks_without_checks_do_not_call_them(tool, package, check):
    net = tool.model(2, 4, torch.device("cpu"))
    net, optimizer, unchecked = getattr(tool, package)(net)
    called = []

    def step() -> int:
        called.clear()
        optimizer.zero_grad()
        net(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        return len(called)

    owner, name = getattr(tool, check[0]), check[1]
    original = getattr(owner, name)

    def counted(*arguments, **named):
        called.append(name)
        return original(*arguments, **named)

    with mock.patch.object(owner, name, counted):
        step()  # the first step has checks of its own
        assert step() > 0
        with unchecked():
            assert step() == 0
        assert step() > 0
