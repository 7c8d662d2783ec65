"""Variants as text: ``bucketed(bucket_size_mb=1) + sharded(reduce_gradients), compile=blocks``.

A variant is a wrapper, an optimizer or both with ``+`` between, then settings by name. A wrapper
or an optimizer is a name, or ``package.module:name`` of any class that can be imported, with
arguments in brackets. A value is a number, ``true``, ``false``, ``none``, a word, or any text in
quotes; an argument without a value is ``true``. Labels are written in this form, so a label can be
given again.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from bench_harness.convert import cut

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
