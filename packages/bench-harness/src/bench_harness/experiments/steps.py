"""Training steps on several ranks: the data-parallel wrappers by name, and timing in turn.

Variants share one model. Each round wraps it, warms the wrapper up, takes its samples and unwraps
it again, so only one wrapper's hooks and buffers exist at a time and drift meets every variant.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from bench_harness.timing import Samples
    from bench_harness.workload import Workload

WRAPPERS = ("none", "naive", "flat", "overlap", "bucketed", "torch-ddp")


@dataclass(frozen=True)
class Wrapped:
    """A module whose gradients are synchronised in some way.

    Attributes:
        module: what the training step calls.
        finish: makes the averaged gradients usable; called after backward.
    """

    module: nn.Module
    finish: Callable[[], object]


@contextmanager
def wrapped(kind: str, settings: Mapping[str, Any], module: nn.Module) -> Iterator[Wrapped]:
    """Wraps a module, and leaves it as it was: no hooks, no gradients.

    Args:
        kind: one of :data:`WRAPPERS`. "none" averages nothing, so it only serves for timing.
        settings: the wrapper's keyword arguments.

    Raises:
        ValueError: unknown kind.
    """
    import torch

    import ddp_lite

    classes: dict[str, Callable[..., ddp_lite.DataParallelBase]] = {
        "naive": ddp_lite.NaiveDDP,
        "flat": ddp_lite.FlatDDP,
        "overlap": ddp_lite.OverlapDDP,
        "bucketed": ddp_lite.BucketedDDP,
    }
    if kind not in WRAPPERS:
        raise ValueError(f"wrapper must be one of {', '.join(WRAPPERS)}; received {kind!r}")
    gc.collect()  # torch's reducer takes its hooks with it only when it is destroyed
    try:
        if kind == "none":
            yield Wrapped(module, lambda: None)
        elif kind == "torch-ddp":
            reducer = torch.nn.parallel.DistributedDataParallel(module, **settings)
            yield Wrapped(reducer, lambda: None)
        else:
            wrapper = classes[kind](module, **settings)
            yield Wrapped(wrapper, wrapper.finish_gradient_synchronization)
            wrapper.detach()
    finally:
        for parameter in module.parameters():
            parameter.grad = None


def train_step(workload: Workload, way: Wrapped, optimizer: torch.optim.Optimizer | None) -> None:
    """Zero gradients, forward, backward, synchronise, update (if there is an optimizer)."""
    for parameter in workload.module.parameters():
        parameter.grad = None
    workload.backward(workload.loss(way.module))
    way.finish()
    if optimizer is not None:
        optimizer.step()


def timed_blocks(
    step: Callable[[], None], samples: Samples, device: torch.device, *, blocks: int, calls: int
) -> None:
    """Adds one sample per block of ``calls`` steps; ranks start each block together."""
    import torch.distributed as dist

    from bench_harness.timing import record_sample

    for _ in range(blocks):
        dist.barrier()
        with record_sample(samples, device, calls=calls):
            for _ in range(calls):
                step()


def probed_parameters(module: nn.Module, count: int = 8) -> dict[str, nn.Parameter]:
    """A few parameters spread evenly over the module, first and last included."""
    everything = list(module.named_parameters())
    stride = max(1, math.ceil((len(everything) - 1) / (count - 1)))
    return dict(everything[::stride] + everything[-1:])


def averaged_gradients(workload: Workload) -> dict[str, Tensor]:
    """The gradients that every wrapper must give, for :func:`probed_parameters`.

    Each rank's own gradients, averaged one by one in fp32 by a plain sum.
    """
    import torch.distributed as dist

    probed = probed_parameters(workload.module)
    train_step(workload, Wrapped(workload.module, lambda: None), None)
    expected = {}
    for name, parameter in probed.items():
        assert parameter.grad is not None
        total = parameter.grad.float()
        if total is parameter.grad:
            total = total.clone()
        dist.all_reduce(total)
        expected[name] = total / dist.get_world_size()
    for parameter in workload.module.parameters():
        parameter.grad = None
    return expected


#: Largest error of a gradient, as a share of its largest value. Attention's backward adds
#: atomically, so two passes differ in rounding: by a step of the format in which products run.
_GRADIENT_TOLERANCE = {"fp32": 1e-3, "tf32": 5e-3, "bf16": 2e-2}


def check_gradients(
    variant: str, module: nn.Module, expected: Mapping[str, Tensor], precision: str = "fp32"
) -> float:
    """The largest error of a wrapper's gradients, as a share of each gradient's largest value.

    Raises:
        ArithmeticError: it exceeds the precision's tolerance, or a gradient is missing; the
            variant is not timed then.
    """
    tolerance, worst = _GRADIENT_TOLERANCE[precision], 0.0
    for name, parameter in probed_parameters(module).items():
        if parameter.grad is None:
            raise ArithmeticError(f"{variant}: {name} must have a gradient; received none")
        scale = float(expected[name].abs().max()) or 1.0
        error = float((parameter.grad.float() - expected[name]).abs().max()) / scale
        if not error <= tolerance:
            raise ArithmeticError(
                f"{variant}: the gradient of {name} must be the mean over ranks within "
                f"{tolerance:g} of its largest value; received an error of {error:.2e}"
            )
        worst = max(worst, error)
    return worst
