"""Whole parameters from shards and shards from whole parameters, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shard_optim.buckets import in_memory_order
from shard_optim.collectives import all_gather, guarded
from shard_optim.fully_sharded.unit import Unit


def places(units: Sequence[Unit]) -> dict[int, tuple[Unit, int]]:
    """Where each sharded parameter lies, by its identity: its unit and its position there."""
    return {
        id(param): (unit, position) for unit in units for position, param in enumerate(unit.params)
    }


@torch.no_grad()
def whole_parameters(
    module: nn.Module, units: Sequence[Unit], group: dist.ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of ``module`` with its name, in order; every rank iterates to the end."""
    place_of = places(units)
    for name, param in module.named_parameters():
        if id(param) in place_of:
            unit, position = place_of[id(param)]
            yield name, whole_parameter(unit, position, unit.shard, group)
        else:
            yield name, param.detach().clone()


def whole_parameter(unit: Unit, position: int, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """One parameter, or what an optimizer keeps for each of its elements.

    Args:
        unit: the unit that the parameter is in.
        position: its place there.
        shard: this rank's values for the whole unit, laid out like ``unit.shard``.
        group: the ranks that hold a shard each; every one calls this.
    """
    cut = unit.cuts[position]
    size, stride = unit.layouts[position]
    flat = torch.empty(cut.chunk * group.size(), dtype=shard.dtype, device=shard.device)
    own = shard[cut.shard_offset : cut.shard_offset + cut.chunk]
    words = f"the all-gather of {unit.names[position]}"
    guarded(words, group, lambda: all_gather(flat, own, group).wait())
    return flat.as_strided(size, stride)


def shards_of(
    module: nn.Module, units: Sequence[Unit], state_dict: Mapping[str, Any], prefix: str
) -> dict[str, Tensor]:
    """This rank's shards of the whole parameters in a state dict.

    Raises:
        ValueError: if a tensor has neither a parameter's whole shape nor its shard's.
    """
    place_of = places(units)
    found = {}
    for name, param in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        given = state_dict.get(name)
        if id(param) not in place_of or not isinstance(given, Tensor):
            continue
        unit, position = place_of[id(param)]
        size, stride = unit.layouts[position]
        shard = unit.shard_views[position]
        if given.shape == size:
            first, count = unit.cuts[position].owned(unit.group.rank())
            found[name] = flat_slice(given, size, stride, first, count)
        elif given.shape != shard.shape:
            raise ValueError(
                f"{name} must have its whole shape {tuple(size)}, or {tuple(shard.shape)} as this "
                f"rank's shard of {unit.group.size()}, but got {tuple(given.shape)}. Load a state "
                "dict of this model: a whole one, or this rank's own of the same world size."
            )
    return found


def flat_slice(
    whole: Tensor, size: torch.Size, stride: tuple[int, ...], first: int, count: int
) -> Tensor:
    """Elements ``[first, first + count)`` of a tensor in the memory order of a parameter."""
    like = torch.empty_strided(size, stride, dtype=whole.dtype, device="meta")
    return in_memory_order(whole.detach(), like)[first : first + count]
