"""Tensors in a checkpoint's files: checked before they are believed, read without unpickling."""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

# Bytes of the largest description.
MOST_BYTES = 256 * 1024**2

# Bytes of a file in memory while its checksum is computed.
_CHUNK_BYTES = 16 * 1024**2

# Bytes that the container of one stored tensor may need beside the tensor's elements.
_MOST_OVERHEAD = 64 * 1024

# A local header of a zip archive: its length, and where it holds the lengths of two texts.
_LOCAL_HEADER, _TEXT_LENGTHS = 30, 26


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements ``[first, first + count)`` of a tensor, and where a file holds them.

    Attributes:
        first: first element, in the tensor's memory order.
        count: number of elements.
        file: name of the file inside the folder.
        offset: first byte of the part's container in the file.
        length: bytes of the container.
        crc32: of these bytes.
    """

    first: int
    count: int
    file: str
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint; its parts cover it exactly once, in ascending order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The description of a checkpoint.

    Attributes:
        tensors: by key.
        values: everything small, by key.
        identity: the same for two ranks exactly if they have read the same description.
    """

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, Any]
    identity: str


def damaged(path: Path, reason: object) -> ValueError:
    """The error for a file that is not as it was written."""
    return ValueError(
        f"a checkpoint must be as it was written, but {path} is damaged: {reason}. Load an earlier "
        "checkpoint"
    )


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        ValueError: if there is none.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it names the dtype {name!r}")
    return dtype


def from_bytes(memory: bytearray, dtype: torch.dtype) -> Tensor:
    """The memory as a vector."""
    if not memory:  # frombuffer refuses an empty one
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def coverage(numel: int, spans: Sequence[tuple[int, int]]) -> str | None:
    """How (first, count) pairs fail to cover a vector of ``numel`` elements, or None."""
    end = 0
    for first, count in sorted(spans):
        if first != end or count <= 0:
            return f"its parts meet badly at element {end} of {numel}: one is [{first}, +{count})"
        end = first + count
    return None if end == numel else f"its parts end at element {end} of {numel}"


def check_tensors(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuses descriptions that no save writes, before any tensor takes memory.

    Raises:
        FileNotFoundError: if a rank's file is missing.
        ValueError: for anything else.
    """
    sizes: dict[str, int] = {}
    for key, tensor in tensors.items():
        numbers = [*tensor.shape]
        for part in tensor.parts:
            numbers += [part.first, part.count, part.offset, part.length, part.crc32]
        if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
            raise damaged(folder, f"{key} has sizes that are no counts")
        if problem := coverage(tensor.numel, [(part.first, part.count) for part in tensor.parts]):
            raise damaged(folder, f"{key} is not stored exactly once, because {problem}")
        for part in tensor.parts:
            if part.file not in sizes:
                sizes[part.file] = _size_of(folder, part.file)
            if part.offset + part.length > sizes[part.file]:
                raise damaged(folder / part.file, f"it ends before {key} does")
            if part.length > part.count * tensor.dtype.itemsize + _MOST_OVERHEAD:
                raise damaged(folder / part.file, f"{key} takes {part.length} bytes")


def _size_of(folder: Path, name: str) -> int:
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise damaged(folder, f"it names a file {name!r} that is not inside the folder")
    with open_regular(folder / name) as file:
        return os.fstat(file.fileno()).st_size


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading without waiting.

    Raises:
        FileNotFoundError: naming the file, which a rank of the run that saved has written.
        ValueError: for a pipe, a device or anything else that may have no end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        writer = path.name.removeprefix("__").partition("_")[0]
        whose = f", which rank {writer} of the run that saved wrote" if writer.isdigit() else ""
        raise FileNotFoundError(
            f"a checkpoint must have all its files, but {path}{whose}, is missing. Copy the whole "
            "folder, or load an earlier checkpoint"
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise damaged(path, "it is no regular file")
    return os.fdopen(descriptor, "rb")


def read_small(path: Path) -> bytes:
    """A whole file of at most ``MOST_BYTES``.

    Raises:
        ValueError: if it is larger or no regular file.
    """
    with open_regular(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise damaged(path, f"it is larger than {MOST_BYTES} bytes")
    return data


def read_checksummed(path: Path) -> tuple[Any, bytes]:
    """The JSON in a small file's first line, whose CRC-32 is in the second, and all bytes.

    Raises:
        ValueError: if the file is damaged.
    """
    data = read_small(path)
    try:
        line, own = data.decode().splitlines()
        if zlib.crc32(line.encode()) != int(own):
            raise ValueError("its checksum differs")
        return json.loads(line), data
    except (ValueError, RecursionError) as error:
        raise damaged(path, error) from error


def read_elements(folder: Path, key: str, tensor: StoredTensor, first: int, count: int) -> Tensor:
    """Elements ``[first, first + count)`` of a stored tensor, after their checksums.

    Raises:
        ValueError: if a file is damaged.
    """
    size = tensor.dtype.itemsize
    memory = bytearray(count * size)
    for part in tensor.parts:
        begin, end = max(first, part.first), min(first + count, part.first + part.count)
        if begin >= end:
            continue
        path = folder / part.file
        with open_regular(path) as file:
            if _checksum(file, part) != part.crc32:
                raise damaged(path, f"the checksum of {key} differs")
            start = _start_of_elements(file, path, part, part.count * size)
            file.seek(start + (begin - part.first) * size)
            target = memoryview(memory)[(begin - first) * size : (end - first) * size]
            if file.readinto(target) != len(target):  # type: ignore[attr-defined]
                raise damaged(path, f"it ends before {key} does")
    return from_bytes(memory, tensor.dtype)


def _checksum(file: BinaryIO, part: Part) -> int:
    found, left = 0, part.length
    file.seek(part.offset)
    while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
        found = zlib.crc32(chunk, found)
        left -= len(chunk)
    return found


def _start_of_elements(file: BinaryIO, path: Path, part: Part, nbytes: int) -> int:
    """Where the file holds the elements of a part, whose container is a zip archive.

    torch.save writes the bytes of a tensor as they are into the archive's entry ``data/0``.
    """
    try:
        archive = zipfile.ZipFile(_Window(file, part.offset, part.length))
        by_name = {name.partition("/")[2]: name for name in archive.namelist()}
        if "byteorder" in by_name and archive.getinfo(by_name["byteorder"]).file_size < 16:
            order = archive.read(by_name["byteorder"]).decode()
            if order != sys.byteorder:
                raise damaged(path, f"its numbers are {order}-endian")
        entry = archive.getinfo(by_name["data/0"])
    except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError) as error:
        raise damaged(path, f"its archive at byte {part.offset}: {error}") from error
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != nbytes:
        raise damaged(path, f"it holds {entry.file_size} bytes where {nbytes} are due")
    file.seek(part.offset + entry.header_offset)
    header = file.read(_LOCAL_HEADER)
    texts: int = sum(struct.unpack_from("<HH", header, _TEXT_LENGTHS))
    start = entry.header_offset + _LOCAL_HEADER + texts
    if start + nbytes > part.length:
        raise damaged(path, f"it ends before its archive at byte {part.offset} does")
    return part.offset + start


class _Window:
    """Bytes ``[offset, offset + length)`` of a file, as a file that zipfile can read."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._position = 0

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The position, from the window's beginning."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves the position, which stays inside the window."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = min(max(base + offset, 0), self._length)
        return self._position

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes, and none beyond the window."""
        left = self._length - self._position
        size = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._offset + self._position)
        data = self._file.read(size)
        self._position += len(data)
        return data
