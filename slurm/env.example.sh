# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Copy this file to slurm/env.sh (which git ignores) and keep what your site needs. Every job (slurm/*.sbatch, through
# slurm/job.sh) reads slurm/env.sh on the node where it starts.

# module load gcc/12 cuda/13.0 openmpi/4.1
# source ~/libddp/.venv/bin/activate

# LibTorch's folder, if the program was built on another machine:
# export LD_LIBRARY_PATH=$SITE_PACKAGES/torch/lib:${LD_LIBRARY_PATH:-}

# How srun starts the tasks: pmix, or none for GPU ranks, which need no MPI.
# export DDP_SRUN_MPI=none

# The secret that authenticates ranks. Ranks that srun starts directly (all jobs here) need none. `srun torchrun` on
# several nodes, or ranks with RANK and MASTER_ADDR set, need one per job, of at least 16 characters. srun passes it to
# all tasks:
# export DDP_SECRET=$(openssl rand -hex 32)

# The network that NCCL uses, if its first choice is wrong. (For control connections set
# context.control_plane.bind_address.)
# export NCCL_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5

# Folder that all nodes see, for logs, CSV and checkpoints. Default: runs/ in the folder where sbatch was called.
# export DDP_RUNS=/scratch/$USER/ddp

# A job is not requeued after this many starts in a row without a newer checkpoint. Starts that make progress do not count.
# export DDP_MAX_RESTARTS=20
