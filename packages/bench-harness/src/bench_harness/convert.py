"""Texts of presets and of the command line: cut into values, and checked against annotations.

A variant of ``train-step`` is written ``bucketed(bucket_size_mb=1) + sharded(reduce_gradients),
compile=blocks``: a wrapper, an optimizer or both with ``+`` between, then settings by name. A
wrapper or an optimizer is a name, or ``package.module:name`` of any class that can be imported,
with arguments in brackets. A value is a number, ``true``, ``false``, ``none``, a word, or any text
in quotes; an argument without a value is ``true``. Labels are written in this form, so a label can
be given again.
"""

from __future__ import annotations

import ast
import re
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


_CALL = re.compile(r"(?P<name>[A-Za-z_][\w.:-]*(?: [A-Za-z]\w*)?)\s*(?:\((?P<arguments>.*)\))?")
_SETTING = re.compile(r"(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>.*)", re.DOTALL)
_WORD = re.compile(r"[\w.:+-]+")
_WORDS = {"true": True, "false": False, "none": None}


def split(text: str) -> list[str]:
    """The variants of a list with commas, each with the settings that follow it."""
    found: list[str] = []
    for part in filter(None, cut(text, ",")):
        if found and _SETTING.fullmatch(part):
            found[-1] += f", {part}"
        else:
            found.append(part)
    return found


def parse_call(text: str) -> dict[str, Any]:
    """A wrapper or an optimizer as a table with its ``name`` and arguments.

    Raises:
        ValueError: the text has another form, or an argument is given twice.
    """
    match = _CALL.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"variant must be of the form name(argument=value, flag), but got {text!r}. Correct it."
        )
    table: dict[str, Any] = {"name": match["name"]}
    for part in filter(None, cut(match["arguments"] or "", ",")):
        name, equals, written = (piece.strip() for piece in part.partition("="))
        if name in table:
            raise ValueError(
                f"{match['name']} must have each argument once, but got {name} twice. Remove one."
            )
        table[name] = value(written) if equals else True
    return table


def parse_variant(text: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The wrapper and the optimizer in the order in which they stand, and settings by name.

    Raises:
        ValueError: the text has another form.
    """
    first, *rest = cut(text, ",")
    settings = {}
    for part in rest:
        match = _SETTING.fullmatch(part)
        if match is None:
            raise ValueError(
                f"variant must have settings as name=value, but got {part!r}. Correct it."
            )
        settings[match["name"]] = value(match["value"])
    return [parse_call(part) for part in cut(first, "+")], settings


def value(text: str) -> Any:
    """A value as it is written.

    Raises:
        ValueError: it is neither a number nor a word nor a text in quotes.
    """
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if _WORD.fullmatch(text):
            return text
        raise ValueError(
            f"value must be a number, a word or a text in quotes, but got {text!r}. Correct it."
        ) from None
