"""Table cells as text, and which columns of a table tell its rows apart."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

#: Tables of more columns than this show the constant ones once, above the rows.
_WIDE = 8


def cell(value: Any) -> str:
    """A table cell as text: six significant digits, empty for a missing value."""
    if isinstance(value, str):
        return value
    if value is None or is_missing(value):
        return ""
    if isinstance(value, bool) or type(value).__name__ == "bool":
        return "yes" if value else "no"
    if isinstance(value, numbers.Integral):
        return str(value)
    if isinstance(value, numbers.Real):
        return f"{float(value):.6g}"
    return str(value)


def is_missing(value: Any) -> bool:
    """Whether a cell holds one of pandas' missing values."""
    return type(value).__name__ in ("NAType", "NaTType") or (
        isinstance(value, float) and math.isnan(value)
    )


def split(frame: pd.DataFrame, *, wide: int | None = None) -> tuple[dict[str, str], pd.DataFrame]:
    """A wide table's constant columns, as name and text, and the table without them.

    A narrow table, or one of a single row, is left as it is; a constant that is empty is dropped.

    Args:
        wide: columns that a narrow table may have; None for as many as a page shows at once.
    """
    if frame.shape[1] <= (_WIDE if wide is None else wide) or len(frame) < 2:
        return {}, frame
    texts = {name: [cell(value) for value in frame[name]] for name in frame.columns}
    constant = {name: values[0] for name, values in texts.items() if len(set(values)) == 1}
    shown = {str(name): text for name, text in constant.items() if text}
    return shown, frame[[name for name in frame.columns if name not in constant]]
