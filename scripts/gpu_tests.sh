#!/usr/bin/env bash
# Runs every test marked gpu or multi_gpu, one after the other. Arguments go to pytest.
#   bash scripts/gpu_tests.sh [-n PROCESSES] [-x] [-k NAME]
# With -n 26, for instance, 26 processes share the GPUs; two GPUs of 141 GB have room for them.
# Uses the python3 of the environment it runs in if that one has torch, else the workspace's own.
set -euo pipefail
cd "$(dirname "$0")/.."

if python3 -c 'import torch' 2>/dev/null; then
    python=(python3)
    PYTHONPATH=$(printf '%s:' packages/*/src)${PYTHONPATH:-}
    export PYTHONPATH
else
    python=(uv run python)
fi
devices=$("${python[@]}" -c 'import torch; print(torch.cuda.device_count())')
if [[ $devices -lt 1 ]]; then
    echo "gpu_tests.sh needs a CUDA device; torch sees none" >&2
    exit 2
fi
echo "running the GPU tests on $devices device(s)"
# Where pytest-benchmark is installed, it warns beside pytest-xdist, and warnings are errors here.
exec "${python[@]}" -m pytest -n 0 -p no:benchmark -m "gpu or multi_gpu" "$@"
