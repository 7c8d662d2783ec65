"""The state of an optimizer over shards as the state dict of an optimizer over the plain module.

It holds what ``FullyShardedDataParallel.full_state_dict`` is for parameters, so a training run can
continue with another wrapper, or with none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shard_optim.communication import all_gather, guarded
from shard_optim.exchange import all_gather_values, finish
from shard_optim.fully_sharded.checkpoint import _optimizer_params
from shard_optim.fully_sharded.checks import check_wrapper
from shard_optim.fully_sharded.state import flat_slice, parameter_locations
from shard_optim.fully_sharded.unit import Unit
from shard_optim.fully_sharded.whole import WholeMatrixOptimizer
from shard_optim.fully_sharded.wrapper import FullyShardedDataParallel
from shard_optim.wrapped import pack_groups


@torch.no_grad()
def full_optimizer_state(
    model: FullyShardedDataParallel, optimizer: Optimizer
) -> dict[str, Any] | None:
    """The optimizer's whole state on the first rank, on its CPU; a collective call.

    One tensor at a time, so the devices need room for one more whole tensor only.

    Args:
        model: the sharded model.
        optimizer: over its parameters; it treats every element alike, or is a
            ``WholeMatrixOptimizer``.

    Returns:
        On the first rank a state dict that the optimizer's class loads over the plain module's
        parameters, given in the same order; None elsewhere.

    Raises:
        TypeError: if ``model`` is not wrapped, or ``optimizer`` is something else.
        ValueError: if the optimizer holds other parameters than the model's.
        CollectiveError: if a peer died or timed out.
    """
    check_wrapper(model, FullyShardedDataParallel)
    location_of = parameter_locations(model.units)
    states: dict[int, dict[str, Any]] = {}
    for index, param in enumerate(_optimizer_params(model, optimizer)):
        unit, position = location_of.get(id(param), (None, 0))
        entries = optimizer.state.get(param, {}).items()
        if isinstance(optimizer, WholeMatrixOptimizer):
            entries = _from_owner(model, optimizer, param)
        for key, value in entries:
            whole = value
            if unit is not None and isinstance(value, Tensor) and value.shape == param.shape:
                whole = _gathered(model, unit, position, value)
            if model.ranks.first:
                kept = whole.to("cpu", copy=True) if isinstance(whole, Tensor) else whole
                states.setdefault(index, {})[key] = kept
    if not model.ranks.first:
        return None
    return {"state": states, "param_groups": pack_groups(optimizer.param_groups)}


def _from_owner(
    model: FullyShardedDataParallel, optimizer: WholeMatrixOptimizer, param: Tensor
) -> Iterator[tuple[str, Any]]:
    """A matrix's state, which one rank has; every rank iterates to the end."""
    group, owner = model.process_group, optimizer.owner_of(param)
    words = "the broadcast of a matrix's optimizer state"
    own = optimizer.state.get(param, {}) if group.rank() == owner else {}
    layouts = {
        key: (list(value.shape), list(value.stride()), value.dtype)
        for key, value in own.items()
        if isinstance(value, Tensor)
    }
    others = {key: value for key, value in own.items() if key not in layouts}
    everyone = guarded(words, group, all_gather_values, (layouts, others), group)
    layouts, others = everyone[owner]
    for key, (size, stride, dtype) in layouts.items():
        whole = torch.empty_strided(size, stride, dtype=dtype, device=model.device)
        if group.rank() == owner:
            whole.copy_(own[key])
        guarded(
            words,
            group,
            lambda whole=whole: finish(
                dist.broadcast(whole, group=group, group_src=owner, async_op=True)
            ),
        )
        yield key, whole
    yield from others.items()


def _gathered(model: FullyShardedDataParallel, unit: Unit, position: int, shard: Tensor) -> Tensor:
    """A whole tensor from the values that every rank keeps for its shard of a parameter."""
    cut, group = unit.cuts[position], model.process_group
    # State may rest in host memory, which the group's back end may not reach.
    own = torch.zeros(cut.chunk, dtype=shard.dtype, device=model.device)
    own[: shard.numel()] = shard
    flat = own.new_empty(cut.chunk * group.size())
    words = f"the all-gather of the optimizer's state of {unit.names[position]}"
    guarded(words, group, lambda: all_gather(flat, own, group).wait())
    size, stride = unit.layouts[position]
    return flat.as_strided(size, stride)


@torch.no_grad()
def load_full_optimizer_state(
    model: FullyShardedDataParallel, optimizer: Optimizer, state_dict: Mapping[str, Any] | None
) -> None:
    """Loads a plain optimizer's state dict that only the first rank holds; a collective call.

    One tensor at a time travels, and every rank keeps what belongs to its shard. Hyperparameters
    are loaded too.

    Args:
        model: the sharded model.
        optimizer: over its parameters, in the order of the plain optimizer's.
        state_dict: read on the first rank, as :func:`full_optimizer_state` or the optimizer's class
            over the plain module gives it; the others may pass None.

    Raises:
        TypeError: if ``model`` is not wrapped, or ``optimizer`` is something else.
        ValueError: on every rank, if the numbers of parameters differ, a tensor has neither one
            value nor its parameter's shape, or it is no optimizer's state dict; nothing has
            changed then.
        CollectiveError: if a peer died or timed out.
    """
    check_wrapper(model, FullyShardedDataParallel)
    params = _optimizer_params(model, optimizer)
    location_of = parameter_locations(model.units)
    shapes = [
        location_of[id(p)][0].layouts[location_of[id(p)][1]][0] if id(p) in location_of else p.shape
        for p in params
    ]
    words = "the loading of an optimizer's full state"
    ranks = model.ranks
    plan, problem = None, None
    if ranks.first:
        plan, problem = _plan(state_dict, optimizer, shapes)
    plan, problem = ranks.broadcast_value(words, (plan, problem))
    if problem is not None:
        raise ValueError(
            f"state_dict must be an optimizer's over the whole model on the first rank, but "
            f"{problem}. Load a state dict of this model's optimizer."
        )
    assert plan is not None
    states: dict[int, dict[str, Any]] = {}
    for index, entries in plan["state"].items():
        param, state = params[index], {}
        unit, position = location_of.get(id(param), (None, 0))
        for key, (value, dtype) in entries.items():
            if dtype is None:
                state[key] = value
                continue
            whole = torch.empty(shapes[index], dtype=dtype, device=model.device)
            if ranks.first:
                assert state_dict is not None
                whole.copy_(state_dict["state"][index][key])
            ranks.broadcast(words, whole)
            if isinstance(optimizer, WholeMatrixOptimizer):
                if optimizer.whole_of(param) is not None:
                    state[key] = whole
                continue
            state[key] = whole
            if unit is not None:
                size, stride = unit.layouts[position]
                first, count = unit.cuts[position].owned(ranks.shards.rank())
                state[key] = flat_slice(whole, size, stride, first, count).clone()
            del whole  # before the next one takes memory
        if not isinstance(optimizer, WholeMatrixOptimizer) or optimizer.whole_of(param) is not None:
            states[index] = state
    optimizer.load_state_dict({"state": states, "param_groups": plan["param_groups"]})


def _plan(
    state_dict: Mapping[str, Any] | None, optimizer: Optimizer, shapes: list[torch.Size]
) -> tuple[dict[str, Any] | None, str | None]:
    """What every rank must know of a state dict: small values, and the tensors' dtypes.

    Returns:
        The plan and None, or None and what is wrong.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        return None, f"got {type(state_dict).__name__} without state and param_groups"
    groups, found = state_dict["param_groups"], state_dict["state"]
    well_formed = isinstance(found, Mapping) and isinstance(groups, Sequence)
    if not (
        well_formed
        and all(isinstance(state, Mapping) for state in found.values())
        and all(isinstance(group, Mapping) and "params" in group for group in groups)
    ):
        return None, "its state or param_groups are not those of torch.optim.Optimizer.state_dict()"
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        return None, f"it has groups of {sizes} parameters where {own} are due"
    states: dict[int, dict[str, tuple[Any, torch.dtype | None]]] = {}
    for index, state in state_dict["state"].items():
        if index not in range(len(shapes)):
            return None, f"it has state of parameter {index!r} where there are {len(shapes)}"
        for key, value in state.items():
            entry: tuple[Any, torch.dtype | None] = (value, None)
            if isinstance(value, Tensor) and value.shape == shapes[index] and value.ndim:
                entry = (None, value.dtype)
            elif isinstance(value, Tensor):
                if value.numel() != 1:
                    return None, (
                        f"{key!r} of parameter {index} has shape {tuple(value.shape)} where "
                        f"{tuple(shapes[index])} is due"
                    )
                entry = (value.cpu(), None)
            states.setdefault(index, {})[key] = entry
    return {"state": states, "param_groups": list(state_dict["param_groups"])}, None
