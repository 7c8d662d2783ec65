"""Keeps the rows of a case's finished rounds, so that a case that is stopped does not lose them.

An experiment that measures its variants in rounds gives its rows at the end. Until then it hands
over, after every round, the rows of the rounds so far: :func:`hand_over` writes them, complete with
what identifies the case, into one file in the case's folder. Whatever stops the case, its limit, a
dead rank, Ctrl-C or SIGKILL of the whole run, leaves that file. Its rows have the status "partial",
which no picture, comparison or published file takes for a complete case, and which the same command
measures again.

The runner calls :func:`prepare` before the case starts, which writes what identifies the case. In a
folder that was not prepared, as where a test calls an experiment directly, :func:`hand_over` does
nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path

from bench_harness.core import Row
from bench_harness.process import Outcome
from bench_harness.store import PARTIAL, ROUNDS, StoreError, kept_rounds, replace_file, stamped

#: Key under which an experiment's row says that this variant alone was skipped or failed:
#: ``{"status": "skipped", "error": "why"}``.
ENDED = "ended"


def prepare(folder: Path, identity: Row) -> None:
    """Lets the case that is to run in ``folder`` hand over rows.

    Args:
        identity: what its rows begin with: experiment, key, configuration, environment, start.

    Raises:
        StoreError: the disk is full or gone.
    """
    replace_file(folder / ROUNDS, json.dumps({"identity": identity, "rows": []}).encode())


def hand_over(folder: Path, rows: Sequence[Row], *, finished: int, asked: int) -> None:
    """Keeps the rows of all rounds so far, in place of those that were handed over before.

    Call it between rounds, with rows that have passed their proof: they may be all that remains.

    Args:
        folder: of the case, which is its current directory.
        rows: what the experiment would return now. Nothing is kept if no variant was timed.
        finished: rounds in which all variants were measured.
        asked: the least number of rounds of a complete case.
    """
    path = folder / ROUNDS
    if not path.is_file() or all(ENDED in row for row in rows):
        return
    # A full disk, or rows that are not JSON, must not end the case here: its end reports both.
    with contextlib.suppress(StoreError, OSError, ValueError):
        identity = json.loads(path.read_text())["identity"]
        seconds = dt.datetime.now(dt.UTC) - dt.datetime.fromisoformat(identity["started"])
        about = {
            **identity,
            "status": PARTIAL,
            "error": f"stopped after {finished} of at least {asked} rounds",
            "detail": None,
            "seconds": round(seconds.total_seconds(), 3),
            "finished_rounds": finished,
        }
        kept = stamped([identified(about, row) for row in rows])
        content = json.dumps({"identity": identity, "rows": kept}, allow_nan=False)
        replace_file(path, content.encode())


def identified(about: Row, row: Row) -> Row:
    """A row with its case's identity; :data:`ENDED` in a row overrides the status of the case."""
    measured = {name: value for name, value in row.items() if name != ENDED}
    return {**about, **row.get(ENDED, {}), **measured}


def with_kept_rows(outcome: Outcome, folder: Path) -> Outcome:
    """The outcome of a case: "partial" if it did not end well, but has finished rounds.

    Its value then has the key "rows", with complete rows.
    """
    kept = [] if outcome.status in ("ok", "skipped") else kept_rounds(folder)
    if not kept:
        return outcome
    stopped = next(row["error"] for row in kept if row["status"] == PARTIAL)
    error = f"{stopped}: {outcome.error}"
    rows = [
        {**row, "seconds": round(outcome.seconds, 3)}
        | ({"error": error} if row["status"] == PARTIAL else {})
        for row in kept
    ]
    rows[0]["detail"] = outcome.detail
    return dataclasses.replace(outcome, status="partial", error=error, value={"rows": rows})
