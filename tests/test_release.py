"""A tag can release only the version that its package states."""

from pathlib import Path

import pytest
from scripts.check_release import check


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "ddp-lite"
    folder.mkdir()
    (folder / "pyproject.toml").write_text('[project]\nname = "ddp-lite"\nversion = "1.2.3"\n')
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 (2026-01-31)\n")
    return tmp_path


def test_matching_tag_names_the_package(packages: Path) -> None:
    assert check("ddp-lite-v1.2.3", packages) == "ddp-lite"


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("v1.2.3", "NAME-vX.Y.Z"),
        ("ddp-v1.2.3", "no package 'ddp'; the packages are ddp-lite"),
        ("ddp-lite-v1.2.4", r"does not match ddp-lite 1\.2\.3"),
    ],
)
def test_wrong_tag_is_refused(packages: Path, tag: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(tag, packages)


def test_undated_changelog_is_refused(packages: Path) -> None:
    (packages / "ddp-lite" / "CHANGELOG.md").write_text("## 1.2.3 (unreleased)\n")
    with pytest.raises(ValueError, match="no dated section"):
        check("ddp-lite-v1.2.3", packages)
