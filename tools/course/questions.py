"""The assignment's questions: how each is asked, and where its page answers it.

A page answers a part under a heading ``## (b) ASK``; the line after it says what form is asked for,
and the answer is the quote that begins with ``**Answer.**``. Everything else is evidence.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "assignment"
RESULTS = ROOT / "docs" / "results"
_FILE = Path(__file__).with_name("questions.toml")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One deliverable.

    Attributes:
        problem: the problem's name in the assignment.
        label: "a", "b", …; empty where a problem has one part.
        ask: what is asked, in short.
        editions: years of the assignment that ask it.
        form: what is asked for beside sentences: a table, a picture, code.
        sentences: fewest and most sentences; None if the answer is not in sentences.
        paragraphs: the same for paragraphs.
        page: path of the page below docs/assignment, without its suffix.
        command: makes the rows again.
        rows: files of docs/results.
        missing: a command that measures a cell without a row, and what the cell is.
    """

    problem: str
    ask: str
    editions: tuple[int, ...]
    page: str
    command: str
    label: str = ""
    form: str = ""
    sentences: tuple[int, int] | None = None
    paragraphs: tuple[int, int] | None = None
    rows: tuple[str, ...] = ()
    missing: str = ""

    @property
    def asked_for(self) -> str:
        """The asked form as a line of the page."""
        wanted = []
        if self.form:
            wanted.append(self.form)
        if self.sentences:
            least, most = self.sentences
            count = f"{least}" if least == most else f"{least} to {most}"
            wanted.append(f"{count} sentence{'s' * (most > 1)}")
        return f"Asked for: {' and '.join(wanted)}."

    @property
    def file(self) -> Path:
        """The page's file."""
        return PAGES / f"{self.page}.md"

    @property
    def heading(self) -> str:
        """The heading under which the page answers it, without its marks."""
        shared = f"`{self.problem}` " if self.page == "2026/calculations" else ""
        return f"{shared}{f'({self.label}) ' if self.label else ''}{self.ask}"

    @property
    def anchor(self) -> str:
        """The heading's anchor on its page, as GitHub makes it."""
        return re.sub(r"[^\w\- ]", "", self.heading.lower()).replace(" ", "-")


def parts() -> list[Part]:
    """Every deliverable of both editions, in the assignment's order."""
    found = []
    problem: dict[str, Any]
    for problem in tomllib.loads(_FILE.read_text(encoding="utf-8"))["problem"]:
        for part in problem["part"]:
            merged = {k: v for k, v in problem.items() if k not in ("name", "part")} | part
            given: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in merged.items()
            }
            found.append(Part(problem=problem["name"], **given))
    return found
