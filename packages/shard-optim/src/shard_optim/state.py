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

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_lite.ranks import Ranks, backend_for, finish
from shard_optim.bucket_layout import Place, flat_slice, replicated_place
from shard_optim.checkpoint_files import (
    METADATA,
    Contents,
    Range,
    check_plans,
    read_contents,
    read_ranges,
    together,
    write_folder,
)
from shard_optim.communication import as_sent
from shard_optim.fully_sharded.checks import check_background_group, check_folder
from shard_optim.fully_sharded.wrapper import FullyShardedDataParallel
from shard_optim.json_messages import all_gather_values
from shard_optim.mesh import Mesh
from shard_optim.optimizer import ShardedOptimizer
from shard_optim.optimizer_class import by_number, pack_groups, settings_of
from shard_optim.origin import CHECKED, ORIGIN, sharded_in, sharded_of, watched
from shard_optim.plain_state import check_full_state
from shard_optim.stored_tensor import StoredTensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """One tensor of the state: where its elements lie, and the tensor with this rank's."""

    place: Place
    tensor: Tensor


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
    ranks, source, state = _parts(model, optimizer)
    if background_group is None:

        def write() -> None:
            _check_new(folder)
            write_folder(folder, *_to_write(source, state, detached=False), ranks.shards)

        # Replicas hold the same state.
        ranks.on_first_replica("saving a checkpoint", write)
        return None
    check_background_group(background_group, ranks)
    _wait_for_saving(background_group)
    _check_new(folder)
    ranges, values = _to_write(source, state, detached=True) if ranks.first_replica else ({}, {})
    pool = ThreadPoolExecutor(1, thread_name_prefix="shard_optim.save")
    saving = pool.submit(write_folder, folder, ranges, values, ranks.shards, background_group)
    _saving[background_group.group_name] = saving
    pool.shutdown(wait=False)
    return saving


_saving: dict[str, Future[None]] = {}


def _wait_for_saving(group: dist.ProcessGroup) -> None:
    """Returns when no thread uses the group any more; what it raised is its future's to tell."""
    if (earlier := _saving.pop(group.group_name, None)) is not None:
        earlier.exception()


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
    ranks, source, state = _parts(model, optimizer)
    contents = read_contents(folder, ranks)
    wanted = _compare(contents, model, source, state, ranks)
    spans = {key: place.span for key, place in wanted.items() if place.held}
    vectors = read_ranges(folder, contents, spans, ranks.shards)
    if state is not None:
        found = [key for key in vectors if key not in source]
        moments = {key: wanted[key].shaped(vectors.pop(key)) for key in found}
        state.install(moments, contents.values)
    with torch.no_grad():
        for key, vector in vectors.items():
            source[key].tensor.copy_(source[key].place.shaped(vector))


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
    ranks, source, state = _parts(model, optimizer)
    found: list[tuple[dict[str, Tensor], dict[str, Any]]] = []

    def place_of(key: str, size: Sequence[int]) -> Place:
        return source[key].place if state is None or key in source else state.place_of(key, size)

    def collect() -> None:
        found.append(_collect(*_to_write(source, state, detached=False), place_of, ranks.shards))

    ranks.on_first_replica("collecting the whole state", collect)
    if not ranks.first:
        return None
    tensors, values = found[0]
    whole: dict[str, Any] = {}
    if model is not None:
        key_of = _keys_by_tensor(source)
        whole["model"] = {
            name: tensors[key_of[id(value)]] if id(value) in key_of else value
            for name, value in _state_dict_of(model).items()
        }
    if state is not None:
        states = state.by_parameter({k: v for k, v in tensors.items() if k not in source}, values)
        whole["optimizer"] = {"state": states, "param_groups": pack_groups(state.groups)}
    return whole


def load_full_state(
    state: Mapping[str, Any] | None,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> None:
    """Hands out what ``full_state`` returned on any number of ranks; every rank calls it.

    One tensor at a time travels, and every rank keeps its part. Hyperparameters are loaded too.

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
    ranks, source, target = _parts(model, optimizer)
    problem, described, given = None, None, dict[str, Tensor]()
    if ranks.first:
        try:
            described, given = _describe(state, model, source, target)
        except ValueError as error:
            problem = str(error)
    words = "the exchange of what is loaded"
    problem, described = ranks.broadcast_value(words, (problem, described))
    if problem is not None:
        raise ValueError(
            "a full state dict must be of this model and optimizer class on the first rank, but "
            f"{problem}. Load what was saved from them, with the same groups of parameters."
        )
    kinds, values = described
    tensors = {
        key: StoredTensor(dtype=dtype, shape=size, parts=()) for key, (dtype, size) in kinds.items()
    }
    contents = Contents(tensors=tensors, values=values, identity="")
    wanted = _compare(contents, model, source, target, ranks)
    moments: dict[str, Tensor] = {}
    with torch.no_grad():
        for key in [key for key in wanted if key not in source]:
            place = wanted[key]
            vector = _hand_out(key, given.get(key), tensors[key].dtype, place, ranks)
            if place.held and target is not None:
                moments[key] = place.shaped(vector.to(target.resting or vector.device))
        for key, row in source.items():
            vector = _hand_out(key, given.get(key), row.tensor.dtype, row.place, ranks)
            row.tensor.copy_(row.place.shaped(vector))
            del vector  # before the next one takes memory
    if target is not None:
        target.install(moments, values)


# --- models ----------------------------------------------------------------------------------


def _model_rows(model: nn.Module | None, rank: int) -> dict[str, Row]:
    """Parameters and persistent buffers, each once, by their keys in a folder."""
    if model is None:
        return {}
    module = _inner(model)
    rows = {}
    for name, param in module.named_parameters():
        found = sharded_of(param)
        place = replicated_place(name, param, rank) if found is None else found.place
        rows[f"model.{name}"] = Row(place=place, tensor=param)
    persistent = _state_dict_of(model)
    for name, buffer in module.named_buffers():
        if name in persistent:
            rows[f"buffer.{name}"] = Row(place=replicated_place(name, buffer, rank), tensor=buffer)
    return rows


def _inner(model: nn.Module) -> nn.Module:
    """The module whose names are those of unsharded training."""
    wrapped = isinstance(model, (FullyShardedDataParallel, DistributedDataParallel))
    module: nn.Module = model.module if wrapped else model  # type: ignore[assignment]
    return module


def _state_dict_of(model: nn.Module) -> dict[str, Any]:
    """The module's own tensors, under every name that they have."""
    if isinstance(model, FullyShardedDataParallel):
        with model.own_state.silent():
            return dict(model.module.state_dict(keep_vars=True))
    return dict(_inner(model).state_dict(keep_vars=True))


def _keys_by_tensor(source: Mapping[str, Row]) -> dict[int, str]:
    return {id(row.tensor): key for key, row in source.items()}


def _check_model(contents: Contents, source: Mapping[str, Row]) -> None:
    """Raises unless a folder holds exactly the model's tensors, in its sizes and dtypes."""
    of_model = [key for key in contents.tensors if key.startswith(("model.", "buffer."))]
    if not of_model and "header" in contents.values:
        raise ValueError(
            "the checkpoint must hold a model, but it holds an optimizer alone. Load the optimizer "
            "from it, without model=."
        )
    if extra := [key for key in of_model if key not in source]:
        raise ValueError(
            f"the checkpoint must be of the same model, but it holds {extra[0]}, which this one "
            "does not. Load another checkpoint."
        )
    for key, row in source.items():
        if key not in contents.tensors:
            raise ValueError(
                f"the checkpoint must hold {key}, but {key} is missing. Load one of the same model."
            )
        stored, size = contents.tensors[key], row.place.size
        # Folders without contents.json give parameters as vectors.
        if tuple(stored.shape) not in (tuple(size), (size.numel(),)):
            raise ValueError(
                f"the checkpoint must be of the same model, but {key} has shape "
                f"{tuple(stored.shape)} in it, here {tuple(size)}. Load another checkpoint."
            )
        if stored.dtype != row.tensor.dtype:
            raise ValueError(
                f"the checkpoint must have the model's dtypes, but {key} is {stored.dtype} in it, "
                f"here {row.tensor.dtype}. Make the model in the dtype that it was saved in."
            )


# --- optimizers ------------------------------------------------------------------------------


class OptimizerState:
    """The table's rows of an optimizer, whatever its class and stage.

    Args:
        optimizer: the optimizer.
        rank: this rank among those that hold the shards.

    Attributes:
        params: every parameter, by its number.
        places: where each lies; None if the optimizer has given it no place, because it is frozen.
        groups: the parameter groups.
        resting: where state rests; None for the devices of the parameters.
    """

    def __init__(self, optimizer: Optimizer, rank: int) -> None:
        self._optimizer = optimizer
        self.groups = optimizer.param_groups
        self.params = [param for group in self.groups for param in group["params"]]
        self.resting: torch.device | None = None
        self._cls = getattr(optimizer, "optimizer_cls", type(optimizer))
        self.places: list[Place | None]
        if isinstance(optimizer, ShardedOptimizer):
            optimizer.wait()
            self.resting = torch.device("cpu") if optimizer.offload_state else None
            self.places = optimizer.places()
        else:
            self.places = []
            for index, param in enumerate(self.params):
                of = sharded_of(param)
                name = f"parameter {index}"
                place = replicated_place(name, param, rank) if of is None else of.place
                self.places.append(place)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The whole shape of each parameter."""
        pairs = zip(self.places, self.params, strict=True)
        return [tuple(p.shape if place is None else place.size) for place, p in pairs]

    def name_of(self, index: int) -> str:
        """A parameter's name, for errors."""
        if isinstance(self._optimizer, ShardedOptimizer):
            return self._optimizer.name_of(index)
        return f"parameter {index}"

    def header(self) -> dict[str, Any]:
        """The same for every number of ranks, and for shards as for whole parameters."""
        return {
            "optimizer": self._cls.__qualname__,
            "shapes": self.shapes,
            "param_groups": pack_groups(self.groups),
        }

    def problem(self, state_dict: Any) -> str | None:
        """Why a plain optimizer's state dict does not fit, or None."""
        sharded = self._optimizer if isinstance(self._optimizer, ShardedOptimizer) else None
        return check_full_state(
            state_dict,
            self.groups,
            optimizer_cls=self._cls,
            defaults=self._optimizer.defaults,
            kwargs={} if sharded is None else sharded.class_arguments,
            shapes={index: torch.Size(shape) for index, shape in enumerate(self.shapes)},
            frozen=[index for index, place in enumerate(self.places) if place is None],
            partition="flat" if sharded is None else sharded.partition,
            name_of=self.name_of,
        )

    def _states(self) -> Mapping[int, Mapping[str, Any]]:
        """This rank's state by parameter number."""
        if isinstance(self._optimizer, ShardedOptimizer):
            return self._optimizer.local.states()
        state = self._optimizer.state
        return {index: state[p] for index, p in enumerate(self.params) if p in state}

    def rows(self) -> tuple[dict[str, Row], dict[str, Any]]:
        """This rank's moments, and its small values by ``state.I.values``.

        Raises:
            ValueError: if a shard has state that is neither one value nor one per element.
        """
        tensors, values = self.split(self._states(), whole=False)
        rows = {
            key: Row(place=self.place_of(key, tensor.size()), tensor=tensor)
            for key, tensor in tensors.items()
        }
        return rows, values

    def split(
        self, states: Mapping[int, Mapping[str, Any]], *, whole: bool
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The moments in states by parameter number, and their small values by keys of a folder.

        Args:
            states: of whole parameters, or of what this rank holds of them.
            whole: which of these.

        Raises:
            ValueError: if a shard has state that is neither one value nor one per element.
        """
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for index, state in states.items():
            place = self.places[index]
            assert place is not None
            form = place.size if whole else place.form
            small = values.setdefault(f"state.{index}.values", {})
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    small[key] = copy.deepcopy(value)
                # One value of a single number is small, except where only one rank has it.
                elif value.shape == form and (value.ndim > 0 or not place.replicated):
                    tensors[f"state.{index}.elements.{key}"] = value
                elif value.numel() <= 1:
                    # Copied, because the next step may change it in place while it is written.
                    small[key] = value.detach().to("cpu", copy=True)
                elif whole or place.whole_here:
                    tensors[f"state.{index}.tensor.{key}"] = value
                else:
                    raise ValueError(
                        "an optimizer of shards must keep one value per element or one per "
                        f"parameter, but got {key!r} of shape {tuple(value.shape)} for a shard of "
                        f"{tuple(form)}. Use an optimizer that treats every element alike."
                    )
        return tensors, values

    def place_of(self, key: str, size: Sequence[int]) -> Place:
        """Where a moment lies, by its key in a folder and, if it is no moment per element, size."""
        _, index, kind, _ = key.split(".", 3)
        place = self.places[int(index)]
        assert place is not None
        return place if kind == "elements" else _beside(place, torch.Size(size))

    def places_in(self, contents: Contents) -> dict[str, Place]:
        """Where each moment of a description lies here.

        Raises:
            ValueError: if it is of another class, of other groups or of other parameters.
        """
        if "header" not in contents.values:
            raise ValueError(
                "the checkpoint must hold an optimizer, but it holds a model alone. Load the model "
                "from it, without optimizer=."
            )
        remedy = "Load it into the optimizer that it was saved from."
        if problem := self._header_problem(contents.values["header"]):
            raise ValueError(
                f"a checkpoint must be of this model and optimizer class, but {problem}. {remedy}"
            )
        found = {}
        for key, stored in contents.tensors.items():
            if not key.startswith("state."):
                continue
            parts = key.split(".", 3)
            known = len(parts) == 4 and parts[1].isdecimal() and parts[2] in ("elements", "tensor")
            index = int(parts[1]) if known else -1
            if not known or index >= len(self.places) or self.places[index] is None:
                raise ValueError(
                    f"the checkpoint must hold state of this optimizer's {len(self.places)} "
                    f"trainable parameters only, but it holds {key} of shape {stored.shape}. "
                    f"{remedy}"
                )
            place = found[key] = self.place_of(key, stored.shape)
            if place.held and not place.whole_here and parts[2] == "tensor":
                raise ValueError(
                    "the checkpoint must keep one value per element or one per parameter, but got "
                    f"{key}. {remedy}"
                )
            if stored.numel != place.size.numel():
                raise ValueError(
                    f"the checkpoint must hold {place.size.numel()} elements under {key}, but it "
                    f"holds {stored.numel}. {remedy}"
                )
        return found

    def _header_problem(self, header: Mapping[str, Any]) -> str | None:
        """How the class, groups or shapes of a description differ, or None."""
        ours = self.header()
        if header["optimizer"] != ours["optimizer"]:
            return f"it is of {header['optimizer']}, the optimizer is {ours['optimizer']}"
        if problem := self.problem({"state": {}, "param_groups": header["param_groups"]}):
            return problem
        for index, (saved, shape) in enumerate(zip(header["shapes"], ours["shapes"], strict=True)):
            if tuple(saved) != shape:
                return f"{self.name_of(index)} has shape {tuple(saved)} in it, here {shape}"
        return None

    def by_parameter(
        self, moments: Mapping[str, Tensor], values: Mapping[str, Any]
    ) -> dict[int, dict[str, Any]]:
        """State by parameter number and key, from moments and small values by their keys."""
        states: dict[int, dict[str, Any]] = {}
        for key, small in values.items():
            parts = key.split(".")
            if parts[0] == "state" and small:
                states[int(parts[1])] = dict(small)
        for key, value in moments.items():
            _, index, _, name = key.split(".", 3)
            states.setdefault(int(index), {})[name] = value
        return dict(sorted(states.items()))

    def install(self, moments: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Replaces this rank's state and the hyperparameters: the end of every load.

        Args:
            moments: the tensors that this rank keeps, by key.
            values: the header, and small values of all parameters, by ``state.I.values``.
        """
        groups = values["header"]["param_groups"]
        states = {
            index: state
            for index, state in self.by_parameter(moments, values).items()
            if (place := self.places[index]) is not None and place.held
        }
        if isinstance(self._optimizer, ShardedOptimizer):
            self._optimizer.install(states, groups)
            return
        watched(self._optimizer)  # which then takes the origin out of what is loaded
        packed = [
            settings_of(group) | {"params": own["params"], ORIGIN: CHECKED}
            for group, own in zip(groups, pack_groups(self.groups), strict=True)
        ]
        self._optimizer.load_state_dict({"state": states, "param_groups": packed})


def _beside(place: Place, size: torch.Size) -> Place:
    """Where a tensor of another size lies that belongs to a parameter with one owner."""
    numel = size.numel()
    return Place(
        name=place.name,
        size=size,
        stride=torch.empty(size, device="meta").stride(),
        span_of=lambda rank: None if place.span_of(rank) is None else (0, numel),
        replicated=place.replicated,
        rank=place.rank,
        form=size if place.whole_here else torch.Size([0]),
    )


# --- both ------------------------------------------------------------------------------------


def _parts(model: Any, optimizer: Any) -> tuple[Mesh, dict[str, Row], OptimizerState | None]:
    """The ranks that hold the state, the model's rows, and the optimizer's state.

    Raises:
        TypeError: if an argument is of another type, or nothing is sharded.
        ValueError: if the optimizer holds other parameters than the model's.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise _not_wrapped(model)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, but got {type(optimizer).__name__}. Pass "
            "the one made from the wrapper's parameters()."
        )
    ranks = _ranks_of(model, optimizer)
    if model is not None and optimizer is not None:
        known = {id(param) for param in model.parameters()}
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if foreign := [param for param in params if id(param) not in known]:
            raise ValueError(
                "optimizer must hold parameters of the sharded model only, but got "
                f"{len(foreign)} others. Make it from the wrapper's parameters()."
            )
    rank = ranks.shards.rank
    state = None if optimizer is None else OptimizerState(optimizer, rank)
    return ranks, _model_rows(model, rank), state


def _ranks_of(model: Any, optimizer: Any) -> Mesh:
    if isinstance(model, FullyShardedDataParallel):
        return model.ranks
    shards = model is not None and any(map(sharded_of, model.parameters()))
    if not shards and isinstance(optimizer, ShardedOptimizer):
        return optimizer.mesh
    if not shards and model is None and optimizer is not None:
        found = sharded_in(optimizer.param_groups)
        if found is not None:
            return found.ranks
    if model is None and optimizer is not None:
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


def _check_new(folder: str | Path) -> None:
    if os.path.lexists(Path(folder) / METADATA):
        raise FileExistsError(
            f"folder must hold no checkpoint, but {folder} does. Save to a new folder."
        )


def _to_write(
    source: Mapping[str, Row], state: OptimizerState | None, *, detached: bool
) -> tuple[dict[str, Range], dict[str, Any]]:
    """This rank's part of the files. What all ranks hold whole, the first one writes."""
    rows: dict[str, Row] = dict(source)
    values: dict[str, Any] = {}
    if state is not None:
        moments, values = state.rows()
        rows |= moments
        values["header"] = state.header()
    ranges = {}
    for key, row in rows.items():
        first, count = row.place.span
        one_of_several = row.place.replicated and row.place.rank > 0
        if row.place.held and not one_of_several and (count or not row.place.size.numel()):
            vector = row.place.flat(row.tensor)
            vector = vector.to("cpu", copy=True) if detached else vector
            ranges[key] = Range(values=vector, first=first, shape=tuple(row.place.size))
    return ranges, values


def _collect(
    ranges: Mapping[str, Range],
    values: Mapping[str, Any],
    place_of: Callable[[str, Sequence[int]], Place],
    ranks: Ranks,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor, whole, and every small value, on the first rank's CPU. Collective."""
    described = {key: part.described for key, part in ranges.items()}
    kind = "optimizer" if "header" in values else "model"
    words = f"the exchange of {kind} state descriptions"
    everyone = ranks.together(words, all_gather_values, (described, values), ranks.control)
    check_plans([theirs for theirs, _ in everyone])
    tensors: dict[str, Tensor] = {}
    merged: dict[str, Any] = {}
    for rank, (theirs, small) in enumerate(everyone):
        merged = {**small, **merged}
        for key, (dtype, shape, first, count) in theirs.items():
            target = None
            if ranks.rank == 0:
                if key not in tensors:
                    place = place_of(key, shape)
                    tensors[key] = torch.empty_strided(
                        place.size, place.stride, dtype=dtype, device="cpu"
                    )
                target = tensors[key].as_strided((count,), (1,), first)
            own = ranges[key].values if rank == ranks.rank else None
            ranks.call(f"collecting {key}", _move, own, target, rank, 0, ranks)
    return tensors, merged


def _move(
    sent: Tensor | None, received: Tensor | None, owner: int, receiver: int, ranks: Ranks
) -> None:
    """Copies part of a tensor from one rank to another; other ranks have neither end.

    Args:
        sent: the part, on its owner.
        received: takes it, on the receiver.
        owner: rank of the part.
        receiver: rank that takes it.
        ranks: both are among them.
    """
    # gloo takes host memory only.
    on_host = backend_for(ranks.group, ranks.device) == "gloo"
    at = torch.device("cpu") if on_host else ranks.device
    if sent is not None and received is not None:
        received.copy_(sent)
    elif sent is not None:
        travels = as_sent(sent.to(at, copy=False).contiguous())
        finish(dist.isend(travels, group=ranks.group, group_dst=receiver))
    elif received is not None:
        arrived = torch.empty_like(received, device=at)
        finish(dist.irecv(as_sent(arrived), group=ranks.group, group_src=owner))
        received.copy_(arrived)


def _describe(
    given: Any,
    model: nn.Module | None,
    source: Mapping[str, Row],
    target: OptimizerState | None,
) -> tuple[tuple[dict[str, Any], dict[str, Any]], dict[str, Tensor]]:
    """A whole state as a folder would hold it.

    Returns:
        The description, which is dtypes and sizes by key, and values by key; and all tensors.

    Raises:
        ValueError: if it is no such state, or of another optimizer.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"got {type(given).__name__}")
    for name, asked in (("model", model), ("optimizer", target)):
        if asked is not None and name not in given:
            raise ValueError(f"it holds no {name!r}, only {sorted(map(str, given))[:8]}")
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    if model is not None:
        if not isinstance(given["model"], Mapping):
            raise ValueError(f"got {type(given['model']).__name__} as its model")
        key_of = _keys_by_tensor(source)
        own = _state_dict_of(model)
        for name, value in given["model"].items():
            if name not in own:
                raise ValueError(f"it holds {name}, which the model does not")
            if id(own[name]) not in key_of:
                continue  # no tensor, such as a module's extra state
            if not isinstance(value, Tensor) or value.is_meta:
                raise ValueError(f"{name} is no tensor with values, but {type(value).__name__}")
            tensors[key_of[id(own[name])]] = value
    # Values are copied into the model's dtype, as load_state_dict() does.
    kinds = {
        key: (source[key].tensor.dtype if key in source else value.dtype, value.size())
        for key, value in tensors.items()
    }
    if target is not None:
        if problem := target.problem(given["optimizer"]):
            raise ValueError(problem)
        moments, values = target.split(by_number(given["optimizer"]), whole=True)
        groups = [dict(group) for group in given["optimizer"]["param_groups"]]
        values["header"] = target.header() | {"param_groups": groups}
        kinds |= {key: (value.dtype, value.size()) for key, value in moments.items()}
        tensors |= moments
    return (kinds, values), tensors


def _compare(
    contents: Contents,
    model: nn.Module | None,
    source: Mapping[str, Row],
    state: OptimizerState | None,
    ranks: Mesh,
) -> dict[str, Place]:
    """Where each tensor of a description lies here, which must be of this model and optimizer.

    Raises:
        ValueError: on every rank, if it is of others.
    """
    wanted: dict[str, Place] = {}

    def compare() -> None:
        if model is not None:
            _check_model(contents, source)
            wanted.update({key: row.place for key, row in source.items()})
        if state is not None:
            wanted.update(state.places_in(contents))

    together("loading a checkpoint", ranks.shards, compare)
    return wanted


def _hand_out(
    key: str, whole: Tensor | None, dtype: torch.dtype, place: Place, ranks: Mesh
) -> Tensor:
    """This rank's elements of a tensor that the first rank has, as a vector. Collective.

    Args:
        key: of the tensor, for errors.
        whole: on the first rank the tensor.
        dtype: to hand it out in.
        place: which rank gets which elements.
        ranks: that get some.
    """
    words, shards = f"distributing {key}", ranks.shards
    flat = None
    if whole is not None:
        flat = flat_slice(whole, place.size, place.stride, 0, place.size.numel())
    if place.replicated:
        values = torch.empty(place.size.numel(), dtype=dtype, device=shards.device)
        if flat is not None:
            values.copy_(flat)
        ranks.broadcast(words, values)
        return values
    mine = torch.empty(place.span[1], dtype=dtype, device=shards.device)
    if ranks.first_replica:
        for rank in range(shards.size):
            first, count = place.span_of(rank) or (0, 0)
            part = None if flat is None else flat[first : first + count].to(dtype)
            target = mine if rank == shards.rank else None
            if count:
                shards.call(words, _move, part, target, 0, rank, shards)
    if mine.numel():
        ranks.broadcast_to_replicas(words, mine)
    return mine
