"""The links of the repository's pages lead somewhere."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/*/*.md",
        "examples/*.md",
        "packages/*/*.md",
        "packages/*/docs/*.md",
    )
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing, missing
