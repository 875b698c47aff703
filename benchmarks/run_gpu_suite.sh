#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs GPUs, in calls of at most BUDGET seconds each: GPU tests, the speed tables against
# PyTorch in interleaved rounds, CIFAR-10 accuracies.
#
# usage: benchmarks/run_gpu_suite.sh [SECTION…]
#   images (the default) = tests wrapper speed all_reduce cifar10; by itself: cifar10_pytorch
#   lm = lm_tests lora lora_checkpointing gpt2, on one GPU; by themselves: gpt2_vocabulary (50257 words, not
#        padded), lm_scaling (weak scaling from one GPU to all), lm_scaling_peers (the same with PyTorch beside),
#        weights (15.2 GB of safetensors to 1, 2, … GPUs)
#   BUILD    build folder (default: build)
#   OUT      where full logs go (default: runs/gpu_suite)
#   CIFAR10  folder with data_batch_1.bin …; without it cifar10 is left out
#   WEIGHTS  folder for the 15.2 GB that the section weights makes (default: /tmp/ddp_weights_15gb)
#   MAX_GPUS use at most so many
#   BUDGET   seconds a call may take (default: 530); what does not fit is left out, and named
for section in "$@"; do
  case $section in
    images | tests | wrapper | speed | all_reduce | cifar10 | cifar10_pytorch) ;;
    lm | lm_tests | lora | lora_checkpointing | gpt2 | gpt2_vocabulary | lm_scaling | lm_scaling_peers | weights) ;;
    -h | --help) sed -n '3,17s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "error: there is no section $section; the first lines of $0 name them" >&2; exit 64 ;;
  esac
done
set -u -o pipefail  # a failure in front of `| tee` counts
root=$(CDPATH="" cd -- "$(dirname "$0")/.." && pwd)
cd "$root" || exit 1
build=$(cd "${BUILD:-build}" && pwd) || exit 1
out=${OUT:-$root/runs/gpu_suite}
mkdir -p "$out"
sections=" ${*:-images} "
sections=${sections/ images / tests wrapper speed all_reduce cifar10 }
sections=${sections/ lm / lm_tests lora lora_checkpointing gpt2 }
gpus=$(nvidia-smi -L | wc -l)
[ "$gpus" -gt "${MAX_GPUS:-8}" ] && gpus=${MAX_GPUS:-8}
site=$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))') || exit 1
export LD_LIBRARY_PATH=$site/torch/lib:$site/nvidia/cu13/lib:$site/nvidia/nccl/lib:$site/nvidia/cudnn/lib:$build/lib:${LD_LIBRARY_PATH:-}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 OMP_NUM_THREADS=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
failed=0
begin=$SECONDS

wants() { [[ "$sections" == *" $1 "* ]]; }
left() { echo $((${BUDGET:-530} - (SECONDS - begin))); }  # seconds of the budget that remain
title() { echo; echo "== $1 ($((SECONDS - begin)) s)"; }
bounded() {  # bounded SECONDS COMMAND…: never beyond the budget
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
    bounded 90 "$build/benchmarks/bench_resnet" $case ops=plain optimizer=list rounds=7 wrap=compare | tee -a "$out/wrapper.jsonl" || failed=1
  done
  python3 - "$out/wrapper.jsonl" << 'PYTHON' || failed=1
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
for wrapped, plain in zip(rows[::2], rows[1::2]):
    print(f"{wrapped['model']}: wrapped / plain = {wrapped['ms'] / plain['ms']:.4f}")
PYTHON
fi

if wants speed; then
  title "training steps against PyTorch"
  chosen=$(worlds | paste -sd,)
  bounded 450 python3 benchmarks/compare_pytorch "$build" "$out/compare" --gpus "$chosen" \
    --rows resnet50,resnet18_512,resnet18_128,resnet18_64,resnet18_strong,resnet18_3x3 || failed=1
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

compare_lm() {  # compare_lm LIMIT NAME CASE…: results in $out/NAME
  local limit=$1 name=$2
  shift 2
  bounded "$limit" python3 benchmarks/compare.py "$build/benchmarks/bench_lm" "$out/$name" "$@" || failed=1
}
# 7B beside 7B: each gives its memory back while the other measures.
lora=release_memory=true,lead_in=1,steps=6,warmup=3
gpt2=steps=40,warmup=10
padded=pytorch.vocab_size=50304

if wants lm_tests; then
  title "GPU tests of the language models"
  bounded 180 "$build/tests/gpu/gpu_lm" --durations yes > "$out/gpu_lm.log" 2>&1 || { failed=1; grep -B12 -A12 FAILED "$out/gpu_lm.log" | head -120; }
  tail -3 "$out/gpu_lm.log"
fi

if wants lora; then
  title "Qwen2-7B LoRA against transformers and PEFT, 2 x 4096"
  compare_lm 200 lora "qwen2-7b:4096:2:1,$lora"
fi

if wants lora_checkpointing; then
  title "the same, every layer checkpointed"
  compare_lm 200 lora_checkpointing "qwen2-7b:4096:2:1,$lora,checkpoint_every=1"
fi

if wants gpt2; then
  title "GPT-2 against transformers, 16 x 1024, its vocabulary padded: eager, then torch.compile"
  compare_lm 260 gpt2 "gpt2:1024:16:1,$gpt2,$padded" "gpt2:1024:16:1,$gpt2,$padded,pytorch.compile=true"
fi

if wants gpt2_vocabulary; then
  title "GPT-2 against transformers with 50257 words, eager, then torch.compile; with dropout 0.1, padded"
  compare_lm 400 gpt2_vocabulary "gpt2:1024:16:1,$gpt2" "gpt2:1024:16:1,$gpt2,pytorch.compile=true" \
    "gpt2:1024:16:1,$gpt2,$padded,dropout=0.1"
fi

if wants lm_scaling; then
  title "weak scaling: libddp alone"
  rm -f "$out/lm_scaling.jsonl"
  for settings in "model=qwen2-7b seq_len=4096 batch_size=2 steps=6 rounds=5 bucket_cap_mb=400" "model=gpt2 seq_len=1024 batch_size=16 steps=40 rounds=5 bucket_cap_mb=100" \
    "model=gpt2 seq_len=1024 batch_size=16 steps=40 rounds=5 bucket_cap_mb=100 param_dtype=bf16 fp32_grads=false"; do
    for n in $(worlds); do
      # shellcheck disable=SC2086
      bounded 120 launch "$n" "$build/benchmarks/bench_lm" $settings | sed "s/^{/{\"settings\": \"$settings\", /" | tee -a "$out/lm_scaling.jsonl" || failed=1
    done
  done
  python3 - "$out/lm_scaling.jsonl" << 'PYTHON' || failed=1
import json, sys
first = {}
for row in map(json.loads, open(sys.argv[1])):
    rate = row["tokens_s"] / row["world"]
    print(f"{row['settings']}: {row['world']} GPUs, {row['ms']:.2f} ms, {rate:.0f} tokens/s a GPU, "
          f"efficiency {rate / first.setdefault(row['settings'], rate):.4f}")
PYTHON
fi

if wants lm_scaling_peers; then
  title "weak scaling beside PyTorch"
  cases=()
  for n in $(worlds); do
    cases+=("qwen2-7b:4096:$((2 * n)):$n,$lora" "gpt2:1024:$((16 * n)):$n,$gpt2,$padded")
  done
  compare_lm "${BUDGET:-530}" lm_scaling_peers "${cases[@]}"
fi

if wants weights; then
  title "15.2 GB of safetensors from the page cache to the GPUs"
  weights=${WEIGHTS:-/tmp/ddp_weights_15gb}
  [ -d "$weights" ] || bounded 240 "$build/benchmarks/bench_weights" --make 15.2 "$weights" || failed=1
  for n in $(worlds); do
    echo "$n GPU(s)"
    bounded 90 launch "$n" "$build/benchmarks/bench_weights" "$weights" 2>&1 | tee "$out/weights_$n.log" || failed=1
  done
fi

title "done, logs in $out"
exit $failed
