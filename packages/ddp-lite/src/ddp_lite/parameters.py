"""The parameters that a wrapper synchronises: the same on all ranks, and the same ones every step.

Before a single byte of a model moves, every rank describes the wrapper's settings, its parameters
and buffers. The descriptions are first compared by digest, so that a thousand ranks with equal
models exchange 64 bytes each. Only when digests differ are the descriptions themselves gathered,
and then every rank raises the same error.

Whether the module still has these parameters is asked at every forward, so that compares what is
cheap to read, in loops that run in C: which objects the dictionaries of all submodules hold.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from ddp_lite.arrivals import Arrivals, ParameterHooks
from ddp_lite.buckets import ParameterSpec
from ddp_lite.collectives import all_gather_json
from ddp_lite.errors import ModelMismatchError, name_ranks

if TYPE_CHECKING:
    from ddp_lite.base import DataParallelBase
    from ddp_lite.step import Step

_MOST_DIFFERENCES_SHOWN = 8
_requires_grad = attrgetter("requires_grad")


class TrainableParameters:
    """The parameters whose gradients a wrapper synchronises, and its hooks on them.

    Args:
        module: what is wrapped.
        owner: the wrapper. When its user drops it, it takes the hooks along.

    Attributes:
        specs: the parameters, described.
        parameters: the same ones, themselves.
    """

    def __init__(self, module: nn.Module, owner: DataParallelBase) -> None:
        self._module = module
        self._hooks: list[ParameterHooks] = []  # one, or none once released
        weakref.finalize(owner, _remove_all, self._hooks).atexit = False
        self.specs: list[ParameterSpec] = []
        self.parameters: list[nn.Parameter] = []

    def adopt(self, owner: DataParallelBase) -> Arrivals:
        """Finds the parameters and hooks onto them; ``owner`` hears of their gradients."""
        self.release()
        self._watch = ModuleWatch(self._module)
        # Zero-size parameters have nothing to average.
        named = [
            (n, p) for n, p in self._module.named_parameters() if p.requires_grad and p.numel()
        ]
        self.parameters = [p for _, p in named]
        self.specs = [
            ParameterSpec(index=index, name=name, numel=p.numel(), dtype=p.dtype, device=p.device)
            for index, (name, p) in enumerate(named)
        ]
        arrivals = Arrivals(len(named), owner)
        self._hooks.append(ParameterHooks(self.parameters, arrivals))
        return arrivals

    def release(self) -> None:
        """Takes the hooks from the parameters."""
        _remove_all(self._hooks)

    def have_changed(self, step: Step, settings: Callable[[], Mapping[str, str]]) -> bool:
        """Whether ``requires_grad`` changed since the last forward; then they must be adopted.

        Args:
            step: the step that is being made.
            settings: returns those of the wrapper, in words.

        Raises:
            ModelMismatchError: a parameter was added, replaced or removed, or not all ranks made
                the same change.
            RuntimeError: the hooks were removed.
        """
        if not self._hooks:
            raise RuntimeError(
                f"a {step.wrapper} must not be called after detach(), because gradients are not "
                "synchronised any more. Call the module itself, or wrap it again"
            )
        self._hooks[0].run_last()
        if self._watch.has_new_structure():
            if change := self._watch.describe_change():
                report = f"{change} since {step.wrapper} wrapped the module"
                step.peer_probe.leave_report(report, step.number + 1)
                raise ModelMismatchError(
                    f"a wrapped module must keep its parameters, but before step {step.number + 1} "
                    f"on rank {step.group.rank()} {report}. Change the module first and "
                    f"wrap it then: {step.wrapper}(wrapped.detach()) after the change"
                )
            self._watch = ModuleWatch(self._module)
        if not self._watch.has_new_requirements():
            return False
        with step.naming_failures_of("the comparison of models after requires_grad changed"):
            _await_change_everywhere(self._watch.changed_requirements(), step)
            verify_same_model(self._module, step.group, settings())
        return True


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
            f"{name} was {what}" for what, names in changes.items() for name in _shortened(names)
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


def _await_change_everywhere(names: Sequence[str], step: Step) -> None:
    """Waits until all ranks have changed ``requires_grad``, for as long as a collective would.

    Args:
        names: parameters for which this rank changed it.
        step: the step that is being made.

    Raises:
        ModelMismatchError: not all ranks did.
    """
    changed = ", ".join(_shortened(names))
    number = step.number + 1
    report = (
        f"requires_grad of {changed} changed on this rank before step {number}, which waits for "
        "all ranks to change it"
    )
    timeout: timedelta = step.group._get_backend(step.device).options._timeout
    if absent := step.peer_probe.absentees(report, number, timeout):
        raise ModelMismatchError(
            "requires_grad must be changed on all ranks before the same step, but that of "
            f"{changed} changed on rank {step.group.rank()} before step {number} and not on "
            f"{name_ranks(absent)} within the process group's timeout; change it on every rank"
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


def _remove_all(hooks: list[ParameterHooks]) -> None:
    while hooks:
        hooks.pop().remove()


def _shortened(names: Sequence[str], most: int = 8) -> list[str]:
    """The first few names, and how many more there are."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return [*names[:most], *more]
