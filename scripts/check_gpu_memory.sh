#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# compute-sanitizer over the GPU tests of kernels: check_gpu_memory.sh [tool …]
#   tools     memcheck (default), racecheck, synccheck, initcheck
#   BUILD     build folder (default: build)
#   TESTS     programs below BUILD/tests (default: those whose kernels are ours), each alone or as NAME:FILTER, with a Catch
#             filter without spaces: TESTS="gpu_ops gpu_flat_optimizer:*scan*,LAMB*"
#   RANKS     how many (default: 1): RANKS=2 TESTS=gpu_nccl_algorithm:sums* for the kernel behind a mean of several ranks
#   KERNELS   part of the mangled names of the kernels that are checked (default: 3ddp, our own; racecheck: all, for it
#             often fails by itself where it leaves out kernels of cuBLASLt and cuDNN); empty: all, which take longest
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$DDP_ROOT"
build=${BUILD:-$DDP_BUILD}
tools=("$@")
[ $# -gt 0 ] || tools=(memcheck)
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
[ -x "$sanitizer" ] || die "compute-sanitizer is not installed: it comes with the CUDA toolkit (put its bin/ on PATH)"
[ "$(num_gpus)" -gt 0 ] || die "no GPU was found"
grep -qix 'CUDA=TRUE' "$build/ddp_parts.txt" 2>/dev/null ||
  die "$build was built without CUDA parts: $(sed -n 's/^NO_CUDA=//p' "$build/ddp_parts.txt" 2>/dev/null)"

export OMP_NUM_THREADS=1 NCCL_NVLS_ENABLE=0 DDP_TEST_DEVICE=cuda
# Under racecheck programs with tests/gpu/deterministic_run.cpp choose no algorithm by time, which takes most of it.
deterministic=(DDP_TEST_DETERMINISTIC=1 CUBLAS_WORKSPACE_CONFIG=:4096:8)
# Errors that CUDA reports on purpose (NCCL and cuBLAS ask for what may be missing) are not bugs.
options=(--error-exitcode 99 --report-api-errors no --target-processes all)
failed=0

# Whether a racecheck's LOG is of tests that pass and has hazards in kernels of others alone: racecheck does not follow all of
# the barriers that cuBLASLt's and cuDNN's kernels for Hopper wait at.
only_others_race() {
  grep -q 'RACECHECK SUMMARY' "$1" && grep -q 'All tests passed' "$1" && grep -q 'Race reported' "$1" &&
    ! grep -E 'Race reported|access (at|by) ' "$1" | grep -q 'ddp' && ! grep -q 'Internal Sanitizer Error' "$1"
}

# Of each program the cases that launch our kernels; long trainings, those that measure times, and products
# of LibTorch that a sanitizer slows most are left out.
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
    die "KERNELS=$KERNELS: no kernel of $name matches, so nothing would be checked"
  for tool in "${tools[@]}"; do
    started=$SECONDS code=0 kernels=${KERNELS-3ddp} settings=()
    [ "$tool" != racecheck ] || { kernels=${KERNELS-} settings=("${deterministic[@]}"); }
    log=$build/sanitizer_${test//[^a-zA-Z0-9_]/_}_$tool.log
    env "${settings[@]}" "$build/tests/support/ddp_test_launch" --gpus --ranks "${RANKS:-1}" --timeout 580 --verbose -- \
      "$sanitizer" --tool "$tool" "${options[@]}" ${kernels:+--kernel-name "kns=$kernels"} "$program" "${filter[@]}" >"$log" 2>&1 || code=$?
    if [ $code = 0 ] && grep -q 'ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards' "$log"; then
      say "$test, $tool: clean ($((SECONDS - started)) s)"
    elif [ "$tool" = racecheck ] && only_others_race "$log"; then
      say "$test, $tool: no hazard in our kernels, some in other libraries' ($((SECONDS - started)) s), see $log"
    else
      failed=1
      warn "$test, $tool: exit code $code, see $log"
      grep -m 8 -E '=========|FAILED|ddp_test_launch' "$log" >&2 || true
    fi
  done
done
exit $failed
