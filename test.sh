#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds what is missing and runs all tests. GPU tests are reported as skipped if no GPU is found.
#
# usage: ./test.sh [--werror] [ctest arguments, e.g. -R reducer]
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh"
answer_help "$@"

werror=OFF
if [ "${1:-}" = --werror ]; then
  werror=ON
  shift
fi
started=$SECONDS
setup -DDDP_WARNINGS_AS_ERRORS=$werror
# shellcheck disable=SC2119 # all targets
build
say "built after $((SECONDS - started)) s"

install_test_packages
mpi_settings
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # ranks share the cores
cd "$DDP_BUILD"
# One more than the cores, because many tests wait most of their time.
ctest --output-on-failure --parallel $(($(getconf _NPROCESSORS_ONLN) + 1)) "$@"
say "tests done after $((SECONDS - started)) s"
