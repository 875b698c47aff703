#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs exported_ddp on the embedded archive and images, without Python. exported_ddp_test.py tests other data and losses.
#
# usage: exported_ddp_test.sh learns|resumes|refuses PROGRAM RANKS DATA
#   learns    the loss falls, each test image counts once, the trained weights are written and can be trained again
#   resumes   killed after a checkpoint and started again: the same bits as never interrupted, dropout and averages
#             included; the random states differ between the ranks
#   refuses   no archive, damaged ones, other sizes, fewer classes, wrong losses and outputs: clear errors
set -u
scenario=$1 program=$2 ranks=$3 data=$4
# shellcheck source=tests/distributed/trainer_test_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/trainer_test_lib.sh"
archive=$data/exported-sample/cifar_net.pt2

run() { # run LOG SETTING…
  local launch=() log=$1
  shift
  [ "$ranks" -gt 1 ] && launch=(mpirun -n "$ranks")
  exec "${launch[@]}" "$program" context.device=cpu model.path="$archive" data.path="$data/cifar10-sample" data.num_samples=163 \
    optimizer.momentum=0.9 lr_schedule.lr=0.05 loader.num_workers=1 loader.drop_last=true metrics.dir="$work/runs" \
    metrics.progress=plain "$@" > "$log" 2>&1
}

case $scenario in
  learns)
    (run "$work/1.log" train.max_steps=60 train.batch_size=$((32 / ranks)) train.mixup=0.1 train.label_smoothing=0.05 \
      train.max_grad_norm=1 model.ema_decay=0.5 optimizer.groups="*.bias,*bn* weight_decay=0" \
      model.save_weights="$work/trained.safetensors") || fail "exit code $?"
    loss_falls "$work/1.log" 0.95
    grep -q "^test accuracy .* of 163 images .*averages" "$work/1.log" || fail "not every test image was counted once"
    grep -qF "weights saved in $work/trained.safetensors (the averages)" "$work/1.log" || fail "the report does not name the weights"
    # The written weights are those that were evaluated.
    (run "$work/2.log" train.max_steps=1 train.eval_first=true model.weights="$work/trained.safetensors") || fail "exit code $?"
    averages=$(sed -n 's/^test accuracy .*(loss \([0-9.]*\)).*/\1/p' "$work/1.log")
    [ -n "$averages" ] || fail "no loss of the averages"
    grep -q "step 0/1 .*eval loss $averages" "$work/2.log" ||
      fail "other weights were written: $(grep 'eval loss' "$work/2.log" | head -n 1), not $averages"
    ;;
  resumes)
    common=(model.ema_decay=0.9 train.max_steps=16 train.batch_size=$((16 / ranks)) train.mixup=0.2 data.rand_augment_ops=1)
    # On one rank bf16 parameters, whose float32 masters are what is saved; on more with state in parts.
    [ "$ranks" = 1 ] && common+=(model.dtype=bf16) || common+=(optimizer.zero1=true)
    check_resumes "${common[@]}"
    ;;
  refuses)
    refusing=(train.max_steps=2)
    refused_early() { # refused_early CODE TEXT SETTING…
      refused "$@"
      ! grep -qE "failed at step|rank 0 at step" "$work/refused.log" || fail "with $*: refused after the start of the training"
    }
    refused_early 64 "model.path is empty; fix" model.path=
    refused_early 74 "cannot read $work/none.pt2" model.path="$work/none.pt2"
    head -c 100000 "$archive" > "$work/cut.pt2"
    refused_early 74 "$work/cut.pt2" model.path="$work/cut.pt2"
    refused_early 64 "the size is 48, and the export allows only 32" data.image_size=48
    refused_early 64 "the size is 1, and the export allows only 3" data.channels=1
    refused_early 64 "data.image_size and data.channels set the shape of images" data.channels=1
    ! { (run "$work/refused.log" model.loss=in_graph); grep -q "set the shape of images" "$work/refused.log"; } ||
      fail "a number of arguments has the hint about shapes"
    refused_early 65 "the data has 11 classes, but the output of model.path has 10" data.num_classes=11
    refused_early 64 "model.output=1 does not exist; the program returns: 0" model.output=1
    refused_early 64 "model.loss=mse needs the targets of a file" model.loss=mse
    refused_early 64 "model.loss" model.loss=hinge
    refused_early 64 "the exported module takes 1 arguments (images), not 2" model.loss=in_graph
    refused_early 64 "cannot load $work/none.so" model.libraries="$work/none.so"
    refused_early 64 "takes no parameter" optimizer.groups="heads.* weight_decay=0"
    refused_early 73 "$work/none does not exist; fix: create it" model.save_weights="$work/none/trained.safetensors"
    refused_early 64 "is a folder; fix: name a file in it" model.save_weights="$work"
    cp "$archive" "$work/own.pt2"
    refused_early 64 "is the archive of model.path" model.path="$work/own.pt2" model.save_weights="$work/own.pt2"
    cmp -s "$archive" "$work/own.pt2" || fail "the archive was replaced"
    refused_early 73 "lora.save_dir=$work/own.pt2/adapter" lora.rank=2 lora.save_dir="$work/own.pt2/adapter"
    refused_early 70 "unexpected" model.weights="$data/chat-sample/vocabulary.safetensors"
    ;;
  *) fail "unknown scenario $scenario" ;;
esac
