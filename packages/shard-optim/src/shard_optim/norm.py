"""The norm of gradients that are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shard_optim.collectives import guarded


@torch.no_grad()
def clip_sharded_(
    grads: Sequence[Tensor],
    max_norm: float,
    *,
    norm_type: float,
    group: dist.ProcessGroup,
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
        group: the ranks that hold the shards.
        device: where the group's back end can reduce a number.
        replicated: gradients that all ranks hold whole and equal; scaled everywhere, counted once.

    Returns:
        The norm before clipping, fp32, shape ().
    """
    largest = math.isinf(norm_type)
    total = torch.zeros((), dtype=torch.float32, device=device)
    counted = [*grads, *replicated] if dist.get_rank(group) == 0 else grads
    filled = [grad for grad in counted if grad.numel() > 0]  # no elements, no largest magnitude
    if filled:
        norms = torch._foreach_norm(filled, norm_type, dtype=torch.float32)
        stacked = torch.stack([norm.to(device) for norm in norms])
        total = stacked.max() if largest else stacked.pow(norm_type).sum()
    if group.size() > 1:
        guarded(
            "the all-reduce of the gradient norm",
            group,
            lambda: dist.all_reduce(
                total, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group
            ),
        )
    if not largest:
        total = total.pow(1 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in (*grads, *replicated):
        grad.mul_(scale.to(grad.device, grad.dtype))
    return total
