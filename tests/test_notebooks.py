"""The notebooks run from top to bottom on a CPU, and are stored without what they showed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
# Files instead of ports connect the notebook's process.
PROGRAM = """
import sys, nbclient, nbformat
from jupyter_client.manager import AsyncKernelManager

notebook = nbformat.read(sys.argv[1], as_version=4)
manager = AsyncKernelManager(transport="ipc", ip="kernel")
nbclient.NotebookClient(notebook, km=manager, timeout=200, startup_timeout=200).execute()
print(sum(len(cell.get("outputs", [])) for cell in notebook.cells))
"""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_on_a_cpu(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs the dependency group docs")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "OMP_NUM_THREADS": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split()[-1]) > 0, "it shows nothing"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_holds_no_output(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3
