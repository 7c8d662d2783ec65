"""The assignment's package: a zip of the code with the report of a real test run."""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_submission.sh"
Submission: TypeAlias = tuple[Path, subprocess.Popen[str]]


@pytest.fixture(scope="module")
def submissions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Submission]]:
    """Three runs of the script, side by side, because each imports torch: folder and process."""
    started = {}
    with ExitStack() as stack:
        for kind, body in (("passes", "pass"), ("fails", "assert False"), ("does not run", None)):
            folder = tmp_path_factory.mktemp("submission")
            arguments = ["--no-such-option-of-pytest"]
            if body is not None:
                (folder / "test_one.py").write_text(f"def test_one():\n    {body}\n")
                arguments = ["-p", "no:cacheprovider", str(folder / "test_one.py")]
            process = subprocess.Popen(
                ["bash", SCRIPT, "--output", folder / "out", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            started[kind] = folder / "out", stack.enter_context(process)
        yield started


@pytest.mark.parametrize(("kind", "code"), [("passes", 0), ("fails", 1)])
def test_code_and_report_are_zipped_whatever_the_tests_say(
    submissions: dict[str, Submission], kind: str, code: int
) -> None:
    folder, process = submissions[kind]
    output, errors = process.communicate(timeout=120)
    assert process.returncode == code, output + errors
    report = ET.parse(folder / "test_results.xml").getroot()
    (suite,) = report.iter("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("1", str(code))
    with zipfile.ZipFile(folder / "submission.zip") as archive:
        names = set(archive.namelist())
        assert archive.testzip() is None
    wanted = {"pyproject.toml", "tests/adapters.py", "test_results.xml", "README.md"}
    assert wanted <= names
    assert "packages/ddp-lite/src/ddp_lite/naive.py" in names
    for name in names:
        assert not {".git", ".venv", "__pycache__", "dist"} & set(Path(name).parts), name
        assert Path(name).suffix not in {".png", ".pickle", ".whl"}, name


def test_without_a_report_there_is_no_submission(submissions: dict[str, Submission]) -> None:
    folder, process = submissions["does not run"]
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "there is no submission" in errors
    assert not (folder / "submission.zip").exists()
