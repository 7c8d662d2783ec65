"""Do all ranks start from the same weights, and step with the same gradients?

Asked once, when the first step collects its gradients: one all-reduce of a few numbers for each
parameter. What it finds would otherwise train on without an error: ranks update different shards
of different models, or each rank its shard with its own gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shard_optim.buckets import check_gradient
from shard_optim.collectives import guarded, maximum

# Norms of equal tensors differ only where ranks run different hardware; those of gradients of
# different batches differ in the first digits.
_WEIGHTS_TOLERANCE, _GRADIENTS_TOLERANCE = 1e-5, 1e-3


def check_first_step(
    params: Sequence[Tensor],
    *,
    gradients: bool,
    name_of: Callable[[int], str],
    group: dist.ProcessGroup,
) -> None:
    """Compares norms over the ranks. Collective.

    Args:
        params: all parameters, the same on every rank.
        gradients: whether their gradients must have been averaged already.
        name_of: a parameter's name by its number.
        group: the ranks to compare.

    Raises:
        RuntimeError: on every rank, naming the first parameter that differs.
        ValueError: a gradient is sparse.
    """
    if group.size() == 1:
        return
    numbers = [index for index, param in enumerate(params) if param.numel()]
    if not numbers:
        return
    device = params[0].device
    weights = [params[index].detach() for index in numbers]
    found = [_norms(weights, device)]
    if gradients:
        for index in numbers:
            check_gradient(params[index].grad, name_of(index))
        found.append(_norms([params[index].grad for index in numbers], device))
    own = torch.stack(found)
    bounds = torch.stack([own, -own])  # the largest of -x is minus the smallest of x
    work = guarded("the comparison of the first step", group, maximum, bounds, group)
    guarded("the comparison of the first step", group, work.wait)
    largest, smallest = bounds[0], -bounds[1]
    spread, scale = largest - smallest, largest.abs()
    for row, (tolerance, describe) in enumerate(
        [(_WEIGHTS_TOLERANCE, _weights), (_GRADIENTS_TOLERANCE, _gradients)][: len(own)]
    ):
        differs = (spread[row] > tolerance * scale[row]).nonzero()
        if differs.numel():
            place = int(differs[0])
            low, high = float(smallest[row, place]), float(largest[row, place])
            raise RuntimeError(describe(name_of(numbers[place]), low, high))


def _norms(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Shape (tensors,), fp64: -1 for None, -2 where the norm is not finite."""
    norms = [
        torch.tensor(-1.0, device=device)
        if tensor is None
        else torch.linalg.vector_norm(tensor, dtype=_wide(tensor)).to(device)
        for tensor in tensors
    ]
    return torch.stack([norm.double() for norm in norms]).nan_to_num(-2, -2, -2)


def _wide(tensor: Tensor) -> torch.dtype:
    narrow = torch.complex64 if tensor.is_complex() else torch.float32
    return torch.promote_types(tensor.dtype, narrow)


def _weights(name: str, low: float, high: float) -> str:
    return (
        "every rank must start from the same weights, but at the first step the norm of "
        f"{name} is between {low:.6g} and {high:.6g} over the ranks. Initialise with the same seed "
        "on every rank, or broadcast rank 0's weights before the optimizer is constructed"
    )


def _gradients(name: str, low: float, high: float) -> str:
    span = f"its norm is between {low:.6g} and {high:.6g} over the ranks"
    if low == -1:
        span = "it has none on some ranks"
    return (
        "gradients must have been averaged over the ranks before the step, but at the first step "
        f"that of {name} differs: {span}. Put the model into a data-parallel wrapper that averages "
        "gradients, or let this optimizer average them with reduce_gradients=True"
    )
