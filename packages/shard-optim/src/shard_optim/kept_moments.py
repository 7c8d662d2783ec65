"""Moments that an optimizer keeps in a tensor class of its own, such as torchao's in 8 bits.

Their blocks of elements share a scale, and another number of ranks would cut them elsewhere. So
they are saved, split and joined by value, in ordinary tensors. When they are loaded the class
rounds them once more: a resumed run is close to the one before, not equal bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_LARGE = 1 << 14  # elements; torchao leaves small tensors as they are


def _is_own_form(moment: Any) -> bool:
    return is_traceable_wrapper_subclass(moment)


def by_value(moment: Any) -> Any:
    """A moment as an ordinary tensor; whatever is no tensor class of an optimizer's stays."""
    return moment.dequantize() if _is_own_form(moment) else moment


@torch.no_grad()
def restore_forms(optimizer: Optimizer) -> None:
    """Gives moments that have just been loaded the tensor class that their optimizer gives them."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return
    like = next((p for group in optimizer.param_groups for p in group["params"]), None)
    if like is None:
        return
    try:
        keeps_own = bool(_forms(optimizer, like.new_zeros(_LARGE)))
    except Exception:  # noqa: BLE001 - whatever a class of the user's does with a trial
        return
    if not keeps_own:
        return
    for param, state in optimizer.state.items():
        for key, own in _forms(optimizer, torch.zeros_like(param)).items():
            if key in state:
                state[key] = own.copy_(state[key])


def _forms(optimizer: Optimizer, param: Tensor) -> dict[str, Tensor]:
    """Moments of tensor classes of its own that the optimizer makes for a tensor of zeros."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    param.grad = torch.zeros_like(param)
    twin.state = defaultdict(dict)
    twin.param_groups = [dict(optimizer.param_groups[0]) | {"params": [param]}]
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(twin)  # without the hooks of the optimizer
    return {k: v for k, v in twin.state[param].items() if _is_own_form(v)}
