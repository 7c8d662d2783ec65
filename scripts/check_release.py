"""Checks a release tag against the package it names, and prints the package's name.

    python scripts/check_release.py ddp-lite-v0.1.0

The tag must be NAME-vX.Y.Z, packages/NAME must hold exactly that version, and its changelog must
have a dated section for it. Exits with status 1 and one line that says what to change otherwise.
"""

import re
import sys
import tomllib
from pathlib import Path

PACKAGES = Path(__file__).resolve().parent.parent / "packages"


def check(tag: str, packages: Path = PACKAGES) -> str:
    """The package that ``tag`` releases.

    Raises:
        ValueError: the tag's form, package, version or changelog is wrong.
    """
    match = re.fullmatch(r"(?P<name>[a-z][a-z0-9-]*)-v(?P<version>\d+\.\d+\.\d+\S*)", tag)
    if match is None:
        raise ValueError(f"a release tag is NAME-vX.Y.Z, got {tag!r}")
    name, version = match["name"], match["version"]
    known = sorted(path.parent.name for path in packages.glob("*/pyproject.toml"))
    if name not in known:
        raise ValueError(f"no package {name!r}; the packages are {', '.join(known)}")
    project = tomllib.loads((packages / name / "pyproject.toml").read_text())["project"]
    if project["version"] != version:
        raise ValueError(f"tag {tag} does not match {name} {project['version']} in its pyproject")
    changelog = (packages / name / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        raise ValueError(f"{name}/CHANGELOG.md has no dated section '## {version} (YYYY-MM-DD)'")
    return str(name)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: check_release.py NAME-vX.Y.Z")
    try:
        print(check(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))
