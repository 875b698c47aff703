# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Copy to slurm/env.sh (which git ignores) and keep what your site needs; every job (slurm/*.sbatch, through
# slurm/job.sh) reads it on the node where it starts.

# module load gcc/12 cuda/13.0 openmpi/4.1
# source ~/libddp/.venv/bin/activate

# LibTorch, where the program was built elsewhere:
# export LD_LIBRARY_PATH=$SITE_PACKAGES/torch/lib:${LD_LIBRARY_PATH:-}

# How srun starts the tasks: pmix, or none for GPU ranks (they need no MPI).
# export DDP_SRUN_MPI=none

# The secret by which ranks know each other. Ranks that srun itself starts (all jobs here) need none. Ranks of
# `srun torchrun` on several nodes, or with RANK and MASTER_ADDR set, need one for each job, of at least 16 characters;
# srun passes it to all tasks:
# export DDP_SECRET=$(openssl rand -hex 32)

# The network NCCL uses, where the first one is the wrong one (the control connections':
# context.control_plane.bind_address):
# export NCCL_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5

# Folder that all nodes see, for logs, CSV and checkpoints; default: runs/ where sbatch was called.
# export DDP_RUNS=/scratch/$USER/ddp

# Starts of one job before it gives up.
# export DDP_MAX_RESTARTS=20
