"""Table cells as text, which columns of a table tell its rows apart, and units that suit numbers.

Rows, CSV files and published tables keep one unit per column. What a page or a terminal shows is
scaled here, a whole column at a time, so that its numbers stay comparable and sort as before: 2.0 B
parameters, 65.8 MFLOP/s, 41 MiB.
"""

from __future__ import annotations

import math
import numbers
import re
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


def with_intervals(frame: pd.DataFrame) -> pd.DataFrame:
    """A copy in which the two ends of each 95 % interval share a column, as ``[1.85, 2.55]``."""
    import pandas as pd

    made: dict[str, Any] = {}
    for name in map(str, frame.columns):
        other = name.replace("95 % low", "95 % high")
        if other != name and other in frame:
            ends = ((cell(a), cell(b)) for a, b in zip(frame[name], frame[other], strict=True))
            texts = [f"[{low}, {high}]" if low and high else "" for low, high in ends]
            made[name.replace("95 % low", "95 % interval")] = texts
        elif "95 % high" not in name:
            made[name] = frame[name]
    return pd.DataFrame(made)


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


_SI = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))
_BINARY = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
_COUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("count", 1.0))
#: Units of one quantity, largest first, each with its size.
_FAMILIES: tuple[tuple[tuple[str, float], ...], ...] = (
    tuple((prefix + "FLOP/s", size) for prefix, size in _SI),
    tuple((prefix + "FLOP", size) for prefix, size in _SI),
    tuple((prefix + "B/s", size) for prefix, size in _SI),
    tuple((prefix + "B", size) for prefix, size in _SI[:-1]),
    _BINARY,
    _SECONDS,
    _COUNTS,
)
_HEADING = re.compile(r"^(?P<name>.* )?\(?(?P<unit>[^() ]+)\)?$")
#: A column is left as it is while its largest number lies between these.
_LEAST, _MOST = 0.1, 1e4


def quantity(value: float, unit: str) -> str:
    """A number with the unit of its size: ``quantity(0.0000658, "TFLOP/s")`` is 65.8 MFLOP/s."""
    family = _family(unit)
    if family is None or not value:
        return f"{value:.3g} {unit}"
    absolute = value * dict(family)[unit]
    name, size = _fitting(family, abs(absolute))
    digits = ".1f" if name in ("B", "T") and family is _COUNTS else ".3g"
    shown = f"{absolute / size:{digits}}"
    return shown if name == "count" else f"{shown} {name}"


def scale(values: Any, unit: str) -> tuple[str, float]:
    """The unit in which the largest of the values reads well, and what to divide them by."""
    family = _family(unit)
    known = [abs(float(v)) for v in values if v is not None and math.isfinite(float(v)) and v]
    if family is None or not known or _LEAST <= max(known) < _MOST:
        return unit, 1.0
    sizes = dict(family)
    name, size = _fitting(family, max(known) * sizes[unit])
    return name, size / sizes[unit]


def readable(frame: pd.DataFrame) -> pd.DataFrame:
    """A copy of a table whose columns are in units that suit their numbers."""
    import pandas as pd

    shown = {}
    for name in map(str, frame.columns):
        column = frame[name]
        match = _HEADING.match(name)
        if match is None or not pd.api.types.is_numeric_dtype(column.dtype):
            shown[name] = column
            continue
        unit, divisor = scale(column.dropna().tolist(), match["unit"])
        if divisor != 1.0:
            column = (column.astype("float64") / divisor).map(
                lambda value: float(f"{value:.4g}"), na_action="ignore"
            )
            span = match.span("unit")
            name = name[: span[0]] + unit + name[span[1] :]
        shown[name] = column
    return pd.DataFrame(shown)


def _family(unit: str) -> tuple[tuple[str, float], ...] | None:
    return next((family for family in _FAMILIES if unit in dict(family)), None)


def _fitting(family: tuple[tuple[str, float], ...], absolute: float) -> tuple[str, float]:
    """The largest unit of which there is at least one, or the smallest of all."""
    return next((each for each in family if absolute >= each[1]), family[-1])
