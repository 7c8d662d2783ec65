"""Gradient scaling for fp16 when each rank sees only its shards of the gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from shard_optim.collectives import guarded
from shard_optim.fully_sharded.unit import shard_group_of
from shard_optim.optimizer import ShardedOptimizer


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
        if not isinstance(optimizer, ShardedOptimizer):
            per_device: dict[torch.device, Tensor] = super()._unscale_grads_(
                optimizer, inv_scale, found_inf, allow_fp16
            )
            group = shard_group_of(optimizer)
            if group is None:
                return per_device
            for local in per_device.values():
                found_inf.copy_(torch.maximum(found_inf, local.to(found_inf.device)))
            self._share(found_inf, group)
            return {found_inf.device: found_inf}
        grads = optimizer.local_gradients()
        if not allow_fp16 and any(grad.dtype == torch.float16 for grad in grads):
            raise ValueError(
                "gradients must be wider than fp16 to be unscaled, but some are fp16; keep fp32 "
                "parameters under autocast, or pass master_dtype=torch.float32"
            )
        for device in sorted({grad.device for grad in grads}, key=str):
            here = [grad for grad in grads if grad.device == device]
            local = found_inf.to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(here, local, inv_scale.to(device))
            found_inf.copy_(torch.maximum(found_inf, local.to(found_inf.device)))
        self._share(found_inf, optimizer.process_group)
        return {found_inf.device: found_inf}

    @staticmethod
    def _share(found_inf: Tensor, group: dist.ProcessGroup) -> None:
        """Makes it the maximum over all ranks."""
        guarded(
            "the exchange of whether gradients are finite",
            group,
            lambda: dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group),
        )
