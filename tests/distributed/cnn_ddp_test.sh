#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs cnn_ddp as a user does and looks at what it prints.
#
# usage: cnn_ddp_test.sh learns|kinds|curve|resumes|refuses PROGRAM RANKS SOURCES
#   learns    the shipped configuration: far better than chance, each waveform of the evaluation counts once, --summary
#   kinds     bf16 autocast, a regression, images, volumes and integers of a digitizer: the loss falls
#   curve     1, 2 and 4 ranks (RANKS: the largest), accumulation, uneven shares: the loss curve of one process
#   resumes   killed after a checkpoint and started again: the same bits as never interrupted, dropout and averages
#             included; the random states differ between the ranks
#   refuses   settings that have no effect, data that does not fit, the embedded sample made by another script
set -u
scenario=$1 program=$2 ranks=$3 sources=$4
# shellcheck source=tests/distributed/trainer_test_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/trainer_test_lib.sh"
sample=$sources/data/waveform-sample/waveforms.safetensors

run_on() { # run_on RANKS LOG SETTING…
  local launch=() number=$1 log=$2
  shift 2
  [ "$number" -gt 1 ] && launch=(mpirun -n "$number")
  exec "${launch[@]}" "$program" context.device=cpu metrics.dir="$work/runs" metrics.progress=plain "$@" > "$log" 2>&1
}
run() { run_on "$ranks" "$@"; }

as_shape() { # as_shape FILE SHAPE: the sample with SHAPE, which has as many characters as that of the waveforms
  LC_ALL=C sed "1s/\"shape\": \[960, 1, 96\]/\"shape\":$2/" "$sample" > "$1"
  cmp -s "$1" "$sample" && fail "the sample has another shape"
  [ "$(stat -c %s "$1")" = "$(stat -c %s "$sample")" ] || fail "$2 has another length"
}

case $scenario in
  learns)
    # From a folder without data/: the program finds the sample by itself.
    cd "$work" || exit 1
    (run "$work/1.log" --config "$sources/examples/configs/cnn_sample.yaml" checkpoint.dir= --summary) || fail "exit code $?"
    loss_falls "$work/1.log" 0.3
    grep "^test accuracy .* of 160 samples" "$work/1.log" | awk '{ exit !($3 > 85) }' || fail "no accuracy above 85 %"
    grep -qF "800 training and 160 evaluation samples; waveform [1, 96] to 4 outputs" "$work/1.log" || fail "no line of the data"
    grep -qE "conv3 .*\[64, 32, 5\]" "$work/1.log" || fail "no summary of the network"
    ;;
  kinds)
    common=(train.batch_size=16 train.epochs=4 optimizer.type=adamw lr_schedule.lr=0.01)
    (run "$work/bf16.log" "${common[@]}" amp.dtype=bf16 model.sync_batch_norm=true) || fail "exit code $? in bf16"
    loss_falls "$work/bf16.log" 0.6
    (run "$work/mse.log" "${common[@]}" model.loss=mse checkpoint.keep_best=min) || fail "exit code $? of the regression"
    loss_falls "$work/mse.log" 0.6
    grep -qE "^test loss +[0-9.]+ of 160 samples" "$work/mse.log" || fail "no test loss"
    ! grep -q "^test accuracy" "$work/mse.log" || fail "a regression has an accuracy"
    # Rows of 8 and slices of 24 positions of the same numbers.
    as_shape "$work/images.safetensors" "[960,1, 8,12]"
    as_shape "$work/volumes.safetensors" "[960,1,4,4,6]"
    for kind in images volumes; do
      (run "$work/$kind.log" "${common[@]}" tensors.path="$work/$kind.safetensors") || fail "exit code $? with $kind"
      loss_falls "$work/$kind.log" 0.9
    done
    LC_ALL=C sed '1s/"F16"/"I16"/' "$sample" > "$work/counts.safetensors"
    (run "$work/counts.log" "${common[@]}" tensors.path="$work/counts.safetensors") || fail "exit code $? with integers"
    loss_falls "$work/counts.log" 0.9
    ;;
  curve)
    # Twelve waveforms a step: at once, in two micro-batches, on two ranks, on four ranks that share six as 2, 2, 1 and 1.
    # Statistics of all ranks make the batch norms equal. Sums are taken in another order (fp32): 1e-5 of the loss.
    common=(model.sync_batch_norm=true tensors.eval_rows=168 train.max_steps=15 train.eval_every=0 metrics.log_every=1
      optimizer.momentum=0.9 lr_schedule.lr=0.02)
    for one in "1 12 1" "2 12 1" "4 12 1" "1 6 2" "2 6 2" "4 6 2"; do
      read -r number batch accum <<< "$one"
      [ "$number" -le "$ranks" ] || continue
      name=r${number}_${batch}x$accum
      (run_on "$number" "$work/$name.log" "${common[@]}" loader.global_batch_size="$batch" \
        train.grad_accum_steps="$accum" metrics.run_name="$name") || fail "exit code $? on $number ranks"
      # Micro-batches have statistics of their own, so they are compared with those of one process.
      same_curve "r1_${batch}x$accum" "$name" steps.csv "NR != 16"
    done
    ;;
  resumes)
    check_resumes model.dropout=0.2 model.ema_decay=0.9 train.max_steps=400 train.batch_size=$((16 / ranks)) \
      train.eval_every_steps=400 optimizer.momentum=0.9 lr_schedule.lr=0.02
    ;;
  refuses)
    refusing=(train.max_steps=1)
    refused 64 "model.loss" model.loss=in_graph
    refused 64 "train.mixup" train.mixup=0.2
    refused 64 "data.path" data.path=.
    refused 64 "train.label_smoothing=0.1 has no effect with model.loss=mse" train.label_smoothing=0.1 model.loss=mse
    refused 64 "checkpoint.keep_best=max is for an accuracy, which model.loss=mse" checkpoint.keep_best=max model.loss=mse
    refused 64 "halve a sample of shape [1, 96] 7 times" model.channels=[4,4,4,4,4,4,4,4]
    refused 64 "tensors.eval_rows=960 of 960 rows" tensors.eval_rows=960
    refused 65 "lacks the target label; it has: target, waveform" tensors.target=label
    as_shape "$work/flat.safetensors" "[960, 96]    "
    refused 65 "a sample of waveform has the shape [96]" tensors.path="$work/flat.safetensors"
    "$sources/data/waveform-sample/make_waveforms.py" "$work/again.safetensors" || fail "exit code $? of the script"
    cmp "$work/again.safetensors" "$sample" || fail "make_waveforms.py makes another sample"
    ;;
  *) fail "unknown scenario $scenario" ;;
esac
