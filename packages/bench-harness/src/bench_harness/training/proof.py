"""Proves, before anything is timed, that a variant trains like the plain definition of its step.

The definition: every rank's gradients, averaged one by one by a plain all-reduce, then an
unsharded optimizer. A small model takes a few steps in fp32 with each variant; its losses and its
final weights must be those of the definition. What is proven are the variant's own settings, at a
size at which the proof takes no time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bench_harness.core import Config, Row
from bench_harness.training import settings as of
from bench_harness.training.build import training
from bench_harness.training.constructors import Call

if TYPE_CHECKING:
    from torch import Tensor

#: Least steps of the proof; one would miss what depends on the optimizer's state.
STEPS = 3
#: Steps of the proof that are replays of a recorded one.
REPLAYS = 2
#: Largest error of a loss, relative to it. Sums of fp32 may be made in any order.
LOSS_TOLERANCE = 1e-4
#: Largest error of a parameter, as the norm of the difference over the norm of what the steps
#: changed. AdamW divides gradients near zero by their own size, so rounding shows there.
WEIGHT_TOLERANCE = 1e-2
#: The same where gradients travel in 16 bits. Compressed with loss they have no such bound.
ROUNDED_TOLERANCE = 0.1

_SMALL = {
    "size": "custom",
    "d_model": 64,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 256,
    "batch": 2,
    "sequence": 16,
    "backend": "aot_eager",  # hooks meet the same graphs, but no code is generated
}


@dataclass(frozen=True)
class Trained:
    """What a few steps gave.

    Attributes:
        losses: of each step, averaged over ranks.
        before, after: the model's parameters by name.
    """

    losses: list[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def small(config: Config) -> dict[str, Any]:
    """The configuration of the proof: a small language model, or the case's own other model."""
    return dict(config) if config.get("model") is not None else {**config, **_SMALL}


def steps_of(variant: of.Settings) -> int:
    """How many steps prove a variant."""
    if not variant.cuda_graph:
        return STEPS
    return max(STEPS, variant.steps_before_recording + REPLAYS)


def definition(optimizer: Call, config: Config, device: torch.device, *, steps: int) -> Trained:
    """Trains by the definition: gradients averaged one by one, an unsharded optimizer."""
    plain = of.Settings(optimizer=optimizer)
    with training(plain, small(config), device) as made:
        before = _copies(made.parameters())
        losses = []
        for _ in range(steps):
            loss = made.forward()
            made.workload.backward(loss)
            for parameter in made.workload.module.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
            made.update()
            losses.append(mean_over_ranks(loss))
        return Trained(losses, before, _copies(made.parameters()))


def disagreement(
    variant: of.Settings, expected: Trained, config: Config, device: torch.device
) -> tuple[str | None, Row]:
    """What is wrong with a variant's losses and weights, and the largest errors found.

    Args:
        expected: :func:`definition` with the same unsharded optimizer, for :func:`steps_of` steps.

    Returns:
        The trouble, None if there is none; and the errors, as columns of the variant's row.
    """
    with training(_in_fp32(variant), small(config), device) as steps:
        losses = []
        for number in range(len(expected.losses)):
            if variant.cuda_graph and number == variant.steps_before_recording:
                steps.capture()
            losses.append(mean_over_ranks(steps.step()))
        found = steps.parameters()
        if not variant.communicates and dist.get_world_size() > 1:
            return None, {}  # nothing is averaged, so there is nothing to agree with
        loss_error = relative_error(losses, expected.losses)
        moved = {name: after - expected.before[name] for name, after in expected.after.items()}
        errors = {  # a frozen parameter must not move at all
            name: float((found[name] - wanted).norm() / moved[name].norm().clamp(min=1e-30))
            for name, wanted in expected.after.items()
        }
        different = apart(found)
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    loss_limit, limit = LOSS_TOLERANCE, WEIGHT_TOLERANCE
    if variant.rounds:
        loss_limit = limit = ROUNDED_TOLERANCE
    trouble = None
    if not loss_error <= loss_limit:
        trouble = (
            f"the losses of {len(losses)} steps must be those of plain averaging within "
            f"{loss_limit:g} of their size, but got an error of {loss_error:.2e}: {losses} "
            f"against {expected.losses}"
        )
    elif not errors[worst] <= limit:
        trouble = (
            f"the weights after {len(losses)} steps must be those of plain averaging within "
            f"{limit:g} of what the steps changed, but got {errors[worst]:.2e} in {worst}"
        )
    elif different:
        trouble = f"all ranks must end with the same weights, but got different ones in {different}"
    largest = {"loss_error": loss_error, "weight_error": errors[worst]}
    return trouble, {name: error for name, error in largest.items() if math.isfinite(error)}


def relative_error(losses: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest error of a loss, relative to it; infinite where one of them is not finite."""
    if not all(map(math.isfinite, (*losses, *wanted))):
        return math.inf
    size = max(map(abs, wanted)) or 1.0  # where a loss is 0
    pairs = zip(losses, wanted, strict=True)
    return max(abs(loss - other) / (abs(other) or size) for loss, other in pairs)


def mean_over_ranks(value: Tensor) -> float:
    """A scalar, averaged over ranks."""
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _in_fp32(variant: of.Settings) -> of.Settings:
    wrapper = variant.wrapper.without("param_dtype", "compute_dtype", "reduce_dtype")
    return dataclasses.replace(variant, wrapper=wrapper, precision="fp32", products="plain")


def _copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in parameters.items()}


def apart(parameters: Mapping[str, Tensor]) -> str | None:
    """The name of a parameter in which a rank differs from rank 0; None if none does."""
    for name, value in parameters.items():
        first = value.contiguous().clone()
        dist.broadcast(first, 0)
        different = torch.tensor([float(not torch.equal(first, value))], device=value.device)
        dist.all_reduce(different)
        if different.item():
            return name
    return None
