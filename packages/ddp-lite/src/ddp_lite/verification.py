"""Do all ranks hold the same model, and wrap it alike? Asked before a single byte of it moves.

Every rank describes the wrapper's settings, its parameters and buffers. The descriptions are first
compared by digest, so that a thousand ranks with equal models exchange 64 bytes each. Only when
digests differ are the descriptions themselves gathered, and then every rank raises the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch.distributed as dist
from torch import nn

from ddp_lite.errors import ModelMismatchError
from ddp_lite.exchange import all_gather_json

_MOST_DIFFERENCES_SHOWN = 8


def describe_module(module: nn.Module) -> list[tuple[str, str]]:
    """One (name, description) per parameter and buffer, in registration order.

    The description holds shape, dtype, device type, whether a gradient is required, and the
    name it shares memory with if the tensor was seen before.
    """
    first_names: dict[int, str] = {}
    described = []
    for kind, tensors in (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in tensors:
            first = first_names.setdefault(id(tensor), name)
            tied = f", tied to {first}" if first != name else ""
            needs = ", requires grad" if tensor.requires_grad else ""
            text = f"{kind} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
            described.append((name, text + needs + tied))
    return described


def verify_same_model(
    module: nn.Module, group: dist.ProcessGroup, settings: Mapping[str, str]
) -> None:
    """Checks that every rank wraps the same module with the same settings. Collective.

    Args:
        module: what is wrapped.
        group: the ranks.
        settings: of the wrapper, in words.

    Raises:
        ModelMismatchError: on every rank, naming what differs and on which ranks.
    """
    mine = [*settings.items(), *describe_module(module)]
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(all_gather_json(digest, group))) == 1:
        return
    everyone = all_gather_json(mine, group)
    differences = _differences([[(name, text) for name, text in entries] for entries in everyone])
    shown = "\n".join(f"  {line}" for line in differences[:_MOST_DIFFERENCES_SHOWN])
    more = len(differences) - _MOST_DIFFERENCES_SHOWN
    tail = f"\n  and {more} more" if more > 0 else ""
    raise ModelMismatchError(
        "every rank must wrap the same model (names, shapes, dtypes, order, requires_grad) with "
        f"the same settings, but {len(differences)} entries differ:\n{shown}{tail}\n"
        "Build the model and its wrapper from the same configuration on every rank; nothing was "
        "sent yet"
    )


def _differences(everyone: Sequence[Sequence[tuple[str, str]]]) -> list[str]:
    """One line per position at which not all ranks agree, the values grouped by rank."""
    lines = []
    for entries in zip_longest(*everyone):
        ranks_by_entry: dict[tuple[str, str] | None, list[int]] = {}
        for rank, entry in enumerate(entries):
            ranks_by_entry.setdefault(entry, []).append(rank)
        if len(ranks_by_entry) > 1:
            lines.append(
                "; ".join(
                    f"{name_ranks(ranks)}: " + ("nothing" if entry is None else " ".join(entry))
                    for entry, ranks in ranks_by_entry.items()
                )
            )
    return lines


def name_ranks(ranks: Sequence[int]) -> str:
    """'rank 3' or 'ranks 0, 1, 2 and 14 more'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:16]))
    return f"ranks {shown}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
