"""Pages of the packages: short, linked, and the same wherever they are read."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
REPOSITORY = tomllib.loads((PACKAGES[0] / "pyproject.toml").read_text())["project"]["urls"][
    "Source"
]
RAW = REPOSITORY.replace("//github.com/", "//raw.githubusercontent.com/")

of_each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)


def words(page: Path) -> int:
    """Words of a page, tables and code included, without its comments."""
    return len(re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL).split())


def test_the_first_page_takes_four_minutes() -> None:
    assert words(ROOT / "README.md") <= 700


@of_each_package
def test_the_first_page_of_a_package_is_short(package: Path) -> None:
    """A README leads to longer pages."""
    assert words(package / "README.md") <= 900


@of_each_package
@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_links_are_relative(package: Path, name: str) -> None:
    """A clone, a fork and the site read them; tests/test_wheels.py reads those of the wheel."""
    page = (package / name).read_text()
    found = re.findall(r"(?:src|href)=\"([^\"]+)\"", page)
    for token in MarkdownIt("commonmark").enable("table").parse(page):
        for child in token.children or []:
            found += [str(t) for t in (child.attrGet("href"), child.attrGet("src")) if t]
    for target in found:
        assert not target.startswith((REPOSITORY, RAW)), target
        path = target.partition("#")[0]
        assert "://" in target or not path or (package / path).exists(), target


@of_each_package
def test_the_package_knows_its_version(package: Path) -> None:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    module = importlib.import_module(package.name.replace("-", "_"))
    assert module.__version__ == project["version"]


@of_each_package
def test_the_log_is_short(package: Path) -> None:
    """Decisions only: idea, prediction, measurement, verdict, in at most 1,500 words."""
    log = package / "LOG.md"
    assert not log.exists() or len(log.read_text().split()) <= 1500


@of_each_package
def test_addresses(package: Path) -> None:
    """Homepage, source, changelog and issues of every package, all in the one repository."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["urls"] == {
        "Homepage": f"{REPOSITORY}/tree/main/packages/{package.name}",
        "Source": REPOSITORY,
        "Changelog": f"{REPOSITORY}/blob/main/packages/{package.name}/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    }


@of_each_package
def test_python_versions(package: Path) -> None:
    """The classifiers are the versions that the workflow tests."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    stated = {c.rpartition(" ")[2] for c in project["classifiers"] if "Python :: 3." in c}
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert stated == set(re.findall(r"\"(3\.\d+)\"", workflow))


@of_each_package
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
