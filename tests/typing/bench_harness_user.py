"""A user's experiment on every public name of bench-harness, for type checkers."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from bench_harness import Case, CaseSkipped, Experiment, Figure, Table, option
from bench_harness.report.frame import to_frame
from bench_harness.store import Store


@dataclass(frozen=True, kw_only=True)
class Options:
    milliseconds: tuple[int, ...] = option((1, 10), "How long to sleep.")


class Sleep(Experiment):
    name = "sleep"
    summary = "How late sleep returns"
    Options = Options

    def cases(self, **options: Any) -> list[Case]:
        wanted = Options(**options).milliseconds
        return [Case(experiment=self.name, config={"milliseconds": each}) for each in wanted]

    def run(self, case: Case, progress: Callable[..., None]) -> list[dict[str, Any]]:
        duration: Mapping[str, Any] = case.config
        if duration["milliseconds"] > 1000:
            raise CaseSkipped("too long")
        time.sleep(duration["milliseconds"] / 1000)
        return [{"variant": "time.sleep", "samples_ms": [1.0]}]

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        return [Table("Time slept", rows, "Milliseconds.")]

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        return []


def rows(folder: Path) -> pd.DataFrame:
    return to_frame(Store(folder).load().rows)
