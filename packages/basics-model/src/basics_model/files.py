"""Files that are written whole or not at all, and read with an error that names them.

A write goes to a temporary file in the target's folder, is flushed to the disk, renamed over the
target, and the folder is flushed. A rename replaces a name in one step, so at every moment the name
holds the whole previous file or the whole new one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields the path of a temporary file, which replaces ``path`` after the block.

    An error of the system becomes an OSError that names ``path``. A kill may leave ``.NAME.tmp``.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if (failed := _os_error(error)) is not None:
            raise OSError(failed.errno, failed.strerror, str(path)) from error
        raise
    _flush_folder(path.parent)


@contextmanager
def refusing_damage(path: Path | str, expected: str, remedy: str) -> Iterator[None]:
    """Turns any error of a parser into a ValueError that names the file and the cause."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # what parsers raise for arbitrary bytes has no common base
        raise ValueError(
            f"{path} must be {expected}, but got a damaged or other file: {error}. {remedy}"
        ) from error


def _os_error(error: BaseException) -> OSError | None:
    """The failure to write behind an error of ``torch.save``, which ends its archive even then.

    On a disk that is full it complains of a position in the archive instead.
    """
    if isinstance(error, OSError):
        return error
    context = error.__context__ if isinstance(error, RuntimeError) else None
    return None if context is None else _os_error(context)


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened, and a rename needs no flush
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
