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
import torch.distributed as dist
from torch import Tensor

from ddp_lite.ranks import Ranks
from shard_optim.bucket_layout import Row
from shard_optim.communication import CollectiveError
from shard_optim.dcp_folder import read_dcp_description
from shard_optim.json_messages import all_gather_values, decode, encode
from shard_optim.mesh import Mesh
from shard_optim.stored_tensor import (
    Contents,
    Part,
    StoredTensor,
    check_tensors,
    coverage,
    damaged,
    dtype_named,
    read_checksummed,
    read_elements,
    read_small,
)

METADATA = ".metadata"  # written last, and moved into place: its presence means "complete"
CONTENTS = "contents.json"


# --- writing ---------------------------------------------------------------------------------


def write_folder(
    folder: str | Path,
    rows: Mapping[str, Row],
    values: Mapping[str, Any],
    ranks: Ranks,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a new checkpoint. Collective; the folder becomes one at the very end.

    Args:
        folder: the same on every rank. It must not hold a checkpoint.
        rows: this rank's parts of tensors, by key; together, the ranks give each tensor once.
        values: what ``encode`` accepts, by key. The first rank that gives a key counts.
        ranks: that hold the state.
        group: the ranks that write, if these are others.

    Raises:
        CollectiveError: on every rank, if one of them failed.
    """
    rank = (group or ranks.group).rank()

    def all_ranks(call: Callable[[], Any]) -> list[Any]:
        return together("saving a checkpoint", ranks, call, group)

    folder = Path(folder)

    def prepare() -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        return {key: row.described for key, row in rows.items()}, values

    prepared = all_ranks(prepare)
    check_plans([described for described, _ in prepared])
    written = all_ranks(lambda: write_file(folder, rank, rows))

    def finish() -> None:
        tensors: dict[str, StoredTensor] = {}
        for described, places in zip((d for d, _ in prepared), written, strict=True):
            for key, (dtype, shape, first, count) in described.items():
                parts = list(tensors[key].parts) if key in tensors else []
                if count:
                    parts.append(Part(first=first, count=count, **places[key]))
                parts.sort(key=lambda part: part.first)
                tensors[key] = StoredTensor(dtype=dtype, shape=shape, parts=tuple(parts))
        merged: dict[str, Any] = {}
        for _, given in prepared:
            merged = given | merged
        _write_descriptions(folder, tensors, merged)

    all_ranks(lambda: finish() if rank == 0 else None)


def check_plans(plans: Sequence[Mapping[str, Any]]) -> None:
    """Every rank checks the same plans, so every rank raises the same error.

    Raises:
        ValueError: if ranks give different dtypes or shapes, or do not cover a tensor once.
    """
    given: dict[str, list[tuple[int, int]]] = {}
    kinds: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for key, (dtype, shape, first, count) in plan.items():
            if kinds.setdefault(key, (dtype, shape)) != (dtype, shape):
                raise ValueError(
                    f"every rank must hold {key} with the same dtype and shape, but rank {rank} "
                    f"has {dtype} {tuple(shape)} where another has {kinds[key]}. Build the same "
                    "model and optimizer on every rank"
                )
            given.setdefault(key, []).extend([(first, count)] if count else [])
    for key, spans in given.items():
        if problem := coverage(math.prod(kinds[key][1]), spans):
            raise ValueError(
                f"the ranks must hold every element of {key} exactly once, but {problem}. Build "
                "the same model and optimizer on every rank, and step it on every rank or on none"
            )


class _Checksummed:
    """A file that is being written, and the CRC-32 of what has been written through this object."""

    def __init__(self, file: BinaryIO) -> None:
        self.flush, self._file = file.flush, file
        self.crc32 = 0

    def write(self, data: Any) -> int:
        """Writes bytes and takes them into the checksum."""
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._file.write(data)


def write_file(folder: Path, rank: int, rows: Mapping[str, Row]) -> dict[str, dict[str, Any]]:
    """Writes one rank's file.

    Returns:
        For each key the fields of its ``Part`` that say where it is.
    """
    name, places = f"__{rank}_0.distcp", {}
    with (folder / name).open("wb") as file:
        for key, row in rows.items():
            if not row.place.span[1]:
                continue
            stream, offset = _Checksummed(file), file.tell()
            # A copy, because torch.save would write everything that shares its memory.
            torch.save(row.flat.to("cpu", copy=True).contiguous(), stream)  # type: ignore[arg-type]
            place = {"file": name, "offset": offset, "length": file.tell() - offset}
            places[key] = place | {"crc32": stream.crc32}
        file.flush()
        os.fsync(file.fileno())
    return places


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
                "shape": list(tensor.shape),
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
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    described: dict[str, Any] = {}
    stored_at: dict[Any, Any] = {}
    for key, tensor in tensors.items():
        chunks = []
        for part in tensor.parts:
            offsets = torch.Size([part.first])
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([part.count])))
            stored_at[MetadataIndex(key, offsets)] = _StorageInfo(
                relative_path=part.file, offset=part.offset, length=part.length
            )
        described[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size([tensor.numel]),
            chunks=chunks,
        )
    return pickle.dumps(
        Metadata(state_dict_metadata=described, planner_data={}, storage_data=stored_at)
    )


# --- reading ---------------------------------------------------------------------------------


def read_contents(folder: str | Path, ranks: Mesh) -> Contents:
    """The description of a checkpoint. Collective.

    Raises:
        FileNotFoundError: on every rank, if the folder holds no complete checkpoint.
        ValueError: on every rank, if its description is damaged or impossible, or if ranks have
            read different checkpoints.
        CollectiveError: if a peer died or timed out, or could not read.
    """
    found: list[Contents] = []

    def read() -> None:
        found.append(_read_description(Path(folder)))

    together("loading a checkpoint", ranks.shards, read)
    identities = ranks.gather("loading a checkpoint", found[0].identity)
    others = [rank for rank, identity in enumerate(identities) if identity != identities[0]]
    if others:
        raise ValueError(
            f"every rank must load the same checkpoint, but rank {others[0]} has read another one "
            f"than rank 0. Pass the same folder on every rank, here {folder}"
        )
    return found[0]


def _read_description(folder: Path) -> Contents:
    if not (folder / METADATA).exists():
        raise FileNotFoundError(
            f"a checkpoint must have been saved completely, but {folder} lacks {METADATA}. Load an "
            "earlier one"
        )
    if not os.path.lexists(folder / CONTENTS):
        contents = read_dcp_description(folder)
    else:
        content, data = read_checksummed(folder / CONTENTS)
        metadata = read_small(folder / METADATA)
        try:
            contents = Contents(
                tensors={
                    key: StoredTensor(
                        dtype=dtype_named(entry["dtype"]),
                        shape=tuple(entry["shape"]),
                        parts=tuple(Part(**part) for part in entry["parts"]),
                    )
                    for key, entry in content["tensors"].items()
                },
                values={key: decode(value) for key, value in content["values"].items()},
                identity=hashlib.sha256(data).hexdigest(),
            )
            expected = content["metadata_crc32"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise damaged(folder / CONTENTS, error) from error
        if expected != zlib.crc32(metadata):
            raise damaged(folder / METADATA, "its checksum differs")
    check_tensors(folder, contents.tensors)
    return contents


def read_ranges(
    folder: str | Path,
    contents: Contents,
    wanted: Mapping[str, tuple[int, int]],
    ranks: Ranks,
) -> dict[str, Tensor]:
    """Reads parts of tensors that any number of ranks wrote. Collective.

    Args:
        folder: the same on every rank.
        contents: of this folder.
        wanted: what this rank wants, by key: the first element and the number of elements.
        ranks: that read.

    Returns:
        By key a vector on the CPU, in the dtype that is stored.

    Raises:
        ValueError: on every rank, if a file is damaged.
        CollectiveError: on every rank, if one of them failed in another way.
    """
    found: dict[str, Tensor] = {}

    def read() -> None:
        for key, (first, count) in wanted.items():
            found[key] = read_elements(Path(folder), key, contents.tensors[key], first, count)

    together("loading a checkpoint", ranks, read)
    return found


# --- agreement -------------------------------------------------------------------------------


def _failure_to_write(error: BaseException | None) -> OSError | None:
    """The operating system's error behind one of ``torch.save``'s, which ends its file even then.

    On a full disk that complains of a position in the file.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def together(
    what: str, ranks: Ranks, call: Callable[[], Any], group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Runs ``call`` on every rank and returns all results, or raises on every rank.

    Args:
        what: the call, in words.
        ranks: that make it.
        call: returns what ``encode`` accepts.
        group: the ranks that make it, if these are others.
    """
    kind, problem, value = "", None, None
    try:
        value = call()
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        cause = _failure_to_write(error) or error
        kind, problem = type(cause).__name__, str(cause)
    mine = (kind, problem, value)
    if group is None:
        everyone = ranks.together(what, all_gather_values, mine, ranks.control)
    else:
        everyone = ranks.call(what, all_gather_values, mine, group)
    failed = {rank: (k, p) for rank, (k, p, _) in enumerate(everyone) if p is not None}
    if failed:
        for known in (FileExistsError, FileNotFoundError, TypeError, ValueError):
            if all(kind == known.__name__ for kind, _ in failed.values()):
                raise known(next(problem for _, problem in failed.values()))
        shown = "; ".join(f"rank {rank}: {kind}: {text}" for rank, (kind, text) in failed.items())
        raise CollectiveError(
            f"every rank must succeed in {what}, but some failed: {shown}. Earlier checkpoints are "
            "untouched. Fix the cause and try again"
        )
    return [value for _, _, value in everyone]
