"""Other versions of Triton than the installed one, each in a folder of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

# The newest release of each minor version that flashattn-triton supports.
RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")


def install(release: str, folder: Path) -> Path:
    """Installs the wheel of ``release`` into ``folder``, to be put in front of ``PYTHONPATH``."""
    uv = shutil.which("uv")
    installer = (
        [uv, "pip", "install", "--no-config", "--quiet", "--python", sys.executable]
        if uv is not None
        else [sys.executable, "-m", "pip", "install", "--quiet"]
    )
    command = [*installer, "--no-deps", "--target", str(folder), f"triton=={release}"]
    # Elsewhere than in the workspace, whose lock holds one version.
    subprocess.run(command, check=True, cwd=folder)
    return folder
