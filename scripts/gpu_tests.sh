#!/usr/bin/env bash
# Runs every test marked gpu or multi_gpu. Arguments go to pytest.
#   bash scripts/gpu_tests.sh [-x] [-k NAME]
# With uv it uses the workspace's environment; without, the machine's own Python and torch.
set -euo pipefail
cd "$(dirname "$0")/.."

if command -v uv >/dev/null; then
    python=(uv run python)
else
    python=(python3)
    PYTHONPATH=$(printf '%s:' packages/*/src)${PYTHONPATH:-}
    export PYTHONPATH
fi
devices=$("${python[@]}" -c 'import torch; print(torch.cuda.device_count())')
if [[ $devices -lt 1 ]]; then
    echo "gpu_tests.sh needs a CUDA device; torch sees none" >&2
    exit 2
fi
echo "running the GPU tests on $devices device(s)"
exec "${python[@]}" -m pytest -m "gpu or multi_gpu" "$@"
