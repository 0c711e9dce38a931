#!/usr/bin/env bash
# Sets torchrun's variables from what Slurm, Volcano or Kubernetes say of this node, and becomes the command in its arguments:
#     bash tools/deploy/node.sh bash infer.sh CASE
# On Kubernetes, pods are named NAME-0, NAME-1 and so on, below the headless service SERVICE; docs/cluster.md has more.
set -euo pipefail
if [ -n "${SLURM_NODEID:-}" ]; then
    NODE_RANK=$SLURM_NODEID
    NNODES=$SLURM_STEP_NUM_NODES
elif [ -n "${VC_TASK_INDEX:-}" ]; then # the plugins env and svc of a Volcano job whose one task is called node
    NODE_RANK=$VC_TASK_INDEX
    NNODES=$VC_NODE_NUM
    MASTER_ADDR=${VC_NODE_HOSTS%%,*}
else # a pod of a StatefulSet or of an indexed Job
    NODE_RANK=${HOSTNAME##*-}
    MASTER_ADDR=${HOSTNAME%-*}-0.$SERVICE
fi
export NODE_RANK NNODES MASTER_ADDR MASTER_PORT="${MASTER_PORT:-29500}"
exec "$@"
