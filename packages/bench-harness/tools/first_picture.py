"""How long a new user waits: from an empty environment to the first picture.

    cd packages/bench-harness/tools
    python first_picture.py                 # with the installer's usual cache
    python first_picture.py --cold          # with an empty cache: everything is downloaded
    python first_picture.py --installer pip
    python first_picture.py ../../../docs/results/first-picture.jsonl    # both, as published rows

Builds the wheels of this checkout, installs bench-harness from them into a new environment, gives
the first command of its README, and prints the seconds until each is done. The environment, the
cache and the run folder lie in one temporary folder, which is removed at the end. Needs uv.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COMMAND = ("bench-harness", "run", "quick")
ABOUT_TORCH = (
    "import os, torch; print(f'{len(os.sched_getaffinity(0))} CPU cores, "
    "{torch.cuda.device_count()} GPUs, torch {torch.__version__}')"
)


class Waiting:
    """Seconds from the install command on until each step is done, printed as they pass."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.seconds: dict[str, float] = {}

    def done(self, what: str) -> None:
        """Notes that ``what`` is done now."""
        self.seconds[what] = round(time.monotonic() - self.begin, 1)
        print(f"{self.seconds[what]:7.1f} s  {what}", flush=True)


def run(what: str, *command: str | Path, environment: dict[str, str]) -> str:
    """Runs a command and returns its output; ends the program if it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{what} ended with exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def run_until_picture(scratch: Path, environment: dict[str, str], waiting: Waiting) -> None:
    """Gives the first command, and notes the first picture and the report."""
    command = [scratch / "venv" / "bin" / COMMAND[0], *COMMAND[1:]]
    seen = False
    with (
        (scratch / "output.txt").open("wb") as output,
        subprocess.Popen(
            command, cwd=scratch, env=environment, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        while process.poll() is None:
            if not seen and any(scratch.glob("runs/*/figures/*.png")):
                seen = True
                waiting.done("first picture (s)")
            time.sleep(0.1)
    if process.returncode or not seen:
        sys.exit(f"{' '.join(COMMAND)} failed:\n{(scratch / 'output.txt').read_text()}")
    waiting.done("run and report (s)")


def measure(installer: str, cold: bool) -> tuple[str, dict[str, str | float]]:
    """The machine and its torch, and a row of seconds."""
    cache = "empty" if cold else "filled"
    print(f"{installer}, {cache} cache")
    with tempfile.TemporaryDirectory(prefix="first-picture-") as folder:
        scratch = Path(folder)
        environment = {
            k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")
        }
        build = ("uv", "build", "-q", "--all-packages", "--out-dir", scratch / "dist", ROOT)
        run("uv build", *build, environment=environment)  # the author's work: nobody waits for it
        if cold:
            environment |= {"UV_CACHE_DIR": folder + "/uv", "PIP_CACHE_DIR": folder + "/pip"}
        waiting = Waiting()
        seed = ["--seed"] if installer == "pip" else []
        run("uv venv", "uv", "venv", "-q", *seed, scratch / "venv", environment=environment)
        python = scratch / "venv" / "bin" / "python"
        pip = [python, "-m", "pip"] if installer == "pip" else ["uv", "pip"]
        into = [] if installer == "pip" else ["--python", python]
        install = [*pip, "install", "-q", *into, "--find-links", scratch / "dist", "bench-harness"]
        run(installer, *install, environment=environment)
        waiting.done("installed (s)")
        run_until_picture(scratch, environment, waiting)
        machine = run("python", python, "-c", ABOUT_TORCH, environment=environment)
    return machine, {"installer": installer, "cache": cache, **waiting.seconds}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, help="file of rows for both caches")
    parser.add_argument("--installer", choices=["uv", "pip"], default="uv")
    parser.add_argument("--cold", action="store_true", help="begin with an empty cache")
    given = parser.parse_args()
    caches = [True, False] if given.rows else [given.cold]
    measured = [measure(given.installer, cold) for cold in caches]
    if given.rows:
        commit = run("git", "git", "-C", ROOT, "rev-parse", "HEAD", environment=dict(os.environ))
        name = "first-picture"
        line = {"experiment": name, "case_key": name, "label": name, "commit": commit}
        line |= {"measured_on": measured[0][0], "config": {}, "rows": [row for _, row in measured]}
        given.rows.write_text(json.dumps(line, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
