"""ddp-lite's README shows what the committed rows say."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts/ddp_readme.py"


def test_measured_parts_are_those_of_the_rows() -> None:
    words = [sys.executable, str(SCRIPT), "--check"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
