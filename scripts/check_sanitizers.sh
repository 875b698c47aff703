#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds and runs the sanitizer presets.
#
# usage: scripts/check_sanitizers.sh [asan] [tsan]     (default: both)
#   asan   addresses and undefined behaviour: unit tests and tests of up to 2 ranks (folder build-asan/)
#   tsan   threads: the parts without LibTorch, without suppressions (folder build-tsan/)
# DDP_SANITIZE_RANKS=4 adds the tests of 4 ranks.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
answer_help "$@"
cd "$DDP_ROOT"
[ $# -gt 0 ] || set -- asan tsan
for preset in "$@"; do
  case $preset in asan | tsan) ;; *) die "unknown preset $preset: use asan or tsan" ;; esac
done

install_packages
install_python_parts
mpi_settings
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
launcher=()
if has ccache && [ -z "${CMAKE_CXX_COMPILER_LAUNCHER:-}" ]; then
  launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
fi
failed=0
for preset in "$@"; do
  started=$SECONDS
  cmake --preset "$preset" "${launcher[@]}" || die "configuration of $preset failed: see above"
  cmake --build --preset "$preset" --parallel "${DDP_BUILD_JOBS:-$(build_jobs)}" || die "the build of $preset failed: see above"
  # UBSan opens a pipe to check an object's type. The test rendezvous_exhausted leaves no file descriptor for it.
  excluded='^rendezvous_exhausted$'
  [ "${DDP_SANITIZE_RANKS:-2}" -ge 4 ] || excluded+='|_r4$'
  if ctest --preset "$preset" -E "$excluded"; then
    say "$preset: clean after $((SECONDS - started)) s"
  else
    warn "$preset: see the failed tests above"
    failed=1
  fi
done
exit $failed
