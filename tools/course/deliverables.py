"""The page that lists every deliverable with its answer, command and rows."""

from __future__ import annotations

from itertools import groupby

from tools.course.questions import PAGES, Part, parts

#: The generated page.
PAGE = PAGES / "deliverables.md"
_OPENING = (
    "# Every deliverable\n\n"
    "Every question of both editions of the assignment, with the page that answers it, the command "
    "that makes its rows again, and the rows. `python -m tools.course table` writes this page from "
    "`tools/course/questions.toml`, and a test compares every answer with the form that is asked "
    "for."
)
_MISSING = (
    "## Not measured yet\n\n"
    "Cells of the course's own configuration that have no row, and the command that measures each. "
    "All need GPUs.\n"
)


def table() -> str:
    """The page's text."""
    every = parts()
    lines = [_OPENING]
    for edition in (2025, 2026):
        chosen = [part for part in every if edition in part.editions]
        lines.append(f"\n## Edition of {edition}\n")
        lines.append("| problem | asked for | answer | command | rows |")
        lines.append("| --- | --- | --- | --- | --- |")
        lines += [_line(part) for part in chosen]
    lines += ["\n" + _MISSING, "| problem | command |", "| --- | --- |"]
    for missing, group in groupby((p for p in every if p.missing), key=lambda part: part.missing):
        names = ", ".join(dict.fromkeys(_name(part) for part in group))
        command, bracket, what = missing.partition(" (")
        lines.append(f"| {names} | `{command}`{bracket}{what} |")
    return "\n".join(lines) + "\n"


def _name(part: Part) -> str:
    return f"`{part.problem}`" + (f" ({part.label})" if part.label else "")


def _line(part: Part) -> str:
    asked = part.asked_for.removeprefix("Asked for: ").rstrip(".")
    rows = ", ".join(f"[{name.split('.')[0]}](../results/{name})" for name in part.rows)
    link = f"[{part.ask}]({part.page}.md#{part.anchor})"
    return f"| {_name(part)} | {asked} | {link} | `{part.command}` | {rows or 'none: calculated'} |"
