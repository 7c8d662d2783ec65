"""Writes a report into its run folder: CSV and Markdown tables, PNG pictures, one HTML page."""

from __future__ import annotations

import contextlib
import json
import numbers
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_harness.core import Row, Table, Timelines, plural
from bench_harness.display.bars import placed
from bench_harness.display.cells import cell, is_missing, readable, split
from bench_harness.display.plots import data_uri, png_bytes, svg_bytes
from bench_harness.report.build import Report, Section, where
from bench_harness.store import RESULTS, Store, StoreError, replace_file

if TYPE_CHECKING:
    import pandas as pd

PAGE = "report.html"

#: How a text begins that a spreadsheet evaluates.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
#: What would end a cell, or begin a link, code or emphasis.
_MARKDOWN = str.maketrans({character: "\\" + character for character in "|[`*"})


def write(report: Report, folder: Path) -> Path:
    """Writes all files of a report, replacing those of an earlier one.

    Returns:
        The page.

    Raises:
        StoreError: the folder cannot be written, or leads elsewhere by a link.
    """
    tables, figures = (Store(folder).subfolder(name) for name in ("tables", "figures"))
    for section in report.sections:
        for table in list(section.tables):
            stem = tables / table_stem(section.name, table.title)
            with _or_left_out(section, section.tables, table, f"table {table.title}"):
                replace_file(stem.with_suffix(".csv"), csv(table.frame))
                replace_file(stem.with_suffix(".md"), markdown(table))
        for figure in list(section.figures):
            drawn = figure.figure
            if isinstance(drawn, Timelines):  # which a page shows, and no file
                continue
            stem = figures / f"{section.name}-{figure.name}"
            with _or_left_out(section, section.figures, figure, f"picture {figure.name}"):
                replace_file(stem.with_suffix(".png"), png_bytes(drawn))
                replace_file(stem.with_suffix(".svg"), svg_bytes(drawn))
    page = folder / PAGE
    replace_file(page, render(report))
    return page


@contextlib.contextmanager
def _or_left_out(section: Section, shown: list[Any], item: Any, name: str) -> Iterator[None]:
    """Takes out of the section what cannot be drawn or written down, and says so there."""
    try:
        yield
    except StoreError:  # the folder's fault
        raise
    except Exception as error:  # noqa: BLE001 - shown in the report
        shown.remove(item)
        section.problems.append(f"{name}: {where(error)}")


def table_stem(experiment: str, title: str) -> str:
    """The file name, without suffix, of a table's copies."""
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return slug if slug.startswith(experiment) else f"{experiment}-{slug}"


def render(report: Report) -> str:
    """The page: one file that needs no network, with pictures inside."""
    return rendered("page.html.jinja", report=report, results=RESULTS)


def rendered(template: str, **content: Any) -> str:
    """A page of a template of this folder."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("bench_harness.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    templates.filters["cell"] = cell
    templates.tests["number"] = lambda value: (
        isinstance(value, numbers.Real) and not isinstance(value, bool)
    )
    helpers = (data_uri, placed, plural, readable, split, table_stem)
    templates.globals |= {helper.__name__: helper for helper in helpers}
    return templates.get_template(template).render(**content)


def as_json(report: Report, page: Path) -> Row:
    """A report as plain values: how each case ended, and the tables by experiment and title."""
    shown = ("experiment", "label", "status", "seconds", "error")
    return {
        "report": str(page),
        "notes": report.notes,
        "cases": [
            {name: case[name] for name in shown}
            for section in report.sections
            for case in section.cases
        ],
        "tables": {section.name: records(section.tables) for section in report.sections},
    }


def records(tables: Iterable[Table]) -> Row:
    """Tables by title, as lists of their lines."""
    # pandas writes missing values as null, and its own numbers as numbers.
    return {each.title: json.loads(each.frame.to_json(orient="records")) for each in tables}


def csv(frame: pd.DataFrame) -> str:
    """A data frame as CSV, with texts escaped that a spreadsheet would run as formulas."""

    def safe(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value

    text = frame.astype(object).map(safe).rename(columns=safe).to_csv(index=False)
    assert text is not None  # it is, where no file is given
    return text


def _escaped(text: str) -> str:
    """A cell's text that Markdown shows as it is."""
    text = " ".join(text.splitlines())
    return text.replace("<", "&lt;").translate(_MARKDOWN)


def grid(frame: pd.DataFrame, *, digits: int | None = None) -> str:
    """A data frame as a Markdown table, numbers to the right.

    Args:
        digits: decimal places of numbers that are not whole; None shows six significant digits.
    """

    def shown(value: Any) -> str:
        if digits is not None and isinstance(value, float) and not is_missing(value):
            return f"{value:.{digits}f}"
        return cell(value)

    columns = [[shown(value) for value in frame[name].tolist()] for name in frame.columns]
    right = [
        all(isinstance(v, numbers.Real) or v is None for v in frame[name].tolist())
        for name in frame.columns
    ]
    lines = [
        [_escaped(str(name)) for name in frame.columns],
        ["---:" if each else "---" for each in right],
        *([_escaped(text) for text in row] for row in zip(*columns, strict=True)),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(table: Table) -> str:
    """A table as Markdown with its title and note."""
    parts = [f"### {table.title}", grid(table.frame), table.note]
    return "\n\n".join(part for part in parts if part) + "\n"
