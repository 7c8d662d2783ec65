"""Whether a module can be wrapped as asked, alike on all ranks, and whether it stays the same.

Local checks come first. Then, before a single byte of a model moves, every rank describes the
wrapper's settings, its parameters and buffers. The descriptions are compared by digest, so that a
thousand ranks with equal models exchange 64 bytes each. Only when digests differ are the
descriptions themselves gathered, and then every rank raises the same error.

Whether the module still has these parameters is asked at every forward, so that compares what is
cheap to read, in loops that run in C: which objects the dictionaries of all submodules hold.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_lite.collectives import all_gather_json, backend_for
from ddp_lite.errors import ModelMismatchError, name_ranks

_MOST_DIFFERENCES_SHOWN = 8
_requires_grad = attrgetter("requires_grad")
_PAUSE_BEFORE_EXIT_SECONDS = 0.1


def check_module(module: nn.Module, wrapper: type[nn.Module]) -> None:
    """Refuses what no rank can wrap.

    Args:
        module: the candidate.
        wrapper: our own base class; nothing inside ``module`` may be one.

    Raises:
        TypeError: no module, or wrapped already.
        ValueError: parameters on the meta device or not yet initialised, or sparse gradients.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, but got {type(module).__name__}. "
            "Pass the model itself"
        )
    for name, child in module.named_modules():
        where = f"its submodule {name!r}" if name else "it"
        if isinstance(child, wrapper | DistributedDataParallel):
            raise TypeError(
                f"module must not be wrapped already, but {where} is a {type(child).__name__}. "
                "Pass the plain module (wrapped.module)."
            )
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ValueError(
                f"gradients must be dense, but {where} is a {type(child).__name__} with "
                "sparse=True. Build it with sparse=False."
            )
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"parameters must have a shape, but {name} is uninitialised. Run one forward "
                "before wrapping."
            )
    for name, tensor in _tensors(module):
        if tensor.is_meta:
            raise ValueError(
                f"every parameter and buffer must hold data, but {name} is on the meta device. "
                "Materialise the module first (module.to_empty(device=...) and initialise it)."
            )


def where_to_run(
    module: nn.Module, group: dist.ProcessGroup | DeviceMesh | None
) -> tuple[dist.ProcessGroup, torch.device]:
    """The group and the device of a module's collectives.

    Raises:
        RuntimeError: no process group is initialised.
        ValueError: ``group`` is none, or does not serve the module's one device.
    """
    resolved, device = resolve_group(group), common_device(module)
    check_backend(resolved, device)
    warn_about_environment(device)
    return resolved, device


def common_device(module: nn.Module) -> torch.device:
    """The one device of all parameters and buffers; CPU if there are none.

    Raises:
        ValueError: there are several.
    """
    first_names: dict[torch.device, str] = {}
    for name, tensor in _tensors(module):
        first_names.setdefault(tensor.device, name)
    if len(first_names) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in first_names.items())
        raise ValueError(
            f"all parameters and buffers must be on one device, but got {found}. Move the "
            "module with module.to(device)"
        )
    return next(iter(first_names), torch.device("cpu"))


def resolve_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The process group meant by a group, a one-dimensional mesh, or None (the default group).

    Raises:
        RuntimeError: no process group is initialised.
        ValueError: the mesh has several dimensions, or this rank is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "a process group must exist before a module is wrapped. Call "
            "torch.distributed.init_process_group() first."
        )
    _pause_before_exit()
    if group is None:
        default = dist.group.WORLD
        assert default is not None
        return default
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"a device mesh must have one dimension, but got {group.ndim} "
                f"({group.mesh_dim_names}). Pass one of them (mesh['name']), and a "
                "HierarchicalAverage as comm_hook to use two"
            )
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "this rank must belong to the process group, but got a group it is not part of. "
            "Wrap only on the ranks of the group"
        )
    return group


@functools.cache
def _pause_before_exit() -> None:
    """Gives gloo's threads a moment before the interpreter finalises; works once per process.

    A collective that is started during backward keeps a Python object of torch's, the context in
    which backward runs. The gloo thread that carried the collective out releases it afterwards, for
    which it needs Python's global lock. If the program has begun to exit by then, the interpreter
    ends that thread and the process aborts with "terminate called without an active exception"
    after all its work is done (seen with torch 2.15). A sleeping main thread hands over the lock.
    """
    atexit.register(time.sleep, _PAUSE_BEFORE_EXIT_SECONDS)


def check_backend(group: dist.ProcessGroup, device: torch.device) -> None:
    """Refuses a group that cannot carry the device's tensors.

    Raises:
        ValueError: naming both.
    """
    if backend_for(group, device) is None:
        raise ValueError(
            f"the process group must serve the module's device, but the module is on {device} "
            f"and the group's backends are {dist.get_backend_config(group)!r}. Move the module "
            "or initialise another backend."
        )


def warn_about_environment(device: torch.device) -> None:
    """Warns of settings that keep NCCL from running beside the backward pass."""
    if device.type != "cuda":
        return
    for name, bad in (("CUDA_DEVICE_MAX_CONNECTIONS", "1"), ("TORCH_NCCL_ENABLE_TIMING", "1")):
        if os.environ.get(name) == bad:
            warnings.warn(
                f"{name}={bad} is set: it serialises communication with the backward pass, so "
                "nothing will overlap; unset it",
                stacklevel=5,
            )


def warn_of_nothing_to_train(parameters: Sequence[nn.Parameter], wrapper: type) -> None:
    """Warns, where the wrapper is constructed, that there is nothing to synchronise."""
    if not parameters:
        warnings.warn(
            f"{wrapper.__name__}: the module has no trainable parameters, so there is nothing to "
            "synchronise",
            stacklevel=4,
        )


class ModuleWatch:
    """Remembers a module's structure.

    Args:
        module: with all of its submodules and parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        modules = list(module.modules())
        self._tables: list[dict[str, Any]] = [
            *(m._parameters for m in modules),
            *(m._modules for m in modules),
        ]
        self._then = [dict(table) for table in self._tables]
        # Equal numbers are equal, even if they are two parameters.
        self._numbers = [
            (table, name, value)
            for table in self._tables
            for name, value in table.items()
            if isinstance(value, nn.Parameter) and value.numel() == 1
        ]
        self._parameters = list(module.parameters())
        self._required = list(map(_requires_grad, self._parameters))
        self._by_name = dict(module.named_parameters(remove_duplicate=False))

    def has_new_structure(self) -> bool:
        """Whether a parameter or submodule was added, replaced or removed."""
        try:
            # Python compares the values by identity first, so tensors are compared only if one was
            # replaced by another; that raises unless both hold one number.
            if self._tables != self._then:
                return True
        except RuntimeError:
            return True
        return any(table[name] is not value for table, name, value in self._numbers)

    def has_new_requirements(self) -> bool:
        """Whether ``requires_grad`` of a parameter changed."""
        return list(map(_requires_grad, self._parameters)) != self._required

    def changed_requirements(self) -> list[str]:
        """Names of the parameters whose ``requires_grad`` changed."""
        names = {id(p): name for name, p in reversed(self._by_name.items())}
        return [
            names[id(p)]
            for p, was in zip(self._parameters, self._required, strict=True)
            if p.requires_grad != was
        ]

    def describe_change(self) -> str:
        """What happened to the parameters, in words; empty if they are the same."""
        now = dict(self._module.named_parameters(remove_duplicate=False))
        then = self._by_name
        changes = {
            "added": [name for name in now if name not in then],
            "removed": [name for name in then if name not in now],
            "replaced": [name for name in now if name in then and now[name] is not then[name]],
        }
        return ", ".join(
            f"{name} was {what}" for what, names in changes.items() for name in shortened(names)
        )


def describe_module(module: nn.Module) -> list[tuple[str, str]]:
    """One (name, description) per parameter and buffer, in registration order.

    The description holds shape, dtype, device type, whether a gradient is required, and the
    name it shares memory with if the tensor was seen before.
    """
    first_names: dict[int, str] = {}
    described = []
    for kind, tensors in (
        ("parameter", module.named_parameters(remove_duplicate=False)),
        ("buffer", module.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in tensors:
            first = first_names.setdefault(id(tensor), name)
            tied = f", tied to {first}" if first != name else ""
            needs = ", requires grad" if tensor.requires_grad else ""
            text = f"{kind} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
            described.append((name, text + needs + tied))
    return described


def verify_same_model(
    module: nn.Module, group: dist.ProcessGroup, settings: Mapping[str, str]
) -> None:
    """Checks that every rank wraps the same module with the same settings. Collective.

    Args:
        module: what is wrapped.
        group: the ranks.
        settings: of the wrapper, in words.

    Raises:
        ModelMismatchError: on every rank, naming what differs and on which ranks.
    """
    mine = [*settings.items(), *describe_module(module)]
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(all_gather_json(digest, group))) == 1:
        return
    everyone = all_gather_json(mine, group)
    differences = _differences([[(name, text) for name, text in entries] for entries in everyone])
    shown = "\n".join(f"  {line}" for line in differences[:_MOST_DIFFERENCES_SHOWN])
    more = len(differences) - _MOST_DIFFERENCES_SHOWN
    tail = f"\n  and {more} more" if more > 0 else ""
    raise ModelMismatchError(
        "every rank must wrap the same model (names, shapes, dtypes, order, requires_grad) with "
        f"the same settings, but {len(differences)} entries differ:\n{shown}{tail}\n"
        "Build the model and its wrapper from the same configuration on every rank; nothing was "
        "sent yet"
    )


def _differences(everyone: Sequence[Sequence[tuple[str, str]]]) -> list[str]:
    """One line per position at which not all ranks agree, the values grouped by rank."""
    lines = []
    for entries in zip_longest(*everyone):
        ranks_by_entry: dict[tuple[str, str] | None, list[int]] = {}
        for rank, entry in enumerate(entries):
            ranks_by_entry.setdefault(entry, []).append(rank)
        if len(ranks_by_entry) > 1:
            lines.append(
                "; ".join(
                    f"{name_ranks(ranks)}: " + ("nothing" if entry is None else " ".join(entry))
                    for entry, ranks in ranks_by_entry.items()
                )
            )
    return lines


def shortened(names: Sequence[str], most: int = 8) -> list[str]:
    """The first few names, and how many more there are."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return [*names[:most], *more]


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
