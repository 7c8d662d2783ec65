"""Experiments by name, imported only when asked for: see :mod:`bench_harness.experiments.base`."""

from bench_harness.core import Case, CaseSkipped, Figure, Table, option
from bench_harness.experiments.base import Experiment, get, names

__all__ = ["Case", "CaseSkipped", "Experiment", "Figure", "Table", "get", "names", "option"]
