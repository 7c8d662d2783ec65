"""Measures and explains Transformer training: one command per experiment, one report.

The names here are what a package needs that adds an experiment of its own, through the entry point
group ``bench_harness.experiments``. Importing them imports neither torch nor pandas.
"""

from bench_harness.core import Case, CaseSkipped, Figure, Table, option
from bench_harness.experiments.base import Experiment

__version__ = "0.1.0"

__all__ = ["Case", "CaseSkipped", "Experiment", "Figure", "Table", "option"]
