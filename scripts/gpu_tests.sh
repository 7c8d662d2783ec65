#!/usr/bin/env bash
# Runs every test marked gpu or multi_gpu, in two parts: tests of one GPU, many processes at a time,
# which share all GPUs; then tests whose ranks need several GPUs, in 6 processes, because most ranks
# take the first two GPUs, however many there are.
#   bash scripts/gpu_tests.sh [one|several] [-n PROCESSES] [-x] [-k NAME] [PATH ...]
# "one" or "several" runs that part alone, where time is short. Never both at a time:
# tests of several GPUs fill the memory of one on purpose.
# All other arguments go to pytest. Without -n, tests of one GPU have 13 processes for each GPU, at most
# one a core; give -n with one part alone.
# Uses the python3 of the environment it runs in if that one has torch, else the workspace's own.
set -euo pipefail
cd "$(dirname "$0")/.."

python=(uv run python)
if python3 -c 'import torch' 2>/dev/null; then
    python=(python3)
    PYTHONPATH=$(printf '%s:' packages/*/src)${PYTHONPATH:-}
    export PYTHONPATH
fi
devices=$("${python[@]}" -c 'import torch; print(torch.cuda.device_count())')
if [[ $devices -lt 1 ]]; then
    echo "gpu_tests.sh needs a CUDA device; torch sees none" >&2
    exit 2
fi
chosen="one several"
if [[ ${1:-} == one || ${1:-} == several ]]; then
    chosen=$1
    shift
fi
cores=$(nproc)

# Exit code 5 says that the selection has no test, which -k NAME may well mean for one part.
result=5
part() {
    local code=0
    # Where pytest-benchmark is installed, it warns beside pytest-xdist, and warnings are errors here.
    "${python[@]}" -m pytest -p no:benchmark "$@" || code=$?
    if [[ $code -ne 5 && ($result -eq 5 || $code -ne 0) ]]; then result=$code; fi
}

if [[ $chosen == *one* ]]; then
    # A kernel that one process has compiled is in Triton's cache for all others.
    processes=$((13 * devices < cores ? 13 * devices : cores))
    part -m "gpu and not multi_gpu" -n "$processes" --dist=worksteal "$@"
fi
if [[ $chosen == *several* && $devices -eq 1 ]]; then
    echo "tests of several GPUs: left out, there is one"
elif [[ $chosen == *several* ]]; then
    # Tests that share a start of ranks are one xdist_group, and come to one process.
    part -m multi_gpu -n 6 --dist=loadgroup "$@"
fi
exit "$result"
