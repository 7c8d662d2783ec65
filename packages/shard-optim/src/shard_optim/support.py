"""Which optimizers work under which partition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shard_optim.partition import Partition
from shard_optim.runs import Run

# Updates that depend on a parameter's shape: factored moments, orthogonalised matrices.
SHAPE_DEPENDENT: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)

# LBFGS takes inner products over all parameters; SparseAdam needs sparse gradients.
UNSUPPORTED: tuple[type[Optimizer], ...] = (torch.optim.LBFGS, torch.optim.SparseAdam)


def check_supported(
    optimizer_cls: type[Optimizer], partition: Partition, kwargs: dict[str, Any]
) -> None:
    """Refuses what is known not to work before anything is allocated.

    Raises:
        TypeError: if ``optimizer_cls`` is not an optimizer class.
        ValueError: naming the remedy.
    """
    if not (isinstance(optimizer_cls, type) and issubclass(optimizer_cls, Optimizer)):
        raise TypeError(
            f"optimizer_cls must be a subclass of torch.optim.Optimizer, got {optimizer_cls!r}"
        )
    name = optimizer_cls.__name__
    if issubclass(optimizer_cls, UNSUPPORTED):
        raise ValueError(
            "an optimizer can be sharded only if it updates each parameter from that parameter's "
            f"dense gradient alone, and {name} does not; use it unsharded"
        )
    if kwargs.get("differentiable"):
        raise ValueError(
            "gradients cannot flow through an update that other ranks compute, got "
            "differentiable=True; use differentiable=False"
        )
    if partition == "flat" and issubclass(optimizer_cls, SHAPE_DEPENDENT):
        raise ValueError(
            f'partition="flat" needs an optimizer that treats every element alike, but {name} '
            'looks at the shape of each parameter; pass partition="whole"'
        )


def check_elementwise_state(optimizer: Optimizer, run: Run) -> None:
    """Refuses state that an element-wise optimizer would not have.

    Raises:
        ValueError: if some state tensor is neither one number nor of the run's shape.
    """
    for key, value in optimizer.state.get(run.tensor, {}).items():
        if isinstance(value, Tensor) and value.numel() != 1 and value.shape != run.tensor.shape:
            raise ValueError(
                'under partition="flat" a state tensor must hold one number or one per element '
                f"({tuple(run.tensor.shape)}), but {type(optimizer).__name__} keeps {key!r} of "
                f'shape {tuple(value.shape)}; pass partition="whole"'
            )
