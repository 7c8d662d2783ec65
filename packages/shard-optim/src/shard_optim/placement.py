"""Where the parameters of all groups live: which bucket each is in, and what it is called."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shard_optim.buckets import Bucket
from shard_optim.handoff import FlatBucket, plans_from_layout
from shard_optim.partition import BucketPlan, Partition, plan_buckets

MIB = 1024**2

# Buckets of a default size: few enough that starting them costs the host little, many enough that
# they overlap with backward and forward, and large enough for the network's full bandwidth.
DEFAULT_BUCKETS = 8
SMALLEST_DEFAULT_MB = 25
LARGEST_DEFAULT_MB = 1000

# What vectorised loads, cuBLAS and Hopper's tensor memory accelerator need at least.
ALIGNMENT_BYTES = 16

Groups = Sequence[dict[str, Any]]


def all_params(groups: Groups) -> list[Tensor]:
    """Every parameter over all groups, in order: position is its number."""
    return [param for group in groups for param in group["params"]]


def name_of(groups: Groups, index: int) -> str:
    """The parameter's name if groups carry names, else its number, group and shape."""
    for number, group in enumerate(groups):
        if index < len(group["params"]):
            if "param_names" in group:
                return str(group["param_names"][index])
            shape = tuple(group["params"][index].shape)
            return f"parameter {index} of group {number} with shape {shape}"
        index -= len(group["params"])
    raise IndexError(f"no parameter has number {index}")


class Placement:
    """Puts trainable parameters into buckets, and remembers which are frozen.

    Args:
        group: the ranks that share each bucket.
        partition: "flat" or "whole".
        bucket_size_mb: size of a bucket in MB (1024² bytes); None chooses by the model's size,
            and begins with smaller ones.

    Attributes:
        bucket_size_mb: as given.
        buckets: all buckets, in the order in which they were made.
        frozen: numbers of the parameters that have no place.
    """

    def __init__(
        self, group: dist.ProcessGroup, partition: Partition, bucket_size_mb: float | None
    ) -> None:
        self.bucket_size_mb = bucket_size_mb
        self.buckets: list[Bucket] = []
        self.frozen: list[int] = []
        self._group = group
        self._partition: Partition = partition

    def place(self, groups: Groups, indices: Iterable[int]) -> list[Bucket]:
        """Makes buckets for the trainable ones of these parameters."""
        params = all_params(groups)
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
        for index in indices:
            if params[index].requires_grad:
                kinds[params[index].dtype, params[index].device].append(index)
            else:
                self.frozen.append(index)
        added = []
        for (dtype, _), members in kinds.items():
            for plan in self._plan([params[index].numel() for index in members], dtype):
                chosen = [members[position] for position in plan.members]
                added.append(self._bucket(groups, chosen, plan))
        self.buckets += added
        return added

    def place_by_layout(self, groups: Groups, layout: Sequence[FlatBucket]) -> list[Bucket]:
        """Makes buckets for all trainable parameters where a wrapper has them."""
        params = all_params(groups)
        self.frozen = [index for index, param in enumerate(params) if not param.requires_grad]
        trainable = {id(p): index for index, p in enumerate(params) if p.requires_grad}
        plans = plans_from_layout(layout, trainable, world_size=self._group.size())
        added = [self._bucket(groups, plan.members, plan) for plan in plans]
        self.buckets += added
        return added

    def place_unfrozen(self, groups: Groups) -> list[Bucket]:
        """Makes buckets for parameters that became trainable; the same on every rank."""
        if not self.frozen:
            return []
        params = all_params(groups)
        thawed = [index for index in self.frozen if params[index].requires_grad]
        self.frozen = [index for index in self.frozen if index not in thawed]
        return self.place(groups, thawed)

    def _plan(self, numels: Sequence[int], dtype: torch.dtype) -> list[BucketPlan]:
        size_mb, first = self.bucket_size_mb, None
        if size_mb is None:
            share = sum(numels) * dtype.itemsize / DEFAULT_BUCKETS / MIB
            size_mb = min(max(share, SMALLEST_DEFAULT_MB), LARGEST_DEFAULT_MB)
            first = SMALLEST_DEFAULT_MB * MIB // dtype.itemsize
        return plan_buckets(
            numels,
            world_size=self._group.size(),
            partition=self._partition,
            bucket_numel=max(1, int(size_mb * MIB / dtype.itemsize)),
            first_numel=first,
            alignment=max(1, ALIGNMENT_BYTES // dtype.itemsize),
        )

    def _bucket(self, groups: Groups, indices: Sequence[int], plan: BucketPlan) -> Bucket:
        params = all_params(groups)
        return Bucket(
            [params[index] for index in indices],
            indices=indices,
            names=[name_of(groups, index) for index in indices],
            plan=plan,
            shaped=self._partition == "whole",
            group=self._group,
        )
