"""Tensors in a checkpoint's files: checked before they are believed, read without unpickling."""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shard_optim.json_messages import from_bytes

# Bytes of the largest description.
MOST_BYTES = 256 * 1024**2

# Bytes of a file in memory while its checksum is computed.
_CHUNK_BYTES = 16 * 1024**2

# Bytes that the container of one stored tensor may need beside the tensor's elements.
_MOST_OVERHEAD = 64 * 1024

# torch.save makes an archive of entries, each after a header: a signature, 4 bytes, 0 for "not
# compressed", 16 bytes, the lengths of the name and of what follows it, and both.
_ELEMENTS = re.compile(rb"PK\x03\x04.{4}\0\0.{16}(....)[^/]{1,99}/data/0", re.DOTALL)
_HEADER_BYTES = 30
_BYTE_ORDER = re.compile(rb"/byteorder(?:FB..Z*)?(little|big)", re.DOTALL)  # "FB": padding


@dataclass(frozen=True)
class Part:
    """Elements ``[first, first + count)`` of a tensor, and where a file holds them."""

    first: int  # first element, in the tensor's memory order
    count: int  # number of elements
    file: str = ""  # name of the file inside the folder
    offset: int = 0  # first byte of the part's container in the file
    length: int = 0  # bytes of the container
    crc32: int = 0  # of these bytes


@dataclass(frozen=True)
class StoredTensor:
    """One tensor, of which files or ranks hold parts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()

    def gap(self) -> str | None:
        """How the parts, in ascending order, fail to cover the tensor exactly once, or None."""
        numel, end = math.prod(self.shape), 0
        for part in self.parts:
            if part.first != end or part.count <= 0:
                span = f"[{part.first}, +{part.count})"
                return f"its parts meet badly at element {end} of {numel}: one is {span}"
            end += part.count
        return None if end == numel else f"its parts end at element {end} of {numel}"


def damaged(path: Path, reason: object) -> ValueError:
    """The error for a file that is not as it was written."""
    return ValueError(
        f"a checkpoint must be as it was written, but {path} is damaged: {reason}. Load an earlier "
        "checkpoint"
    )


def dtype_named(name: str) -> torch.dtype:
    """The dtype of that name; ValueError if there is none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it names the dtype {name!r}")
    return dtype


def are_counts(numbers: Iterable[Any]) -> bool:
    """Whether all are numbers that a size, a place in a file or a checksum can be."""
    return all(type(number) is int and 0 <= number < 2**62 for number in numbers)


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
        if not are_counts(numbers):
            raise damaged(folder, f"{key} has sizes that are no counts")
        if problem := tensor.gap():
            raise damaged(folder, f"{key} is not stored exactly once, because {problem}")
        for part in tensor.parts:
            name = part.file
            if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
                raise damaged(folder, f"it names {name!r}, not inside the folder")
            if name not in sizes:
                with open_regular(folder / name) as file:
                    sizes[name] = os.fstat(file.fileno()).st_size
            if part.offset + part.length > sizes[name]:
                raise damaged(folder / name, f"it ends before {key} does")
            overhead = part.length - part.count * tensor.dtype.itemsize
            if not 0 <= overhead <= _MOST_OVERHEAD:
                raise damaged(folder / name, f"{key} takes {part.length} bytes")


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
    """A whole regular file of at most ``MOST_BYTES``; ValueError for any other."""
    with open_regular(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise damaged(path, f"it is larger than {MOST_BYTES} bytes")
    return data


def read_checksummed(path: Path) -> tuple[Any, bytes]:
    """The JSON in the first of two lines, whose CRC-32 is the second, and all bytes.

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


class _Checksummed:
    """A file that is being written, and the CRC-32 of what has been written through this object."""

    def __init__(self, file: BinaryIO) -> None:
        self.flush, self._file = file.flush, file
        self.crc32 = 0

    def write(self, data: Any) -> int:
        """Writes bytes and takes them into the checksum."""
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)


def write_elements(file: BinaryIO, elements: Tensor) -> tuple[int, int, int]:
    """Writes a vector; returns the offset, length and CRC-32 of its container."""
    stream, offset = _Checksummed(file), file.tell()
    # A copy, because torch.save would write everything that shares its memory.
    torch.save(elements.to("cpu", copy=True).contiguous(), stream)  # type: ignore[arg-type]
    return offset, file.tell() - offset, stream.crc32


@contextmanager
def open_part(folder: Path, key: str, part: Part) -> Iterator[BinaryIO]:
    """Opens a file at the beginning of a part's container; ValueError if that is damaged."""
    path = folder / part.file
    with open_regular(path) as file:
        file.seek(part.offset)
        crc32, left = 0, part.length
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            crc32, left = zlib.crc32(chunk, crc32), left - len(chunk)
        if crc32 != part.crc32:
            raise damaged(path, f"the checksum of {key} differs")
        file.seek(part.offset)
        yield file


def read_elements(folder: Path, key: str, tensor: StoredTensor, first: int, count: int) -> Tensor:
    """Elements ``[first, first + count)`` of a stored tensor; ValueError if a file is damaged."""
    size = tensor.dtype.itemsize
    memory = bytearray(count * size)
    for part in tensor.parts:
        begin, end = max(first, part.first), min(first + count, part.first + part.count)
        if begin >= end:
            continue
        with open_part(folder, key, part) as file:
            start = _start_of_elements(file.read(min(part.length, _MOST_OVERHEAD)))
            if start is None or start + part.count * size > part.length:
                raise damaged(folder / part.file, f"{key} is not stored as torch.save() stores it")
            file.seek(part.offset + start + (begin - part.first) * size)
            target = memoryview(memory)[(begin - first) * size : (end - first) * size]
            if file.readinto(target) != len(target):  # type: ignore[attr-defined]
                raise damaged(folder / part.file, f"it ends before {key} does")
    return from_bytes(memory, tensor.dtype)


def _start_of_elements(head: bytes) -> int | None:
    """Where the elements begin, uncompressed and in this machine's byte order; else None.

    Args:
        head: the first bytes of what ``torch.save`` writes for a vector.
    """
    entry, order = _ELEMENTS.search(head), _BYTE_ORDER.search(head)
    if entry is None or (order is not None and order[1].decode() != sys.byteorder):
        return None
    name, extra = struct.unpack("<HH", entry[1])
    return entry.start() + _HEADER_BYTES + int(name) + int(extra)
