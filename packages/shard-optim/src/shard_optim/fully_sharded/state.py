"""Whole parameters from shards and shards from whole parameters, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shard_optim.communication import all_gather, guarded
from shard_optim.fully_sharded.mesh import Ranks
from shard_optim.fully_sharded.unit import Unit
from shard_optim.layout import in_memory_order


def parameter_locations(units: Sequence[Unit]) -> dict[int, tuple[Unit, int]]:
    """Where each sharded parameter lies, by its identity: its unit and its position there."""
    return {
        id(param): (unit, position) for unit in units for position, param in enumerate(unit.params)
    }


@torch.no_grad()
def whole_parameters(
    module: nn.Module, units: Sequence[Unit], group: dist.ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of ``module`` with its name, in order; every rank iterates to the end."""
    location_of = parameter_locations(units)
    for name, param in module.named_parameters():
        if id(param) in location_of:
            unit, position = location_of[id(param)]
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
    location_of = parameter_locations(units)
    found = {}
    for name, param in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        given = state_dict.get(name)
        if id(param) not in location_of or not isinstance(given, Tensor):
            continue
        unit, position = location_of[id(param)]
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


@torch.no_grad()
def load_full(
    module: nn.Module,
    units: Sequence[Unit],
    state_dict: Mapping[str, Any] | None,
    ranks: Ranks,
    device: torch.device,
) -> None:
    """Hands every rank its shards of the first rank's state dict, one tensor at a time.

    Raises:
        ValueError: on every rank, if names or shapes differ; nothing has changed then.
    """
    location_of = parameter_locations(units)
    targets = module.state_dict(keep_vars=True)
    shapes = {}
    for name, target in targets.items():
        unit, position = location_of.get(id(target), (None, 0))
        shapes[name] = target.shape if unit is None else unit.layouts[position][0]
    first = ranks.first
    problem = _difference(state_dict, shapes) if first else None
    words = "the loading of a full state dict"
    problem = ranks.broadcast_value(words, problem)
    if problem is not None:
        raise ValueError(
            f"state_dict must be the whole model's on the first rank, but {problem}. Load a state "
            "dict of this model."
        )
    for name, target in targets.items():
        unit, position = location_of.get(id(target), (None, 0))
        whole = torch.empty(shapes[name], dtype=target.dtype, device=device)
        if first:
            assert state_dict is not None
            whole.copy_(state_dict[name])
        ranks.broadcast(words, whole)
        if unit is None:
            target.copy_(whole)
        else:
            size, stride = unit.layouts[position]
            start, count = unit.cuts[position].owned(ranks.shards.rank())
            target.copy_(flat_slice(whole, size, stride, start, count))
        del whole  # before the next one takes memory


def _difference(state_dict: Any, shapes: Mapping[str, torch.Size]) -> str | None:
    """How a state dict differs from the model's, or None."""
    if not isinstance(state_dict, Mapping):
        return f"got {type(state_dict).__name__}"
    for name, shape in shapes.items():
        if name not in state_dict:
            return f"{name} is missing"
        if not isinstance(state_dict[name], Tensor) or state_dict[name].is_meta:
            kind = type(state_dict[name]).__name__
            return f"{name} is no tensor with values, but {kind}"
        if state_dict[name].shape != shape:
            return f"{name} has shape {tuple(state_dict[name].shape)} where {tuple(shape)} is due"
    extra = next((name for name in state_dict if name not in shapes), None)
    return None if extra is None else f"it holds {extra}, which the model does not"


def flat_slice(
    whole: Tensor, size: torch.Size, stride: tuple[int, ...], first: int, count: int
) -> Tensor:
    """Elements ``[first, first + count)`` of a tensor in the memory order of a parameter."""
    like = torch.empty_strided(size, stride, dtype=whole.dtype, device="meta")
    return in_memory_order(whole.detach(), like)[first : first + count]
