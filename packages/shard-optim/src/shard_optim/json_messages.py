"""Small messages between ranks, as JSON in tensors of bytes.

torch's object collectives unpickle what peers send, which can run code, and they need NumPy, which
torch does not require. ``encode`` turns what optimizers keep (numbers, strings, tensors, containers
of these) into JSON without loss, and ``decode`` turns it back.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_lite.ranks import all_gather_json

# Values of these types are named by their attribute of the module torch.
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


def all_gather_values(value: Any, communicator: Any) -> list[Any]:
    """Gathers one value from every rank of a group. Collective.

    Args:
        value: see ``encode``.
        communicator: a process group, or a communicator of a ``Ranks``.

    Returns:
        Each rank's value in the group's rank order; tensors are on the CPU.

    Raises:
        TypeError: on every rank, if any rank's value cannot be encoded.
        ValueError: on every rank, if the messages need more than 256 MiB in all.
    """
    everyone = all_gather_json(message(value), communicator)
    return [content(each, rank, communicator.size()) for rank, each in enumerate(everyone)]


def message(value: Any) -> list[Any]:
    """A value as JSON, after the problem if it has none, which must reach ranks that wait."""
    try:
        return [None, encode(value)]
    except TypeError as error:
        return [str(error), None]


def content(message: list[Any], rank: int, size: int) -> Any:
    """The value in a rank's message.

    Raises:
        TypeError: if it holds a problem.
    """
    problem, encoded = message
    if problem is not None:
        raise TypeError(f"{problem} (on rank {rank} of {size})")
    return decode(encoded)


def encode(value: Any) -> Any:
    """Converts a value to what JSON can hold.

    Args:
        value: None, a bool, number or string; a tensor; a dtype, layout or memory format; or a
            list, tuple, ``torch.Size`` or dictionary of these.

    Raises:
        TypeError: for anything else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().view(-1)
        data = base64.b64encode(tensor_bytes(flat)).decode()
        return {"tensor": data, "dtype": encode(value.dtype), "shape": list(value.shape)}
    if isinstance(value, _CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    if type(value) is list:
        return [encode(item) for item in value]
    if type(value) in (tuple, torch.Size):
        return {type(value).__name__: [encode(item) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    raise TypeError(
        "optimizer state and hyperparameters must be numbers, strings, tensors, dtypes, or lists, "
        f"tuples and dictionaries of these, but got {type(value).__name__}. Keep other objects "
        "outside of the optimizer"
    )


def decode(value: Any) -> Any:
    """The value that ``encode`` was given; tensors are on the CPU.

    Args:
        value: what ``encode`` returned.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        data = bytearray(base64.b64decode(value["tensor"]))
        return from_bytes(data, decode(value["dtype"])).view(value["shape"])
    if "torch" in value:
        constant = getattr(torch, value["torch"])
        if not isinstance(constant, _CONSTANTS):
            raise TypeError(f"torch.{value['torch']} must be a dtype, layout or memory format")
        return constant
    if "dict" in value:
        return {decode(k): decode(v) for k, v in value["dict"]}
    if "tuple" in value:
        return tuple(decode(value["tuple"]))
    return torch.Size(value["Size"])


def tensor_bytes(values: Tensor) -> bytearray:
    """The memory of a contiguous vector on the CPU, copied."""
    memory = bytearray(values.nbytes)
    if memory:  # frombuffer refuses an empty one
        torch.frombuffer(memory, dtype=torch.uint8).copy_(values.view(torch.uint8))
    return memory


def from_bytes(memory: bytearray, dtype: torch.dtype) -> Tensor:
    """The memory as a vector."""
    if not memory:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
