#!/bin/bash
# Train on several nodes of a Slurm cluster:
#
#     sbatch --nodes 2 --gpus-per-node 8 course_lib/scale_out/slurm.sh --steps 1000 --checkpoints /shared/run
#
# One torchrun on each node starts a rank for each of its GPUs (RANKS_PER_NODE where there are none). They find each
# other at the first node. After a crash or at the time limit, submit the same command again: it goes on from the
# newest checkpoint. Run it from the folder of the course with its environment activated, or activate it below.

#SBATCH --job-name=tinygpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out

set -euo pipefail

# source /shared/course/.venv/bin/activate

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
ranks_per_node=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}

# As many threads as cores on every rank would have the ranks push each other aside.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Where nodes have several networks, name the one between them:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

srun torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "$ranks_per_node" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${nodes[0]}:${PORT:-29500}" \
    --max-restarts 0 \
    -m course_lib.scale_out.train "$@"
