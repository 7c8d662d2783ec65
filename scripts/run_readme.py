"""Runs the code blocks of a Markdown page, in order, as a reader of the page would.

    python scripts/run_readme.py packages/ddp-lite/README.md --python ENVIRONMENT/bin/python

All blocks of a page run in one empty folder, with the programs of the given environment first on
the PATH. The words of a fence say what happens to its block; only the first one is displayed as the
language:

    ```python                     runs as a program of its own
    ```python ranks=2             runs under ``torchrun --nproc-per-node 2``
    ```python file=train.py       is saved under that name; a later block runs or imports it
    ```python gpu                 needs a GPU; without one, it is compiled and its imports run
    ```python gpu ranks=2         needs a GPU for each rank, and does the same with fewer
    ```python extra=NAME          needs the package's extra NAME; runs with ``--extra NAME`` only
    ```console                    runs as a shell script that stops at the first failure
    ```console dry-run            the same, with ``--dry-run`` added to each command
    ```console install            installs the package; whoever made the environment has done that
    ```toml file=mine.toml        is parsed, and saved if it has a name
    ```text                       is not code

A fence without a language, or with a word that is not in this list, is an error.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt

LANGUAGES = {
    "python": {"ranks", "file", "gpu", "extra"},
    "console": {"dry-run", "install"},
    "toml": {"file"},
    "text": set[str](),
}


class Block(NamedTuple):
    """One fenced block: where it starts, its language, the further words of its fence, its text."""

    page: Path
    line: int
    language: str
    words: dict[str, str]
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order.

    Raises:
        ValueError: a fence names no language, an unknown one, or an unknown word.
    """
    found = []
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        if token.type != "fence":
            continue
        assert token.map is not None
        language, *rest = token.info.split() or [""]
        words = dict(word.partition("=")[::2] for word in rest)
        line = token.map[0] + 1
        if language not in LANGUAGES or not set(words) <= LANGUAGES[language]:
            raise ValueError(
                f"the fence at {page}:{line} must be one of those that scripts/run_readme.py "
                f"lists, but got {token.info!r}"
            )
        found.append(Block(page, line, language, words, token.content))
    return found


def run(page: Path, python: Path, *, extra: str | None = None, timeout: float = 300.0) -> int:
    """Runs the blocks of a page in a new folder and returns how many there were to run.

    Args:
        python: the interpreter of the environment; programs beside it are found first.
        extra: runs the blocks that need this extra of the package, and no others.
        timeout: seconds for each block.

    Raises:
        ValueError: a fence that :func:`blocks` refuses, or TOML that does not parse.
        RuntimeError: a block failed; the message names its line and holds its output.
    """
    chosen = [block for block in blocks(page) if block.words.get("extra") == extra]
    with tempfile.TemporaryDirectory(prefix="readme-") as folder:
        for block in chosen:
            run_block(block, Path(folder), python, timeout=timeout)
    return len(chosen)


def run_block(block: Block, folder: Path, python: Path, *, timeout: float = 300.0) -> None:
    """Runs one block in the folder, or saves it there; see :func:`run`."""
    command = _prepare(block, folder, python)
    if not command:
        return
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "TRITON_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    environment["OMP_NUM_THREADS"] = "1"
    environment["PET_STANDALONE"] = "1"  # torchrun takes a free port, not always the same one
    done = subprocess.run(
        # It ends a block that hangs with everything that the block started.
        ["timeout", "--signal=KILL", f"{timeout:g}", *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        late = f" (killed: not within {timeout:g} s)" * (done.returncode in (-9, 137))
        raise RuntimeError(f"{block} ended with exit code {done.returncode}{late}\n{done.stdout}")


def _prepare(block: Block, folder: Path, python: Path) -> list[str]:
    """Writes what the block needs into the folder; returns the command, or [] if none is to run."""
    words, text = block.words, block.text
    if block.language == "toml":
        tomllib.loads(text)
    elif block.language == "python":
        ast.parse(text)
    elif block.language == "console" and "install" not in words:
        lines = text.splitlines()
        if "dry-run" in words:
            lines = [line.partition("  #")[0] + " --dry-run" for line in lines if line]
        return ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
    if "file" in words:
        (folder / words["file"]).parent.mkdir(parents=True, exist_ok=True)
        (folder / words["file"]).write_text(text)
    if "file" in words or block.language != "python":
        return []
    program, ranks = folder / f"block_of_line_{block.line}.py", words.get("ranks")
    lacking = "gpu" in words and _count_gpus(python) < int(ranks or 1)
    program.write_text(imports_of(text) if lacking else text)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", ranks] if ranks else []
    return [str(python), *launcher, program.name]


def imports_of(text: str) -> str:
    """The imports of a program, as a program of its own; the rest must only parse."""
    imports = (ast.Import, ast.ImportFrom)
    return "\n".join(ast.unparse(n) for n in ast.parse(text).body if isinstance(n, imports))


def _count_gpus(python: Path) -> int:
    question = "import torch; print(torch.cuda.device_count())"
    answer = subprocess.run([python, "-c", question], capture_output=True, text=True)
    return int(answer.stdout) if answer.returncode == 0 else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--extra")
    given = parser.parse_args()
    try:
        count = run(given.page, given.python.absolute(), extra=given.extra)
    except (ValueError, RuntimeError) as error:
        sys.exit(str(error))
    print(f"{given.page}: {count} blocks ran")
