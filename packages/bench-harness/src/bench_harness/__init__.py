"""Measures and explains Transformer training: one command per experiment, one report.

The names here are what a package needs that adds an experiment of its own, through the entry point
group ``bench_harness.experiments``. Importing them imports neither torch nor pandas. They are
imported when they are asked for, so that the command line answers Ctrl-C before it imports much.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing takes a while to import
if TYPE_CHECKING:
    from typing import Any

    from bench_harness.experiments import Case, CaseSkipped, Experiment, Figure, Table, option

__version__ = "0.1.0"

__all__ = ["Case", "CaseSkipped", "Experiment", "Figure", "Table", "option"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("bench_harness.experiments"), name)
