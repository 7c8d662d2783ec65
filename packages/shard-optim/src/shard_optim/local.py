"""The optimizers that run on one rank: instances of the wrapped class over this rank's shards.

There are a few instances, each over some neighbouring buckets, so that the all-gather of one
piece's parameters runs while the next piece is updated. The wrapped class treats parameters
independently of each other, or it could not be sharded over ranks either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shard_optim.buckets import Bucket, Shard, flat_gradient
from shard_optim.partition import Partition
from shard_optim.runs import Run, make_runs
from shard_optim.state import MASTER, local_state
from shard_optim.support import check_elementwise_state

Groups = Sequence[dict[str, Any]]

# More pieces hide more of the all-gather under the update; each costs the host one optimizer call.
MAX_PIECES = 8
MIN_PIECE_BYTES = 128 * 1024**2


@dataclass(eq=False)
class Piece:
    """Neighbouring buckets and the optimizer that updates this rank's shards of them.

    Attributes:
        optimizer: holds one local group per group of whole parameters that existed when the piece
            was made; newer groups have no parameters in it.
        runs: what it updates, by bucket, in the order of the buckets.
    """

    optimizer: Optimizer
    runs: dict[Bucket, list[Run]]

    def all_runs(self) -> list[Run]:
        """All runs, in the order of the buckets."""
        return [run for runs in self.runs.values() for run in runs]

    def split(self, bucket: Bucket, run: Run) -> list[Run]:
        """Replaces a run by one run per shard, each with its part of the state."""
        parts = run.parts()
        if len(parts) == 1:
            return parts
        state = self.optimizer.state.pop(run.tensor, {})
        if state:
            for part in parts:
                own = run.state_of(part.shards[0], state, independent=True)
                self.optimizer.state[part.tensor] = dict(own)
        _replace(self.runs[bucket], run, parts)
        tensors = self.optimizer.param_groups[run.group]["params"]
        _replace(tensors, run.tensor, [part.tensor for part in parts])
        return parts

    def write_back_masters(self) -> None:
        """Rounds updated master copies into the parameters."""
        mastered = [run for run in self.all_runs() if run.has_master]
        if mastered:
            torch._foreach_copy_([run.base for run in mastered], [run.tensor for run in mastered])


class LocalOptimizer:
    """Updates this rank's shards with the hyperparameters of the groups of whole parameters.

    Args:
        optimizer_cls: the wrapped class.
        partition: "flat" or "whole".
        merge: whether neighbouring shards may be updated as one tensor, which needs their
            gradients in one piece too.
        master_dtype: dtype of the copies that are updated in place of lower-precision parameters.
        kwargs: for the class.
    """

    def __init__(
        self,
        optimizer_cls: type[Optimizer],
        *,
        partition: Partition,
        merge: bool,
        master_dtype: torch.dtype | None,
        kwargs: dict[str, Any],
    ) -> None:
        self.shards: list[Shard] = []
        self.pieces: list[Piece] = []
        self._optimizer_cls = optimizer_cls
        self._partition = partition
        self._merge = merge
        self._master_dtype = master_dtype
        self._kwargs = kwargs

    def add(self, groups: Groups, buckets: Sequence[Bucket]) -> None:
        """Adds this rank's shards of new buckets.

        Args:
            groups: all groups of whole parameters.
            buckets: new ones, whose parameters are in these groups.
        """
        group_of: dict[int, int] = {}
        for number, group in enumerate(groups):
            for _ in group["params"]:
                group_of[len(group_of)] = number
        for members in _pieces(buckets):
            runs = {
                bucket: make_runs(
                    bucket, group_of, merge=self._merge, master_dtype=self._master_dtype
                )
                for bucket in members
            }
            local_groups = [
                settings_of(group)
                | {"params": [r.tensor for rs in runs.values() for r in rs if r.group == number]}
                for number, group in enumerate(groups)
            ]
            self.pieces.append(Piece(self._optimizer_cls(local_groups, **self._kwargs), runs))
        self.shards += [shard for bucket in buckets for shard in bucket.shards]

    def step(self, groups: Groups, launch: Callable[[Bucket], None], **kwargs: Any) -> None:
        """One step, piece by piece, with the hyperparameters of ``groups``.

        Changes to hyperparameters are copied back, because some optimizers count or adapt in
        their groups.

        Args:
            groups: the groups of whole parameters.
            launch: called for each bucket once its parameters are updated.
            kwargs: for the class's ``step``.

        Raises:
            ValueError: if the state shows that the class cannot work under "flat".
        """
        changed: list[dict[str, Any]] = [{} for _ in groups]
        for piece in self.pieces:
            local_groups = piece.optimizer.param_groups
            for group, local in zip(groups, local_groups, strict=False):
                local.update(settings_of(group))
            new = not piece.optimizer.state
            piece.optimizer.step(**kwargs)
            for number, local in enumerate(local_groups):
                if local["params"] or not changed[number]:
                    changed[number] = settings_of(local)
            if new and self._partition == "flat":
                for run in piece.all_runs():
                    check_elementwise_state(piece.optimizer, run)
            piece.write_back_masters()
            for bucket in piece.runs:
                launch(bucket)
        for group, settings in zip(groups, changed, strict=True):
            group.update(settings)
        self.drop_gradients()

    def take_gradients(self) -> None:
        """Gives every shard its slice of its parameter's own gradient."""
        for piece in self.pieces:
            for run in piece.all_runs():
                (shard,) = run.shards
                grad = flat_gradient(shard.param, shard.name)
                if grad is None:
                    run.tensor.grad = None
                    continue
                if shard.span.length != grad.numel():
                    grad = grad.narrow(0, shard.span.start, shard.span.length)
                run.give_gradient(grad)

    def take_reduced(self, slices: Mapping[Bucket, Tensor], unused: frozenset[int]) -> None:
        """Gives every shard its slice of its bucket's averaged gradients.

        Args:
            slices: of each bucket this rank's range, shape (chunk,).
            unused: numbers of parameters that had no gradient on any rank.
        """
        for piece in self.pieces:
            for bucket in piece.runs:
                averaged = slices[bucket]
                for run in list(piece.runs[bucket]):
                    for part in self._with_equal_fate(piece, bucket, run, unused):
                        if part.shards[0].index in unused:
                            part.tensor.grad = None
                        else:
                            length = part.base.numel()
                            part.give_gradient(averaged.narrow(0, part.begin, length))

    @staticmethod
    def _with_equal_fate(
        piece: Piece, bucket: Bucket, run: Run, unused: frozenset[int]
    ) -> list[Run]:
        """The run, or its parts if only some of its parameters have gradients."""
        if len(unused.intersection(shard.index for shard in run.shards)) in (0, len(run.shards)):
            return [run]
        return piece.split(bucket, run)

    def drop_gradients(self) -> None:
        """Lets go of all gradients."""
        for piece in self.pieces:
            for run in piece.all_runs():
                run.tensor.grad = None

    def gradients(self) -> list[Tensor]:
        """The gradients that there are."""
        return [
            run.tensor.grad
            for piece in self.pieces
            for run in piece.all_runs()
            if run.tensor.grad is not None
        ]

    def expose(self, state: MutableMapping[Tensor, Any]) -> None:
        """Fills ``state`` with this rank's state under the parameters' identity."""
        state.clear()
        for run, found in self._states():
            for shard in run.shards:
                state[shard.param] = run.state_of(shard, found)

    def states(self) -> dict[int, dict[str, Any]]:
        """State of each shard, master copy included, by parameter number."""
        states = {shard.index: local_state(shard, {}) for shard in self.shards}
        for run, found in self._states():
            for shard in run.shards:
                states[shard.index] = local_state(shard, run.state_of(shard, found))
        return {index: state for index, state in sorted(states.items()) if state}

    def _states(self) -> Iterable[tuple[Run, Mapping[str, Any]]]:
        for piece in self.pieces:
            for run in piece.all_runs():
                if run.tensor in piece.optimizer.state:
                    yield run, piece.optimizer.state[run.tensor]

    @torch.no_grad()
    def install(
        self, states: Mapping[int, Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]
    ) -> None:
        """Replaces all state and hyperparameters, through the class's own loading.

        A master copy that ``states`` lacks is made anew from its parameter.
        """
        for piece in self.pieces:
            found: dict[Tensor, dict[str, Any]] = {}
            for bucket in piece.runs:
                for run in list(piece.runs[bucket]):
                    given = [_unshared(states.get(shard.index, {})) for shard in run.shards]
                    for shard, state in zip(run.shards, given, strict=True):
                        master = state.pop(MASTER, shard.view)
                        if shard.has_master:
                            shard.tensor.copy_(master)
                    joined = given[0] if len(given) == 1 else run.joined_state(given)
                    if joined is not None:
                        found[run.tensor] = joined
                        continue
                    for part, state in zip(piece.split(bucket, run), given, strict=True):
                        found[part.tensor] = state
            packed: dict[str, Any] = {"state": {}, "param_groups": []}
            number = 0
            for local, new in zip(piece.optimizer.param_groups, settings, strict=False):
                first = number
                for tensor in local["params"]:
                    if found[tensor]:
                        packed["state"][number] = found[tensor]
                    number += 1
                members = list(range(first, number))
                packed["param_groups"].append(settings_of(new) | {"params": members})
            piece.optimizer.load_state_dict(packed)


def _replace(items: list[Any], old: Any, new: Sequence[Any]) -> None:
    """Puts ``new`` in the place of ``old``, found by identity: tensors compare by value."""
    place = next(place for place, item in enumerate(items) if item is old)
    items[place : place + 1] = new


def _unshared(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what optimizers change in place without looking: counts and other small values.

    The same state may have been loaded into another optimizer, or come from one that trains on.
    """
    return {
        key: value if isinstance(value, Tensor) and value.numel() > 1 else copy.deepcopy(value)
        for key, value in state.items()
    }


def _pieces(buckets: Sequence[Bucket]) -> list[list[Bucket]]:
    """Buckets in at most about ``MAX_PIECES`` neighbourhoods of similar size."""
    total = sum(bucket.flat.nbytes for bucket in buckets)
    limit = max(total / MAX_PIECES, MIN_PIECE_BYTES)
    pieces: list[list[Bucket]] = []
    filled = 0
    for bucket in buckets:
        if not pieces or filled + bucket.flat.nbytes > limit:
            pieces.append([])
            filled = 0
        pieces[-1].append(bucket)
        filled += bucket.flat.nbytes
    return pieces


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Normalises the constructor's argument to a list of groups, without copying parameters."""
    if isinstance(params, Tensor):
        raise TypeError("params must be an iterable of parameters or groups, got one tensor")
    items = list(params)
    if not items:
        raise ValueError("a sharded optimizer needs at least one parameter, got an empty list")
    if not isinstance(items[0], dict):
        return [{"params": items}]
    return [dict(group) for group in items]


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's hyperparameters, without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def default_settings(
    optimizer_cls: type[Optimizer], groups: Groups, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The class's hyperparameters with their defaults, from an instance over one element."""
    placeholder = torch.nn.Parameter(torch.zeros(1, 1))
    return optimizer_cls([settings_of(groups[0]) | {"params": [placeholder]}], **kwargs).defaults


def pack_groups(groups: Groups) -> list[dict[str, Any]]:
    """Groups as a plain state dict has them: parameters replaced by their numbers."""
    packed, number = [], 0
    for group in groups:
        size = len(group["params"])
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        packed.append(settings_of(group) | names | {"params": list(range(number, number + size))})
        number += size
    return packed
