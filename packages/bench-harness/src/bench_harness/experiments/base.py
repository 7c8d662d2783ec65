"""What an experiment is: its options, its cases, how one case runs, and what is shown of the rows.

An experiment's module must import without torch, pandas or matplotlib: the command line imports
every experiment to list it. Import them inside ``run``, ``tables`` and ``figures``.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness.case import Case, Row, plural

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as MatplotlibFigure


class CaseSkipped(Exception):  # noqa: N818 - an outcome, not an error
    """Raised by :meth:`Experiment.run` when a case cannot run here; its text is the reason."""


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
class Figure:
    """A picture of the report.

    Attributes:
        name: file name without suffix, unique within the experiment.
        title: heading.
        figure: a matplotlib figure made with ``matplotlib.figure.Figure`` (never pyplot, which
            keeps global state and may want a display).
        note: one or two sentences under the picture.
        folded: whether the page shows the picture only on request, beside the tables.
    """

    name: str
    title: str
    figure: MatplotlibFigure
    note: str = ""
    folded: bool = False

    @property
    def wide(self) -> bool:
        """Whether the picture needs the whole width of a page."""
        return self.figure.get_figwidth() > 6.5

    @functools.cached_property
    def svg(self) -> bytes:
        """The picture as SVG, which is drawn once for its file and the page."""
        from bench_harness.report.plots import svg_bytes

        return svg_bytes(self.figure)


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


class Experiment(abc.ABC):
    """One experiment: a name on the command line and a section of the report.

    Subclasses set three class attributes and implement four methods.

    Attributes:
        name: the registered name, which is also the command.
        summary: one line for ``--help`` and the report.
        guide: what is measured and how to read it, in a few sentences, for ``--help``.
        examples: command lines that ``--help`` shows, from the experiment's name on.
        Options: a frozen keyword-only dataclass whose fields, declared with :func:`option`, are
            the options of the command and the keys of a preset's table. Field types: what msgspec
            converts, as ``bool``, ``int``, ``str | None`` or ``tuple[float, ...]`` (written with
            commas on the command line, as a list in a preset), and ``dict`` for tables of a
            preset, in a union with ``str`` if the command line may give one by name. Its
            ``__post_init__`` may raise ``ValueError`` for values that do not fit together.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    guide: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()
    Options: ClassVar[type[Any]]

    @abc.abstractmethod
    def cases(self, **options: Any) -> list[Case]:
        """The cases that these options ask for; ``options`` are the fields of ``Options``.

        Pure and cheap: no torch, no device. Variants that are compared belong in one case.
        """

    @abc.abstractmethod
    def run(self, case: Case, progress: Callable[[str], None]) -> list[Row]:
        """Measures one case, in a process of its own, and returns one row per variant.

        A row holds the measurement (``variant``, ``samples_ms``, ...); the runner adds what
        identifies it. ``progress`` shows one line of text while the case runs.

        Raises:
            CaseSkipped: the case cannot run on this machine.
            torch.OutOfMemoryError: recorded as status "oom", a result of its own.
        """

    def missing(self, case: Case) -> str | None:
        """What this machine lacks for a case, looked up without torch; None if nothing is known.

        A dry run shows such a case as skipped. By default: GPUs, and Nsight Systems.
        """
        from bench_harness.environment import gpu_count
        from bench_harness.traces import nsight

        config = case.config
        if config.get("device") == "cuda":
            shared = config.get("nnodes", 1)
            wanted = 1 if config.get("alone") else config.get("world_size", 1) // shared
            if gpu_count() < wanted:
                return f"needs {plural(wanted, 'CUDA device')}, but found {gpu_count()}"
        if config.get("nsight") or config.get("tool") == "nsight":
            try:
                nsight.nsys()
            except nsight.NsightMissingError as error:
                return str(error)
        return None

    @abc.abstractmethod
    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """The tables of this experiment's rows.

        ``rows`` has one line per row of every status, measurement and configuration flattened
        into columns. Columns may be missing or empty when no case of a kind succeeded.
        """

    @abc.abstractmethod
    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """The pictures of this experiment's rows; see :meth:`tables`."""
