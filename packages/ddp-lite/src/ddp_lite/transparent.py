"""Makes a wrapper transparent: attributes and ``state_dict`` are those of the wrapped module.

What is set on the wrapper reaches the module too: set there alone, it would never be used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn

_PREFIX = "module."


class TransparentWrapper(nn.Module):
    """Passes everything but the forward pass on to ``module``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.register_load_state_dict_pre_hook(_descend)  # type: ignore[no-untyped-call]

    def pass_on(self) -> None:
        """From now on, sets the module's attributes; the wrapper has all of its own."""
        for name in ("register_buffer", "register_parameter", "add_module"):
            vars(self)[name] = getattr(self.module, name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in vars(self) or name == "module" or hasattr(type(self), name)
        passing = "add_module" in vars(self)  # after ``pass_on``
        if passing and name == "module" and {*value.parameters()} != {*self.module.parameters()}:
            raise TypeError(
                f"the module of a {type(self).__name__} cannot be replaced by one with other "
                "parameters, which it would not train. Wrap the new module."
            )
        if own or not passing:
            super().__setattr__(name, value)
        elif hasattr(self.module, name) or isinstance(value, nn.Module | nn.Parameter):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def named_modules(self, memo: Any = None, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
        """The wrapper, then the module and those in it under the module's own names."""
        memo = set() if memo is None else memo
        if self.module not in memo:
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own, under the module's own names and in its order."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's own, under the module's own names and in its order."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's own, without any prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads into the module; also accepts a checkpoint in which all keys carry ``module.``."""
        own = self.module.state_dict().keys()
        if not own & state_dict.keys() and all(key.startswith(_PREFIX) for key in state_dict):
            state_dict = {key.removeprefix(_PREFIX): value for key, value in state_dict.items()}
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} holds a process group and cannot be pickled or copied. Save "
            "wrapped.state_dict() or pickle wrapped.module."
        )


def _descend(_wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """When a parent module loads: our keys lack the level that torch's recursion adds."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if not key.startswith(prefix + _PREFIX):
            state_dict[prefix + _PREFIX + key.removeprefix(prefix)] = state_dict.pop(key)


@contextmanager
def temporarily(owner: object, name: str, value: object) -> Iterator[None]:
    """Sets an attribute for as long as the block runs."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
