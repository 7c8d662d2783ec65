"""Has the wrapped module still the parameters, and the hooks, that it had when it was wrapped?

Asked at every forward, so it compares what is cheap to read, in loops that run in C: which objects
the dictionaries of all submodules hold, and how many hooks every parameter has.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ddp_lite.progress import Progress

_requires_grad = attrgetter("requires_grad")


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


class ParameterHooks:
    """The hook of a wrapper on each of its parameters, run after the hooks of all others.

    A user's hook that ran after the wrapper's would find ``grad`` taken by a reduction.

    Args:
        parameters: the trainable ones, by index.
        progress: what the hooks report to.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], progress: Progress) -> None:
        self._handles: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(functools.partial(progress.arrived, index))
            for index, p in enumerate(parameters)
        ]
        self._tables = [_hooks_of(p) for p in parameters]
        self._counts = list(map(len, self._tables))

    def run_last(self) -> None:
        """Moves the hooks behind those that were registered since."""
        if list(map(len, self._tables)) == self._counts:
            return
        for table, handle in zip(self._tables, self._handles, strict=True):
            if handle.id in table:
                table[handle.id] = table.pop(handle.id)
        self._counts = list(map(len, self._tables))

    def remove(self) -> None:
        """Takes the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()


def owner_of(parameter: nn.Parameter) -> nn.Module | None:
    """The wrapper, if there is one in use, that synchronises a parameter's gradient."""
    for hook in _hooks_of(parameter).values():
        target = getattr(getattr(hook, "func", None), "__self__", None)
        if isinstance(target, Progress) and (owner := target.owner()) is not None:
            return owner
    return None


def shortened(names: Sequence[str], most: int = 8) -> list[str]:
    """The first few names, and how many more there are."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return [*names[:most], *more]


def _hooks_of(parameter: nn.Parameter) -> dict[int, Any]:
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return {} if hooks is None else hooks
