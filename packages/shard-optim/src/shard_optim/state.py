"""The state of a training run: four verbs over one table, for models and optimizers in shards.

``save`` and ``load`` write and read a folder by all ranks; ``full_state`` and ``load_full_state``
collect and hand out what an unsharded run would have. Each takes a model, an optimizer, or both:

=======  ==========================================  =============================================
stage    model                                       optimizer
=======  ==========================================  =============================================
1 and 2  any module, which every rank holds whole    ``ShardedOptimizer``
3        ``FullyShardedDataParallel``                any over its parameters
=======  ==========================================  =============================================

The table has a row for each tensor: its key, whole size, the range of its elements that this rank
holds, and the tensor that holds them. A whole state in memory is described as a folder is, so both
are compared with the table by the same code before anything changes. The keys say whether a tensor
is a parameter, a buffer or a moment (an optimizer's state):

- ``model.NAME`` and ``buffer.NAME``: parameters and persistent buffers;
- ``state.I.elements.KEY``: one value per element of the optimizer's parameter number I;
- ``state.I.tensor.KEY``: any other tensor with more than one element;
- ``state.I.values``: everything small of parameter I, as one dictionary;
- ``header``: the optimizer's class, hyperparameters, parameter numbers, names and shapes.

All tensors are vectors in the memory order of the whole tensor, so a folder of N ranks loads bit
for bit on M, and one of stage 3 loads into stage 2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_lite.ranks import all_gather_json, all_reduce
from shard_optim.checkpoint_files import (
    METADATA,
    StoredTensor,
    agreed,
    read_description,
    read_elements,
    write_folder,
)
from shard_optim.fully_sharded.checks import check_background_group, check_folder
from shard_optim.fully_sharded.wrapper import FullyShardedDataParallel
from shard_optim.mesh import Mesh, attempt, on_every_rank, outcomes
from shard_optim.optimizer import ShardedOptimizer
from shard_optim.optimizer_state import OptimizerState
from shard_optim.origin import sharded_in, sharded_of
from shard_optim.parameter_groups import all_params
from shard_optim.place import Place, Row, flat_slice, replicated_place

# The last save in the background, by the name of its group.
_saving: dict[str, Future[None]] = {}

_REMEDY = "Load what was saved from them, with the same groups of parameters."


# --- the four verbs --------------------------------------------------------------------------


def save(
    folder: str | Path,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    *,
    background_group: dist.ProcessGroup | None = None,
) -> Future[None] | None:
    """Writes parameters, buffers and optimizer state into a new folder; every rank calls it.

    The folder becomes a checkpoint at the very end, so a rank that dies while saving leaves an
    incomplete folder and every earlier checkpoint as it was.

    Args:
        folder: the same on every rank, without a checkpoint in it.
        model: a sharded one, or beside a ``ShardedOptimizer`` any module.
        optimizer: of the model.
        background_group: a gloo group of the same ranks that nothing else uses. With it, this
            rank's part is copied to the CPU, and a thread writes it while training goes on. A save
            over the same group that is still under way is waited for first.

    Returns:
        With ``background_group``, a future: its ``result()`` returns when the folder is complete,
        or raises what saving raised.

    Raises:
        TypeError: if an argument is of another type, or nothing is sharded.
        FileExistsError: if the folder holds a checkpoint already.
        ValueError: if the optimizer holds other parameters than the model's, keeps state that
            cannot be divided, or for a background group of other ranks.
        CollectiveError: if a peer died or timed out, or could not write.
    """
    check_folder(folder)
    table, path = _Table(model, optimizer), Path(folder)
    ranks = table.ranks
    if background_group is not None:
        check_background_group(background_group, ranks)
        if earlier := _saving.pop(background_group.group_name, None):
            earlier.exception()  # waits; what it raised is its future's to tell
    if os.path.lexists(path / METADATA):
        raise FileExistsError(
            f"folder must hold no checkpoint, but {folder} does. Save to a new folder."
        )
    rows, values = table.own
    if background_group is None:
        write_folder(path, rows, values, ranks.number, ranks.gather)
        return None

    def gather(what: str, value: Any) -> list[Any]:
        return ranks.shards.call(what, all_gather_json, value, background_group)

    copies = {key: row.copied() for key, row in rows.items()}
    pool = ThreadPoolExecutor(1, thread_name_prefix="shard_optim.save")
    saving = pool.submit(write_folder, path, copies, values, ranks.number, gather)
    _saving[background_group.group_name] = saving
    pool.shutdown(wait=False)
    return saving


def load(
    folder: str | Path, model: nn.Module | None = None, optimizer: Optimizer | None = None
) -> None:
    """Loads what ``save`` wrote on any number of ranks; every rank calls it.

    A folder that holds a model and an optimizer may be loaded in part, and hyperparameters are
    loaded too. No object is built from the files, whoever wrote them.

    Args:
        folder: the same on every rank.
        model, optimizer: as for ``save``.

    Raises:
        TypeError, CollectiveError: as ``save`` does.
        FileNotFoundError: if the folder holds no complete checkpoint, or lacks a needed file.
        ValueError: on every rank, if a file is damaged, the checkpoint is of another model or
            optimizer, or ranks load different ones. Nothing has changed then.
    """
    check_folder(folder)
    table, path = _Table(model, optimizer), Path(folder)
    loaded: dict[str, Tensor] = {}

    def read() -> str:
        tensors, values, identity = read_description(path)
        table.compare(tensors, values, "a checkpoint")
        for key, place in table.places.items():
            if place.held:
                loaded[key] = read_elements(path, key, tensors[key], *place.span)
        return identity

    identities = on_every_rank("loading a checkpoint", read, table.ranks.gather)
    for rank, identity in enumerate(identities):
        if identity != identities[0]:
            raise ValueError(
                f"every rank must load the same checkpoint, but rank {rank} has read another one "
                f"than rank 0. Pass the same folder on every rank, here {folder}."
            )
    for key in [*loaded]:
        table.take(key, loaded.pop(key))
    table.install()


def full_state(
    model: nn.Module | None = None, optimizer: Optimizer | None = None
) -> dict[str, Any] | None:
    """The state that an unsharded run would have, on the first rank's CPU; every rank calls it.

    One tensor at a time travels, so the devices need room for one more whole tensor only.

    Args:
        model, optimizer: as for ``save``.

    Returns:
        On the first rank a dictionary: ``model``, a state dict for the plain module, tied
        parameters under every name, and ``optimizer``, one for the optimizer's class over the plain
        module's parameters; each if it was asked for. None on the other ranks.

    Raises:
        TypeError, ValueError, CollectiveError: as ``save`` does.
    """
    table = _Table(model, optimizer)
    tensors, values = table.collect()
    if not table.ranks.first:
        return None
    return {name: part.whole(tensors, values) for name, part in table.parts.items()}


def load_full_state(
    state: Mapping[str, Any] | None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> None:
    """Hands out what ``full_state`` returned on any number of ranks; every rank calls it.

    One whole tensor at a time travels, and every rank keeps its part. Hyperparameters are loaded
    too.

    Args:
        state: read on the first rank; the others may pass None. ``model`` and ``optimizer`` in it
            may as well be state dicts of a plain module and of a plain optimizer.
        model, optimizer: as for ``save``.

    Raises:
        TypeError, CollectiveError: as ``save`` does.
        ValueError: on every rank, if it is of another model or optimizer class; nothing has
            changed then.
    """
    table = _Table(model, optimizer)
    ranks, words = table.ranks, "the exchange of what is loaded"
    own = attempt(lambda: table.describe(state)) if ranks.first else None
    [(kinds, values)] = outcomes(words, [ranks.broadcast_json(words, own)])
    tensors = {key: StoredTensor(*kind) for key, kind in kinds.items()}
    compare = partial(table.compare, tensors, values, "a full state dict")
    on_every_rank(words, compare, ranks.gather)
    for key, place in table.places.items():
        numel, (first, count) = place.size.numel(), place.span
        whole = torch.empty(numel, dtype=tensors[key].dtype, device=ranks.shards.device)
        if ranks.first:
            whole.copy_(flat_slice(table.given[key], place.size, place.stride, 0, numel))
        ranks.broadcast(f"distributing {key}", whole)
        table.take(key, whole[first : first + count])
        del whole  # before the next one takes memory
    table.install()


# --- the table -------------------------------------------------------------------------------


class _Table:
    """The rows of a model and of an optimizer, and the ranks that hold them."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.ranks = _ranks_of(model, optimizer)  # of both
        # ``model`` and ``optimizer``, each if it was asked for.
        self.parts: dict[str, _ModelState | OptimizerState] = {}
        self.given: dict[str, Tensor] = {}  # whole tensors on the first rank, by key
        self.places: dict[str, Place] = {}  # of what is loaded, by key
        self._moments: dict[str, Tensor] = {}  # this rank's part of them
        if model is not None:
            wrapped = isinstance(model, (FullyShardedDataParallel, DistributedDataParallel))
            module: Any = model.module if wrapped else model  # whose names count
            self.parts["model"] = _ModelState(module)
        if optimizer is None:
            return
        known = None if model is None else {id(p): n for n, p in module.named_parameters()}
        params = all_params(optimizer.param_groups)
        if known is not None and (foreign := [p for p in params if id(p) not in known]):
            raise ValueError(
                "optimizer must hold parameters of the sharded model only, but got "
                f"{len(foreign)} others. Make it from the wrapper's parameters()."
            )
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.wait()
        self.parts["optimizer"] = OptimizerState(optimizer, known)

    @cached_property
    def own(self) -> tuple[dict[str, Row], dict[str, Any]]:
        """This rank's part of a folder. What all ranks hold whole, the first one writes."""
        rows, values = dict[str, Row](), dict[str, Any]()
        for part in self.parts.values() if self.ranks.first_replica else ():
            more, small = part.rows()
            rows, values = rows | more, values | small
        return {
            key: row
            for key, row in rows.items()
            if row.place.held
            and not (row.place.replicated and self.ranks.shards.rank > 0)
            and (row.place.span[1] or not row.place.size.numel())
        }, values

    def collect(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Every tensor, whole, and every small value, on the first rank's CPU. Collective."""

        def describe() -> Any:
            rows, values = self.own
            return {key: row.described for key, row in rows.items()}, values

        words = f"the exchange of {' and '.join(self.parts)} state descriptions"
        kinds, values = agreed(on_every_rank(words, describe, self.ranks.gather))
        tensors: dict[str, Tensor] = {}

        def add_parts() -> None:
            ranks, (rows, _) = self.ranks.shards, self.own
            for key, kind in kinds.items() if self.ranks.first_replica else ():
                place = self.parts[_part_of(key)].place_of(key, kind.shape)
                numel, (first, count) = place.size.numel(), place.span
                whole = torch.zeros(numel, dtype=kind.dtype, device=ranks.device)
                if key in rows:
                    whole[first : first + count] = rows[key].flat
                # The bytes of the ranks' parts, each of which is zero elsewhere.
                parts, add = whole.view(torch.uint8), dist.ReduceOp.SUM
                ranks.together(f"collecting {key}", all_reduce, ranks.communicator, parts, add)
                if self.ranks.first:
                    tensors[key] = whole.cpu().as_strided(place.size, place.stride)

        on_every_rank("collecting the whole state", add_parts, self.ranks.gather)
        return tensors, values

    def describe(self, state: Any) -> Any:
        """A whole state as a folder would hold it: dtypes and sizes by key, and values by key."""
        values: dict[str, Any] = {}
        try:
            if not isinstance(state, Mapping) or not self.parts.keys() <= state.keys():
                held = [*state][:8] if isinstance(state, Mapping) else type(state).__name__
                raise ValueError(f"it must hold {[*self.parts]}, but got {held}")
            for name, part in self.parts.items():
                found, small = part.take_apart(state[name])
                self.given |= found
                values |= small
        except ValueError as error:
            raise ValueError(
                "a full state dict must be of this model and optimizer class on the first rank, "
                f"but {error}. {_REMEDY}"
            ) from None
        return {key: (value.dtype, value.size()) for key, value in self.given.items()}, values

    def compare(
        self, tensors: Mapping[str, StoredTensor], values: Mapping[str, Any], what: str
    ) -> None:
        """Finds the place of each tensor of a description; ValueError if it is of other parts."""
        held = {_part_of(key) for key in (*tensors, *values)}
        for name, other in ("model", "optimizer"), ("optimizer", "model"):
            if name in self.parts and name not in held and other in held:
                raise ValueError(
                    f"the checkpoint must hold the {name} too, but it holds the {other} alone. "
                    f"Load the {other} from it, without {name}=."
                )
        for name, part in self.parts.items():
            of = "the same model" if name == "model" else "this model and optimizer class"
            own = {key: tensor for key, tensor in tensors.items() if _part_of(key) == name}
            for problem in part.problems(own, values):
                raise ValueError(f"{what} must be of {of}, but {problem}. {_REMEDY}")
            self.places |= {key: part.place_of(key, own[key].shape) for key in own}
        self._values = values

    @torch.no_grad()
    def take(self, key: str, elements: Tensor) -> None:
        """Copies elements that were loaded into the model; moments are kept for ``install``."""
        part, place = self.parts[_part_of(key)], self.places[key]
        if isinstance(part, _ModelState):
            part.by_key[key].tensor.copy_(place.shaped(elements))
        elif place.held:
            # Memory of a whole tensor is not kept.
            copy = elements.untyped_storage().nbytes() > elements.nbytes
            self._moments[key] = place.shaped(elements).to("cpu", copy=copy)

    def install(self) -> None:
        """Makes the moments and small values that were loaded this rank's: the end of a load."""
        if isinstance(optimizer := self.parts.get("optimizer"), OptimizerState):
            optimizer.install(self._moments, self._values)


class _ModelState:
    """The rows of a module: its parameters and persistent buffers, each once, ``by_key``."""

    def __init__(self, module: nn.Module) -> None:
        # A state dict with a prefix is not saved, so nobody is told that it is one rank's part.
        found = module.state_dict(prefix="whole.", keep_vars=True)
        self._named = {name.removeprefix("whole."): value for name, value in found.items()}
        tensors: dict[str, Tensor] = {f"model.{name}": p for name, p in module.named_parameters()}
        for name, buffer in module.named_buffers():
            if name in self._named:
                tensors[f"buffer.{name}"] = buffer
        self.by_key: dict[str, Row] = {}
        for key, tensor in tensors.items():
            known = sharded_of(tensor)
            place = replicated_place(key, tensor) if known is None else known.place
            self.by_key[key] = Row(place=place, tensor=tensor)
        self._key_of = {id(row.tensor): key for key, row in self.by_key.items()}

    def rows(self) -> tuple[dict[str, Row], dict[str, Any]]:
        """The rows, and no small values."""
        return self.by_key, {}

    def place_of(self, key: str, _size: Sequence[int]) -> Place:
        """Where a tensor lies, by its key."""
        return self.by_key[key].place

    def whole(self, tensors: Mapping[str, Tensor], _values: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict: every tensor under all its names, and values that are no tensors."""
        keys = ((name, value, self._key_of.get(id(value))) for name, value in self._named.items())
        return {name: value if key is None else tensors[key] for name, value, key in keys}

    def take_apart(self, given: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors in a state dict of the plain module, by key; ValueError if it is none."""
        if not isinstance(given, Mapping):
            raise ValueError(f"got {type(given).__name__} as its model")
        tensors: dict[str, Tensor] = {}
        for name, value in given.items():
            if name not in self._named:
                raise ValueError(f"it holds {name}, which the model does not")
            if (key := self._key_of.get(id(self._named[name]))) is None:
                continue  # no tensor, such as a module's extra state
            if not isinstance(value, Tensor) or value.is_meta:
                raise ValueError(f"{name} is no tensor with values, but {type(value).__name__}")
            tensors[key] = value.to(self.by_key[key].tensor.dtype)  # as load_state_dict() does
        return tensors, {}

    def problems(
        self, tensors: Mapping[str, StoredTensor], _values: Mapping[str, Any]
    ) -> Iterator[str]:
        """Reasons why these are not exactly the module's tensors, in its sizes and dtypes."""
        for key in tensors:
            if key not in self.by_key:
                yield f"it holds {key}, which this one does not"
        for key, row in self.by_key.items():
            if key not in tensors:
                yield f"it must hold {key}, but {key} is missing"
            stored, size = tensors[key], row.place.size
            if stored.shape != size:
                yield f"{key} has shape {tuple(stored.shape)} in it, here {tuple(size)}"
            if stored.dtype != row.tensor.dtype:
                yield f"{key} is {stored.dtype} in it, here {row.tensor.dtype}"


def _part_of(key: str) -> str:
    """The part of a training run, ``model`` or ``optimizer``, that a key belongs to."""
    kind = key.partition(".")[0]
    return {"buffer": "model", "state": "optimizer", "header": "optimizer"}.get(kind, kind)


def _ranks_of(model: Any, optimizer: Any) -> Mesh:
    """The ranks that hold a model and an optimizer; TypeError if nothing is sharded."""
    known = isinstance(optimizer, Optimizer)
    if isinstance(model, FullyShardedDataParallel) and (known or optimizer is None):
        return model.ranks
    whole = isinstance(model, nn.Module) and not any(map(sharded_of, model.parameters()))
    if isinstance(optimizer, ShardedOptimizer) and (model is None or whole):
        return optimizer.mesh
    if known and model is None and (found := sharded_in(optimizer.param_groups)) is not None:
        return found.ranks
    if optimizer is not None and (model is None or (isinstance(model, nn.Module) and not known)):
        raise TypeError(
            "optimizer must be a ShardedOptimizer, or a torch.optim.Optimizer over the parameters "
            f"of a FullyShardedDataParallel, but got {type(optimizer).__name__}. Make it from the "
            "wrapper's parameters(), or save it by torch.save()."
        )
    raise TypeError(
        f"model must be a FullyShardedDataParallel, but got {type(model).__name__}. Pass the "
        "wrapper itself: not the module in it, and not the optimizer. A module that every rank "
        "holds whole goes with its ShardedOptimizer."
    )
