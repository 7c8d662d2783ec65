"""Folders of ``torch.distributed.checkpoint`` (DCP), written and read by all ranks together.

The files are those of DCP's ``FileSystemWriter``, and its own tools can read them. Three things
differ from its ``save`` and ``load``:

- Ranks agree through ``exchange.py`` instead of object collectives, so what passes between ranks
  needs neither NumPy nor pickle, and every rank raises the same error.
- Reading never runs code from a checkpoint. The metadata, a pickle, may name nothing but the
  classes that describe tensors; everything else is read with ``weights_only=True``.
- ``checksums.json`` holds a CRC-32 of every stored item and of the metadata. Reading verifies them.

DCP's default planners know whole tensors and its own sharded kinds. ``Range`` describes a plain
vector of which each rank holds a part, beside the tensor instead of by a subclass of it.

Import this module only when a checkpoint is written or read: its imports change warning filters.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pathlib
import pickle
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import _get_layout

from shard_optim.communication import CollectiveError, guarded
from shard_optim.exchange import all_gather_values, encode

METADATA = ".metadata"  # written last, and moved into place: its presence means "complete"
CHECKSUMS = "checksums.json"

# How much of a file is in memory while its checksum is computed.
_CHUNK_BYTES = 16 * 1024**2

# What plans and results consist of: the dataclasses that ranks exchange.
_EXCHANGED = (
    BytesIOWriteData,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    WriteResult,
    _StorageInfo,
)
_DESCRIBED = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)


@dataclass(frozen=True, kw_only=True)
class Range:
    """Elements ``[offset, offset + len(values))`` of a vector of ``total`` elements.

    Attributes:
        values: one-dimensional; read when saving, filled when loading.
        offset: place of the first of them in the vector.
        total: elements of the whole vector.
    """

    values: Tensor
    offset: int
    total: int

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The range as a checkpoint's metadata have it."""
        return ChunkStorageMetadata(
            offsets=torch.Size([self.offset]), sizes=torch.Size([self.values.numel()])
        )


class RangeSavePlanner(DefaultSavePlanner):
    """Saves the state dict as the default planner does, and this rank's ranges beside it.

    Args:
        ranges: by key; other ranks hold the other ranges of the same keys.
    """

    def __init__(self, ranges: Mapping[str, Range]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._ranges = ranges

    def create_local_plan(self) -> SavePlan:
        """The default plan and one item per range."""
        plan = super().create_local_plan()
        items = [
            WriteItem(
                index=MetadataIndex(key, part.chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=part.chunk,
                    properties=TensorProperties.create_from_tensor(part.values),
                    size=torch.Size([part.total]),
                ),
            )
            for key, part in self._ranges.items()
        ]
        return dataclasses.replace(plan, items=[*plan.items, *items])

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What an item of the plan stands for."""
        part = self._ranges.get(index.fqn)
        return super().lookup_object(index) if part is None else part.values


class RangeLoadPlanner(DefaultLoadPlanner):
    """Loads the state dict as the default planner does, and fills this rank's ranges.

    Args:
        ranges: by key; however many ranks wrote them.

    Raises:
        ValueError: while planning, if a saved vector has another length or is not one.
    """

    def __init__(self, ranges: Mapping[str, Range]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._ranges = ranges

    def create_local_plan(self) -> LoadPlan:
        """The default plan, and the stored parts that cover each range."""
        plan = super().create_local_plan()
        assert self.metadata is not None
        items = list(plan.items)
        for key, part in self._ranges.items():
            stored = self.metadata.state_dict_metadata[key]
            size = stored.size if isinstance(stored, TensorStorageMetadata) else None
            if not isinstance(stored, TensorStorageMetadata) or size != torch.Size([part.total]):
                raise ValueError(
                    f"the checkpoint must hold {part.total} elements under {key}, but it holds "
                    f"{'no tensor' if size is None else tuple(size)}. Load it into the optimizer "
                    "that it was saved from."
                )
            items += create_read_items_for_chunk_list(key, stored, [part.chunk])
        return dataclasses.replace(plan, items=items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Reads a value that is no tensor, without running code from it."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where the data of an item of the plan go."""
        part = self._ranges.get(index.fqn)
        return super().lookup_tensor(index) if part is None else part.values


def write_folder(
    folder: str | Path,
    items: Mapping[str, Any],
    ranges: Mapping[str, Range],
    group: dist.ProcessGroup,
) -> None:
    """Writes a new checkpoint. Collective; it becomes one at the very end.

    Args:
        folder: the same on every rank. It must not hold a checkpoint.
        items: tensors, and other values that ``exchange.encode`` accepts, by key. What several
            ranks give under one key is stored once.
        ranges: this rank's ranges of vectors, by key.
        group: the ranks that write.

    Raises:
        CollectiveError: on every rank, if one of them failed.
    """
    rank = dist.get_rank(group)
    writer = FileSystemWriter(folder)
    planner = RangeSavePlanner(ranges)

    def plan_own() -> list[WriteItem]:
        for value in items.values():
            encode(value)  # refuses what could not be loaded again
        planner.set_up_planner(dict(items), writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0)
        return list(writer.prepare_local_plan(planner.create_local_plan()).items)

    def write(plan: SavePlan) -> list[tuple[WriteResult, int]]:
        writing = writer.write_data(planner.finish_plan(plan), planner)
        writing.wait()
        # What was written is read back, usually from the page cache.
        return [(result, _checksum(folder, result.storage_data)) for result in writing.value()]

    def finish(metadata: Metadata, written: list[list[tuple[WriteResult, int]]]) -> None:
        results = [[result for result, _ in results] for results in written]
        stored_at = {result.index: result.storage_data for part in results for result in part}
        _write_checksums(
            Path(folder),
            _digest(metadata.state_dict_metadata, stored_at),
            {_key(result.index): checksum for part in written for result, checksum in part},
        )
        writer.finish(metadata, results)

    what = "saving a checkpoint"
    plans = [SavePlan(own) for own in _together(what, group, plan_own)]
    # Deterministic, so that every rank makes the global plan for itself.
    plans, metadata = planner.create_global_plan(plans)
    plan = writer.prepare_global_plan(plans)[rank]
    written = _together(what, group, lambda: write(plan))
    _together(what, group, lambda: finish(metadata, written) if rank == 0 else None)


def read_metadata(folder: str | Path, group: dist.ProcessGroup) -> Metadata:
    """What a checkpoint holds. Collective.

    Raises:
        FileNotFoundError: on every rank, if the folder holds no complete checkpoint.
        ValueError: on every rank, if its metadata are damaged or name other classes.
    """
    found: list[Metadata] = []
    _together(
        "loading a checkpoint", group, lambda: found.append(CheckedReader(folder).read_metadata())
    )
    return found[0]


def read_folder(
    folder: str | Path,
    items: dict[str, Any],
    ranges: Mapping[str, Range],
    group: dist.ProcessGroup,
) -> None:
    """Reads parts of a checkpoint that any number of ranks wrote. Collective.

    Args:
        folder: the same on every rank.
        items: what this rank wants, by key: a tensor is filled, any other value is replaced.
        ranges: what this rank wants of vectors, by key; filled.
        group: the ranks that read.

    Raises:
        ValueError: on every rank, if a file is damaged or lacks what a rank wants.
        CollectiveError: on every rank, if one of them failed in another way.
    """
    reader = CheckedReader(folder)
    planner = RangeLoadPlanner(ranges)

    def read() -> None:
        metadata = reader.read_metadata()
        first = dist.get_rank(group) == 0
        planner.set_up_planner(items, metadata, first)
        reader.set_up_storage_reader(metadata, first)
        reader.read_data(planner.create_local_plan(), planner).wait()

    _together("loading a checkpoint", group, read)


def _failure_to_write(error: BaseException | None) -> OSError | None:
    """The operating system's error behind one of ``torch.save``'s, which ends its file even then.

    On a full disk that complains of a position in the file.
    """
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _together(what: str, group: dist.ProcessGroup, call: Callable[[], Any]) -> list[Any]:
    """Runs ``call`` on every rank and returns all results, or raises on every rank."""
    kind, problem, value = "", None, None
    try:
        value = call()
    except Exception as error:  # noqa: BLE001 - raised below, on every rank
        cause = _failure_to_write(error) or error
        kind, problem = type(cause).__name__, str(cause)
    everyone = guarded(
        what, group, lambda: all_gather_values((kind, problem, value), group, classes=_EXCHANGED)
    )
    failed = {rank: (k, p) for rank, (k, p, _) in enumerate(everyone) if p is not None}
    if failed:
        for known in (FileNotFoundError, ValueError):
            if all(kind == known.__name__ for kind, _ in failed.values()):
                raise known(next(problem for _, problem in failed.values()))
        shown = "; ".join(f"rank {rank}: {kind}: {text}" for rank, (kind, text) in failed.items())
        raise CollectiveError(
            f"every rank must succeed in {what}, but some failed: {shown}. Earlier checkpoints are "
            "untouched. Fix the cause and try again"
        )
    return [value for _, _, value in everyone]


class CheckedReader(FileSystemReader):
    """Reads a folder without running code from it, and only bytes whose checksums are right.

    Args:
        folder: of ``write_folder``.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._folder = Path(folder)
        self._checksums: dict[str, int] = {}

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Which items the folder holds, and in which files.

        Raises:
            FileNotFoundError: the folder holds no complete checkpoint.
            ValueError: its metadata or checksums are damaged, or name other classes.
        """
        for name in (METADATA, CHECKSUMS):
            if not (self._folder / name).exists():
                raise FileNotFoundError(
                    f"a checkpoint must have been saved completely, but {self._folder} lacks "
                    f"{name}. Load an earlier one"
                )
        digest, self._checksums = _read_checksums(self._folder)
        with (self._folder / METADATA).open("rb") as file:
            try:
                metadata = _MetadataUnpickler(file).load()
                found = _digest(metadata.state_dict_metadata, metadata.storage_data)
            except Exception as error:  # damaged bytes can make an unpickler raise anything
                raise _damaged(self._folder / METADATA, error) from error
        if found != digest:
            raise _damaged(self._folder / METADATA, "its checksum differs")
        assert isinstance(metadata, Metadata)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verifies the checksum of every item of the plan, then reads them.

        Raises:
            ValueError: a file is damaged.
        """
        for index in {item.storage_index for item in plan.items}:
            stored = self.storage_data[index]
            if _checksum(self._folder, stored) != self._checksums.get(_key(index)):
                raise _damaged(
                    self._folder / stored.relative_path, f"the checksum of {index.fqn} differs"
                )
        return super().read_data(plan, planner)


class _MetadataUnpickler(pickle.Unpickler):
    """Reads a metadata file; unlike its base class it looks names up in a table only."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local"):  # where the checkpoint was written
            return pathlib.PurePath
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        try:
            return _METADATA_CLASSES[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None


_METADATA_CLASSES: dict[tuple[str, str], Any] = {
    (cls.__module__, cls.__name__): cls
    for cls in (*_DESCRIBED, _MEM_FORMAT_ENCODING, Metadata, StorageMeta)
} | {("torch", "Size"): torch.Size, ("torch.serialization", "_get_layout"): _get_layout}


def _damaged(path: Path, reason: object) -> ValueError:
    return ValueError(
        f"a checkpoint must be as it was written, but {path} is damaged: {reason}. Load an earlier "
        "checkpoint"
    )


def _key(index: MetadataIndex) -> str:
    """A stored item's name: its key, and its offset if it is a part of a tensor."""
    offset = () if index.offset is None else tuple(index.offset)
    return f"{index.fqn} {','.join(map(str, offset))}"


def _checksum(folder: str | Path, stored: _StorageInfo) -> int:
    """CRC-32 of an item's bytes in its file."""
    checksum, left = 0, stored.length
    with (Path(folder) / stored.relative_path).open("rb") as file:
        file.seek(stored.offset)
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            checksum = zlib.crc32(chunk, checksum)
            left -= len(chunk)
    return checksum


def _digest(described: Mapping[str, Any], stored_at: Mapping[MetadataIndex, _StorageInfo]) -> int:
    """CRC-32 of what the metadata say about tensors and where they lie, in any order."""
    lines = [json.dumps([key, encode(value, _DESCRIBED)]) for key, value in described.items()]
    lines += [
        json.dumps([_key(index), stored.relative_path, stored.offset, stored.length])
        for index, stored in stored_at.items()
    ]
    return zlib.crc32("\n".join(sorted(lines)).encode())


def _write_checksums(folder: Path, metadata: int, items: Mapping[str, int]) -> None:
    """Writes two lines: the checksums, and the checksum of that line."""
    line = json.dumps({"algorithm": "crc32", "metadata": metadata, "items": items})
    with (folder / CHECKSUMS).open("w") as file:
        file.write(f"{line}\n{zlib.crc32(line.encode())}\n")
        file.flush()
        os.fsync(file.fileno())


def _read_checksums(folder: Path) -> tuple[int, dict[str, int]]:
    """The checksum of the metadata, and those of all items.

    Raises:
        ValueError: the file itself is damaged.
    """
    path = folder / CHECKSUMS
    try:
        line, own = path.read_text().splitlines()
        if zlib.crc32(line.encode()) != int(own):
            raise ValueError("its checksum differs")
        content = json.loads(line)
    except ValueError as error:
        raise _damaged(path, error) from error
    return content["metadata"], content["items"]
