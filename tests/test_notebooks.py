"""The notebooks run on a CPU, leave no file behind, and are stored with what they show."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
of_each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def kinds(path: Path) -> list[list[tuple[str, ...]]]:
    """Kinds of each cell's outputs: a stream, or what a result can be shown as."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [
        [(each["output_type"], *sorted(each.get("data", {}))) for each in cell.get("outputs", [])]
        for cell in cells
    ]


@pytest.mark.nightly
@of_each_notebook
def test_runs_and_shows_what_is_stored(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs the dependency group docs")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.run_notebooks", "--output", str(tmp_path), str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert kinds(tmp_path / path.name) == kinds(path), "run python -m scripts.run_notebooks"


@of_each_notebook
def test_holds_the_outputs_of_its_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sources = "\n\n".join("".join(cell["source"]) for cell in code)
    ran = hashlib.sha256(sources.encode()).hexdigest()[:16]
    assert notebook["metadata"]["outputs_of"] == ran, "run python -m scripts.run_notebooks"
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {"stream", "display_data"} <= {output["output_type"] for output in outputs}
    assert not re.search(r"/(tmp|home|root|work)/", text), "a path of one machine"
    assert len(text) <= 120_000


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3
