"""Numbers as people read them: 2.0 B parameters, 65.8 MFLOP/s, 41 MiB.

Rows, CSV files and published tables keep one unit per column. What a page or a terminal shows is
scaled here, a whole column at a time, so that its numbers stay comparable and sort as before.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

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
    digits = 1 if name in ("B", "T") and family is _COUNTS else None
    number = absolute / size
    shown = f"{number:.{digits}f}" if digits is not None else f"{number:.3g}"
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
            column = (column.astype("float64") / divisor).map(_rounded, na_action="ignore")
            span = match.span("unit")
            name = name[: span[0]] + unit + name[span[1] :]
        shown[name] = column
    return pd.DataFrame(shown)


def _family(unit: str) -> tuple[tuple[str, float], ...] | None:
    return next((family for family in _FAMILIES if unit in dict(family)), None)


def _fitting(family: tuple[tuple[str, float], ...], absolute: float) -> tuple[str, float]:
    """The largest unit of which there is at least one, or the smallest of all."""
    return next((each for each in family if absolute >= each[1]), family[-1])


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
