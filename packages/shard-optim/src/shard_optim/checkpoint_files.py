"""Folders of checkpoints: written by all ranks together, read by any number, and never believed.

A folder holds one file of tensors for each rank that wrote, ``__R_0.distcp``, and two descriptions:

- ``contents.json``, which this module reads: of every tensor its dtype, its shape, and the parts
  that it is stored in, each with its place, its length and its CRC-32; and every small value. Its
  second line is the CRC-32 of its first.
- ``.metadata``, a pickle for the tools of ``torch.distributed.checkpoint`` (DCP), which see each
  tensor as a vector. It is written last, so its presence means that the folder is complete. Reading
  compares its CRC-32 with the one in ``contents.json``, and never unpickles it.

Reading builds plain data only. Before memory is taken for a tensor, the description has been
checked: parts cover each tensor exactly once, files are regular files inside the folder, and a part
is as long as its elements need. The ranks compare which checkpoint each of them has read.
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
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shard_optim.json_messages import decode, encode
from shard_optim.mesh import on_every_rank
from shard_optim.place import Row

METADATA = ".metadata"  # written last, and moved into place: its presence means "complete"
CONTENTS = "contents.json"

# Bytes of the largest description.
_MOST_BYTES = 256 * 1024**2

# Name of a rank's file.
_FILE = re.compile(r"__[0-9]{1,9}_0\.distcp")

# Bytes that the container of one stored tensor may need beside the tensor's elements.
_MOST_OVERHEAD = 64 * 1024

# torch.save makes an archive of entries, each after a header: a signature, 4 bytes, 0 for "not
# compressed", 16 bytes, the lengths of the name and of what follows it, and both.
_ELEMENTS = re.compile(rb"PK\x03\x04.{4}\0\0.{18}(..)[^/]{1,99}/data/0", re.DOTALL)
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
    parts: list[Part] = field(default_factory=list)

    def gap(self) -> str | None:
        """How the parts fail to cover the tensor exactly once, or None."""
        numel, end = math.prod(self.shape), 0
        for part in sorted(self.parts, key=attrgetter("first")):
            if part.first != end or part.count <= 0:
                return f"one of {part.count} elements begins at {part.first}, not at {end}"
            end += part.count
        return None if end == numel else f"its parts end at element {end} of {numel}"


# --- writing ---------------------------------------------------------------------------------


def write_folder(
    folder: Path,
    rows: Mapping[str, Row],
    values: Mapping[str, Any],
    rank: int,
    gather: Callable[[str, Any], list[Any]],
) -> None:
    """Writes a new checkpoint; the folder becomes one at the very end. Collective.

    Args:
        folder: the same on every rank. It must not hold a checkpoint.
        rows: this rank's parts of tensors, by key; together, the ranks give each tensor once.
        values: what ``encode`` accepts, by key. The first rank that gives a key counts.
        gather: as for ``on_every_rank``.
    """
    words = "saving a checkpoint"

    def write() -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        return write_file(folder, rank, rows), values

    tensors, merged = agreed(on_every_rank(words, write, gather))

    def finish() -> None:
        if rank == 0:
            _write_descriptions(folder, tensors, merged)

    on_every_rank(words, finish, gather)


def agreed(
    given: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """The tensors, each of which the ranks give exactly once, and small values of all ranks.

    All check the same, so a ValueError for tensors that do not fit is raised on every rank.
    """
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Any] = {}
    for rank, (plan, small) in enumerate(given):
        values = {**small, **values}
        for key, (dtype, shape, *part) in plan.items():
            known = tensors.setdefault(key, StoredTensor(dtype, shape))
            if (known.dtype, known.shape) != (dtype, shape):
                raise ValueError(
                    f"every rank must hold {key} with the same dtype and shape, but rank {rank} "
                    f"has {dtype} {shape} where another has {known.dtype} {known.shape}. Build the "
                    "same model and optimizer on every rank"
                )
            known.parts.extend([Part(*part)] if part[1] else [])
    for key, tensor in tensors.items():
        if problem := tensor.gap():
            raise ValueError(
                f"the ranks must hold every element of {key} exactly once, but {problem}. Build "
                "the same model and optimizer on every rank, and step it on every rank or on none"
            )
    return tensors, values


def write_file(folder: Path, rank: int, rows: Mapping[str, Row]) -> dict[str, list[Any]]:
    """Writes one rank's file; gives by key the dtype, shape and fields of a tensor's ``Part``."""
    plan: dict[str, list[Any]] = {}
    name, container = f"__{rank}_0.distcp", io.BytesIO()
    with (folder / name).open("wb") as file:
        for key, row in rows.items():
            plan[key] = [*row.described]
            if row.place.span[1]:
                container.seek(0)
                # A copy, because torch.save would write everything that shares its memory.
                torch.save(row.flat.to("cpu", copy=True).contiguous(), container)
                with container.getbuffer()[: container.tell()] as data:
                    plan[key] += [name, file.tell(), len(data), zlib.crc32(data)]
                    file.write(data)
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
                "dtype": encode(tensor.dtype)["torch"],
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


# --- reading ---------------------------------------------------------------------------------


def read_description(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, Any], str]:
    """Tensors and small values of a checkpoint, by key, and a digest of what was read.

    Raises:
        FileNotFoundError: if the folder holds no complete checkpoint.
        ValueError: if its description is damaged, or one that no save writes.
    """
    path = folder / CONTENTS
    metadata, data = _read(folder / METADATA), _read(path)
    try:
        line, crc32 = data.decode().splitlines()
        if int(crc32) != zlib.crc32(line.encode()):
            raise ValueError("its checksum differs")
        content = json.loads(line)
        if content["metadata_crc32"] != zlib.crc32(metadata):
            raise ValueError(f"the checksum of {folder / METADATA} differs")
        tensors = {key: _stored(key, entry) for key, entry in content["tensors"].items()}
        values = {key: decode(value) for key, value in content["values"].items()}
    except Exception as error:  # JSON of another structure can raise any
        raise _damaged(path, error) from error
    return tensors, values, hashlib.sha256(data).hexdigest()


def _stored(key: str, entry: Mapping[str, Any]) -> StoredTensor:
    """A tensor by its entry in a description; an error for one that no save writes."""
    parts = [Part(**part) for part in entry["parts"]]
    tensor = StoredTensor(decode({"torch": entry["dtype"]}), tuple(entry["shape"]), parts)
    numbers = [n for part in parts for n in (vars(part) | {"file": 0}).values()]
    if not all(type(n) is int and 0 <= n < 2**62 for n in (*tensor.shape, *numbers)):
        raise ValueError(f"{key} has sizes that are no counts")
    if problem := tensor.gap():
        raise ValueError(f"{key} is not stored exactly once, because {problem}")
    for part in parts:
        if not _FILE.fullmatch(part.file):
            raise ValueError(f"it names {part.file!r}, which is no file of a rank")
        if not 0 <= part.length - part.count * tensor.dtype.itemsize <= _MOST_OVERHEAD:
            raise ValueError(f"{key} takes {part.length} bytes")
    return tensor


def _damaged(path: Path, reason: object) -> ValueError:
    """The error for a file that is not as it was written."""
    return ValueError(
        f"a checkpoint must be as it was written, but {path} is damaged: {reason}. Load an earlier "
        "checkpoint"
    )


def _missing(path: Path) -> FileNotFoundError:
    """The error for a file that a checkpoint needs."""
    remedy = "Copy the whole folder, or load an earlier checkpoint"
    if path.name == METADATA:
        whose = "which a save writes last"
    elif path.name == CONTENTS:
        whose = "which shard_optim.save() writes"
        remedy = (
            "Copy the whole folder. If torch.distributed.checkpoint or an earlier checkout of "
            "shard-optim wrote it, load it there, and give its whole state to load_full_state()"
        )
    else:
        rank = path.name.removeprefix("__").partition("_")[0]
        whose = f"which rank {rank} of the run that saved wrote"
    return FileNotFoundError(
        f"a checkpoint must have all its files, but {path}, {whose}, is missing. {remedy}"
    )


def _read(path: Path, offset: int = 0, length: int | None = None) -> bytearray:
    """Bytes of a regular file, which is opened without waiting; by default all of a small one.

    ValueError for a pipe, a device or anything else that may have no end, or for too few bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise _missing(path) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise _damaged(path, "it is no regular file")
    with os.fdopen(descriptor, "rb") as file:
        if length is None and status.st_size > _MOST_BYTES:
            raise _damaged(path, f"it is larger than {_MOST_BYTES} bytes")
        length = status.st_size if length is None else length
        if offset + length > status.st_size:
            raise _damaged(path, f"it ends before byte {offset + length}")
        data = bytearray(length)
        file.seek(offset)
        file.readinto(data)
    return data


def read_elements(folder: Path, key: str, tensor: StoredTensor, first: int, count: int) -> Tensor:
    """Elements ``[first, first + count)`` of a stored tensor; ValueError if a file is damaged."""
    found = [torch.empty(0, dtype=tensor.dtype, device="cpu")]
    for part in sorted(tensor.parts, key=attrgetter("first")):
        begin, end = max(first, part.first), min(first + count, part.first + part.count)
        if begin < end:
            path = folder / part.file
            container = _read(path, part.offset, part.length)
            if zlib.crc32(container) != part.crc32:
                raise _damaged(path, f"the checksum of {key} differs")
            vector = _stored_vector(container, tensor.dtype, part.count)
            if vector is None:
                raise _damaged(path, f"{key} is not stored as torch.save() stores it")
            found.append(vector[begin - part.first : end - part.first])
    return torch.cat(found)


def _stored_vector(container: bytearray, dtype: torch.dtype, count: int) -> Tensor | None:
    """The vector that ``torch.save`` wrote; None if compressed, incomplete, of other byte order."""
    entry = _ELEMENTS.search(container, 0, _MOST_OVERHEAD)
    order = _BYTE_ORDER.search(container, 0, _MOST_OVERHEAD)
    if entry is None or (order is not None and order[1] != sys.byteorder.encode()):
        return None
    start = entry.end() + int.from_bytes(entry[1], "little")
    if start + count * dtype.itemsize > len(container):
        return None
    return torch.frombuffer(container, dtype=dtype, count=count, offset=start)
