"""What each rank of ``test_two_nodes.py`` runs under torchrun: train, compare, time the link."""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddp_lite import BucketedDDP

sys.path.append(str(Path(__file__).parents[3] / "examples"))

from hierarchical_average import HierarchicalAverage


def mlp(width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def gradients(build: Callable[[nn.Module], BucketedDDP]) -> torch.Tensor:
    wrapped = build(mlp())
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    wrapped(x).square().sum().backward()
    wrapped.finish_gradient_synchronization()
    return torch.cat([p.grad.flatten() for p in wrapped.parameters()])


def expected(world_size: int) -> torch.Tensor:
    model = mlp()
    for rank in range(world_size):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))
        (model(x).square().sum() / world_size).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def seconds_per_synchronisation(group: dist.ProcessGroup, wire: torch.dtype | None) -> float:
    wrapped = BucketedDDP(mlp(512), 1, process_group=group, wire_dtype=wire, rebucket=False)
    best = float("inf")
    for _ in range(3):
        for p in wrapped.parameters():
            p.grad = torch.ones_like(p)
        dist.barrier(group)
        begin = time.perf_counter()
        wrapped.finish_gradient_synchronization()
        best = min(best, time.perf_counter() - begin)
    return best


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, world_size // 2))
    reference = expected(world_size)
    torch.testing.assert_close(gradients(lambda m: BucketedDDP(m, 0.001)), reference)
    hierarchical = gradients(lambda m: BucketedDDP(m, comm_hook=HierarchicalAverage(mesh)))
    torch.testing.assert_close(hierarchical, reference)
    across = mesh.get_group(0)  # one rank of each node
    times = {}
    if mesh.get_local_rank(1) == 0:
        times["float32"] = seconds_per_synchronisation(across, None)
        times["bfloat16"] = seconds_per_synchronisation(across, torch.bfloat16)
    dist.barrier()
    if rank == 0:
        print("RESULT " + json.dumps({"world_size": world_size, "seconds": times}), flush=True)
    dist.destroy_process_group()
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"


if __name__ == "__main__":
    main()
