"""Metrics of a training run: JSON lines, TensorBoard's format, or any logger with two methods."""

import importlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class MetricsLogger(Protocol):
    """What takes the metrics of a run: the two methods that a run of Weights & Biases has too."""

    def log(self, data: dict[str, float], step: int) -> None:
        """Takes the values that were measured at one update; a step may come twice."""

    def finish(self) -> None:
        """Writes what is still held back."""


def find_logger(name: str) -> Callable[[], object]:
    """The function that ``MODULE:FUNCTION`` names, such as ``wandb:init``.

    Raises:
        ValueError: there is no such function.
    """
    module, _, function = name.partition(":")
    try:
        found: Callable[[], object] = getattr(importlib.import_module(module), function)
    except (ImportError, ValueError, AttributeError) as error:
        raise ValueError(
            f"--logger must be MODULE:FUNCTION of an installed module, such as wandb:init, but got "
            f"{name} ({error}). Install it, or leave --logger out"
        ) from None
    return found


def open_logger(name: str) -> MetricsLogger:
    """Calls the function that ``MODULE:FUNCTION`` names for its logger.

    Raises:
        ValueError: there is no such function, or what it returns is no logger.
    """
    logger = find_logger(name)()
    if not isinstance(logger, MetricsLogger):
        raise ValueError(
            "--logger must name a function that returns an object with log(data, step) and "
            f"finish(), but {name} returned a {type(logger).__name__}. Wrap it in such a class"
        )
    return logger


class JsonLines:
    """One JSON object per line: the update's number and its values.

    Args:
        path: the file. Lines of updates after ``first_step``, which a run that was killed left
            behind its last checkpoint, are dropped, and so is a line that was cut off.
        first_step: the update that the run continues from.

    Raises:
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict) and record.get("step", 0) <= first_step:
                kept.append(line + "\n")
        path.write_text("".join(kept))
        self._file = path.open("a")

    def log(self, data: dict[str, float], step: int) -> None:
        """Appends a line and hands it to the operating system at once."""
        self._file.write(json.dumps({"step": step, **data}) + "\n")
        self._file.flush()

    def finish(self) -> None:
        """Closes the file."""
        self._file.close()


def check_tensorboard() -> None:
    """Looks for the package that :class:`TensorBoard` writes with.

    Raises:
        ValueError: it is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "--tensorboard needs the package tensorboard, but it is not installed; "
            "pip install tensorboard"
        )


class TensorBoard:
    """Scalars in the format that ``tensorboard --logdir FOLDER`` shows.

    Args:
        folder: where event files go.
        first_step: the update that the run continues from; points after it are hidden.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def log(self, data: dict[str, float], step: int) -> None:
        """Adds one point to each value's curve."""
        for name, value in data.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Writes what is still held back."""
        self._writer.close()
