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
holds, and the tensor that holds them. Only this module knows how each kind of model and optimizer
fills the table; everything that moves or stores state goes through rows. A whole state in memory is
described as a folder is, so both are compared with the table by the same code before anything
changes. The keys say whether a tensor is a parameter, a buffer or a moment (an optimizer's state):

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_lite.ranks import all_reduce
from shard_optim.checkpoint_files import METADATA, agreed, read_description, write_folder
from shard_optim.fully_sharded.checks import check_background_group, check_folder
from shard_optim.fully_sharded.own_shards import StatesOfShards
from shard_optim.fully_sharded.wrapper import FullyShardedDataParallel
from shard_optim.json_messages import all_gather_values
from shard_optim.mesh import Mesh, on_every_rank
from shard_optim.optimizer import ShardedOptimizer
from shard_optim.optimizer_state import OptimizerState
from shard_optim.origin import sharded_in, sharded_of
from shard_optim.place import Place, Row, flat_slice, replicated_place
from shard_optim.stored_tensor import StoredTensor, read_elements

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
    earlier = None
    if background_group is not None:
        check_background_group(background_group, ranks)
        earlier = _saving.pop(background_group.group_name, None)
    if earlier is not None:
        earlier.exception()  # waits; what it raised is its future's to tell
    if os.path.lexists(Path(folder) / METADATA):
        raise FileExistsError(
            f"folder must hold no checkpoint, but {folder} does. Save to a new folder."
        )
    if background_group is None:
        write_folder(folder, *table.to_write(), ranks.number, ranks.gather)
        return None

    def gather(what: str, value: Any) -> list[Any]:
        return ranks.shards.call(what, all_gather_values, value, background_group)

    rows, values = table.to_write()
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
        model: as for ``save``.
        optimizer: as for ``save``.

    Raises:
        TypeError: if an argument is of another type, or nothing is sharded.
        FileNotFoundError: if the folder holds no complete checkpoint, or lacks a rank's file.
        ValueError: on every rank, if a file is damaged, the checkpoint is of another model or
            optimizer, or ranks load different ones. Nothing has changed then.
        CollectiveError: if a peer died or timed out, or could not read.
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
    table.take(vectors.items(), wanted, values)


def full_state(
    model: nn.Module | None = None, optimizer: Optimizer | None = None
) -> dict[str, Any] | None:
    """The state that an unsharded run would have, on the first rank's CPU; every rank calls it.

    One tensor at a time travels, so the devices need room for one more whole tensor only::

        state = full_state(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(state, "checkpoint.pt")

    Args:
        model: as for ``save``.
        optimizer: as for ``save``.

    Returns:
        On the first rank a dictionary: ``model``, a state dict for the plain module, tied
        parameters under every name, and ``optimizer``, one for the optimizer's class over the plain
        module's parameters; each if it was asked for. None on the other ranks.

    Raises:
        TypeError: if an argument is of another type, or nothing is sharded.
        ValueError: if the optimizer holds other parameters than the model's, or keeps state that
            cannot be divided.
        CollectiveError: if a peer died or timed out.
    """
    table = _Table(model, optimizer)
    tensors, values = table.collect()
    if not table.ranks.first:
        return None
    whole: dict[str, Any] = {}
    if model is not None:
        whole["model"] = {
            name: value if key is None else tensors[key] for name, value, key in table.named()
        }
    if table.state is not None:
        moments = {key: value for key, value in tensors.items() if key not in table.rows}
        states = table.state.by_parameter(moments, values)
        whole["optimizer"] = {"state": states, "param_groups": values["header"]["param_groups"]}
    return whole


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
        model: as for ``save``.
        optimizer: as for ``save``.

    Raises:
        TypeError: if an argument is of another type, or nothing is sharded.
        ValueError: on every rank, if it is of another model or optimizer class; nothing has
            changed then.
        CollectiveError: if a peer died or timed out.
    """
    table = _Table(model, optimizer)
    ranks = table.ranks
    problem, described, given = None, None, dict[str, Tensor]()
    if ranks.first:
        try:
            described, given = table.describe(state)
        except ValueError as error:
            problem = str(error)
    words = "the exchange of what is loaded"
    problem, described = ranks.broadcast_value(words, (problem, described))
    if problem is not None:
        raise ValueError(
            "a full state dict must be of this model and optimizer class on the first rank, but "
            f"{problem}. {_REMEDY}"
        )
    kinds, values = described
    tensors = {key: StoredTensor(dtype=dtype, shape=size) for key, (dtype, size) in kinds.items()}
    wanted: dict[str, Place] = {}

    def compare() -> None:
        wanted.update(table.places_in(tensors, values, "a full state dict"))

    on_every_rank(words, compare, ranks.gather)

    def handed_out(key: str, place: Place) -> Tensor:
        numel, (first, count) = place.size.numel(), place.span
        values = torch.empty(numel, dtype=kinds[key][0], device=ranks.shards.device)
        if ranks.first:
            values.copy_(flat_slice(given[key], place.size, place.stride, 0, numel))
        ranks.broadcast(f"distributing {key}", values)
        part = values[first : first + count]
        return part if key in table.rows or count == numel else part.clone()  # which is kept

    table.take(((key, handed_out(key, place)) for key, place in wanted.items()), wanted, values)


# --- the table -------------------------------------------------------------------------------


class _Table:
    """The rows of a model and of an optimizer, and the ranks that hold them.

    Args:
        model: see ``save``.
        optimizer: see ``save``.

    Raises:
        TypeError: if an argument is of another type, or nothing is sharded.
        ValueError: if the optimizer holds other parameters than the model's.

    Attributes:
        ranks: of both.
        rows: the model's tensors, by their keys in a folder.
        state: the optimizer's.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise _not_wrapped(model)
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, but got {type(optimizer).__name__}. "
                "Pass the one made from the wrapper's parameters()."
            )
        self.ranks = _ranks_of(model, optimizer)
        if model is not None and optimizer is not None:
            known = {id(param) for param in model.parameters()}
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if foreign := [param for param in params if id(param) not in known]:
                raise ValueError(
                    "optimizer must hold parameters of the sharded model only, but got "
                    f"{len(foreign)} others. Make it from the wrapper's parameters()."
                )
        self.state = None
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.wait()
            self.state = OptimizerState(optimizer, optimizer.local, optimizer.install)
        elif optimizer is not None:
            shards = StatesOfShards(optimizer.param_groups, optimizer)
            self.state = OptimizerState(optimizer, shards, shards.install)
        wrapped = isinstance(model, (FullyShardedDataParallel, DistributedDataParallel))
        self._module: nn.Module | None = model.module if wrapped else model  # whose names count
        self.rows = {} if self._module is None else _rows_of(self._module)

    def named(self) -> Iterator[tuple[str, Any, str | None]]:
        """What the model's state dict holds, under every name that it has.

        Yields:
            The name, the value, and its key in a folder; None if it is no tensor.
        """
        keys = {id(row.tensor): key for key, row in self.rows.items()}
        found = {} if self._module is None else _state_dict_of(self._module)
        for name, value in found.items():
            yield name, value, keys.get(id(value))

    def to_write(self) -> tuple[dict[str, Row], dict[str, Any]]:
        """This rank's part of a folder. What all ranks hold whole, the first one writes."""
        if not self.ranks.first_replica:
            return {}, {}
        rows, values = dict(self.rows), dict[str, Any]()
        if self.state is not None:
            moments, values = self.state.rows()
            rows |= moments
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

        kind = "model" if self.state is None else "optimizer"
        words = f"the exchange of {kind} state descriptions"
        plans, values = agreed(on_every_rank(words, describe, self.ranks.gather))
        kinds = {key: (dtype, shape) for plan in plans for key, (dtype, shape, *_) in plan.items()}
        tensors: dict[str, Tensor] = {}

        def add_parts() -> None:
            ranks = self.ranks.shards
            for key, (dtype, shape) in kinds.items() if self.ranks.first_replica else ():
                place = self._place_of(key, shape)
                whole = torch.zeros(place.size.numel(), dtype=dtype, device=ranks.device)
                first, count = place.span
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

        Raises:
            ValueError: if it is no such state.
        """
        if not isinstance(given, Mapping):
            raise ValueError(f"got {type(given).__name__}")
        for name, asked in (("model", self._module), ("optimizer", self.state)):
            if asked is not None and name not in given:
                raise ValueError(f"it holds no {name!r}, only {sorted(map(str, given))[:8]}")
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        if self._module is not None:
            if not isinstance(given["model"], Mapping):
                raise ValueError(f"got {type(given['model']).__name__} as its model")
            own = {name: key for name, _, key in self.named()}
            for name, value in given["model"].items():
                if name not in own:
                    raise ValueError(f"it holds {name}, which the model does not")
                key = own[name]
                if key is None:
                    continue  # no tensor, such as a module's extra state
                if not isinstance(value, Tensor) or value.is_meta:
                    raise ValueError(f"{name} is no tensor with values, but {type(value).__name__}")
                tensors[key] = value
        if self.state is not None:
            moments, values = self.state.take_apart(given["optimizer"])
            tensors |= moments
        # Values are copied into the model's dtype, as load_state_dict() does.
        kinds = {
            key: (self.rows[key].tensor.dtype if key in self.rows else value.dtype, value.size())
            for key, value in tensors.items()
        }
        return (kinds, values), tensors

    def places_in(
        self, tensors: Mapping[str, StoredTensor], values: Mapping[str, Any], what: str
    ) -> dict[str, Place]:
        """Where each tensor of a description lies here, which must be of this model and optimizer.

        Args:
            tensors: by key.
            values: the small values, by key.
            what: the thing described, for errors.

        Raises:
            ValueError: if it is of others.
        """
        sizes = {key: tensor.shape for key, tensor in tensors.items() if key.startswith("state.")}
        if self._module is not None and "header" in values and len(sizes) == len(tensors):
            raise ValueError(
                "the checkpoint must hold a model, but it holds an optimizer alone. Load the "
                "optimizer from it, without model=."
            )
        if self.state is not None and "header" not in values:
            raise ValueError(
                "the checkpoint must hold an optimizer, but it holds a model alone. Load the model "
                "from it, without optimizer=."
            )
        of, problem = "the same model", next(self._problems_of_model(tensors), None)
        if self.state is not None and problem is None:
            of = "this model and optimizer class"
            problem = next(self.state.problems(sizes, values), None)
        if problem is not None:
            raise ValueError(f"{what} must be of {of}, but {problem}. {_REMEDY}")
        keys = [*self.rows, *(sizes if self.state is not None else ())]
        return {key: self._place_of(key, tensors[key].shape) for key in keys}

    def _place_of(self, key: str, size: Sequence[int]) -> Place:
        if key in self.rows or self.state is None:
            return self.rows[key].place
        return self.state.place_of(key, size)

    def _problems_of_model(self, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
        """Reasons why these are not exactly the model's tensors, in its sizes and dtypes."""
        for key in tensors if self._module is not None else ():
            if key.startswith(("model.", "buffer.")) and key not in self.rows:
                yield f"it holds {key}, which this one does not"
        for key, row in self.rows.items():
            if key not in tensors:
                yield f"it must hold {key}, but {key} is missing"
            stored, size = tensors[key], row.place.size
            # Folders without contents.json give parameters as vectors.
            if tuple(stored.shape) not in (tuple(size), (size.numel(),)):
                yield f"{key} has shape {tuple(stored.shape)} in it, here {tuple(size)}"
            if stored.dtype != row.tensor.dtype:
                yield f"{key} is {stored.dtype} in it, here {row.tensor.dtype}"

    def take(
        self,
        vectors: Iterable[tuple[str, Tensor]],
        wanted: Mapping[str, Place],
        values: Mapping[str, Any],
    ) -> None:
        """Makes this rank's elements, which have been compared, its state: the end of every load.

        Args:
            vectors: keys with this rank's elements.
            wanted: where each tensor lies.
            values: the small values, by key.
        """
        moments: dict[str, Tensor] = {}
        with torch.no_grad():
            for key, vector in vectors:
                if key in self.rows:
                    self.rows[key].tensor.copy_(wanted[key].shaped(vector))
                elif wanted[key].held:
                    moments[key] = wanted[key].shaped(vector.cpu())
                del vector  # before the next one takes memory
        if self.state is not None:
            self.state.install(moments, values)


def _rows_of(module: nn.Module) -> dict[str, Row]:
    """A module's parameters and persistent buffers, each once, by their keys in a folder."""
    rows = {}
    for name, param in module.named_parameters():
        found = sharded_of(param)
        place = replicated_place(name, param) if found is None else found.place
        rows[f"model.{name}"] = Row(place=place, tensor=param)
    persistent = _state_dict_of(module)
    for name, buffer in module.named_buffers():
        if name in persistent:
            rows[f"buffer.{name}"] = Row(place=replicated_place(name, buffer), tensor=buffer)
    return rows


def _state_dict_of(module: nn.Module) -> dict[str, Any]:
    """The module's own tensors, under every name that they have."""
    # A state dict with a prefix is not saved, so nobody is told that it is one rank's part.
    found = module.state_dict(prefix=_PREFIX, keep_vars=True)
    return {name.removeprefix(_PREFIX): value for name, value in found.items()}


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
