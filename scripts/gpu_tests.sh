#!/usr/bin/env bash
# Runs every test marked gpu or multi_gpu, in two parts: tests of one GPU, many processes at a time,
# which share all GPUs; then tests whose ranks need several GPUs, 3 processes for each GPU.
#   bash scripts/gpu_tests.sh [one|several] [-n PROCESSES] [-x] [-k NAME] [PATH ...]
# "one" or "several" runs that part alone, where a machine is lent for minutes. Never both at a time:
# tests of several GPUs fill the memory of one on purpose.
# -n says how many processes the first part has; without it, 13 for each GPU, at most one a core.
# All other arguments go to pytest.
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
parts="one several"
if [[ ${1:-} == one || ${1:-} == several ]]; then
    parts=$1
    shift
fi
cores=$(nproc)
processes=$((13 * devices < cores ? 13 * devices : cores))
if [[ ${1:-} == -n ]]; then
    processes=$2
    shift 2
fi

# Exit code 5 says that the selection has no test, which -k NAME may well mean for one part.
failed=0 empty=0
part() {
    local code=0
    # Where pytest-benchmark is installed, it warns beside pytest-xdist, and warnings are errors here.
    # A kernel that one process has compiled is in Triton's cache for all others.
    "${python[@]}" -m pytest -p no:benchmark "$@" || code=$?
    case $code in
    0) ;;
    5) empty=$((empty + 1)) ;;
    *) failed=$code ;;
    esac
}

if [[ $parts == *one* ]]; then
    echo "tests of one GPU: $processes processes share $devices device(s)"
    part -m "gpu and not multi_gpu" -n "$processes" --dist=worksteal "$@"
else
    empty=$((empty + 1))
fi
if [[ $parts == *several* && $devices -gt 1 ]]; then
    echo "tests of several GPUs: $((3 * devices)) processes, whose ranks share $devices devices"
    # Tests that share a start of ranks are one xdist_group, and come to one process.
    part -m multi_gpu -n "$((3 * devices))" --dist=loadgroup "$@"
else
    echo "tests of several GPUs: left out"
    empty=$((empty + 1))
fi
[[ $failed -ne 0 || $empty -lt 2 ]] || failed=5
exit "$failed"
