"""How long a new user waits: from an empty environment to the first picture.

    python scripts/first_picture.py                 # with uv's usual cache
    python scripts/first_picture.py --cold          # with an empty cache: everything is downloaded
    python scripts/first_picture.py --installer pip

Builds the wheels of this checkout, installs bench-harness from them into a new environment, gives
the first command of its README, and prints the seconds until each is done. The environment, the
cache and the run folder lie in one temporary folder, which is removed at the end. Needs uv.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMAND = ("bench-harness", "run", "quick")


def timed(what: str, *command: str | Path, environment: dict[str, str]) -> None:
    """Runs a command and prints how long it took; ends the program if it fails."""
    begin = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{what} ended with exit code {done.returncode}\n{done.stdout}{done.stderr}")
    print(f"{time.monotonic() - begin:7.1f} s  {what}", flush=True)


def run_until_picture(scratch: Path, environment: dict[str, str]) -> None:
    """Gives the first command; prints when the first picture and when the report are there."""
    begin = time.monotonic()
    seen = False
    command = [scratch / "venv" / "bin" / COMMAND[0], *COMMAND[1:]]
    with (
        (scratch / "output.txt").open("wb") as output,
        subprocess.Popen(
            command, cwd=scratch, env=environment, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        while process.poll() is None:
            if not seen and any(scratch.glob("runs/*/figures/*.png")):
                seen = True
                print(f"{time.monotonic() - begin:7.1f} s  the first picture", flush=True)
            time.sleep(0.1)
    if process.returncode or not seen:
        sys.exit(f"{' '.join(COMMAND)} failed:\n{(scratch / 'output.txt').read_text()}")
    print(f"{time.monotonic() - begin:7.1f} s  {' '.join(COMMAND)}, with its report", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--installer", choices=["uv", "pip"], default="uv")
    parser.add_argument("--cold", action="store_true", help="begin with an empty cache")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-picture-") as folder:
        scratch = Path(folder)
        environment = {
            k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")
        }
        build = ("uv", "build", "-q", "--all-packages", "--out-dir", scratch / "dist", ROOT)
        timed("the wheels are built (the author's work)", *build, environment=environment)
        if given.cold:
            environment |= {"UV_CACHE_DIR": folder + "/uv", "PIP_CACHE_DIR": folder + "/pip"}
        begin = time.monotonic()
        seed = ["--seed"] if given.installer == "pip" else []
        make = ("uv", "venv", "-q", *seed, scratch / "venv")
        timed("the environment is made", *make, environment=environment)
        python = scratch / "venv" / "bin" / "python"
        install = (
            ["uv", "pip", "install", "-q", "--python", python]
            if given.installer == "uv"
            else [python, "-m", "pip", "install", "-q"]
        )
        what = f"{given.installer} has installed bench-harness"
        arguments = ["--find-links", scratch / "dist", "bench-harness"]
        timed(what, *install, *arguments, environment=environment)
        run_until_picture(scratch, environment)
        print(f"{time.monotonic() - begin:7.1f} s  all of it")


if __name__ == "__main__":
    main()
