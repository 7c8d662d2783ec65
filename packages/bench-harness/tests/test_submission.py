"""The assignment's package: a zip of the code with the report of a real test run."""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("body", "code"), [("pass", 0), ("assert False", 1)])
def test_code_and_report_are_zipped_whatever_the_tests_say(
    tmp_path: Path, body: str, code: int
) -> None:
    (tmp_path / "test_one.py").write_text(f"def test_one():\n    {body}\n")
    done = subprocess.run(
        [
            *("bash", str(ROOT / "scripts" / "make_submission.sh")),
            *("--output", str(tmp_path / "out"), "-p", "no:cacheprovider"),
            str(tmp_path / "test_one.py"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    report = ET.parse(tmp_path / "out" / "test_results.xml").getroot()
    (suite,) = report.iter("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("1", str(code))
    with zipfile.ZipFile(tmp_path / "out" / "submission.zip") as archive:
        names = set(archive.namelist())
        assert archive.testzip() is None
    wanted = {"pyproject.toml", "tests/adapters.py", "test_results.xml", "README.md"}
    assert wanted <= names
    assert "packages/ddp-lite/src/ddp_lite/naive.py" in names
    for name in names:
        assert not {".git", ".venv", "__pycache__", "dist"} & set(Path(name).parts), name
        assert Path(name).suffix not in {".png", ".pickle", ".whl"}, name


def test_without_a_report_there_is_no_submission(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *("bash", str(ROOT / "scripts" / "make_submission.sh")),
            *("--output", str(tmp_path / "out"), "--no-such-option-of-pytest"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "there is no submission" in done.stderr
    assert not (tmp_path / "out" / "submission.zip").exists()
