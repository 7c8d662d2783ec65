"""Finds the tests that start processes, which are those that a busy machine can upset."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

#: What starts ranks, programs, or the processes of the command line's cases.
STARTERS = frozenset(
    {
        *("run_ranks", "run_case", "inject", "Popen", "get_context", "Examples"),
        *("cli", "process", "runner"),
    }
)
_TESTS = (Path(__file__).resolve().parents[2], "tests")


def starts_processes(item: pytest.Function) -> bool:
    """Whether a test, or one of its fixtures, or a function of the tests that these use, names one.

    Only names are looked at, so a test may be found that never gets as far as its process.
    """
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    left: list[Any] = [item.function, *(each[-1].func for each in fixtures)]
    seen: set[Callable[..., Any]] = set()
    while left:
        function = left.pop()
        if not inspect.isfunction(function) or function in seen:
            continue
        seen.add(function)
        starts, used = _look(function)
        if starts:
            return True
        left += used
    return False


@functools.cache  # most items share their fixtures, and often their test
def _look(function: Callable[..., Any]) -> tuple[bool, list[Any]]:
    """Whether a function of the tests names a starter, and what it names of its module."""
    if not _is_of_tests(function):
        return False, []
    names, module = set(_names(function.__code__)), function.__globals__
    return bool(names & STARTERS), [module[name] for name in names & module.keys()]


def _is_of_tests(function: Callable[..., Any]) -> bool:
    root, folder = _TESTS
    path = Path(inspect.getfile(function))
    return path.is_relative_to(root) and folder in path.relative_to(root).parts


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names(constant)
