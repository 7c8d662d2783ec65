"""From result rows to displayed tables: the parts that every experiment shares.

Keys of columns are given as one text, with spaces between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from bench_harness.core import Column, Table

if TYPE_CHECKING:
    import pandas as pd

#: Units by the ends of keys, as in ``exposed_ms``.
_UNITS = {"ms": "ms", "mib": "MiB", "gib": "GiB"}
_BYTES = {"mib": 2**20, "gib": 2**30}
#: Columns that several experiments show, whose keys do not say their headings.
COMMON = (
    Column("sequence", "sequence", "tokens"),
    Column("world_size", "world size", "ranks"),
    Column("ci_low_ms", "95 % low", "ms"),
    Column("ci_high_ms", "95 % high", "ms"),
    Column("n", "samples", "count"),
    Column("outliers", "outliers", "count"),
    Column("tflop_s", "TFLOP/s"),
    Column("mfu", "MFU", "%"),
    Column("intensity", "intensity", "FLOP/byte"),
    Column("roof_ms", "roofline", "ms"),
    Column("roof_share", "of the roofline", "%"),
    Column("bound", "limit"),
    Column("clock_mhz", "clock", "MHz"),
    Column("ran", "attention that ran"),
    Column("missed", "prediction missed"),
    Column("count", "runs", "count"),
    Column("gathers", "gathers", "count"),
    Column("late_gathers", "late", "count"),
    Column("late_ms", "computation waited", "ms"),
    Column("number", "gather", "number"),
    Column("gather_ms", "gather itself", "ms"),
    Column("d_model", "d_model"),
    Column("num_layers", "num_layers"),
    Column("parameters", "parameters", "count"),
    Column("error", "why"),
)
#: Keys that ``stats.with_summary`` and ``roofline.with_roofline`` add.
STATISTICS = "median_ms mean_ms std_ms ci_low_ms ci_high_ms n outliers unstable too_short"
ROOFLINE = "intensity roof_ms roof_share bound clock_mhz"


class Columns:
    """The columns of one experiment, from which all of its tables are made.

    A column that is not declared has its key for a title, and the unit that the key ends in.

    Args:
        own: beside, or instead of, those of :data:`COMMON`.
        digits: of all of them; None leaves to each its own.
    """

    def __init__(self, *own: Column, digits: int | None = None) -> None:
        self._known = {column.key: column for column in (*COMMON, *own)}
        self._digits = digits

    def __getitem__(self, key: str) -> Column:
        name, _, end = key.rpartition("_")
        title, unit = (name, _UNITS[end]) if name and end in _UNITS else (key, "")
        found = self._known.get(key, Column(key, title.replace("_", " "), unit))
        return found if self._digits is None else dataclasses.replace(found, digits=self._digits)

    def table(
        self,
        title: str,
        rows: pd.DataFrame,
        keys: str,
        note: str = "",
        headings: Mapping[str, str] = MappingProxyType({}),
    ) -> Table:
        """The columns that exist and hold anything, with their headings, in the given order.

        One in MiB or GiB that does not exist is that in bytes: ``peak_mib`` of ``peak_bytes``.

        Args:
            headings: by key, where this table has another, or where rows name the column.
        """
        asked = {key: self[key] for key in keys.split()}
        names = {key: column.heading for key, column in asked.items()} | dict(headings)
        most = max(4, *(column.digits for column in asked.values()))
        digits = {key: asked[key].digits if key in asked else most for key in names}
        for key in names:
            name, _, end = key.rpartition("_")
            if key not in rows and end in _BYTES and f"{name}_bytes" in rows:
                held = rows[f"{name}_bytes"].astype("float64")
                rows = rows.assign(**{key: held / _BYTES[end]})
        return Table(title, columns(rows, names, digits=digits), note)


def finished(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that hold a measurement."""
    return rows[rows["status"] == "ok"] if "status" in rows else rows


def steady(rows: pd.DataFrame) -> pd.Series[Any]:
    """Whether each median of :func:`bench_harness.stats.with_summary` may be quoted."""
    shaky = rows["unstable"].map(lambda value: value is True or value == 1)
    if "too_short" in rows:
        shaky |= rows["too_short"].map(lambda value: value is True or value == 1)
    return ~shaky


def over(rows: pd.DataFrame, reference: pd.Series[bool], keys: str) -> pd.Series[Any]:
    """Each median over that of the reference row with the same ``keys``, where both are steady."""
    import pandas as pd

    medians = rows["median_ms"].where(steady(rows)).astype("float64")
    known = dict(zip(_keys(rows[reference], keys), medians[reference], strict=True))
    of = [known.get(key, float("nan")) for key in _keys(rows, keys)]
    return medians / pd.Series(of, index=rows.index)


def _keys(rows: pd.DataFrame, keys: str) -> list[tuple[Any, ...]]:
    return list(rows[keys.split()].itertuples(index=False, name=None))


def lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """A copy with the lengths of cases that failed, from the lengths they were to measure.

    ``sequence`` becomes the one length, or the range as text; ``longest`` the longest of them.
    """
    own = rows["sequence"] if "sequence" in rows else [None] * len(rows)
    held = rows["sequences"] if "sequences" in rows else [None] * len(rows)
    known = [
        [int(length)] if length == length and length is not None else list(lengths)
        for length, lengths in zip(own, held, strict=True)
    ]
    return rows.assign(
        sequence=[s[0] if len(s) == 1 else f"{s[0]}–{s[-1]}" for s in known],
        longest=[max(s) for s in known],
    )


def columns(
    rows: pd.DataFrame, names: Mapping[str, str], *, digits: int | Mapping[str, int] = 4
) -> pd.DataFrame:
    """The columns in ``names`` that exist and hold anything, renamed, in that order.

    Numbers are rounded to ``digits`` significant digits; integers stay whole.
    """
    present = [name for name in names if name in rows and rows[name].notna().any()]
    frame = rows[present].reset_index(drop=True)
    for name in present:
        if frame[name].dtype.kind == "f":
            own = digits if isinstance(digits, int) else digits[name]
            frame[name] = _rounded(frame[name], own)
    return frame.rename(columns={name: names[name] for name in present})


def _rounded(series: pd.Series[Any], digits: int) -> pd.Series[Any]:
    import pandas as pd

    if (series.dropna() % 1 == 0).all():
        return series.astype(pd.Int64Dtype())  # whole numbers that empty cells made floating
    return series.map(lambda value: float(f"{value:.{digits}g}") if pd.notna(value) else value)


def entries(rows: pd.DataFrame, name: str, keep: str) -> pd.DataFrame:
    """One line per entry of the lists in a column, with the columns ``keep`` of its row."""
    import pandas as pd

    kept = [key for key in keep.split() if key in rows]
    return pd.DataFrame(
        {**{key: row[key] for key in kept}, **entry}
        for _, row in rows.iterrows()
        if isinstance(row[name], list)
        for entry in row[name]
    )


def by(rows: pd.DataFrame, names: Iterable[str]) -> list[tuple[str, pd.DataFrame]]:
    """Groups by the columns that vary; each group's text says only what tells it from others.

    Text speaks for itself; a number is preceded by its column's name.
    """
    varying = [name for name in names if name in rows and rows[name].nunique(dropna=False) > 1]
    if not varying:
        return [("", rows)]
    return [
        (
            ", ".join(
                value if isinstance(value, str) else f"{name} {value}"
                for name, value in zip(varying, values, strict=True)
            ),
            group,
        )
        for values, group in rows.groupby(varying, sort=False, dropna=False)
    ]
