"""Whether a line of a results file is a row: what reports, resuming and comparing rely on.

Rows come from files that may be damaged, written by another program, or somebody else's. Whatever
reads them may assume what is checked here, and nothing else.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from bench_harness.core import JsonValue, Row

#: How a case may end.
STATUSES = frozenset({"ok", "oom", "skipped", "timeout", "error"})

#: A case's key names a folder, so it holds no separator and no dot.
_KEY = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: What a terminal would obey instead of showing, C0 and C1 control characters but tab and newline,
#: and halves of surrogate pairs, which no file can hold.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
#: Where a line of JSON may hold one, which is cheaper than to look at every text in it.
_ESCAPED_CONTROL = re.compile(rb"\\u00|\\u[dD][89a-fA-F]|\\[bfr]|\x7f|\xc2[\x80-\x9f]")


def parse(line: bytes) -> Row | None:
    """The object that a line holds; None if it is not JSON, or not an object.

    Control characters become spaces, since rows are shown on terminals.
    """
    try:
        row = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    return shown(row) if _ESCAPED_CONTROL.search(line) else row


def _refuse(constant: str) -> JsonValue:
    raise ValueError(f"a row must be JSON, but got {constant}")  # NaN and infinity are not


def shown(value: JsonValue) -> JsonValue:
    """A value whose texts can be shown and written: what cannot be becomes a space."""
    if isinstance(value, str):
        return _CONTROL.sub(" ", value)
    if isinstance(value, list):
        return [shown(item) for item in value]
    if isinstance(value, dict):
        return {_CONTROL.sub(" ", name): shown(item) for name, item in value.items()}
    return value


def is_number(value: JsonValue) -> bool:
    """Whether a value is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _fits(value: JsonValue) -> bool:
    """Whether a value can stand in a column of numbers: no integer beyond what a float holds."""
    return not isinstance(value, int) or abs(value) < 1 << 1023


def _is_count(value: JsonValue) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _is_text(value: JsonValue) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: JsonValue) -> bool:
    return value is None or isinstance(value, str)


def _is_machine(value: JsonValue) -> bool:
    """The state of a machine, as far as reports read it."""
    if value is None:
        return True
    gpus = value.get("gpus", []) if isinstance(value, dict) else None
    return isinstance(gpus, list) and all(
        isinstance(gpu, dict)
        and isinstance(reasons := gpu.get("throttle_reasons"), list)
        and all(map(_is_text, reasons))
        for gpu in gpus
    )


def _is_samples(value: JsonValue) -> bool:
    return value is None or (isinstance(value, list) and all(map(is_number, value)))


_NEEDED: dict[str, Callable[[Any], bool]] = {
    "schema": _is_count,
    "case_rows": _is_count,
    "case_key": lambda value: _is_text(value) and _KEY.fullmatch(value) is not None,
    "experiment": _is_text,
    "label": _is_text,
    "status": lambda value: _is_text(value) and value in STATUSES,
    "environment": _is_text,
    "started": _is_text,
    "seconds": lambda value: is_number(value) and value >= 0,
    "config": lambda value: isinstance(value, dict) and all(map(_fits, value.values())),
    "error": _is_text_or_none,
    "detail": _is_text_or_none,
    "commit": _is_text_or_none,
}
_CHECKED: dict[str, Callable[[Any], bool]] = {
    "machine_before": _is_machine,
    "machine_after": _is_machine,
}


def problem(row: Row) -> str | None:
    """What is wrong with a row, in a few words; None if nothing is."""
    for name, right in _NEEDED.items():
        if name not in row:
            return f"it has no {name}"
        if not right(row[name]):
            return f"its {name} is {_short(row[name])}"
    for name, value in row.items():
        right = _is_samples if name.startswith("samples") else _CHECKED.get(name, _fits)
        if not right(value):
            return f"its {name} is {_short(value)}"
    return None


def _short(value: JsonValue) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
