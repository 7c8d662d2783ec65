"""A tag can release only the version that its package states."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "check_release.sh"


def check(tag: str, packages: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", SCRIPT, tag, packages], capture_output=True, text=True)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "ddp-lite"
    folder.mkdir()
    (folder / "pyproject.toml").write_text('[project]\nname = "ddp-lite"\nversion = "1.2.3"\n')
    (folder / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 (2026-01-31)\n")
    return tmp_path


def test_matching_tag_names_the_package(packages: Path) -> None:
    done = check("ddp-lite-v1.2.3", packages)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ddp-lite\n", "")


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("v1.2.3", "NAME-vX.Y.Z"),
        ("ddp-v1.2.3", "no package 'ddp'; the packages are ddp-lite"),
        ("ddp-lite-v1.2.4", 'does not match ddp-lite: its pyproject.toml has version = "1.2.3"'),
        ("ddp-lite-v1x2.3", "NAME-vX.Y.Z"),
    ],
)
def test_wrong_tag_is_refused(packages: Path, tag: str, message: str) -> None:
    done = check(tag, packages)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr


@pytest.mark.parametrize("dated", ["1.2.3 (unreleased)", "1.2.31 (2026-01-31)"])
def test_undated_changelog_is_refused(packages: Path, dated: str) -> None:
    (packages / "ddp-lite" / "CHANGELOG.md").write_text(f"## {dated}\n")
    done = check("ddp-lite-v1.2.3", packages)
    assert done.returncode == 1
    assert "no dated section" in done.stderr
