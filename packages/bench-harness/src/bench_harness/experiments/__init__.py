"""The registry: experiments by name, imported only when asked for.

Another package adds an experiment by an entry point in the group ``bench_harness.experiments``
whose name is the experiment's and whose value is its class, ``package.module:Class``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from bench_harness.core import CaseSkipped, Figure, Table, option, registered
from bench_harness.experiments.base import Experiment

__all__ = ["CaseSkipped", "Experiment", "Figure", "Table", "every", "get", "names", "option"]

ENTRY_POINT_GROUP = "bench_harness.experiments"

# In the order in which they run and are reported.
_BUILT_IN = {
    "accounting": "bench_harness.experiments.accounting:Accounting",
    "model": "bench_harness.experiments.model:Model",
    "memory": "bench_harness.experiments.memory:Memory",
    "attention": "bench_harness.experiments.attention:Attention",
    "allreduce": "bench_harness.experiments.allreduce:AllReduce",
    "train-step": "bench_harness.experiments.train_step:TrainStep",
    "profile": "bench_harness.experiments.profile:Profile",
}


def _targets() -> dict[str, str]:
    return _BUILT_IN | registered(ENTRY_POINT_GROUP)


def names() -> list[str]:
    """Every experiment's name, built-in ones first, in running order."""
    return list(_targets())


def get(name: str) -> Experiment:
    """The experiment registered under ``name``.

    Raises:
        ValueError: no experiment has that name, and the message lists those that exist; or it
            cannot be imported.
    """
    targets = _targets()
    if name not in targets:
        raise ValueError(f"experiment must be one of {', '.join(targets)}, but got {name!r}")
    return _load(name, targets[name])


def every() -> Iterator[Experiment]:
    """Every experiment in running order, after one look at what is installed.

    Raises:
        ValueError: one cannot be imported.
    """
    for name, target in _targets().items():
        yield _load(name, target)


def _load(name: str, target: str) -> Experiment:
    module, _, attribute = target.partition(":")
    try:
        experiment: Experiment = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"experiment {name} must be importable as {target}, but got an error: {error}. "
            "Reinstall the package that registers it."
        ) from error
    return experiment
