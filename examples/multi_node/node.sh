#!/bin/bash
# Run the same command on every node, with the number of nodes, the address of one of them, and the script:
#
#     examples/multi_node/node.sh 2 10.0.0.1 examples/plain_loop.py
#
# RANKS_PER_NODE sets the number of ranks per node. The default is one per GPU, or one per node without GPUs. PORT
# sets the port (default: 29400). All nodes must share the folder in which the script saves, for example over NFS.
set -euo pipefail

if (($# < 3)); then
  echo "usage: $0 NODES ADDRESS SCRIPT [ARGUMENT...]" >&2
  exit 2
fi
nodes=$1 address=$2
shift 2
gpus=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)
ranks=${RANKS_PER_NODE:-$((gpus > 0 ? gpus : 1))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + ranks - 1) / ranks))}
exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "$nodes" --nproc-per-node "$ranks" \
  --rdzv-backend c10d --rdzv-endpoint "$address:${PORT:-29400}" --rdzv-id "${RUN_ID:-zero-ext}" \
  --max-restarts 0 "$@"
