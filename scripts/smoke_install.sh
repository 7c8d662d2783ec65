#!/usr/bin/env bash
# Installs the one wheel of a folder into a new environment outside the workspace, imports all its
# public names, and runs every code block of its README.
#   scripts/smoke_install.sh dist
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
folder=$(realpath "$1")
wheels=("$folder"/*.whl)
if [[ ${#wheels[@]} -ne 1 || ! -f ${wheels[0]} ]]; then
    echo "$folder must hold exactly one wheel, but got: ${wheels[*]}. Build one package into it." >&2
    exit 1
fi
name=$(basename "${wheels[0]}")
module=${name%%-*}
page=$root/packages/${module//_/-}/README.md
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
uv venv --quiet venv
python=$scratch/venv/bin/python
uv pip install --quiet --python "$python" "${wheels[0]}"
# Without NumPy, which it can do without, torch warns by itself.
"$python" -W error -W "ignore:Failed to initialize NumPy" -c "
import $module
for name in $module.__all__:
    getattr($module, name)
print('$name imports:', len($module.__all__), 'public names')"
run_readme() {
    uv run --quiet --no-project --with 'markdown-it-py>=3.0' \
        python "$root/scripts/run_readme.py" "$page" --python "$python" "$@"
}
run_readme
for extra in $(sed -n 's/^```.* extra=\([^ ]*\).*/\1/p' "$page" | sort -u); do
    uv pip install --quiet --python "$python" "${wheels[0]}[$extra]"
    run_readme --extra "$extra"
done
