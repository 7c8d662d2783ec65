"""Small messages between ranks, as JSON in tensors of bytes.

torch's object collectives unpickle what peers send, which can run code, and they need NumPy, which
torch does not require. JSON can do neither harm nor more than the wrappers need.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from ddp_lite.buckets import MEBIBYTE
from ddp_lite.collectives import backend_for

# Every rank holds the messages of all ranks, padded to the longest.
_MOST_BYTES = 256 * MEBIBYTE


def all_gather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Gathers one JSON value from every rank of a group. Collective.

    Args:
        value: None, a bool, number or string, or lists and string-keyed dictionaries of these.
        group: the ranks.

    Returns:
        Each rank's value in the group's rank order. Tuples have become lists.

    Raises:
        ValueError: on every rank, if the messages need more than 256 MiB in all.
    """
    device = torch.device("cpu")
    if backend_for(group, device) is None:
        device = torch.device("cuda", torch.cuda.current_device())
    message = bytearray(json.dumps(value).encode())
    size = torch.tensor([len(message)], device=device)
    sizes = [torch.empty_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(size) for size in torch.cat(sizes).tolist()]
    longest = max(lengths)
    if longest * group.size() > _MOST_BYTES:
        raise ValueError(
            f"messages between ranks must fit into {_MOST_BYTES // MEBIBYTE} MiB in all, but got "
            f"{longest:,} bytes from rank {lengths.index(longest)} and as much room for each of "
            f"{group.size()} ranks. Wrap a model with fewer or shorter parameter names"
        )
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(message)] = torch.frombuffer(message, dtype=torch.uint8)
    sent = padded.to(device)
    received = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(received, sent, group=group)
    return [
        json.loads(_to_bytes(part[:length])) for part, length in zip(received, lengths, strict=True)
    ]


def _to_bytes(values: torch.Tensor) -> bytearray:
    """The elements of a uint8 vector: a copy into memory that Python can read."""
    memory = bytearray(values.numel())
    torch.frombuffer(memory, dtype=torch.uint8).copy_(values)
    return memory
