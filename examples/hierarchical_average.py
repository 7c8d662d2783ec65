"""An average on two levels as a comm hook of ``ddp_lite.BucketedDDP``, to copy and change.

::

    torchrun --nproc-per-node 4 examples/hierarchical_average.py

Four ranks on this machine's CPUs stand for two nodes of two GPUs. The program averages the same
gradients on one and on two levels, and prints the largest difference.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ddp_lite import Bucket, BucketedDDP
from ddp_lite.peer import PeerCopies
from ddp_lite.reduce import Waitable
from ddp_lite.wire import Chain


class HierarchicalAverage:
    """Averages over a two-dimensional mesh: inside each node, across nodes, inside again.

    Only 1/(ranks per node) of the gradients crosses between nodes: reduce-scatter inside the
    node, all-reduce of each shard across nodes, all-gather inside the node.

    Args:
        mesh: shape (nodes, ranks per node), covering exactly the wrapper's process group.
        inside: copies between the GPUs of this node, made with the mesh's second group, in place
            of that group's collectives.

    Raises:
        ValueError: the mesh does not have two dimensions, or ``inside`` is for other ranks.
    """

    def __init__(self, mesh: DeviceMesh, *, inside: PeerCopies | None = None) -> None:
        if mesh.ndim != 2:
            raise ValueError(
                f"the mesh must have two dimensions (nodes, ranks per node), but got {mesh.ndim}. "
                "Build it with init_device_mesh(device, (nodes, ranks_per_node))"
            )
        self._across, self._inside = mesh.get_group(0), mesh.get_group(1)
        self._size = mesh.size()
        self._copies = inside
        if inside is not None and inside.group.group_name != self._inside.group_name:
            raise ValueError(
                "inside must be made with the mesh's second group, mesh.get_group(1), but got "
                f"copies of the group {inside.group.group_name}. Build "
                "PeerMemory(mesh.get_group(1))"
            )
        self.settings = f"copies inside {inside is not None}"

    def __call__(self, flat: Tensor, bucket: Bucket) -> Waitable:
        """Starts averaging ``flat`` in place."""
        if bucket.process_group.size() != self._size:
            raise ValueError(
                f"the mesh must cover the wrapper's process group, but it has {self._size} ranks "
                f"and the group {bucket.process_group.size()}"
            )
        shard = flat.new_empty(flat.numel() // self._inside.size())

        copies = self._copies
        # Copies average inside the node; NCCL sums.
        divisor = self._size if copies is None else self._across.size()

        def scatter_inside() -> Waitable | None:
            if copies is not None:
                return copies.reduce_scatter([shard], [flat])
            return dist.reduce_scatter_tensor(shard, flat, group=self._inside, async_op=True)

        def reduce_across() -> Waitable | None:
            shard.mul_(1.0 / divisor)
            return dist.all_reduce(shard, group=self._across, async_op=True)

        def gather_inside() -> Waitable | None:
            if copies is not None:
                return copies.all_gather([flat], [shard])
            return dist.all_gather_into_tensor(flat, shard, group=self._inside, async_op=True)

        stages = [scatter_inside, reduce_across, gather_inside]
        return Chain(stages, [flat, shard], bucket.device)


def gradients(comm_hook: HierarchicalAverage | None) -> Tensor:
    """Averages of one backward, in which every rank has inputs of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    wrapped = BucketedDDP(model, comm_hook=comm_hook)
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    wrapped(inputs).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def main() -> None:
    """Compares the two."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    nodes = 2 if ranks % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (nodes, ranks // nodes))  # "cuda" with NCCL
    difference = (gradients(HierarchicalAverage(mesh)) - gradients(None)).abs().max()
    if dist.get_rank() == 0:
        print(f"{nodes} nodes of {ranks // nodes}: largest difference {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:  # started without torchrun, or for --help
        sys.exit(__doc__)
    main()
