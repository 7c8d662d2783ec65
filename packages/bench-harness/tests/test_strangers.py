"""A run folder of a stranger is data: nothing in it is followed, waited for or obeyed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench_harness import cli
from bench_harness.store import problem

Bench = Callable[..., subprocess.CompletedProcess[str]]

PRECIOUS = "precious"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a report."""
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        assert cli.main(["accounting", "--sizes", "small", "--output", "run"]) == 0
    return folder / "run"


@pytest.fixture
def run(measured: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil, in the folder from which it starts commands."""
    return shutil.copytree(measured, tmp_path / "run")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder with a file, outside the run."""
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "elsewhere" / "victim"
    file.write_text(PRECIOUS)
    return file


@pytest.mark.parametrize("name", ["report.html.partial", "report.html"])
def test_a_link_in_place_of_a_page_is_replaced(
    bench: Bench, run: Path, victim: Path, name: str
) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim)
    assert bench("report", "run").returncode == 0
    assert victim.read_text() == PRECIOUS
    assert not (run / "report.html").is_symlink()
    assert "<html" in (run / "report.html").read_text()


def test_a_link_in_place_of_a_table_is_replaced(bench: Bench, run: Path, victim: Path) -> None:
    table = next((run / "tables").glob("*.csv"))
    table.with_name(table.name + ".partial").symlink_to(victim)
    assert bench("report", "run").returncode == 0
    assert victim.read_text() == PRECIOUS


@pytest.mark.parametrize("name", ["tables", "figures", "artifacts"])
def test_a_folder_that_leads_elsewhere_is_refused(
    bench: Bench, run: Path, victim: Path, name: str
) -> None:
    if (run / name).exists():
        (run / name).rename(run / "moved")
    (run / name).symlink_to(victim.parent)
    done = bench("report", "run")
    assert done.returncode == 2
    assert f"{name} must be a folder, but got a link. Remove it." in done.stderr
    assert [file.name for file in victim.parent.iterdir()] == ["victim"]


@pytest.mark.parametrize("name", ["run.json", "env.json"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.timeout(60)
def test_nothing_is_waited_for(bench: Bench, run: Path, name: str, kind: str) -> None:
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    done = bench("report", "run")
    assert done.returncode == 2
    assert f"{name} must be a regular file, but got something else. Remove it." in done.stderr


def test_a_pipe_in_place_of_an_unfinished_page_is_replaced(bench: Bench, run: Path) -> None:
    os.mkfifo(run / "report.html.partial")
    assert bench("report", "run").returncode == 0


def test_rows_are_not_appended_through_a_link(bench: Bench, run: Path, victim: Path) -> None:
    (run / "results.jsonl").unlink()
    (run / "results.jsonl").symlink_to(victim)
    done = bench("accounting", "--sizes", "small", "--output", "run")
    assert done.returncode == 2
    assert "results.jsonl must be a regular file" in done.stderr
    assert victim.read_text() == PRECIOUS


@pytest.mark.parametrize(
    "text", [r"half \ud800 pair", "control \\u001b[31m", r"twice \uDFFF\uDFFF"]
)
def test_one_bad_character_does_not_lose_the_report(bench: Bench, run: Path, text: str) -> None:
    lines = (run / "results.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    changed = json.dumps({**first, "label": "LABEL"}).replace("LABEL", text)
    (run / "results.jsonl").write_text("\n".join([changed, *lines[1:]]) + "\n")
    command = (run / "run.json").read_text().replace("bench-harness accounting", text)
    (run / "run.json").write_text(command)
    done = bench("report", "run")
    assert done.returncode == 0, done.stderr
    page = (run / "report.html").read_text()
    assert text.partition(" ")[0] in page
    assert "\x1b" not in page


@pytest.mark.parametrize(
    "row",
    [
        {"peak_bytes": 5},
        {"peak_bytes": "much", "phase": "x", "kind": "phase"},
        {"kind": "kernel", "total_ms": 1.0},
        {"experiment": "model", "samples_ms": [1.0], "tokens": "many"},
    ],
    ids=str,
)
def test_a_row_of_another_shape_takes_the_headlines_of_no_other_along(
    bench: Bench, run: Path, row: dict[str, object]
) -> None:
    lines = (run / "results.jsonl").read_text().splitlines()
    added = {**json.loads(lines[0]), "case_rows": 1, "case_key": "of-another", **row}
    (run / "results.jsonl").write_text("\n".join([*lines, json.dumps(added)]) + "\n")
    done = bench("report", "run")
    assert done.returncode == 0, done.stderr
    assert "Error" in done.stdout
    assert "<html" in (run / "report.html").read_text()


def test_a_folder_whose_name_is_no_text_has_a_report(
    command_line: tuple[list[str], dict[str, str]], run: Path
) -> None:
    named = run.rename(os.fsdecode(os.fsencode(run) + b"\xe9"))
    command, environment = command_line
    done = subprocess.run([*command, "report", named], env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "run?" in (named / "report.html").read_text()


@pytest.mark.parametrize("sample", [0.0, -1.0])
def test_a_time_that_no_clock_measures_is_damage(run: Path, sample: float) -> None:
    row = json.loads((run / "results.jsonl").read_text().splitlines()[0])
    assert problem(row | {"samples_ms": [2.0, 1.0]}) is None
    assert problem(row | {"samples_ms": [2.0, sample]}) == f"its samples_ms is [2.0, {sample}]"


def test_a_whole_pair_stays(bench: Bench, run: Path) -> None:
    text = (run / "run.json").read_text().replace("bench-harness accounting", r"\ud83d\ude80 go")
    (run / "run.json").write_text(text)
    assert bench("report", "run").returncode == 0
    assert "🚀 go" in (run / "report.html").read_text()
