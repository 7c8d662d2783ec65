"""Gradients of which each rank holds its shards only: what users see of them, norms, scaling.

After a reduction ``param.grad`` is None, over which ``torch.nn.utils.clip_grad_norm_`` passes: it
would return 0 and clip nothing. One parameter of each bucket therefore carries a stand-in, which
refuses to be computed with. The next gradient replaces it.
"""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import CompileContext
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ddp_lite.ranks import Ranks, all_reduce
from shard_optim.origin import shard_ranks_of

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
        """Allows attributes such as ``shape``, and tracing by a compiler; refuses operations."""
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
        """Makes the stand-in the parameter's ``grad``; call it after the gradient was reduced."""
        self._param.grad = self._grad

    def remove(self) -> None:
        """Removes the stand-in; call it when there is no reduced gradient any more."""
        if type(self._param.grad) is ReducedGradient:
            self._param.grad = None


def gradient_of(param: Tensor) -> Tensor | None:
    """The parameter's own gradient, if it has one that has not been reduced."""
    grad = param.grad
    return None if type(grad) is ReducedGradient else grad


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, at twice its speed on CUDA: the kernel for several tensors is better.

    Args:
        tensor: of any shape; returned itself if it has the dtype.
        dtype: of the result.
    """
    if tensor.dtype == dtype:
        return tensor
    result = torch.empty_like(tensor, dtype=dtype)
    torch._foreach_copy_([result], [tensor])
    return result


def check_clipping(max_norm: Any, norm_type: Any) -> None:
    """Refuses what gradients cannot be clipped by, before any rank communicates.

    Raises:
        TypeError: for what is not a number.
        ValueError: for a negative ``max_norm``, or a norm type that is not positive.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not isinstance(value, (numbers.Real, Tensor)):
            raise TypeError(f"{name} must be a number, but got {value!r}. Pass 1.0 and 2.0.")
    if not max_norm >= 0:  # neither is NaN
        raise ValueError(
            f"max_norm must be at least 0, but got {max_norm}. Pass math.inf to measure the norm "
            "only."
        )
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, but got {norm_type}. Use 2.0 or math.inf.")


@torch.no_grad()
def clip_sharded_(
    grads: Sequence[Tensor],
    max_norm: float,
    *,
    norm_type: float,
    ranks: Ranks,
    device: torch.device,
    replicated: Sequence[Tensor] = (),
) -> Tensor:
    """Scales this rank's gradient shards by min(1, max_norm / (norm + 1e-6)), in place.

    The norm is over the shards of all ranks, accumulated in fp32, from one all-reduce of one
    number.

    Args:
        grads: this rank's shards; every element of the gradients is in one rank's shards.
        max_norm: largest norm allowed.
        norm_type: p of the p-norm, positive.
        ranks: that hold the shards.
        device: where the group's back end can reduce a number.
        replicated: gradients that all ranks hold whole and equal; scaled everywhere, counted once.

    Returns:
        The norm before clipping, fp32, shape ().
    """
    largest = math.isinf(norm_type)
    total = torch.zeros((), dtype=torch.float32, device=device)
    counted = [*grads, *replicated] if ranks.rank == 0 else grads
    filled = [grad for grad in counted if grad.numel() > 0]  # no elements, no largest magnitude
    if filled:
        with torch._C.DisableTorchFunctionSubclass():  # a GradientShard refuses its own norm
            norms = torch._foreach_norm(filled, norm_type, dtype=torch.float32)
        stacked = torch.stack([norm.to(device) for norm in norms])
        total = stacked.max() if largest else stacked.pow(norm_type).sum()
    if ranks.size > 1:
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        words = "the all-reduce of the gradient norm"
        ranks.call(words, all_reduce, ranks.communicator, total, operation)
    if not largest:
        total = total.pow(1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in (*grads, *replicated):
        grad.mul_(scale.to(grad.device, grad.dtype))
    return total


@runtime_checkable
class _HoldsGradientShards(Protocol):
    """An optimizer that keeps the gradients which its step will use: ``ShardedOptimizer``."""

    ranks: Ranks

    def local_gradients(self) -> list[Tensor]: ...


class ShardedGradScaler(GradScaler):
    """``torch.amp.GradScaler`` for sharded gradients: all ranks skip a step, or none does.

    It serves ``ShardedOptimizer``, and any optimizer over the parameters of a
    ``FullyShardedDataParallel``.

    Unscaling looks at this rank's gradient shards and takes the maximum over ranks of whether any
    was not finite: one all-reduce of one number. Other optimizers are handled as by the base class.
    """

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, _HoldsGradientShards):
            with torch._C.DisableTorchFunctionSubclass():  # a GradientShard refuses its own search
                per_device: dict[torch.device, Tensor] = super()._unscale_grads_(
                    optimizer, inv_scale, found_inf, allow_fp16
                )
            ranks = shard_ranks_of(optimizer)
            if ranks is None:
                return per_device
            for local in per_device.values():
                found_inf.copy_(torch.maximum(found_inf, local.to(found_inf.device)))
            self._share(found_inf, ranks)
            return {found_inf.device: found_inf}
        grads = optimizer.local_gradients()
        if not allow_fp16 and any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError(
                "gradients must be wider than fp16 to be unscaled, but some are fp16. Keep fp32 "
                "parameters under autocast, or pass master_dtype=torch.float32."
            )
        for device in sorted({grad.device for grad in grads}, key=str):
            here = [grad for grad in grads if grad.device == device]
            local = found_inf.to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(here, local, inv_scale.to(device))
            found_inf.copy_(torch.maximum(found_inf, local.to(found_inf.device)))
        self._share(found_inf, optimizer.ranks)
        return {found_inf.device: found_inf}

    @staticmethod
    def _share(found_inf: Tensor, ranks: Ranks) -> None:
        """Makes it the maximum over all ranks."""
        words = "the exchange of whether gradients are finite"
        ranks.call(words, all_reduce, ranks.communicator, found_inf, dist.ReduceOp.MAX)
