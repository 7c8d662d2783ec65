"""Neighbouring shards updated as one tensor, so that a step touches few Python objects.

Shards of one group that lie back to back in their bucket form a run as long as all of them have
gradients. An element-wise update of the whole run equals the updates of its parts, and its state
can be cut at any time: a run in which only some parameters have a gradient falls apart for good.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shard_optim.buckets import Bucket, Shard


@dataclass(eq=False, kw_only=True)
class Run:
    """Shards that the local optimizer updates as one tensor; usually many, at least one.

    Attributes:
        shards: neighbours, in ascending order.
        group: number of their parameter group.
        begin: first element inside this rank's range of the bucket.
        base: their elements inside the bucket.
        tensor: what the optimizer updates: ``base`` itself, or a master copy of it.
    """

    shards: Sequence[Shard]
    group: int
    begin: int
    base: Tensor
    tensor: Tensor

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a higher-precision copy."""
        return self.tensor is not self.base

    def give_gradient(self, grad: Tensor) -> None:
        """Sets the gradient: a view of ``grad``, or a copy in the master's dtype.

        Args:
            grad: one value per element, in memory order; one-dimensional.
        """
        if self.base.ndim != 1:
            grad = grad.as_strided(self.base.size(), self.base.stride())
        self.tensor.grad = grad.to(self.tensor.dtype)

    def parts(self) -> list[Run]:
        """One run per shard, over the same memory."""
        return [
            Run(
                shards=(shard,),
                group=self.group,
                begin=shard.begin,
                base=shard.view,
                tensor=shard.tensor,
            )
            for shard in self.shards
        ]

    def state_of(
        self, shard: Shard, state: Mapping[str, Any], *, independent: bool = False
    ) -> Mapping[str, Any]:
        """The part of the run's state that belongs to one of its shards.

        Args:
            shard: one of the run's.
            state: the run's.
            independent: copy what all shards share, such as a count of steps. Values per element
                are always views.
        """
        if len(self.shards) == 1:
            return state
        first = shard.begin - self.begin
        part: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == self.tensor.shape:
                part[key] = value.narrow(0, first, shard.span.length)
            else:
                part[key] = copy.deepcopy(value) if independent else value
        return part

    def joined_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The run's state from its shards' states, or None if they cannot be one state.

        Args:
            states: of each shard; empty where a shard has none.
        """
        first = states[0]
        if any(state.keys() != first.keys() for state in states):
            return None
        joined: dict[str, Any] = {}
        for key, value in first.items():
            values = [state[key] for state in states]
            if all(
                isinstance(v, Tensor) and v.shape == shard.tensor.shape
                for v, shard in zip(values, self.shards, strict=True)
            ):
                joined[key] = torch.cat(values)
            elif all(_equal(value, other) for other in values[1:]):
                joined[key] = value
            else:
                return None
        return joined


def make_runs(
    bucket: Bucket,
    group_of: Mapping[int, int],
    *,
    merge: bool,
    master_dtype: torch.dtype | None,
) -> list[Run]:
    """This rank's shards of a bucket, as runs.

    Args:
        bucket: the bucket.
        group_of: each parameter's group, by parameter number.
        merge: whether neighbours may be updated as one tensor.
        master_dtype: dtype of the copies that the optimizer updates, or None for none.
    """
    gathered: list[list[Shard]] = []
    for shard in bucket.shards:
        last = gathered[-1][-1] if gathered else None
        if (
            merge
            and last is not None
            and last.view.ndim == shard.view.ndim == 1
            and last.begin + last.span.length == shard.begin
            and group_of[last.index] == group_of[shard.index]
        ):
            gathered[-1].append(shard)
        else:
            gathered.append([shard])
    runs = []
    for shards in gathered:
        first = shards[0]
        base = first.view
        if len(shards) > 1:
            length = sum(shard.span.length for shard in shards)
            base = bucket.owned.narrow(0, first.begin, length)
        tensor = base
        if master_dtype is not None and master_dtype != bucket.dtype:
            tensor = base.to(master_dtype)
            for shard in shards:
                shard.tensor = (
                    tensor
                    if len(shards) == 1
                    else tensor.narrow(0, shard.begin - first.begin, shard.span.length)
                )
        runs.append(
            Run(
                shards=tuple(shards),
                group=group_of[first.index],
                begin=first.begin,
                base=base,
                tensor=tensor,
            )
        )
    return runs


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return bool(a == b)
