"""Folders that shard-optim wrote before ``contents.json``: read without building any object.

Their descriptions and small values are pickles. ``read_pickle`` follows a pickle's instructions but
calls nothing and looks no name up: where a pickle would make an object, it makes a ``Made``, which
only says what would have been called with which arguments. So a stranger's file reaches no class.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickletools
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shard_optim.stored import Part, StoredTensor, damaged, dtype_named, open_regular, read_small

CHECKSUMS = "checksums.json"

# The largest of a parameter's small values, which is a dictionary of numbers.
_MOST_VALUE_BYTES = 16 * 1024**2


@dataclass(eq=False)
class Made:
    """An object that a pickle describes and nobody makes.

    Attributes:
        name: of what would have been called, such as ``torch.Size``.
        args: its arguments.
        state: what would have been assigned to the object's attributes.
    """

    name: Any
    args: Any = ()
    state: Any = None


@dataclass(eq=False)
class _Pairs:
    """A dictionary, whose keys may be things that cannot be hashed."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


class _Name(str):
    """The name of something in a module."""


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NUMBERS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES")


def read_pickle(data: bytes) -> Any:
    """The plain data of a pickle.

    Returns:
        Numbers, strings, tuples, lists, ``_Pairs`` for dictionaries, ``Made`` for objects.

    Raises:
        ValueError: for an instruction that descriptions of tensors do not need, or damaged bytes.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        begin = max(index for index, item in enumerate(stack) if item is _MARK)
        taken = stack[begin + 1 :]
        del stack[begin:]
        return taken

    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in (*_NUMBERS, *_TEXTS):
            stack.append(argument)
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"):
            stack.append({"EMPTY_TUPLE": (), "EMPTY_LIST": [], "EMPTY_DICT": _Pairs()}[name])
        elif name in _TUPLES:
            taken = stack[-_TUPLES[name] :]
            del stack[-_TUPLES[name] :]
            stack.append(tuple(taken))
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in ("APPEND", "APPENDS"):
            taken = since_mark() if name == "APPENDS" else [stack.pop()]
            stack[-1].extend(taken)
        elif name in ("SETITEM", "SETITEMS"):
            taken = since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            stack[-1].items.extend(zip(taken[::2], taken[1::2], strict=True))
        elif name == "GLOBAL":
            stack.append(_Name(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_Name(f"{module}.{attribute}"))
        elif name in ("REDUCE", "NEWOBJ"):
            args, called = stack.pop(), stack.pop()
            stack.append(Made(called, args))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name == "BINPERSID":
            stack.append(Made("persistent", stack.pop()))
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "STOP":
            return stack.pop()
        else:
            raise ValueError(f"it has the instruction {name}")
    raise ValueError("it has no end")


def _attributes(made: Any) -> dict[str, Any]:
    """The attributes of an object, by name."""
    return dict(made.state.items)


def _sizes(made: Made) -> tuple[int, ...]:
    """A ``torch.Size``."""
    if made.name != "torch.Size":
        raise ValueError(f"it names {made.name} where torch.Size is due")
    return tuple(made.args[0])


def read_dcp_description(
    folder: Path,
) -> tuple[dict[str, StoredTensor], dict[str, Any], str]:
    """Tensors and small values by key, and the identity of such a folder.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is damaged.
    """
    metadata, checksums = folder / ".metadata", folder / CHECKSUMS
    data, lines = read_small(metadata), read_small(checksums)
    try:
        line, own = lines.decode().splitlines()
        if zlib.crc32(line.encode()) != int(own):
            raise ValueError("its checksum differs")
        crc_of: dict[str, int] = json.loads(line)["items"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(checksums, error) from error
    try:
        tensors, places = _described(read_pickle(data), crc_of)
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
    return tensors, values, hashlib.sha256(data + lines).hexdigest()


def _described(
    metadata: Any, crc_of: Mapping[str, int]
) -> tuple[dict[str, StoredTensor], dict[str, Part]]:
    """The tensors, and where the small values are, by key."""
    top = _attributes(metadata)
    stored_at: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}
    for index, info in top["storage_data"].items:
        place = _attributes(index)
        offset = _sizes(place["offset"]) if place.get("offset") else None
        stored_at[place["fqn"], offset] = _attributes(info)

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
    for key, entry in top["state_dict_metadata"].items:
        if entry.name.endswith("BytesStorageMetadata"):
            places[key] = part_of(key, None, 0, 0)
            continue
        fields = _attributes(entry)
        parts = []
        for chunk in fields["chunks"]:
            offsets = _sizes(_attributes(chunk)["offsets"])
            sizes = _sizes(_attributes(chunk)["sizes"])
            if len(sizes) != 1 and any(offsets):
                raise ValueError(f"{key} is stored in blocks")
            first = offsets[0] if len(offsets) == 1 else 0
            parts.append(part_of(key, offsets, first, torch.Size(sizes).numel()))
        tensors[key] = StoredTensor(
            dtype=dtype_named(fields["properties"].state[0].removeprefix("torch.")),
            shape=_sizes(fields["size"]),
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
        if isinstance(value, _Pairs):
            return {plain(key): plain(item) for key, item in value.items}
        if isinstance(value, _Name):
            return dtype_named(value.removeprefix("torch."))
        if not isinstance(value, Made):
            return value
        if value.name == "torch.Size":
            return torch.Size(value.args[0])
        if value.name == "torch._utils._rebuild_tensor_v2":
            storage, offset, size, stride, *_ = value.args
            _, kind, key, *_ = storage.args
            data = bytearray(entry(f"data/{key}"))
            dtype = _dtype_of_storage(kind)
            flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else None
            if flat is None:
                return torch.empty(size, dtype=dtype)
            return flat.as_strided(size, stride, offset).clone()
        raise ValueError(f"it names {value.name}")

    return plain(read_pickle(entry("data.pkl")))


def _dtype_of_storage(name: str) -> torch.dtype:
    """The dtype of ``torch.FloatStorage`` and the like."""
    words = {"Byte": "uint8", "Char": "int8", "Short": "int16", "Long": "int64"}
    kind = name.removeprefix("torch.").removesuffix("Storage")
    return dtype_named(words.get(kind, kind.lower()))
