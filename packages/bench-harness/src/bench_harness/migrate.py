"""``bench-harness migrate``: what a program changes to use the packages of this repository.

The program is read, never run: libcst resolves what each name was imported as, and the rules say
what to write instead. Every package keeps its own rules as data in its module ``migration``, a
tuple ``RULES`` of dictionaries:

- ``names``: qualified names of what is replaced, such as a class of torch;
- ``instead``: what to use;
- ``at_import``: whether the line to change is the import alone, because calls stay (optional);
- ``positional``: names of its positional arguments, in order;
- ``arguments``: what to write for each argument that is not simply kept;
- ``nothing``: for some arguments, the value that asks for nothing (optional);
- ``methods``: methods of its objects, which are recognised by their names alone;
- ``also``: further qualified names, which matter only in a program that uses one of ``names``;
- ``texts``: beginnings of strings, which matter in such a program only;
- ``page``: where the change is explained.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import (
    MetadataWrapper,
    PositionProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
)

MODULES = (
    "bench_harness.migrate_ddp",
    "shard_optim.migration",
    "flashattn_triton.migration",
)
PAGES = "https://github.com/training-systems/training-systems/blob/main/"

Rule = Mapping[str, Any]


@dataclass(frozen=True, order=True)
class Change:
    """What to change in one place of a program; ``line`` and ``column`` count from 1."""

    line: int
    column: int
    what: str
    advice: str
    page: str


def rules() -> list[Rule]:
    """The rules of all packages."""
    return [rule for module in MODULES for rule in importlib.import_module(module).RULES]


def changes(source: str, known: Sequence[Rule]) -> list[Change]:
    """What to change in a program, from its first line to its last.

    Args:
        source: the program's text.
        known: the rules to apply.

    Raises:
        ValueError: the text is not Python.
    """
    try:
        program = MetadataWrapper(cst.parse_module(source))
    except cst.ParserSyntaxError as error:
        raise ValueError(
            f"the file must be Python, but got something else in line {error.raw_line}. Correct it."
        ) from None
    reader = _Reader()
    program.visit(reader)
    found: set[Change] = set()
    for rule in known:
        if any(name in rule["names"] for _, name, _ in reader.uses):
            found |= set(_apply(rule, reader))
    return sorted(found)


def read(path: Path) -> list[Change]:
    """:func:`changes` of a file, by the rules of all packages.

    Raises:
        ValueError: the file cannot be read, or is not Python.
    """
    try:
        return changes(path.read_text(encoding="utf-8"), rules())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"FILE must be a Python file, but got {path}: {error}") from None


_Place = tuple[int, int]


class _Reader(cst.CSTVisitor):
    """Collects what rules look at: uses of imported names, method calls and strings."""

    METADATA_DEPENDENCIES = (PositionProvider, QualifiedNameProvider)

    def __init__(self) -> None:
        super().__init__()
        self.imports: list[tuple[_Place, str]] = []
        # A name's place and qualified name, and the call if it is called.
        self.uses: list[tuple[_Place, str, cst.Call | None]] = []
        self.methods: list[tuple[_Place, str]] = []
        self.texts: list[tuple[_Place, str]] = []
        self.arguments: dict[cst.Arg, _Place] = {}
        self._functions: dict[cst.CSTNode, cst.Call] = {}

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        self._functions[node.func] = node
        self.arguments |= {argument: self._place(argument) for argument in node.args}
        if isinstance(node.func, cst.Attribute):
            self.methods.append((self._place(node.func.attr), node.func.attr.value))

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: N802
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: N802
        if not isinstance(node.names, cst.ImportStar) and node.module is not None:
            module = get_full_name_for_node(node.module)
            for alias in node.names:
                name = f"{module}.{get_full_name_for_node(alias.name)}"
                self.imports.append((self._place(alias), name))
        return False

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802
        self._use(node)

    def visit_Attribute(self, node: cst.Attribute) -> None:  # noqa: N802
        self._use(node)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:  # noqa: N802
        text = node.evaluated_value
        if isinstance(text, str):
            self.texts.append((self._place(node), text))

    def _use(self, node: cst.Name | cst.Attribute) -> None:
        for found in self.get_metadata(QualifiedNameProvider, node, set()):
            if found.source is QualifiedNameSource.IMPORT:
                self.uses.append((self._place(node), found.name, self._functions.get(node)))

    def _place(self, node: cst.CSTNode) -> _Place:
        start = self.get_metadata(PositionProvider, node).start
        return start.line, start.column + 1


def _apply(rule: Rule, reader: _Reader) -> list[Change]:
    page = PAGES + rule["page"]
    found = []
    imported = {name for _, name in reader.imports} if rule.get("at_import") else set()
    for position, name in reader.imports:
        if name in imported and name in rule["names"]:
            found.append(Change(*position, name, rule["instead"], page))
    for position, name, call in reader.uses:
        short = name.rpartition(".")[2]
        if name in rule["names"]:
            if name not in imported:
                found.append(Change(*position, short, rule["instead"], page))
            if call is not None:
                found += _arguments(rule, reader, short, call)
        elif name in rule["also"]:
            found.append(Change(*position, short, rule["also"][name], page))
    for position, method in reader.methods:
        if method in rule["methods"]:
            found.append(Change(*position, f".{method}()", rule["methods"][method], page))
    for position, text in reader.texts:
        for beginning, advice in rule["texts"].items():
            if text.startswith(beginning):
                found.append(Change(*position, repr(text), advice, page))
    return found


def _arguments(rule: Rule, reader: _Reader, short: str, call: cst.Call) -> list[Change]:
    found = []
    for index, argument in enumerate(call.args):
        if argument.keyword is not None:
            name = argument.keyword.value
        elif not argument.star and index < len(rule["positional"]):
            name = rule["positional"][index]
        else:
            continue
        advice = rule["arguments"].get(name)
        if advice is None or _asks_for_nothing(rule, name, argument.value):
            continue
        position = reader.arguments[argument]
        found.append(Change(*position, f"{short}({name}=...)", advice, PAGES + rule["page"]))
    return found


def _asks_for_nothing(rule: Rule, name: str, value: cst.BaseExpression) -> bool:
    """Whether an argument is a literal that asks for nothing, such as ``dropout_p=0.0``."""
    if name not in rule.get("nothing", {}):
        return False
    try:
        literal = ast.literal_eval(cst.Module([]).code_for_node(value))
    except ValueError:
        return False
    return bool(literal == rule["nothing"][name])
