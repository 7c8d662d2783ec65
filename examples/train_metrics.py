"""Metrics of a training run in files: JSON lines, and TensorBoard's format."""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class MetricsWriter(Protocol):
    """What takes the metrics of a run; any logger fits behind these two methods."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the values that were measured at one update."""

    def close(self) -> None:
        """Writes what is still held back."""


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

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Appends a line and hands it to the operating system at once."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
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

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point to each value's curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes what is still held back."""
        self._writer.close()
