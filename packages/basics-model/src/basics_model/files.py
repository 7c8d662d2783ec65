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
        # On a full disk torch.save still ends its archive, and complains of a position in it.
        cause: BaseException | None = error
        while isinstance(cause, RuntimeError):
            cause = cause.__context__
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise
    if os.name == "posix":  # elsewhere a folder cannot be opened, and a rename needs no flush
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


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
