#!/bin/bash
# One run on several nodes under Slurm: sbatch examples/scale/slurm.sh CONFIG RUN_DIRECTORY
# RUN_DIRECTORY is run.dir/run.name of the config, on a disk that all nodes share.
#SBATCH --job-name=whet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
set -euo pipefail

config=${1:?a config}
run=${2:?the directory of the run}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# a requeued job, or one with an existing run, resumes it
if [ -f "$run/config.yaml" ]; then
    whet=(resume "$run")
else
    whet=(train "$config")
fi

srun torchrun \
    --nnodes="$SLURM_NNODES" \
    --nproc-per-node=8 \
    --max-restarts=3 \
    --rdzv-backend=c10d \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-endpoint="$first:29500" \
    -m whet "${whet[@]}"
