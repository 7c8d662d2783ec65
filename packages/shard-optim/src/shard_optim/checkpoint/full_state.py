"""Optimizer state between shards and the plain optimizer's state dict, one tensor at a time.

The full form is exactly what ``optimizer_cls(...).state_dict()`` would hold, so it does not depend
on the world size or the partition. No rank ever holds more than one full state tensor, except
rank 0, which collects them on its CPU.

Master copies travel as one more state tensor per parameter, under the key ``MASTER``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shard_optim.communication import guarded, point_to_point_device
from shard_optim.exchange import all_gather_values, broadcast_value
from shard_optim.layout import Bucket, in_memory_order
from shard_optim.local import MASTER
from shard_optim.wrapped import (
    Groups,
    by_number,
    foreign_hyperparameters,
    settings_of,
    state_keys,
)

ShardState = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How one piece of a parameter's state travels.

    Attributes:
        kind: "sliced", one value per element of the parameter, each owner holds its part;
            "tensor", any other tensor with more than one element, held by the only owner;
            "value", anything small, held in ``value``.
        value: the object itself, tensors on the CPU; None for the other kinds.
        dtype: of a tensor.
        shape: of a whole "tensor".
    """

    kind: str
    value: Any = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()


def describe(value: Any, shape: torch.Size, partition: str) -> Entry:
    """Classifies one piece of state of a parameter or shard that has ``shape``."""
    if not isinstance(value, Tensor):
        return Entry(kind="value", value=value)
    if partition == "flat" and value.shape == shape:
        return Entry(kind="sliced", dtype=value.dtype)
    if value.numel() > 1:
        return Entry(kind="tensor", dtype=value.dtype, shape=tuple(value.shape))
    return Entry(kind="value", value=value.detach().cpu())


def placements(buckets: Sequence[Bucket]) -> dict[int, tuple[Bucket, int]]:
    """Where each sharded parameter lies: its bucket and its position there, by number."""
    return {
        index: (bucket, position)
        for bucket in buckets
        for position, index in enumerate(bucket.indices)
    }


def gather_full_state(
    buckets: Sequence[Bucket],
    states: Mapping[int, ShardState],
    *,
    partition: str,
    group: dist.ProcessGroup,
) -> dict[int, dict[str, Any]] | None:
    """Collects all state on rank 0's CPU; every rank must call this.

    Args:
        buckets: this rank's buckets.
        states: state of each shard of this rank, by parameter number.
        partition: "flat" or "whole".
        group: the ranks that share the state.

    Returns:
        State by parameter number on the group's rank 0, None elsewhere.

    Raises:
        CollectiveError: if a peer died or timed out.
    """
    rank = dist.get_rank(group)
    shards = {shard.index: shard for bucket in buckets for shard in bucket.shards}
    mine = {
        index: {key: describe(v, shards[index].tensor.shape, partition) for key, v in state.items()}
        for index, state in states.items()
    }
    everyone: list[dict[int, dict[str, Entry]]] = guarded(
        "the exchange of optimizer state descriptions",
        group,
        lambda: all_gather_values(mine, group, classes=(Entry,)),
    )
    full: dict[int, dict[str, Any]] = {}
    for index, (bucket, position) in sorted(placements(buckets).items()):
        owners = [owner for owner in bucket.plan.owners(position) if index in everyone[owner]]
        if not owners:
            continue
        collected = {}
        for key, entry in everyone[owners[0]][index].items():
            if entry.kind == "value":
                collected[key] = entry.value
                continue
            local = states[index][key] if index in states else None
            collected[key] = guarded(
                f"collecting state {key!r} of {bucket.names[position]}",
                group,
                lambda: _collect(bucket, position, owners, entry, local, rank, group),  # noqa: B023
            )
        full[index] = collected
    return full if rank == 0 else None


def _collect(
    bucket: Bucket,
    position: int,
    owners: Sequence[int],
    entry: Entry,
    local: Tensor | None,
    rank: int,
    group: dist.ProcessGroup,
) -> Tensor | None:
    """One tensor, from its owners to rank 0's CPU."""
    device = point_to_point_device(bucket.device, group)
    if rank != 0:
        if local is not None:
            dist.send(local.detach().reshape(-1).to(device), group=group, group_dst=0)
        return None
    param = bucket.params[position]
    sliced = entry.kind == "sliced"
    shape = param.size() if sliced else torch.Size(entry.shape)
    flat = torch.empty(shape.numel(), dtype=entry.dtype)
    for owner in owners:
        span = bucket.plan.span(position, owner)
        assert span is not None
        target = flat.narrow(0, span.start, span.length) if sliced else flat
        if owner == 0:
            assert local is not None
            target.copy_(local.detach().reshape(-1))
        else:
            part = torch.empty(target.numel(), dtype=entry.dtype, device=device)
            dist.recv(part, group=group, group_src=owner)
            target.copy_(part)
    return flat.as_strided(shape, param.stride()) if sliced else flat.view(shape)


def scatter_full_state(
    buckets: Sequence[Bucket],
    full: Mapping[int, ShardState] | None,
    *,
    partition: str,
    group: dist.ProcessGroup,
    device: torch.device | None = None,
) -> dict[int, dict[str, Any]]:
    """Hands every rank its shards of rank 0's full state; every rank must call this.

    Args:
        buckets: this rank's buckets.
        full: state by parameter number, already validated; read on the group's rank 0 only.
        partition: "flat" or "whole".
        group: the ranks that share the state.
        device: where to keep what is received; None for the buckets' devices.

    Returns:
        State of each of this rank's shards, by parameter number.

    Raises:
        CollectiveError: if a peer died or timed out.
    """
    rank = dist.get_rank(group)
    locations = placements(buckets)
    entries: dict[int, dict[str, Entry]] = {}
    if rank == 0:
        assert full is not None
        for index, state in full.items():
            bucket, position = locations[index]
            shape = bucket.params[position].shape
            entries[index] = {key: describe(v, shape, partition) for key, v in state.items()}
    entries = guarded(
        "the exchange of optimizer state descriptions",
        group,
        lambda: broadcast_value(entries, group, classes=(Entry,)),
    )
    shards = {shard.index: shard for bucket in buckets for shard in bucket.shards}
    received: dict[int, dict[str, Any]] = {}
    for index, described in entries.items():
        bucket, position = locations[index]
        parts: dict[str, Any] = {}
        for key, entry in described.items():
            whole = full[index][key] if full is not None and rank == 0 else None
            value = entry.value
            if entry.kind != "value":
                value = guarded(
                    f"distributing state {key!r} of {bucket.names[position]}",
                    group,
                    lambda: _distribute(bucket, position, entry, whole, rank, group),  # noqa: B023
                )
                if value is not None and device is not None:
                    value = value.to(device)
                if value is not None and entry.kind == "sliced":
                    value = value.view(shards[index].tensor.shape)
            parts[key] = value
        if index in shards:
            received[index] = parts
    return received


def _distribute(
    bucket: Bucket,
    position: int,
    entry: Entry,
    whole: Tensor | None,
    rank: int,
    group: dist.ProcessGroup,
) -> Tensor | None:
    """One tensor, from rank 0's CPU to its owners; returns this rank's part, if it owns one."""
    device = point_to_point_device(bucket.device, group)
    mine: Tensor | None = None
    sliced = entry.kind == "sliced"
    flat = None
    if whole is not None:
        flat = in_memory_order(whole, bucket.params[position]) if sliced else whole.reshape(-1)
    for owner in bucket.plan.owners(position):
        span = bucket.plan.span(position, owner)
        assert span is not None
        length = span.length if sliced else torch.Size(entry.shape).numel()
        if flat is not None:
            part = flat.narrow(0, span.start if sliced else 0, length)
            if owner == 0:
                # Never an alias of the caller's dictionary.
                mine = torch.empty(length, dtype=entry.dtype, device=bucket.device).copy_(part)
            else:
                dist.send(part.to(device).contiguous(), group=group, group_dst=owner)
        elif owner == rank:
            mine = torch.empty(length, dtype=entry.dtype, device=device)
            dist.recv(mine, group=group, group_src=0)
            mine = mine.to(bucket.device)
    return mine if sliced or mine is None else mine.view(entry.shape)


def check_full_state(
    state_dict: Any,
    groups: Groups,
    *,
    optimizer_cls: type[Optimizer],
    defaults: Mapping[str, Any],
    kwargs: Mapping[str, Any],
    shapes: Mapping[int, torch.Size],
    frozen: Iterable[int] = (),
    partition: str,
    name_of: Callable[[int], str],
) -> str | None:
    """Why a state dict does not fit these groups, or None if it does.

    Args:
        state_dict: what was loaded.
        groups: the optimizer's groups.
        optimizer_cls: the wrapped class.
        defaults: its hyperparameters with their defaults.
        kwargs: further arguments of the class.
        shapes: of each parameter, or of each shard for one rank's own state.
        frozen: numbers of parameters that may have no state.
        partition: "flat" or "whole".
        name_of: a parameter's name.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        return f"it must hold 'state' and 'param_groups', but got {type(state_dict).__name__}"
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        return f"it has {len(saved_groups)} groups, the optimizer {len(groups)}"
    found = next(_mismatches(state_dict, groups, defaults, shapes, partition, name_of), None)
    if found is None:
        found = _other_class(state_dict, groups, optimizer_cls, defaults, kwargs)
    if found is None and (held := sorted(by_number(state_dict).keys() & set(frozen))):
        found = f"it has state for {name_of(held[0])}, which is frozen"
    return found


def _other_class(
    state_dict: Mapping[str, Any],
    groups: Groups,
    optimizer_cls: type[Optimizer],
    defaults: Mapping[str, Any],
    kwargs: Mapping[str, Any],
) -> str | None:
    """What shows that a state is of another optimizer class, or None."""
    foreign = foreign_hyperparameters(optimizer_cls, defaults)
    for number, (saved, group) in enumerate(zip(state_dict["param_groups"], groups, strict=True)):
        if others := sorted(foreign & set(saved) - set(group)):
            return f"group {number} has {others}: it is of another optimizer class"
        expected = state_keys(optimizer_cls, settings_of(saved), kwargs)
        for key in saved["params"]:
            found = set(state_dict["state"].get(key, {})) - {MASTER}
            if expected is not None and found and found != expected:
                return (
                    f"it holds {sorted(found)} for a parameter of group {number}, where "
                    f"{optimizer_cls.__name__} holds {sorted(expected)}"
                )
    return None


def _mismatches(
    state_dict: Mapping[str, Any],
    groups: Groups,
    defaults: Mapping[str, Any],
    shapes: Mapping[int, torch.Size],
    partition: str,
    name_of: Callable[[int], str],
) -> Iterator[str]:
    keys: list[Any] = []
    for number, (saved, group) in enumerate(zip(state_dict["param_groups"], groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            yield (
                f"group {number} has {len(saved['params'])} parameters, "
                f"the optimizer's {len(group['params'])}"
            )
            return
        missing = set(defaults) - set(saved)
        if missing:
            yield f"group {number} lacks {sorted(missing)}: it is of another optimizer class"
        flag = "decoupled_weight_decay"  # tells AdamW from Adam, whose settings are the same
        if flag in saved and flag in defaults and saved[flag] != group[flag]:
            yield f"group {number} has {flag}={saved[flag]}, the optimizer {group[flag]}"
        names = zip(saved.get("param_names", ()), group.get("param_names", ()), strict=False)
        for theirs, ours in names:
            if theirs != ours:
                yield f"group {number} has parameter {theirs} where the optimizer has {ours}"
        keys += saved["params"]
    numbers = {key: number for number, key in enumerate(keys)}
    for key, state in state_dict["state"].items():
        if key not in numbers:
            yield f"it has state for parameter {key}, which is in none of its groups"
            return
        expected = shapes.get(numbers[key])
        if expected is None:
            yield f"it has state for {name_of(numbers[key])}, which this rank has no part of"
            return
        for what, value in state.items():
            if isinstance(value, Tensor) and not (
                value.shape == expected
                or value.numel() == 1
                or (partition == "whole" and what != MASTER)
            ):
                yield (
                    f"{what!r} of {name_of(numbers[key])} has shape {tuple(value.shape)}, "
                    f"expected {tuple(expected)}"
                )
