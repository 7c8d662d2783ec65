"""Parameter groups of an optimizer as plain data: numbers, names and descriptions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Groups = Sequence[dict[str, Any]]


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
    if not items or not isinstance(items[0], dict):
        return [{"params": items}]
    return [dict(group) for group in items]


def by_number(state_dict: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """State by the parameter's position over all groups, whatever keys it was saved under."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    states = state_dict["state"]
    return {number: states[key] for number, key in enumerate(keys) if key in states}


def as_text(setting: Any) -> str:
    """A hyperparameter in words, the same for equal numbers: 1, 1.0 and a tensor of it.

    Addresses of functions and objects, which users keep in groups too, differ between ranks.
    """
    if isinstance(setting, Tensor):
        setting = setting.tolist()
    if isinstance(setting, (list, tuple)):
        return f"({', '.join(map(as_text, setting))})"
    return re.sub(r" at 0x[0-9a-f]+", "", str(setting)).removesuffix(".0")


def in_words(group: Mapping[str, Any], *, identities: bool = False) -> dict[str, str]:
    """A group's hyperparameters in words.

    Tensors on a GPU, where a reader would wait, are left out, or told by ``identities``.
    """
    words = {}
    for key in sorted(group.keys() - {"params", "param_names"}):
        parts = group[key] if isinstance(group[key], (list, tuple)) else (group[key],)
        away = [t for t in parts if isinstance(t, Tensor) and t.device.type != "cpu"]
        if identities or not away:
            names = [f"tensor {id(t):x} after {t._version} changes" for t in away]
            words[key] = ", ".join(names) or as_text(group[key])
    return words


def settings_in(groups: Groups) -> str:
    """The hyperparameters of all groups, without tensors on a GPU."""
    settings = [[*in_words(group).items()] for group in groups]
    texts = [", ".join(f"{key}={words}" for key, words in group) for group in settings]
    return "; ".join(dict.fromkeys(texts))


def describe_groups(groups: Sequence[Mapping[str, Any]], *, first: int) -> list[str]:
    """One line per hyperparameter and per parameter."""
    lines = []
    for number, group in enumerate(groups, start=first):
        settings = {key: value for key, value in group.items() if key != "params"}
        names = settings.pop("param_names", [""] * len(group["params"]))
        lines += [f"group {number}: {key} = {as_text(settings[key])}" for key in sorted(settings)]
        lines += [
            f"group {number}: parameter {position} {name} {tuple(param.shape)} {param.dtype} "
            f"{param.device.type} {'trainable' if param.requires_grad else 'frozen'}, strides "
            f"{param.stride() if param.layout == torch.strided else 'none'}"
            for position, (param, name) in enumerate(zip(group["params"], names, strict=True))
        ]
    return lines
