"""The assignment's questions: how each is asked, and the answer that its page gives.

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

_HEADING = re.compile(r"^##+ (?:`(?P<problem>\w+)` )?(?:\((?P<label>[a-f])\) )?(?P<ask>.+)$")
_ANSWER = "> **Answer.**"
#: The end of a sentence: answers have no abbreviations with full stops.
_END = re.compile(r"(?<=[.?!])[)*]*\s+(?=\S)")


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
    def anchor(self) -> str:
        """The anchor of the part's heading on its page, as GitHub makes it."""
        text = _slug_text(self)
        return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def heading(part: Part) -> str:
    """The heading under which the part's page answers it."""
    return f"## {_slug_text(part)}"


def _slug_text(part: Part) -> str:
    shared = f"`{part.problem}` " if part.page == "2026/calculations" else ""
    return f"{shared}{f'({part.label}) ' if part.label else ''}{part.ask}"


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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer as its page gives it.

    Attributes:
        asked_for: the line below the heading.
        text: Markdown of the quote, without its marks.
    """

    asked_for: str
    text: str

    @property
    def paragraphs(self) -> int:
        """Number of paragraphs, tables and lists left out."""
        return len([p for p in self.text.split("\n\n") if not p.lstrip().startswith(("|", "- "))])

    @property
    def sentences(self) -> int:
        """Number of sentences, tables and code left out."""
        prose = " ".join(
            paragraph
            for paragraph in self.text.split("\n\n")
            if not paragraph.lstrip().startswith(("|", "```"))
        )
        return len([text for text in _END.split(prose.strip()) if text])


def answer(part: Part, page: str) -> Answer | None:
    """The answer to a part in the text of its page; None if the page has none."""
    lines = page.splitlines()
    try:
        start = lines.index(heading(part)) + 1
    except ValueError:
        return None
    body = []
    for line in lines[start:]:
        if _HEADING.match(line) and not line.startswith("###"):
            break
        body.append(line)
    asked = next((line for line in body if line.startswith("Asked for:")), "")
    quotes = "\n".join(body).split(_ANSWER, 1)
    if len(quotes) < 2:
        return None
    text: list[str] = []
    for line in quotes[1].splitlines():
        if text and not line.startswith(">"):
            break
        text.append(line.removeprefix(">").removeprefix(" ") if text else line.strip())
    return Answer(asked_for=asked, text="\n".join(text).strip())
