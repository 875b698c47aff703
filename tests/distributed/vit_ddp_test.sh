#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs vit_ddp as a user does and looks at what it prints. resnet_ddp_test.sh tests what both trainers share.
#
# usage: vit_ddp_test.sh learns|curve|uses|resumes|refuses PROGRAM RANKS DATA
#   learns    with dropout, stochastic depth, mixup, CutMix, RandAugment and an average of the weights the loss falls
#   curve     1, 2 and 4 ranks (RANKS: the largest), accumulation, uneven shares: the loss curve of one process
#   uses      run.mode=evaluate and run.mode=classify agree with the training that saved, also by model.weights
#   resumes   killed after a checkpoint and started again: the same bits as never interrupted, random branches and
#             augmentation included; the random states differ between the ranks
#   refuses   patches that do not divide the image, unknown names, contradicting dtypes, a checkpoint of other patches,
#             weights of another number of classes
set -u
scenario=$1 program=$2 ranks=$3 data=$4
# shellcheck source=tests/distributed/trainer_test_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/trainer_test_lib.sh"

run_on() { # run_on RANKS LOG SETTING…
  local launch=() number=$1 log=$2
  shift 2
  [ "$number" -gt 1 ] && launch=(mpirun -n "$number")
  exec "${launch[@]}" "$program" data.path="$data" data.num_samples=163 model.name=vit_ti_16 model.patch_size=16 \
    optimizer.type=adamw optimizer.weight_decay=0.05 lr_schedule.lr=0.0005 loader.num_workers=1 loader.drop_last=true \
    metrics.dir="$work/runs" metrics.progress=plain "$@" > "$log" 2>&1
}
run() { run_on "$ranks" "$@"; }

regularised=(model.dropout=0.1 model.stochastic_depth=0.2)

case $scenario in
  learns)
    (run "$work/1.log" "${regularised[@]}" train.max_steps=50 train.batch_size=$((32 / ranks)) train.mixup=0.1 \
      train.cutmix=0.1 data.rand_augment_ops=1 train.label_smoothing=0.05 train.max_grad_norm=1 model.ema_decay=0.5) || fail "exit code $?"
    loss_falls "$work/1.log" 0.97
    grep -q "^test accuracy .* of 163 images" "$work/1.log" || fail "not every test image was counted once"
    [ -n "$(hash_of "$work/1.log")" ] || fail "no hash of the parameters"
    ;;
  curve)
    # Twelve images a step: at once, in two micro-batches, on two ranks, on four ranks that share six as 2, 2, 1 and 1.
    # Sums are taken in another order (fp32): 1e-5 of the loss. 144 images make equal epochs of all of these.
    common=(data.augment=none data.num_samples=144 train.max_steps=15 train.eval_every=0 metrics.log_every=1)
    for one in "1 12 1" "1 6 2" "2 12 1" "2 6 2" "4 6 2"; do
      read -r number batch accum <<< "$one"
      [ "$number" -le "$ranks" ] || continue
      name=r${number}_${batch}x$accum
      (run_on "$number" "$work/$name.log" "${common[@]}" loader.global_batch_size="$batch" \
        train.grad_accum_steps="$accum" metrics.run_name="$name") || fail "exit code $? on $number ranks"
      same_curve r1_12x1 "$name" steps.csv "NR != 16"
    done
    ;;
  uses)
    check_use train.max_steps=8 train.batch_size=$((32 / ranks))
    weights=$(find "$work/checkpoints" -name model.safetensors)
    (run "$work/saved.log" data.num_samples=0 data.image_size=16 checkpoint.dir="$work/checkpoints" run.mode=evaluate) || fail "exit code $?"
    (run "$work/file.log" data.num_samples=0 data.image_size=16 model.weights="$weights" run.mode=evaluate) || fail "exit code $?"
    cmp <(grep "^test accuracy" "$work/saved.log") <(grep "^test accuracy" "$work/file.log") || fail "other weights than the file's"
    grep -q "^evaluated  *$weights$" "$work/file.log" || fail "the file is not named"
    ;;
  resumes)
    common=("${regularised[@]}" model.ema_decay=0.9 train.max_steps=16 train.batch_size=$((16 / ranks)) train.mixup=0.2
      train.cutmix=1 data.rand_augment_ops=2)
    # On one rank bf16 parameters, whose float32 masters are what is saved.
    [ "$ranks" = 1 ] && common+=(model.dtype=bf16)
    check_resumes "${common[@]}"
    ;;
  refuses)
    refusing=(train.max_steps=1)
    refused 64 "patches of 5 pixels do not divide images of 32; fix: set model.patch_size to a divisor of 32" model.patch_size=5
    refused 64 "model.name" model.name=vit_h_14
    refused 64 "model.dropout" model.dropout=1
    refused 64 "model.stem" model.stem=cifar
    refused 64 "model.dtype=bf16 contradicts amp.dtype=fp16" model.dtype=bf16 amp.dtype=fp16
    # A checkpoint of other patches is another model.
    (run "$work/1.log" train.max_steps=1 checkpoint.dir="$work/checkpoints") || fail "exit code $?"
    (run "$work/2.log" train.max_steps=2 checkpoint.dir="$work/checkpoints" model.patch_size=8)
    code=$?
    grep -o "conv_proj.weight.*" "$work/2.log" | head -n 1
    { [ $code != 0 ] && grep -q "conv_proj.weight" "$work/2.log"; } || fail "exit code $code with other patches, and no name"
    weights=$(find "$work/checkpoints" -name model.safetensors | head -n 1)
    (run "$work/3.log" train.max_steps=1 model.weights="$weights") || fail "exit code $? with weights of its own classes"
    refused 70 "heads.head.bias: [11] in the module, [10] in the file" data.num_classes=11 model.weights="$weights"
    ;;
  *) fail "unknown scenario $scenario" ;;
esac
