"""Folders of checkpoints: written by all ranks together, read by any number, and never believed.

A folder holds one file of tensors for each rank that wrote, ``__R_0.distcp``, and two descriptions:

- ``contents.json``, which this module reads: of every tensor its dtype, its shape, and the parts
  that it is stored in, each with its place, its length and its CRC-32; and every small value. Its
  second line is the CRC-32 of its first.
- ``.metadata``, a pickle for the tools of ``torch.distributed.checkpoint`` (DCP), which see each
  tensor as a vector. It is written last, so its presence means that the folder is complete. This
  module never unpickles it; ``dcp_folder.py`` reads folders that have no ``contents.json``.

Reading builds plain data only. Before memory is taken for a tensor, the description has been
checked: parts cover each tensor exactly once, files are regular files inside the folder, and a part
is no longer than its elements need. The ranks compare which checkpoint each of them has read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shard_optim.dcp_folder import read_dcp_description
from shard_optim.json_messages import decode, encode
from shard_optim.mesh import on_every_rank
from shard_optim.place import Row
from shard_optim.stored_tensor import (
    Part,
    StoredTensor,
    check_tensors,
    coverage,
    damaged,
    dtype_named,
    read_checksummed,
    read_small,
)

METADATA = ".metadata"  # written last, and moved into place: its presence means "complete"
CONTENTS = "contents.json"

Plan = Mapping[str, Sequence[Any]]
"""By key the dtype and shape of a tensor, and the fields of the part that a rank gives: in memory
the first two. Ranks exchange plans, so they hold no names of fields."""

_PART = ("first", "count", "offset", "length", "crc32")
_FILE = "__{}_0.distcp"


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

    plans, merged = agreed(on_every_rank(words, write, gather))

    def finish() -> None:
        if rank == 0:
            _write_descriptions(folder, plans, merged)

    on_every_rank(words, finish, gather)


def agreed(given: Sequence[tuple[Plan, Mapping[str, Any]]]) -> tuple[list[Plan], dict[str, Any]]:
    """The plans and small values of all ranks, in which each tensor is given exactly once.

    Every rank checks the same plans, so every rank raises the same error.

    Raises:
        ValueError: if ranks give different dtypes or shapes, or do not cover a tensor once.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    kinds: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for rank, (plan, small) in enumerate(given):
        values = {**small, **values}
        for key, (dtype, shape, first, count, *_) in plan.items():
            if kinds.setdefault(key, (dtype, shape)) != (dtype, shape):
                raise ValueError(
                    f"every rank must hold {key} with the same dtype and shape, but rank {rank} "
                    f"has {dtype} {tuple(shape)} where another has {kinds[key]}. Build the same "
                    "model and optimizer on every rank"
                )
            spans.setdefault(key, []).extend([(first, count)] if count else [])
    for key, found in spans.items():
        if problem := coverage(math.prod(kinds[key][1]), found):
            raise ValueError(
                f"the ranks must hold every element of {key} exactly once, but {problem}. Build "
                "the same model and optimizer on every rank, and step it on every rank or on none"
            )
    return [plan for plan, _ in given], values


class _Checksummed:
    """A file that is being written, and the CRC-32 of what has been written through this object."""

    def __init__(self, file: BinaryIO) -> None:
        self.flush, self._file = file.flush, file
        self.crc32 = 0

    def write(self, data: Any) -> int:
        """Writes bytes and takes them into the checksum."""
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)


def write_file(folder: Path, rank: int, rows: Mapping[str, Row]) -> Plan:
    """Writes one rank's file."""
    plan: dict[str, list[Any]] = {}
    with (folder / _FILE.format(rank)).open("wb") as file:
        for key, row in rows.items():
            plan[key] = [*row.described]
            if row.place.span[1]:
                stream, offset = _Checksummed(file), file.tell()
                # A copy, because torch.save would write everything that shares its memory.
                copy = row.flat.to("cpu", copy=True).contiguous()
                torch.save(copy, stream)  # type: ignore[arg-type]
                plan[key] += [offset, file.tell() - offset, stream.crc32]
        file.flush()
        os.fsync(file.fileno())
    return plan


def _write_descriptions(folder: Path, plans: Sequence[Plan], values: Mapping[str, Any]) -> None:
    tensors: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for key, (dtype, shape, *part) in plan.items():
            name = str(dtype).removeprefix("torch.")
            entry = tensors.setdefault(key, {"dtype": name, "shape": list(shape), "parts": []})
            if part[1]:
                fields = dict(zip(_PART, part, strict=True))
                entry["parts"].append(fields | {"file": _FILE.format(rank)})
                entry["parts"].sort(key=lambda part: part["first"])
    metadata = _torch_metadata(tensors)
    content = {
        "format": 1,
        "metadata_crc32": zlib.crc32(metadata),
        "tensors": tensors,
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


def _torch_metadata(tensors: Mapping[str, Any]) -> bytes:
    """The description for the tools of ``torch.distributed.checkpoint``."""
    # Importing it changes warning filters, so that waits for the first checkpoint.
    from torch.distributed.checkpoint import filesystem, metadata

    described: dict[str, Any] = {}
    stored_at: dict[Any, Any] = {}
    for key, entry in tensors.items():
        chunks = []
        for part in entry["parts"]:
            offsets, sizes = torch.Size([part["first"]]), torch.Size([part["count"]])
            chunks.append(metadata.ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            stored_at[metadata.MetadataIndex(key, offsets)] = filesystem._StorageInfo(
                relative_path=part["file"], offset=part["offset"], length=part["length"]
            )
        described[key] = metadata.TensorStorageMetadata(
            properties=metadata.TensorProperties(dtype=dtype_named(entry["dtype"])),
            size=torch.Size([math.prod(entry["shape"])]),
            chunks=chunks,
        )
    return pickle.dumps(metadata.Metadata(described, planner_data={}, storage_data=stored_at))


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
    if not os.path.lexists(folder / CONTENTS):
        tensors, values, data = read_dcp_description(folder)
    else:
        content, data = read_checksummed(folder / CONTENTS)
        metadata = read_small(folder / METADATA)
        try:
            tensors = {
                key: StoredTensor(
                    dtype=dtype_named(entry["dtype"]),
                    shape=tuple(entry["shape"]),
                    parts=tuple(Part(**part) for part in entry["parts"]),
                )
                for key, entry in content["tensors"].items()
            }
            values = {key: decode(value) for key, value in content["values"].items()}
            expected = content["metadata_crc32"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise damaged(folder / CONTENTS, error) from error
        if expected != zlib.crc32(metadata):
            raise damaged(folder / METADATA, "its checksum differs")
    check_tensors(folder, tensors)
    return tensors, values, hashlib.sha256(data).hexdigest()
