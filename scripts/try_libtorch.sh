#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds everything with a version of LibTorch from PyPI and runs the tests. Packages and build stay in a folder of
# their own, build-torch-VERSION/, and the checkout's .venv/ and build/ are not touched. Where nvcc is found, CUDA code
# is compiled for compute capability 8.0, 9.0, 10.0 and 12.0.
#
# usage: scripts/try_libtorch.sh VERSION [test.sh arguments]
#        scripts/try_libtorch.sh 2.15.0 --werror -LE slow
#
#   DDP_CMAKE_ARGS   more arguments for CMake's configuration
set -euo pipefail
CDPATH="" cd -- "$(dirname "${BASH_SOURCE[0]}")/.."
version=${1:-}
export DDP_TORCH_VERSION=$version DDP_BUILD=$PWD/build-torch-$version DDP_VENV=$PWD/build-torch-$version/.venv
# shellcheck source=scripts/setup.sh
source scripts/setup.sh
answer_help "$@"
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || die "the first argument '$version' is no version such as 2.15.0; see --help"
shift

unset LIBTORCH_ROOT VIRTUAL_ENV CONDA_PREFIX  # other versions
compgen -G "$DDP_VENV/lib/python3*/site-packages/torch/version.py" >/dev/null ||
  pip_install "torch==$version" numpy safetensors
export DDP_CMAKE_ARGS="-DDDP_BUILD_BENCHMARKS=ON -DCMAKE_CUDA_ARCHITECTURES=80;90;100;120 ${DDP_CMAKE_ARGS:-}"
DDP_BUILD=$DDP_BUILD DDP_VENV=$DDP_VENV ./test.sh "$@"
