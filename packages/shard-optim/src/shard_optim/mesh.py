"""Which ranks hold a shard each, and which hold the same shard.

With a two-dimensional mesh parameters are cut over its last dimension only, such as the GPUs of one
node, where gathers are fast. Gradients are reduce-scattered there, and the shards all-reduced
across the first dimension, over which everything is replicated (hybrid sharding).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shard_optim.communication import CollectiveError, check_agreement, guarded, resolve_group
from shard_optim.exchange import all_gather_values, broadcast_value, finish


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one model.

    Attributes:
        shards: those that together hold every parameter once.
        replicas: those that hold the same shard as this rank; None if there is no other.
        everyone: all of them, by their numbers in the default group.
    """

    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    everyone: list[int]

    @property
    def levels(self) -> list[dist.ProcessGroup]:
        """Groups such that a broadcast from the first rank of each in turn reaches all ranks."""
        return [self.shards] if self.replicas is None else [self.replicas, self.shards]

    @property
    def first(self) -> bool:
        """Whether this rank is the first one of every group it belongs to."""
        return all(group.rank() == 0 for group in self.levels)

    @property
    def first_replica(self) -> bool:
        """Whether this rank is one of those that together hold the first copy of everything."""
        return self.replicas is None or self.replicas.rank() == 0

    def broadcast_to_replicas(self, what: str, values: Tensor) -> None:
        """Overwrites a tensor with that of the first replica's rank that holds the same shard.

        Raises:
            CollectiveError: if a peer died or timed out.
        """
        assert self.replicas is not None
        guarded(what, self.replicas, _broadcast, values, self.replicas)

    def broadcast(self, what: str, values: Tensor) -> None:
        """Overwrites a tensor with the first rank's.

        Raises:
            CollectiveError: if a peer died or timed out.
        """
        for group in self.levels:
            guarded(what, group, _broadcast, values, group)

    def broadcast_value(self, what: str, value: Any) -> Any:
        """The first rank's value; see ``exchange.py`` for what it may be.

        Raises:
            CollectiveError: if a peer died or timed out.
        """
        for group in self.levels:
            value = guarded(what, group, broadcast_value, value, group)
        return value

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's value, in the order of ``everyone``; see ``exchange.py``.

        Raises:
            CollectiveError: if a peer died or timed out.
        """
        everyone: list[Any] = guarded(what, self.shards, all_gather_values, value, self.shards)
        if self.replicas is not None:
            replicas = guarded(what, self.replicas, all_gather_values, everyone, self.replicas)
            everyone = [each for replica in replicas for each in replica]
        return everyone

    def on_first_replica(self, what: str, action: Callable[[], object]) -> None:
        """Does something on the ranks of the first replica, while the others wait for it.

        Raises:
            CollectiveError: on the others, if the action raised on the first; if a peer died.
        """
        if self.replicas is None:
            action()
            return
        problem = None
        try:
            if self.replicas.rank() == 0:
                action()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            problem = guarded(what, self.replicas, broadcast_value, problem, self.replicas)
        if problem is not None:
            raise CollectiveError(
                f"every rank of the group must take part in {what}, but it failed on the first "
                f"replica: {problem}"
            )

    def check_agreement(self, lines: Sequence[str], device: torch.device) -> str:
        """Compares what the ranks wrap; returns a name for it, the same on every rank.

        Raises:
            RuntimeError: on every rank if two differ, naming the first difference.
        """
        return check_agreement(
            lines,
            group=self.shards,
            across=self.replicas,
            device=device,
            must="wrap the same model with the same settings",
            remedy="build the model from the same configuration on every rank",
        )


def _broadcast(values: Tensor, group: dist.ProcessGroup) -> None:
    finish(dist.broadcast(values, group=group, group_src=0, async_op=True))


def ranks_of(group: dist.ProcessGroup) -> Ranks:
    """The ranks of one group."""
    return Ranks(group, None, dist.get_process_group_ranks(group))


def resolve_ranks(process_group: dist.ProcessGroup | DeviceMesh | None) -> Ranks:
    """The ranks of a group, of a mesh of one or two dimensions, or of the default group.

    Raises:
        TypeError: if it is something else.
        ValueError: for a mesh of more dimensions.
        RuntimeError: if there is neither.
    """
    if not isinstance(process_group, (dist.ProcessGroup, DeviceMesh, type(None))):
        raise TypeError(
            "process_group must be a process group that this rank belongs to, or a device mesh, "
            f"but got {process_group!r}. Pass what torch.distributed.new_group() returned on the "
            "ranks of the group, or leave it out for the default group."
        )
    if not isinstance(process_group, DeviceMesh) or process_group.ndim == 1:
        return ranks_of(resolve_group(process_group))
    if process_group.ndim > 2:
        raise ValueError(
            "process_group must be a device mesh of one dimension, or of two to replicate over the "
            f"first and shard over the second, but got {process_group.ndim} dimensions. Pass a "
            "part of the mesh."
        )
    replicas = process_group.get_group(0)
    everyone = process_group.mesh.flatten().tolist()
    return Ranks(process_group.get_group(1), None if replicas.size() == 1 else replicas, everyone)
