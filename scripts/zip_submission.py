"""Zips the repository's files and a test report.

    python scripts/zip_submission.py submission.zip test_results.xml

The files are those that git knows or would add; without git, everything but build products. Of
docs/results only text goes along: rows, pages and tables, not pictures and traces. The report lies
at the root of the zip.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Folders that are made from the code, or hold other people's.
LEFT_OUT = {
    *(".git", ".venv", "__pycache__", "dist", "build", "runs", "checkpoints"),
    *(".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"),
}
RESULTS = Path("docs/results")
RESULT_SUFFIXES = {".md", ".json", ".jsonl", ".csv", ".toml"}
#: Rows beyond this size stay where they are.
MOST_BYTES = 4 * 2**20


def files(root: Path) -> list[Path]:
    """The files to zip, relative to ``root``, in a fixed order."""
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        found = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        found = [
            (Path(folder) / name).relative_to(root)
            for folder, _, names in os.walk(root)
            for name in names
        ]
    return sorted(path for path in set(found) if wanted(root, path))


def wanted(root: Path, path: Path) -> bool:
    """Whether a file goes along."""
    if LEFT_OUT & set(path.parts) or not (root / path).is_file():
        return False
    if path.is_relative_to(RESULTS):
        return path.suffix in RESULT_SUFFIXES and (root / path).stat().st_size <= MOST_BYTES
    return True


def main() -> None:
    """The command line."""
    target, report = map(Path, sys.argv[1:])
    chosen = files(ROOT)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in chosen:
            archive.write(ROOT / path, path)
        archive.write(report, report.name)
    print(f"{target}: {len(chosen) + 1} files, {target.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
