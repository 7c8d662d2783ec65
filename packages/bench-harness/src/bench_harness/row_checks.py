"""Whether a line of a results file is a row: what reports, resuming and comparing rely on.

Rows come from files that may be damaged, written by another program, or somebody else's. Whatever
reads them may assume what is checked here, and nothing else.
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypedDict

import msgspec
from msgspec import Meta

from bench_harness.core import JsonValue, Row

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


class _Gpu(TypedDict):
    throttle_reasons: list[str]


class _Machine(TypedDict):
    """The state of a machine, as far as reports read it."""

    gpus: NotRequired[list[_Gpu]]


_Count: TypeAlias = Annotated[int, Meta(gt=0, lt=1 << 31)]
#: It names a folder, so it holds no separator and no dot.
_Key: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]


class _Row(TypedDict):
    schema: _Count
    case_rows: _Count
    case_key: _Key
    experiment: str
    label: str
    status: Literal["ok", "oom", "skipped", "timeout", "error"]
    environment: str
    started: str
    seconds: Annotated[float, Meta(ge=0)]
    config: dict[str, Any]
    error: str | None
    detail: str | None
    commit: str | None
    machine_before: NotRequired[_Machine | None]
    machine_after: NotRequired[_Machine | None]


def problem(row: Row) -> str | None:
    """What is wrong with a row, in a few words; None if nothing is."""
    wrong = next((name for name, value in row.items() if not _may_hold(name, value)), None)
    if wrong is None:
        try:
            msgspec.convert(row, _Row)
            return None
        except msgspec.ValidationError as error:
            missing = re.search("missing required field `(\\w+)`$", str(error))
            if missing is not None:
                return f"it has no {missing[1]}"
            place = re.search(r"`\$\.(\w+)", str(error))
            wrong = "" if place is None else place[1]
    return f"its {wrong} is {_short(row.get(wrong))}"


def _may_hold(name: str, value: JsonValue) -> bool:
    """Whether a column may hold a value: samples are numbers, and no integer is beyond a float."""
    if name.startswith("samples"):
        return value is None or (isinstance(value, list) and all(map(is_number, value)))
    held = value.values() if name == "config" and isinstance(value, dict) else [value]
    return not any(isinstance(each, int) and abs(each) >= 1 << 1023 for each in held)


def _short(value: JsonValue) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
