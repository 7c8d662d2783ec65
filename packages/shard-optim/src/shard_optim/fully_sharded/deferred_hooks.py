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

from shard_optim.refused_gradient import ReducedGradient


def defer(params: Iterable[Tensor], model: object) -> None:
    """Before the first gradient of a backward: from here on their other hooks wait.

    Hooks that outlive ``model``, or what lives as long as it, do not wait.
    """
    for param in params:
        table: dict[int, Any] | None = param._post_accumulate_grad_hooks
        for key, hook in (table or {}).items():
            if type(hook) is not _Deferred and not hasattr(hook, "runs_in_backward"):
                table[key] = _Deferred(hook, weakref.ref(model))  # type: ignore[index]


def run_deferred(params: Iterable[Tensor]) -> None:
    """After gradients have been averaged: calls the hooks of parameters that have one."""
    for param in params:
        table: dict[int, Any] | None = param._post_accumulate_grad_hooks
        for hook in list(table.values()) if table else ():
            used = param.grad is None or isinstance(param.grad, ReducedGradient)
            if type(hook) is _Deferred and not used:
                hook.hook(param)


class _Deferred:
    """A hook that waits, unless its model is gone."""

    def __init__(self, hook: Callable[[Tensor], None], model: weakref.ref[object]) -> None:
        self.hook, self._model = hook, model

    def __call__(self, param: Tensor) -> None:
        if self._model() is None:
            self.hook(param)
