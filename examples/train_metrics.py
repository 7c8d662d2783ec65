"""Metrics of a training run: JSON lines, TensorBoard's format, or any logger with two methods."""

import importlib
import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

#: TFLOP/s of dense bf16 matrix products, from NVIDIA's data sheets, by the name that torch gives.
PEAK_TFLOPS = {
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
}


def known_peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak that MFU is a part of; None for CPUs, other GPUs, and fp32."""
    if device.type != "cuda" or dtype is not torch.bfloat16:
        return None
    return PEAK_TFLOPS.get(torch.cuda.get_device_name(device))


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
    except Exception as error:  # noqa: BLE001 - whatever a module raises while it is imported
        raise ValueError(
            f"--logger must be MODULE:FUNCTION of an installed module, such as wandb:init, but got "
            f"{name} ({error}). Install it, or leave --logger out."
        ) from None
    return found


def open_logger(name: str) -> MetricsLogger:
    """Calls the function that ``MODULE:FUNCTION`` names for its logger.

    Raises:
        ValueError: there is no such function, it raises, or what it returns is no logger.
    """
    make = find_logger(name)
    try:
        logger = make()
    except Exception as error:
        raise ValueError(
            f"--logger must name a function that needs no arguments, but {name} raised "
            f"{type(error).__name__}: {error}. Correct it, or leave --logger out."
        ) from error
    if not isinstance(logger, MetricsLogger):
        raise ValueError(
            "--logger must name a function that returns an object with log(data, step) and "
            f"finish(), but {name} returned a {type(logger).__name__}. Wrap it in such a class."
        )
    return logger


class JsonLines:
    """One JSON object per line: the update's number and its values.

    A run that begins anew moves an earlier file to ``NAME.old``, or to ``NAME.old.2`` and so on, so
    that every run's metrics stay. One that continues drops lines of
    updates after ``first_step``, which a run that was killed left behind its last checkpoint, and a
    last line that was cut off.

    Args:
        path: the file.
        first_step: the update that the run continues from.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: it holds something else than metrics; it is left as it is.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        found = _records(path)
        if found and first_step == 0:
            path.rename(_unused(path.with_name(path.name + ".old")))
        elif found:
            rewritten = path.with_name(f".{path.name}.tmp")
            rewritten.write_text("".join(line for step, line in found if step <= first_step))
            rewritten.replace(path)
        elif path.is_file():  # a first line that was cut off
            path.write_text("")
        self._path, self._file = path, path.open("a")

    def log(self, data: dict[str, float], step: int) -> None:
        """Appends a line and hands it to the operating system at once.

        Raises:
            OSError: it cannot be written; the message names the file.
        """
        try:
            self._file.write(json.dumps({"step": step, **data}) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def finish(self) -> None:
        """Closes the file."""
        self._file.close()


def _unused(path: Path) -> Path:
    """The path, or with a number after it where there is such a file already."""
    numbered = (path.with_name(f"{path.name}.{number}") for number in itertools.count(2))
    return path if not path.exists() else next(each for each in numbered if not each.exists())


_BEGIN = '{"step": '


def _records(path: Path) -> list[tuple[int, str]]:
    """The updates and lines of a file of :class:`JsonLines`, without a last line that was cut off.

    Raises:
        ValueError: a line is something else.
    """
    lines = path.read_bytes().decode(errors="replace").splitlines(True) if path.is_file() else []
    last = lines[-1] if lines else "\n"
    if not last.endswith("\n") and last[: len(_BEGIN)] == _BEGIN[: len(last)]:
        lines.pop()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(step, int):
            raise ValueError(
                f"--metrics must name a new file, or one with metrics of a run, but got {path}, "
                f"whose line {number} is no JSON object with a step. Use another file."
            )
        found.append((step, line))
    return found


def check_tensorboard() -> None:
    """Looks for the package that :class:`TensorBoard` writes with.

    Raises:
        ValueError: it is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError(
            "the package tensorboard must be installed for --tensorboard, but got none here. Give "
            "pip install tensorboard."
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
