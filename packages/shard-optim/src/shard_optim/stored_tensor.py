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
from collections.abc import Mapping, Sequence
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
_BYTE_ORDER = re.compile(rb"/byteorder.{,99}?(little|big)", re.DOTALL)


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
    identity: str = ""


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
        spans = [(part.first, part.count) for part in tensor.parts]
        if problem := coverage(math.prod(tensor.shape), spans):
            raise damaged(folder, f"{key} is not stored exactly once, because {problem}")
        for part in tensor.parts:
            if part.file not in sizes:
                if not isinstance(part.file, str) or re.fullmatch(r"\.{,2}|.*/.*", part.file):
                    raise damaged(folder, f"it names {part.file!r}, not inside the folder")
                with open_regular(folder / part.file) as file:
                    sizes[part.file] = os.fstat(file.fileno()).st_size
            if part.offset + part.length > sizes[part.file]:
                raise damaged(folder / part.file, f"it ends before {key} does")
            if part.length > part.count * tensor.dtype.itemsize + _MOST_OVERHEAD:
                raise damaged(folder / part.file, f"{key} takes {part.length} bytes")


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
            file.seek(part.offset)
            crc32, left = 0, part.length
            while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
                crc32, left = zlib.crc32(chunk, crc32), left - len(chunk)
            if crc32 != part.crc32:
                raise damaged(path, f"the checksum of {key} differs")
            file.seek(part.offset)
            head = file.read(min(part.length, _MOST_OVERHEAD))
            start = _start_of_elements(head)
            if start is None or start + part.count * size > part.length:
                raise damaged(path, f"{key} is not stored as torch.save() stores it here")
            file.seek(part.offset + start + (begin - part.first) * size)
            target = memoryview(memory)[(begin - first) * size : (end - first) * size]
            if file.readinto(target) != len(target):  # type: ignore[attr-defined]
                raise damaged(path, f"it ends before {key} does")
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
