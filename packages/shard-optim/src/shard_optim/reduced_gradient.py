"""What stands in ``param.grad`` after the optimizer has reduced a gradient into shards.

``torch.nn.utils.clip_grad_norm_`` passes over parameters without a gradient, so it would return 0
and clip nothing. One parameter of each bucket therefore carries a stand-in, which refuses to be
computed with. The next gradient replaces it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import CompileContext

# A stand-in of more elements is one element in memory, seen at every place.
_MOST_ELEMENTS = 2**16


class ReducedGradient(Tensor):
    """A gradient of which every rank holds a shard elsewhere: its values cannot be read."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Allows attributes such as ``shape``, and a compiler's look; refuses every operation."""
        compiling = CompileContext.current_compile_id() is not None
        if compiling or getattr(func, "__name__", None) == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "gradients must be read through the optimizer under reduce_gradients=True, but got "
            f"{getattr(func, '__name__', func)}() of a parameter's grad, which has been reduced "
            "into shards. Call optimizer.clip_grad_norm_() instead of "
            "torch.nn.utils.clip_grad_norm_(), shard_optim.ShardedGradScaler instead of "
            "torch.amp.GradScaler, or read optimizer.local_gradients()."
        )


class StandIn:
    """The stand-in of one parameter.

    Args:
        param: the parameter.
    """

    def __init__(self, param: Tensor) -> None:
        # A data-parallel wrapper that averages too writes into every gradient that it finds.
        size = param.shape if param.numel() <= _MOST_ELEMENTS else ()
        zeros = torch.zeros(size, dtype=param.dtype, device=param.device)
        self._param = param
        self._grad = zeros.expand(param.shape).as_subclass(ReducedGradient)
        # A parameter keeps its hooks alive where the garbage collector cannot follow.
        param_if_alive = weakref.ref(param)

        def before_gradient(_grad: Tensor) -> None:
            param = param_if_alive()
            if param is not None and type(param.grad) is ReducedGradient:
                param.grad = None  # autograd would add to it

        param.register_hook(before_gradient)

    def show(self) -> None:
        """After the parameter's gradient has been reduced."""
        self._param.grad = self._grad

    def remove(self) -> None:
        """When there is no reduced gradient any more."""
        if type(self._param.grad) is ReducedGradient:
            self._param.grad = None


def gradient_of(param: Tensor) -> Tensor | None:
    """The parameter's own gradient, if it has one that has not been reduced."""
    grad = param.grad
    return None if type(grad) is ReducedGradient else grad
