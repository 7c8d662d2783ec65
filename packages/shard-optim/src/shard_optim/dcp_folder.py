"""Folders that shard-optim wrote before ``contents.json``: read without building any object.

Their description is a pickle, in which no name is looked up: where a pickle would make an object,
``_Made`` only says what would have been called with which arguments. So a stranger's file reaches
no class and no function. Their small values are read by ``torch.load(weights_only=True)``, which
makes numbers, strings, containers and tensors only.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shard_optim.stored_tensor import (
    Contents,
    Part,
    StoredTensor,
    damaged,
    dtype_named,
    open_regular,
    read_checksummed,
    read_small,
)

# The largest of a parameter's small values, which is a dictionary of numbers.
_MOST_VALUE_BYTES = 16 * 1024**2


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
        return type("_Made", (_Made,), {"name": f"{module}.{name}"})


def read_dcp_description(folder: Path) -> Contents:
    """The description of such a folder.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is damaged.
    """
    data = read_small(folder / ".metadata")
    checksums, lines = read_checksummed(folder / "checksums.json")
    try:
        top = _PlainUnpickler(io.BytesIO(data)).load().state
        tensors, places = _described(top, checksums["items"])
    except Exception as error:  # damaged instructions can make anything of the stack
        raise damaged(folder / ".metadata", error) from error
    values = {key: _saved_value(folder, key, part) for key, part in places.items()}
    identity = hashlib.sha256(data + lines).hexdigest()
    return Contents(tensors=tensors, values=values, identity=identity)


def _described(
    top: Mapping[str, Any], crc_of: Mapping[str, int]
) -> tuple[dict[str, StoredTensor], dict[str, Part]]:
    """The tensors, and where the small values are, by key."""

    def numbers(size: _Made | None) -> tuple[int, ...]:
        return tuple(size.args[0]) if size else ()

    stored_at = {
        (index.state["fqn"], numbers(index.state.get("offset"))): info.state
        for index, info in top["storage_data"].items()
    }

    def part_of(key: str, offsets: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Part:
        if len(sizes) != 1 and any(offsets):
            raise ValueError(f"{key} is stored in blocks")
        info = stored_at[key, offsets]
        return Part(
            first=sum(offsets),
            count=math.prod(sizes),
            file=info["relative_path"],
            offset=info["offset"],
            length=info["length"],
            crc32=crc_of[f"{key} {','.join(map(str, offsets))}"],
        )

    tensors, places = {}, {}
    for key, entry in top["state_dict_metadata"].items():
        if entry.name.endswith("BytesStorageMetadata"):
            places[key] = part_of(key)
            continue
        chunks = [chunk.state for chunk in entry.state["chunks"]]
        parts = [part_of(key, numbers(c["offsets"]), numbers(c["sizes"])) for c in chunks]
        tensors[key] = StoredTensor(
            dtype=dtype_named(entry.state["properties"].state[0].name.removeprefix("torch.")),
            shape=numbers(entry.state["size"]),
            parts=tuple(sorted((p for p in parts if p.count), key=lambda part: part.first)),
        )
    return tensors, places


def _saved_value(folder: Path, key: str, part: Part) -> Any:
    """What ``torch.save`` wrote: numbers, strings, containers and small tensors."""
    path = folder / Path(part.file).name
    with open_regular(path) as file:
        if part.length > _MOST_VALUE_BYTES:
            raise damaged(path, f"{key} takes {part.length} bytes")
        file.seek(part.offset)
        saved = file.read(part.length)
    if zlib.crc32(saved) != part.crc32:
        raise damaged(path, f"the checksum of {key} differs")
    try:
        if any(entry.compress_type for entry in zipfile.ZipFile(io.BytesIO(saved)).infolist()):
            raise ValueError("its archive is compressed")
        return torch.load(io.BytesIO(saved), weights_only=True, map_location="cpu")
    except Exception as error:
        raise damaged(path, f"{key}: {error}") from error
