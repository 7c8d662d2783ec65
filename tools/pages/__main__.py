"""``python -m tools.pages``: fills pages from published rows, publishes rows."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.pages import loss_curves, versions
from tools.pages.fill import render
from tools.pages.rows import measure, publish

from bench_harness.core import plural
from bench_harness.environment import resolve_device
from bench_harness.store import Store, StoreError, replace_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 a page is outdated or has a problem,
    2 what was given cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tools.pages", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fill = commands.add_parser("fill", help="fill the marked blocks of Markdown files")
    fill.add_argument("files", nargs="+", type=Path)
    fill.add_argument("--check", action="store_true", help="change nothing; 1 if one is outdated")
    rows = commands.add_parser("publish", help="write the rows of runs into one file")
    rows.add_argument("target", type=Path)
    rows.add_argument("runs", nargs="+", type=Path)
    rows.add_argument("--only", default="", help="experiments, or parts of labels, with commas")
    curves = commands.add_parser("curves", help="train on real text, and write loss curves")
    curves.add_argument("target", type=Path)
    curves.add_argument("variants", nargs="*", help="as for train-step; the first is the reference")
    tested = commands.add_parser("tested", help="record a run of the GPU tests")
    tested.add_argument("junit", type=Path, help="what pytest --junitxml wrote")
    tested.add_argument("--part", required=True, choices=["one GPU", "several GPUs"])
    tested.add_argument("--commit", required=True)
    tested.add_argument("--machine", required=True, help="GPUs, torch and triton")
    tested.add_argument("--target", type=Path, default=Path("docs/gpu-tests.jsonl"))
    given = parser.parse_args(arguments)
    try:
        if given.command == "fill":
            return max(_fill(file, check=given.check) for file in given.files)
        if given.command == "curves":
            case = loss_curves.case(given.variants, resolve_device("auto"))
            measure(case, loss_curves.run, given.target)
        elif given.command == "tested":
            about = given.part, given.commit, given.machine
            run = versions.record(given.target, given.junit, *about)
            print(f"{run['passed']} passed, in {given.target}")
        else:
            only = [text for text in map(str.strip, given.only.split(",")) if text]
            count = publish(map(Store, given.runs), given.target, only)
            print(f"{plural(count, 'case')} in {given.target}")
    except (ValueError, StoreError) as error:
        print(f"tools.pages: {error}", file=sys.stderr)
        return 2
    return 0


def _fill(file: Path, *, check: bool) -> int:
    made = render(file)
    problems, outdated = list(made.problems), made.text != file.read_text(encoding="utf-8")
    if check and outdated:
        problems.append(f"{file} is outdated. Run python -m tools.pages fill {file}.")
    elif not check:
        for path, picture in made.pictures.items():
            try:
                replace_file(path, picture())
            except ValueError as error:
                problems.append(f"{file}: {error}")
        if outdated:
            replace_file(file, made.text.encode())
    for problem in problems:
        print(f"tools.pages: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
