"""Records with Nsight Systems and reads its SQLite export into a :class:`Trace`.

The export's tables exist only if there was something to put into them, and columns differ between
versions, so both are looked up before they are read. Times in an export are integer nanoseconds.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from bench_harness.traces.trace import Event, Trace, is_communication

#: First version whose export has the tables read here under these names.
MINIMUM_VERSION = (2022, 1)

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
_NVTX = "NVTX_EVENTS"
#: ``NvtxPushPopRange`` in the export's own enumeration.
_PUSH_POP = 59


class NsightError(RuntimeError):
    """Nsight Systems is missing, too old, or gave a report without kernels."""


def nsys() -> str:
    """The path of a usable ``nsys``.

    Raises:
        NsightError: there is none, or it is older than :data:`MINIMUM_VERSION`.
    """
    path = shutil.which("nsys")
    if path is None:
        raise NsightError(
            "nsys must be on the PATH for a real Nsight Systems report; found none. Install "
            "NVIDIA Nsight Systems, or profile without it"
        )
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    match = re.search(r"(\d{4})\.(\d+)", answer.stdout)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < MINIMUM_VERSION:
        raise NsightError(
            f"nsys must be at least {'.'.join(map(str, MINIMUM_VERSION))}; "
            f"{path} says {answer.stdout.strip()!r}"
        )
    return path


def record(command: Sequence[str], report: Path, *, timeout_s: float) -> Path:
    """Runs a command under ``nsys`` and exports the report.

    Args:
        command: program and arguments.
        report: path of the report without suffix.
        timeout_s: seconds for the command; exporting gets as many again.

    Returns:
        The SQLite export, beside the report.

    Raises:
        NsightError: no usable ``nsys``, or recording or exporting failed.
    """
    tool = nsys()
    # CPU sampling and context switches make reports large and need privileges.
    profile = [tool, "profile", "-t", "cuda,nvtx", "--sample=none", "--cpuctxsw=none"]
    export = report.with_suffix(".sqlite")
    for arguments in (
        [*profile, "--force-overwrite=true", "-o", str(report), *command],
        [
            *(tool, "export", "--type=sqlite", "--force-overwrite=true"),
            *("-o", str(export), str(report.with_suffix(".nsys-rep"))),
        ],
    ):
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            output = (done.stdout + done.stderr).strip()[-2000:]
            raise NsightError(f"{' '.join(arguments[:2])} ended with {done.returncode}: {output}")
    return export


def load(path: Path) -> Trace:
    """Reads an export.

    Raises:
        NsightError: the file holds no kernels: a report counts only if it does.
    """
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        columns = _schema(database)
        if _KERNELS not in columns or not _count(database, _KERNELS):
            raise NsightError(
                f"a report counts only with kernels in it; {path} has none. Was the program "
                "traced with -t cuda, and did it use the GPU?"
            )
        kernels = _kernels(database)
        launches = _launches(database) if _RUNTIME in columns else {}
        return Trace(
            on_device=True,
            compute=[k for k in kernels if not is_communication(k.name)],
            communication=[k for k in kernels if is_communication(k.name)],
            operators=kernels,
            copies=[c for table in _COPIES if table in columns for c in _copies(database, table)],
            ranges=_ranges(database, columns.get(_NVTX, set())),
            launches=launches,
        )


def _schema(database: sqlite3.Connection) -> dict[str, set[str]]:
    """Columns of every table."""
    tables = [
        str(name)
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    ]
    return {
        table: {
            str(name)
            for (name,) in database.execute("SELECT name FROM pragma_table_info(?)", (table,))
        }
        for table in tables
    }


def _count(database: sqlite3.Connection, table: str) -> int:
    return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])  # noqa: S608


def _kernels(database: sqlite3.Connection) -> list[Event]:
    rows = database.execute(
        "SELECT s.value, k.start, k.end, k.deviceId, k.streamId, k.correlationId "
        "FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName "
        "ORDER BY k.start"
    )
    return [
        Event(str(name), start, end, (device, stream), end - start, correlation)
        for name, start, end, device, stream, correlation in rows
    ]


def _launches(database: sqlite3.Connection) -> dict[int, Event]:
    rows = database.execute(
        "SELECT s.value, r.start, r.end, r.globalTid, r.correlationId "
        "FROM CUPTI_ACTIVITY_KIND_RUNTIME r JOIN StringIds s ON s.id = r.nameId"
    )
    return {
        correlation: Event(str(name), start, end, _thread(thread), end - start, correlation)
        for name, start, end, thread, correlation in rows
    }


def _copies(database: sqlite3.Connection, table: str) -> list[Event]:
    rows = database.execute(
        f"SELECT start, end, deviceId, streamId, correlationId FROM {table}"  # noqa: S608
    )
    return [
        Event(table, start, end, (device, stream), end - start, correlation)
        for start, end, device, stream, correlation in rows
    ]


def _ranges(database: sqlite3.Connection, columns: set[str]) -> list[Event]:
    """Push/pop ranges; a name is inline text or, where registered, an id of a string."""
    if not columns:
        return []
    registered = "textId" in columns
    text = "coalesce(n.text, s.value)" if registered else "n.text"
    join = "LEFT JOIN StringIds s ON s.id = n.textId " if registered else ""
    rows = database.execute(
        f"SELECT {text}, n.start, n.end, n.globalTid FROM NVTX_EVENTS n {join}"  # noqa: S608
        "WHERE n.eventType = ? AND n.end IS NOT NULL ORDER BY n.start",
        (_PUSH_POP,),
    )
    return [
        Event(str(name), start, end, _thread(thread), end - start)
        for name, start, end, thread in rows
        if name is not None
    ]


def _thread(global_tid: int) -> tuple[int, int]:
    """Process and thread from the export's packed id: 24 bits each, thread lowest."""
    return (global_tid >> 24) & 0xFFFFFF, global_tid & 0xFFFFFF
