"""The run folder: append-only JSON lines, so that whatever was measured survives whatever happens.

Layout of a run folder::

    run.json        the command, its options and versions, one entry per invocation
    env.json        the environments the rows were measured in, by environment id
    results.jsonl   one line per row; only ever appended to, synchronised to disk per case
    artifacts/      what cases left behind: traces, snapshots
    tables/ figures/ report.html    made from the above, and replaceable at any time

All rows of a case are written at once and each states how many there are, so a case torn by a
crash is recognised as unfinished. Rows come from files that may be damaged, written by another
program, or somebody else's: :func:`problem` says what their readers may rely on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NotRequired, TypeAlias, TypedDict

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


class _GpuState(TypedDict):
    throttle_reasons: list[str]


class _Machine(TypedDict):
    """The state of a machine, as far as reports read it."""

    gpus: NotRequired[list[_GpuState]]


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
    text = repr(row.get(wrong))
    return f"its {wrong} is {text if len(text) <= 40 else text[:39] + '…'}"


def _may_hold(name: str, value: JsonValue) -> bool:
    """Whether a column may hold a value: samples are numbers, times of samples are positive, and no
    integer is beyond a float."""
    if name.startswith("samples"):
        numbers = value is None or (isinstance(value, list) and all(map(is_number, value)))
        return numbers and (name != "samples_ms" or min(value or [1]) > 0)
    held = value.values() if name == "config" and isinstance(value, dict) else [value]
    return not any(isinstance(each, int) and abs(each) >= 1 << 1023 for each in held)


#: Ends the name of a file that :func:`replace_file` is still writing.
_UNDER_WAY = ".partial"

#: Version of a row's layout. Rows of a newer one are refused, never guessed at.
SCHEMA_VERSION = 1

RESULTS, RUN, ENVIRONMENTS, ARTIFACTS = "results.jsonl", "run.json", "env.json", "artifacts"

#: What the runner says about a row; a measurement may not use these names.
RESERVED = {
    *("schema", "case_rows", "case_key", "experiment", "label", "config", "environment"),
    *("commit", "started", "seconds", "status", "error", "detail"),
    *("machine_before", "machine_after"),
}

#: Statuses that need no second attempt: a measurement, or a fact about the machine.
FINISHED = frozenset({"ok", "oom", "skipped"})


class StoreError(Exception):
    """The run folder cannot be used; the text says why and what to do, in one line."""


@dataclass(frozen=True)
class Loaded:
    """What a results file holds.

    Attributes:
        rows: the rows of each case's last complete attempt, in file order.
        damaged: line numbers (from 1) that are not rows, and what is wrong with each. The last
            line of a killed run may be torn.
    """

    rows: list[Row]
    damaged: dict[int, str]


class Store:
    """One run folder.

    Args:
        folder: created by :meth:`open_for_writing`; reading needs it to exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def results(self) -> Path:
        """The file of rows."""
        return self.folder / RESULTS

    def subfolder(self, *names: str) -> Path:
        """A folder below this one, which may not exist yet, and which no link leads out of.

        Raises:
            StoreError: a link has one of the names.
        """
        path = self.folder
        for name in names:
            path /= name
            if path.is_symlink():
                raise StoreError(f"{path} must be a folder, but got a link. Remove it.")
        return path

    def check_is_run(self) -> None:
        """Checks that the folder holds a run.

        Raises:
            StoreError: it does not.
        """
        if not self.results.is_file():
            raise StoreError(
                f"RUN must be a run folder, but got {self.folder}, which has no {RESULTS}. Name "
                "another."
            )

    def load(self) -> Loaded:
        """Reads every row; a case measured twice counts with its last complete attempt.

        Raises:
            StoreError: the file cannot be read, or was written by a newer version.
        """
        with _told(self.results, "readable", "Correct it."):
            lines = (read_file(self.results) or b"").splitlines()
        attempts: dict[tuple[str, str], list[Row]] = {}  # by case and start
        damaged: dict[int, str] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = parse(line)
            schema = None if row is None else row.get("schema")
            if isinstance(schema, int) and schema > SCHEMA_VERSION:
                raise StoreError(
                    f"{self.results} line {number} must have schema {SCHEMA_VERSION} or less, but "
                    f"got {schema}. Upgrade bench-harness."
                )
            wrong = "it is not a JSON object" if row is None else problem(row)
            if row is None or wrong is not None:
                damaged[number] = wrong or ""
                continue
            attempts.setdefault((row["case_key"], row["started"]), []).append(row)
        last: dict[str, list[Row]] = {}
        for (key, _), rows in attempts.items():
            count = rows[0]["case_rows"]
            if rows == rows[:count] * (len(rows) // count):  # a file put together from copies
                last.pop(key, None)  # a repeated case takes its latest place in the order
                last[key] = rows[:count]
        return Loaded([row for rows in last.values() for row in rows], damaged)

    def finished(self, environment: str) -> set[str]:
        """Keys of cases that this environment has finished (see :data:`FINISHED`)."""
        keys: dict[str, bool] = {}
        for row in self.load().rows:
            done = row["status"] in FINISHED and row["environment"] == environment
            keys[row["case_key"]] = keys.get(row["case_key"], True) and done
        return {key for key, done in keys.items() if done}

    @contextlib.contextmanager
    def open_for_writing(self) -> Iterator[Writer]:
        """Creates the folder and takes it for this process alone.

        Raises:
            StoreError: the folder is not writable, or another process is measuring into it.
        """
        _require_file(self.results)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
            file = os.fdopen(_unfollowed(str(self.results), flags), "ab+", buffering=0)
        except OSError as error:
            raise StoreError(
                f"--output must be a folder to write to, but got {self.folder} ({error.strerror}). "
                "Choose another."
            ) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(
                    f"{self.folder} must be used by one run at a time, but got a second one. Wait, "
                    "or choose another --output."
                ) from None
            yield Writer(self, file)

    def runs(self) -> list[Row]:
        """The invocations that wrote into the folder (``run.json``), the latest one last.

        Raises:
            StoreError: the file is not a list of invocations.
        """
        found: list[Row] | None = self._read_json(RUN, list[_Invocation], "a list of invocations")
        return found or []

    def environments(self) -> dict[str, Row]:
        """The machines that measured (``env.json``), by environment id.

        Raises:
            StoreError: the file is not a table of machines.
        """
        shape = dict[str, _Environment]
        found: dict[str, Row] | None = self._read_json(ENVIRONMENTS, shape, "a table of machines")
        return found or {}

    def _read_json(self, name: str, shape: Any, what: str) -> JsonValue:
        """What a file holds, checked but as it is; None if there is none."""
        path, remedy = self.folder / name, "Remove it: the rows do not need it."
        try:
            content = read_file(path)
            found = None if content is None else shown(json.loads(content))
            msgspec.convert(found, shape | None)
        except msgspec.ValidationError:
            text = f"{path} must be {what}, but got something else. {remedy}"
            raise StoreError(text) from None
        except (OSError, ValueError, RecursionError) as error:
            text = f"{path} must be readable JSON, but got an error: {error}. {remedy}"
            raise StoreError(text) from None
        return found


class _Invocation(TypedDict):
    started: str
    command: str
    cases: NotRequired[list[str]]


class _Gpu(TypedDict):
    name: str


class _Environment(TypedDict):
    gpus: NotRequired[list[_Gpu]]
    packages: NotRequired[dict[str, Any]]


class Writer:
    """Appends to a run folder that :meth:`Store.open_for_writing` has taken."""

    def __init__(self, store: Store, file: IO[bytes]) -> None:
        self._store = store
        self._file = file
        # A killed run may have left a torn line; the next row must not continue it.
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                self._write(b"\n")

    def append(self, rows: Sequence[Row]) -> None:
        """Writes all rows of one case in one call and waits until they are on disk.

        Raises:
            StoreError: the disk is full or gone; rows written before stay readable.
        """
        stamp = {"schema": SCHEMA_VERSION, "case_rows": len(rows)}
        text = "".join(json.dumps({**stamp, **row}, allow_nan=False) + "\n" for row in rows)
        self._write(text.encode())

    def write_json(self, name: str, content: Mapping[str, JsonValue] | Sequence[JsonValue]) -> None:
        """Replaces ``name`` in one step: a reader sees the old or the new content, whole.

        Raises:
            StoreError: the disk is full or gone.
        """
        replace_file(self._store.folder / name, json.dumps(content, indent=2) + "\n")

    def _write(self, data: bytes) -> None:
        kept = "What was measured before is kept, and the same command goes on from there."
        with _told(self._store.results, "writable", kept):
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())


@contextlib.contextmanager
def _told(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Makes an error of the system one line that names the path and what to do."""
    try:
        yield
    except OSError as error:
        text = f"{path} must be {what}, but got an error: {error.strerror}. {remedy}"
        raise StoreError(text) from None


def _require_file(path: Path) -> None:
    """Refuses what is no file: a link leads elsewhere, and a named pipe would be waited for."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise StoreError(f"{path} must be a regular file, but got something else. Remove it.")


def _unfollowed(path: str, flags: int) -> int:
    """Opens a file that is no link, and never waits for one that is a named pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def read_file(path: Path) -> bytes | None:
    """The content of a regular file; None if there is none. Files may be a stranger's.

    Raises:
        StoreError: the path is a link, a named pipe, a device or a folder.
        OSError: the file cannot be read.
    """
    _require_file(path)
    try:
        with open(path, "rb", opener=_unfollowed) as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file in one step: a reader sees the old content or the new, never a part.

    A link of that name is replaced, not followed; the folder it is in may be a link. A text is
    written in UTF-8; a question mark stands for what it cannot hold, as in the name of a folder.

    Raises:
        StoreError: the disk is full or gone, or the folder is not writable.
    """
    partial = path.with_name(path.name + _UNDER_WAY)
    with _told(path, "writable", "Free space or name another."), contextlib.ExitStack() as stack:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # whatever it is, it is not written through
        stack.callback(partial.unlink, missing_ok=True)  # a full disk leaves no part of it
        with open(partial, "xb", opener=_unfollowed) as file:
            file.write(content.encode(errors="replace") if isinstance(content, str) else content)
        partial.replace(path)
