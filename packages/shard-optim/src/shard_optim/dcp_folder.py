"""Folders that shard-optim wrote before ``contents.json``, described as that file does.

Their description is a pickle, in which no name is looked up: where a pickle would make an object,
``_Made`` only says what would have been called with which arguments. So a stranger's file reaches
no class and no function. Their small values are read by ``torch.load(weights_only=True)``, which
makes numbers, strings, containers and tensors only.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from shard_optim.json_messages import encode
from shard_optim.stored_tensor import (
    Part,
    are_counts,
    damaged,
    open_part,
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
        return type("_Made", (_Made,), {"name": name})


def translated(folder: Path) -> tuple[dict[str, Any], bytes]:
    """What ``contents.json`` would hold, and the bytes of the files that tell it.

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
        if not are_counts(where):
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
        raise damaged(path, f"{key} takes {part.length} bytes")
    with open_part(folder, key, part) as file:
        saved = io.BytesIO(file.read(part.length))
    try:
        if any(entry.compress_type for entry in zipfile.ZipFile(saved).infolist()):
            raise ValueError("its archive is compressed")
        saved.seek(0)
        return torch.load(saved, weights_only=True, map_location="cpu")
    except Exception as error:
        raise damaged(path, f"{key}: {error}") from error
