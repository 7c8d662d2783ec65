"""The tensor class of gradients in shards, which refuses what needs the shards of all ranks.

An optimizer computes with a gradient element by element, and that is right on a shard. A norm is
not, nor is any other sum or search over elements: each rank would find another result and scale its
gradients by it, or skip the step alone. ``GradientShard`` refuses those, also after element-wise
functions, as in ``grad.square().sum()``. One gradient of each unit or bucket is enough, because a
norm over all parameters and ``torch.amp.GradScaler`` look at all of them.

In stages 1 and 2 this rank's shard lies elsewhere and ``param.grad`` would be None, over which
``torch.nn.utils.clip_grad_norm_`` passes: it would return 0 and clip nothing. There one parameter
of each bucket carries a ``ReducedGradient``, which refuses to be computed with at all. So does one
parameter of each unit whose gradients ``update_in_backward`` has used.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._guards import CompileContext
from torch.utils import _pytree as pytree

REDUCED = (
    "gradients must be read through the optimizer under reduce_gradients=True, but got {}() of a "
    "parameter's grad, which is reduced into shards. Call optimizer.clip_grad_norm_() "
    "instead of torch.nn.utils.clip_grad_norm_(), shard_optim.ShardedGradScaler instead of "
    "torch.amp.GradScaler, or read optimizer.local_gradients()."
)
USED = (
    "gradients must not be read, scaled or clipped after update_in_backward(), but got {}(): the "
    "optimizer has used each unit's gradients during backward. Leave update_in_backward() out, or "
    "read gradients in a hook (register_post_accumulate_grad_hook)."
)
UNREDUCED = (
    "gradients of backward passes inside no_sync() must be averaged before they are used, but got "
    "{}(). Run the last backward before a step outside no_sync(), or drop what has been "
    "accumulated by zero_grad(set_to_none=True). Freeze parameters after the step, not before."
)

_CLIP = (
    "Call clip_grad_norm_() of the FullyShardedDataParallel instead of "
    "torch.nn.utils.clip_grad_norm_() or get_total_norm(). An optimizer that takes norms itself "
    'needs whole matrices: make it by ShardedOptimizer(..., partition="whole"). For the norm of '
    "this rank's shard alone, call detach() first."
)
_ALONE = (
    "Call clip_grad_norm_() of the FullyShardedDataParallel to clip, ShardedGradScaler to look for "
    'infinities, and ShardedOptimizer(..., partition="whole") for an optimizer that looks at more '
    "than one element. For the result of this rank's shard alone, call detach() first."
)
_REFUSED: dict[Any, str] = {
    torch._foreach_norm: _CLIP,
    torch.linalg.norm: _CLIP,
    torch.linalg.vector_norm: _CLIP,
    torch.norm: _CLIP,
    Tensor.norm: _CLIP,
    torch._amp_foreach_non_finite_check_and_unscale_: (
        "Use shard_optim.ShardedGradScaler instead of torch.amp.GradScaler."
    ),
}
_OVER_ELEMENTS = (
    *("all", "any", "count_nonzero", "sum", "nansum", "mean", "nanmean", "prod", "std", "var"),
    *("amax", "amin", "aminmax", "argmax", "argmin", "max", "min", "median", "quantile"),
    *("dot", "vdot", "inner", "matmul", "mm", "mv", "logsumexp", "softmax"),
)
for _name in _OVER_ELEMENTS:
    for _owner in (torch, Tensor):
        if hasattr(_owner, _name):
            _REFUSED[getattr(_owner, _name)] = _ALONE

# What these return is an ordinary tensor: a copy on purpose, or no longer the gradient's values.
_ORDINARY = {
    *(torch.detach, Tensor.detach, torch.clone, Tensor.clone),
    vars(torch._C.TensorBase)["_base"].__get__,  # which compilers read
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
}


class GradientShard(Tensor):
    """A rank's shard of a gradient. All but the functions that it refuses work as on any tensor."""

    refused: ClassVar[Mapping[Any, str]] = _REFUSED  # functions, and what to do instead
    ordinary: ClassVar[Collection[Any]] = _ORDINARY  # whose results are ordinary tensors

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls the function; a new tensor that it makes of the shard refuses as much.

        Raises:
            RuntimeError: if it needs the shards of all ranks.
        """
        if func in cls.refused:
            raise RuntimeError(
                f"{func.__name__}() must be given whole gradients, but got this rank's shards of "
                f"a FullyShardedDataParallel's. {cls.refused[func]}"
            )
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if (
                type(result) is Tensor
                and func not in cls.ordinary
                and not any(result is given for given in (*args, kwargs.get("out")))
            ):
                return result.as_subclass(cls)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy is an ordinary tensor."""
        return copy.deepcopy(self.detach(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """So is what is saved to a file."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().__reduce_ex__(protocol)


class ReducedGradient(GradientShard):
    """Stands for a gradient that is elsewhere, or has been used: its values cannot be read."""

    # The error's text, with {} for the name of a function; empty for one that may be read.
    refusal = REDUCED

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allows attributes such as ``shape``, and tracing by a compiler; refuses operations."""
        compiling = CompileContext.current_compile_id() is not None
        if compiling or getattr(func, "__name__", None) == "__get__":
            return Tensor.__torch_function__.__func__(cls, func, types, args, kwargs or {})  # type: ignore[attr-defined]
        given = pytree.tree_leaves((args, kwargs))
        refusals = [each.refusal for each in given if isinstance(each, ReducedGradient)]
        if any(refusals):
            raise RuntimeError(max(refusals).format(getattr(func, "__name__", func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


class PendingGradient(ReducedGradient):
    """A gradient that waits for its reduction: its values are this rank's own."""
