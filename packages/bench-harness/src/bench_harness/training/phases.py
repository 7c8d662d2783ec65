"""The phases of a training step, each synchronised, and the step as a whole, on one device.

Like :mod:`bench_harness.training.measure` it builds each variant anew in every round, so that only
one is in memory and all meet the same state of the machine. Nothing is averaged over ranks, so
nothing is proven first, and the very first step of a process is measured too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from bench_harness.timing import Enough, Samples, record_sample
from bench_harness.training.build import Training, training

if TYPE_CHECKING:
    from bench_harness.training.settings import Settings


def measure_phases(
    variants: Mapping[str, Settings],
    config: Mapping[str, Any],
    device: torch.device,
    progress: Callable[[str], None],
) -> dict[str, dict[str, Samples]]:
    """Samples by variant and phase.

    Args:
        config: of a case: what is trained, ``modes``, ``warmup``, ``samples`` of a round, and how
            long sampling may go on (:class:`bench_harness.timing.Enough`). Without warm-up
            there is one round, whose first sample is that of a cold start.
    """
    timings: dict[str, dict[str, Samples]] = {name: {} for name in variants}
    enough, round_number = None, 0
    # Variants compile the same module anew; past the compiler's limit it would quietly run
    # uncompiled.
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        while enough is None or not enough.reached(_readings(timings)):
            names = list(variants)
            for name in names if round_number % 2 == 0 else names[::-1]:
                progress(f"round {round_number + 1}: {name}")
                with training(variants[name], config, device) as steps:
                    for index in range(config["warmup"] + config["samples"]):
                        found = _round(steps, config["modes"])
                        _keep(timings[name], found, measured=index >= config["warmup"])
            round_number += 1
            if enough is None:
                enough = Enough(config if config["warmup"] else {})
    return timings


def _round(steps: Training, modes: list[str]) -> dict[str, Samples]:
    """Inference, the training step in parts, and the training step as a whole."""
    found: dict[str, Samples] = {}

    def phase(name: str) -> Any:
        return record_sample(found.setdefault(name, Samples()), steps.workload.device)

    if "forward" in modes:
        with phase("forward"), torch.no_grad():
            steps.workload.loss(steps.module)
    if "forward-backward" in modes or "step" in modes:
        steps.optimizer.zero_grad()
        with phase("training forward"):
            loss = steps.workload.loss(steps.module)
        with phase("backward"):
            steps.backward(loss)
    if "step" in modes:
        with phase("optimizer"):
            steps.update()
    if "step" in modes or "whole-step" in modes:
        with phase("step"):
            steps.step()
    return found


def _keep(timings: dict[str, Samples], found: dict[str, Samples], *, measured: bool) -> None:
    """Adds the samples of a round; of a warm-up round only the very first time is kept."""
    for phase, samples in found.items():
        kept = timings.setdefault(phase, Samples())
        if kept.first_ms is None:
            kept.first_ms = samples.wall_ms[0]
        if measured:
            kept.extend(samples)


def _readings(timings: Mapping[str, Mapping[str, Samples]]) -> list[list[float]]:
    return [samples.wall_ms for phases in timings.values() for samples in phases.values()]
