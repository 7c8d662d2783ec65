"""The state of one optimizer as rows of a table and small values, of whatever class and stage.

State comes back from a folder or as whole state in memory, which is first taken apart into the same
keys: one function compares both with the optimizer.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shard_optim.checkpoint_files import StoredTensor
from shard_optim.fully_sharded.own_shards import StatesOfShards
from shard_optim.kept_moments import by_value
from shard_optim.optimizer_class import foreign_hyperparameters, state_keys
from shard_optim.parameter_groups import Groups, all_params, by_number
from shard_optim.place import Place, Row
from shard_optim.shard_update import MASTER, LocalOptimizer, pack_groups, settings_of

# Parameter number; for a moment its kind and name.
_KEY = re.compile(r"state\.(\d{1,9})\.(?:values|(elements|tensor)\.(.+))", re.DOTALL)


class OptimizerState:
    """The table's rows of a ``ShardedOptimizer``, or any over shards; ``names`` are by ``id``."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str] | None = None) -> None:
        self._groups, self._defaults = optimizer.param_groups, optimizer.defaults
        self._names = names or {}  # of the parameters in the model, if it is known
        self._cls: type[Optimizer] = getattr(optimizer, "optimizer_cls", type(optimizer))
        self._kwargs: Mapping[str, Any] = getattr(optimizer, "class_arguments", {})
        self._name_of = getattr(optimizer, "name_of", "parameter {}".format)
        shards = getattr(optimizer, "local", None)
        if not isinstance(shards, LocalOptimizer | StatesOfShards):
            shards = StatesOfShards(self._groups, optimizer)
        self._shards = shards
        self._places = self._shards.places()  # by parameter's number; frozen ones may have none

    def header(self) -> dict[str, Any]:
        """The same for every number of ranks, and for shards as for whole parameters."""
        params = all_params(self._groups)
        sizes = {index: place.size for index, place in self._places.items()}
        return {
            "optimizer": self._cls.__qualname__,
            "names": [self._names.get(id(param)) for param in params],
            "shapes": [tuple(sizes.get(i, param.shape)) for i, param in enumerate(params)],
            "param_groups": pack_groups(self._groups),
        }

    # --- from state to keys ------------------------------------------------------------------

    def rows(self) -> tuple[dict[str, Row], dict[str, Any]]:
        """This rank's moments; the header and its small values by ``state.I.values``."""
        tensors, values = self._split(self._shards.states(), whole=False)
        rows = {k: Row(place=self.place_of(k, t.size()), tensor=t) for k, t in tensors.items()}
        return rows, values | {"header": self.header()}

    def take_apart(self, given: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Moments, header and small values of a state dict, by key; ValueError if it is none."""
        tensors, values = self._split(_states_in(given), whole=True)
        groups = [dict(group) for group in given["param_groups"]]
        known = {key for group in groups for key in group["params"]}
        values |= {f"parameter {key}": None for key in given["state"] if key not in known}
        return tensors, values | {"header": self.header() | {"param_groups": groups}}

    def check_part(self, given: Any) -> None:
        """Raises ValueError for a state dict whose moments do not fit this rank's parts."""
        self._split(_states_in(given), whole=False)

    def _split(
        self, states: Mapping[int, Mapping[str, Any]], *, whole: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for index, state in states.items():
            place, small = self._places.get(index), values.setdefault(f"state.{index}.values", {})
            form = None if place is None else place.size if whole else place.form
            for key, kept in state.items():
                if not isinstance(value := by_value(kept), Tensor):
                    small[key] = copy.deepcopy(value)
                # One value of a single number is small, except where only one rank has it.
                elif value.shape == form and (value.ndim or not (place and place.replicated)):
                    tensors[f"state.{index}.elements.{key}"] = value
                elif value.numel() <= 1:
                    # Copied, because the next step may change it in place while it is written.
                    small[key] = value.detach().to("cpu", copy=True)
                elif whole or (place and place.whole_here):
                    tensors[f"state.{index}.tensor.{key}"] = value
                else:
                    raise ValueError(
                        "an optimizer of shards must keep one value per element or one per "
                        f"parameter, but {key!r} of {self._name_of(index)} has shape "
                        f"{tuple(value.shape)}, where this rank's part is {tuple(form or ())}. Use "
                        "an optimizer that treats every element alike"
                    )
        return tensors, values

    def place_of(self, key: str, size: Sequence[int]) -> Place:
        """Where a moment lies, by its key and, if it has not one value per element, its size."""
        _, index, kind, _ = key.split(".", 3)
        place = self._places[int(index)]
        return place if kind == "elements" else place.beside(torch.Size(size))

    # --- comparison --------------------------------------------------------------------------

    def _facts(self, header: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """What state and optimizer must have in common, the most general first; None: unknown."""
        own = set(self._defaults)
        of_classes = own | foreign_hyperparameters(own).difference(*self._groups)
        yield "the optimizer class", header["optimizer"]
        yield "the number of groups", len(header["param_groups"])
        for number, group in enumerate(header["param_groups"]):
            size = len(group["params"])
            yield f"the number of parameters of group {number}", size
            yield f"the set of hyperparameters of group {number}", sorted(of_classes & set(group))
            # Tells AdamW from Adam, whose hyperparameters are the same.
            yield f"decoupled_weight_decay of group {number}", group.get("decoupled_weight_decay")
            for position, name in enumerate(group.get("param_names", [None] * size)):
                yield f"the name of parameter {position} of group {number}", name
        for index, (name, shape) in enumerate(zip(header["names"], header["shapes"], strict=True)):
            yield f"the name of {self._name_of(index)}", name
            yield f"the shape of {self._name_of(index)}", shape

    def problems(
        self, tensors: Mapping[str, StoredTensor], values: Mapping[str, Any]
    ) -> Iterator[str]:
        """Reasons why state does not fit this optimizer, the most general first."""
        facts = zip(self._facts(values["header"]), self._facts(self.header()), strict=True)
        for (fact, theirs), (_, ours) in facts:
            if theirs != ours and None not in (theirs, ours):
                yield f"{fact} is {theirs} in it, here {ours}"
        kept: defaultdict[int, set[str]] = defaultdict(set)
        for key, value in (*tensors.items(), *values.items()):
            if key == "header" or value == {}:
                continue
            match = _KEY.fullmatch(key)
            form: Any = StoredTensor if match and match[2] else Mapping
            place = self._places.get(int(match[1])) if match else None
            if not match or place is None or not isinstance(value, form):
                yield f"it has state of {key}, which is frozen or in none of its groups"
                return
            index, kind, name = int(match[1]), match[2], match[3]
            kept[index] |= ({name} if name else set(value)) - {MASTER}
            if (kind == "elements" and value.shape != place.size) or (
                kind == "tensor" and place.held and not place.whole_here
            ):
                yield (
                    f"{name!r} of {self._name_of(index)} has shape {tuple(value.shape)}, expected "
                    f"{tuple(place.size)}"
                )
        expected: list[frozenset[str] | None] = []  # by parameter number
        for group in values["header"]["param_groups"]:
            names = state_keys(self._cls, settings_of(group), self._kwargs)
            expected += [names] * len(group["params"])
        for index, found in kept.items():
            if found and (names := expected[index]) is not None and found != names:
                yield (
                    f"it holds {sorted(found)} for {self._name_of(index)}, where "
                    f"{self._cls.__name__} holds {sorted(names)}"
                )

    # --- from keys to state ------------------------------------------------------------------

    def whole(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of the optimizer's class, from tensors and small values by their keys."""
        states: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        for key, value in (*values.items(), *tensors.items()):
            if match := _KEY.fullmatch(key):
                states[int(match[1])] |= {match[3]: value} if match[3] else value
        found = {index: state for index, state in sorted(states.items()) if state}
        return {"state": found, "param_groups": values["header"]["param_groups"]}

    def install(self, held: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Replaces this rank's state by moments and small values, by their keys."""
        whole = self.whole(held, values)
        self.install_part(whole["state"], whole["param_groups"])

    def install_part(self, states: Mapping[int, Mapping[str, Any]], settings: Groups) -> None:
        """Replaces this rank's state, by parameter number, and the groups' hyperparameters."""
        self._shards.install(states, settings)
        for group, new in zip(self._groups, settings, strict=True):
            group.update(settings_of(new))


def _states_in(given: Any) -> dict[int, Mapping[str, Any]]:
    """State by parameter number; ValueError for what is no ``torch.optim.Optimizer``'s."""
    held = given if isinstance(given, Mapping) else {}
    groups, states = held.get("param_groups"), held.get("state")
    if not (
        isinstance(groups, Sequence)
        and all(isinstance(group, Mapping) and "params" in group for group in groups)
        and isinstance(states, Mapping)
        and all(isinstance(state, Mapping) for state in states.values())
    ):
        raise ValueError(
            f"it must hold 'state' and 'param_groups', but got {type(given).__name__} without "
            "state and param_groups as torch.optim.Optimizer.state_dict() returns them"
        )
    return by_number(given)
