"""State dicts in the plain optimizer's form: why one does not fit an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shard_optim.optimizer_class import (
    Groups,
    by_number,
    foreign_hyperparameters,
    settings_of,
    state_keys,
)
from shard_optim.shard_update import MASTER


def check_full_state(
    state_dict: Any,
    groups: Groups,
    *,
    optimizer_cls: type[Optimizer],
    defaults: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    shapes: Mapping[int, torch.Size],
    frozen: Iterable[int] = (),
    partition: str,
    name_of: Callable[[int], str],
) -> str | None:
    """Why a state dict does not fit these groups, or None if it does.

    Args:
        state_dict: what was loaded.
        groups: the optimizer's groups.
        optimizer_cls: the wrapped class.
        defaults: its hyperparameters with their defaults.
        kwargs: further arguments of the class.
        shapes: of each parameter, or of each shard for one rank's own state.
        frozen: numbers of parameters that may have no state.
        partition: "flat" or "whole".
        name_of: a parameter's name.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        kind = type(state_dict).__name__
        return (
            f"it must hold 'state' and 'param_groups', but got {kind} without state and "
            "param_groups"
        )
    saved_groups, states = state_dict["param_groups"], state_dict["state"]
    if not (
        isinstance(states, Mapping)
        and isinstance(saved_groups, Sequence)
        and all(isinstance(state, Mapping) for state in states.values())
        and all(isinstance(group, Mapping) and "params" in group for group in saved_groups)
    ):
        return "its state or param_groups are not those of torch.optim.Optimizer.state_dict()"
    if len(saved_groups) != len(groups):
        return f"it has {len(saved_groups)} groups, the optimizer {len(groups)}"
    found = next(_mismatches(state_dict, groups, defaults, shapes, partition, name_of), None)
    if found is None:
        found = _other_class(state_dict, groups, optimizer_cls, defaults, kwargs)
    if found is None and (held := sorted(by_number(state_dict).keys() & set(frozen))):
        found = f"it has state for {name_of(held[0])}, which is frozen"
    return found


def _other_class(
    state_dict: Mapping[str, Any],
    groups: Groups,
    optimizer_cls: type[Optimizer],
    defaults: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> str | None:
    """What shows that a state is of another optimizer class, or None."""
    foreign = foreign_hyperparameters(optimizer_cls, defaults)
    for number, (saved, group) in enumerate(zip(state_dict["param_groups"], groups, strict=True)):
        if others := sorted(foreign & set(saved) - set(group)):
            return f"group {number} has {others}: it is of another optimizer class"
        expected = state_keys(optimizer_cls, settings_of(saved), kwargs)
        for key in saved["params"]:
            found = set(state_dict["state"].get(key, {})) - {MASTER}
            if expected is not None and found and found != expected:
                return (
                    f"it holds {sorted(found)} for a parameter of group {number}, where "
                    f"{optimizer_cls.__name__} holds {sorted(expected)}"
                )
    return None


def _mismatches(
    state_dict: Mapping[str, Any],
    groups: Groups,
    defaults: Mapping[str, Any],
    shapes: Mapping[int, torch.Size],
    partition: str,
    name_of: Callable[[int], str],
) -> Iterator[str]:
    keys: list[Any] = []
    for number, (saved, group) in enumerate(zip(state_dict["param_groups"], groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            yield (
                f"group {number} has {len(saved['params'])} parameters, "
                f"the optimizer's {len(group['params'])}"
            )
            return
        missing = set(defaults) - set(saved)
        if missing:
            yield f"group {number} lacks {sorted(missing)}: it is of another optimizer class"
        flag = "decoupled_weight_decay"  # tells AdamW from Adam, whose settings are the same
        if flag in saved and flag in defaults and saved[flag] != group[flag]:
            yield f"group {number} has {flag}={saved[flag]}, the optimizer {group[flag]}"
        names = zip(saved.get("param_names", ()), group.get("param_names", ()), strict=False)
        for theirs, ours in names:
            if theirs != ours:
                yield f"group {number} has parameter {theirs} where the optimizer has {ours}"
        keys += saved["params"]
    numbers = {key: number for number, key in enumerate(keys)}
    for key, state in state_dict["state"].items():
        if key not in numbers:
            yield (
                f"it has state of parameter {key} where there are {len(numbers)}: it is in none of "
                "its groups"
            )
            return
        expected = shapes.get(numbers[key])
        if expected is None:
            yield f"it has state for {name_of(numbers[key])}, which this rank has no part of"
            return
        for what, value in state.items():
            if isinstance(value, Tensor) and not (
                value.shape == expected
                or value.numel() == 1
                or (partition == "whole" and what != MASTER)
            ):
                yield (
                    f"{what!r} of {name_of(numbers[key])} has shape {tuple(value.shape)}, "
                    f"expected {tuple(expected)}"
                )
