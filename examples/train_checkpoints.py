"""Files of ``train_lm.py``: which checkpoint a run continues, writing checkpoints, exporting."""

import fcntl
import importlib.util
import os
import re
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor
from train_settings import Settings

from basics_model import (
    Checkpoint,
    ModelConfig,
    TransformerLM,
    load_checkpoint,
    save_checkpoint,
    save_safetensors,
)

_NAME = re.compile(r"step-(\d+)\.pt")


def checkpoint_path(folder: Path | str, step: int) -> Path:
    """Name of the checkpoint after ``step`` updates: ``folder/step-000000123.pt``."""
    return Path(folder) / f"step-{step:09d}.pt"


def list_checkpoints(folder: Path | str) -> list[Path]:
    """Complete checkpoints named by :func:`checkpoint_path`, oldest first; [] without a folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    steps = {
        int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))
    }
    return [steps[step] for step in sorted(steps)]


def prune_checkpoints(folder: Path | str, keep: int) -> None:
    """Deletes all but the newest ``keep`` (at least 1) checkpoints of a folder."""
    if keep < 1:
        raise ValueError(f"keep must be at least 1, but got {keep}.")
    for path in list_checkpoints(folder)[:-keep]:
        path.unlink()


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Names whose values differ, with both values: "seed 0 -> 3, steps 40 -> 50", or ""."""
    return ", ".join(
        f"{name} {one.get(name)} -> {other[name]}" for name in other if one.get(name) != other[name]
    )


def lock_folder(folder: Path | None) -> None:
    """Makes the folder and takes it for this process, until the process ends, however it does.

    The lock is the operating system's, on ``FOLDER/.lock``. Processes forked from this one do not
    hold it. Where a file system has no locks, nothing is noticed.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: another run has taken it; both would write files of the same names.
    """
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        raise ValueError(
            f"--checkpoint-dir must be used by one run at a time, but got {folder}, into which "
            "another run writes. Wait for its end, or choose another folder."
        ) from None
    except OSError:  # no locks here
        os.close(descriptor)


def open_checkpoints(settings: Settings, identity: Mapping[str, Any]) -> Checkpoint | None:
    """Proves that the folder can be written, and reads its newest checkpoint.

    Raises:
        OSError: the folder cannot be written.
        ValueError: it holds a run that this one does not continue, or its newest checkpoint is
            damaged.
    """
    folder = settings.checkpoint_dir
    if folder is None:
        return None
    with tempfile.TemporaryFile(dir=folder):
        pass
    existing = list_checkpoints(folder)
    if not existing:
        return None
    if not settings.resume:
        raise ValueError(
            f"--checkpoint-dir must hold no checkpoints beside --no-resume, but got {folder} with "
            f"{existing[-1].name}. Choose another folder."
        )
    checkpoint = load_checkpoint(existing[-1])
    if changes := differences(checkpoint.extra.get("identity", {}), identity):
        raise ValueError(
            f"--checkpoint-dir must hold checkpoints of this run, but got {folder} of another one "
            f"({changes}). Use its settings, or another folder."
        )
    return checkpoint


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread; earlier ones stay until it is complete.

    Args:
        folder: of the checkpoints.
        keep: how many stay.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None

    def start(self, checkpoint: Checkpoint) -> None:
        """Begins to write; the caller must not change the checkpoint's tensors any more."""
        self._saving = self._thread.submit(self._write, checkpoint)

    def wait(self) -> None:
        """Returns when the checkpoint that was begun last is complete.

        Raises:
            OSError: it could not be written; earlier ones are as they were.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _write(self, checkpoint: Checkpoint) -> None:
        save_checkpoint(checkpoint_path(self.folder, checkpoint.step), checkpoint)
        prune_checkpoints(self.folder, self.keep)


def check_export(path: Path | None) -> None:
    """Refuses a file of weights that could not be written at the end, before anything is learned.

    Raises:
        OSError: its folder is missing or cannot be written.
        ValueError: it is a folder, or the package safetensors is not installed.
    """
    if path is None:
        return
    if importlib.util.find_spec("safetensors") is None:
        raise ValueError(
            "the package safetensors must be installed for --export, but it is not. Install it "
            "(pip install safetensors), or leave --export out."
        )
    with tempfile.TemporaryFile(dir=path.parent):
        pass
    if path.is_dir():
        raise ValueError(f"--export must name a file, but got the folder {path}. Add a name.")


def export(path: Path, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
    """Writes whole weights and the model's configuration to a safetensors file."""
    model = TransformerLM(config, device="meta")
    model.load_state_dict(weights, assign=True)
    save_safetensors(path, model)
