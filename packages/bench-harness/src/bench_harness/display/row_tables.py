"""From result rows to displayed tables: the parts that every experiment shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

#: Displayed name of the statistics that ``stats.with_summary`` adds.
STATISTICS = {
    "median_ms": "median (ms)",
    "mean_ms": "mean (ms)",
    "std_ms": "std (ms)",
    "ci_low_ms": "95 % low (ms)",
    "ci_high_ms": "95 % high (ms)",
    "n": "samples (count)",
    "outliers": "outliers (count)",
    "unstable": "unstable",
    "too_short": "too short",
}


def finished(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that hold a measurement."""
    return rows[rows["status"] == "ok"] if "status" in rows else rows


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


def columns(rows: pd.DataFrame, names: Mapping[str, str], *, digits: int = 4) -> pd.DataFrame:
    """The columns in ``names`` that exist and hold anything, renamed, in that order.

    Numbers are rounded to ``digits`` significant digits; integers stay whole.
    """
    present = [name for name in names if name in rows and rows[name].notna().any()]
    frame = rows[present].reset_index(drop=True)
    for name in present:
        if frame[name].dtype.kind == "f":
            frame[name] = _rounded(frame[name], digits)
    return frame.rename(columns={name: names[name] for name in present})


def _rounded(series: pd.Series[Any], digits: int) -> pd.Series[Any]:
    import pandas as pd

    if (series.dropna() % 1 == 0).all():
        return series.astype(pd.Int64Dtype())  # whole numbers that empty cells made floating
    return series.map(lambda value: float(f"{value:.{digits}g}") if pd.notna(value) else value)


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


def log_axes(plot: Axes, *, x: str, y: str, x_base: int = 2, y_log: bool = True) -> None:
    """Logarithmic axes with the given labels and plain numbers at the ticks.

    Args:
        x_base: of the ticks along x.
        y_log: False keeps y linear, for values that may be 0 or less.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    plain = FuncFormatter(lambda value, _: f"{value:g}")
    plot.set_xlabel(x)
    plot.set_ylabel(y)
    plot.set_xscale("log", base=x_base)
    plot.xaxis.set_major_formatter(plain)
    if y_log:
        plot.set_yscale("log")
        low, high = plot.get_ylim()
        # Within a decade or two, powers of ten alone are too few to read a value.
        steps = (1.0, 2.0, 5.0) if high < 300 * low else (1.0,)
        plot.yaxis.set_major_locator(LogLocator(subs=steps))
        plot.yaxis.set_major_formatter(plain)
        plot.yaxis.set_minor_locator(NullLocator())
