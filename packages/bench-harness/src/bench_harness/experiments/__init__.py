"""Experiments by name, imported only when asked for: see :mod:`bench_harness.experiments.base`."""

from bench_harness.core import CaseSkipped, Figure, Table, option
from bench_harness.experiments.base import Experiment, get, names

__all__ = ["CaseSkipped", "Experiment", "Figure", "Table", "get", "names", "option"]
