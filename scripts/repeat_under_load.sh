#!/usr/bin/env bash
# Runs a selection of tests several times in a row while other processes keep every core busy, and
# stops at the first failure. It shows that tests of several ranks pass on a machine that is slow.
#
#   scripts/repeat_under_load.sh 20 packages/ddp-lite packages/shard-optim -m "not gpu"
#   scripts/repeat_under_load.sh 20 -m "processes and not nightly"    # all that start processes
#
# Arguments: the number of repetitions, then what pytest is given. One busy process runs per core.
set -euo pipefail

repetitions=${1:?"usage: $0 REPETITIONS PYTEST_ARGUMENT..."}
shift

trap 'kill $(jobs -p)' EXIT
for ((core = 0; core < $(nproc); core++)); do yes >/dev/null & done

for ((repetition = 1; repetition <= repetitions; repetition++)); do
    echo "== repetition $repetition of $repetitions"
    uv run --locked pytest -q -p no:cacheprovider "$@"
done
echo "== $repetitions repetitions passed while $(nproc) processes kept the cores busy"
