#!/usr/bin/env bash
# Runs a selection of tests several times in a row while other processes keep every core busy, and
# stops at the first failure. It shows that tests of several ranks pass on a machine that is slow.
#
#   scripts/repeat_under_load.sh 20 packages/ddp-lite packages/shard-optim -m "not gpu"
#   scripts/repeat_under_load.sh 20 -m "processes and not nightly"    # all that start processes
#
# Arguments: the number of repetitions, then what pytest is given. One busy process runs per core.
set -euo pipefail

if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 REPETITIONS PYTEST_ARGUMENT..." >&2
    exit 2
fi
repetitions=$1
shift

busy=()
trap 'kill "${busy[@]}"' EXIT
for _ in $(seq "$(nproc)"); do
    (while :; do :; done) &
    busy+=($!)
done

for repetition in $(seq "$repetitions"); do
    echo "== repetition $repetition of $repetitions"
    uv run --locked pytest -q -p no:cacheprovider "$@"
done
echo "== $repetitions repetitions passed while $(nproc) processes kept the cores busy"
