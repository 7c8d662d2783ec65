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
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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
from shard_optim.place import Place, Row, flat_slice, replicated_place

# The last save in the background, by the name of its group.
_saving: dict[str, Future[None]] = {}

_PREFIX = "whole."
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
    table = _Table(model, optimizer)
    ranks = table.ranks
    if background_group is not None:
        check_background_group(background_group, ranks)
        if earlier := _saving.pop(background_group.group_name, None):
            earlier.exception()  # waits; what it raised is its future's to tell
    if os.path.lexists(Path(folder) / METADATA):
        raise FileExistsError(
            f"folder must hold no checkpoint, but {folder} does. Save to a new folder."
        )
    rows, values = table.to_write()
    if background_group is None:
        write_folder(folder, rows, values, ranks.number, ranks.gather)
        return None

    def gather(what: str, value: Any) -> list[Any]:
        return ranks.shards.call(what, all_gather_json, value, background_group)

    copies = {key: row.copied() for key, row in rows.items()}
    pool = ThreadPoolExecutor(1, thread_name_prefix="shard_optim.save")
    saving = pool.submit(write_folder, folder, copies, values, ranks.number, gather)
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
        FileNotFoundError: if the folder holds no complete checkpoint, or lacks a rank's file.
        ValueError: on every rank, if a file is damaged, the checkpoint is of another model or
            optimizer, or ranks load different ones. Nothing has changed then.
    """
    check_folder(folder)
    table = _Table(model, optimizer)
    wanted: dict[str, Place] = {}
    vectors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}

    def read() -> str:
        tensors, small, identity = read_description(Path(folder))
        values.update(small)
        wanted.update(table.places_in(tensors, values, "a checkpoint"))
        for key, place in wanted.items():
            if place.held:
                vectors[key] = read_elements(Path(folder), key, tensors[key], *place.span)
        return identity

    identities = on_every_rank("loading a checkpoint", read, table.ranks.gather)
    others = [rank for rank, identity in enumerate(identities) if identity != identities[0]]
    if others:
        raise ValueError(
            f"every rank must load the same checkpoint, but rank {others[0]} has read another one "
            f"than rank 0. Pass the same folder on every rank, here {folder}."
        )
    table.take(((key, vectors.pop(key)) for key in [*vectors]), wanted, values)


def full_state(
    model: nn.Module | None = None, optimizer: Optimizer | None = None
) -> dict[str, Any] | None:
    """The state that an unsharded run would have, on the first rank's CPU; every rank calls it.

    One tensor at a time travels, so the devices need room for one more whole tensor only::

        state = full_state(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(state, "checkpoint.pt")

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
    given: dict[str, Tensor] = {}

    def describe() -> Any:
        described, tensors = table.describe(state)
        given.update(tensors)
        return described

    own = attempt(describe) if ranks.first else None
    [(kinds, values)] = outcomes(words, [ranks.broadcast_json(words, own)])
    tensors = {key: StoredTensor(*kind) for key, kind in kinds.items()}
    wanted: dict[str, Place] = {}

    def compare() -> None:
        wanted.update(table.places_in(tensors, values, "a full state dict"))

    on_every_rank(words, compare, ranks.gather)

    def handed_out(key: str, place: Place) -> Tensor:
        numel, (first, count) = place.size.numel(), place.span
        whole = torch.empty(numel, dtype=tensors[key].dtype, device=ranks.shards.device)
        if ranks.first:
            whole.copy_(flat_slice(given[key], place.size, place.stride, 0, numel))
        ranks.broadcast(f"distributing {key}", whole)
        return whole[first : first + count]

    table.take(((key, handed_out(key, place)) for key, place in wanted.items()), wanted, values)


# --- the table -------------------------------------------------------------------------------


class _Table:
    """The rows of a model and of an optimizer, and the ranks that hold them."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise _not_wrapped(model)
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, but got {type(optimizer).__name__}. "
                "Pass the one made from the wrapper's parameters()."
            )
        self.ranks = _ranks_of(model, optimizer)  # of both
        # ``model`` and ``optimizer``, each if it was asked for.
        self.parts: dict[str, _ModelState | OptimizerState] = {}
        if model is not None:
            wrapped = isinstance(model, (FullyShardedDataParallel, DistributedDataParallel))
            module: Any = model.module if wrapped else model  # whose names count
            self.parts["model"] = _ModelState(module)
        if model is not None and optimizer is not None:
            known = {id(param) for param in model.parameters()}
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if foreign := [param for param in params if id(param) not in known]:
                raise ValueError(
                    "optimizer must hold parameters of the sharded model only, but got "
                    f"{len(foreign)} others. Make it from the wrapper's parameters()."
                )
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.wait()
        if optimizer is not None:
            self.parts["optimizer"] = OptimizerState(optimizer)

    def _places(self, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Place]]:
        for part in self.parts.values():
            yield from part.places_in(tensors).items()

    def _part_of(self, key: str) -> _ModelState | OptimizerState:
        return self.parts["optimizer" if key.startswith("state.") else "model"]

    def to_write(self) -> tuple[dict[str, Row], dict[str, Any]]:
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
        rows: dict[str, Row] = {}

        def describe() -> Any:
            found, values = self.to_write()
            rows.update(found)
            return {key: row.described for key, row in rows.items()}, values

        words = f"the exchange of {' and '.join(self.parts)} state descriptions"
        kinds, values = agreed(on_every_rank(words, describe, self.ranks.gather))
        tensors: dict[str, Tensor] = {}

        def add_parts() -> None:
            ranks = self.ranks.shards
            for key, place in self._places(kinds) if self.ranks.first_replica else ():
                numel, (first, count) = place.size.numel(), place.span
                whole = torch.zeros(numel, dtype=kinds[key].dtype, device=ranks.device)
                if key in rows:
                    whole[first : first + count] = rows[key].flat
                # The bytes of the ranks' parts, each of which is zero elsewhere.
                parts, add = whole.view(torch.uint8), dist.ReduceOp.SUM
                ranks.together(f"collecting {key}", all_reduce, ranks.communicator, parts, add)
                if self.ranks.first:
                    tensors[key] = whole.cpu().as_strided(place.size, place.stride)

        on_every_rank("collecting the whole state", add_parts, self.ranks.gather)
        return tensors, values

    def describe(self, given: Any) -> tuple[Any, dict[str, Tensor]]:
        """A whole state as a folder would hold it.

        Returns:
            The description, which is dtypes and sizes by key, and values by key; and all tensors.
        """
        tensors, values = dict[str, Tensor](), dict[str, Any]()
        try:
            if not isinstance(given, Mapping):
                raise ValueError(f"got {type(given).__name__}")
            for name, part in self.parts.items():
                if name not in given:
                    raise ValueError(f"it holds no {name!r}, only {sorted(map(str, given))[:8]}")
                found, small = part.take_apart(given[name])
                tensors, values = tensors | found, values | small
        except ValueError as error:
            raise ValueError(
                "a full state dict must be of this model and optimizer class on the first rank, "
                f"but {error}. {_REMEDY}"
            ) from None
        kinds = {key: (value.dtype, value.size()) for key, value in tensors.items()}
        return (kinds, values), tensors

    def places_in(
        self, tensors: Mapping[str, StoredTensor], values: Mapping[str, Any], what: str
    ) -> dict[str, Place]:
        """Where each tensor of a description lies here, which must be of this model and optimizer.

        Args:
            what: the thing described, for errors.

        Raises:
            ValueError: if it is of others.
        """
        moments = all(key.startswith("state.") for key in tensors)
        held = "a model" if "header" not in values else "an optimizer" if moments else ""
        kind = held.rpartition(" ")[2]
        for name in self.parts if held else ():
            if name != kind:
                raise ValueError(
                    f"the checkpoint must hold the {name} too, but it holds {held} alone. Load the "
                    f"{kind} from it, without {name}=."
                )
        for name, part in self.parts.items():
            of = "the same model" if name == "model" else "this model and optimizer class"
            for problem in part.problems(tensors, values):
                raise ValueError(f"{what} must be of {of}, but {problem}. {_REMEDY}")
        return dict(self._places(tensors))

    def take(
        self,
        vectors: Iterable[tuple[str, Tensor]],
        wanted: Mapping[str, Place],
        values: Mapping[str, Any],
    ) -> None:
        """Makes this rank's elements, which have been compared, its state: the end of every load.

        Args:
            vectors: keys with this rank's elements.
        """
        with torch.no_grad():
            for key, vector in vectors:
                if wanted[key].held:
                    self._part_of(key).take(key, wanted[key].shaped(vector))
                del vector  # before the next one takes memory
        for part in self.parts.values():
            if isinstance(part, OptimizerState):
                part.install(values)


class _ModelState:
    """The rows of a module: its parameters and persistent buffers, each once."""

    def __init__(self, module: nn.Module) -> None:
        # A state dict with a prefix is not saved, so nobody is told that it is one rank's part.
        found = module.state_dict(prefix=_PREFIX, keep_vars=True)
        self._named = {name.removeprefix(_PREFIX): value for name, value in found.items()}
        self._rows: dict[str, Row] = {}
        for name, param in module.named_parameters():
            known = sharded_of(param)
            place = replicated_place(name, param) if known is None else known.place
            self._rows[f"model.{name}"] = Row(place=place, tensor=param)
        for name, buffer in module.named_buffers():
            if name in self._named:
                place = replicated_place(name, buffer)
                self._rows[f"buffer.{name}"] = Row(place=place, tensor=buffer)
        self._key_of = {id(row.tensor): key for key, row in self._rows.items()}

    def rows(self) -> tuple[dict[str, Row], dict[str, Any]]:
        """The rows, and no small values."""
        return self._rows, {}

    def places_in(self, _tensors: Mapping[str, StoredTensor]) -> dict[str, Place]:
        """Where each tensor of a description lies."""
        return {key: row.place for key, row in self._rows.items()}

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
            tensors[key] = value.to(self._rows[key].tensor.dtype)  # as load_state_dict() does
        return tensors, {}

    def problems(
        self, tensors: Mapping[str, StoredTensor], _values: Mapping[str, Any]
    ) -> Iterator[str]:
        """Reasons why these are not exactly the module's tensors, in its sizes and dtypes."""
        for key in tensors:
            if key.startswith(("model.", "buffer.")) and key not in self._rows:
                yield f"it holds {key}, which this one does not"
        for key, row in self._rows.items():
            if key not in tensors:
                yield f"it must hold {key}, but {key} is missing"
            stored, size = tensors[key], row.place.size
            # Folders without contents.json give parameters as vectors.
            if tuple(stored.shape) not in (tuple(size), (size.numel(),)):
                yield f"{key} has shape {tuple(stored.shape)} in it, here {tuple(size)}"
            if stored.dtype != row.tensor.dtype:
                yield f"{key} is {stored.dtype} in it, here {row.tensor.dtype}"

    def take(self, key: str, value: Tensor) -> None:
        """Copies this rank's elements into the module."""
        self._rows[key].tensor.copy_(value)


def _ranks_of(model: Any, optimizer: Any) -> Mesh:
    if isinstance(model, FullyShardedDataParallel):
        return model.ranks
    shards = model is not None and any(map(sharded_of, model.parameters()))
    if not shards and isinstance(optimizer, ShardedOptimizer):
        return optimizer.mesh
    if model is None and optimizer is not None:
        if (found := sharded_in(optimizer.param_groups)) is not None:
            return found.ranks
        raise TypeError(
            "optimizer must be a ShardedOptimizer, or one of the parameters of a "
            f"FullyShardedDataParallel, but got {type(optimizer).__name__}. Save others by "
            "torch.save()."
        )
    raise _not_wrapped(model)


def _not_wrapped(model: object) -> TypeError:
    return TypeError(
        f"model must be a FullyShardedDataParallel, but got {type(model).__name__}. Pass the "
        "wrapper itself: not the module in it, and not the optimizer. A module that every rank "
        "holds whole goes with its ShardedOptimizer."
    )
