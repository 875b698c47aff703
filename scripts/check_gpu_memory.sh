#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs compute-sanitizer over the GPU tests of kernels.
#
# usage: scripts/check_gpu_memory.sh [tool …]
#   tools     memcheck (default), racecheck, synccheck, initcheck
#   BUILD     build folder (default: build)
#   TESTS     programs below BUILD/tests, each as NAME or NAME:FILTER, with a Catch filter without spaces:
#             TESTS="gpu_ops gpu_flat_optimizer:*scan*,LAMB*" (default: those that launch libddp's kernels)
#   RANKS     number of ranks (default: 1)
#   KERNELS   part of the mangled names of the kernels to check (default: 3ddp, libddp's own). Empty: all, which takes
#             longest. racecheck checks all by default, because it often fails if it leaves out kernels of cuBLASLt and
#             cuDNN
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
answer_help "$@"
cd "$DDP_ROOT"
build=${BUILD:-$DDP_BUILD}
tools=("$@")
[ $# -gt 0 ] || tools=(memcheck)
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
[ -x "$sanitizer" ] || die "compute-sanitizer was not found: it is part of the CUDA toolkit (put its bin/ on PATH)"
[ "$(num_gpus)" -gt 0 ] || die "no GPU was found"
grep -qix 'CUDA=TRUE' "$build/ddp_parts.txt" 2>/dev/null ||
  die "$build was built without CUDA parts: $(sed -n 's/^NO_CUDA=//p' "$build/ddp_parts.txt" 2>/dev/null)"

export OMP_NUM_THREADS=1 NCCL_NVLS_ENABLE=0 DDP_TEST_DEVICE=cuda
# Under racecheck, timing algorithms takes most of the time. Programs with tests/gpu/deterministic_run.cpp then skip it.
deterministic=(DDP_TEST_DETERMINISTIC=1 CUBLAS_WORKSPACE_CONFIG=:4096:8)
# NCCL and cuBLAS ask for features that may be missing. The errors that CUDA then returns are not bugs.
options=(--error-exitcode 99 --report-api-errors no --target-processes all)
failed=0

# only_others_race LOG: whether the tests passed and racecheck reports hazards only in kernels that are not libddp's.
# racecheck does not understand all barriers in cuBLASLt's and cuDNN's kernels for Hopper.
only_others_race() {
  grep -q 'RACECHECK SUMMARY' "$1" && grep -q 'All tests passed' "$1" && grep -q 'Race reported' "$1" &&
    ! grep -E 'Race reported|access (at|by) ' "$1" | grep -q 'ddp' && ! grep -q 'Internal Sanitizer Error' "$1"
}

# The cases of each program that launch libddp's kernels. Long trainings, cases that measure times, and LibTorch's
# matrix products (which a sanitizer slows most) are left out.
read -ra tests <<<"${TESTS:-gpu_batch_norm gpu_optim gpu_device_images gpu_jpeg_loader \
  gpu_ops:*address,*slot*,*NaN*,*digits*,*logit*,*expanded*,*float64* \
  gpu_convolution:space*,*stem*,cross*,pooled* gpu_flat_optimizer:*captured*,*without*,*scan*,Averages*,LAMB* \
  gpu_side_streams:*filters* gpu_reducer_graph:*captured* gpu_nccl_communicator gpu_graphed_step:*memsets* \
  reduce:SyncBatchNorm*}"
for test in "${tests[@]}"; do
  name=${test%%:*}
  filter=()
  [ "$test" = "$name" ] || filter=("${test#*:}")
  program=$(find "$build/tests" -type f -name "$name" -perm -u+x | head -n 1)
  [ -n "$program" ] || die "$name is not built: ./test.sh -N builds all tests"
  [ -z "${KERNELS:-}" ] || grep -qaF "$KERNELS" "$build"/lib/libddp*.so "$program" ||
    die "KERNELS=$KERNELS: no kernel name in $name contains this, so nothing would be checked"
  for tool in "${tools[@]}"; do
    started=$SECONDS code=0 kernels=${KERNELS-3ddp} settings=()
    [ "$tool" != racecheck ] || { kernels=${KERNELS-} settings=("${deterministic[@]}"); }
    log=$build/sanitizer_${test//[^a-zA-Z0-9_]/_}_$tool.log
    env "${settings[@]}" "$build/tests/support/ddp_test_launch" --gpus --ranks "${RANKS:-1}" --timeout 580 --verbose -- \
      "$sanitizer" --tool "$tool" "${options[@]}" ${kernels:+--kernel-name "kns=$kernels"} "$program" "${filter[@]}" >"$log" 2>&1 || code=$?
    if [ $code = 0 ] && grep -q 'ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards' "$log"; then
      say "$test, $tool: clean ($((SECONDS - started)) s)"
    elif [ "$tool" = racecheck ] && only_others_race "$log"; then
      say "$test, $tool: no hazard in libddp's kernels, some in others ($((SECONDS - started)) s), see $log"
    else
      failed=1
      warn "$test, $tool: exit code $code, see $log"
      grep -m 8 -E '=========|FAILED|ddp_test_launch' "$log" >&2 || true
    fi
  done
done
exit $failed
