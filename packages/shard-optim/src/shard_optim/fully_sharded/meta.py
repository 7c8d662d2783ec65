"""Parameters made on the meta device, which has shapes but no memory, given memory and values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def materialize(modules: Iterable[nn.Module], device: torch.device, *, reset: bool) -> None:
    """Gives own parameters and buffers of modules on the meta device memory, and maybe values.

    Parameters keep their identity, so tied ones stay tied. With ``reset`` they get values from
    ``reset_parameters()``, without which this raises a ValueError; else another rank has them.
    """
    for module in modules:
        params = [param for param in module.parameters(recurse=False) if param.is_meta]
        buffers = [(n, b) for n, b in module.named_buffers(recurse=False) if b.is_meta]
        if not params and not buffers:
            continue
        make_values = getattr(module, "reset_parameters", None)
        if reset and not callable(make_values):
            raise ValueError(
                "modules on the meta device must have reset_parameters(), which sets their own "
                f"parameters and buffers, but got {type(module).__name__} without it. Define it, "
                "or make the module on a device with memory."
            )
        for param in params:
            made = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
            torch.utils.swap_tensors(param, made)
        for name, buffer in buffers:
            module._buffers[name] = torch.empty_like(buffer, device=device)
        if reset and make_values is not None:
            with torch.no_grad():
                make_values()


def is_on_meta(root: nn.Module) -> bool:
    """Whether any parameter or buffer has no memory."""
    return any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers()))
