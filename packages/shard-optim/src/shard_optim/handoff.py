"""Sharing buckets with a data-parallel wrapper, through plain data.

A bucketed wrapper that hands each flat bucket of gradients to a hook can have it reduce-scattered
instead of all-reduced: half the traffic. For that the optimizer must own exactly the ranges that
the reduce-scatter leaves averaged, so it takes over the wrapper's layout:

    hook = ReduceScatterHook()
    wrapped = BucketedWrapper(model, comm_hook=hook)       # called as hook(flat, bucket)
    optimizer = ShardedOptimizer(model.parameters(), AdamW, layout=wrapped.buckets)

Neither side imports the other: a layout is anything that looks like ``FlatBucket``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from shard_optim.collectives import guarded, reduce_scatter, resolve_group
from shard_optim.partition import BucketPlan


class FlatBucket(Protocol):
    """What a wrapper says about one of its buckets."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters whose gradients it holds."""

    @property
    def slices(self) -> Sequence[slice]:
        """Where each one's gradient lies in the flat tensor."""

    @property
    def padded_numel(self) -> int:
        """Length of the flat tensor, a multiple of the world size."""


class ReduceScatterHook:
    """Averages each rank's range of a flat bucket, in place; the rest is left unspecified.

    Args:
        process_group: the ranks to average over; None means the default group.

    Raises:
        RuntimeError: without a process group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = resolve_group(process_group)

    def __call__(self, flat: Tensor, bucket: Any) -> ReduceScatterHook.Work:
        """Starts on ``flat``, shape (padded_numel,); what it returns has ``wait()``."""
        world_size = self._group.size()
        if flat.numel() % world_size:
            raise ValueError(
                "a flat bucket must divide evenly over the ranks, but it has "
                f"{flat.numel()} elements for {world_size} ranks; pad it"
            )
        if world_size == 1 or flat.numel() == 0:
            return self.Work(self._group, None)
        owned = flat.chunk(world_size)[dist.get_rank(self._group)]
        work = guarded(
            "the reduce-scatter of a gradient bucket",
            self._group,
            reduce_scatter,
            owned,
            flat,
            self._group,
        )
        return self.Work(self._group, work)

    class Work:
        """A started reduce-scatter."""

        def __init__(self, group: dist.ProcessGroup, work: dist.Work | None) -> None:
            self._group, self._work = group, work

        def wait(self) -> None:
            """Waits; on CUDA the current stream does."""
            if self._work is not None:
                guarded("the reduce-scatter of a gradient bucket", self._group, self._work.wait)


def plans_from_layout(
    layout: Sequence[FlatBucket], trainable: Mapping[int, int], *, world_size: int
) -> list[BucketPlan]:
    """The wrapper's buckets as plans, last bucket first: the order in which forward reads them.

    Args:
        layout: the wrapper's buckets.
        trainable: the number of each parameter to place, by identity.
        world_size: ranks that share each bucket.

    Raises:
        ValueError: if the layout holds other parameters, or does not divide evenly.
    """
    plans = []
    placed: set[int] = set()
    for bucket in reversed(layout):
        for param in bucket.parameters:
            if id(param) not in trainable or id(param) in placed:
                raise ValueError(
                    "a layout must hold each trainable parameter of the optimizer once, but one of "
                    f"shape {tuple(param.shape)} is foreign to it or appears twice; pass the "
                    "buckets of the wrapper around the same model"
                )
            placed.add(id(param))
        if bucket.padded_numel % world_size:
            raise ValueError(
                "a bucket of a layout must divide evenly over the ranks, but one has "
                f"{bucket.padded_numel} elements for {world_size} ranks; pad it"
            )
        plans.append(
            BucketPlan(
                members=tuple(trainable[id(param)] for param in bucket.parameters),
                offsets=tuple(part.start for part in bucket.slices),
                numels=tuple(part.stop - part.start for part in bucket.slices),
                chunk=bucket.padded_numel // world_size,
                world_size=world_size,
            )
        )
    missing = len(trainable) - len(placed)
    if missing:
        raise ValueError(
            "a layout must hold each trainable parameter of the optimizer once, but "
            f"{missing} are not in it; pass the buckets of the wrapper around the same model"
        )
    return plans
