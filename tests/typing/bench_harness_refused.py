"""Mistakes in calls of bench-harness: type checkers refuse the marked lines and no others."""

from pathlib import Path

from bench_harness import Case, Table
from bench_harness.store import Store


def mistakes() -> None:
    Case(name="sleep", config={})  # refused
    Case("sleep", {})  # refused
    Table(title="Time slept", rows=[])  # refused
    print(Store(Path("run")).load().row)  # refused
