"""Lays the package out as a repository that Hugging Face's ``kernels`` library loads.

    python tools/lay_out_kernel.py FOLDER
    python -c "from kernels import get_local_kernel; from pathlib import Path; \\
        print(get_local_kernel(Path('FOLDER')).flash_attention)"

One "universal" build holds Python files only, because Triton compiles the kernels where they run::

    FOLDER/build/torch-universal/metadata.json
    FOLDER/build/torch-universal/flashattn_triton/__init__.py ...

``kernels`` imports a build under a name of its own, several of them in one process if asked. So the
copy differs from the package in two ways: it imports itself relatively, and its operators are
registered in a namespace with a hash of the sources in its name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SOURCE = PACKAGE / "src" / "flashattn_triton"
NAME = SOURCE.name
BUILD = Path("build", "torch-universal")
# The version of the interface, a whole number, by which a program asks for a kernel.
INTERFACE_VERSION = 1


def lay_out(folder: Path) -> Path:
    """Writes the repository into a folder that is empty or not there yet.

    Returns:
        The folder of the build.

    Raises:
        FileExistsError: the folder holds something.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(
            f"FOLDER must be empty or not exist, but got {folder}. Choose another, or delete it."
        )
    sources = sorted(SOURCE.rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    identity = f"{NAME}_{digest}"
    build = folder / BUILD
    for path in sources:
        relative = path.relative_to(SOURCE)
        target = build / NAME / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        text = imports_made_relative(path.read_text(), depth=len(relative.parts))
        target.write_text(operators_moved(text, identity))
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    metadata = {
        "id": identity,
        "name": project["name"],
        "version": INTERFACE_VERSION,
        "license": project["license"],
        "upstream": project["urls"]["Source"],
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    shutil.copy(PACKAGE / "LICENSE", folder)
    shutil.copy(PACKAGE / "README.md", folder)
    return build


def imports_made_relative(text: str, *, depth: int) -> str:
    """The text of a module with ``from flashattn_triton.x import`` as ``from .x import``.

    Args:
        depth: 1 for a module of the package itself, 2 for one of a package inside it.
    """
    return re.sub(
        rf"^(\s*from ){NAME}(?:\.| (?=import))([\w.]* ?)import",
        lambda found: f"{found[1]}{'.' * depth}{found[2].strip()} import",
        text,
        flags=re.MULTILINE,
    )


def operators_moved(text: str, namespace: str) -> str:
    """The text of a module with its operators in another namespace of ``torch.ops``."""
    text = text.replace(f"torch.ops.{NAME}.", f"torch.ops.{namespace}.")
    text = text.replace(f'"{NAME}::', f'"{namespace}::')
    return text.replace(f'Library("{NAME}"', f'Library("{namespace}"')


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    try:
        print(lay_out(parser.parse_args().folder))
    except FileExistsError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
