"""The wrapped optimizer: names of its class's state, and its parameter groups as plain data."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from shard_optim.optimizer_trial import without_flags

Partition = Literal["flat", "whole"]
"""Whether each rank owns an equal range of every bucket's elements, or whole parameters."""

Groups = Sequence[dict[str, Any]]


def state_keys(
    optimizer_cls: type[Optimizer], group: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> frozenset[str] | None:
    """Names of the state that a class of torch's keeps for a parameter; None for other classes.

    Args:
        optimizer_cls: the class.
        group: hyperparameters.
        kwargs: for the class.
    """
    if not optimizer_cls.__module__.startswith("torch.optim."):
        return None
    # Flags that choose an implementation may need a GPU, and change no name.
    settings = without_flags(settings_of(group))
    param = torch.nn.Parameter(torch.ones(2, 2, device="cpu"))
    optimizer = optimizer_cls([settings | {"params": [param]}], **without_flags(kwargs))
    param.grad = torch.ones_like(param)
    optimizer.step()
    return frozenset(optimizer.state[param])


def foreign_hyperparameters(known: Iterable[str]) -> set[str]:
    """Names of hyperparameters that some class of torch's has, and that are not known."""
    names: set[str] = set()
    for cls in vars(torch.optim).values():
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer:
            names |= set(inspect.signature(cls).parameters) - {"params"}
    return names - set(known)


# --- parameter groups as plain data ---------------------------------------------------------


def all_params(groups: Groups) -> list[Tensor]:
    """Every parameter over all groups, in order: position is its number."""
    return [param for group in groups for param in group["params"]]


def name_of(groups: Groups, index: int) -> str:
    """The parameter's name if groups carry names, else its number, group and shape."""
    position = index
    for number, group in enumerate(groups):
        if 0 <= position < len(group["params"]):
            if "param_names" in group:
                return str(group["param_names"][position])
            shape = tuple(group["params"][position].shape)
            return f"parameter {position} of group {number} with shape {shape}"
        position -= len(group["params"])
    raise IndexError(
        f"index must be a parameter's number, but got {index}. Numbers begin at 0 and go on over "
        "all groups."
    )


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Normalises the constructor's argument to a list of groups, without copying parameters."""
    if isinstance(params, (Tensor, torch.nn.Module)) or not isinstance(params, Iterable):
        got, remedy = f"one {type(params).__name__}", "model.parameters()"
        if isinstance(params, Tensor):
            got, remedy = "one tensor", "[tensor]"
        raise TypeError(
            f"params must be an iterable of parameters or groups, but got {got}. Pass {remedy}."
        )
    items = list(params)
    if not items:
        raise ValueError(
            "params must hold at least one parameter, but got an empty list. "
            "Pass model.parameters()."
        )
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
    placeholder = torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))
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


def by_number(state_dict: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """State by the parameter's position over all groups, whatever keys it was saved under."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    states = state_dict["state"]
    return {number: states[key] for number, key in enumerate(keys) if key in states}


def describe_groups(groups: Sequence[Mapping[str, Any]], *, first: int) -> list[str]:
    """One line per hyperparameter and per parameter.

    Args:
        groups: parameter groups.
        first: number of the first of them.
    """
    lines = []
    for number, group in enumerate(groups, start=first):
        settings = {key: value for key, value in group.items() if key != "params"}
        names = settings.pop("param_names", [""] * len(group["params"]))
        lines += [f"group {number}: {key} = {value}" for key, value in sorted(settings.items())]
        lines += [
            f"group {number}: parameter {position} {name} {tuple(param.shape)} {param.dtype} "
            f"{param.device.type} {'trainable' if param.requires_grad else 'frozen'}, strides "
            f"{param.stride() if param.layout == torch.strided else 'none'}"
            for position, (param, name) in enumerate(zip(group["params"], names, strict=True))
        ]
    return lines
