"""The optimizer that runs on one rank: an instance of the wrapped class over this rank's shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shard_optim.buckets import Shard
from shard_optim.partition import Partition
from shard_optim.state import MASTER, local_state
from shard_optim.support import check_elementwise_state

Groups = Sequence[dict[str, Any]]


class LocalOptimizer:
    """Holds one local group per group of whole parameters, with the same hyperparameters.

    Args:
        optimizer_cls: the wrapped class.
        groups: the groups of whole parameters.
        shards: this rank's parts of them.
        partition: "flat" or "whole".
        kwargs: for the class.
    """

    def __init__(
        self,
        optimizer_cls: type[Optimizer],
        groups: Groups,
        shards: Sequence[Shard],
        *,
        partition: Partition,
        kwargs: dict[str, Any],
    ) -> None:
        self.shards = list(shards)
        self._partition = partition
        self._state_checked = False
        self._optimizer = optimizer_cls([_sharded(group, shards) for group in groups], **kwargs)

    def add_group(self, group: dict[str, Any], shards: Sequence[Shard]) -> None:
        """Adds a group, of whose parameters this rank has these shards."""
        self.shards += shards
        self._optimizer.add_param_group(_sharded(group, shards))

    def extend_groups(self, groups: Groups, shards: Sequence[Shard]) -> None:
        """Adds shards of parameters that were in the groups already, but frozen."""
        self.shards += shards
        for group, local in zip(groups, self._optimizer.param_groups, strict=True):
            local["params"].extend(_sharded(group, shards)["params"])

    def step(self, groups: Groups, **kwargs: Any) -> None:
        """One step with the hyperparameters of ``groups``; changes to them are copied back,
        because some optimizers count or adapt in their groups.

        Raises:
            ValueError: if the state shows that the class cannot work under "flat".
        """
        for group, local in zip(groups, self._optimizer.param_groups, strict=True):
            local.update(settings_of(group))
        self._optimizer.step(**kwargs)
        for group, local in zip(groups, self._optimizer.param_groups, strict=True):
            group.update(settings_of(local))
        self.drop_gradients()
        if self._partition == "flat" and not self._state_checked and self._optimizer.state:
            for shard in self.shards:
                check_elementwise_state(self._optimizer, shard)
            self._state_checked = True

    @staticmethod
    def give_gradient(shard: Shard, grad: Tensor | None) -> None:
        """Sets a shard's gradient: a view of ``grad``, or a copy in its master's dtype.

        Args:
            shard: one of this rank's.
            grad: the owned elements, shape (span.length,), or None.
        """
        if grad is not None and grad.shape != shard.view.shape:
            grad = grad.as_strided(shard.view.size(), shard.view.stride())
        shard.tensor.grad = None if grad is None else grad.to(shard.tensor.dtype)

    def drop_gradients(self) -> None:
        """Lets go of all gradients."""
        for shard in self.shards:
            shard.tensor.grad = None

    def gradients(self) -> list[Tensor]:
        """The gradients that shards have."""
        return [shard.tensor.grad for shard in self.shards if shard.tensor.grad is not None]

    def expose(self, state: MutableMapping[Tensor, Any]) -> None:
        """Fills ``state`` with this rank's state under the parameters' identity."""
        state.clear()
        for shard in self.shards:
            if shard.tensor in self._optimizer.state:
                state[shard.param] = self._optimizer.state[shard.tensor]

    def states(self) -> dict[int, dict[str, Any]]:
        """State of each shard, master copy included, by parameter number."""
        states = {
            shard.index: local_state(shard, self._optimizer.state.get(shard.tensor, {}))
            for shard in self.shards
        }
        return {index: state for index, state in sorted(states.items()) if state}

    @torch.no_grad()
    def install(
        self, states: Mapping[int, Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]
    ) -> None:
        """Replaces all state and hyperparameters, through the class's own loading.

        A master copy that ``states`` lacks is made anew from its parameter.
        """
        shards = {id(shard.tensor): shard for shard in self.shards}
        packed: dict[str, Any] = {"state": {}, "param_groups": []}
        number = 0
        for local, new in zip(self._optimizer.param_groups, settings, strict=True):
            first = number
            for tensor in local["params"]:
                shard = shards[id(tensor)]
                state = dict(states.get(shard.index, {}))
                master = state.pop(MASTER, shard.view)
                if shard.has_master:
                    tensor.copy_(master)
                if state:
                    packed["state"][number] = state
                number += 1
            params = list(range(first, number))
            packed["param_groups"].append(settings_of(new) | {"params": params})
        self._optimizer.load_state_dict(packed)


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Normalises the constructor's argument to a list of groups, without copying parameters."""
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of parameters or groups, got one tensor")
    items = list(params)
    if not items:
        raise ValueError("a sharded optimizer needs at least one parameter, got an empty list")
    if not isinstance(items[0], dict):
        return [{"params": items}]
    return [dict(group) for group in items]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def default_settings(
    optimizer_cls: type[Optimizer], groups: Groups, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The class's hyperparameters with their defaults, from an instance over one element."""
    placeholder = torch.nn.Parameter(torch.zeros(1, 1))
    return optimizer_cls([settings_of(groups[0]) | {"params": [placeholder]}], **kwargs).defaults


def pack_groups(groups: Groups) -> list[dict[str, Any]]:
    """Groups as a plain state dict has them: parameters replaced by their numbers."""
    packed, number = [], 0
    for group in groups:
        size = len(group["params"])
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        packed.append(settings_of(group) | names | {"params": list(range(number, number + size))})
        number += size
    return packed


def _sharded(group: dict[str, Any], shards: Sequence[Shard]) -> dict[str, Any]:
    """A group with shards in place of parameters, in the parameters' order."""
    tensors = {id(shard.param): shard.tensor for shard in shards}
    params = [tensors[id(p)] for p in group["params"] if id(p) in tensors]
    return settings_of(group) | {"params": params}
