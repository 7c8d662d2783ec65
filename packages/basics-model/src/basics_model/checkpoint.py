"""Checkpoints that a killed save cannot destroy (:mod:`basics_model.files`).

Files are loaded with ``weights_only=True``: a checkpoint can hold tensors, numbers, strings, and
containers of these, and opening one never runs code from it.

A file is a ZIP archive with a CRC-32 of every record, written by ``torch.save``. ``torch.load``
does not compare these checksums; :func:`load_checkpoint` does, so a changed bit is found.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint
from torch.utils.serialization import config

from basics_model.files import refusing_damage, written_whole
from basics_model.sizes import require_integer

_FORMAT = 1
_FIELDS = {"step": int, "model": dict, "optimizer": dict, "rng": dict, "extra": dict}


def rng_state() -> dict[str, Any]:
    """States of torch's default generators: ``cpu``, and ``cuda`` (a list) once CUDA is in use."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Sets torch's default generators to one of :func:`rng_state`, on as many GPUs as there are."""
    torch.set_rng_state(state["cpu"].cpu())
    for device, generator in enumerate(state.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator.cpu(), device)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """State of a training run.

    Attributes:
        step: updates done.
        model: the model's state dict.
        optimizer: the optimizer's state dict.
        rng: random-number generator states, from :func:`rng_state`; this moment's unless given.
        extra: whatever else the run needs, such as its configuration and data position; only
            tensors, numbers, strings, and lists, tuples and dictionaries of these.
    """

    step: int
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    rng: Mapping[str, Any] = field(default_factory=rng_state)
    extra: Mapping[str, Any] = field(default_factory=dict)


def save_checkpoint(path: Path | str, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint so that ``path`` never holds part of one.

    After a failure or a kill, ``path`` is what it was before. A kill may leave ``.NAME.tmp`` beside
    it, which the next save of that name replaces. One process writes a path.

    Raises:
        OSError: the folder is missing or cannot be written, or the disk is full; names the file.
        ValueError: it holds what :func:`load_checkpoint` would refuse, such as a NumPy number, or
            ``step`` is no integer.
    """
    require_integer("step", checkpoint.step, least=0)
    fields = {name: kind(getattr(checkpoint, name)) for name, kind in _FIELDS.items()}
    # Also in a program that has switched checksums off.
    checksums = config.patch({"save.compute_crc32": True})  # type: ignore[attr-defined]
    with written_whole(Path(path)) as temporary:
        with checksums, temporary.open("wb") as file:
            torch.save({"format": _FORMAT} | fields, file)
        if foreign := get_unsafe_globals_in_checkpoint(temporary):
            raise ValueError(
                "a checkpoint must hold tensors, numbers, strings and containers of these, but got "
                f"{', '.join(foreign)}. Convert it, such as a NumPy number by float()."
            )


def load_checkpoint(path: Path | str, *, map_location: torch.device | str = "cpu") -> Checkpoint:
    """Reads a checkpoint, without running any code from it, and verifies its checksums.

    Args:
        path: a file that :func:`save_checkpoint` wrote.
        map_location: the device that tensors are loaded to.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: the file, which is named, is damaged, of another kind or of a newer format.
    """
    with (
        Path(path).open("rb") as file,
        refusing_damage(path, "a checkpoint of save_checkpoint", "Load an earlier checkpoint."),
    ):
        damaged = zipfile.ZipFile(file).testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of its record {damaged} differs")
        file.seek(0)
        content = torch.load(file, map_location=map_location, weights_only=True)
    return _as_checkpoint(path, content)


def _as_checkpoint(path: Path | str, content: Any) -> Checkpoint:
    """Checks the structure of a loaded file before anything relies on it."""
    version = content.pop("format", None) if isinstance(content, dict) else type(content).__name__
    if version != _FORMAT:
        raise ValueError(
            f"{path} must be a checkpoint of format {_FORMAT}, but got {version!r}. Load it with "
            "the version of basics-model that wrote it."
        )
    found = {name: type(value) for name, value in content.items()}
    if found != _FIELDS:
        expected, got = (
            ", ".join(f"{name} ({kind.__name__})" for name, kind in each.items())
            for each in (_FIELDS, found)
        )
        raise ValueError(
            f"{path} must be a checkpoint that holds {expected}, but got {got}. Load another."
        )
    return Checkpoint(**content)
