"""The page of mistakes names tests that exist."""

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def test_every_mistake_has_a_test() -> None:
    source = "\n".join(file.read_text() for file in PACKAGE.glob("tests/test_*.py"))
    existing = set(re.findall(r"^def (test_\w+)", source, flags=re.MULTILINE))
    existing |= set(re.findall(r"\(.*, (check_\w+), \(", source))  # lines of CHECKS
    page = (PACKAGE / "docs" / "mistakes.md").read_text()
    named = re.findall(r"\| `((?:test|check)_\w+)` \|$", page, flags=re.MULTILINE)
    assert len(named) == page.partition("## ")[0].count("\n| ") - 1 >= 13
    assert set(named) <= existing


def test_the_table_of_faults_is_that_of_the_suite() -> None:
    source = (PACKAGE / "tests" / "test_fully_sharded_strays.py").read_text()
    page = (PACKAGE / "docs" / "mistakes.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \|.*\| 0 \| 0 \| 0 \|$", page, flags=re.MULTILINE)
    assert rows == re.findall(r'^    "([a-z ]+)": \(', source, flags=re.MULTILINE)
