#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds libddp and installs it into /opt/ddp/libddp, and copies LibTorch's libraries beside it.
# The Dockerfile runs this in a container.
#
# usage: packaging/docker/build_tree.sh [CMake arguments]
#   JOBS   number of parallel compilers (default: one per core, at most one per 2 GiB of memory)
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/setup.sh"
answer_help "$@"
cd "$DDP_ROOT"

export PATH=$DDP_VENV/bin:$PATH
site=$(echo "$DDP_VENV"/lib/python3*/site-packages)
tree=/opt/ddp
toolkit=$site/nvidia/cu13
if [ -x "$toolkit/bin/nvcc" ]; then
  # PyPI's packages have libraries without the names that a linker looks for.
  export PATH=$toolkit/bin:$PATH
  for library in "$toolkit"/lib/lib*.so.*; do
    link=${library%%.so.*}.so
    [ -e "$link" ] || ln -s "$(basename "$library")" "$link"
  done
  [ -e "$toolkit/lib64" ] || ln -s lib "$toolkit/lib64"
fi

cmake -S . -B build -G Ninja -DDDP_BUILD_TESTS=OFF -DDDP_TORCH_BESIDE=ON -DCMAKE_INSTALL_LIBDIR=lib \
  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=8 "$@"
cmake --build build --parallel "${JOBS:-$(build_jobs)}"
cmake --install build --prefix "$tree/libddp" --strip
# Of the pages only the licences travel.
find "$tree/libddp/share/doc" -type f ! -path '*/licences/*' ! -name LICENSE -delete
find "$tree/libddp/share/doc" -type d -empty -delete

packaging/docker/copy_libraries.sh "$site" "$tree"
