"""Values of optimizers as JSON without loss: numbers, strings, tensors, and containers of these.

Ranks exchange it, and descriptions of checkpoints hold it: torch's object collectives and a pickle
can run code, and the former need NumPy, which torch does not require.
"""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Values of these types are named by their attribute of the module torch.
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def encode(value: Any) -> Any:
    """Converts a value to what JSON can hold; TypeError for any that is not listed here.

    Args:
        value: None, a bool, number or string; a tensor; a dtype, layout or memory format; or a
            list, tuple, ``torch.Size`` or dictionary of these.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        held = value.detach().cpu().contiguous()
        data = base64.b64encode(ctypes.string_at(held.data_ptr(), held.nbytes)).decode()
        return {"tensor": data, "dtype": encode(value.dtype), "shape": list(value.shape)}
    if isinstance(value, _CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    if type(value) in (list, tuple, torch.Size):
        items = [encode(item) for item in value]
        return items if type(value) is list else {type(value).__name__: items}
    if isinstance(value, Mapping):
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    raise TypeError(
        "optimizer state and hyperparameters must be numbers, strings, tensors, dtypes, or lists, "
        f"tuples and dictionaries of these, but got {type(value).__name__}. Keep other objects "
        "outside of the optimizer"
    )


def decode(value: Any) -> Any:
    """The value that ``encode`` was given, tensors on the CPU; an error if it gave none."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        data, dtype = bytearray(base64.b64decode(value["tensor"])), decode(value["dtype"])
        nothing = torch.empty(0, dtype=dtype, device="cpu")
        return (torch.frombuffer(data, dtype=dtype) if data else nothing).view(value["shape"])
    if "torch" in value:
        constant = getattr(torch, value["torch"])
        if not isinstance(constant, _CONSTANTS):
            raise TypeError(f"torch.{value['torch']} must be a dtype, layout or memory format")
        return constant
    if "dict" in value:
        return {decode(k): decode(v) for k, v in value["dict"]}
    return tuple(decode(value["tuple"])) if "tuple" in value else torch.Size(value["Size"])
