"""Whether a module can be wrapped as asked, alike on all ranks, and whether it stays the same.

Local checks come first. Then, before a single byte of a model moves, every rank describes the
wrapper's settings, its parameters and buffers. The descriptions are compared by digest, so that a
thousand ranks with equal models exchange 64 bytes each. Only when digests differ are the
descriptions themselves gathered, and then every rank raises the same error.

Whether the module still has these parameters is asked at every forward, so that compares what is
cheap to read, in loops that run in C: which objects the dictionaries of all submodules hold.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_lite.ranks import Ranks, backend_for, resolve_group, shortened

_requires_grad = attrgetter("requires_grad")


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
        return shortened(
            [f"{name} was {what}" for what, names in changes.items() for name in names]
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


def verify_same_model(module: nn.Module, ranks: Ranks, settings: Mapping[str, str]) -> None:
    """Checks that every rank wraps the same module with the same settings. Collective.

    Args:
        module: what is wrapped.
        ranks: that wrap it.
        settings: of the wrapper, in words.

    Raises:
        ModelMismatchError: on every rank, naming what differs and on which ranks.
    """
    ranks.agree(
        [*settings.items(), *describe_module(module)],
        must="wrap the same model (names, shapes, dtypes, order, requires_grad) with the same "
        "settings",
        remedy="Build the model and its wrapper from the same configuration on every rank; nothing "
        "was sent yet",
    )


def _tensors(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
