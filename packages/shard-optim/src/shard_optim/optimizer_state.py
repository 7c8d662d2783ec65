"""The state of one optimizer as rows of a table and small values, of whatever class and stage.

State comes back from a folder or as whole state in memory, which is first taken apart into the same
keys: one function compares both with the optimizer.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shard_optim.checkpoint_files import StoredTensor
from shard_optim.fully_sharded.own_shards import StatesOfShards
from shard_optim.optimizer_class import foreign_hyperparameters, state_keys
from shard_optim.parameter_groups import Groups, all_params, by_number, name_of
from shard_optim.place import Place, Row
from shard_optim.shard_update import MASTER, LocalOptimizer, pack_groups, settings_of

# Parameter number; for a moment its kind and name.
_KEY = re.compile(r"state\.(\d{1,9})\.(?:values|(elements|tensor)\.(.+))", re.DOTALL)


class OptimizerState:
    """The table's rows of a ``ShardedOptimizer``, or of any optimizer over shards."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups, self._defaults = optimizer.param_groups, optimizer.defaults
        self._cls: type[Optimizer] = getattr(optimizer, "optimizer_cls", type(optimizer))
        self._kwargs: Mapping[str, Any] = getattr(optimizer, "class_arguments", {})
        self._name_of = getattr(optimizer, "name_of", "parameter {}".format)
        shards = getattr(optimizer, "local", None)
        if not isinstance(shards, LocalOptimizer | StatesOfShards):
            shards = StatesOfShards(self._groups, optimizer)
        self._shards = shards
        self._places = self._shards.places()  # by parameter's number; frozen ones may have none
        self._taken: dict[str, Tensor] = {}

    def header(self) -> dict[str, Any]:
        """The same for every number of ranks, and for shards as for whole parameters."""
        sizes = [
            self._places[index].size if index in self._places else param.shape
            for index, param in enumerate(all_params(self._groups))
        ]
        return {
            "optimizer": self._cls.__qualname__,
            "shapes": [tuple(size) for size in sizes],
            "param_groups": pack_groups(self._groups),
        }

    # --- from state to keys ------------------------------------------------------------------

    def rows(self) -> tuple[dict[str, Row], dict[str, Any]]:
        """This rank's moments; the header and its small values by ``state.I.values``."""
        tensors, values = self._split(self._shards.states(), whole=False)
        rows = {
            key: Row(place=self._place_of(key, tensor.size()), tensor=tensor)
            for key, tensor in tensors.items()
        }
        return rows, values | {"header": self.header()}

    def take_apart(self, given: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Moments, header and small values of a state dict, by key; ValueError if it is none."""
        groups, states = check_state_dict(given)
        tensors, values = self._split(by_number(given), whole=True)
        values["header"] = self.header() | {"param_groups": [dict(group) for group in groups]}
        known = {key for group in groups for key in group["params"]}
        values |= {f"parameter {key}": {} for key in states if key not in known}  # no key of state
        return tensors, values

    def _split(
        self, states: Mapping[int, Mapping[str, Any]], *, whole: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for index, state in states.items():
            place, small = self._places.get(index), values.setdefault(f"state.{index}.values", {})
            form = None if place is None else place.size if whole else place.form
            for key, value in state.items():
                if not isinstance(value, Tensor):
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
                        f"parameter, but got {key!r} of shape {tuple(value.shape)} for a shard of "
                        f"{tuple(form or ())}. Use an optimizer that treats every element alike."
                    )
        return tensors, values

    def places_in(self, tensors: Mapping[str, StoredTensor]) -> dict[str, Place]:
        """Where each moment of a description lies."""
        keys = (key for key in tensors if key.startswith("state."))
        return {key: self._place_of(key, tensors[key].shape) for key in keys}

    def _place_of(self, key: str, size: Sequence[int]) -> Place:
        """By a moment's key and, if it has not one value per element, its size."""
        _, index, kind, _ = key.split(".", 3)
        place = self._places[int(index)]
        return place if kind == "elements" else place.beside(torch.Size(size))

    # --- comparison --------------------------------------------------------------------------

    def problems(
        self, tensors: Mapping[str, StoredTensor], values: Mapping[str, Any]
    ) -> Iterator[str]:
        """Reasons why state does not fit this optimizer, the most general first."""
        header, ours = values["header"], self.header()
        if header["optimizer"] != ours["optimizer"]:
            yield f"it is of {header['optimizer']}, the optimizer is {ours['optimizer']}"
        yield from self._problems_of_groups(header["param_groups"])
        for index, (saved, shape) in enumerate(zip(header["shapes"], ours["shapes"], strict=True)):
            if tuple(saved) != shape:
                yield f"{self._name_of(index)} has shape {tuple(saved)} in it, here {shape}"
        moments = {key: tensor for key, tensor in tensors.items() if key.startswith("state.")}
        kept: defaultdict[int, set[str]] = defaultdict(set)
        for key in (*moments, *(key for key in values if key != "header")):
            match, moment = _KEY.fullmatch(key), key in moments
            if not match or int(match[1]) >= len(ours["shapes"]) or (match[2] is None) == moment:
                whose = f"parameter {match[1]}" if match else key
                yield (
                    f"it has state of {whose} where there are {len(ours['shapes'])}: it is in none "
                    "of its groups"
                )
                return
            index, name = int(match[1]), match[3]
            kept[index] |= {name} if moment else set(values[key])
            if kept[index] and index not in self._places:
                yield f"it has state for {self._name_of(index)}, which is frozen"
            if moment:
                place, size = self._places[index], tuple(moments[key].shape)
                # Folders without contents.json give moments as vectors.
                fits = math.prod(size) == place.size.numel()
                if match[2] == "tensor":
                    fits = place.whole_here or not place.held
                if not fits:
                    yield (
                        f"{name!r} of {self._name_of(index)} has shape {size}, expected "
                        f"{tuple(place.size)}"
                    )
        numbers = itertools.count()
        for number, group in enumerate(header["param_groups"]):
            names = state_keys(self._cls, settings_of(group), self._kwargs)
            for _, index in zip(group["params"], numbers, strict=False):
                found = kept[index] - {MASTER}
                if names is not None and found and found != names:
                    yield (
                        f"it holds {sorted(found)} for a parameter of group {number}, where "
                        f"{self._cls.__name__} holds {sorted(names)}"
                    )

    def _problems_of_groups(self, saved_groups: Any) -> Iterator[str]:
        if not _are_groups(saved_groups) or len(saved_groups) != len(self._groups):
            yield f"it has {len(saved_groups)} groups, the optimizer {len(self._groups)}"
        foreign = foreign_hyperparameters(self._defaults)
        flag = "decoupled_weight_decay"  # tells AdamW from Adam, whose settings are the same
        for number, (saved, group) in enumerate(zip(saved_groups, self._groups, strict=True)):
            theirs, ours = len(saved["params"]), len(group["params"])
            if theirs != ours:
                yield f"group {number} has {theirs} parameters, the optimizer's {ours}"
            if missing := sorted(set(self._defaults) - set(saved)):
                yield f"group {number} lacks {missing}: it is of another optimizer class"
            if flag in self._defaults and saved[flag] != group[flag]:
                yield f"group {number} has {flag}={saved[flag]}, the optimizer {group[flag]}"
            if others := sorted(foreign & set(saved) - set(group)):
                yield f"group {number} has {others}: it is of another optimizer class"
            names = zip(saved.get("param_names", ()), group.get("param_names", ()), strict=False)
            for its, own in names:
                if its != own:
                    yield f"group {number} has parameter {its} where the optimizer has {own}"

    # --- from keys to state ------------------------------------------------------------------

    def whole(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict of the optimizer's class, from tensors and small values by their keys."""
        states: defaultdict[int, dict[str, Any]] = defaultdict(dict)
        for key, value in (*values.items(), *tensors.items()):
            if match := _KEY.fullmatch(key):
                states[int(match[1])] |= {match[3]: value} if match[3] else value
        found = {index: state for index, state in sorted(states.items()) if state}
        return {"state": found, "param_groups": values["header"]["param_groups"]}

    def take(self, key: str, value: Tensor) -> None:
        """Keeps a moment for ``install``; a part of a whole tensor is copied out of it."""
        part = value.untyped_storage().nbytes() > value.nbytes
        self._taken[key] = value.to("cpu", copy=part)

    def install(self, values: Mapping[str, Any]) -> None:
        """Replaces this rank's state by what was taken, and the hyperparameters."""
        whole = self.whole(self._taken, values)
        install(self._shards, self._groups, whole["state"], whole["param_groups"])


def install(
    shards: LocalOptimizer | StatesOfShards,
    groups: Groups,
    states: Mapping[int, Mapping[str, Any]],
    settings: Groups,
) -> None:
    """Replaces a rank's state, by parameter number, and the hyperparameters of the groups."""
    shards.install(states, settings)
    for group, new in zip(groups, settings, strict=True):
        group.update(settings_of(new))


def check_state_dict(given: Any) -> tuple[Groups, Mapping[Any, Mapping[str, Any]]]:
    """The groups and the state of ``torch.optim.Optimizer.state_dict()``, or a ValueError."""
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        raise ValueError(
            f"it must hold 'state' and 'param_groups', but got {type(given).__name__} without "
            "state and param_groups"
        )
    groups, states = given["param_groups"], given["state"]
    maps = isinstance(states, Mapping) and all(isinstance(s, Mapping) for s in states.values())
    if not (maps and _are_groups(groups)):
        raise ValueError(
            "its state or param_groups are not those of torch.optim.Optimizer.state_dict()"
        )
    return groups, states


def check_own_moments(
    states: Mapping[int, Mapping[str, Any]], places: Mapping[int, Place], groups: Groups
) -> None:
    """Raises ValueError unless moments, by parameter, have the shapes of this rank's parts."""
    for index, state in states.items():
        place = places.get(index)
        for key, value in state.items():
            is_moment = isinstance(value, Tensor) and value.numel() > 1
            if is_moment and not (place and (place.whole_here or value.shape == place.form)):
                expected = tuple(place.form) if place else "nothing"
                raise ValueError(
                    f"{key!r} of {name_of(groups, index)} has shape {tuple(value.shape)}, where "
                    f"this rank's part is {expected}"
                )


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, Sequence) and all(
        isinstance(group, Mapping) and "params" in group for group in groups
    )
