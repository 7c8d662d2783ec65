"""Runs the notebooks from top to bottom on a CPU, and stores them with what they show.

    uv run --group docs python -m scripts.run_notebooks            # writes examples/notebooks/
    uv run --group docs python -m scripts.run_notebooks --check    # writes nothing

``--check`` fails where a cell of a stored notebook has outputs of other kinds than it has when it
runs. Both fail where a notebook leaves a file behind. A stored notebook holds the hash of the code
that made its outputs: tests/test_notebooks.py finds code that has changed since.
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


class NotebookError(RuntimeError):
    """A notebook shows or leaves something that it should not; the text says which."""


def execute(path: Path) -> Any:
    """A notebook with the outputs of a run in an empty folder.

    Raises:
        NotebookError: it left files there, or in the folder of temporary files.
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="notebook-") as name:
        folder = Path(name)
        for each in ("work", "temporary", "jupyter"):
            (folder / each).mkdir()
        kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment = kept | {
            "CUDA_VISIBLE_DEVICES": "",
            "IPYTHONDIR": str(folder / "jupyter"),
            "MPLCONFIGDIR": str(folder / "jupyter"),
            "OMP_NUM_THREADS": "1",
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "TMPDIR": str(folder / "temporary"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "jupyter" / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "jupyter" / "triton"),
        }
        # Files instead of ports connect this process and the kernel.
        manager = AsyncKernelManager(
            transport="ipc",
            ip=str(folder / "jupyter" / "kernel"),
            connection_file=str(folder / "jupyter" / "kernel.json"),
        )
        client = nbclient.NotebookClient(
            notebook,
            km=manager,
            timeout=200,
            startup_timeout=200,
            resources={"metadata": {"path": str(folder / "work")}},
            record_timing=False,
        )
        client.execute(env=environment)
        left = [
            str(file.relative_to(folder))
            for each in ("work", "temporary")
            for file in sorted((folder / each).rglob("*"))
        ]
        if left:
            raise NotebookError(f"{path.name} leaves {', '.join(left[:5])} behind.")
    notebook.metadata["outputs_of"] = _code_hash(notebook)
    notebook.metadata["language_info"] = {"name": "python"}  # no version of this machine
    return notebook


def kinds(notebook: Any) -> list[list[tuple[str, ...]]]:
    """Kinds of each cell's outputs: a stream, or what a result can be shown as."""
    return [
        [
            (output.output_type, *sorted(output.get("data", {})))
            for output in cell.get("outputs", [])
        ]
        for cell in notebook.cells
    ]


def _code_hash(notebook: Any) -> str:
    code = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.run_notebooks")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if one is outdated")
    parser.add_argument("notebooks", nargs="*", type=Path, help="these; all, if none is named")
    given = parser.parse_args(arguments)
    for path in given.notebooks or sorted(FOLDER.glob("*.ipynb")):
        made = execute(path)
        if not given.check:
            nbformat.write(made, path)
            print(path)
            continue
        if kinds(nbformat.read(path, as_version=4)) != kinds(made):
            raise NotebookError(
                f"{path.name} shows something else than is stored. Run "
                "python -m scripts.run_notebooks."
            )


if __name__ == "__main__":
    try:
        main()
    except NotebookError as error:
        sys.exit(str(error))
