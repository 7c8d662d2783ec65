"""``ShardedOptimizer``'s step over the parameters of a ``FullyShardedDataParallel``.

Nothing is left to reduce or to gather: the model has averaged the gradients of this rank's shards,
and gathers what the step has updated. It is the counterpart of ``LocalOptimizer`` of stages 1 and
2, with the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shard_optim.buckets import Bucket
from shard_optim.origin import CHECKED, INSIDE, ORIGIN, sharded_in, sharded_of
from shard_optim.parameter_groups import Groups, all_params
from shard_optim.place import Place, replicated_place
from shard_optim.shard_update import load_into, settings_of, unshared


class StatesOfShards:
    """The state in an optimizer of any class over this rank's shards, by the parameter's number."""

    def __init__(self, groups: Groups, optimizer: Optimizer) -> None:
        self._groups, self._optimizer = groups, optimizer

    def updated(self, param: Tensor) -> Tensor | None:
        """The tensor that the optimizer updates for a parameter; None if it is another rank's."""
        return param

    def place_of(self, param: Tensor) -> Place:
        """Where the parameter's state lies."""
        found = sharded_of(param)
        return replicated_place("a parameter", param) if found is None else found.place

    def places(self) -> dict[int, Place]:
        """Where the state of each parameter lies, by its number."""
        return {index: self.place_of(p) for index, p in enumerate(all_params(self._groups))}

    def _held(self) -> list[tuple[int, Tensor]]:
        """Number and updated tensor of each parameter that this rank updates."""
        found = enumerate(map(self.updated, all_params(self._groups)))
        return [(index, updated) for index, updated in found if updated is not None]

    def states(self) -> dict[int, dict[str, Any]]:
        """This rank's state by parameter number."""
        found = self._optimizer.state
        return {index: dict(found[own]) for index, own in self._held() if own in found}

    def install(self, states: Mapping[int, Mapping[str, Any]], settings: Groups) -> None:
        """Replaces all state and hyperparameters, through the class's own loading."""
        found = {own: unshared(states.get(index, {})) for index, own in self._held()}
        with torch.no_grad():
            load_into(self._optimizer, found, settings, **{ORIGIN: CHECKED})
        for local in self._optimizer.param_groups:
            local.pop(ORIGIN, None)


class OwnShards(StatesOfShards):
    """Updates this rank's shards element by element, by ``make(groups, **kwargs)``."""

    def __init__(
        self, groups: Groups, make: Callable[..., Optimizer], kwargs: Mapping[str, Any]
    ) -> None:
        self._groups = groups
        super().__init__(groups, make([self._adopt(group) for group in groups], **kwargs))
        setattr(self._optimizer, INSIDE, True)
        for group, local in zip(groups, self._optimizer.param_groups, strict=True):
            group.update(settings_of(local))  # some classes hold them in tensors

    def add_group(self, group: dict[str, Any]) -> None:
        """Updates the parameters of a new group too."""
        self._optimizer.add_param_group(self._adopt(group))

    def _adopt(self, group: Mapping[str, Any]) -> dict[str, Any]:
        model = sharded_in(self._groups)
        for param in group["params"]:
            found = sharded_of(param)
            if found is None or model is None or found.ranks is not model.ranks:
                raise ValueError(
                    "params must be parameters of one FullyShardedDataParallel, but got one of "
                    f"shape {tuple(param.shape)} that is not. Make an optimizer for each model."
                )
        updated = [self.updated(param) for param in group["params"]]
        return settings_of(group) | {"params": [each for each in updated if each is not None]}

    # --- step --------------------------------------------------------------------------------

    def update(self, groups: Groups, **kwargs: Any) -> Iterator[Bucket]:
        """Updates all parameters that have a gradient. There are no buckets to gather."""
        pairs = list(zip(groups, self._optimizer.param_groups, strict=True))
        for group, local in pairs:
            local.update(settings_of(group))
        self._step(**kwargs)
        for group, local in pairs:
            group.update(settings_of(local))  # some classes count or adapt in their groups
        return iter(())

    def _step(self, **kwargs: Any) -> None:
        self._optimizer.step(**kwargs)

    def take_gradients(self) -> None:
        """They are where they belong."""

    def drop_gradients(self) -> None:
        """They are the parameters' own."""

    def gradients(self) -> list[Tensor]:
        """The gradients of the shards that have one."""
        grads = (param.grad for param in all_params(self._groups))
        return [grad.detach() for grad in grads if grad is not None]
