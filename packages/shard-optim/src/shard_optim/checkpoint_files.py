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
from typing import Any

import torch

from shard_optim.dcp_folder import translated
from shard_optim.json_messages import decode, encode
from shard_optim.mesh import on_every_rank
from shard_optim.place import Row
from shard_optim.stored_tensor import (
    Part,
    StoredTensor,
    check_tensors,
    damaged,
    dtype_named,
    read_checksummed,
    read_small,
    write_elements,
)

METADATA = ".metadata"  # written last, and moved into place: its presence means "complete"
CONTENTS = "contents.json"

# By key the dtype and shape of a tensor, and the fields of the ``Part`` that a rank gives, without
# their names, because ranks exchange plans; in memory the first two.
Plan = Mapping[str, Sequence[Any]]

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
                plan[key] += [name, *write_elements(file, row.flat)]
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
    content, data = translated(folder) if old else read_checksummed(described)
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
        raise damaged(described, error) from error
    if expected != zlib.crc32(metadata):
        raise damaged(folder / METADATA, "its checksum differs")
    check_tensors(folder, tensors)
    return tensors, values, hashlib.sha256(data).hexdigest()
