#!/usr/bin/env bash
# torchtitan, 4 nodes x 8 GPUs: its own command with other flags behind --module and --config. On each node:
#
#     HEAD=10.10.0.1 NODE=0 bash torchtitan.sh --training.steps 1000 --checkpoint.enable
#
# NODE counts from 0, and HEAD is the address of node 0. The dump folder should be one for all nodes.
set -euo pipefail
: "${HEAD:?must be the address of node 0}" "${NODE:?must be the number of this node, from 0}"

exec torchrun --nnodes "${NODES:-4}" --node-rank "$NODE" --nproc-per-node "${GPUS:-8}" \
    --master-addr "$HEAD" --master-port "${PORT:-29500}" -m torchtitan.train \
    --module detonation.integrations.torchtitan --config "${CONFIG:-llama3.llama3_8b}" --optimizer.scheme loco \
    --parallelism.data_parallel_replicate_degree "${NODES:-4}" "$@"
