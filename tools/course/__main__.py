"""``python -m tools.course``: the table of deliverables, the answers as documents, checks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.browser import BrowserError
from tools.course import deliverables, precision
from tools.course.document import write
from tools.course.students import check
from tools.pages.rows import measure

from bench_harness.environment import resolve_device
from bench_harness.store import replace_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 something is wrong, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m tools.course", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table", help="write the page of all deliverables")
    document = commands.add_parser("document", help="join the answers into HTML and PDF")
    document.add_argument("--edition", type=int, choices=(2025, 2026), action="append")
    document.add_argument("--output", type=Path, default=Path("answers"), help="a folder")
    document.add_argument("--no-pdf", action="store_true", help="only HTML")
    checked = commands.add_parser("check", help="check somebody's adapters, in sentences")
    checked.add_argument("adapters", type=Path, help="a tests/adapters.py")
    checked.add_argument("--only", default="", help="parts of names of checks, with commas")
    rounded = commands.add_parser("precision", help="sums and dtypes of mixed precision, as rows")
    rounded.add_argument("target", type=Path, help="a file NAME.jsonl")
    rounded.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    given = parser.parse_args(arguments)
    if given.command == "check":
        only = [text for text in map(str.strip, given.only.split(",")) if text]
        return check(given.adapters, only)
    if given.command == "precision":
        measure(precision.case(resolve_device(given.device)), precision.run, given.target)
    elif given.command == "table":
        replace_file(deliverables.PAGE, deliverables.table().encode())
    else:
        try:
            for edition in given.edition or (2025, 2026):
                for path in write(edition, given.output, pdf=not given.no_pdf):
                    print(path)
        except (ValueError, BrowserError) as error:
            print(f"tools.course: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
