"""The links of the repository's pages lead somewhere."""

from pathlib import Path

import pytest
from markdown_it import MarkdownIt

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "examples/*.md",
        "packages/*/*.md",
        "packages/*/docs/*.md",
    )
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    missing = [
        target
        for target in links(page)
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not missing, missing


def links(page: Path) -> list[str]:
    """Targets of a page's links and pictures, without the part behind "#"; code has none."""
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        for child in token.children or []:
            target = str(child.attrGet("href") or child.attrGet("src") or "").partition("#")[0]
            found += [target] if target else []
    return found
