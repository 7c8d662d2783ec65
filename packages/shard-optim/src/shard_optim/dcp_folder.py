"""Folders that shard-optim wrote before ``contents.json``: read without building any object.

Their descriptions and small values are pickles. ``read_pickle`` looks no name up: where a pickle
would make an object, it makes a ``Made``, which only says what would have been called with which
arguments. So a stranger's file reaches no class and no function.
"""

from __future__ import annotations

import hashlib
import io
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
    from_bytes,
    open_regular,
    read_checksummed,
    read_small,
)

CHECKSUMS = "checksums.json"

# The largest of a parameter's small values, which is a dictionary of numbers.
_MOST_VALUE_BYTES = 16 * 1024**2


class Made:
    """Stands for an object that a pickle describes and nobody makes.

    Each name in a pickle becomes a subclass of this one, so that unpickling can only make these.

    Attributes:
        name: of what would have been called, such as ``torch.Size``.
        args: its arguments.
        state: what would have been assigned to the object's attributes.
    """

    name = ""
    state: Any = None

    args: tuple[Any, ...]

    def __new__(cls, *args: Any) -> Made:
        """Whichever way the pickle makes it."""
        made = super().__new__(cls)
        made.args = args
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _PlainUnpickler(pickle.Unpickler):
    """Looks no name up, calls nothing but ``Made``, and loads nothing from elsewhere."""

    def find_class(self, module: str, name: str) -> type[Made]:
        """A class of its own for each name."""
        return type("Made", (Made,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Made:
        """Where torch keeps a tensor's memory."""
        return Made(*pid)


def read_pickle(data: bytes) -> Any:
    """The plain data of a pickle.

    Returns:
        Numbers, strings and containers of these; ``Made`` for objects, classes of it for names.

    Raises:
        Exception: of any class, for damaged bytes.
    """
    return _PlainUnpickler(io.BytesIO(data)).load()


def _dtype(named: type[Made]) -> torch.dtype:
    """The dtype that a pickle names."""
    return dtype_named(named.name.removeprefix("torch."))


def _sizes(made: Made) -> tuple[int, ...]:
    """A ``torch.Size``."""
    if made.name != "torch.Size":
        raise ValueError(f"it names {made.name} where torch.Size is due")
    return tuple(made.args[0])


def read_dcp_description(folder: Path) -> Contents:
    """The description of such a folder.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is damaged.
    """
    metadata = folder / ".metadata"
    data = read_small(metadata)
    checksums, lines = read_checksummed(folder / CHECKSUMS)
    try:
        tensors, places = _described(read_pickle(data), checksums["items"])
    except Exception as error:  # damaged instructions can make anything of the stack
        raise damaged(metadata, error) from error
    values = {}
    for key, part in places.items():
        path = folder / Path(part.file).name
        with open_regular(path) as file:
            if part.length > _MOST_VALUE_BYTES:
                raise damaged(path, f"{key} takes {part.length} bytes")
            file.seek(part.offset)
            saved = file.read(part.length)
        if zlib.crc32(saved) != part.crc32:
            raise damaged(path, f"the checksum of {key} differs")
        try:
            values[key] = _saved_value(saved)
        except Exception as error:
            raise damaged(path, f"{key}: {error}") from error
    identity = hashlib.sha256(data + lines).hexdigest()
    return Contents(tensors=tensors, values=values, identity=identity)


def _described(
    metadata: Any, crc_of: Mapping[str, int]
) -> tuple[dict[str, StoredTensor], dict[str, Part]]:
    """The tensors, and where the small values are, by key."""
    top = metadata.state
    stored_at: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}
    for index, info in top["storage_data"].items():
        offset = _sizes(index.state["offset"]) if index.state.get("offset") else None
        stored_at[index.state["fqn"], offset] = info.state

    def part_of(key: str, offsets: tuple[int, ...] | None, first: int, count: int) -> Part:
        info = stored_at[key, offsets]
        return Part(
            first=first,
            count=count,
            file=info["relative_path"],
            offset=info["offset"],
            length=info["length"],
            crc32=crc_of[f"{key} {','.join(map(str, offsets or ()))}"],
        )

    tensors, places = {}, {}
    for key, entry in top["state_dict_metadata"].items():
        if entry.name.endswith("BytesStorageMetadata"):
            places[key] = part_of(key, None, 0, 0)
            continue
        parts = []
        for chunk in entry.state["chunks"]:
            offsets, sizes = _sizes(chunk.state["offsets"]), _sizes(chunk.state["sizes"])
            if len(sizes) != 1 and any(offsets):
                raise ValueError(f"{key} is stored in blocks")
            first = offsets[0] if len(offsets) == 1 else 0
            parts.append(part_of(key, offsets, first, torch.Size(sizes).numel()))
        tensors[key] = StoredTensor(
            dtype=_dtype(entry.state["properties"].state[0]),
            shape=_sizes(entry.state["size"]),
            parts=tuple(sorted((p for p in parts if p.count), key=lambda part: part.first)),
        )
    return tensors, places


def _saved_value(saved: bytes) -> Any:
    """What ``torch.save`` wrote: numbers, strings, containers and small tensors."""
    archive = zipfile.ZipFile(io.BytesIO(saved))
    by_name = {name.partition("/")[2]: name for name in archive.namelist()}

    def entry(name: str) -> bytes:
        info = archive.getinfo(by_name[name])
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError("its archive is compressed")
        return archive.read(info)

    def plain(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(plain(item) for item in value)
        if isinstance(value, dict):
            return {plain(key): plain(item) for key, item in value.items()}
        if isinstance(value, type) and issubclass(value, Made):
            return _dtype(value)
        if not isinstance(value, Made):
            return value
        if value.name == "torch.Size":
            return torch.Size(value.args[0])
        if value.name == "torch._utils._rebuild_tensor_v2":
            storage, offset, size, stride, *_ = value.args
            _, kind, key, *_ = storage.args
            flat = from_bytes(bytearray(entry(f"data/{key}")), _dtype_of_storage(kind.name))
            return flat.as_strided(size, stride, offset).clone()
        raise ValueError(f"it names {value.name}")

    return plain(read_pickle(entry("data.pkl")))


def _dtype_of_storage(name: str) -> torch.dtype:
    """The dtype of ``torch.FloatStorage`` and the like."""
    words = {"Byte": "uint8", "Char": "int8", "Short": "int16", "Long": "int64"}
    kind = name.removeprefix("torch.").removesuffix("Storage")
    return dtype_named(words.get(kind, kind.lower()))
