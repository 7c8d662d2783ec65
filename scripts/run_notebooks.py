"""Runs the notebooks from top to bottom on a CPU, and stores them with what they show.

    uv run --group docs python -m scripts.run_notebooks            # writes examples/notebooks/

It fails where a notebook leaves a file behind. A stored notebook holds the hash of the code that
made its outputs: tests/test_notebooks.py finds code that has changed since, and outputs of other
kinds than those of a run.
"""

import argparse
import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from jupyter_client.manager import AsyncKernelManager

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"


def execute(path: Path) -> Any:
    """A notebook with the outputs of a run in an empty folder.

    Raises:
        RuntimeError: it left files there, where temporary files go, too.
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    temporary = tempfile.TemporaryDirectory
    with temporary(prefix="notebook-") as work, temporary(prefix="jupyter-") as jupyter:
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": "",
            "HOME": jupyter,  # settings and caches of IPython, Matplotlib and Triton
            "OMP_NUM_THREADS": "1",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "TMPDIR": work,
            "TORCHINDUCTOR_CACHE_DIR": f"{jupyter}/inductor",
            "TRITON_INTERPRET": "0",
        }
        # Files instead of ports connect this process and the kernel.
        address, file = f"{jupyter}/kernel", f"{jupyter}/kernel.json"
        manager = AsyncKernelManager(transport="ipc", ip=address, connection_file=file)
        where = {"metadata": {"path": work}}
        limits = {"timeout": 200, "startup_timeout": 200, "record_timing": False}
        client = nbclient.NotebookClient(notebook, km=manager, resources=where, **limits)
        client.execute(env=environment)
        if left := [file.name for file in sorted(Path(work).rglob("*"))]:
            raise RuntimeError(f"{path.name} leaves {', '.join(left[:5])} behind.")
    code = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    notebook.metadata["outputs_of"] = hashlib.sha256(code.encode()).hexdigest()[:16]
    notebook.metadata["language_info"] = {"name": "python"}  # no version of this machine
    return notebook


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m scripts.run_notebooks")
    parser.add_argument("notebooks", nargs="*", type=Path, help="these; all, if none is named")
    parser.add_argument("--output", type=Path, help="a folder; by default where they stand")
    given = parser.parse_args()
    for path in given.notebooks or sorted(FOLDER.glob("*.ipynb")):
        target = (given.output or path.parent) / path.name
        try:
            nbformat.write(execute(path), target)
        except RuntimeError as error:
            sys.exit(str(error))
        print(target)
