"""Rows as a data frame: one line per row, with the configuration spread into columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bench_harness.core import Row

if TYPE_CHECKING:
    import pandas as pd


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows of a run as a data frame, in file order; lists and mappings stay objects in cells.

    Where a configuration key is also a name of the measurement, the column of the configuration
    is called ``config.<key>``.
    """
    import pandas as pd

    lines = []
    for row in rows:
        own = {name: value for name, value in row.items() if name != "config"}
        config = row.get("config", {}).items()
        lines.append(own | {f"config.{n}" if n in own else n: value for n, value in config})
    return pd.DataFrame(lines)
