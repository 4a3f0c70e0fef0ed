#!/bin/bash
# Rehearse a run on two nodes on this machine: start node.sh twice, as two torchrun agents with one rank each.
#
#     examples/multi_node/rehearse.sh [SCRIPT [ARGUMENT...]]
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
(($# > 0)) || set -- "$here/../plain_loop.py"
export RANKS_PER_NODE=1 OMP_NUM_THREADS=1 RUN_ID=rehearsal-$$ PORT=${PORT:-$((20000 + $$ % 20000))}
"$here/node.sh" 2 localhost "$@" &
second=$!
trap 'kill $second 2>/dev/null || true' EXIT
"$here/node.sh" 2 localhost "$@"
wait $second
