"""May a module be wrapped, is it alike on all ranks, and is it still the one that was wrapped?

Local checks come first. Then, before a single byte of a model moves, every rank describes the
wrapper's settings, its parameters and buffers, and the ranks compare the descriptions
(``Ranks.agree``).

Every forward asks if the module still has these parameters, so that compares only data that is
cheap to read, in loops that run in C: which objects the dictionaries of all submodules hold.
Changes of a parameter's dtype or size are found when its gradient is about to be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, is_not
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lite.buckets import ParameterSpec
from ddp_lite.errors import ModelMismatchError
from ddp_lite.ranks import Ranks, backend_for, name_ranks, shortened

_requires_grad = attrgetter("requires_grad")
_parameters_of = attrgetter("_parameters")


def check_module(module: nn.Module, wrapper: type[nn.Module]) -> None:
    """Refuses a module that no rank can wrap; nothing in it may be a ``wrapper`` already.

    Raises:
        TypeError: no module, or wrapped already.
        ValueError: parameters on the meta device or not yet initialised, or sparse gradients.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, but got {type(module).__name__}. "
            "Pass the model itself"
        )
    if ignored := getattr(module, "_ddp_params_and_buffers_to_ignore", None):
        raise ValueError(
            "every parameter and buffer is made equal on all ranks, but torch DDP was told to "
            f"ignore {shortened(list(ignored))}. Keep what is each rank's own outside the module."
        )
    for name, child in module.named_modules():
        where = f"its submodule {name!r}" if name else "it"
        if isinstance(child, wrapper | DistributedDataParallel):
            raise TypeError(
                f"module must not be wrapped already, but {where} is a {type(child).__name__}. "
                "Pass the plain module (wrapped.module)."
            )
        embeds = isinstance(child, nn.Embedding | nn.EmbeddingBag)
        if embeds and child.sparse and child.weight.requires_grad:
            raise ValueError(
                f"gradients must be dense, but {where} is a {type(child).__name__} with "
                "sparse=True. Build it with sparse=False, or freeze it."
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
        if tensor.layout is not torch.strided or torch._debug_has_internal_overlap(tensor) == 1:
            raise ValueError(
                "every parameter and buffer must be dense and have memory for each element, but "
                f"{name} is sparse or expanded. Replace it by a contiguous copy."
            )


def common_device(module: nn.Module) -> torch.device:
    """The one device of all parameters and buffers, or a ValueError; CPU if there are none."""
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
    """Refuses a group that cannot carry the device's tensors, by a ValueError that names both."""
    if backend_for(group, device) is None:
        raise ValueError(
            f"the process group must serve the module's device, but the module is on {device} "
            f"and the group's backends are {dist.get_backend_config(group)!r}. Move the module "
            "or initialise another backend."
        )


class Structure:
    """The parameters, modules and buffers that a module and those in it hold at one moment.

    Args:
        module: the outermost.
        buffers: whether buffers count.
    """

    def __init__(self, module: nn.Module, *, buffers: bool) -> None:
        self._modules = list(module.modules())
        self._parameters = list(map(_parameters_of, self._modules))
        self._tables: list[dict[str, Any]] = [
            table
            for each in module.modules()
            for table in (each._parameters, each._modules, each._buffers if buffers else {})
        ]
        self._entries = sum(map(len, self._tables))
        self._filled = [table for table in self._tables if table]
        self._then = [dict(table) for table in self._filled]
        # Equal numbers are equal, even if they are two tensors.
        self._numbers = [
            (table, name, value)
            for table in self._filled
            for name, value in table.items()
            if isinstance(value, Tensor) and value.numel() == 1
        ]

    def holds(self) -> bool:
        """Whether the module still holds the same objects under the same names."""
        if sum(map(len, self._tables)) != self._entries:
            return False
        if any(map(is_not, map(_parameters_of, self._modules), self._parameters)):
            return False  # a table was replaced, as ShardedOptimizer.attach() does
        try:
            # Python compares the values by identity first, so tensors are compared only if one was
            # replaced by another; that raises unless both hold one number.
            if self._filled != self._then:
                return False
        except RuntimeError:
            return False
        return all(table[name] is value for table, name, value in self._numbers)


class ModuleWatch:
    """Remembers a module's structure, and which of its parameters require a gradient."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._module, self._ranks = module, ranks
        self._remember()

    def _remember(self) -> None:
        self._structure = Structure(self._module, buffers=False)
        self._parameters = list(self._module.parameters())
        self._required = list(map(_requires_grad, self._parameters))
        self._by_name = dict(self._module.named_parameters(remove_duplicate=False))

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters to average, with their names. Empty ones have nothing to average."""
        named = self._module.named_parameters()
        return [(name, p) for name, p in named if p.requires_grad and p.numel()]

    def has_changed(self) -> bool:
        """True if ``requires_grad`` changed since the last call, alike on every rank.

        Raises:
            ModelMismatchError: a parameter was added, replaced or removed, or not all ranks changed
                ``requires_grad`` alike.
        """
        if not self._structure.holds():
            if change := self._describe_change():
                self._refuse(change)
            self._remember()
        if list(map(_requires_grad, self._parameters)) == self._required:
            return False
        what = "the comparison of models after requires_grad changed"
        self._ranks.call(what, self._await_change_everywhere)
        self._ranks.together(what, verify_same_model, self._module, self._ranks)
        self._required = list(map(_requires_grad, self._parameters))
        return True

    def _describe_change(self) -> str:
        """Changes of the parameters in words; empty if they are the same."""
        now = dict(self._module.named_parameters(remove_duplicate=False))
        then = self._by_name
        changes = {
            "added": [name for name in now if name not in then],
            "removed": [name for name in then if name not in now],
            "replaced": [name for name in now if name in then and now[name] is not then[name]],
        }
        return shortened([f"{name} was {how}" for how, names in changes.items() for name in names])

    def _refuse(self, change: str) -> NoReturn:
        remedy = None
        if any(not isinstance(tensor, nn.Parameter) for tensor in self._module.parameters()):
            remedy = (
                "torch.func.functional_call must be given the plain module, wrapped.module: "
                "gradients that arrive at its parameters are averaged all the same"
            )
        report = f"{change} since {self._ranks.owner} wrapped the module"
        raise _module_changed(self._ranks, "parameters", "before", report, remedy)

    def _await_change_everywhere(self) -> None:
        """Waits for all ranks to change ``requires_grad``; a ModelMismatchError if not all do."""
        ranks = self._ranks
        names = {id(p): name for name, p in reversed(self._by_name.items())}
        pairs = zip(self._parameters, self._required, strict=True)
        changed = shortened([names[id(p)] for p, was in pairs if p.requires_grad != was])
        report = (
            f"requires_grad of {changed} changed on this rank before step {ranks.step}, which "
            "waits for all ranks to change it"
        )
        if absent := ranks.absentees(report):
            raise ModelMismatchError(
                "requires_grad must be changed on all ranks before the same step, but that of "
                f"{changed} changed on rank {ranks.rank} before step {ranks.step} and not on "
                f"{name_ranks(absent)} within the process group's timeout; change it on every rank"
            )


def refuse_other_gradients(
    specs: Sequence[ParameterSpec], gradients: Sequence[Tensor | None], ranks: Ranks
) -> None:
    """Raises if a gradient is not like its parameter was when the module was wrapped.

    Raises:
        ValueError: a sparse gradient.
        ModelMismatchError: another dtype or size, before other ranks receive it.
    """
    for spec, gradient in zip(specs, gradients, strict=True):
        if gradient is None:
            continue
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"gradients must be dense, but {spec.name} got a {gradient.layout} gradient in "
                f"step {ranks.step}. Build its layer with sparse=False."
            )
        now, then = (gradient.dtype, gradient.numel()), (spec.dtype, spec.numel)
        if now != then:
            report = (
                f"the gradient of {spec.name} has {now[1]} elements of {now[0]}, and the "
                f"parameter had {then[1]} of {then[0]} when {ranks.owner} wrapped the module"
            )
            raise _module_changed(ranks, "parameters' dtypes and shapes", "in", report)


def _module_changed(
    ranks: Ranks, what: str, when: str, report: str, remedy: str | None = None
) -> ModelMismatchError:
    """The error for a change after wrapping, which is told to ranks that wait for this one too."""
    ranks.tell(report)
    usual = "Change the module first and wrap it then"
    return ModelMismatchError(
        f"a wrapped module must keep its {what}, but {when} step {ranks.step} on rank "
        f"{ranks.rank} {report}. "
        + (remedy or f"{usual}: {ranks.owner}(wrapped.detach()) after the change")
    )


def describe_module(module: nn.Module) -> list[tuple[str, str]]:
    """One (name, description) per parameter and buffer, in registration order.

    The description holds shape, strides unless they are the usual ones, dtype, device type,
    whether a gradient is required, and the first name of a tensor that has several.
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
            strides = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
            text = f"{kind} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device.type}"
            described.append((name, text + strides + needs + tied))
    return described


def verify_same_model(
    module: nn.Module, ranks: Ranks, settings: Mapping[str, str] | None = None
) -> None:
    """Checks that every rank wraps the same module with the same settings. Collective.

    Raises:
        ModelMismatchError: on every rank, naming the differences and their ranks.
    """
    ranks.agree(
        [*(settings or {}).items(), *describe_module(module)],
        must="wrap the same model (names, shapes, dtypes, order, requires_grad) with the same "
        "settings",
        remedy="Build the model and its wrapper from the same configuration on every rank; nothing "
        "was sent yet",
    )


def _tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
