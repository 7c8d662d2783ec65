"""Post-accumulate hooks of users, run on averaged gradients.

During backward a parameter is whole, and its gradient is this rank's own. A hook that autograd
called then would read a gradient that nobody has averaged, and what it wrote into the parameter
would be lost. So such hooks wait until backward has ended, and see shards, as an optimizer does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


class DeferredHooks:
    """Takes the place of users' hooks in backward, and runs them after it."""

    def __init__(self) -> None:
        self._own: set[int] = set()

    def register_own(self, param: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Registers a hook that autograd calls at once."""
        self._own.add(param.register_post_accumulate_grad_hook(hook).id)

    def defer(self, params: Iterable[Tensor]) -> None:
        """Before the first gradient of a backward: from here on their other hooks wait."""
        for param in params:
            table: dict[int, Any] | None = param._post_accumulate_grad_hooks
            for key in table or ():
                if key not in self._own and type(table[key]) is not _Deferred:  # type: ignore[index]
                    table[key] = _Deferred(table[key], weakref.ref(self))  # type: ignore[index]

    def run(self, params: Iterable[Tensor]) -> None:
        """After gradients have been averaged: calls the hooks of parameters that have one."""
        for param in params:
            table: dict[int, Any] | None = param._post_accumulate_grad_hooks
            for hook in list(table.values()) if table else ():
                if type(hook) is _Deferred and param.grad is not None:
                    hook.hook(param)


class _Deferred:
    """A hook that waits, unless its model is gone."""

    def __init__(self, hook: Callable[[Tensor], None], owner: weakref.ref[DeferredHooks]) -> None:
        self.hook, self._owner = hook, owner

    def __call__(self, param: Tensor) -> None:
        if self._owner() is None:
            self.hook(param)
