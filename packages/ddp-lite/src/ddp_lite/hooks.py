"""Comm hooks: other ways to average a bucket, chosen with ``BucketedDDP(..., comm_hook=...)``.

A hook is called as ``hook(flat, bucket)`` when a bucket is complete. It reduces ``flat``, one
dimension, length ``bucket.padded_numel``, in place and returns something with ``wait()``. Hooks
run in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Never, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ddp_lite.buckets import Bucket
from ddp_lite.reduce import Waitable
from ddp_lite.wire import Chain, SideStream

_REMOVED = {
    "CompressTo": "pass wire_dtype=torch.bfloat16 to BucketedDDP",
    "PowerSGD": "it is examples/power_sgd.py of the repository, to copy and change",
}


class Communication(Protocol):
    """Collectives that can take the place of a group's own, such as ``peer.PeerCopies``."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that exchange."""

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], /) -> Waitable:
        """Starts averaging each input, shape (world_size * n,); its output gets this rank's n."""

    def all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], /) -> Waitable:
        """Starts filling each whole, shape (world_size * n,), with every rank's n elements."""


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

    def __init__(self, mesh: DeviceMesh, *, inside: Communication | None = None) -> None:
        if mesh.ndim != 2:
            raise ValueError(
                f"the mesh must have two dimensions (nodes, ranks per node), but got {mesh.ndim}. "
                "Build it with init_device_mesh(device, (nodes, ranks_per_node))"
            )
        self._across, self._inside = mesh.get_group(0), mesh.get_group(1)
        self._size = mesh.size()
        self._side = SideStream()
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
        return Chain(stages, [flat, shard], bucket.device, self._side.on(bucket.device))


def __getattr__(name: str) -> Never:
    """Says what to write for hooks that there were."""
    if name in _REMOVED:
        raise ImportError(f"ddp_lite.hooks has no {name} any more: {_REMOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
