"""Values of presets and of the command line: cut out of texts, and checked against annotations."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

import msgspec

_OPENING, _CLOSING, _QUOTES = "([{", ")]}", "'\""


def converted(what: str, value: Any, hint: Any, *, written: bool = False) -> Any:
    """A value as its annotation says: lists become tuples, whole numbers floats.

    Args:
        what: the name in an error.
        written: text stands for a number or a truth value too, as on the command line.

    Raises:
        ValueError: the value does not fit; the message says what does.
    """
    try:
        return msgspec.convert(value, hint, strict=not written)
    except msgspec.ValidationError:
        raise ValueError(
            f"{what} must be {_described(hint)}, but got {value!r}. Correct the value."
        ) from None


def cut(text: str, at: str) -> list[str]:
    """The parts of a text between a character, where it stands outside of brackets and quotes.

    Raises:
        ValueError: a bracket or a quote is not closed.
    """
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        else:
            depth += (character in _OPENING) - (character in _CLOSING)
        if character == at and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    if depth > 0 or quote:
        raise ValueError(
            f"text must close what it opens, but got {text!r}. Add the bracket or the quote."
        )
    return [part.strip() for part in parts]


def is_list(hint: Any) -> bool:
    """Whether an annotation is a tuple of any length."""
    return typing.get_origin(hint) is tuple


def allows_none(hint: Any) -> bool:
    """Whether an annotation is a union with None."""
    return types.NoneType in typing.get_args(hint)


def kinds(hint: Any) -> list[str]:
    """The names of an annotation's types, of its items' for a tuple; literals and None left out."""
    item = typing.get_args(hint)[0] if is_list(hint) else hint
    members = typing.get_args(item) if _is_union(item) else (item,)
    plain = [typing.get_origin(member) or member for member in members]
    return [kind.__name__ for kind in plain if kind not in (types.NoneType, Literal)]


def _described(hint: Any) -> str:
    if is_list(hint):
        return f"a list of {' or '.join(kinds(hint))}"
    members = typing.get_args(hint) if _is_union(hint) else (hint,)
    literals = [repr(c) for m in members if typing.get_origin(m) is Literal for c in m.__args__]
    names = kinds(hint)
    if not literals and len(names) == 1:
        return f"of type {names[0]}"
    return "one of " + ", ".join([*literals, *(f"a value of type {name}" for name in names)])


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)
