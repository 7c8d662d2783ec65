"""The display of a training run: a live bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def say(console: Console, text: str) -> None:
    """Prints text as it is: no wrapping, no markup."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class Report:
    """Loss and speed as they come: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self.console, self.total = console, total
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[summary]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("training", total=total, completed=done, summary="")
        self.start = time.perf_counter()

    def __enter__(self) -> "Report":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def speed(self, tokens: int) -> float:
        """Tokens per second since the last call; ``tokens`` counts those of all ranks."""
        before, self.start = self.start, time.perf_counter()
        return tokens / (self.start - before)

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the updates since the last report.

        Args:
            step: updates so far.
            values: as :class:`train_metrics.MetricsLogger` takes them: the loss, tokens per second,
                the learning rate, the norm of the gradients if they are clipped, and MFU if the
                peak is known.
        """
        summary = (
            f"loss {values['loss']:.3f}  {values['tokens_per_second']:,.0f} tokens/s  "
            f"lr {values['learning_rate']:.1e}"
        )
        if "gradient_norm" in values:
            summary += f"  grad {values['gradient_norm']:.2f}"
        if "mfu" in values:
            summary += f"  MFU {100 * values['mfu']:.0f} %"
        self.bar.update(self.task, completed=step, summary=summary)
        if not self.console.is_terminal:
            self.line(f"step {step}/{self.total}: {summary}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keeps what happens inside out of the tokens per second."""
        before = time.perf_counter()
        yield
        self.start += time.perf_counter() - before

    def line(self, text: str) -> None:
        """Prints a line above the bar."""
        say(self.console, text)
