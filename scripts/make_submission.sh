#!/usr/bin/env bash
# Makes the assignment's package: runs the tests with a JUnit report, then zips the code with it.
#   bash scripts/make_submission.sh [--output FOLDER] [PYTEST ARGUMENT...]
# Writes FOLDER/test_results.xml and FOLDER/submission.zip (FOLDER is dist/submission by default).
# The zip is made whatever the tests say; the exit code is pytest's.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=dist/submission
if [[ ${1:-} == --output ]]; then
    folder=${2:?--output needs a folder}
    shift 2
fi
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
rm -f "$folder/test_results.xml" "$folder/submission.zip"

if [[ -x .venv/bin/python ]]; then python=(.venv/bin/python); else python=(uv run python); fi

code=0
"${python[@]}" -m pytest -v --junitxml="$folder/test_results.xml" "$@" || code=$?
if [[ ! -s $folder/test_results.xml ]]; then
    echo "make_submission.sh: pytest wrote no report (exit code $code), so there is no submission" >&2
    exit 1
fi
"${python[@]}" scripts/zip_submission.py "$folder/submission.zip" "$folder/test_results.xml"
exit "$code"
