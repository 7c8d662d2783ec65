"""Gradients of which each rank holds its shards only: norms, clipping and scaling of all stages."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ddp_lite.ranks import Ranks, all_reduce
from shard_optim.origin import shard_ranks_of, watched
from shard_optim.parameter_groups import all_params
from shard_optim.refused_gradient import USED


def check_clipping(max_norm: Any, norm_type: Any) -> None:
    """Raises TypeError or ValueError for what gradients cannot be clipped by."""
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
            wide = torch.float64 if any(g.dtype == torch.float64 for g in filled) else torch.float32
            norms = torch._foreach_norm(filled, norm_type, dtype=wide)
        stacked = torch.stack([norm.to(device, torch.float32) for norm in norms])
        total = stacked.max() if largest else stacked.pow(norm_type).sum()
    if ranks.size > 1:
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        words = "the all-reduce of the gradient norm"
        ranks.together(words, all_reduce, ranks.communicator, total, operation)
    if not largest:
        total = total.pow(1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in (*grads, *replicated):
        grad.mul_(scale.to(grad.device, grad.dtype))
    return total


class ShardedGradScaler(GradScaler):
    """``torch.amp.GradScaler`` for sharded gradients: all ranks skip a step, or none does.

    Unscaling looks at this rank's gradient shards of a ``ShardedOptimizer``, or of any optimizer
    over the parameters of a ``FullyShardedDataParallel``, and takes the maximum over ranks of
    whether any was not finite. Other optimizers are handled as by the base class.
    """

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        known = watched(optimizer)
        if known is not None and known.before_step is not None:
            raise RuntimeError(USED.format("unscale_"))
        ranks: Ranks | None = getattr(optimizer, "ranks", None)
        if ranks is not None and hasattr(optimizer, "local_gradients"):  # a ShardedOptimizer
            grads = optimizer.local_gradients()
        else:
            ranks, params = shard_ranks_of(optimizer), all_params(optimizer.param_groups)
            grads = [param.grad for param in params if param.grad is not None]
        if ranks is None:
            found: dict[torch.device, Tensor] = super()._unscale_grads_(
                optimizer, inv_scale, found_inf, allow_fp16
            )
            return found
        if not allow_fp16 and any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError(
                "gradients must be wider than fp16 to be unscaled, but some are fp16. Keep fp32 "
                "parameters under autocast, or pass master_dtype=torch.float32."
            )
        for device, dtype in sorted({(grad.device, grad.dtype) for grad in grads}, key=str):
            here = [grad for grad in grads if (grad.device, grad.dtype) == (device, dtype)]
            local = found_inf.to(device)
            with torch._C.DisableTorchFunctionSubclass():  # a GradientShard refuses its own search
                torch._amp_foreach_non_finite_check_and_unscale_(here, local, inv_scale.to(device))
            found_inf.copy_(torch.maximum(found_inf, local.to(found_inf.device)))
        words = "the exchange of whether gradients are finite"
        ranks.together(words, all_reduce, ranks.communicator, found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}
