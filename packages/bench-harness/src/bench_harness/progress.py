"""What a run shows while it goes on: one line per finished case, and on a terminal a live bar.

Beside the bar stand the words of the running case, one line for each rank that says something.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from bench_harness.core import Case, plural
from bench_harness.process import Outcome
from bench_harness.runner import Planned, ended_variants

#: How :func:`bench_harness.ranks.launch` begins the words of a rank.
_RANK = re.compile(r"rank (\d+): ")
STYLES = {
    "ok": "green",
    "oom": "yellow",
    "skipped": "cyan",
    "timeout": "red",
    "error": "red",
}


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
        self._live.update(
            self._task,
            description="\n".join(map(self._fit, lines)),
            completed=self._done + self._share(),
            left=self._left(),
        )

    def _share(self) -> float:
        """The share of the running case that is done, by the time that it probably takes."""
        spent = time.monotonic() - self._case_begin
        return min(0.99, spent / self._expected) if self._expected else 0.0

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
