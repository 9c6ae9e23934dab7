#!/usr/bin/env bash
# One or two machines, of which either may leave and come back. On each of them, in any order:
#
#     HEAD=10.10.0.1 ADDRESS=10.10.0.2 GPUS=8 bash torchrun-elastic.sh quick-lm --out runs/first
#
# HEAD is the address of one of them, the same on both: its agent keeps the rendezvous, and the run ends with it.
# ADDRESS is this machine's own; without it the others must find this one by its name, and HEAD must be
# an address that the name of its machine leads to, which it is not on Debian (127.0.1.1) or in a tunnel.
# If the other machine is lost and both share --out, the run continues from the last checkpoint with one replica fewer,
# and with one more when that machine returns. Without a shared --out the run waits for the machine: its replica's
# checkpoint is nowhere else. Each start uses this same command line.
set -euo pipefail
: "${HEAD:?must be the address of one machine, the same on all}"
(($# > 0)) || { echo "usage: HEAD=ADDRESS GPUS=8 $0 RECIPE --out DIR ..." >&2; exit 2; }

# Uncomment, with the interface that leads to the other machine, where it is not the one towards HEAD.
# set -- "$@" --interface wg0

# A machine that comes back waits in vain for a store of the agents (torch 2.13); rank 0 keeps one of its own then.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# torchrun recognises the machine of the rendezvous by its name, which need not lead to HEAD: say which one it is.
host=()
if [[ -n ${ADDRESS:-} ]]; then
    host=(--local-addr "$ADDRESS" --rdzv-conf "is_host=$([[ $ADDRESS == "$HEAD" ]] && echo 1 || echo 0)")
fi

exec torchrun --nnodes "${NODES:-1:2}" --nproc-per-node "${GPUS:-8}" --max-restarts 100 \
    "${host[@]}" --rdzv-backend c10d --rdzv-id "${RUN:-detonation}" --rdzv-endpoint "$HEAD:${PORT:-29500}" \
    -m detonation train "$@" --checkpoint-every "${EVERY:-100}" --resume
