"""What a module must be to be wrapped, found out before anything is changed."""

from __future__ import annotations

import gc

import torch
from torch import nn
from torch.optim import Optimizer

from shard_optim.fully_sharded.meta import is_on_meta
from shard_optim.fully_sharded.schedule import UnitCall


def check_module(module: nn.Module, wrapper: type[nn.Module]) -> None:
    """Refuses what cannot be wrapped.

    Args:
        module: the model.
        wrapper: the class that wraps it.

    Raises:
        TypeError: if it is not a module.
        ValueError: if it is wrapped already, an optimizer holds its parameters, or one of these is
            not floating-point.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, but got {type(module).__name__}. Pass the model."
        )
    for name, child in module.named_modules():
        if isinstance(child._compiled_call_impl, UnitCall) or isinstance(child, wrapper):
            raise ValueError(
                f"module must not be wrapped already, but got {name or 'the root'!r} sharded. "
                "Wrap the outermost module only, and once."
            )
    for name, param in module.named_parameters():
        if not param.is_floating_point():
            raise ValueError(
                f"parameters must be floating-point, but got {name} of {param.dtype}. Register it "
                "as a buffer."
            )
    owned = {id(param) for param in module.parameters()}
    found = _optimizers_of(owned)
    if found:
        gc.collect()  # an optimizer that was dropped may wait for the garbage collector
        found = _optimizers_of(owned)
    if found:
        raise ValueError(
            "module must be wrapped before an optimizer is made for it, but got parameters that "
            f"{found[0]} holds. Make the optimizer from the wrapper's parameters()."
        )


def device_of(module: nn.Module, device: torch.device | str | None) -> torch.device:
    """Where the module is, or, if it is on the meta device, where it is to be made."""
    if is_on_meta(module):
        if device is None:
            raise ValueError(
                "device must be given for a module on the meta device, but got None. Pass the "
                "device that this rank computes on."
            )
        return torch.device(device)
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _optimizers_of(params: set[int]) -> list[str]:
    """Names of the classes of living optimizers that hold any of these parameters."""
    return [
        type(thing).__name__
        for thing in gc.get_objects()
        if issubclass(type(thing), Optimizer)
        and any(id(param) in params for group in thing.param_groups for param in group["params"])
    ]
