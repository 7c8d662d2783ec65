"""Fills the marked blocks of a Markdown file from published rows; README.md describes recipes."""

from __future__ import annotations

import functools
import itertools
import posixpath
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tools.pages import bucket_model, loss_curves, recomputation, timelines, versions
from tools.pages import rows as published

from bench_harness import experiments
from bench_harness.core import Row, Timelines
from bench_harness.display.cells import is_missing
from bench_harness.display.plots import png_bytes
from bench_harness.display.timelines import timelines as checked
from bench_harness.report.frame import to_frame
from bench_harness.report.write import grid

_BLOCK = re.compile(
    r"(?P<open><!-- bench-harness: (?P<file>[^\s#]+)#(?P<name>[\w-]+) -->\n)"
    r"(?P<body>.*?)(?P<close><!-- /bench-harness -->)",
    re.DOTALL,
)
_CLOSING = "<!-- /bench-harness -->"
_OPENING = re.compile(r"<!-- bench-harness\b")
#: Code that a page shows; a block in it is an example.
_FENCED = re.compile(r"^(?P<fence>```+)[^`\n]*\n.*?^(?P=fence)$", re.DOTALL | re.MULTILINE)
#: What a cell may hold although Markdown means something by it, while cells are escaped.
_UNESCAPED = str.maketrans(
    {"\ue000": "[", "\ue001": "]", "\ue002": "<br><small>", "\ue003": "</small>"}
)
_NAMES = Path(__file__).with_name("variant_names.toml")
_KEYS = ("show", "text", "value", "figure", "measured", "versions")
_SOURCE = ("rows", "experiment", "table", "cases", "fields", "where")
_SHOW = ("source", "columns", "where", "sort", "digits", "names", "settings", "interval")
_OWN_TABLES: dict[Any, Callable[[pd.DataFrame], pd.DataFrame]] = {
    own.TITLE: own.table for own in (bucket_model, loss_curves, recomputation)
}
_OWN_FIGURES = {own.FIGURE: own.figure for own in (bucket_model, loss_curves)}
_FIGURE = ("source", "name", "file", "title", "variants", "by")


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A rendered file.

    Attributes:
        text: the file with its blocks filled in.
        pictures: PNG files that the blocks show, by path.
        problems: blocks that could not be filled in and were left as they are; one line each.
    """

    text: str
    pictures: dict[Path, Callable[[], bytes]]
    problems: list[str]


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Rows, and the table that is made from them."""

    files: list[Path]
    rows: list[Row]
    experiment: str | None
    frame: pd.DataFrame


@dataclass(kw_only=True)
class _Recipes:
    """The recipes of one file, and what was made from them.

    Attributes:
        folder: of the file; paths in it are relative to it.
        links_from: folder of the Markdown file, which links to pictures.
        given: sources by name, as the file has them; each is read when a block shows it.
    """

    folder: Path
    links_from: Path
    blocks: Mapping[str, Any]
    given: Mapping[str, Any]
    pictures: dict[Path, Callable[[], bytes]]
    sources: dict[str, _Source] = field(default_factory=dict)
    read: dict[Path, list[Row]] = field(default_factory=dict)
    tables: dict[tuple[Any, ...], dict[str, pd.DataFrame]] = field(default_factory=dict)


def render(file: Path) -> Rendered:
    """Fills the blocks of a file in; writes nothing.

    Raises:
        OSError: the file cannot be read.
    """
    text = file.read_text(encoding="utf-8")
    recipes: dict[Path, _Recipes] = {}
    pictures: dict[Path, Callable[[], bytes]] = {}
    problems: list[str] = []
    fenced = [match.span() for match in _FENCED.finditer(text)]

    def shown_as_code(match: re.Match[str]) -> bool:
        return any(start < match.start() < end for start, end in fenced)

    def at(position: int) -> str:
        return f"{file}:{text.count(chr(10), 0, position) + 1}"

    def filled(match: re.Match[str]) -> str:
        if shown_as_code(match):
            return match[0]
        try:
            found = file.parent / match["file"]
            if found not in recipes:
                recipes[found] = _recipes(found, file.parent, pictures)
            body = _body(match["name"], recipes[found], found.name)
        except ValueError as error:
            problems.append(f"{at(match.start())}: {error}")
            return match[0]
        return match["open"] + body + match["close"]

    opened = [match.start() for match in _OPENING.finditer(text) if not shown_as_code(match)]
    for start, end in itertools.pairwise([*opened, len(text)]):
        if _CLOSING not in text[start:end]:
            problems.append(f"{at(start)}: a block must end with {_CLOSING}, but got none. Add it.")
        elif _BLOCK.match(text, start) is None:
            problems.append(
                f"{at(start)}: a block must begin with <!-- bench-harness: FILE.toml#BLOCK -->, "
                f"but got {text[start:end].partition(chr(10))[0]}. Write the recipe into a file."
            )
    if problems:
        return Rendered(text=text, pictures={}, problems=problems)
    return Rendered(text=_BLOCK.sub(filled, text), pictures=pictures, problems=problems)


def _recipes(file: Path, links_from: Path, pictures: dict[Path, Callable[[], bytes]]) -> _Recipes:
    """The recipes of a file."""
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"recipes must be a readable file, but got {file} ({error.strerror}). Correct the mark."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(
            f"{file.name} must be TOML, but got an error: {error}. Correct it."
        ) from None
    _check_keys(given, ("source", "block"), file.name)
    return _Recipes(
        folder=file.parent,
        links_from=links_from,
        blocks=given.get("block", {}),
        given=given.get("source", {}),
        pictures=pictures,
    )


def _body(name: str, recipes: _Recipes, file: str) -> str:
    """The text between a block's marks."""
    block = _one_of("block", recipes.blocks, name, f" in {file}", remedy="Correct the mark.")
    _check_keys(block, _KEYS, "block")
    parts = []
    if "measured" in block:
        parts.append(_measured(block["measured"], recipes))
    if "versions" in block:
        tests, rows = (recipes.folder / block["versions"][name] for name in ("tests", "rows"))
        parts.append(versions.table(tests, sorted(rows.glob("*.jsonl*"))))
    if "text" in block:
        parts.append(_text(block, recipes))
    if "show" in block:
        parts.append(_shown(block["show"], recipes))
    if "figure" in block:
        parts.append(_picture(block["figure"], recipes))
    return "\n" + "\n\n".join(parts) + "\n\n" if parts else ""


def _measured(names: Sequence[str], recipes: _Recipes) -> str:
    """Hardware, versions and commits of sources, each with links to its files of rows."""
    files: dict[str, dict[str, None]] = {}
    for source in (_named(recipes, name) for name in names):
        for line in published.circumstances(source.rows):
            for file in source.files:
                path = posixpath.relpath(file.as_posix(), recipes.links_from.as_posix())
                files.setdefault(line, {})[f"[{file.name.partition('.')[0]}]({path})"] = None
    return "\n".join(f"- {line}: {', '.join(links)}" for line, links in files.items())


def _source(wanted: Mapping[str, Any], recipes: _Recipes) -> _Source:
    _check_keys(wanted, _SOURCE, "source")
    if "rows" not in wanted:
        raise ValueError("a source must have rows, but got none. Name a file of published rows.")
    given = wanted["rows"]
    files = [recipes.folder / name for name in ([given] if isinstance(given, str) else given)]
    rows = []
    for file in files:
        if file not in recipes.read:
            recipes.read[file] = published.read(file)
        rows += recipes.read[file]
    name = wanted.get("experiment")
    if name is not None:
        rows = [row for row in rows if row["experiment"] == name]
    if cases := wanted.get("cases", []):
        labels = {row["label"] for row in rows}
        exact = labels.intersection(cases)
        texts = [text for text in cases if text not in exact]
        rows = [
            row
            for row in rows
            if row["label"] in exact or any(text in row["label"] for text in texts)
        ]
    if not rows:
        of = "".join(
            [f" of {name}" * bool(name), f" of cases named {', '.join(cases)}" * bool(cases)]
        )
        raise ValueError(
            f"rows of {given} must hold rows{of}, but got none. Measure them again, or correct the "
            "source."
        )
    if name is None:
        frame = _fields(rows, wanted)
    else:
        frame = _where(_table(name, rows, files, wanted, recipes), wanted.get("where", {}))
    return _Source(files=files, rows=rows, experiment=name, frame=frame)


def _table(
    experiment: str,
    rows: list[Row],
    files: list[Path],
    wanted: Mapping[str, Any],
    recipes: _Recipes,
) -> pd.DataFrame:
    """A table of an experiment, or one that only these pages have."""
    title = wanted.get("table")
    if title in _OWN_TABLES:
        return _OWN_TABLES[title](to_frame(rows))
    key = (experiment, *map(str, files), *wanted.get("cases", []))
    if key not in recipes.tables:
        made = experiments.get(experiment).tables(to_frame(rows))
        recipes.tables[key] = {table.title: table.frame for table in made}
    table: pd.DataFrame = _one_of("table", recipes.tables[key], title)
    return table


def _fields(rows: list[Row], wanted: Mapping[str, Any]) -> pd.DataFrame:
    """The rows themselves, as the columns that a source names."""
    frame = pd.json_normalize([{**row.pop("config", {}), **row} for row in map(dict, rows)])
    frame = _where(frame, wanted.get("where", {}))
    columns: dict[str, Any] = {}
    for name, title, *divisor in wanted.get("fields", [[name, name] for name in frame]):
        column = _column(frame, name)
        columns[title] = column / divisor[0] if divisor else column
    return pd.DataFrame(columns).reset_index(drop=True)


def _shown(wanted: Mapping[str, Any], recipes: _Recipes) -> str:
    """A table as Markdown."""
    _check_keys(wanted, _SHOW, "show")
    frame = _where(_named(recipes, wanted.get("source")).frame, wanted.get("where", {}))
    if frame.empty:
        raise ValueError(
            f"where must match rows, but got none for {wanted.get('where')}. Correct it."
        )
    if "sort" in wanted:
        _column(frame, wanted["sort"])
        frame = frame.sort_values(wanted["sort"], kind="stable")
    if "interval" in wanted:
        frame = _with_interval(frame, *wanted["interval"], digits=wanted.get("digits", 1))
    if "names" in wanted:
        frame = _with_short_names(frame, wanted["names"], settings=wanted.get("settings", True))
    chosen = [
        (name, name) if isinstance(name, str) else tuple(name)
        for name in wanted.get("columns", list(map(str, frame.columns)))
    ]
    shown = frame[[_column(frame, name).name for name, _ in chosen]]
    shown.columns = [title for _, title in chosen]
    lines = grid(shown, digits=wanted.get("digits")).split("\n")
    if "interval" in wanted:
        rules = lines[1].split(" ")
        rules[1 + 2 * [name for name, _ in chosen].index(wanted["interval"][0])] = "---:"
        lines[1] = " ".join(rules)
    return "\n".join(lines).translate(_UNESCAPED)


def _with_interval(
    frame: pd.DataFrame, middle: str, low: str, high: str, *, digits: int
) -> pd.DataFrame:
    """The column ``middle`` as texts such as ``150.5 [147.2, 154.8]``."""
    rows = zip(*(_column(frame, name) for name in (middle, low, high)), strict=True)
    texts = [f"{m:.{digits}f} \ue000{a:.{digits}f}, {b:.{digits}f}\ue001" for m, a, b in rows]
    return frame.assign(**{middle: texts})


@functools.cache
def names() -> Mapping[str, str]:
    """The one short name of each variant by its label, which says all that the variant sets."""
    return tomllib.loads(_NAMES.read_text(encoding="utf-8"))


def short_names(labels: Sequence[str]) -> list[str]:
    """The names of a table's variants, as "FSDP kept".

    Raises:
        ValueError: a label has none.
    """
    for label in labels:
        if label not in names():
            raise ValueError(
                f"a variant must have a name in tools/pages/{_NAMES.name}, but got {label!r}. "
                "Add one of at most 16 characters."
            )
    return [names()[label] for label in labels]


def _with_short_names(frame: pd.DataFrame, name: str, *, settings: bool) -> pd.DataFrame:
    labels = [str(label) for label in _column(frame, name)]
    shown = [
        short if short == label or not settings else f"{short}\ue002{label}\ue003"
        for label, short in zip(labels, short_names(labels), strict=True)
    ]
    return frame.assign(**{name: shown})


def _picture(wanted: Mapping[str, Any], recipes: _Recipes) -> str:
    _check_keys(wanted, _FIGURE, "figure")
    source = _named(recipes, wanted.get("source"))
    name, file, rows = wanted["name"], wanted["file"], source.rows
    if source.experiment is None and "by" not in wanted:
        raise ValueError(
            "a figure of plain rows must have by, the field that tells their timelines apart, but "
            "got none. Name it, or an experiment in the source."
        )
    if "variants" in wanted:
        rows = _variants(rows, wanted["variants"])
    target = recipes.folder / file
    if not target.resolve().is_relative_to(recipes.folder.resolve()) or target.suffix != ".png":
        raise ValueError(
            f"figure file must be a PNG file in the page's folder or below it, but got {file!r}. "
            "Correct the path."
        )

    def draw() -> bytes:
        if source.experiment is None:
            return png_bytes(
                timelines.draw(checked({r[wanted["by"]]: r["timeline"] for r in rows}))
            )
        if name in _OWN_FIGURES:
            return png_bytes(_OWN_FIGURES[name](to_frame(rows)))
        experiment = experiments.get(source.experiment)
        made = {figure.name: figure for figure in experiment.figures(to_frame(rows))}
        figure = _one_of("figure", made, name).figure
        return png_bytes(timelines.draw(figure) if isinstance(figure, Timelines) else figure)

    recipes.pictures[target] = draw
    link = posixpath.relpath(target.as_posix(), recipes.links_from.as_posix())
    return f"![{wanted.get('title', name)}]({link})"


def _variants(rows: list[Row], labels: Sequence[str]) -> list[Row]:
    """The rows of these variants, by their short names: a picture holds ten bars."""
    short = dict(zip(labels, short_names(labels), strict=True))
    missing = short.keys() - {row.get("variant") for row in rows}
    if missing:
        raise ValueError(
            f"variants of a figure must be in its rows, but got {', '.join(sorted(missing))}. "
            "Correct them."
        )
    return [
        {**row, "variant": short[row["variant"]]} for row in rows if row.get("variant") in short
    ]


def _text(block: Mapping[str, Any], recipes: _Recipes) -> str:
    """Sentences whose numbers come from sources."""
    # A template comes with a page, and rendering somebody else's page must not run its code.
    # Markdown, not HTML: there is nothing to escape.
    templates = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False)
    templates.filters["figure"] = figure
    values = {
        name: _cell(_named(recipes, asked[0]).frame, *asked[1:])
        for name, asked in block.get("value", {}).items()
    }
    try:
        return templates.from_string(block["text"]).render(values).strip()
    except (jinja2.TemplateError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"text must be a template that its values fill in, but got: {error}. Correct it."
        ) from None


def figure(value: Any, digits: int = 3) -> str:
    """A number with so many significant digits, never in exponents."""
    return f"{Decimal(f'{float(value):.{digits - 1}e}'):,f}"


def _cell(frame: pd.DataFrame, column: str, where: Mapping[str, Any] | None = None) -> Any:
    """One cell of a source."""
    cells = list(dict.fromkeys(_column(_where(frame, where or {}), column).tolist()))
    found = [cell for cell in cells if not (cell is None or is_missing(cell))]
    if len(cells) != 1 or not found:
        got = f"{len(cells)}. Say which." if found or not cells else "an empty one. Choose another."
        raise ValueError(
            f"value of {column!r} where {dict(where or {})} must be one cell, but got {got}"
        )
    return found[0]


def _where(frame: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    for name, values in wanted.items():
        accepted = values if isinstance(values, list) else [values]
        frame = frame[_column(frame, name).isin(accepted)]
    return frame


def _column(frame: pd.DataFrame, name: str) -> pd.Series[Any]:
    column: pd.Series[Any] = _one_of("column", frame, name)
    return column


def _named(recipes: _Recipes, name: Any) -> _Source:
    given = _one_of("source", recipes.given, name, remedy="Define it in the same file.")
    if name not in recipes.sources:
        recipes.sources[name] = _source(given, recipes)
    return recipes.sources[name]


def _one_of(what: str, known: Any, name: Any, among: str = "", remedy: str = "Correct it.") -> Any:
    if name not in known:
        raise ValueError(
            f"{what} must be one of {', '.join(map(str, known))}{among}, but got {name!r}. {remedy}"
        )
    return known[name]


def _check_keys(given: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for key in given:
        _one_of(f"{what} key", dict.fromkeys(known), key, remedy="Remove or correct it.")
