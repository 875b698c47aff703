#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs a wheel into an empty environment and does with it what docs/packages.md says: trains a few steps alone and
# with two ranks, reads the checkpoint in Python, and finds the CMake package and the licences.
#
# usage: packaging/try_wheel.sh WHEEL
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh"
answer_help "$@"
if [ $# != 1 ] || [ ! -f "$1" ]; then
  echo "error: there is no wheel '${1:-}'; fix: packaging/try_wheel.sh build-wheel/dist/libddp-*.whl" >&2
  exit 64
fi
wheel=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mpi_settings

python3 -m venv "$work/venv"
say "installing ${wheel##*/} and its torch into an empty environment"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "$wheel" numpy safetensors
export PATH=$work/venv/bin:$PATH
unset LIBTORCH_ROOT VIRTUAL_ENV
cd "$work"  # not the checkout, whose packages would be found first
prefix=$(python -m libddp --prefix)
settings=(--config "$prefix/share/ddp/configs/quickstart.yaml" "data.path=$DDP_ROOT/data/cifar10-sample"
  data.num_samples=160 train.epochs=0 train.max_steps=4 train.batch_size=16 metrics.log_every=2 context.device=cpu)

libddp-resnet --version
libddp-resnet "${settings[@]}" checkpoint.dir=one
python - one/step_* <<'END'
import sys, libddp.checkpoint
state = libddp.checkpoint.load(sys.argv[1])
assert state, "the checkpoint is empty"
print(f"==> Python reads {len(state)} parts of the checkpoint")
END
if has mpirun; then
  mpirun -n 2 libddp-resnet "${settings[@]}" checkpoint.dir=two
else
  warn "mpirun is not installed: two ranks were not tried"
fi
[ -n "$(find "$prefix" -name ddpConfig.cmake)" ] || die "the wheel has no CMake package"
licences=$(find "$prefix" -path '*/licences/*.txt' | wc -l)
[ "$licences" -ge 4 ] || die "the wheel has the licences of only $licences bundled libraries"
say "the wheel trains, and has $licences licences of others"
