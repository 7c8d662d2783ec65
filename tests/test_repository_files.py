"""The files that a repository's host reads: templates, citation, security."""

import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}


def test_citation() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "license", "repository-code"} <= set(citation)
    [source] = {project["urls"]["Source"] for project in PROJECTS.values()}
    assert citation["repository-code"] == source
    assert citation["license"] == "MIT"
    assert citation["version"] == max(project["version"] for project in PROJECTS.values())


@pytest.mark.parametrize("name", ["bug", "slower", "feature"])
def test_issue_templates(name: str) -> None:
    template = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert {"name", "description", "body"} <= set(template)
    identities = [field["id"] for field in template["body"]]
    assert len(identities) == len(set(identities))
    for field in template["body"]:
        assert field["type"] in ("textarea", "dropdown", "input")
        assert field["attributes"]["label"]


def test_bug_reports_name_a_package() -> None:
    template = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    [field] = [field for field in template["body"] if field["id"] == "package"]
    assert set(field["attributes"]["options"]) == {*PROJECTS, "documentation"}
