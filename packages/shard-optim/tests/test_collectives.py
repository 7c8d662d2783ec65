"""Collectives of several tensors on a gloo group of one rank."""

import pytest
import torch
import torch.distributed as dist

from ddp_lite.ranks import Ranks
from shard_optim.communication import GroupCollectives


@pytest.fixture
def gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_gathers_of_several_tensors_avoid_the_call_that_corrupts_gloos_memory(gloo, monkeypatch):
    """See the comment in ``GroupCollectives``."""

    def refuse(*_):
        raise AssertionError("this call is not safe beside another one on gloo")

    monkeypatch.setattr(dist.ProcessGroup, "allgather_into_tensor_coalesced", refuse)
    parts = [torch.arange(3.0), torch.arange(7.0)]
    wholes = [torch.zeros(3), torch.zeros(7)]
    collectives = GroupCollectives(Ranks(gloo, torch.device("cpu"), "test"))
    collectives.all_gather(wholes, parts).wait()
    averages = [torch.zeros(3), torch.zeros(7)]
    collectives.reduce_scatter(averages, parts).wait()
    for part, whole, average in zip(parts, wholes, averages, strict=True):
        assert torch.equal(whole, part)
        assert torch.equal(average, part)
