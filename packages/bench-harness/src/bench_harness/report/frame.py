"""Rows as a data frame: one line per row, with the configuration spread into columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from bench_harness.core import Row

if TYPE_CHECKING:
    import pandas as pd


def flatten(row: Row) -> Row:
    """A row with its configuration's entries beside its own.

    Where a configuration key is also a name of the measurement, the column of the configuration
    is called ``config.<key>``.
    """
    own = {name: value for name, value in row.items() if name != "config"}
    config = row.get("config", {})
    spread = {f"config.{name}" if name in own else name: value for name, value in config.items()}
    return {**own, **spread}


def to_frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows of a run as a data frame, in file order; lists and mappings stay objects in cells."""
    import pandas as pd

    return pd.DataFrame([flatten(row) for row in rows])
