#!/usr/bin/env bash
# Installs the one wheel of a folder into a new environment outside the workspace and imports it.
#   scripts/smoke_install.sh dist
set -euo pipefail
folder=$(realpath "$1")
wheels=("$folder"/*.whl)
if [[ ${#wheels[@]} -ne 1 || ! -f ${wheels[0]} ]]; then
    echo "expected exactly one wheel in $folder, found: ${wheels[*]}" >&2
    exit 1
fi
name=$(basename "${wheels[0]}")
module=${name%%-*}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
uv venv --quiet venv
uv pip install --quiet --python venv/bin/python "${wheels[0]}"
# Without NumPy, which it can do without, torch warns by itself.
venv/bin/python -W error -W "ignore:Failed to initialize NumPy" -c "
import $module
for name in $module.__all__:
    getattr($module, name)
print('$name imports:', len($module.__all__), 'public names')"
