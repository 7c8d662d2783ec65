"""Checkpoints of sharded models: parameters and optimizer state, for any number of ranks.

The folder has the format of ``checkpoint/sharded.py``: each parameter's state is a vector of the
whole parameter, of which every rank writes its range. So ``ShardedOptimizer`` loads the optimizer
state of such a folder, and this module loads what ``ShardedOptimizer`` saved. The model adds these
keys:

- ``model.NAME``: a parameter as a vector, in its memory order, of which every rank holds a range;
- ``buffer.NAME``: a persistent buffer.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shard_optim.checkpoint.sharded import _names_by_parameter
from shard_optim.fully_sharded.checks import (
    check_background_group,
    check_folder,
    check_optimizer,
    check_wrapper,
)
from shard_optim.fully_sharded.state import parameter_locations
from shard_optim.fully_sharded.whole import WholeMatrixOptimizer
from shard_optim.fully_sharded.wrapper import FullyShardedDataParallel
from shard_optim.layout import in_memory_order
from shard_optim.wrapped import pack_groups, settings_of

if TYPE_CHECKING:
    # Importing torch.distributed.checkpoint changes warning filters, so it waits for its first use.
    from shard_optim.checkpoint.storage import Range


def save_fully_sharded(
    model: FullyShardedDataParallel,
    optimizer: Optimizer | None,
    folder: str | Path,
    *,
    background_group: dist.ProcessGroup | None = None,
) -> Future[None] | None:
    """Writes parameters, buffers and optimizer state into a new folder; every rank calls it.

    The folder becomes a checkpoint at the very end, so a rank that dies while saving leaves an
    incomplete folder and every earlier checkpoint as it was.

    Args:
        model: the sharded model.
        optimizer: over its parameters; None to save the model alone.
        folder: the same on every rank, without a checkpoint in it.
        background_group: a gloo group of the same ranks that nothing else uses; with a
            two-dimensional mesh, of all its ranks. With it, shards are copied to the CPU, and a
            thread writes them while training goes on.

    Returns:
        With ``background_group``, a future: its ``result()`` returns when the folder is complete,
        or raises what saving raised.

    Raises:
        TypeError: if an argument is of another type.
        FileExistsError: if the folder holds a checkpoint already.
        ValueError: if the optimizer holds other parameters than the model's, or for a background
            group of other ranks.
        CollectiveError: if a peer died or timed out, or could not write.
    """
    from shard_optim.checkpoint.storage import write_folder

    check_wrapper(model, FullyShardedDataParallel)
    check_folder(folder)
    params = [] if optimizer is None else _optimizer_params(model, optimizer)
    if background_group is not None:
        check_background_group(background_group, model.ranks)
    items: dict[str, Any] = {}
    ranges: dict[str, Range] = {}
    for name, buffer in model.module.named_buffers():
        if name in model.module.state_dict(keep_vars=True):
            items[f"buffer.{name}"] = buffer.detach()
    location_of = _locations(model)
    for name, weight in model.module.named_parameters():
        _add_range(ranges, f"model.{name}", weight, location_of[id(weight)])
    if optimizer is not None:
        items["header"] = _header(optimizer, params, location_of)
        for index, param in enumerate(params):
            state = optimizer.state.get(param, {})
            _add_state(items, ranges, index, state, _state_location(optimizer, param, location_of))
    if background_group is None:

        def write() -> None:
            _check_new(folder)
            write_folder(folder, items, ranges, model.process_group)

        # Replicas hold the same shards.
        model.ranks.on_first_replica("saving a checkpoint", write)
        return None
    _check_new(folder)
    if model.ranks.replicas is not None and model.ranks.replicas.rank() > 0:
        items, ranges = {}, {}  # the first replica holds, and writes, the same
    items = {key: _copied(value) for key, value in items.items()}
    ranges = {key: replace(part, values=_copied(part.values)) for key, part in ranges.items()}
    pool = ThreadPoolExecutor(1, thread_name_prefix="save_fully_sharded")
    saving = pool.submit(write_folder, folder, items, ranges, background_group)
    pool.shutdown(wait=False)
    return saving


def _check_new(folder: str | Path) -> None:
    from shard_optim.checkpoint.storage import METADATA

    if (Path(folder) / METADATA).exists():
        raise FileExistsError(
            f"folder must hold no checkpoint, but {folder} does. Save to a new folder."
        )


def load_fully_sharded(
    model: FullyShardedDataParallel, optimizer: Optimizer | None, folder: str | Path
) -> None:
    """Loads what ``save_fully_sharded`` wrote on any number of ranks; every rank calls it.

    From a folder of ``save_checkpoint`` it loads the optimizer's state; such a folder holds no
    parameters. Hyperparameters are loaded too. No code from the checkpoint runs.

    Args:
        model: the sharded model.
        optimizer: over its parameters; None to load the model alone.
        folder: the same on every rank.

    Raises:
        TypeError: if an argument is of another type.
        FileNotFoundError: if the folder holds no complete checkpoint.
        ValueError: if a file is damaged, or the checkpoint is of another model or optimizer.
            Nothing has changed then.
        CollectiveError: if a peer died or timed out, or could not read.
    """
    from shard_optim.checkpoint.storage import read_folder, read_metadata

    check_wrapper(model, FullyShardedDataParallel)
    check_folder(folder)
    params = [] if optimizer is None else _optimizer_params(model, optimizer)
    group = model.process_group
    stored = read_metadata(folder, group).state_dict_metadata
    items: dict[str, Any] = {}
    ranges: dict[str, Range] = {}
    location_of = _locations(model)
    if any(key.startswith("model.") for key in stored):
        names = {f"model.{name}" for name, _ in model.module.named_parameters()}
        extra = [key for key in stored if key.startswith("model.") and key not in names]
        if extra:
            raise ValueError(
                f"the checkpoint must be of the same model, but it holds {extra[0]}, which this "
                "one does not. Load another checkpoint."
            )
        for name, weight in model.module.named_parameters():
            _want_range(ranges, stored, f"model.{name}", location_of[id(weight)])
        items = {
            f"buffer.{name}": torch.empty_like(buffer, device="cpu")
            for name, buffer in model.module.named_buffers()
            if f"buffer.{name}" in stored
        }
    named = _names_by_parameter(stored)
    if optimizer is not None:
        first: dict[str, Any] = {"header": None}
        read_folder(folder, first, {}, group)
        _check_header(first["header"], _header(optimizer, params, location_of))
        items |= first
        for index, param in enumerate(params):
            for key, kind, _ in named.get(index, ()):
                if kind == "elements":
                    _want_range(ranges, stored, key, _state_location(optimizer, param, location_of))
                elif kind == "values":
                    items[key] = None
                else:
                    raise ValueError(
                        "the checkpoint must keep one value per element or one per parameter, but "
                        f"got {key}. Load it into the optimizer that it was saved from."
                    )
    read_folder(folder, items, ranges, group)
    with torch.no_grad():
        for name, weight in model.module.named_parameters():
            if f"model.{name}" in ranges:
                location_of[id(weight)].fill(weight, ranges[f"model.{name}"].values)
        for name, buffer in model.module.named_buffers():
            if f"buffer.{name}" in items:
                buffer.copy_(items[f"buffer.{name}"])
    if optimizer is not None:
        _install(optimizer, params, location_of, named, items, ranges)


@dataclass(frozen=True, kw_only=True)
class _Location:
    """What of a parameter this rank holds: a shard, or everything.

    Attributes:
        param: the parameter at rest.
        sharded: whether it is a shard.
        shape: of the whole parameter.
        first: its first element that this rank holds.
        count: how many it holds.
        saves: whether this rank writes them.
    """

    param: Tensor
    sharded: bool
    shape: torch.Size
    first: int
    count: int
    saves: bool

    def flat(self, values: Tensor) -> Tensor:
        """This rank's values as a vector in the parameter's memory order."""
        return values if self.sharded else in_memory_order(values, self.param)

    def fill(self, target: Tensor, flat: Tensor) -> None:
        """Copies a vector of this rank's values into a tensor of the resting shape."""
        stride = self.param.stride()
        target.copy_(flat if self.sharded else flat.as_strided(self.shape, stride))


def _locations(model: FullyShardedDataParallel) -> dict[int, _Location]:
    """What of every parameter this rank holds, by the parameter's identity."""
    rank, found = model.process_group.rank(), {}
    location_of = parameter_locations(model.units)
    for param in model.module.parameters():
        if id(param) in location_of:
            unit, position = location_of[id(param)]
            first, count = unit.cuts[position].owned(rank)
            shape, sharded = unit.layouts[position][0], True
        else:
            first, count, shape, sharded = 0, param.numel(), param.shape, False
        found[id(param)] = _Location(
            param=param,
            sharded=sharded,
            shape=shape,
            first=first,
            count=count,
            saves=count > 0 and (sharded or rank == 0),
        )
    return found


def _state_location(
    optimizer: Optimizer, param: Tensor, location_of: dict[int, _Location]
) -> _Location:
    """What of the state of a parameter this rank holds: that of its shard, or as owner, all."""
    location = location_of[id(param)]
    if not isinstance(optimizer, WholeMatrixOptimizer):
        return location
    size, stride = optimizer.layout_of(param)
    owns = optimizer.whole_of(param) is not None
    return _Location(
        param=torch.empty_strided(size, stride, dtype=param.dtype, device="meta"),
        sharded=False,
        shape=size,
        first=0,
        count=size.numel() if owns else 0,
        saves=owns,
    )


def _add_range(ranges: dict[str, Range], key: str, values: Tensor, location: _Location) -> None:
    from shard_optim.checkpoint.storage import Range

    if location.saves:
        ranges[key] = Range(
            values=location.flat(values.detach()),
            offset=location.first,
            total=location.shape.numel(),
        )


def _want_range(
    ranges: dict[str, Range], stored: dict[str, Any], key: str, location: _Location
) -> None:
    from shard_optim.checkpoint.storage import Range

    if key not in stored:
        raise ValueError(
            f"the checkpoint must hold {key}, but it does not. Load one of the same model."
        )
    values = torch.empty(location.count, dtype=stored[key].properties.dtype)
    if location.count:
        ranges[key] = Range(values=values, offset=location.first, total=location.shape.numel())


def _add_state(
    items: dict[str, Any],
    ranges: dict[str, Range],
    index: int,
    state: dict[str, Any],
    location: _Location,
) -> None:
    values: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            values[key] = value
        elif value.shape == location.param.shape and value.ndim > 0:
            _add_range(ranges, f"state.{index}.elements.{key}", value, location)
        elif value.numel() == 1:
            values[key] = value.detach().cpu()
        else:
            raise ValueError(
                "an optimizer of shards must keep one value per element or one per parameter, but "
                f"got {key!r} of shape {tuple(value.shape)} for a shard of "
                f"{tuple(location.param.shape)}. Use an optimizer that treats every element alike."
            )
    if values:
        items[f"state.{index}.values"] = values


def _install(
    optimizer: Optimizer,
    params: list[Tensor],
    location_of: dict[int, _Location],
    named: dict[int, list[tuple[str, str, str]]],
    items: dict[str, Any],
    ranges: dict[str, Range],
) -> None:
    """Loads the optimizer's state through its own ``load_state_dict``."""
    states: dict[int, dict[str, Any]] = {}
    for index, param in enumerate(params):
        location = _state_location(optimizer, param, location_of)
        if location.count == 0 and not location.sharded:
            continue  # another rank owns the whole parameter
        state: dict[str, Any] = {}
        for name, kind, key in named.get(index, ()):
            if kind == "values":
                state |= items[name]
            elif kind == "elements":
                state[key] = torch.empty_like(location.param, device="cpu")
                if name in ranges:
                    state[key] = state[key].to(ranges[name].values.dtype)
                    location.fill(state[key], ranges[name].values)
        if state:
            states[index] = state
    groups = [
        settings_of(group) | {"params": new["params"]}
        for group, new in zip(
            items["header"]["param_groups"], pack_groups(optimizer.param_groups), strict=True
        )
    ]
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _optimizer_params(model: FullyShardedDataParallel, optimizer: Optimizer) -> list[Tensor]:
    check_optimizer(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    known = {id(param) for param in model.module.parameters()}
    foreign = [param for param in params if id(param) not in known]
    if foreign:
        raise ValueError(
            "optimizer must hold parameters of the sharded model only, but got "
            f"{len(foreign)} others. Make it from the wrapper's parameters()."
        )
    return params


def _header(
    optimizer: Optimizer, params: list[Tensor], location_of: dict[int, _Location]
) -> dict[str, Any]:
    """The same as for an optimizer of whole parameters."""
    return {
        "optimizer": getattr(optimizer, "optimizer_cls", type(optimizer)).__qualname__,
        "shapes": [tuple(location_of[id(param)].shape) for param in params],
        "param_groups": pack_groups(optimizer.param_groups),
    }


def _check_header(saved: dict[str, Any], ours: dict[str, Any]) -> None:
    for what in ("optimizer", "shapes"):
        if saved[what] != ours[what]:
            raise ValueError(
                f"the checkpoint must be of the same model and optimizer, but its {what} "
                f"is {saved[what]} where this one's is {ours[what]}. Load another checkpoint."
            )
    sizes = [[len(group["params"]) for group in each["param_groups"]] for each in (saved, ours)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the checkpoint must have parameter groups of {sizes[1]} parameters, but has "
            f"{sizes[0]}. Make the optimizer with the groups it was saved with."
        )


def _copied(value: Any) -> Any:
    """The value with every tensor in it copied to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return value
