#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs GPUs, in one call of at most nine minutes: GPU tests, the speed table against
# PyTorch in interleaved rounds, CIFAR-10 accuracies.
#
# usage: benchmarks/run_gpu_suite.sh [tests] [wrapper] [speed] [all_reduce] [cifar10] [cifar10_pytorch]
#        (default: all but cifar10_pytorch)
#   BUILD    build folder (default: build)
#   OUT      where full logs go (default: runs/gpu_suite)
#   CIFAR10  folder with data_batch_1.bin …; without it cifar10 is left out
#   MAX_GPUS use at most so many
set -u -o pipefail  # a failure in front of `| tee` counts
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root" || exit 1
build=$(cd "${BUILD:-build}" && pwd) || exit 1
out=${OUT:-$root/runs/gpu_suite}
mkdir -p "$out"
sections=${*:-tests wrapper speed all_reduce cifar10}
gpus=$(nvidia-smi -L | wc -l)
[ "$gpus" -gt "${MAX_GPUS:-8}" ] && gpus=${MAX_GPUS:-8}
site=$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))') || exit 1
export LD_LIBRARY_PATH=$site/torch/lib:$site/nvidia/cu13/lib:$site/nvidia/nccl/lib:$site/nvidia/cudnn/lib:$build/lib:${LD_LIBRARY_PATH:-}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
failed=0
begin=$SECONDS

wants() { [[ " $sections " == *" $1 "* ]]; }
left() { echo $((530 - (SECONDS - begin))); }  # seconds of the nine minutes that remain
title() { echo; echo "== $1 ($((SECONDS - begin)) s)"; }
bounded() {  # bounded SECONDS COMMAND…: never beyond the nine minutes
  local limit=$1 rest
  shift
  rest=$(left)
  [ "$limit" -gt "$rest" ] && limit=$rest
  [ "$limit" -lt 10 ] && { echo "no time left for: $*"; return 124; }
  if [ "$(type -t "$1")" = function ]; then  # timeout starts programs only
    set -- bash -c "$(declare -f "$1")"'; "$@"' bash "$@"
  fi
  timeout -k 5 "$limit" "$@"
}
worlds() { for n in 1 2 4 8; do [ "$n" -le "$gpus" ] && echo "$n"; done; }
launch() { local n=$1; shift; if [ "$n" = 1 ]; then "$@"; else torchrun --standalone --nproc-per-node="$n" --no-python "$@"; fi; }

nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,power.limit --format=csv | tee "$out/gpus.csv"

if wants tests; then
  title "GPU tests"
  bounded 200 env DDP_REQUIRE_GPUS="$gpus" ctest --test-dir "$build" -L gpu --output-on-failure -j 1 > "$out/ctest_gpu.log" 2>&1 || failed=1
  grep -E "tests passed|Failed|Timeout|Not Run" "$out/ctest_gpu.log" | head -30
fi

if wants wrapper; then
  title "the DDP wrapper at world 1 against the plain loop, one process, interleaved rounds"
  for case in "model=resnet50 image_size=224 batch_size=256 steps=15" "model=resnet18 image_size=32 batch_size=512 steps=60 num_classes=10"; do
    # shellcheck disable=SC2086
    bounded 90 "$build/benchmarks/bench_resnet" $case rounds=7 wrap=compare | tee -a "$out/wrapper.jsonl" || failed=1
  done
  python3 - "$out/wrapper.jsonl" << 'PYTHON' || failed=1
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
for wrapped, plain in zip(rows[::2], rows[1::2]):
    print(f"{wrapped['model']}: wrapped / plain = {wrapped['ms'] / plain['ms']:.4f}")
PYTHON
fi

if wants speed; then
  title "against PyTorch"
  cases=()
  for n in $(worlds); do
    cases+=("resnet50:224:$((256 * n)):$n" "resnet18:32:512:$n,num_classes=10,steps=60,warmup=30")
  done
  bounded 330 python3 benchmarks/compare_resnet.py "$build/benchmarks/bench_resnet" "$out/speed" "${cases[@]}" || failed=1
fi

if wants all_reduce && [ -x "$build/benchmarks/bench_all_reduce" ] && [ "$gpus" -gt 1 ]; then
  title "all-reduce against nccl's own loop"
  bounded 90 launch "$gpus" "$build/benchmarks/bench_all_reduce" 2>&1 | tee "$out/all_reduce.log" || failed=1
fi

if wants cifar10 && [ -n "${CIFAR10:-}" ]; then
  title "CIFAR-10 accuracy"
  for stem in cifar imagenet; do
    for n in $(worlds | head -2); do
      [ "$n" = 2 ] && [ "$stem" = imagenet ] && continue
      log=$out/cifar10_${stem}_$n.log
      bounded 150 launch "$n" "$build/examples/resnet_ddp" --config "examples/configs/cifar10_resnet18_${stem}_stem.yaml" \
        data.path="$CIFAR10" train.batch_size=$((512 / n)) metrics.dir="$out/runs" \
        metrics.run_name="cifar10_${stem}_$n" checkpoint.dir= > "$log" 2>&1 || { failed=1; tail -5 "$log"; }
      echo "stem $stem, $n GPU(s): $(grep -E 'test accuracy|images/s' "$log" | tail -3 | tr '\n' ' ')"
    done
  done
fi

if wants cifar10_pytorch && [ -n "${CIFAR10:-}" ]; then
  title "CIFAR-10 accuracy, PyTorch with the same recipe"
  bounded 120 python3 benchmarks/pytorch_resnet.py model=resnet18 cifar10="$CIFAR10" stem=cifar batch_size=512 | tee "$out/cifar10_pytorch.jsonl"
  bounded 120 python3 benchmarks/pytorch_resnet.py model=resnet18 cifar10="$CIFAR10" stem=imagenet batch_size=512 | tee -a "$out/cifar10_pytorch.jsonl"
fi

title "done, logs in $out"
exit $failed
