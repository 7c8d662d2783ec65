"""The design that a reader is promised, as ``tools/walk.py`` counts it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PACKAGE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def walk() -> ModuleType:
    spec = importlib.util.spec_from_file_location("walk", PACKAGE / "tools/walk.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_circle_of_imports_and_a_short_way(walk: ModuleType) -> None:
    found = walk.counts(PACKAGE / "src")
    assert found["import circles, local and typing imports included"] == "0"
    assert found["files of `peer/` among them"] == 0, "only a wrapper that copies loads them"
    assert found["the same, changes of file"] <= 5
    assert found["lines of these"] <= 1300


def test_every_wrapper_walks_the_same_way(walk: ModuleType) -> None:
    ways = walk.traces(PACKAGE / "src")
    assert tuple(ways) == walk.WRAPPERS
    for wrapper, way in ways.items():
        files = {file for file, _ in way}
        assert files - walk.SIDE_TASKS == {"engine.py", "reduce.py"}, wrapper


def test_circles_are_found(walk: ModuleType) -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert walk.circles(graph) == [["b", "c"]]
