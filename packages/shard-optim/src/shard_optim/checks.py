"""What users can do wrong, found before it trains on without an error.

- Which optimizer classes work under which partition: known before anything is allocated, by a
  trial at construction, or by the state that the first step makes.
- Whether all ranks start from the same weights, and step with the same gradients. Asked once, when
  the first step collects its gradients, by one all-reduce of a few numbers for each parameter.
  Otherwise ranks would update shards of different models, or each its shard with its own gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shard_optim.communication import guarded, maximum
from shard_optim.layout import Partition, check_gradient

# Updates that depend on a parameter's shape: factored moments, orthogonalised matrices.
SHAPE_DEPENDENT: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)

# LBFGS takes inner products over all parameters; SparseAdam needs sparse gradients.
UNSUPPORTED: tuple[type[Optimizer], ...] = (torch.optim.LBFGS, torch.optim.SparseAdam)

# Norms of equal tensors differ only where ranks run different hardware; those of gradients of
# different batches differ in the first digits.
_WEIGHTS_TOLERANCE, _GRADIENTS_TOLERANCE = 1e-5, 1e-3


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


def check_first_step(
    params: Sequence[Tensor],
    *,
    gradients: bool,
    name_of: Callable[[int], str],
    group: dist.ProcessGroup,
) -> None:
    """Compares norms over the ranks. Collective.

    Args:
        params: all parameters, the same on every rank.
        gradients: whether their gradients must have been averaged already.
        name_of: a parameter's name by its number.
        group: the ranks to compare.

    Raises:
        RuntimeError: on every rank, naming the first parameter that differs.
        ValueError: a gradient is sparse.
    """
    if group.size() == 1:
        return
    numbers = [index for index, param in enumerate(params) if param.numel()]
    if not numbers:
        return
    device = params[0].device
    weights = [params[index].detach() for index in numbers]
    found = [_norms(weights, device)]
    if gradients:
        for index in numbers:
            check_gradient(params[index].grad, name_of(index))
        found.append(_norms([params[index].grad for index in numbers], device))
    own = torch.stack(found)
    bounds = torch.stack([own, -own])  # the largest of -x is minus the smallest of x
    work = guarded("the comparison of the first step", group, maximum, bounds, group)
    guarded("the comparison of the first step", group, work.wait)
    largest, smallest = bounds[0], -bounds[1]
    spread, scale = largest - smallest, largest.abs()
    for row, (tolerance, describe) in enumerate(
        [(_WEIGHTS_TOLERANCE, _weights), (_GRADIENTS_TOLERANCE, _gradients)][: len(own)]
    ):
        differs = (spread[row] > tolerance * scale[row]).nonzero()
        if differs.numel():
            place = int(differs[0])
            low, high = float(smallest[row, place]), float(largest[row, place])
            raise RuntimeError(describe(name_of(numbers[place]), low, high))


def _norms(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Shape (tensors,), fp64: -1 for None, -2 where the norm is not finite."""
    norms = [
        torch.tensor(-1.0, device=device)
        if tensor is None
        else torch.linalg.vector_norm(tensor, dtype=_wide(tensor)).to(device)
        for tensor in tensors
    ]
    return torch.stack([norm.double() for norm in norms]).nan_to_num(-2, -2, -2)


def _wide(tensor: Tensor) -> torch.dtype:
    narrow = torch.complex64 if tensor.is_complex() else torch.float32
    return torch.promote_types(tensor.dtype, narrow)


def _weights(name: str, low: float, high: float) -> str:
    return (
        "every rank must start from the same weights, but at the first step the norm of "
        f"{name} is between {low:.6g} and {high:.6g} over the ranks. Initialise with the same seed "
        "on every rank, or broadcast rank 0's weights before the optimizer is constructed"
    )


def _gradients(name: str, low: float, high: float) -> str:
    span = f"its norm is between {low:.6g} and {high:.6g} over the ranks"
    if low == -1:
        span = "it has none on some ranks"
    return (
        "gradients must have been averaged over the ranks before the step, but at the first step "
        f"that of {name} differs: {span}. Put the model into a data-parallel wrapper that averages "
        "gradients, or let this optimizer average them with reduce_gradients=True"
    )
