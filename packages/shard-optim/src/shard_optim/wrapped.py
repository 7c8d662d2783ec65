"""The wrapped optimizer: what its class can do, and its parameter groups as plain data.

Which classes work under which partition is known before anything is allocated, by a trial at
construction, or by the state that the first step makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

Partition = Literal["flat", "whole"]
"""Whether each rank owns an equal range of every bucket's elements, or whole parameters."""

Groups = Sequence[dict[str, Any]]

# Updates that depend on a parameter's shape: factored moments, orthogonalised matrices.
SHAPE_DEPENDENT: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)

# LBFGS takes inner products over all parameters; SparseAdam needs sparse gradients.
UNSUPPORTED: tuple[type[Optimizer], ...] = (torch.optim.LBFGS, torch.optim.SparseAdam)


def check_supported(
    optimizer_cls: type[Optimizer], partition: Partition, kwargs: dict[str, Any]
) -> None:
    """Refuses what is known not to work before anything is allocated.

    Raises:
        TypeError: if ``optimizer_cls`` is not an optimizer class.
        ValueError: naming the remedy.
    """
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
        raise TypeError(
            "optimizer_cls must be a subclass of torch.optim.Optimizer, but got "
            f"{optimizer_cls!r}. Pass the class and its arguments apart."
        )
    name = optimizer_cls.__name__
    if issubclass(optimizer_cls, UNSUPPORTED):
        raise ValueError(
            "optimizer_cls must update each parameter from that parameter's dense gradient alone, "
            f"but got {name}, which does not. Use it as it is."
        )
    if kwargs.get("differentiable"):
        raise ValueError(
            "differentiable must be False, because gradients do not flow through an update that "
            "other ranks compute, but got True. Leave it out."
        )
    if partition == "flat" and issubclass(optimizer_cls, SHAPE_DEPENDENT):
        raise ValueError(
            f'partition="flat" needs an optimizer that treats every element alike, but {name} '
            'looks at the shape of each parameter. Pass partition="whole".'
        )


def check_elementwise_update(
    optimizer_cls: type[Optimizer], settings: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> None:
    """Refuses a class whose update of an element depends on other elements, found by a trial.

    Two steps on a vector and on two parts of it must give the same elements; torch's own classes
    need no trial. A class that a trial cannot run, because it needs a closure or certain shapes,
    is left to ``check_elementwise_state``.

    Args:
        optimizer_cls: the class.
        settings: of the first group.
        kwargs: for the class.

    Raises:
        ValueError: naming the remedy.
    """
    if optimizer_cls.__module__.startswith("torch.optim."):
        return
    values = torch.linspace(-1, 2, 12)
    gradients = [torch.linspace(0.1, 5, 12).square(), torch.linspace(3, -0.5, 12)]
    try:
        whole = _trial(optimizer_cls, [values], gradients, settings, kwargs)
        parts = _trial(optimizer_cls, [values[:4], values[4:]], gradients, settings, kwargs)
    except Exception:  # noqa: BLE001 - whatever a class of the user's does with a trial
        return
    if not torch.allclose(whole, parts, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ValueError(
            'partition="flat" needs an optimizer that treats every element alike, but '
            f"{optimizer_cls.__name__} updates a vector otherwise when it gets it "
            'in two parts. Pass partition="whole"'
        )


def _trial(
    optimizer_cls: type[Optimizer],
    parts: Sequence[Tensor],
    gradients: Sequence[Tensor],
    settings: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> Tensor:
    """All elements after a step with each of the gradients."""
    params = [torch.nn.Parameter(part.clone()) for part in parts]
    optimizer = optimizer_cls([dict(settings) | {"params": params}], **kwargs)
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), float):
            group["lr"] = 0.1  # a schedule may begin at zero, where nothing shows
    for gradient in gradients:
        for param, part in zip(params, gradient.split([len(p) for p in params]), strict=True):
            param.grad = part.clone()
        optimizer.step()
    return torch.cat([param.detach() for param in params])


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
    settings = {key: group[key] for key in group if key not in ("params", "param_names")}
    # Flags that choose an implementation may need a GPU, and change no name.
    settings |= {key: False for key in ("foreach", "fused", "capturable") if key in settings}
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = optimizer_cls([settings | {"params": [param]}], **without_flags(kwargs))
    param.grad = torch.ones_like(param)
    optimizer.step()
    return frozenset(optimizer.state[param])


def without_flags(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a class without those that choose an implementation."""
    return {k: v for k, v in kwargs.items() if k not in ("foreach", "fused", "capturable")}


def foreign_hyperparameters(optimizer_cls: type[Optimizer], known: Iterable[str]) -> set[str]:
    """Names of hyperparameters that other classes of torch's have and ``optimizer_cls`` has not."""
    names: set[str] = set()
    for cls in vars(torch.optim).values():
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer:
            names |= set(inspect.signature(cls).parameters) - {"params"}
    return names - set(known)


def check_elementwise_state(optimizer: Optimizer, updated: Tensor) -> None:
    """Refuses state that an element-wise optimizer would not have.

    Args:
        optimizer: after a step.
        updated: one of the tensors that it updates.

    Raises:
        ValueError: if some state tensor is neither one number nor of the same shape.
    """
    for key, value in optimizer.state.get(updated, {}).items():
        if isinstance(value, Tensor) and value.numel() != 1 and value.shape != updated.shape:
            raise ValueError(
                'under partition="flat" a state tensor must hold one number or one per element '
                f"({tuple(updated.shape)}), but {type(optimizer).__name__} keeps {key!r} of "
                f'shape {tuple(value.shape)}. Pass partition="whole".'
            )


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
            f"{param.device.type} {'trainable' if param.requires_grad else 'frozen'}"
            for position, (param, name) in enumerate(zip(group["params"], names, strict=True))
        ]
    return lines
