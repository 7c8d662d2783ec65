"""A write-up of answers over the rows of several runs: Markdown pages.

A results folder holds run folders and ``answers/NAME.md``, one per question. Such a file begins
with TOML between lines of ``+++``, which says what is shown, and goes on with the answer in words.
Words take their figures from the tables, so they cannot drift from the rows::

    +++
    title = "Time of a training step"
    order = 1
    headline = "forward takes {{ forward | figure }} ms"
    setup = "Batch 4, context 256."
    commands = ["bench-harness run assignment --only model"]

    [[part]]
    runs = ["assignment-h200"]
    experiment = "model"
    cases = ["warm-up 5"]
    figures = ["model_step"]

    [[part.table]]
    title = "Time per phase"
    columns = ["size", "phase", "median (ms)"]
    where = { phase = ["forward", "step"] }

    [cell]
    forward = ["Time per phase", "median (ms)", { phase = "forward" }]
    backward = ["Time per phase", "median (ms)", { phase = "backward" }]
    +++
    Backward takes {{ (backward / forward) | figure }} times as long as forward, because ...

A part may also show rows that another program wrote, as JSON lines or one JSON array::

    [[part]]
    file = "ddp/h200x2.jsonl"

    [[part.table]]
    title = "Wrappers"
    fields = [["variant", "wrapper"], ["state.bytes", "state (GiB)", 1073741824]]
    where = { precision = "bf16" }

A field of such a row is named with dots where it is nested; the third entry divides it.
``by = ["variant"]`` shows the median of the rows that agree in these fields. Such a part may also
show pictures: ``pictures = [["ddp/timeline.png", "Title", "Note."]]``.

Where two parts show the same tables, ``label`` sets one apart: its tables and pictures are then
called ``Time per phase (LABEL)``, by cells too. The words are the answer. What follows a line
``## Notes`` in them stands under that heading.

``cases`` are parts of labels; one that is the whole label of a case names only that case. An entry
of ``cell`` is the one cell of a whole table, in that column, whose row has these values.
``figure`` rounds to three significant digits, ``figure(2)`` to two.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_harness import experiments
from bench_harness.case import Row
from bench_harness.experiments import Figure, Table
from bench_harness.report.cells import is_missing
from bench_harness.report.frame import to_frame
from bench_harness.report.plots import png_bytes
from bench_harness.report.write import markdown
from bench_harness.store import ENVIRONMENTS, RESULTS, Store, replace_file

if TYPE_CHECKING:
    import jinja2
    import pandas as pd

ANSWERS, PICTURES, INDEX = "answers", "pictures", "index.md"
_FENCE = "+++\n"
_NOTES = "\n## Notes\n"
_KEYS = {"title", "order", "headline", "setup", "commands", "part", "cell"}
_PART_KEYS = {"runs", "experiment", "cases", "table", "figures", "label"}
_TABLE_KEYS = {"title", "columns", "where"}
_FILE_PART_KEYS = {"file", "table", "pictures"}
_FILE_TABLE_KEYS = {"title", "fields", "where", "by", "note"}


@dataclass(frozen=True)
class Picture:
    """A picture that another program drew.

    Attributes:
        file: PNG, relative to the results folder.
    """

    file: str
    title: str
    note: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """One answered question.

    Attributes:
        name: of the answer's file, and of the page.
        headline: the answer in a phrase, for the index.
        measured: on what, and from which commit, one line per run.
        files: the files of rows, relative to the results folder.
        answer: paragraphs.
        notes: paragraphs of what the answer leaves out.
    """

    name: str
    title: str
    order: int
    headline: str
    setup: str
    commands: list[str]
    measured: list[str]
    files: list[str]
    tables: list[Table]
    figures: list[Figure]
    pictures: list[Picture]
    answer: list[str]
    notes: list[str]


def build(folder: Path) -> list[Page]:
    """Every answer of a results folder, in their order.

    Raises:
        ValueError: there are no answers, or one of them cannot be made; the text names its file
            and what is wrong in it.
        StoreError: a run cannot be read.
    """
    files = sorted(file for file in (folder / ANSWERS).glob("*.md") if file.name != INDEX)
    if not files:
        raise ValueError(f"a write-up needs {folder / ANSWERS}/NAME.md; found none")
    pages = []
    for file in files:
        try:
            pages.append(_page(file, folder))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    return sorted(pages, key=lambda page: (page.order, page.name))


def write(folder: Path) -> list[Page]:
    """Writes a Markdown page per answer, their pictures and the index.

    Raises:
        ValueError, StoreError: as :func:`build`; then nothing is written.
    """
    pages = build(folder)
    index = _index(folder, pages)
    for page in pages:
        for figure in page.figures:
            replace_file(folder / _picture(page, figure), png_bytes(figure.figure))
        replace_file(folder / f"{page.name}.md", page_markdown(page).encode())
    replace_file(folder / INDEX, index.encode())
    return pages


def page_markdown(page: Page) -> str:
    """A page as Markdown."""
    commands = "\n".join(page.commands)
    parts = [
        f"# {page.title}",
        f"`{page.name}` · [all problems]({INDEX})",
        *page.answer,
        "## Notes" if page.notes else "",
        *page.notes,
        "## Setup",
        page.setup,
        "\n".join(f"- {line}" for line in page.measured),
        f"```console\n{commands}\n```" if commands else "",
        "## Results" if page.tables or page.figures or page.pictures else "",
        *(markdown(table).strip() for table in page.tables),
        *(
            f"### {figure.title}\n\n![{figure.title}]({_picture(page, figure)})\n\n{figure.note}"
            for figure in page.figures
        ),
        *(
            f"### {each.title}\n\n![{each.title}]({each.file})\n\n{each.note}"
            for each in page.pictures
        ),
        "Rows: " + ", ".join(f"[{file}]({file})" for file in page.files) if page.files else "",
    ]
    return "\n\n".join(filter(None, (part.strip() for part in parts))) + "\n"


def _index(folder: Path, pages: list[Page]) -> str:
    """The index: the text of ``answers/index.md``, with a table of all problems in it."""
    lines = ["| problem | answer |", "|---|---|"]
    lines += [f"| [{page.name}]({page.name}.md) | {page.headline} |" for page in pages]
    file = folder / ANSWERS / INDEX
    text = file.read_text(encoding="utf-8") if file.is_file() else "# Results\n\n{{ problems }}\n"
    return _templates().from_string(text).render(problems="\n".join(lines))


def _picture(page: Page, figure: Figure) -> str:
    return f"{PICTURES}/{page.name}-{figure.name}.png"


def _templates() -> jinja2.Environment:
    import jinja2

    # Markdown, not HTML: what becomes HTML is escaped there.
    templates = jinja2.Environment(  # noqa: S701
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    templates.filters["figure"] = _figure
    return templates


def _figure(value: Any, digits: int = 3) -> str:
    """A number with so many significant digits, never in exponents."""
    from decimal import Decimal

    rounded = Decimal(f"{float(value):.{digits - 1}e}")
    return f"{rounded:,f}"


def _page(file: Path, folder: Path) -> Page:
    from jinja2 import TemplateError

    head, body = _split(file.read_text(encoding="utf-8"))
    _check_keys(head, _KEYS, "key")
    for name in ("title", "order", "headline"):
        if name not in head:
            raise ValueError(f"must have {name}; its keys are {', '.join(head)}")
    shown: list[Table] = []
    whole: dict[str, list[pd.DataFrame]] = {}
    figures: list[Figure] = []
    drawn: list[Picture] = []
    measured: dict[str, None] = {}
    files: dict[str, None] = {}
    for part in head.get("part", []):
        if "file" in part:
            made, where = _from_file(part, folder)
            measured |= dict.fromkeys(where)
            files[part["file"]] = None
            drawn += [_picture_file(folder, *entry) for entry in part.get("pictures", [])]
            shown += made
            for table in made:
                whole.setdefault(table.title, []).append(table.frame)
            continue
        _check_keys(part, _PART_KEYS, "key of a part")
        rows, where = _rows(part, folder)
        measured |= dict.fromkeys(where)
        files |= dict.fromkeys(f"{run}/{RESULTS}" for run in part["runs"])
        experiment = experiments.get(part["experiment"])
        label = part.get("label")
        by_title = {table.title: table for table in experiment.tables(to_frame(rows))}
        for title, table in by_title.items():
            whole.setdefault(_labelled(title, label), []).append(table.frame)
        for wanted in part.get("table", []):
            table = _narrowed(wanted, by_title)
            shown.append(replace(table, title=_labelled(table.title, label)))
        for figure in _pictures(part, experiment.figures(to_frame(rows))):
            name = f"{figure.name}-{label.replace(' ', '-')}" if label else figure.name
            figures.append(replace(figure, name=name, title=_labelled(figure.title, label)))
    try:
        templates = _templates()
        values = {name: _cell(whole, *asked) for name, asked in head.get("cell", {}).items()}
        words = templates.from_string(body).render(values)
        answer, _, notes = words.partition(_NOTES)
        headline = templates.from_string(head["headline"]).render(values)
    except (TemplateError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"its text cannot be filled in: {error}") from None
    return Page(
        name=file.stem,
        title=head["title"],
        order=head["order"],
        headline=headline,
        setup=head.get("setup", ""),
        commands=head.get("commands", []),
        measured=list(measured),
        files=list(files),
        tables=shown,
        figures=figures,
        pictures=drawn,
        answer=_paragraphs(answer),
        notes=_paragraphs(notes),
    )


def _labelled(title: str, label: str | None) -> str:
    return f"{title} ({label})" if label else title


def _paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def _split(text: str) -> tuple[dict[str, Any], str]:
    """The file's TOML and its words."""
    parts = text.split(_FENCE)
    if len(parts) != 3 or parts[0].strip():
        raise ValueError("must begin with TOML between two lines of +++")
    try:
        return tomllib.loads(parts[1]), parts[2]
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"what stands between +++ must be TOML: {error}") from None


def _check_keys(given: Mapping[str, Any], known: set[str], what: str) -> None:
    if unknown := sorted(set(given) - known):
        raise ValueError(f"{what} must be one of {', '.join(sorted(known))}; found {unknown[0]!r}")


def _rows(part: Mapping[str, Any], folder: Path) -> tuple[list[Row], list[str]]:
    """The rows of a part, and where they were measured."""
    found: list[Row] = []
    where = []
    texts = part.get("cases", [])
    for run in part["runs"]:
        store = Store(folder / run)
        store.check_is_run()
        rows = [row for row in store.load().rows if row["experiment"] == part["experiment"]]
        labels = {row["label"] for row in rows}
        rows = [row for row in rows if not texts or _named(row["label"], texts, labels)]
        environments = store.read_json(ENVIRONMENTS) or {}
        for identity in dict.fromkeys(row["environment"] for row in rows):
            commits = dict.fromkeys(r["commit"] for r in rows if r["environment"] == identity)
            where.append(_described(environments.get(identity, {}), commits))
        found += rows
    if not found:
        raise ValueError(
            f"the part must find rows of {part['experiment']} in {', '.join(part['runs'])}"
            + (f" whose case holds one of {texts}" if texts else "")
        )
    return found, where


def _named(label: str, texts: list[str], labels: set[str]) -> bool:
    """Whether one of the texts is part of a label; one that is a whole label names only that."""
    return any(text == label if text in labels else text in label for text in texts)


def _from_file(part: Mapping[str, Any], folder: Path) -> tuple[list[Table], list[str]]:
    """Tables of rows that another program wrote, and where they were measured."""
    import pandas as pd

    _check_keys(part, _FILE_PART_KEYS, "key of a part with a file")
    try:
        text = (folder / part["file"]).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {folder / part['file']}: {error.strerror}") from None
    rows = json.loads(text) if text.startswith("[") else [*map(json.loads, text.splitlines())]
    frame = pd.json_normalize(rows)
    where = [
        ", ".join(
            [
                f"{int(row.get('world_size', 1))} × {row.get('hardware', row.get('gpu'))}",
                *(f"{name} {row[name]}" for name in ("torch", "triton") if row.get(name)),
                *([f"commit {row['commit'][:12]}"] if row.get("commit") else []),
            ]
        )
        for row in rows
    ]
    tables = []
    for wanted in part.get("table", []):
        _check_keys(wanted, _FILE_TABLE_KEYS, "key of a table of a file")
        kept = _where(frame, wanted, part["file"])
        if "by" in wanted:
            grouped = kept.groupby(wanted["by"], sort=False, as_index=False)
            kept = grouped.median(numeric_only=True)
        columns = {}
        for field, name, *divisor in wanted["fields"]:
            column = _column(kept, field, part["file"])
            if divisor:
                column = column / divisor[0]
            rounded = column.dtype.kind == "f"
            columns[name] = column.map(lambda v: float(f"{v:.4g}")) if rounded else column
        made = pd.DataFrame(columns).reset_index(drop=True)
        tables.append(Table(wanted["title"], made, wanted.get("note", "")))
    return tables, list(dict.fromkeys(where))


def _picture_file(folder: Path, file: str, title: str, note: str = "") -> Picture:
    if not (folder / file).is_file():
        raise ValueError(f"cannot read {folder / file}: No such file or directory")
    return Picture(file, title, note)


def _where(frame: pd.DataFrame, wanted: Mapping[str, Any], title: str) -> pd.DataFrame:
    """The rows that a table asks for."""
    for name, values in wanted.get("where", {}).items():
        accepted = values if isinstance(values, list) else [values]
        frame = frame[_column(frame, name, title).isin(accepted)]
    if frame.empty:
        raise ValueError(f"table {title!r} must have rows where {wanted.get('where')}; it has none")
    return frame


def _described(environment: Mapping[str, Any], commits: Mapping[str | None, None]) -> str:
    """Hardware, versions and commit in one line."""
    names = [gpu["name"] for gpu in environment.get("gpus", [])]
    packages = environment.get("packages", {})
    hardware = f"{len(names)} × {names[0]}" if names else environment.get("cpu", "unknown machine")
    versions = [f"{name} {packages[name]}" for name in ("torch", "triton") if packages.get(name)]
    if environment.get("driver"):
        versions.insert(0, f"driver {environment['driver']}")
    marks = [c[:12] + " with changes" * c.endswith("-dirty") for c in commits if c]
    return ", ".join([hardware, *versions, *(f"commit {mark}" for mark in marks)])


def _narrowed(wanted: Mapping[str, Any], made: Mapping[str, Table]) -> Table:
    """The rows and columns of a table that a page shows."""
    _check_keys(wanted, _TABLE_KEYS, "key of a table")
    title = wanted["title"]
    if title not in made:
        raise ValueError(f"table must be one of {', '.join(made)}; found {title!r}")
    frame = _where(made[title].frame, wanted, title)
    columns = wanted.get("columns", list(frame.columns))
    frame = frame[[_column(frame, name, title).name for name in columns]]
    return Table(title, frame, made[title].note)


def _column(frame: pd.DataFrame, name: str, title: str) -> pd.Series[Any]:
    if name not in frame:
        raise ValueError(
            f"column of {title!r} must be one of {', '.join(frame.columns)}; found {name!r}"
        )
    return frame[name]


def _pictures(part: Mapping[str, Any], made: list[Figure]) -> list[Figure]:
    by_name = {figure.name: figure for figure in made}
    for name in part.get("figures", []):
        if name not in by_name:
            raise ValueError(f"figure must be one of {', '.join(by_name)}; found {name!r}")
    return [by_name[name] for name in part.get("figures", [])]


def _cell(
    whole: Mapping[str, list[pd.DataFrame]],
    title: str,
    column: str,
    where: Mapping[str, Any] | None = None,
) -> Any:
    """One cell of the tables that have a title."""
    if title not in whole:
        raise ValueError(f"a cell's table must be one of {', '.join(whole)}; found {title!r}")
    where = where or {}
    found: list[Any] = []
    for frame in whole[title]:
        # A table without one of the columns has no such row.
        if {column, *where} <= set(frame.columns):
            kept = frame
            for name, value in where.items():
                kept = kept[kept[name] == value]
            found += kept[column].tolist()
    found = list(dict.fromkeys(found))  # two parts may hold the same row
    if len(found) != 1:
        raise ValueError(
            f"column {column!r} of {title!r} where {dict(where)} must be one cell; it is "
            f"{len(found)}"
        )
    if is_missing(found[0]) or found[0] is None:
        raise ValueError(f"column {column!r} of {title!r} where {dict(where)} is empty")
    return found[0]
