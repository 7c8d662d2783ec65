"""The README shows what the committed rows say, and its links lead somewhere."""

import re
from pathlib import Path

import pytest
from scripts.readme_results import README, rendered

pytestmark = pytest.mark.nightly

ROOT = README.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/results/*.md", "examples/*.md", "packages/*/*.md")
    for path in ROOT.glob(pattern)
)


def test_results_are_those_of_the_rows() -> None:
    assert README.read_text() == rendered(README.read_text()), "run scripts/readme_results.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing, missing
