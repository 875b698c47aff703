#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs the trainer as a user does and looks at what it prints.
#
# usage: resnet_ddp_test.sh learns|mnist|small|uses|resumes|stops|evaluates|averages|accumulates|finishes|refuses|unsaved|skips|diverges|protects PROGRAM RANKS DATA
#   learns    20 steps lower the loss, all ranks end with the same parameters
#   mnist     files in MNIST's format, one channel: the loss falls
#   small     model.name=simple_cnn with SyncBatchNorm, NHWC, bf16 and EMA: the loss falls
#   uses      run.mode=evaluate and run.mode=classify agree with the training that saved; users' mistakes are refused
#   resumes   killed after a checkpoint and started again: the same bits as never interrupted
#   stops     SIGTERM: saved, exit code 75, resumed to the same bits
#   evaluates  SIGTERM during an evaluation: the last step is saved, 75; the resumed run repeats the evaluation, to the same bits
#   averages  averages of weights and buffers are evaluated, saved as the best, and evaluated again; the other weights are refused
#   accumulates  three micro-batches (an epoch's last step has fewer), mixup, label smoothing, clipping
#                and EMA together
#   finishes  a checkpoint with its metric after each epoch's test, and a finished run that is started again says so and saves nothing
#   refuses   resuming with another global batch; ranks with different numbers of batches
#   unsaved   the last save fails, for no file may be as large as the model: 73, and no checkpoint is claimed
#   skips     a corrupt image is replaced and reported at the end, once for all ranks
#   diverges  with train.non_finite=ignore one rank reports gradients that are not finite, with the first parameter's name
#   protects  a run that diverges ends with 70, and keeps its finite checkpoint whatever train.non_finite is
# The data are 163 images: no number of ranks divides them, so padding and doubled images would be seen.
set -u
scenario=$1 program=$2 ranks=$3 data=$4
# shellcheck source=tests/distributed/trainer_test_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/trainer_test_lib.sh"

wrapper=() # before the program, on each rank
run_on() { # run_on RANKS LOG SETTING…
  local launch=() number=$1 log=$2
  shift 2
  [ "$number" -gt 1 ] && launch=(mpirun -n "$number")
  exec "${launch[@]}" "${wrapper[@]}" "$program" data.path="$data" data.num_samples=163 train.batch_size=$((32 / ranks)) \
    data.image_size=16 loader.drop_last=true loader.num_workers=1 optimizer.momentum=0.9 lr_schedule.lr=0.002 \
    metrics.dir="$work/runs" metrics.progress=plain "$@" > "$log" 2>&1
}
run() { run_on "$ranks" "$@"; }

case $scenario in
  learns)
    (run "$work/1.log" train.max_steps=20 ddp.desync_check_every=1) || fail "exit code $?"
    loss_falls "$work/1.log" 0.97
    [ -n "$(hash_of "$work/1.log")" ] || fail "no hash of the parameters"
    grep -q "^test accuracy .* of 163 images" "$work/1.log" || fail "not every test image was counted once"
    grep -E "^(test|images|parameters)" "$work/1.log"
    ;;
  mnist)
    data=$work/mnist
    mkdir "$data"
    for ((i = 0; i < 163; ++i)); do # images of one value, which is the label's
      head -c 784 /dev/zero | tr '\0' "\\$(printf %03o $((25 * (i % 10))))" >&3
      printf "\\$(printf %03o $((i % 10)))" >&4
    done 3> "$data/images" 4> "$data/labels"
    for split in train t10k; do
      { printf '\0\0\10\3\0\0\0\243\0\0\0\34\0\0\0\34' && cat "$data/images"; } | gzip > "$data/$split-images-idx3-ubyte.gz"
      { printf '\0\0\10\1\0\0\0\243' && cat "$data/labels"; } > "$data/$split-labels-idx1-ubyte"
    done
    (run "$work/1.log" train.max_steps=20 data.image_size=28) || fail "exit code $?"
    loss_falls "$work/1.log" 0.97
    grep -q "^test accuracy .* of 163 images" "$work/1.log" || fail "not every test image was counted once"
    ;;
  small)
    (run "$work/1.log" train.max_steps=20 lr_schedule.lr=0.02 model.name=simple_cnn model.sync_batch_norm=true \
      model.channels_last=true model.dtype=bf16 model.ema_decay=0.5) || fail "exit code $?"
    loss_falls "$work/1.log" 0.97
    grep -q "^test accuracy .* of 163 images .*, by the averages" "$work/1.log" || fail "no evaluation"
    [ -n "$(hash_of "$work/1.log")" ] || fail "no hash of the parameters"
    ;;
  uses)
    refusing=(model.name=simple_cnn data.image_size=16)
    check_use model.name=simple_cnn lr_schedule.lr=0.02 train.max_steps=20
    # No optimizer is made, and its settings are no mistake.
    images=("$work"/data/test/cat/*.jpg) saved=(data.num_samples=0 data.eval_resize=20 checkpoint.dir="$work/checkpoints")
    (run "$work/1.log" run.mode=classify "${images[0]}" --config "$(dirname "$0")/../../examples/configs/quickstart.yaml" \
      model.name=simple_cnn "${saved[@]}") || fail "exit code $? with a file of settings"
    grep -A 1 -F "${images[0]}" "$work/1.log" | grep -qE "^ +[0-9.]+ %  (cat|deer|ship)$" || fail "no class"
    grep -q "also has averaged weights" "$work/1.log" || fail "nothing is said of averages that are not used"
    printf 'no image' > "$work/text.jpg"
    refused 65 "$work/text.jpg at offset 0: not a JPEG" run.mode=classify "$work/text.jpg" data.corrupt=skip "${saved[@]}"
    [ "$ranks" = 1 ] || exit 0
    refused 64 "no image file is given; fix: name image files behind it" run.mode=classify "${saved[@]}"
    refused 64 "argument 'cat.jpg' is not key=value, and run.mode=train takes no image files; fix: set run.mode=classify" cat.jpg
    refused 64 "run.mode=evaluate takes no image files" run.mode=evaluate cat.jpg "${saved[@]}"
    refused 64 "there is no trained model: checkpoint.dir and model.weights are empty; fix: set checkpoint.dir" run.mode=evaluate
    refused 74 ": there is no checkpoint in checkpoint.dir=$work/none; fix: set the folder" run.mode=evaluate checkpoint.dir="$work/none"
    refused 65 "the image file cat.jpg does not exist; fix: check the path" run.mode=classify cat.jpg "${saved[@]}"
    refused 70 "fc.weight is saved with shape [3, 128] but has shape [4, 128] here" run.mode=evaluate data.num_classes=4 "${saved[@]}"
    refused 64 "model.stem is set, but model.name=simple_cnn has no such option" model.stem=cifar
    [ ! -e "$work/none" ] || fail "a folder was made"
    # Of more than 20 classes the three worst are shown. These have no names.
    many=(model.name=simple_cnn train.max_steps=3 data.format=synthetic data.num_classes=30 checkpoint.dir="$work/many")
    (run "$work/2.log" "${many[@]}") && (run "$work/3.log" "${many[@]}" run.mode=evaluate) || fail "exit code $?"
    shown=$(sed -n 's/^\(worst  *\| *\)\([0-9.]*\) % of [0-9]*  class [0-9]*$/\2/p' "$work/3.log")
    echo "worst classes:" "${shown//$'\n'/ }"
    { [ "$(wc -w <<< "$shown")" = 3 ] && [ "$shown" = "$(sort -n <<< "$shown")" ]; } || fail "not the three worst classes"
    ;;
  accumulates)
    # 11 batches: three steps of 3 and one of 2 an epoch.
    (run "$work/1.log" train.epochs=5 train.batch_size=$((16 / ranks)) train.grad_accum_steps=3 train.max_grad_norm=20 \
      loader.drop_last=false train.label_smoothing=0.05 train.mixup=0.1 model.ema_decay=0.5 model.channels_last=true \
      lr_schedule.lr=0.005 metrics.run_name=1) || fail "exit code $?"
    [ "$(tail -n 1 "$work/runs/1/steps.csv" | cut -d, -f1,2)" = 20,5 ] || fail "five epochs are not 20 steps"
    [ "$(wc -l < "$work/runs/1/epochs.csv")" = 6 ] || fail "not five rows of epochs"
    grep -q "^test accuracy .* of 163 images" "$work/1.log" || fail "not every test image was counted once"
    loss_falls "$work/1.log" 0.97
    [ -n "$(hash_of "$work/1.log")" ] || fail "no hash of the parameters"
    ;;
  finishes)
    saving=(train.epochs=3 checkpoint.dir="$work/checkpoints" checkpoint.keep_best=max)
    (run "$work/1.log" "${saving[@]}") || fail "exit code $?"
    ls "$work/checkpoints" > "$work/before.log"
    grep -q '\.' "$work/before.log" && fail "a step was saved twice"
    [ "$(grep -l '"metric"' "$work"/checkpoints/*/manifest.json | wc -l)" = 3 ] || fail "not every epoch's test was a checkpoint's metric"
    (run "$work/2.log" "${saving[@]}") || fail "exit code $? of the second start"
    ls "$work/checkpoints" > "$work/after.log"
    cmp "$work/before.log" "$work/after.log" || fail "the second start saved again"
    grep -q "^complete  *nothing was left to train; a larger train.epochs" "$work/2.log" || fail "the second start does not say that it is complete"
    grep -q "^complete" "$work/1.log" && fail "the first start says that nothing was left to train"
    grep -qi "nan" "$work/2.log" && fail "the second start prints nan"
    grep -q "^images/s" "$work/2.log" && fail "the second start prints a rate"
    [ "$(hash_of "$work/1.log")" = "$(hash_of "$work/2.log")" ] || fail "the parameters differ"
    [ "$(grep '^test accuracy' "$work/1.log")" = "$(grep '^test accuracy' "$work/2.log")" ] || fail "the test results differ"
    ;;
  diverges)
    (run "$work/1.log" train.max_steps=6 lr_schedule.lr=1e30 metrics.log_every=2 train.non_finite=ignore) || fail "exit code $?"
    grep "inf or NaN" "$work/1.log" > "$work/reported.log"
    cat "$work/reported.log"
    # Only logged steps are checked: the second, the fourth, the sixth.
    for steps in 2 4 6; do
      [ "$(grep -c "inf or NaN in the gradients of 1 step up to step $steps; the first such parameter in the last of them is conv1.weight; the updates were applied" \
        "$work/reported.log")" = 1 ] || fail "step $steps is not reported once"
    done
    # Clipping checks every step; the run's last one is reported too.
    (run "$work/3.log" train.max_steps=5 lr_schedule.lr=1e30 metrics.log_every=2 train.max_grad_norm=20 \
      train.non_finite=ignore) || fail "exit code $?"
    grep "inf or NaN" "$work/3.log" > "$work/clipped.log"
    cat "$work/clipped.log"
    grep -q "gradients of 2 steps up to step 4" "$work/clipped.log" || fail "not both steps between two lines are reported"
    grep -q "gradients of 1 step up to step 5; .*lower lr_schedule.lr or train.max_grad_norm" "$work/clipped.log" ||
      fail "the last step is not reported"
    (run "$work/2.log" train.max_steps=2 metrics.log_every=2) || fail "exit code $? of a run that goes well"
    ! grep -q "inf or NaN" "$work/2.log" || fail "a run that goes well is reported"
    ;;
  protects)
    saving=(checkpoint.dir="$work/checkpoints" checkpoint.every_steps=2 checkpoint.keep_last=2 train.eval_every=0)
    diverging=("${saving[@]}" lr_schedule.lr=1e38 train.max_grad_norm=0 lr_schedule.type=constant train.max_steps=6)
    (run "$work/1.log" "${saving[@]}" train.max_steps=2) || fail "exit code $?"
    (run "$work/2.log" "${diverging[@]}")
    code=$?
    [ $code = 70 ] || fail "exit code $code of the run that diverges, expected 70"
    grep -qE "step [0-9]+ is not finite .*the loss of rank [0-9] is -?(nan|inf); the first weight with inf or NaN behind it is [a-z0-9.]+;" \
      "$work/2.log" || fail "step, parameter and rank are not named"
    (run "$work/3.log" "${diverging[@]}" train.non_finite=skip) || fail "exit code $? of the run that skips"
    grep -q "counts as not finite (the last [0-9]* updates were skipped" "$work/3.log" || fail "nothing is said of skipped updates"
    (run "$work/4.log" "${diverging[@]}" train.non_finite=ignore) || fail "exit code $? of the run that ignores"
    grep -q "counts as not finite (inf or NaN in " "$work/4.log" || fail "no checkpoint is reported to hold NaN"
    ls "$work/checkpoints"
    ls "$work"/checkpoints/step_0000000002/manifest.json > /dev/null || fail "the finite checkpoint is lost"
    ;;
  refuses)
    saving=(train.max_steps=2 checkpoint.dir="$work/checkpoints")
    (run "$work/1.log" "${saving[@]}") || fail "exit code $?"
    (run "$work/2.log" "${saving[@]}" train.batch_size=$((16 / ranks)))
    code=$?
    [ $code = 64 ] || fail "exit code $code with another batch, expected 64"
    grep -q "saved by a run with 32 samples per step on $ranks ranks*, but this run has 16 samples per step" "$work/2.log" ||
      fail "the message does not name both lengths"
    [ "$ranks" -gt 1 ] || exit 0
    # One image for each of the first 163 - 160 ranks of an extra batch.
    (run "$work/3.log" train.max_steps=2 sampler.pad=false train.batch_size=1 loader.drop_last=false)
    code=$?
    [ $code = 64 ] || fail "exit code $code with sampler.pad=false, expected 64"
    grep -q "sampler.pad=false gives rank 0 82 training batches per epoch and rank 1 81" "$work/3.log" || fail "no message"
    ;;
  unsaved)
    # A write beyond the limit then fails with EFBIG instead of ending the process.
    wrapper=(bash -c 'trap "" XFSZ && ulimit -f 20000 && exec "$@"' limited)
    (run "$work/1.log" train.max_steps=2 checkpoint.dir="$work/checkpoints")
    code=$?
    [ $code = 73 ] || fail "exit code $code, expected 73"
    grep -q "rank 0.*: cannot write $work/checkpoints/.*: File too large; fix: raise the limit of a file.s size (ulimit -f), or set another checkpoint.dir" \
      "$work/1.log" || fail "no message"
    grep -qE "first cause: (rank 0 |.*: rank 0: cannot write .*\(rank 0 at step 2\))" "$work/1.log" || fail "rank 0, which could not write, is not the first cause"
    grep -qE "^checkpoint|training continues" "$work/1.log" && fail "a checkpoint that is not there is claimed"
    [ -z "$(ls -A "$work/checkpoints")" ] || fail "something was left"
    ;;
  skips)
    cp -r "$data" "$work/data"
    printf 'no JPEG' | dd of="$work/data/train-000.tar" bs=1 seek=2048 conv=notrunc 2> "$work/dd.log" || fail "dd"
    data=$work/data
    (run "$work/1.log" train.max_steps=2 data.corrupt=skip data.max_corrupt_fraction=0.01) || fail "exit code $?"
    grep -q "^corrupt images  1 of 163 training images, 0 of 163 test images, replaced by others" "$work/1.log" ||
      fail "the summary does not report the corrupt image"
    ;;
  resumes | stops)
    model=(model.ema_decay=0.9)
    # With float32 masters, which a checkpoint holds. Without AVX-512 a convolution in bf16 takes seconds on a CPU. Images
    # of 16 px end in a convolution of 1 px with stride 2, whose weight gradient oneDNN computes wrongly in bf16.
    if [ "$scenario" = stops ] && grep -qw avx512bw /proc/cpuinfo; then model+=(model.dtype=bf16 data.image_size=32); fi
    echo "${model[@]}"
    (run "$work/whole.log" train.max_steps=30 "${model[@]}") || fail "exit code $?"
    saving=(train.max_steps=30 "${model[@]}" checkpoint.dir="$work/checkpoints" checkpoint.every_steps=6 checkpoint.stop_check_seconds=0.05)
    (run "$work/cut.log" "${saving[@]}") &
    pid=$!
    if [ "$scenario" = resumes ]; then
      kill_when_saved $pid
    else
      wait_for_checkpoint $pid
      stop_run $pid 75
    fi
    (run "$work/resumed.log" "${saving[@]}") || fail "exit code $? of the resumed run"
    check_resumed "test accuracy"
    ;;
  evaluates)
    # Images of 32 px: the signal must arrive before the evaluation ends.
    settings=(data.image_size=32 train.max_steps=6 train.eval_every_steps=3 train.eval_batch_size=1 metrics.log_every=1)
    (run "$work/whole.log" "${settings[@]}") || fail "exit code $?"
    settings+=(checkpoint.dir="$work/checkpoints" checkpoint.stop_check_seconds=0.05)
    (run "$work/cut.log" "${settings[@]}") &
    pid=$!
    wait_for $pid grep -q "step 3/6" "$work/cut.log"
    stop_run $pid 75
    grep -q "was asked to stop: stopped after 3 steps, saved in" "$work/cut.log" || fail "not stopped in the evaluation"
    (run "$work/resumed.log" "${settings[@]}") || fail "exit code $? of the resumed run"
    grep -q "the evaluation after step 3 was stopped, so it is repeated" "$work/resumed.log" || fail "the evaluation is not repeated"
    for log in whole resumed; do
      grep -o "step 3/6 | eval loss [0-9.]* | eval accuracy [0-9.]*" "$work/$log.log" > "$work/$log.eval" || fail "no evaluation in $log.log"
    done
    cmp "$work/whole.eval" "$work/resumed.eval" || fail "the repeated evaluation differs"
    check_resumed "test accuracy"
    ;;
  averages)
    saving=(checkpoint.dir="$work/checkpoints" checkpoint.keep_best=min)
    (run "$work/1.log" train.max_steps=10 train.eval_every_steps=5 model.ema_decay=0.9 \
      ddp.desync_check_every=1 "${saving[@]}") || fail "exit code $?"
    grep -q "^test accuracy .*, by the averages of weights and buffers" "$work/1.log" || fail "the summary does not name the averages"
    (run "$work/2.log" checkpoint.resume=best model.ema_decay=0.9 "${saving[@]}") || fail "exit code $? of the evaluation of the best"
    metric=$(sed -n 's/.*loaded .*, metric \([0-9.]*\).*/\1/p' "$work/2.log")
    loss=$(sed -n 's/^test accuracy .*(loss \([0-9.]*\)).*/\1/p' "$work/2.log")
    echo "metric $metric, evaluated $loss"
    [ -n "$metric" ] && awk "BEGIN { d = $metric - $loss; exit !(d < 1e-4 && d > -1e-4) }" || fail "the best's loss is not its metric"
    (run "$work/3.log" checkpoint.resume=best "${saving[@]}")
    code=$?
    [ $code = 64 ] || fail "exit code $code without model.ema_decay, expected 64"
    grep -q "was chosen by its averaged weights, but model.ema_decay=0 would evaluate the others" "$work/3.log" || fail "no message"
    ;;
  *) fail "unknown scenario $scenario" ;;
esac
