#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds libddp's wheel with the torch of one Python, installs what is missing, and prints the wheel's size.
#
# usage: packaging/build_wheel.sh [--python PYTHON] [--output FOLDER]
#   --python PYTHON   a Python that has torch (default: .venv/bin/python, made if it is missing)
#   --output FOLDER   where the wheel goes (default: build-wheel/dist)
#   CMAKE_ARGS        more arguments for CMake's configuration, as -DDDP_WITH_CUDA=OFF
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh"
answer_help "$@"

usage() {
  printf 'error: %s; fix: packaging/build_wheel.sh --help lists the options\n' "$*" >&2
  exit 64
}
python=
output=$DDP_ROOT/build-wheel/dist
while [ $# -gt 0 ]; do
  case $1 in
    --python | --output) [ $# -gt 1 ] || usage "$1 needs a value" ;;
    *) usage "there is no option $1" ;;
  esac
  [ "$1" = --output ] || python=$2
  [ "$1" = --python ] || output=$(realpath -m "$2")
  shift 2
done
if [ -n "$python" ]; then
  "$python" -c '' 2>/dev/null || usage "--python $python cannot be run"
  "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' ||
    usage "--python $python has no torch, which the wheel is built with (pip install torch==$DDP_TORCH_VERSION)"
fi

started=$SECONDS
install_packages
if [ -z "$python" ]; then
  # Not another LibTorch: the wheel is built with the torch of the Python that builds it.
  compgen -G "$DDP_VENV/lib/python3*/site-packages/torch/version.py" >/dev/null ||
    pip_install "torch==$DDP_TORCH_VERSION" numpy
  python=$DDP_VENV/bin/python
fi
install_python_parts
install_mpi
tools=$DDP_ROOT/build-wheel/tools
if [ ! -d "$tools/scikit_build_core" ]; then
  say "installing into build-wheel/tools: scikit-build-core"
  "$python" -m pip install --quiet --disable-pip-version-check --target "$tools" "scikit-build-core>=1.0" ||
    die "pip could not install scikit-build-core"
fi
CMAKE_BUILD_PARALLEL_LEVEL=${DDP_BUILD_JOBS:-$(build_jobs)}
export CMAKE_BUILD_PARALLEL_LEVEL PYTHONPATH=$tools${PYTHONPATH:+:$PYTHONPATH}
"$python" -m pip wheel "$DDP_ROOT" --no-build-isolation --no-deps --disable-pip-version-check --wheel-dir "$output" ||
  die "the wheel could not be built: see above"
say "$(du -h "$output"/libddp-*.whl | awk '{print $2 " (" $1 ")"}') after $((SECONDS - started)) s"
