"""Times what the always-on checks of ddp-lite and shard-optim take of a training step on two GPUs.

    python packages/bench-harness/tools/time_checks.py checks.jsonl

Blocks of steps with the checks and without them take turns on the same model, so both see the same
memory and the same clocks; which of the two begins a round changes from round to round. A round
gives one ratio, and a package's row holds all of them, their median and its 95 % interval. The
checks are taken out by replacing private methods, which only developers of the two packages should
do: there is no option to switch them off.

The model is a stack of linear layers with as many parameters as a 48-block Transformer has, wide
enough for the GPU to limit the step (about 100 ms on an H200). The whole takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from bench_harness.environment import describe, git_state, gpu_count, measured_on
from bench_harness.ranks import launch
from bench_harness.stats import summarize
from ddp_lite import BucketedDDP
from ddp_lite.model import ModuleWatch
from ddp_lite.same_step import SameStep
from shard_optim import ShardedOptimizer
from shard_optim.buckets import Bucket
from shard_optim.history import LateComparison

WARM_UP_STEPS = 5


def model(layers: int, width: int, device: torch.device) -> nn.Sequential:
    """Linear layers that keep the size of what passes through them."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made = [nn.Linear(width, width, device=device, dtype=dtype) for _ in range(layers)]
    for layer in made:
        nn.init.normal_(layer.weight, std=width**-0.5)
    return nn.Sequential(*made)


def unchanged(*_: object) -> bool:
    """In place of the search for changed modules."""
    return False


def not_looked_at(*_: object) -> None:
    """In place of the search for parameters that were moved, and of the comparison of settings."""


@contextmanager
def unchecked_ddp(wrapped: BucketedDDP) -> Iterator[None]:
    """Without the search for changed modules and without the comparison of the ranks' steps."""
    engine = wrapped._engine
    tasks = engine.tasks
    with mock.patch.object(ModuleWatch, "has_changed", unchanged):
        engine.tasks = [task for task in tasks if not isinstance(task, SameStep)]
        try:
            yield
        finally:
            engine.tasks = tasks


@contextmanager
def unchecked_sharded() -> Iterator[None]:
    """Without the search for parameters that were moved and without the comparison of settings."""
    with (
        mock.patch.object(Bucket, "check_storage", not_looked_at),
        mock.patch.object(LateComparison, "exchange", not_looked_at),
    ):
        yield


def ddp_lite(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """The model in a wrapper, an optimizer, and what takes the checks out."""
    wrapped = BucketedDDP(net, comm_hook="collectives")
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)
    return wrapped, optimizer, lambda: unchecked_ddp(wrapped)


def shard_optim(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """The model, a sharded optimizer that averages gradients, and what takes the checks out."""
    parameters = net.parameters()
    optimizer = ShardedOptimizer(parameters, torch.optim.AdamW, lr=1e-4, reduce_gradients=True)
    return net, optimizer, unchecked_sharded


def ratios(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    unchecked: Callable[[], Any],
    x: torch.Tensor,
    rounds: int,
    steps: int,
) -> tuple[list[float], list[float]]:
    """Time with the checks divided by time without, and milliseconds of a step with, per round."""

    def milliseconds() -> float:
        if x.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            net(x).float().square().mean().backward()
            optimizer.step()
        if x.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3 / steps

    for _ in range(WARM_UP_STEPS):
        milliseconds()
        with unchecked():
            milliseconds()
    found, checked_ms = [], []
    for number in range(rounds):
        with_first = number % 2 == 0
        if with_first:
            checked = milliseconds()
        with unchecked():
            plain = milliseconds()
        if not with_first:
            checked = milliseconds()
        found.append(checked / plain)
        checked_ms.append(checked)
    return found, checked_ms


def measure_rank(
    rank: int, world_size: int, device: torch.device, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row per package, with this rank's times."""
    rows = []
    for build in (ddp_lite, shard_optim):
        net, optimizer, unchecked = build(model(given.layers, given.width, device))
        x = torch.randn(given.tokens, given.width, device=device)
        x = x.to(next(net.parameters()).dtype)
        found, checked_ms = ratios(net, optimizer, unchecked, x, given.rounds, given.steps)
        summary = summarize(found)
        rows.append(
            {
                "package": build.__name__.replace("_", "-"),
                "parameters": 2 * given.layers,
                "step_ms": round(summarize(checked_ms)["median"], 2),
                "cost_percent": round(100 * (summary["median"] - 1), 3),
                "low_percent": round(100 * ((summary["ci_low"] or 0) - 1), 3),
                "high_percent": round(100 * ((summary["ci_high"] or 0) - 1), 3),
                "ratios": [round(ratio, 6) for ratio in found],
            }
        )
    return rows


def main() -> None:
    """Measures on two ranks, and writes the rows of the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", type=Path, help="file to write, in the layout of published rows")
    parser.add_argument("--layers", type=int, default=216)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=10240)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=3, help="steps of a block")
    given = parser.parse_args()
    rows, _ = launch(measure_rank, 2, given, backend="nccl" if gpu_count() >= 2 else "gloo")
    line = {
        "experiment": "always-on-checks",
        "case_key": "always-on checks",
        "label": "always-on checks",
        "commit": (git_state(Path(__file__).parent) or {}).get("commit"),
        "measured_on": measured_on(describe()),
        "config": {"layers": given.layers, "width": given.width, "tokens": given.tokens},
        "rows": rows,
    }
    given.rows.write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
