"""Records with Nsight Systems and reads its SQLite export into a :class:`Trace`.

The export's tables exist only if there was something to put into them, and columns differ between
versions, so both are looked up before they are read. Times in an export are integer nanoseconds.

``python -m bench_harness.traces.nsight MODULE:FUNCTION CASE.json DONE.json`` is the program that is
recorded: it calls a function with a case's configuration.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from bench_harness.core import CaseSkipped, JsonValue, Row
from bench_harness.traces.trace import Event, Trace, is_communication

#: First version whose export has the tables read here under these names.
MINIMUM_VERSION = (2022, 1)

_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
_NVTX = "NVTX_EVENTS"
#: ``NvtxPushPopRange`` in the export's own enumeration.
_PUSH_POP = 59
#: Where a span ran, as two numbers: GPU and stream, or process and thread, which the export packs
#: into an id of 24 bits each, thread lowest.
_STREAM = "e.deviceId, e.streamId"
_PROCESS = "(globalPid >> 24) & 16777215"
_THREAD = "(e.globalTid >> 24) & 16777215, e.globalTid & 16777215"
#: Environment variables that a recorded program keeps.
_KEPT = frozenset(
    {
        *("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "VIRTUAL_ENV", "CC", "CXX"),
    }
)
_KEPT_PREFIXES = (
    *("LC_", "CUDA", "CUBLAS", "CUDNN", "NVIDIA_", "NCCL_", "GLOO_", "TP_"),
    *("TORCH", "PYTORCH", "TRITON", "OMP_", "MKL_", "KMP_", "OPENBLAS_"),
)
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH")
#: What torch's ranges have behind their names: sequence number, operation, shapes.
_NUMBERED = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = .*", re.DOTALL)
#: Makes a report of a raw recording; part of Nsight Systems.
_IMPORTER = "QdstrmImporter"


class NsightError(RuntimeError):
    """Nsight Systems failed, or gave a report without kernels."""


class NsightMissingError(NsightError, CaseSkipped):
    """Nsight Systems is missing or too old, so what needs it is skipped."""


def nsys() -> str:
    """The path of a usable ``nsys``.

    Raises:
        NsightMissingError: there is none, or it is older than :data:`MINIMUM_VERSION`.
    """
    path = shutil.which("nsys")
    if path is None:
        raise NsightMissingError(
            "nsys must be on the PATH for a real Nsight Systems report, but got none. Install "
            "NVIDIA Nsight Systems, or profile without it."
        )
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    match = re.search(r"(\d{4})\.(\d+)", answer.stdout)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < MINIMUM_VERSION:
        raise NsightMissingError(
            f"nsys must be at least {'.'.join(map(str, MINIMUM_VERSION))}, but got "
            f"{answer.stdout.strip()!r} from {path}. Upgrade NVIDIA Nsight Systems."
        )
    return path


def record(command: Sequence[str], report: Path, *, finished: Path, timeout_s: float) -> Path:
    """Runs a command under ``nsys`` and exports the report.

    An ``nsys`` without its importer (as in other tools' installations) leaves a raw recording and
    ends with an error. That is imported by ``QdstrmImporter``, if the PATH has it.

    Args:
        report: path of the report without suffix.
        finished: file that the command writes at its end; without it the report does not count,
            whatever ``nsys`` made of the command's exit code.
        timeout_s: seconds for the command, for importing, and for exporting.

    Returns:
        The SQLite export, beside the report.

    Raises:
        NsightMissingError: no usable ``nsys``.
        NsightError: recording, importing or exporting failed.
    """
    tool = nsys()
    imported, raw = report.with_suffix(".nsys-rep"), report.with_suffix(".qdstrm")
    for old in (imported, raw, finished):
        old.unlink(missing_ok=True)
    # CPU sampling and context switches make reports large and need privileges.
    profile = [tool, "profile", "-t", "cuda,nvtx", "--sample=none", "--cpuctxsw=none"]
    done = _run([*profile, "--force-overwrite=true", "-o", str(report), *command], timeout_s)
    if not finished.exists() or not (imported.exists() or raw.exists()):
        raise _failure("nsys profile", done)
    if not imported.exists():
        importer = shutil.which(_IMPORTER)
        if importer is None:
            raise NsightError(
                f"{_IMPORTER} of the same version must be on the PATH to import {raw.name}, but "
                "got none. Install the whole of NVIDIA Nsight Systems, or add the importer's "
                "folder to the PATH."
            )
        done = _run([importer, "-i", str(raw), "-o", str(imported)], timeout_s)
        if done.returncode or not imported.exists():
            raise _failure(_IMPORTER, done)
        raw.unlink()
    return export(imported, report.with_suffix(".sqlite"), timeout_s=timeout_s)


def run_and_record(
    function: str, config: Row, report: Path, *, timeout_s: float
) -> tuple[Path, JsonValue]:
    """Records a function of this package, which runs as a program of its own.

    Nsight Systems follows programs, not forks. This module is the program.

    Args:
        function: ``package.module:name``, called with ``config``.
        report: path of the report without suffix, which stays; in the case's folder.
        timeout_s: of :func:`record`.

    Returns:
        The SQLite export, for the caller to remove, and what the function returned.

    Raises:
        NsightError: of :func:`record`.
    """
    settings, finished = (report.with_name(name).absolute() for name in ("case.json", "done.json"))
    settings.write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", __name__, function, str(settings), str(finished)]
    try:
        found = record(command, report.absolute(), finished=finished, timeout_s=timeout_s)
        return found, json.loads(finished.read_text(encoding="utf-8"))
    finally:
        settings.unlink()
        finished.unlink(missing_ok=True)


def export(report: Path, target: Path, *, timeout_s: float = 600.0) -> Path:
    """Exports a report (``.nsys-rep``) as SQLite to ``target``, which is returned.

    Raises:
        NsightMissingError: no usable ``nsys``.
        NsightError: the export failed, as for a report of a newer version.
    """
    arguments = [nsys(), "export", "--type=sqlite", "--force-overwrite=true"]
    done = _run([*arguments, "-o", str(target), str(report)], timeout_s)
    if done.returncode or not target.exists():
        raise _failure("nsys export", done)
    return target


def _run(arguments: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=timeout_s, env=clean_environment()
    )


def clean_environment() -> dict[str, str]:
    """The environment variables that programs under ``nsys`` get.

    A report holds the whole environment of the program, and a report is passed on: so only what
    Python, CUDA and torch read is kept, and nothing whose name sounds like a secret.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if (name in _KEPT or name.startswith(_KEPT_PREFIXES)) and not _SECRET.search(name)
    }


def _failure(what: str, done: subprocess.CompletedProcess[str]) -> NsightError:
    output = (done.stdout + done.stderr).strip()[-2000:]
    return NsightError(f"{what} ended with {done.returncode}: {output}")


def load(path: Path, device: int | None = None) -> Trace:
    """Reads an export.

    Args:
        device: keep what this GPU ran and the process behind it, for a report of several ranks;
            None keeps everything.

    Raises:
        NsightError: the file holds no kernels: a report counts only if it does.
    """
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        columns = _schema(database)
        kernels: list[Event] = []
        if _KERNELS in columns:
            named = "JOIN StringIds s ON s.id = e.demangledName ORDER BY e.start"
            kernels = _events(database, _KERNELS, "s.value", _STREAM, named)
        if device is not None:
            kernels = [kernel for kernel in kernels if kernel.thread[0] == device]
        if not kernels:
            where = "" if device is None else f" of GPU {device}"
            raise NsightError(
                f"a report must hold kernels{where}, but got none in {path}. Trace a program that "
                "uses the GPU, with -t cuda."
            )
        launches: list[Event] = []
        if _RUNTIME in columns:
            named = "JOIN StringIds s ON s.id = e.nameId"
            launches = _events(database, _RUNTIME, "s.value", _THREAD, named)
        copies = [
            copy
            for table in _COPIES
            if table in columns
            for copy in _events(database, table, f"'{table}'", _STREAM)
            if device is None or copy.thread[0] == device
        ]
        ranges = _ranges(database, columns.get(_NVTX, set()))
        if device is not None and "globalPid" in columns[_KERNELS]:
            query = f"SELECT DISTINCT {_PROCESS} FROM {_KERNELS} WHERE deviceId = ?"  # noqa: S608
            processes = {process for (process,) in database.execute(query, (device,))}
            launches = [each for each in launches if each.thread[0] in processes]
            ranges = [each for each in ranges if each.thread[0] in processes]
        return Trace(
            on_device=True,
            compute=[k for k in kernels if not is_communication(k.name)],
            communication=[k for k in kernels if is_communication(k.name)],
            operators=kernels,
            copies=copies,
            ranges=ranges,
            launches={each.correlation: each for each in launches if each.correlation is not None},
        )


def devices(path: Path) -> list[int]:
    """The GPUs that ran kernels, by the number that the export gives them.

    That need not be the number in the program: where only some GPUs are visible to it, they are
    counted from 0 there.
    """
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        if _KERNELS not in _schema(database):
            return []
        query = f"SELECT DISTINCT deviceId FROM {_KERNELS} ORDER BY deviceId"  # noqa: S608
        return [int(device) for (device,) in database.execute(query)]


def _schema(database: sqlite3.Connection) -> dict[str, set[str]]:
    """Columns of every table."""
    query = (
        "SELECT m.name, c.name FROM sqlite_master m JOIN pragma_table_info(m.name) c "
        "WHERE m.type = 'table'"
    )
    found: dict[str, set[str]] = {}
    for table, column in database.execute(query):
        found.setdefault(table, set()).add(column)
    return found


def _events(
    database: sqlite3.Connection, table: str, name: str, thread: str, more: str = ""
) -> list[Event]:
    """The spans of a table, called ``e``, by what to select as their name and thread."""
    query = f"SELECT {name}, e.start, e.end, {thread}, e.correlationId FROM {table} e {more}"  # noqa: S608
    return [
        Event(str(text), start, end, (one, two), end - start, correlation)
        for text, start, end, one, two, correlation in database.execute(query)
    ]


def _ranges(database: sqlite3.Connection, columns: set[str]) -> list[Event]:
    """Push/pop ranges; a name is inline text or, where registered, an id of a string.

    torch's own ranges, as ``record_function`` under ``emit_nvtx``, have numbers behind their names.
    """
    if not columns:
        return []
    registered = "textId" in columns
    text = "coalesce(e.text, s.value)" if registered else "e.text"
    join = "LEFT JOIN StringIds s ON s.id = e.textId " if registered else ""
    rows = database.execute(
        f"SELECT {text}, e.start, e.end, {_THREAD} FROM {_NVTX} e {join}"  # noqa: S608
        "WHERE e.eventType = ? AND e.end IS NOT NULL ORDER BY e.start",
        (_PUSH_POP,),
    )
    return [
        Event(_NUMBERED.sub("", str(name)), start, end, (process, thread), end - start)
        for name, start, end, process, thread in rows
        if name is not None
    ]


def _main(function: str, settings: str, finished: str) -> None:
    """The program that Nsight Systems runs."""
    config = json.loads(Path(settings).read_text(encoding="utf-8"))
    returned = pkgutil.resolve_name(function)(config)
    Path(finished).write_text(json.dumps(returned), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
