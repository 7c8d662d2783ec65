"""The wrapped optimizer class: whether it may update shards, its defaults, and names of its state.

A class that takes norms, statistics of rows and columns, or sums over all parameters would find
others in a shard than in the whole tensor, on each rank another, without any error. Torch's own
classes are known by name. Any other is tried, at construction or before the first step: a matrix
and a vector are updated together, each alone, and in parts, on the CPU in fp32. The same elements
must come out. Every stage asks here, and says in its own words what to do instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

# Updates that depend on a parameter's shape: factored moments, orthogonalised matrices.
SHAPE_DEPENDENT: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)

# LBFGS takes inner products over all parameters; SparseAdam needs sparse gradients.
UNSUPPORTED: tuple[type[Optimizer], ...] = (torch.optim.LBFGS, torch.optim.SparseAdam)

Looks = Literal["beyond one element", "beyond one parameter"]


def check_class(optimizer_cls: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises TypeError for no optimizer class, ValueError for one known not to work on parts."""
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
        raise TypeError(
            "optimizer_cls must be a subclass of torch.optim.Optimizer, but got "
            f"{optimizer_cls!r}. Pass the class and its arguments apart."
        )
    if issubclass(optimizer_cls, UNSUPPORTED):
        raise ValueError(
            "optimizer_cls must update each parameter from that parameter's dense gradient alone, "
            f"but got {optimizer_cls.__name__}, which does not. Use it as it is."
        )
    if kwargs.get("differentiable"):
        raise ValueError(
            "differentiable must be False, because gradients do not flow through an update that "
            "other ranks compute, but got True. Leave it out."
        )


def check_update(
    optimizer_cls: type[Optimizer],
    settings: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    *,
    where: str,
    remedy: str | None,
) -> None:
    """ValueError for a class whose update of an element needs elements that a rank does not hold.

    A class that cannot be tried, because it needs a closure or certain shapes, is let through;
    ``check_elementwise_state`` and ``GradientShard`` may still find it.

    Args:
        where: the place that needs such a class, for errors.
        remedy: for one that looks at whole parameters; None if it is given whole ones.
    """
    name = optimizer_cls.__name__
    if issubclass(optimizer_cls, SHAPE_DEPENDENT):
        looks, how = "beyond one element", "looks at the shape of each parameter"
    else:
        looks, how = _try(optimizer_cls, settings, without_flags(kwargs)) or ("", "")
    if looks == "beyond one parameter":
        raise ValueError(
            f"{where} needs an optimizer that updates each parameter from that parameter alone, "
            f"but {name} {how}. Use it on unsharded parameters."
        )
    if looks and remedy is not None:
        raise ValueError(
            f"{where} needs an optimizer that treats every element alike, but {name} {how}. "
            f"{remedy}"
        )


def _try(
    optimizer_cls: type[Optimizer], settings: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> tuple[Looks, str] | None:
    """How far the class looks, and how that shows; None if it does not, or cannot be tried."""
    if optimizer_cls.__module__.startswith("torch.optim."):
        return None
    # On the CPU, where the trial costs nothing, whatever the program's default device is.
    matrix = torch.linspace(-1, 2, 12, device="cpu").view(3, 4)
    vector = torch.linspace(0.5, -2, 8, device="cpu")

    update = functools.partial(_updated, optimizer_cls, without_flags(settings), kwargs)
    try:
        together = update(matrix, vector)
        alone = torch.cat([update(matrix), update(vector)])
    except Exception:  # noqa: BLE001 - whatever a class of the user's does with a trial
        return None
    if not _alike(together, alone):
        return "beyond one parameter", "updates a parameter otherwise when it is given others too"
    flat = matrix.view(-1)
    try:
        parts = update(flat[:5], flat[5:], vector[:3], vector[3:])
    except Exception as error:  # noqa: BLE001 - as above, but whole parameters went well
        return "beyond one element", f"cannot update a part of a matrix ({error})"
    if not _alike(together, parts):
        return "beyond one element", "updates a tensor otherwise when it gets it in two parts"
    return None


def _alike(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)


def _updated(
    optimizer_cls: type[Optimizer],
    settings: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    *tensors: Tensor,
) -> Tensor:
    """All elements after two steps, whose gradients depend on nothing but each element's value."""
    params = [torch.nn.Parameter(tensor.clone()) for tensor in tensors]
    begin = [tensor.clone() for tensor in tensors]
    optimizer = optimizer_cls([dict(settings) | {"params": params}], **kwargs)
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), float):
            group["lr"] = 0.1  # a schedule may begin at zero, where nothing shows
    gradients: list[Callable[[Tensor], Tensor]] = [lambda x: x.exp(), lambda x: 1 - x.square()]
    for gradient in gradients:
        for param, value in zip(params, begin, strict=True):
            param.grad = gradient(value)
        optimizer.step()
    return torch.cat([param.detach().reshape(-1) for param in params])


def check_elementwise_state(optimizer: Optimizer, updated: Tensor) -> None:
    """Raises ValueError for state that is neither one number nor one per element."""
    for key, value in optimizer.state.get(updated, {}).items():
        if isinstance(value, Tensor) and value.numel() != 1 and value.shape != updated.shape:
            raise ValueError(
                'under partition="flat" a state tensor must hold one number or one per element '
                f"({tuple(updated.shape)}), but {type(optimizer).__name__} keeps {key!r} of "
                f'shape {tuple(value.shape)}. Pass partition="whole".'
            )


def without_flags(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments or hyperparameters without those that choose an implementation."""
    return {k: v for k, v in settings.items() if k not in ("foreach", "fused", "capturable")}


def arguments_of(optimizer: Optimizer, optimizer_cls: type[Optimizer]) -> dict[str, Any]:
    """The arguments that the class would need to be made once more, as far as defaults tell."""
    accepted = inspect.signature(optimizer_cls).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in accepted}


def state_keys(
    optimizer_cls: type[Optimizer], settings: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> frozenset[str] | None:
    """Names of the state that a class of torch's keeps for a parameter; None for other classes."""
    if not optimizer_cls.__module__.startswith("torch.optim."):
        return None
    # Flags that choose an implementation may need a GPU, and change no name.
    param = torch.nn.Parameter(torch.ones(2, 2, device="cpu"))
    group = without_flags(settings) | {"params": [param]}
    optimizer = optimizer_cls([group], **without_flags(kwargs))
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


def default_settings(
    optimizer_cls: type[Optimizer], settings: dict[str, Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The class's hyperparameters with their defaults, from an instance over one element."""
    placeholder = torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))
    return optimizer_cls([settings | {"params": [placeholder]}], **kwargs).defaults
