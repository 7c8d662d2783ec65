"""Fills the marked blocks of a Markdown file from published rows; README.md describes recipes."""

from __future__ import annotations

import functools
import posixpath
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tools.course import bucket_model, memory_order
from tools.pages import loss_curves, recomputation, timelines, versions
from tools.pages import rows as published

from bench_harness import experiments
from bench_harness.core import Row, Timelines
from bench_harness.display.cells import is_missing
from bench_harness.display.plots import png_bytes
from bench_harness.display.timelines import timelines as checked
from bench_harness.report.frame import to_frame
from bench_harness.report.write import grid
from bench_harness.training.constructors import refuse_unknown

#: Code that a page shows, in which a block is an example; or a block; or what only begins as one.
_BLOCK = re.compile(
    r"^(?P<fence>```+)[^`\n]*\n.*?^(?P=fence)$"
    r"|(?P<open><!-- bench-harness\b(?:: (?P<file>[^\s#]+)#(?P<name>[\w-]+) -->)?)"
    r"(?:(?:(?!<!-- bench-harness\b).)*?(?P<close><!-- /bench-harness -->))?",
    re.DOTALL | re.MULTILINE,
)
#: What a cell may hold although Markdown means something by it, while cells are escaped.
_UNESCAPED = str.maketrans(
    {"\ue000": "[", "\ue001": "]", "\ue002": "<br><small>", "\ue003": "</small>"}
)
_NAMES = Path(__file__).with_name("variant_names.toml")
_OWN_TABLES: dict[Any, Callable[[pd.DataFrame], pd.DataFrame]] = {
    own.TITLE: own.table for own in (bucket_model, loss_curves, recomputation)
}
_OWN_FIGURES = {own.FIGURE: own.figure for own in (bucket_model, loss_curves, memory_order)}


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


def render(file: Path) -> Rendered:
    """Fills the blocks of a file in; writes nothing.

    Raises:
        OSError: the file cannot be read.
    """
    text = file.read_text(encoding="utf-8")
    pictures: dict[Path, Callable[[], bytes]] = {}
    problems: list[str] = []
    recipes = functools.cache(lambda path: _Recipes(path, file.parent, pictures))

    def filled(match: re.Match[str]) -> str:
        if match["fence"]:
            return match[0]
        try:
            if not (match["name"] and match["close"]):
                raise ValueError(
                    "a block must begin with <!-- bench-harness: FILE.toml#BLOCK --> and end with "
                    f"<!-- /bench-harness -->, but got {match[0].splitlines()[0]}. Correct it."
                )
            body = recipes(file.parent / match["file"]).body(match["name"])
        except ValueError as error:
            problems.append(f"{file}:{text.count(chr(10), 0, match.start()) + 1}: {error}")
            return match[0]
        return f"{match['open']}\n{body}{match['close']}"

    return Rendered(text=_BLOCK.sub(filled, text), pictures=pictures, problems=problems)


@dataclass(frozen=True)
class _Source:
    """Rows, and the table that is made from them."""

    files: list[Path]
    rows: list[Row]
    experiment: str | None
    frame: pd.DataFrame


class _Recipes:
    """The recipes of one file; what they are made from is read once, when a block shows it.

    Args:
        file: paths in it are relative to its folder.
        links_from: folder of the Markdown file, which links to pictures.
        pictures: gets those that the blocks show.
    """

    def __init__(
        self, file: Path, links_from: Path, pictures: dict[Path, Callable[[], bytes]]
    ) -> None:
        try:
            self._given = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ValueError(
                f"recipes must be a readable TOML file, but got {file} ({error}). Correct it, or "
                "the mark."
            ) from None
        refuse_unknown(self._given, ("source", "block"), file.name)
        self._file, self._links_from, self._pictures = file, links_from, pictures
        self._read = functools.cache(published.read)
        self._source = functools.cache(self._made_source)
        self._tables = functools.cache(self._made_tables)

    def body(self, name: str) -> str:
        """The text between a block's marks."""
        known = self._given.get("block", {})
        block = _one_of(f"block of {self._file.name}", known, name, "Correct the mark.")
        makers: dict[str, Callable[[Any], str]] = {
            "measured": self._measured,
            "versions": self._versions,
            "text": lambda text: self._text(text, block.get("value", {})),
            "show": self._shown,
            "figure": self._picture,
        }
        refuse_unknown(block, (*makers, "value"), "block")
        parts = [make(block[key]) for key, make in makers.items() if key in block]
        return "\n" + "\n\n".join(parts) + "\n\n" if parts else ""

    def _measured(self, names: Sequence[str]) -> str:
        """Hardware, versions and commits of sources, each with links to its files of rows."""
        files: dict[str, dict[str, None]] = {}
        for source in map(self._source, names):
            for line in published.circumstances(source.rows):
                for file in source.files:
                    link = f"[{file.name.partition('.')[0]}]({self._link(file)})"
                    files.setdefault(line, {})[link] = None
        return "\n".join(f"- {line}: {', '.join(links)}" for line, links in files.items())

    def _versions(self, wanted: Mapping[str, str]) -> str:
        tests, rows = (self._file.parent / wanted[name] for name in ("tests", "rows"))
        return versions.table(tests, sorted(rows.glob("*.jsonl*")))

    def _link(self, file: Path) -> str:
        return posixpath.relpath(file.as_posix(), self._links_from.as_posix())

    def _made_source(self, name: Any) -> _Source:
        given = self._given.get("source", {})
        wanted = _one_of("source", given, name, "Define it in the same file.")
        known = ("rows", "experiment", "table", "cases", "fields", "where")
        refuse_unknown(wanted, known, "source")
        if "rows" not in wanted:
            raise ValueError(f"source {name} must have rows, but got none. Name a published file.")
        given = wanted["rows"]
        files = [
            self._file.parent / each for each in ([given] if isinstance(given, str) else given)
        ]
        which = (wanted.get("experiment"), tuple(files), tuple(wanted.get("cases", ())))
        rows = self._rows(*which)
        if not rows:
            raise ValueError(
                f"rows of {given} must hold cases of experiment {which[0]} named "
                f"{', '.join(which[2]) or 'anything'}, but got none. Measure them again, or "
                "correct the source."
            )
        where, title = wanted.get("where", {}), wanted.get("table")
        if which[0] is None:
            frame = _fields(rows, wanted)
        elif title in _OWN_TABLES:
            frame = _where(_OWN_TABLES[title](to_frame(rows)), where)
        else:
            frame = _where(_one_of("table", self._tables(*which), title), where)
        return _Source(files=files, rows=rows, experiment=which[0], frame=frame)

    def _rows(
        self, experiment: str | None, files: Sequence[Path], cases: Sequence[str]
    ) -> list[Row]:
        """Rows of an experiment, or of all, whose label is one of ``cases`` or has one in it."""
        rows = [row for file in files for row in self._read(file)]
        exact = {row["label"] for row in rows}.intersection(cases)
        parts = [text for text in cases if text not in exact]
        return [
            row
            for row in rows
            if experiment in (None, row["experiment"])
            and (not cases or row["label"] in exact or any(text in row["label"] for text in parts))
        ]

    def _made_tables(self, experiment: str, *which: Any) -> dict[str, pd.DataFrame]:
        made = experiments.get(experiment).tables(to_frame(self._rows(experiment, *which)))
        return {table.title: table.frame for table in made}

    def _shown(self, wanted: Mapping[str, Any]) -> str:
        """A table as Markdown."""
        known = "source columns where sort digits names settings interval"
        refuse_unknown(wanted, known.split(), "show")
        where, digits = wanted.get("where", {}), wanted.get("digits")
        frame = _where(self._source(wanted.get("source")).frame, where)
        if frame.empty:
            raise ValueError(f"where must match rows, but got none for {where}. Correct it.")
        if "sort" in wanted:
            _column(frame, wanted["sort"])
            frame = frame.sort_values(wanted["sort"], kind="stable")
        if "interval" in wanted:
            middle, *ends = wanted["interval"]
            numbers = [_column(frame, name) for name in (middle, *ends)]
            texts = [
                "{:.{d}f} \ue000{:.{d}f}, {:.{d}f}\ue001".format(*row, d=wanted.get("digits", 1))
                for row in zip(*numbers, strict=True)
            ]
            frame = frame.assign(**{middle: texts})
        if "names" in wanted:
            labels = [str(label) for label in _column(frame, wanted["names"])]
            second = "\ue002{}\ue003" if wanted.get("settings", True) else ""
            pairs = zip(labels, short_names(labels), strict=True)
            texts = [short + second.format(label) * (short != label) for label, short in pairs]
            frame = frame.assign(**{wanted["names"]: texts})
        columns = wanted.get("columns", map(str, frame.columns))
        titles = dict([each, each] if isinstance(each, str) else each for each in columns)
        shown = frame[[_column(frame, name).name for name in titles]]
        lines = grid(shown.set_axis(list(titles.values()), axis=1), digits=digits).split("\n")
        if "interval" in wanted:  # a text, but to the right as a number
            rules = lines[1].split(" ")
            rules[1 + 2 * list(titles).index(middle)] = "---:"
            lines[1] = " ".join(rules)
        return "\n".join(lines).translate(_UNESCAPED)

    def _picture(self, wanted: Mapping[str, Any]) -> str:
        """A link to a picture, which is drawn when it is written."""
        refuse_unknown(wanted, ("source", "name", "file", "title", "variants", "by"), "figure")
        source = self._source(wanted.get("source"))
        name, by, rows = wanted.get("name"), wanted.get("by", "variant"), source.rows
        if "variants" in wanted:
            rows = _variants(rows, wanted["variants"])
        target = self._file.parent / wanted["file"]
        inside = target.resolve().is_relative_to(self._file.parent.resolve())
        if not inside or target.suffix != ".png":
            raise ValueError(
                "figure file must be a PNG file in the page's folder or below it, but got "
                f"{wanted['file']!r}. Correct the path."
            )

        def draw() -> bytes:
            if source.experiment is None:
                drawn: Any = checked({row[by]: row["timeline"] for row in rows})
            elif name in _OWN_FIGURES:
                drawn = _OWN_FIGURES[name](to_frame(rows))
            else:
                made = experiments.get(source.experiment).figures(to_frame(rows))
                drawn = _one_of("figure", {each.name: each.figure for each in made}, name)
            return png_bytes(timelines.draw(drawn) if isinstance(drawn, Timelines) else drawn)

        self._pictures[target] = draw
        return f"![{wanted.get('title', name)}]({self._link(target)})"

    def _text(self, text: str, asked: Mapping[str, Any]) -> str:
        """Sentences whose numbers come from sources."""
        values = {
            name: _cell(self._source(source).frame, *cell)
            for name, (source, *cell) in asked.items()
        }
        try:
            return _TEMPLATES.from_string(text).render(values).strip()
        except (jinja2.TemplateError, TypeError, ZeroDivisionError) as error:
            raise ValueError(
                f"text must be a template that its values fill in, but got: {error}. Correct it."
            ) from None


def _fields(rows: Sequence[Row], wanted: Mapping[str, Any]) -> pd.DataFrame:
    """The rows themselves, as the columns that a source names."""
    frame = pd.json_normalize([{**row.pop("config", {}), **row} for row in map(dict, rows)])
    frame = _where(frame, wanted.get("where", {}))
    columns: dict[str, Any] = {}
    for name, title, *divisor in wanted.get("fields", [[name, name] for name in frame]):
        column = _column(frame, name)
        columns[title] = column / divisor[0] if divisor else column
    return pd.DataFrame(columns).reset_index(drop=True)


@functools.cache
def names() -> Mapping[str, str]:
    """The one short name of each variant by its label, which says all that the variant sets."""
    return tomllib.loads(_NAMES.read_text(encoding="utf-8"))


def short_names(labels: Sequence[str]) -> list[str]:
    """The names of a table's variants, as "FSDP kept".

    Raises:
        ValueError: a label has none.
    """
    try:
        return [names()[label] for label in labels]
    except KeyError as error:
        raise ValueError(
            f"a variant must have a name in tools/pages/{_NAMES.name}, but got {error}. "
            "Add one of at most 16 characters."
        ) from None


def _variants(rows: list[Row], labels: Sequence[str]) -> list[Row]:
    """The rows of these variants, by their short names: a picture holds ten bars."""
    short = dict(zip(labels, short_names(labels), strict=True))
    for label in labels:
        _one_of("variant of a figure", {row.get("variant"): row for row in rows}, label)
    return [
        {**row, "variant": short[row["variant"]]} for row in rows if row.get("variant") in short
    ]


def figure(value: Any, digits: int = 3) -> str:
    """A number with so many significant digits, never in exponents."""
    return f"{Decimal(f'{float(value):.{digits - 1}e}'):,f}"


# A template comes with a page, and rendering somebody else's page must not run its code.
# Markdown, not HTML: there is nothing to escape.
_TEMPLATES = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, autoescape=False)
_TEMPLATES.filters["figure"] = figure


def _cell(frame: pd.DataFrame, column: str, where: Mapping[str, Any] | None = None) -> Any:
    """One cell of a source."""
    cells = list(dict.fromkeys(_column(_where(frame, where or {}), column).tolist()))
    if len(cells) != 1 or cells[0] is None or is_missing(cells[0]):
        raise ValueError(
            f"value of {column!r} where {dict(where or {})} must be one cell, but got {len(cells)} "
            f"different ones, {cells[:3]}. Say which, or choose another."
        )
    return cells[0]


def _where(frame: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    for name, values in wanted.items():
        accepted = values if isinstance(values, list) else [values]
        frame = frame[_column(frame, name).isin(accepted)]
    return frame


def _column(frame: pd.DataFrame, name: str) -> pd.Series[Any]:
    column: pd.Series[Any] = _one_of("column", frame, name)
    return column


def _one_of(what: str, known: Any, name: Any, remedy: str = "Correct it.") -> Any:
    if name not in known:
        raise ValueError(
            f"{what} must be one of {', '.join(map(str, known))}, but got {name!r}. {remedy}"
        )
    return known[name]
