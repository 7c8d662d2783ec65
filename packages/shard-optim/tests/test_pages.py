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
    assert len(named) == page.count("\n| ") - 1 >= 13
    assert set(named) <= existing
