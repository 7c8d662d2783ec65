"""Prints which share of the kernels' files is parameter lists.

    python tools/count_parameters.py [FOLDER]

FOLDER is the package's source, or another commit's. Of every file with a ``triton.jit`` or
``gluon.jit`` function it counts all lines, the lines of parameter lists that have lines of their
own, and the lines of argument lists within kernels that have lines of their own.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src/flashattn_triton"


def counts(path: Path) -> tuple[int, int, int] | None:
    """Lines, lines of parameters, lines of arguments; None for a file without kernels."""
    text = path.read_text(encoding="utf-8")
    functions = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef)]
    kernels = [f for f in functions if any("jit" in ast.unparse(x) for x in f.decorator_list)]
    if not kernels:
        return None
    parameters: set[int] = set()
    for function in functions:
        names = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        for name in names:
            parameters |= {*range(name.lineno, (name.end_lineno or 0) + 1)} - {function.lineno}
    arguments: set[int] = set()
    for kernel in kernels:
        for call in (x for x in ast.walk(kernel) if isinstance(x, ast.Call) and x.args):
            arguments |= {*range(call.lineno + 1, call.end_lineno or 0)}
    return len(text.splitlines()), len(parameters), len(arguments)


def main(arguments: Sequence[str]) -> None:
    """Prints a row for each file, and the shares of all."""
    folder = Path(arguments[0]) if arguments else SOURCE
    rows = [(path, found) for path in sorted(folder.rglob("*.py")) if (found := counts(path))]
    for path, (lines, parameters, passed) in rows:
        print(f"{lines:6} {parameters:5} {passed:5}  {path.relative_to(folder)}")
    lines, parameters, passed = (sum(column) for column in zip(*(x for _, x in rows), strict=True))
    print(
        f"{lines:6} {parameters:5} {passed:5}  all: {parameters / lines:.1%} are parameters, "
        f"{(parameters + passed) / lines:.1%} parameters or arguments"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
