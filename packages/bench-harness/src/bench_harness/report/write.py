"""Writes a report into its run folder: CSV and Markdown tables, PNG pictures, one HTML page."""

from __future__ import annotations

import json
import numbers
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_harness.case import Row
from bench_harness.experiments import Table
from bench_harness.report.build import Report
from bench_harness.report.cells import cell, is_missing, split
from bench_harness.report.plots import data_uri, png_bytes, svg_bytes
from bench_harness.store import RESULTS, replace_file

if TYPE_CHECKING:
    import pandas as pd

PAGE = "report.html"
_TEMPLATE = "page.html.jinja"

#: Columns whose "yes" a reader must not miss.
_FLAGS = ("unstable", "too short", "prediction missed")


def write(report: Report, folder: Path) -> Path:
    """Writes all files of a report, replacing those of an earlier one.

    Returns:
        The page.

    Raises:
        StoreError: the folder cannot be written.
    """
    for section in report.sections:
        for table in section.tables:
            stem = folder / "tables" / table_stem(section.name, table.title)
            replace_file(stem.with_suffix(".csv"), table.frame.to_csv(index=False).encode())
            replace_file(stem.with_suffix(".md"), markdown(table).encode())
        for figure in section.figures:
            stem = folder / "figures" / f"{section.name}-{figure.name}"
            replace_file(stem.with_suffix(".png"), png_bytes(figure.figure))
            replace_file(stem.with_suffix(".svg"), svg_bytes(figure.figure))
    page = folder / PAGE
    replace_file(page, render(report).encode())
    return page


def table_stem(experiment: str, title: str) -> str:
    """The file name, without suffix, of a table's copies."""
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return slug if slug.startswith(experiment) else f"{experiment}-{slug}"


def render(report: Report) -> str:
    """The page: one file that needs no network, with pictures inside."""
    return render_template(
        _TEMPLATE,
        report=report,
        flags=_FLAGS,
        results=RESULTS,
        table_stem=table_stem,
    )


def render_template(name: str, **values: Any) -> str:
    """A template of this package as HTML; values are escaped."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("bench_harness.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["cell"] = cell
    templates.tests["number"] = lambda value: (
        isinstance(value, numbers.Real) and not isinstance(value, bool)
    )
    return templates.get_template(name).render(data_uri=data_uri, split=split, **values)


def as_json(report: Report, page: Path) -> Row:
    """A report as plain values: how each case ended, and the tables by experiment and title."""
    return {
        "report": str(page),
        "notes": report.notes,
        "cases": [
            {
                "experiment": case.experiment,
                "label": case.label,
                "status": case.status,
                "seconds": case.seconds,
                "error": case.error,
            }
            for section in report.sections
            for case in section.cases
        ],
        "tables": {
            section.name: {
                # pandas writes missing values as null, and its own numbers as numbers.
                table.title: json.loads(table.frame.to_json(orient="records"))
                for table in section.tables
            }
            for section in report.sections
        },
    }


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
        [str(name).replace("|", "\\|") for name in frame.columns],
        ["---:" if each else "---" for each in right],
        *([text.replace("|", "\\|") for text in row] for row in zip(*columns, strict=True)),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown(table: Table) -> str:
    """A table as Markdown with its title and note."""
    shown = table.frame.astype(object).map(cell)
    text = shown.to_markdown(index=False, disable_numparse=True)
    parts = [f"### {table.title}", text, table.note]
    return "\n\n".join(part for part in parts if part) + "\n"
