"""Types that all parts of the package share (cases, rows, tables, figures); imports none of them.

A case is one measurement, defined completely by its configuration. The configuration is what makes
two measurements the same measurement, so it is also the identity used for resuming: a run folder
that already holds a finished row for a case's key does not measure that case again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as MatplotlibFigure

#: Anything :mod:`json` can write. Left open because each experiment knows its own values.
JsonValue: TypeAlias = Any

#: What defines a measurement, by name.
Config: TypeAlias = Mapping[str, JsonValue]

#: Shows one line of text while a case runs.
Progress: TypeAlias = Callable[[str], None]

#: One line of results: a flat mapping, except for raw samples, which stay lists.
Row: TypeAlias = dict[str, JsonValue]

#: Relative difference below which two times count as the same, and beyond which a gate closes.
TOLERANCE = 0.05


class CaseSkipped(Exception):  # noqa: N818 - an outcome, not an error
    """Raised by ``Experiment.run`` when a case cannot run here; its text is the reason."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement: runs in its own process and gives one row per compared variant.

    Attributes:
        experiment: the experiment's registered name.
        config: everything that defines the measurement, as JSON. The entry ``"label"``, if
            given, is only its name and takes no part in the identity.
        timeout_s: seconds after which the case's processes are killed.
    """

    experiment: str
    config: Config
    timeout_s: float = 300.0

    @property
    def label(self) -> str:
        """A short name for people: ``config["label"]``, else ``key=value`` of every entry."""
        given = self.config.get("label")
        if given is not None:
            return str(given)
        return " ".join([self.experiment, *(f"{k}={v}" for k, v in self.config.items())])

    @property
    def key(self) -> str:
        """The identity: 16 hexadecimal digits of SHA-256 over experiment and configuration.

        Raises:
            TypeError, ValueError: the configuration is not JSON (NaN and infinity are not).
        """
        config = {name: value for name, value in self.config.items() if name != "label"}
        canonical = json.dumps(
            [self.experiment, config], sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Table:
    """A table of the report.

    Attributes:
        title: heading; also gives the file name of the CSV and Markdown copies.
        frame: one line per displayed row, columns already in display order.
        note: one or two sentences under the table: units, how to read it, what is flagged.
    """

    title: str
    frame: pd.DataFrame
    note: str = ""


@dataclass(frozen=True)
class Bar:
    """One bar of a picture.

    Attributes:
        parts: lengths by name, one behind the other.
        low, high: 95 % interval of their sum; None where there is none.
        steady: whether the sum may be quoted.
    """

    name: str
    parts: Mapping[str, float]
    low: float | None = None
    high: float | None = None
    steady: bool = True


@dataclass(frozen=True, eq=False)
class Bars:
    """Horizontal bars, which a page shows as text with boxes beside it, and a file as a drawing.

    Attributes:
        unit: of the lengths.
        panels: bars by heading; each panel has its own scale.
    """

    unit: str
    panels: Mapping[str, Sequence[Bar]]


class Timelines(dict[str, Row]):
    """Recorded steps by variant, which a page shows on one time axis on a canvas. Each holds
    ``drawn``, the position of the rank to show first, and ``ranks``, of which each is a
    :func:`bench_harness.traces.timeline.timeline` that begins at ``offset_ns``."""


@dataclass(frozen=True)
class Figure:
    """A picture of the report.

    Attributes:
        name: file name without suffix, unique within the experiment.
        title: heading.
        figure: bars, timelines, or a matplotlib figure made with ``matplotlib.figure.Figure``
            (never pyplot, which keeps global state and may want a display).
        note: one or two sentences under the picture.
        folded: whether the page shows the picture only on request, beside the tables.
    """

    name: str
    title: str
    figure: Bars | Timelines | MatplotlibFigure
    note: str = ""
    folded: bool = False

    @property
    def is_bars(self) -> bool:
        """Whether a page shows it as text and boxes."""
        return isinstance(self.figure, Bars)

    @property
    def is_timelines(self) -> bool:
        """Whether a page shows it on a canvas."""
        return isinstance(self.figure, Timelines)

    @property
    def wide(self) -> bool:
        """Whether the picture needs the whole width of a page."""
        return not isinstance(self.figure, (Bars, Timelines)) and self.figure.get_figwidth() > 6.5


@dataclass(frozen=True)
class Column:
    """A column of an experiment's tables and the axis of its pictures, declared once.

    Attributes:
        key: its name in rows.
        title, unit: what its heading says.
        digits: significant digits of numbers that are not whole.
    """

    key: str
    title: str
    unit: str = ""
    digits: int = 4

    @property
    def heading(self) -> str:
        """The title with its unit, as tables, CSV files and published pages name the column."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def option(
    default: Any,
    help: str,  # noqa: A002 - the field's own word for it
    *,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """Declares one field of an experiment's ``Options``.

    Args:
        default: the value when neither the command line nor a preset gives one.
        help: one sentence for ``--help``.
        choices: the valid names, for a ``str`` or ``tuple[str, ...]`` field.
    """
    return field(default=default, metadata={"help": help, "choices": choices})


def plural(count: int, what: str) -> str:
    """A count with its noun: 1 case, 2 cases."""
    return f"{count} {what}" + "s" * (count != 1)


def in_one_line(error: BaseException) -> str:
    """An error's class and the first line of its message."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0].removesuffix(":")


def registered(group: str) -> dict[str, str]:
    """Names and ``package.module:attribute`` targets of all installed entry points of a group."""
    return _registered(group, tuple(sys.path))


@functools.lru_cache(maxsize=8)
def _registered(group: str, path: tuple[str, ...]) -> dict[str, str]:
    """What is installed on ``path``, remembered: to read it opens a file of every package."""
    return {entry.name: entry.value for entry in importlib.metadata.entry_points(group=group)}
