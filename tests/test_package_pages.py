"""Package pages stand on a package index: they render there, and no link of theirs is relative."""

import io
import re
import tomllib
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from scripts import run_readme

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
REPOSITORY = tomllib.loads((PACKAGES[0] / "pyproject.toml").read_text())["project"]["urls"][
    "Source"
]
RAW = REPOSITORY.replace("//github.com/", "//raw.githubusercontent.com/")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name),
]


def links(page: Path) -> list[str]:
    """Targets of a page's links and pictures, those of HTML tags included."""
    found = re.findall(r"(?:src|href)=\"([^\"]+)\"", page.read_text())
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        for child in token.children or []:
            target = child.attrGet("href") or child.attrGet("src")
            if target is not None:
                found.append(str(target))
    return found


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_links_are_absolute_and_lead_somewhere(package: Path, name: str) -> None:
    for target in links(package / name):
        if target.startswith("#"):
            continue
        assert target.startswith("https://"), target
        assert "github" not in target or target.startswith((REPOSITORY, RAW)), target
        match = re.match(rf"(?:{REPOSITORY}/(?:blob|tree)|{RAW})/main/([^#]+)", target)
        assert match is None or (ROOT / match[1]).exists(), target


def test_page_renders_as_on_an_index(package: Path) -> None:
    warnings = io.StringIO()
    renderer = pytest.importorskip("readme_renderer.markdown")
    page = renderer.render((package / "README.md").read_text(), stream=warnings)
    assert page is not None, warnings.getvalue()
    assert page.count("<pre") == len(run_readme.blocks(package / "README.md"))


def test_the_first_page_is_short(package: Path) -> None:
    """A README leads to longer pages: 1,200 words, with tables and code, without the recipes."""
    shown = re.sub(r"<!--.*?-->", "", (package / "README.md").read_text(), flags=re.DOTALL)
    assert len(shown.split()) <= 1200


def test_the_log_is_short(package: Path) -> None:
    """Decisions only: idea, prediction, measurement, verdict, in at most 1,500 words."""
    log = package / "LOG.md"
    assert not log.exists() or len(log.read_text().split()) <= 1500


def test_addresses(package: Path) -> None:
    """Homepage, source, changelog and issues of every package, all in the one repository."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["urls"] == {
        "Homepage": f"{REPOSITORY}/tree/main/packages/{package.name}",
        "Source": REPOSITORY,
        "Changelog": f"{REPOSITORY}/blob/main/packages/{package.name}/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }


def test_python_versions(package: Path) -> None:
    """The classifiers are the versions that the workflow tests."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    stated = {c.rpartition(" ")[2] for c in project["classifiers"] if "Python :: 3." in c}
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert stated == set(re.findall(r"\"(3\.\d+)\"", workflow))


def test_changelog_has_a_dated_entry_for_every_version(package: Path) -> None:
    """The newest on top: the version of the package, which alone may be unreleased."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    lines = (package / "CHANGELOG.md").read_text().splitlines()
    entries = [
        re.fullmatch(r"## (\d+\.\d+\.\d+) \((unreleased|\d{4}-\d\d-\d\d)\)", line)
        for line in lines
        if line.startswith("## ")
    ]
    assert entries
    assert None not in entries
    versions = [[int(part) for part in entry[1].split(".")] for entry in entries]
    assert versions == sorted(versions, reverse=True)
    assert entries[0][1] == project["version"]
    assert "unreleased" not in [entry[2] for entry in entries[1:]]


def test_page_has_its_badges(package: Path) -> None:
    targets = links(package / "README.md")
    assert f"{REPOSITORY}/actions/workflows/ci.yml/badge.svg" in targets
    assert (ROOT / ".github" / "workflows" / "ci.yml").exists()
    [name] = [target for target in targets if "badge/package-" in target]
    assert name.split("/badge/package-")[1].replace("--", "_") == (
        f"{package.name.replace('-', '_')}-blue"
    )
