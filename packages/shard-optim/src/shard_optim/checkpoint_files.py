"""Folders of checkpoints: written by all ranks together, read by any number, and never believed.

A folder holds one file of tensors for each rank that wrote, ``__R_0.distcp``, and two descriptions:

- ``contents.json``, which this module reads: of every tensor its dtype, its shape, and the parts
  that it is stored in, each with its place, its length and its CRC-32; and every small value. Its
  second line is the CRC-32 of its first.
- ``.metadata``, a pickle for the tools of ``torch.distributed.checkpoint`` (DCP), which see each
  tensor as a vector. It is written last, so its presence means that the folder is complete. Only
  folders from before ``contents.json`` are described by it alone.

Reading builds plain data only. Before memory is taken for a tensor, the description has been
checked: parts cover each tensor exactly once, files are regular files inside the folder, and a part
is as long as its elements need. The ranks compare which checkpoint each of them has read.

In the pickle of an old folder no name is looked up: where it would make an object, ``_Made`` only
says what would have been called with which arguments. So a stranger's file reaches no class and no
function. Small values of old folders are read by ``torch.load(weights_only=True)``, which makes
numbers, strings, containers and tensors only.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import re
import stat
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shard_optim.json_messages import decode, encode, from_bytes
from shard_optim.mesh import on_every_rank
from shard_optim.place import Row

METADATA = ".metadata"  # written last, and moved into place: its presence means "complete"
CONTENTS = "contents.json"

# By key the dtype and shape of a tensor, and the fields of the ``Part`` that a rank gives, without
# their names, because ranks exchange plans; in memory the first two.
Plan = Mapping[str, Sequence[Any]]

_FILE = "__{}_0.distcp"

# Bytes of the largest description.
_MOST_BYTES = 256 * 1024**2

# Bytes of a file in memory while its checksum is computed.
_CHUNK_BYTES = 16 * 1024**2

# Bytes that the container of one stored tensor may need beside the tensor's elements.
_MOST_OVERHEAD = 64 * 1024

# torch.save makes an archive of entries, each after a header: a signature, 4 bytes, 0 for "not
# compressed", 16 bytes, the lengths of the name and of what follows it, and both.
_ELEMENTS = re.compile(rb"PK\x03\x04.{4}\0\0.{16}(....)[^/]{1,99}/data/0", re.DOTALL)
_HEADER_BYTES = 30
_BYTE_ORDER = re.compile(rb"/byteorder(?:FB..Z*)?(little|big)", re.DOTALL)  # "FB": padding

# The largest of a parameter's small values, which is a dictionary of numbers.
_MOST_VALUE_BYTES = 16 * 1024**2


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


# --- writing ---------------------------------------------------------------------------------


def write_folder(
    folder: str | Path,
    rows: Mapping[str, Row],
    values: Mapping[str, Any],
    rank: int,
    gather: Callable[[str, Any], list[Any]],
) -> None:
    """Writes a new checkpoint. Collective; the folder becomes one at the very end.

    Args:
        folder: the same on every rank. It must not hold a checkpoint.
        rows: this rank's parts of tensors, by key; together, the ranks give each tensor once.
        values: what ``encode`` accepts, by key. The first rank that gives a key counts.
        rank: of this process among those that write.
        gather: given words for errors and a value, returns every rank's.

    Raises:
        CollectiveError: on every rank, if one of them failed.
    """
    folder, words = Path(folder), "saving a checkpoint"

    def write() -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        return write_file(folder, rank, rows), values

    tensors, merged = agreed(on_every_rank(words, write, gather))

    def finish() -> None:
        if rank == 0:
            _write_descriptions(folder, tensors, merged)

    on_every_rank(words, finish, gather)


def agreed(
    given: Sequence[tuple[Plan, Mapping[str, Any]]],
) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """The tensors, each of which the ranks give exactly once, and small values of all ranks.

    Every rank checks the same plans, so every rank raises the same error.

    Raises:
        ValueError: if ranks give different dtypes or shapes, or do not cover a tensor once.
    """
    kinds: dict[str, Any] = {}
    parts: dict[str, list[Part]] = {}
    values: dict[str, Any] = {}
    for rank, (plan, small) in enumerate(given):
        values = {**small, **values}
        for key, (dtype, shape, *part) in plan.items():
            if kinds.setdefault(key, (dtype, shape)) != (dtype, shape):
                raise ValueError(
                    f"every rank must hold {key} with the same dtype and shape, but rank {rank} "
                    f"has {dtype} {tuple(shape)} where another has {kinds[key]}. Build the same "
                    "model and optimizer on every rank"
                )
            parts.setdefault(key, []).extend([Part(*part)] if part[1] else [])
    tensors = {}
    for key, found in parts.items():
        dtype, shape = kinds[key]
        ordered = tuple(sorted(found, key=lambda part: part.first))
        tensors[key] = StoredTensor(dtype, shape, ordered)
        if problem := tensors[key].gap():
            raise ValueError(
                f"the ranks must hold every element of {key} exactly once, but {problem}. Build "
                "the same model and optimizer on every rank, and step it on every rank or on none"
            )
    return tensors, values


def write_file(folder: Path, rank: int, rows: Mapping[str, Row]) -> Plan:
    """Writes one rank's file."""
    plan: dict[str, list[Any]] = {}
    name = _FILE.format(rank)
    with (folder / name).open("wb") as file:
        for key, row in rows.items():
            plan[key] = [*row.described]
            if row.place.span[1]:
                plan[key] += [name, *_write_elements(file, row.flat)]
        file.flush()
        os.fsync(file.fileno())
    return plan


def _write_descriptions(
    folder: Path, tensors: Mapping[str, StoredTensor], values: Mapping[str, Any]
) -> None:
    metadata = _torch_metadata(tensors)
    content = {
        "format": 1,
        "metadata_crc32": zlib.crc32(metadata),
        "tensors": {
            key: {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": tensor.shape,
                "parts": [vars(part) for part in tensor.parts],
            }
            for key, tensor in tensors.items()
        },
        "values": {key: encode(value) for key, value in values.items()},
    }
    line = json.dumps(content)
    _write_durably(folder / CONTENTS, f"{line}\n{zlib.crc32(line.encode())}\n".encode())
    _write_durably(folder / METADATA, metadata)


def _write_durably(path: Path, data: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _torch_metadata(tensors: Mapping[str, StoredTensor]) -> bytes:
    """The description for the tools of ``torch.distributed.checkpoint``."""
    # Importing it changes warning filters, so that waits for the first checkpoint.
    from torch.distributed.checkpoint import filesystem, metadata

    described: dict[str, Any] = {}
    stored_at: dict[Any, Any] = {}
    for key, tensor in tensors.items():
        chunks = []
        for part in tensor.parts:
            offsets, sizes = torch.Size([part.first]), torch.Size([part.count])
            chunks.append(metadata.ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            where = filesystem._StorageInfo(part.file, part.offset, part.length)
            stored_at[metadata.MetadataIndex(key, offsets)] = where
        described[key] = metadata.TensorStorageMetadata(
            properties=metadata.TensorProperties(dtype=tensor.dtype),
            size=torch.Size([math.prod(tensor.shape)]),
            chunks=chunks,
        )
    return pickle.dumps(metadata.Metadata(described, planner_data={}, storage_data=stored_at))


class _Checksummed:
    """A file that is being written, and the CRC-32 of what has been written through this object."""

    def __init__(self, file: BinaryIO) -> None:
        self.flush, self._file = file.flush, file
        self.crc32 = 0

    def write(self, data: Any) -> int:
        """Writes bytes and takes them into the checksum."""
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)


def _write_elements(file: BinaryIO, elements: Tensor) -> tuple[int, int, int]:
    """Writes a vector; returns the offset, length and CRC-32 of its container."""
    stream, offset = _Checksummed(file), file.tell()
    # A copy, because torch.save would write everything that shares its memory.
    torch.save(elements.to("cpu", copy=True).contiguous(), stream)  # type: ignore[arg-type]
    return offset, file.tell() - offset, stream.crc32


# --- reading ---------------------------------------------------------------------------------


def read_description(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, Any], str]:
    """The description of a checkpoint.

    Returns:
        Tensors by key, small values by key, and an identity, the same for two ranks exactly if they
        have read the same description.

    Raises:
        FileNotFoundError: if the folder holds no complete checkpoint.
        ValueError: if its description is damaged or impossible.
    """
    if not (folder / METADATA).exists():
        raise FileNotFoundError(
            f"a checkpoint must have been saved completely, but {folder} lacks {METADATA}. Load an "
            "earlier one"
        )
    old = not os.path.lexists(folder / CONTENTS)
    described = folder / (METADATA if old else CONTENTS)
    content, data = _translated(folder) if old else _read_checksummed(described)
    metadata = _read_small(folder / METADATA)
    try:
        tensors = {
            key: StoredTensor(
                dtype=_dtype_named(entry["dtype"]),
                shape=tuple(entry["shape"]),
                parts=tuple(Part(**part) for part in entry["parts"]),
            )
            for key, entry in content["tensors"].items()
        }
        values = {key: decode(value) for key, value in content["values"].items()}
        expected = content["metadata_crc32"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(described, error) from error
    if expected != zlib.crc32(metadata):
        raise _damaged(folder / METADATA, "its checksum differs")
    _check_tensors(folder, tensors)
    return tensors, values, hashlib.sha256(data).hexdigest()


def _damaged(path: Path, reason: object) -> ValueError:
    """The error for a file that is not as it was written."""
    return ValueError(
        f"a checkpoint must be as it was written, but {path} is damaged: {reason}. Load an earlier "
        "checkpoint"
    )


def _dtype_named(name: str) -> torch.dtype:
    """The dtype of that name; ValueError if there is none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it names the dtype {name!r}")
    return dtype


def _are_counts(numbers: Iterable[Any]) -> bool:
    """Whether all are numbers that a size, a place in a file or a checksum can be."""
    return all(type(number) is int and 0 <= number < 2**62 for number in numbers)


def _check_tensors(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
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
        if not _are_counts(numbers):
            raise _damaged(folder, f"{key} has sizes that are no counts")
        if problem := tensor.gap():
            raise _damaged(folder, f"{key} is not stored exactly once, because {problem}")
        for part in tensor.parts:
            name = part.file
            if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
                raise _damaged(folder, f"it names {name!r}, not inside the folder")
            if name not in sizes:
                with _open_regular(folder / name) as file:
                    sizes[name] = os.fstat(file.fileno()).st_size
            if part.offset + part.length > sizes[name]:
                raise _damaged(folder / name, f"it ends before {key} does")
            overhead = part.length - part.count * tensor.dtype.itemsize
            if not 0 <= overhead <= _MOST_OVERHEAD:
                raise _damaged(folder / name, f"{key} takes {part.length} bytes")


def _open_regular(path: Path) -> BinaryIO:
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
        raise _damaged(path, "it is no regular file")
    return os.fdopen(descriptor, "rb")


def _read_small(path: Path) -> bytes:
    """A whole regular file of at most ``_MOST_BYTES``; ValueError for any other."""
    with _open_regular(path) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise _damaged(path, f"it is larger than {_MOST_BYTES} bytes")
    return data


def _read_checksummed(path: Path) -> tuple[Any, bytes]:
    """The JSON in the first of two lines, whose CRC-32 is the second, and all bytes.

    Raises:
        ValueError: if the file is damaged.
    """
    data = _read_small(path)
    try:
        line, own = data.decode().splitlines()
        if zlib.crc32(line.encode()) != int(own):
            raise ValueError("its checksum differs")
        return json.loads(line), data
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error


@contextmanager
def _open_part(folder: Path, key: str, part: Part) -> Iterator[BinaryIO]:
    """Opens a file at the beginning of a part's container; ValueError if that is damaged."""
    path = folder / part.file
    with _open_regular(path) as file:
        file.seek(part.offset)
        crc32, left = 0, part.length
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            crc32, left = zlib.crc32(chunk, crc32), left - len(chunk)
        if crc32 != part.crc32:
            raise _damaged(path, f"the checksum of {key} differs")
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
        with _open_part(folder, key, part) as file:
            start = _start_of_elements(file.read(min(part.length, _MOST_OVERHEAD)))
            if start is None or start + part.count * size > part.length:
                raise _damaged(folder / part.file, f"{key} is not stored as torch.save() stores it")
            file.seek(part.offset + start + (begin - part.first) * size)
            target = memoryview(memory)[(begin - first) * size : (end - first) * size]
            if file.readinto(target) != len(target):  # type: ignore[attr-defined]
                raise _damaged(folder / part.file, f"it ends before {key} does")
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


# --- folders from before contents.json -------------------------------------------------------


class _Made:
    """Stands for an object that a pickle describes and nobody makes: its arguments and its state.

    Each name in a pickle becomes a subclass of this one, so that unpickling can only make these.
    """

    name = ""
    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> _Made:
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _PlainUnpickler(pickle.Unpickler):
    """Looks no name up and calls nothing but ``_Made``."""

    def find_class(self, module: str, name: str) -> type[_Made]:
        """A class of its own for each name."""
        return type("_Made", (_Made,), {"name": name})


def _translated(folder: Path) -> tuple[dict[str, Any], bytes]:
    """What ``contents.json`` would hold, and the bytes of the files that tell it.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is damaged.
    """
    data = _read_small(folder / METADATA)
    checksums, lines = _read_checksummed(folder / "checksums.json")
    try:
        top = _PlainUnpickler(io.BytesIO(data)).load().state
        tensors, places = _described(top, checksums["items"])
    except Exception as error:  # damaged instructions can make anything of the stack
        raise _damaged(folder / METADATA, error) from error
    values = {key: encode(_saved_value(folder, key, part)) for key, part in places.items()}
    content = {"metadata_crc32": zlib.crc32(data), "tensors": tensors, "values": values}
    return content, data + lines


def _described(
    top: Mapping[str, Any], crc_of: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, Part]]:
    """The tensors as ``contents.json`` describes them, and where the small values are, by key."""

    def numbers(size: _Made | None) -> tuple[int, ...]:
        return tuple(size.args[0]) if size else ()

    stored_at = {
        (index.state["fqn"], numbers(index.state.get("offset"))): info.state
        for index, info in top["storage_data"].items()
    }

    def part(key: str, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Part:
        if len(sizes) != 1 and any(offsets):
            raise ValueError(f"{key} is stored in blocks")
        found = stored_at[key, offsets]
        crc32 = crc_of[f"{key} {','.join(map(str, offsets))}"]
        where = found["offset"], found["length"], crc32
        if not _are_counts(where):
            raise ValueError(f"{key} has sizes that are no counts")
        name = Path(found["relative_path"]).name
        return Part(sum(offsets), math.prod(sizes), name, *where)

    tensors, places = {}, {}
    for key, entry in top["state_dict_metadata"].items():
        if entry.name == "BytesStorageMetadata":
            places[key] = part(key)
            continue
        chunks = [chunk.state for chunk in entry.state["chunks"]]
        parts = [part(key, numbers(c["offsets"]), numbers(c["sizes"])) for c in chunks]
        tensors[key] = {
            "dtype": entry.state["properties"].state[0].name,
            "shape": numbers(entry.state["size"]),
            "parts": [vars(p) for p in sorted(parts, key=attrgetter("first")) if p.count],
        }
    return tensors, places


def _saved_value(folder: Path, key: str, part: Part) -> Any:
    """What ``torch.save`` wrote: numbers, strings, containers and small tensors."""
    path = folder / part.file
    if part.length > _MOST_VALUE_BYTES:
        raise _damaged(path, f"{key} takes {part.length} bytes")
    with _open_part(folder, key, part) as file:
        saved = io.BytesIO(file.read(part.length))
    try:
        if any(entry.compress_type for entry in zipfile.ZipFile(saved).infolist()):
            raise ValueError("its archive is compressed")
        saved.seek(0)
        return torch.load(saved, weights_only=True, map_location="cpu")
    except Exception as error:
        raise _damaged(path, f"{key}: {error}") from error
