"""Whose state it is: a shard's state dict says which rank's part it is, of how many, and of when.

``state_dict()`` of a shard holds one rank's part, so it fits that rank of as many ranks only. Parts
of different ranks have the same names and shapes: loaded into another rank they would train on
silently with other weights. Every part therefore carries its origin, a dictionary:

- ``rank``, ``world_size``, ``stage``: which part of how many, and of which ZeRO stage;
- ``version``: the object and its number of steps, the same on every rank at one moment;
- ``spans``: of each tensor the first element that the part holds, and their number;
- ``refusing``: a tensor that ``torch.distributed.checkpoint`` meets, and neither saves nor loads.

Loading compares it, and the ranks compare what they found, before anything changes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_lite.ranks import Ranks
from shard_optim.history import History
from shard_optim.mesh import Mesh
from shard_optim.optimizer_class import arguments_of, check_class, check_update
from shard_optim.parameter_groups import Groups, all_params, settings_in
from shard_optim.place import SHARDED, Place
from shard_optim.refused_gradient import GradientShard

# Key of the origin in a state dict, or in each of an optimizer's packed parameter groups.
ORIGIN = "shard"

# In place of an origin: what is loaded has been checked.
CHECKED = "checked"

# Attribute of an optimizer that another one steps, which tells the origin of its state.
INSIDE = "_inside_sharded_optimizer"

_REMEDY = (
    "Save the parts of all ranks by shard_optim.save(), or whole state by full_state(), and load "
    "them by load() or load_full_state()."
)
_log = logging.getLogger("shard_optim")


def refuse_part(*_: Any) -> NoReturn:
    """What copies, pickles and ``torch.distributed.checkpoint`` call, which would lose the rest."""
    raise TypeError(
        "the part of one rank cannot be copied, pickled, or given to torch.distributed.checkpoint: "
        "a FullyShardedDataParallel, its module, parameters and state_dict(), or the state_dict() "
        f"of an optimizer in shards. {_REMEDY} Copy a module before it is wrapped. For an average "
        "of weights (EMA), keep param.detach().clone() of the parameters on each rank."
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Sharded:
    """A parameter of a ``FullyShardedDataParallel``: where it lies, and with whom."""

    place: Place  # which rank holds which elements
    ranks: Mesh  # that train the model
    history: History  # of what this rank does to it

    __reduce_ex__ = refuse_part


def sharded_of(param: Tensor) -> Sharded | None:
    """Where a parameter of a ``FullyShardedDataParallel`` lies; None for any other tensor."""
    found: Sharded | None = getattr(param, SHARDED, None)
    return found


def sharded_in(groups: Groups) -> Sharded | None:
    """Where the first parameter of a sharded model among these lies, a cut one if there is any."""
    found = [each for each in map(sharded_of, all_params(groups)) if each is not None]
    return next((each for each in found if not each.place.replicated), next(iter(found), None))


def shard_ranks_of(optimizer: Optimizer) -> Ranks | None:
    """The ranks that hold the other shards of an optimizer's parameters; None if they are whole."""
    found = sharded_in(optimizer.param_groups)
    return None if found is None or found.place.replicated else found.ranks.shards


def describe(
    ranks: Mesh, moment: int, places: Mapping[Any, Place], *, stage: int = 3
) -> dict[str, Any]:
    """The origin of this rank's part of tensors that lie at these places, as plain data."""
    origin = {
        "rank": ranks.shards.rank,
        "world_size": ranks.shards.size,
        "stage": stage,
        "version": f"{ranks.name}.{moment}",
        "spans": {key: place.span for key, place in places.items() if not place.replicated},
    }
    return origin | ({"refusing": _FOR_DCP} if ranks.shards.size > 1 else {})


def places_of(params: Iterable[tuple[Any, Tensor]]) -> dict[Any, Place]:
    """Where those of these parameters lie, by their keys, that belong to a sharded model."""
    found = ((key, sharded_of(param)) for key, param in params)
    return {key: each.place for key, each in found if each is not None}


def difference(given: Any, own: Mapping[str, Any]) -> str | None:
    """How the origin of what is loaded differs from this rank's, or None."""
    if not isinstance(given, Mapping) or not own.keys() - {"refusing"} <= given.keys():
        return "it does not say which rank's part it is"
    if (given["rank"], given["world_size"]) != (own["rank"], own["world_size"]):
        return f"it is the part of rank {given['rank']} of {given['world_size']}"
    for key in sorted(own.keys() - {"version", "refusing", "spans"}):
        if given[key] != own[key]:
            return f"it is of {key} {given[key]}, not {own[key]}"
    for name, span in own["spans"].items():
        if tuple(given["spans"].get(name, ())) != span:
            return f"it holds other elements of {name}"
    return None


def check_loaded(
    ranks: Mesh,
    parts: Iterable[tuple[Any, Mapping[str, Any]]] = (),
    *,
    problem: str | None = None,
    version: str | None = None,
) -> None:
    """Compares the origins of what is loaded with this rank's own, and over the ranks. Collective.

    Args:
        parts: pairs of the origin of what is loaded and of this rank's.
        problem: another reason why this rank may not load it, if there is one.
        version: of what is loaded, if it is no part.

    Raises:
        ValueError: on every rank, naming the first rank whose state does not fit.
    """
    found = None
    for given, own in parts:
        found = found or difference(given, own)
        version = None if found else str(given["version"])
    everyone = ranks.gather("the comparison of what the ranks load", (found or problem, version))
    known = [(rank, version) for rank, (_, version) in enumerate(everyone) if version is not None]
    for rank, (problem, version) in enumerate(everyone):
        text = f"on rank {rank} {problem}"
        if problem is None and version not in (None, known[0][1]):
            text = f"rank {rank} has got another moment's than rank {known[0][0]}"
        elif problem is None:
            continue
        raise ValueError(
            f"every rank must load its own part of the state of one moment, but {text}.\n{_REMEDY}"
        )


def say_once(told: Any, what: str, ranks: Mesh) -> None:
    """Logs, the first time that a part is taken out of an optimizer or module, that it is one."""
    if ranks.shards.size > 1 and not getattr(told, "_part_was_named", False):
        told._part_was_named = True
        _log.warning(
            "state_dict() of the %s is the part of rank %d of %d: saved on one rank alone, the "
            "rest is lost. %s",
            what,
            ranks.shards.rank,
            ranks.shards.size,
            _REMEDY,
        )


class OwnPart(GradientShard):
    """A shard in a state dict, and all copies of it. What is saved to a file is ordinary."""

    refused: ClassVar[Mapping[Any, str]] = {}
    ordinary = (torch.cat, torch.stack)
    __create_write_items__ = __create_chunk_list__ = refuse_part

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()


# In the origin of an optimizer's state, whose tensors themselves are ordinary.
_FOR_DCP = torch.zeros(1, device="cpu").as_subclass(OwnPart)


# --- optimizers over the parameters of a sharded model ---------------------------------------


class Watched:
    """An optimizer of any class that was made from the parameters of a sharded model."""

    def __init__(self, optimizer: Optimizer, sharded: Sharded) -> None:
        self.steps = 0  # that it has begun
        self.sharded = sharded  # of its first parameter that belongs to a sharded model
        # Called with the arguments of ``step`` where ``update_in_backward`` updates units.
        self.before_step: Callable[[Any, Any], None] | None = None
        self.in_update = False  # such an update is under way
        # It is a ``ShardedOptimizer``, which does so and has tried its class already.
        self.tells_origin = bool(getattr(optimizer, "tells_origin", False))
        if not self.tells_origin:
            optimizer.register_state_dict_post_hook(self._add_origin)
            optimizer.register_load_state_dict_pre_hook(self._take_origin)

    def origin(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The origin of the state of one parameter group."""
        return describe(self.sharded.ranks, self.steps, places_of(enumerate(group["params"])))

    def check_first(self, optimizer: Optimizer) -> None:
        """Before the first step: ValueError for another rank's state, or what cannot use shards."""
        if not self.tells_origin:
            _check_update(optimizer)
        _check_choice_by_ndim(optimizer)
        # State that was loaded before the first step brought its origin into the groups.
        origins = [group.pop(ORIGIN, None) for group in optimizer.param_groups]
        if any(origin is not None for origin in origins):
            self.check(optimizer, origins)

    def _add_origin(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if state_dict["state"]:  # trainers ask before the first step too
            say_once(self, "optimizer", self.sharded.ranks)
        for packed, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
            packed[ORIGIN] = self.origin(group)

    def _take_origin(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        given = [dict(group) for group in state_dict["param_groups"]]
        self.check(optimizer, [group.pop(ORIGIN, None) for group in given])
        return {**state_dict, "param_groups": given}

    def check(self, optimizer: Optimizer, origins: list[Any]) -> None:
        """Compares the origins of loaded groups with this rank's, as ``check_loaded`` does."""
        if all(origin == CHECKED for origin in origins):
            return
        own = map(self.origin, optimizer.param_groups)
        check_loaded(self.sharded.ranks, zip(origins, own, strict=False))


def _check_update(optimizer: Optimizer) -> None:
    """Raises ValueError for an optimizer over shards that looks beyond single elements."""
    if shard_ranks_of(optimizer) is None:
        return
    cls = type(optimizer)
    check_class(cls, optimizer.defaults)
    check_update(
        cls,
        {key: value for key, value in optimizer.param_groups[0].items() if key != "params"},
        arguments_of(optimizer, cls),
        where="a FullyShardedDataParallel",
        remedy=f'Make it by ShardedOptimizer(matrices, {cls.__name__}, partition="whole").',
    )


def _check_choice_by_ndim(optimizer: Optimizer) -> None:
    """Raises ValueError if a choice by ``p.ndim``, 1 for every shard, left a group empty."""
    remedy = (
        "Every shard has one dimension, so a choice by p.ndim finds no matrix: choose groups by "
        "name, or by the parameters of the module before it is wrapped."
    )
    groups = optimizer.param_groups
    if any(group.get("weight_decay") and not group["params"] for group in groups):
        raise ValueError(
            "a group with weight_decay, over the parameters of a FullyShardedDataParallel, must "
            f"hold parameters, but got an empty one. {remedy}"
        )
    decay = optimizer.defaults.get("weight_decay")
    matrices = [
        group.get("weight_decay")
        for group in groups
        for found in map(sharded_of, group["params"])
        if found is not None and len(found.place.size) > 1
    ]
    if decay and matrices and not any(matrices):
        _log.warning("weight_decay is 0 for every matrix of the model. %s", remedy)


_watched: WeakKeyDictionary[Optimizer, Watched | None] = WeakKeyDictionary()


@functools.cache
def watch_optimizers() -> None:
    """From now on, looks at every optimizer when it steps: those over shards tell their origin."""
    register_optimizer_step_pre_hook(_before_step)


def watched(optimizer: Optimizer) -> Watched | None:
    """What is known of an optimizer over shards; None if its parameters are no shards."""
    if optimizer not in _watched:
        inside = hasattr(optimizer, INSIDE)
        found = None if inside else sharded_in(optimizer.param_groups)
        _watched[optimizer] = None if found is None else Watched(optimizer, found)
    return _watched[optimizer]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    known = watched(optimizer)
    if known is None or known.in_update:
        return
    if known.sharded.history.in_backward:
        raise RuntimeError(
            "an optimizer over the parameters of a FullyShardedDataParallel must step after "
            f"backward, but {type(optimizer).__name__} stepped in a hook during it, or the model's "
            "outputs hide their tensors, so gradients are this rank's own and not averaged yet. "
            "Call step() after backward, and finish_gradient_synchronization() if they are hidden."
        )
    if known.before_step is not None:
        known.before_step(args, kwargs)
    if known.steps == 0:
        known.check_first(optimizer)
    known.steps += 1
    settings = settings_in(optimizer.param_groups)
    known.sharded.history.note(f"stepped {type(optimizer).__name__} with {settings}")
