"""The optimizers that run on one rank: instances of the wrapped class over this rank's shards.

A step touches few Python objects, and overlaps with communication, because of two groupings:

- Neighbouring shards of one parameter group are updated as one tensor (``FusedShard``) as long as
  all of them have gradients. An element-wise update of the whole equals the updates of its parts,
  and its state can be cut at any time: one in which only some parameters have a gradient falls
  apart for good.
- Neighbouring buckets share one instance of the class (``StepGroup``), so that the all-gather of
  one group's parameters runs while the next group is updated. The class treats parameters
  independently of each other, or it could not be sharded over ranks either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shard_optim.bucket_plan import Partition, split_by_size
from shard_optim.buckets import Bucket, Shard
from shard_optim.communication import check_gradient, in_dtype
from shard_optim.kept_moments import by_value, restore_forms
from shard_optim.optimizer_class import check_elementwise_state
from shard_optim.parameter_groups import Groups, all_params
from shard_optim.place import Place, in_memory_order

# Key of a master copy among a parameter's state.
MASTER = "master_param"

# More groups hide more of the all-gather under the update; each costs the host one optimizer call.
MAX_STEP_GROUPS = 8
MIN_STEP_GROUP_BYTES = 128 * 1024**2


@dataclass(eq=False, kw_only=True)
class FusedShard:
    """Shards that the local optimizer updates as one tensor; usually many, at least one."""

    shards: Sequence[Shard]  # neighbours, in ascending order
    group: int  # number of their parameter group
    base: Tensor  # their elements inside the bucket
    tensor: Tensor  # what the optimizer updates: ``base`` itself, or a master copy of it
    versions: list[int] = field(default_factory=list)  # of the parameters when last looked at

    @property
    def begin(self) -> int:
        """First element inside this rank's range of the bucket."""
        return self.shards[0].begin

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a higher-precision copy."""
        return self.tensor is not self.base

    def masters(self) -> list[Tensor]:
        """The parts of the master copy, by shard."""
        if len(self.shards) == 1:
            return [self.tensor]
        return list(self.tensor.split([shard.view.numel() for shard in self.shards]))

    def follow_parameters(self) -> None:
        """Takes into the master copy what has been written into the parameters by others."""
        versions = [shard.param._version for shard in self.shards]  # the gather leaves them alone
        if versions != self.versions:
            self.versions = versions
            rounded = self.tensor.to(self.base.dtype)
            self.tensor.copy_(torch.where(rounded == self.base, self.tensor, self.base))

    def give_gradient(self, grad: Tensor) -> None:
        """Sets the gradient, from a vector in memory order: a view, or a copy in another dtype."""
        if self.base.ndim != 1:
            grad = grad.as_strided(self.base.size(), self.base.stride())
        self.tensor.grad = in_dtype(grad, self.tensor.dtype)

    def parts(self) -> list[FusedShard]:
        """One per shard, over the same memory."""
        return [
            FusedShard(
                shards=(shard,),
                group=self.group,
                base=shard.view,
                tensor=master if self.has_master else shard.view,
            )
            for shard, master in zip(self.shards, self.masters(), strict=True)
        ]

    def state_of(self, shard: Shard, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of its state that belongs to one of its shards; values per element are views."""
        if len(self.shards) == 1:
            return state
        first, length = shard.begin - self.begin, shard.view.numel()
        return {
            key: by_value(value).narrow(0, first, length)
            if isinstance(value, Tensor) and value.shape == self.tensor.shape
            else value
            for key, value in state.items()
        }

    def joined_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Its state from that of each shard, empty for none; None if they cannot be one state."""
        first = states[0]
        if any(state.keys() != first.keys() for state in states):
            return None
        joined: dict[str, Any] = {}
        for key, value in first.items():
            values = [state[key] for state in states]
            shapes = [shard.view.shape for shard in self.shards]
            if shapes == [getattr(each, "shape", None) for each in values]:
                joined[key] = torch.cat(values)
            elif all(_equal(value, other) for other in values[1:]):
                joined[key] = value
            else:
                return None
        return joined


@dataclass(eq=False)
class StepGroup:
    """Neighbouring buckets and the optimizer that updates this rank's shards of them."""

    # Holds one local group per group of whole parameters that existed when this was made; newer
    # groups have no parameters in it.
    optimizer: Optimizer
    fused: dict[Bucket, list[FusedShard]]  # what it updates, by bucket, in the order of the buckets
    checked: bool = False  # whether its state has been looked at after a step

    def all_fused(self) -> list[FusedShard]:
        """The tensors that the optimizer updates, in the order of the buckets."""
        return [each for several in self.fused.values() for each in several]

    def split(self, bucket: Bucket, fused: FusedShard) -> list[FusedShard]:
        """Replaces a fused shard by one per shard, each with its part of the state."""
        parts = fused.parts()
        if len(parts) == 1:
            return parts
        state = self.optimizer.state.pop(fused.tensor, {})
        if state:
            for part in parts:
                own = fused.state_of(part.shards[0], state)
                self.optimizer.state[part.tensor] = unshared(own)
        _replace(self.fused[bucket], fused, parts)
        tensors = self.optimizer.param_groups[fused.group]["params"]
        _replace(tensors, fused.tensor, [part.tensor for part in parts])
        return parts

    def load(self, states: Mapping[int, Mapping[str, Any]], settings: Groups) -> None:
        """Replaces all state, by parameter number, and hyperparameters; fills master copies."""
        found: dict[Tensor, dict[str, Any]] = {}
        members = [(bucket, each) for bucket, several in self.fused.items() for each in several]
        for bucket, fused in members:
            given = [unshared(states.get(shard.index, {})) for shard in fused.shards]
            for shard, state, master in zip(fused.shards, given, fused.masters(), strict=True):
                saved = state.pop(MASTER, shard.view)
                if fused.has_master:
                    master.copy_(saved)
            joined = given[0] if len(given) == 1 else fused.joined_state(given)
            if joined is not None:
                found[fused.tensor] = joined
            else:
                parts = self.split(bucket, fused)
                found |= {part.tensor: state for part, state in zip(parts, given, strict=True)}
        load_into(self.optimizer, found, settings)


class LocalOptimizer:
    """Updates this rank's shards with the hyperparameters of the groups of whole parameters.

    Args:
        make: called with groups and ``kwargs``, makes an optimizer of some shards.
        merge: whether neighbouring shards may be updated as one tensor, which needs their
            gradients in one piece too.
    """

    def __init__(
        self,
        make: Callable[..., Optimizer],
        *,
        partition: Partition,
        merge: bool,
        master_dtype: torch.dtype | None,
        kwargs: dict[str, Any],
    ) -> None:
        if master_dtype is not None and not (
            isinstance(master_dtype, torch.dtype) and master_dtype.is_floating_point
        ):
            raise ValueError(
                "master_dtype must be None or a floating-point torch.dtype, but got "
                f"{master_dtype!r}. Pass torch.float32."
            )
        self.step_groups: list[StepGroup] = []
        self._make, self._kwargs = make, kwargs
        self._partition, self._merge, self._master_dtype = partition, merge, master_dtype

    def add(self, groups: Groups, buckets: Sequence[Bucket]) -> None:
        """Adds this rank's shards of new buckets."""
        group_of = [number for number, group in enumerate(groups) for _ in group["params"]]
        sizes = [bucket.flat.nbytes for bucket in buckets]
        limit = max(sum(sizes) / MAX_STEP_GROUPS, MIN_STEP_GROUP_BYTES)
        for run in split_by_size(sizes, limit):
            fused = {buckets[at]: self._fuse(buckets[at], group_of) for at in run}
            tensors: list[list[Tensor]] = [[] for _ in groups]
            for each in (each for several in fused.values() for each in several):
                tensors[each.group].append(each.tensor)
            for own, group in zip(tensors, groups, strict=True):
                if not own and group["params"]:
                    own.append(stand_in(group["params"][0], group["params"][0].size()))
            local_groups = [
                settings_of(group) | {"params": own}
                for group, own in zip(groups, tensors, strict=True)
            ]
            optimizer = self._make(local_groups, **self._kwargs)
            for group, local in zip(groups, optimizer.param_groups, strict=True):
                group.update(settings_of(local))  # some classes hold them in tensors
            self.step_groups.append(StepGroup(optimizer, fused))

    def _fuse(self, bucket: Bucket, group_of: Sequence[int]) -> list[FusedShard]:
        """This rank's shards of a bucket, mergeable neighbours of one parameter group together."""
        gathered: list[list[Shard]] = []
        for shard in bucket.shards:
            last = gathered[-1][-1] if gathered else None
            if (
                self._merge
                and last is not None
                and last.view.ndim == shard.view.ndim == 1
                and last.begin + last.view.numel() == shard.begin
                and group_of[last.index] == group_of[shard.index]
            ):
                gathered[-1].append(shard)
            else:
                gathered.append([shard])
        fused = []
        for shards in gathered:
            first, length = shards[0], sum(shard.view.numel() for shard in shards)
            base, group = first.view, group_of[first.index]
            if len(shards) > 1:
                base = bucket.owned.narrow(0, first.begin, length)
            tensor = base if self._master_dtype is None else base.to(self._master_dtype)
            fused.append(FusedShard(shards=shards, group=group, base=base, tensor=tensor))
        return fused

    def update(self, groups: Groups, **kwargs: Any) -> Iterator[Bucket]:
        """Updates this rank's shards; yields each bucket as soon as its shards are updated."""
        settings = list(map(settings_of, groups))
        for step_group in self.step_groups:
            optimizer = step_group.optimizer
            for given, local in zip(settings, optimizer.param_groups, strict=False):
                local.update(given)
            mastered = [fused for fused in step_group.all_fused() if fused.has_master]
            for fused in mastered:
                fused.follow_parameters()
            optimizer.step(**kwargs)
            for group, local in zip(groups, optimizer.param_groups, strict=False):
                group.update(settings_of(local))  # some classes count or adapt in their groups
            if self._partition == "flat" and not step_group.checked:
                step_group.checked = True
                for fused in step_group.all_fused():
                    check_elementwise_state(optimizer, fused.tensor)
            if mastered:  # updated, and rounded into the parameters
                torch._foreach_copy_([f.base for f in mastered], [f.tensor for f in mastered])
            yield from step_group.fused
        self.drop_gradients()

    # --- gradients ---------------------------------------------------------------------------

    def take_gradients(self) -> None:
        """Gives every shard its slice of its parameter's own gradient."""
        for fused in self._all_fused():
            (shard,) = fused.shards
            grad = shard.param.grad
            check_gradient(grad, shard.place.name)
            if grad is None:
                fused.tensor.grad = None
                continue
            flat = in_memory_order(grad, shard.param)
            fused.give_gradient(flat.narrow(0, *shard.place.span))

    def take_reduced(self, slices: Mapping[Bucket, Tensor], unused: frozenset[int]) -> None:
        """Gives every shard its slice of its bucket's, but none to ``unused`` parameters."""
        for step_group in self.step_groups:
            for bucket in step_group.fused:
                for fused in list(step_group.fused[bucket]) if unused else ():
                    without = sum(shard.index in unused for shard in fused.shards)
                    if 0 < without < len(fused.shards):
                        step_group.split(bucket, fused)
                averaged = slices[bucket]
                for fused in step_group.fused[bucket]:
                    if fused.shards[0].index in unused:
                        fused.tensor.grad = None
                    else:
                        grad = averaged.narrow(0, fused.begin, fused.base.numel())
                        fused.give_gradient(grad)

    def drop_gradients(self) -> None:
        """Sets the gradients of all shards to None, which frees them."""
        for fused in self._all_fused():
            fused.tensor.grad = None

    def gradients(self) -> list[Tensor]:
        """The gradients of the shards that have one."""
        grads = (fused.tensor.grad for fused in self._all_fused())
        return [grad for grad in grads if grad is not None]

    def _all_fused(self) -> Iterator[FusedShard]:
        for step_group in self.step_groups:
            yield from step_group.all_fused()

    # --- state -------------------------------------------------------------------------------

    def places(self) -> dict[int, Place]:
        """Where the state of each parameter that has a bucket lies, by its number."""
        return {
            index: place
            for step_group in self.step_groups
            for bucket in step_group.fused
            for index, place in zip(bucket.indices, bucket.places, strict=True)
        }

    def states(self) -> dict[int, dict[str, Any]]:
        """State of each shard, master copy included, by parameter number."""
        found: dict[int, dict[str, Any]] = {}
        for step_group in self.step_groups:
            state = step_group.optimizer.state
            for fused in step_group.all_fused():
                for shard in fused.shards if fused.tensor in state else ():
                    found[shard.index] = dict(fused.state_of(shard, state[fused.tensor]))
                for shard, master in zip(fused.shards, fused.masters(), strict=True):
                    if fused.has_master:
                        found.setdefault(shard.index, {})[MASTER] = master
        return {index: state for index, state in sorted(found.items()) if state}

    @torch.no_grad()
    def install(self, states: Mapping[int, Mapping[str, Any]], settings: Groups) -> None:
        """Replaces all state and hyperparameters; missing master copies are made anew."""
        for step_group in self.step_groups:
            step_group.load(states, settings)


def stand_in(param: Tensor, size: torch.Size) -> nn.Parameter:
    """A parameter of one element's memory, which gets no gradient, for groups without own ones.

    Some classes count steps in their groups, but not in empty groups: ranks would count otherwise.
    """
    return nn.Parameter(param.new_zeros(()).expand(size))


def _replace(items: list[Any], old: Any, new: Sequence[Any]) -> None:
    """Puts ``new`` in the place of ``old``, found by identity: tensors compare by value."""
    position = next(position for position, item in enumerate(items) if item is old)
    items[position : position + 1] = new


def unshared(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with copies of its small values, such as counts, which optimizers change in place.

    The same state may have been loaded into another optimizer, or come from one that trains on.
    """
    return {
        key: value if isinstance(value, Tensor) and value.numel() > 1 else copy.deepcopy(value)
        for key, value in state.items()
    }


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return bool(a == b)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def load_into(
    optimizer: Optimizer, states: Mapping[Tensor, Mapping[str, Any]], settings: Groups, **more: Any
) -> None:
    """Replaces all state and hyperparameters, through the class's own loading."""
    groups = [
        settings_of(new) | more | {"params": local["params"]}
        for local, new in zip(optimizer.param_groups, settings, strict=False)
    ]
    found = {n: states[t] for n, t in enumerate(all_params(groups)) if states.get(t)}
    optimizer.load_state_dict({"state": found, "param_groups": pack_groups(groups)})
    restore_forms(optimizer)


def pack_groups(groups: Groups) -> list[dict[str, Any]]:
    """Groups as a plain state dict has them: parameters replaced by their numbers."""
    packed, number = [], 0
    for group in groups:
        size = len(group["params"])
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        packed.append(settings_of(group) | names | {"params": list(range(number, number + size))})
        number += size
    return packed
