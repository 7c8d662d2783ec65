"""The hook on every parameter, which autograd calls when it has accumulated a gradient.

``tensors_in`` finds the outputs of a module, whose gradients are the first of a backward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle


class Hooks:
    """One hook on each parameter, run after the hooks of all others.

    A user's hook that ran after it would find ``grad`` taken by a reduction.

    Args:
        parameters: by index.
        arrived: called with the parameter's index and the parameter.
        owner: name of the wrapper that averages the gradients.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], arrived: Callable[[int, Any], None], owner: str
    ) -> None:
        self._handles: list[RemovableHandle] = []
        for index, parameter in enumerate(parameters):
            hook = functools.partial(arrived, index)
            hook.averaged_by = owner  # type: ignore[attr-defined] # for refuse_averaged_parameters
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
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


def remove_all(hooks: list[Hooks]) -> None:
    """Takes all of these hooks from their parameters, and empties the list."""
    while hooks:
        for handle in hooks.pop()._handles:
            handle.remove()


def refuse_averaged_parameters(module: nn.Module) -> None:
    """Refuses a module of which a parameter, or a hook of it, is marked by a wrapper in use."""
    for name, parameter in module.named_parameters():
        for marked in (parameter, *_hooks_of(parameter).values()):
            if (owner := getattr(marked, "averaged_by", None)) is not None:
                raise TypeError(
                    f"module must not share parameters with a wrapped module, but {name} is "
                    f"synchronised by a {owner}. Call detach() on that wrapper first, if it has "
                    "one, or put modules that share parameters into one module and wrap that"
                )


def _hooks_of(parameter: nn.Parameter) -> dict[int, Any]:
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers and data classes."""
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def leaf_behind(output: Tensor) -> Any:
    """The graph's node of a parameter or an input that ``output`` was computed from."""
    node: Any = output.grad_fn
    while following := [each for each, _ in node.next_functions if each is not None]:
        node = following[-1]  # usually a parameter, where the first is what the layer was given
    return node
