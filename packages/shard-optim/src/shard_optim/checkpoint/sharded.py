"""Checkpoints through ``torch.distributed.checkpoint``: written by all ranks, for any number.

``storage.py`` writes and reads the files. Every rank writes its own shards in parallel. State with
one value per element is stored as a vector of the whole parameter, in its memory order, of which
each rank contributes a range, so a checkpoint of N ranks loads bit-exactly on M and under either
partition. Keys:

- ``state.I.elements.KEY``: one value per element of parameter I;
- ``state.I.tensor.KEY``: any other tensor with more than one element;
- ``state.I.values``: everything small, as one dictionary;
- ``header``: hyperparameters, parameter numbers, names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shard_optim.checkpoint.full_state import check_full_state, placements
from shard_optim.layout import in_memory_order
from shard_optim.optimizer import ShardedOptimizer
from shard_optim.wrapped import pack_groups

if TYPE_CHECKING:
    # Importing torch.distributed.checkpoint changes warning filters, so it waits for its first use.
    from shard_optim.checkpoint.storage import Range


def save_checkpoint(optimizer: ShardedOptimizer, folder: str | Path) -> None:
    """Writes the optimizer's state into a new folder; every rank calls it with the same one.

    The folder becomes a checkpoint at the very end, so a rank that dies while saving leaves an
    incomplete folder and every earlier checkpoint as it was.

    Raises:
        TypeError: if ``optimizer`` is no ShardedOptimizer.
        FileExistsError: if the folder holds a checkpoint already.
        CollectiveError: if a peer died or timed out, or could not write.
    """
    from shard_optim.checkpoint.storage import METADATA, Range, write_folder

    _check_optimizer(optimizer)
    if (Path(folder) / METADATA).exists():
        raise FileExistsError(
            f"a checkpoint is never overwritten, but {folder} holds one. Save to a new folder."
        )
    optimizer.wait()
    locations = placements(optimizer.buckets)
    items: dict[str, Any] = {"header": _header(optimizer)}
    ranges: dict[str, Range] = {}
    for index, state in optimizer.local.states().items():
        bucket, position = locations[index]
        span = bucket.plan.span(position, optimizer.rank)
        assert span is not None
        param = bucket.params[position]
        shard = next(shard for shard in bucket.shards if shard.index == index)
        values = {}
        for key, value in state.items():
            if not isinstance(value, Tensor):
                values[key] = value
            elif value.shape == shard.tensor.shape:
                whole = value.shape == param.shape
                flat = in_memory_order(value, param) if whole else value
                ranges[f"state.{index}.elements.{key}"] = Range(
                    values=flat.detach(), offset=span.start, total=param.numel()
                )
            elif value.numel() > 1:
                items[f"state.{index}.tensor.{key}"] = value
            else:
                values[key] = value.detach().cpu()
        items[f"state.{index}.values"] = values
    write_folder(folder, items, ranges, optimizer.process_group)


def load_checkpoint(optimizer: ShardedOptimizer, folder: str | Path) -> None:
    """Loads what ``save_checkpoint`` wrote on any number of ranks; every rank calls it.

    Hyperparameters are loaded too. No code from the checkpoint runs, whoever wrote it.

    Raises:
        TypeError: if ``optimizer`` is no ShardedOptimizer.
        FileNotFoundError: if the folder holds no complete checkpoint.
        ValueError: if a file is damaged, or the checkpoint is of another model or optimizer class.
            Nothing has changed then.
        CollectiveError: if a peer died or timed out, or could not read.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from shard_optim.checkpoint.storage import Range, read_folder, read_metadata

    _check_optimizer(optimizer)
    group = optimizer.process_group
    stored = read_metadata(folder, group).state_dict_metadata
    first: dict[str, Any] = {"header": None}
    read_folder(folder, first, {}, group)
    header = first["header"]
    problem = _mismatch(header, optimizer)
    if problem is not None:
        raise ValueError(
            "a checkpoint must be of this model and optimizer class, but "
            f"{problem}. Load it into the optimizer that it was saved from."
        )
    wanted: dict[str, Any] = {}
    ranges: dict[str, Range] = {}
    named = _names_by_parameter(stored)
    for bucket in optimizer.buckets:
        for shard in bucket.shards:
            for name, kind, _ in named.get(shard.index, ()):
                entry = stored[name]
                if not isinstance(entry, TensorStorageMetadata):
                    wanted[name] = None
                    continue
                dtype = entry.properties.dtype
                device = torch.device("cpu") if optimizer.offload_state else bucket.device
                if kind == "elements":
                    local = torch.empty(shard.span.length, dtype=dtype, device=device)
                    ranges[name] = Range(
                        values=local, offset=shard.span.start, total=shard.param.numel()
                    )
                else:
                    wanted[name] = torch.empty(entry.size, dtype=dtype, device=device)
    read_folder(folder, wanted, ranges, group)
    states: dict[int, dict[str, Any]] = {}
    for bucket in optimizer.buckets:
        for shard in bucket.shards:
            state: dict[str, Any] = {}
            for name, kind, key in named.get(shard.index, ()):
                if kind == "values":
                    state |= wanted[name]
                elif kind == "tensor":
                    state[key] = wanted[name]
                else:
                    flat = ranges[name].values
                    state[key] = flat.as_strided(shard.tensor.size(), shard.tensor.stride())
            if state:
                states[shard.index] = state
    optimizer.install(states, header["param_groups"])


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(
            f"optimizer must be a ShardedOptimizer, but got {type(optimizer).__name__}. Over a "
            "FullyShardedDataParallel use save_fully_sharded and load_fully_sharded."
        )


def _names_by_parameter(stored: Iterable[str]) -> dict[int, list[tuple[str, str, str]]]:
    """The stored names of each parameter's state, as (name, kind, key)."""
    found: dict[int, list[tuple[str, str, str]]] = {}
    for name in stored:
        prefix, *rest = name.split(".", 3)
        if prefix == "state":
            index, kind, *key = rest
            found.setdefault(int(index), []).append((name, kind, "".join(key)))
    return found


def _header(optimizer: ShardedOptimizer) -> dict[str, Any]:
    return {
        "optimizer": optimizer.optimizer_cls.__qualname__,
        "shapes": [tuple(param.shape) for param in optimizer.all_params()],
        "param_groups": pack_groups(optimizer.param_groups),
    }


def _mismatch(header: dict[str, Any], optimizer: ShardedOptimizer) -> str | None:
    """Why a checkpoint does not fit, or None if it does."""
    ours = _header(optimizer)
    if header["optimizer"] != ours["optimizer"]:
        return f"it is of {header['optimizer']}, the optimizer is {ours['optimizer']}"
    problem = check_full_state(
        {"state": {}, "param_groups": header["param_groups"]},
        optimizer.param_groups,
        optimizer_cls=optimizer.optimizer_cls,
        defaults=optimizer.defaults,
        kwargs={},
        shapes={},
        partition=optimizer.partition,
        name_of=optimizer.name_of,
    )
    if problem is not None:
        return problem
    for index, (saved, shape) in enumerate(zip(header["shapes"], ours["shapes"], strict=True)):
        if saved != shape:
            return f"{optimizer.name_of(index)} has shape {saved} in it, here {shape}"
    return None
