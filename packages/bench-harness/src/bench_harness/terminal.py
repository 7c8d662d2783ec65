"""Texts that the command line prints: clean at 80 columns, with and without colour.

While a run goes on, that is one line per finished case, and on a terminal a live bar. Beside the
bar stand the words of the running case, one line for each rank that says something.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table as Grid
from rich.text import Text

from bench_harness import environment
from bench_harness.core import Case, plural
from bench_harness.process import Outcome
from bench_harness.runner import Planned, ended_variants

if TYPE_CHECKING:
    import pandas as pd

    from bench_harness.compare import Comparison, Comparisons
    from bench_harness.core import Table
    from bench_harness.report import Report

#: How :func:`bench_harness.ranks.launch` begins the words of a rank.
_RANK = re.compile(r"rank (\d+): ")
#: Seconds that a run takes around its cases: for torch, which is imported once, and the report.
AROUND_S = 8.0
_NUMBER = re.compile(r"-?([\d.]+(e[+-]?\d+)?|inf|nan)")
STYLES = {"ok": "green", "oom": "yellow", "skipped": "cyan", "timeout": "red", "error": "red"}


def duration(seconds: float) -> str:
    """Seconds as people say them: 3.2 s, 4 min 05 s, 2 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


class RemainingTime:
    """Estimates the time left, from how long cases took before, or cases like them in this run."""

    def __init__(self, planned: Sequence[Planned]) -> None:
        self._left = {item.case.key: item for item in planned if not item.finished}
        self._measured: dict[str, list[float]] = {}

    def finished(self, case: Case, seconds: float) -> None:
        """Takes a finished case out of what is left, and learns from its seconds."""
        self._left.pop(case.key, None)
        self._measured.setdefault(case.experiment, []).append(seconds)

    def seconds(self) -> float | None:
        """Seconds left; None while nothing is known. A case nothing is known about counts as a
        typical one of its experiment, or of the run."""
        guesses = [self._guess(item) for item in self._left.values()]
        known = [guess for guess in guesses if guess is not None]
        known += [second for measured in self._measured.values() for second in measured]
        if not guesses:
            return 0.0
        if not known:
            return None
        typical = statistics.fmean(known)
        return sum(typical if guess is None else guess for guess in guesses)

    def expected(self, case: Case) -> float | None:
        """Seconds that one case probably takes; None while nothing is known."""
        item = self._left.get(case.key)
        return None if item is None else self._guess(item)

    def _guess(self, item: Planned) -> float | None:
        measured = self._measured.get(item.case.experiment)
        if item.seconds is None and measured:
            return statistics.fmean(measured)
        return item.seconds


class ConsoleReporter:
    """Shows a run on a console; implements :class:`bench_harness.runner.Reporter`.

    Args:
        console: with a terminal behind it, a live bar is drawn below the lines.
        planned: the cases of the run.
        preset: that the cases are from, if any: reasons why something was not measured name it.
    """

    def __init__(
        self, console: Console, planned: Sequence[Planned], preset: str | None = None
    ) -> None:
        self._console = console
        self._preset = preset
        self._total = sum(not item.finished for item in planned)
        self._done = 0
        self._remaining = RemainingTime(planned)
        self._begin = self._case_begin = time.monotonic()
        self._expected: float | None = None
        self._ranks: dict[int, str] = {}
        self._live = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[left]}", style="bold"),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._live.add_task("starting", total=self._total, left="")

    def __enter__(self) -> ConsoleReporter:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:  # rich 13 ends a log that never had a bar with an empty line
            self._live.stop()

    def case_started(self, case: Case) -> None:
        """Names the running case in the bar."""
        self._ranks.clear()
        self._case_begin, self._expected = time.monotonic(), self._remaining.expected(case)
        self._live.update(self._task, description=self._fit(case.label), left=self._left())

    def case_progress(self, text: str) -> None:
        """Shows the running case's own words beside the bar, those of its ranks one by one."""
        said = _RANK.match(text)
        if said is None:
            self._ranks.clear()
            lines = [text]
        else:
            self._ranks[int(said[1])] = text
            lines = [self._ranks[rank] for rank in sorted(self._ranks)]
        spent = time.monotonic() - self._case_begin
        done = min(0.99, spent / self._expected) if self._expected else 0.0
        self._live.update(
            self._task,
            description="\n".join(map(self._fit, lines)),
            completed=self._done + done,
            left=self._left(),
        )

    def case_finished(self, case: Case, outcome: Outcome) -> None:
        """Prints the case's line: place, status, time and name; below it why it, or a variant of
        it, was not measured."""
        self._done, self._expected = self._done + 1, None
        self._remaining.finished(case, outcome.seconds)
        counter = f"[{self._done:>{len(str(self._total))}}/{self._total}]"
        line = Text(f"{counter} ")
        line.append(f"{outcome.status:<7}", style=STYLES[outcome.status])
        line.append(f" {duration(outcome.seconds):>10}  {case.label}")
        ended = ended_variants(outcome)
        if ended:
            line.append(f" without {plural(len(ended), 'variant')}", style="yellow")
        self._print(line)
        origin = "" if self._preset is None else f"preset {self._preset}: {case.experiment}: "
        for text in [outcome.error] if outcome.error is not None else ended:
            self._print(Text(f"{'':{len(counter)}} {origin}{text}", style="dim"))
        self._live.update(self._task, completed=self._done, left=self._left())

    def _print(self, line: Text) -> None:
        # Longer than the terminal is cut there, but kept whole in a log file.
        cut = self._console.is_terminal
        self._live.console.print(
            line, no_wrap=True, overflow="ellipsis" if cut else "ignore", crop=cut
        )

    def _left(self) -> str:
        elapsed = f"{duration(time.monotonic() - self._begin)} elapsed"
        left = self._remaining.seconds()
        if left is not None and self._expected is not None:  # the running case is among them
            left = max(0.0, left - min(self._expected, time.monotonic() - self._case_begin))
        return elapsed if left is None else f"{elapsed}, about {duration(left)} left"

    def _fit(self, text: str) -> str:
        room = max(10, self._console.width - 50)
        return text if len(text) <= room else text[: room - 1] + "…"


_VERDICTS = {"faster": "green", "slower": "red", "same": "", "cannot tell": "yellow"}


def start(planned: Sequence[Planned], folder: Path, console: Console) -> None:
    """One line before a run: how much there is to do and where it goes."""
    left = sum(not item.finished for item in planned)
    every = plural(len(planned), "case")
    text = every if left == len(planned) else f"{left} of {every} left"
    if left and (about := _about(planned)):
        text += f", {about}"
    line(console, f"{text}, into {folder}")


def interrupted(planned: Sequence[Planned], folder: Path, console: Console) -> None:
    """How to go on after Ctrl-C."""
    done = sum(item.finished for item in planned)
    line(console, f"Stopped: {done} of {plural(len(planned), 'case')} kept in {folder}.")
    line(console, "The same command goes on with the rest.")


def plan(
    planned: Sequence[Planned], folder: Path, console: Console, preset: str | None = None
) -> None:
    """The cases of a dry run; reasons why some will be skipped name the preset, if there is one."""
    grid = _grid("case", "status", "expected")
    grid.columns[0].overflow = "fold"
    left = [item for item in planned if not item.finished and item.missing is None]
    for item in planned:
        status = "finished" if item.finished else "to run" if item.missing is None else "skipped"
        known = "unknown" if item.seconds is None else duration(item.seconds)
        expected = known if status == "to run" else ""
        grid.add_row(Text(item.case.label), status, expected)
    console.print(grid)
    reasons = [(i.case.experiment, i.missing) for i in planned if i.missing is not None]
    for experiment, reason in dict.fromkeys(reasons):
        origin = "" if preset is None else f"preset {preset}: {experiment}: "
        line(console, f"{origin}skipped: {reason}", style="cyan")
    limits = sum(item.case.timeout_s for item in left)
    about = _about(left) or f"at most {duration(limits)} by their limits"
    line(console, f"{len(left)} of {plural(len(planned), 'case')} to run, {about}, into {folder}")


def _about(planned: Sequence[Planned]) -> str:
    """How long a run takes, and how that was calculated; empty where nothing is known."""
    estimate, busy = RemainingTime(planned).seconds(), environment.busy()
    if estimate is None:
        return ""
    estimate += AROUND_S * busy * any(not item.finished for item in planned)
    calculated = any(item.calculated and item.seconds and not item.finished for item in planned)
    why = (" by calculation" + " (the CPU is busy)" * (busy > 1.5)) * calculated
    return f"about {duration(estimate)}{why}"


def summary(report: Report, page: Path, console: Console) -> None:
    """One line per experiment, what failed, where the page is; last, what matters most."""
    names = ("ok", "oom", "skipped", "timeout", "error")
    if len(report.sections) > 1 or set(report.counts) != {"ok"}:
        _counts(report, names, console)
    for note in report.notes:
        line(console, note, style="yellow")
    for section in report.sections:
        for case in section.cases:
            if case["error"] is not None:
                # Of a case that went on, the error is that of a variant which was left out.
                status = "skipped" if case["status"] == "ok" else case["status"]
                text = Text(f"{status:<7} ", style=STYLES[status])
                text.append(f"{case['label']}: {case['error']}", style="default")
                console.print(text)
        for problem in section.problems:
            line(console, f"{section.name} could not be shown: {problem}", style="red")
    console.print(Text(f"Report: {page}"), soft_wrap=True)
    if report.headlines:
        line(console, report.headlines[0])


def _counts(report: Report, names: Sequence[str], console: Console) -> None:
    """How the cases of each experiment ended."""
    used = [name for name in names if report.counts[name] or name == "ok"]
    grid = _grid("experiment", "cases", *used, "time", numbers_from=1)
    for section in report.sections:
        counts = [Text(str(section.count(name) or ""), style=STYLES[name]) for name in used]
        grid.add_row(section.name, str(len(section.cases)), *counts, duration(section.seconds))
    console.print(grid)


def tables(found: Iterable[Table], console: Console) -> None:
    """Tables with every column."""
    for table in found:
        for grid in _fitting(table, console):
            console.print(grid)


def _fitting(table: Table, console: Console) -> list[Grid]:
    """A table as grids that fit: columns that are equal in all rows stand once, in the caption.

    Columns that do not fit beside the others go into a grid below, behind the first column.
    """
    from bench_harness.display.cells import cell, readable, split, with_intervals

    whole = with_intervals(readable(table.frame))
    constant, frame = split(whole, wide=0 if _width(whole, cell) > console.width else None)
    if frame.columns.empty:  # all rows are alike
        constant, frame = {}, whole
    if whole.empty:
        return []
    columns = {str(name): [cell(value) for value in frame[name]] for name in frame.columns}
    first, *rest = columns
    parts: list[list[str]] = [[first]]
    for name in rest:
        if sum(_column_width(each, columns[each]) for each in [*parts[-1], name]) > console.width:
            parts.append([first])
        parts[-1].append(name)
    grids = []
    for number, names in enumerate(parts):
        title = table.title if number == 0 else None
        grid = Grid(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for name in names:
            values = columns[name]
            numeric = all(not value or _NUMBER.fullmatch(value) for value in values)
            width = _column_width(name, values) - 3
            grid.add_column(
                name, justify="right" if numeric else "left", width=width, overflow="fold"
            )
        for row in zip(*(columns[name] for name in names), strict=True):
            grid.add_row(*map(Text, row))
        grids.append(grid)
    caption = ", ".join(f"{name} {text}" for name, text in constant.items())
    grids[-1].caption, grids[-1].caption_justify = caption or None, "left"
    return grids


def _column_width(name: str, values: Sequence[str]) -> int:
    """Characters of a column with its frame; its heading may break between words."""
    return max(map(cell_len, [*name.split(), *values])) + 3


def _width(frame: pd.DataFrame, cell: Callable[[Any], str]) -> int:
    return sum(_column_width(str(name), [cell(v) for v in frame[name]]) for name in frame.columns)


def comparisons(found: Comparisons, console: Console, failures: Sequence[str] | None) -> None:
    """The verdict for every row of two runs, and why the gate closes; None if there is no gate."""
    from bench_harness.compare import cells_of

    line(console, f"A: {found.runs[0]}")
    line(console, f"B: {found.runs[1]}")
    if found.environment:
        text = f"The environments differ: {'; '.join(found.environment)}"
        line(console, text, style="yellow")
    for name, cases in (("A", found.only_a), ("B", found.only_b)):
        for case in cases:
            line(console, f"Only {name} has {case}", style="yellow")
    shown = [cells_of(each) for each in found.rows]
    widths = [max(map(cell_len, column)) for column in zip(*shown, strict=True)]
    widths[0] = min(widths[0], max(console.width - sum(widths[1:]) - 9, 12))
    headings = [f"{each.experiment}: {each.label}" for each in found.rows]
    for heading in dict.fromkeys(headings):
        console.print()
        console.print(Text(heading, style="bold"), soft_wrap=True)
        console.print("─" * console.width)
        for each, cells, own in zip(found.rows, shown, headings, strict=True):
            if own == heading:
                _comparison(cells, widths, _VERDICTS[each.verdict.direction], console)
    console.print()
    _why(found, console)
    counts: dict[str, int] = {}
    for each in found.rows:
        counts[str(each.verdict)] = counts.get(str(each.verdict), 0) + 1
    line(console, ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    if failures is not None:
        text = f"FAIL, {', '.join(failures)}" if failures else "passed"
        line(console, f"Gate: {text}", style="red" if failures else "green")


def _comparison(cells: Sequence[str], widths: Sequence[int], style: str, console: Console) -> None:
    """One line for a row; a name that is too long has a line of its own above it."""
    name, times, difference, ends, verdict = cells
    if cell_len(name) > widths[0]:
        console.print(Text(f" {name}"), soft_wrap=True)
        name = ""
    text = Text(f" {name:<{widths[0]}}  {times:>{widths[1]}}  ")
    text.append(f"{difference:>{widths[2]}} {ends:<{widths[3]}}  ")
    text.append(verdict, style=style)
    console.print(text, soft_wrap=True)


def _why(found: Comparisons, console: Console) -> None:
    """The reasons, each once with the rows that it holds for, and what else changed."""
    reasons: dict[str, list[Comparison]] = {}
    for each in found.rows:
        for text in each.verdict.reasons:
            reasons.setdefault(text, []).append(each)
    for text, rows in reasons.items():
        names = dict.fromkeys(each.variant or each.label for each in rows)
        shown = ", ".join(list(names)[:2]) + f" and {len(names) - 2} more" * (len(names) > 2)
        line(console, f"Not sure: {text} ({shown})", style="yellow")
    for each in found.rows:
        if each.changed:
            line(console, f"Changed: {each.variant or each.label}: {'; '.join(each.changed)}")
    for text in found.kernels:
        line(console, f"Changed: {text}")
    needed = [v.samples_needed for v in (each.verdict for each in found.rows) if v.samples_needed]
    if needed:
        more = f"{min(needed)} to {max(needed)}" if min(needed) < max(needed) else f"{needed[0]}"
        line(console, f"About {more} samples in each run would probably tell the rest.")


def _grid(*columns: str, numbers_from: int | None = None) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, name in enumerate(columns):
        right = numbers_from is not None and position >= numbers_from
        grid.add_column(name, justify="right" if right else "left")
    return grid


def line(console: Console, text: str, *, style: str = "") -> None:
    """One line, wrapped on a terminal and whole in a file."""
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)
