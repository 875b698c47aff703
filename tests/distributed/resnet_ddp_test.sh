#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs the trainer as a user does and looks at what it prints.
#
# usage: resnet_ddp_test.sh learns|resumes|stops|accumulates PROGRAM RANKS DATA
#   learns    20 steps lower the loss, all ranks end with the same parameters
#   resumes   killed after a checkpoint and started again: the same bits as never interrupted
#   stops     SIGTERM: saved, exit code 75, resumed to the same bits
#   accumulates  two micro-batches of 16, mixup, label smoothing, clipping and EMA together
set -u
scenario=$1 program=$2 ranks=$3 data=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1

fail() {
  echo "FAILED: $*"
  tail -n 40 "$work"/*.log
  exit 1
}

run() { # run LOG SETTING…
  local log=$1
  shift
  local launch=()
  [ "$ranks" -gt 1 ] && launch=(mpirun -n "$ranks")
  exec "${launch[@]}" "$program" data.path="$data" data.num_samples=160 train.batch_size=$((32 / ranks)) \
    loader.drop_last=true loader.num_workers=1 optimizer.momentum=0.9 lr_schedule.lr=0.005 metrics.dir="$work/runs" \
    metrics.progress=plain "$@" > "$log" 2>&1
}

hash_of() { sed -n 's/^parameters *\([0-9a-f]\{16\}\), equal on all.*/\1/p' "$1"; }

descendants() {
  local child
  for child in $(pgrep -P "$1"); do
    descendants "$child"
    echo "$child"
  done
}

check_learning() { # check_learning LOG: the last epoch's loss is below the first's
  sed -n 's/^train loss *\([0-9.]*\) in this run.s first epoch, \([0-9.]*\) in its last/\1 \2/p' "$1" |
    awk '{ found = 1; print "loss", $1, "->", $2; exit !($2 < 0.97 * $1) } END { if (!found) exit 1 }' || fail "the loss did not fall"
}

wait_for_checkpoint() { # wait_for_checkpoint PID
  local tries
  for tries in $(seq 600); do
    compgen -G "$work/checkpoints/step_*" > /dev/null && return 0
    kill -0 "$1" 2> /dev/null || fail "the run ended before its first checkpoint"
    sleep 0.1
  done
  fail "no checkpoint after $tries tries"
}

case $scenario in
  learns)
    (run "$work/1.log" train.max_steps=20) || fail "exit code $?"
    check_learning "$work/1.log"
    [ -n "$(hash_of "$work/1.log")" ] || fail "no hash of the parameters"
    grep -q "^test accuracy .* of 160 images" "$work/1.log" || fail "not every test image was counted once"
    grep -E "^(test|images|parameters)" "$work/1.log"
    ;;
  accumulates)
    (run "$work/1.log" train.max_steps=20 train.batch_size=$((16 / ranks)) train.grad_accum_steps=2 train.max_grad_norm=20 \
      train.label_smoothing=0.05 train.mixup=0.1 model.ema_decay=0.5 model.channels_last=true) || fail "exit code $?"
    check_learning "$work/1.log"
    [ -n "$(hash_of "$work/1.log")" ] || fail "no hash of the parameters"
    ;;
  resumes | stops)
    (run "$work/whole.log" train.max_steps=30 model.ema_decay=0.9) || fail "exit code $?"
    saving=(train.max_steps=30 model.ema_decay=0.9 checkpoint.dir="$work/checkpoints" checkpoint.every_steps=6 checkpoint.stop_check_seconds=0.05)
    (run "$work/cut.log" "${saving[@]}") &
    pid=$!
    wait_for_checkpoint $pid
    if [ "$scenario" = resumes ]; then
      # shellcheck disable=SC2046
      kill -9 $(descendants $pid) $pid
      wait $pid 2> /dev/null
    else
      targets=$(descendants $pid) # the ranks: mpirun itself would kill them soon after
      # shellcheck disable=SC2086
      kill -TERM ${targets:-$pid}
      wait $pid
      code=$?
      [ $code = 75 ] || fail "exit code $code after SIGTERM, expected 75"
    fi
    (run "$work/resumed.log" "${saving[@]}") || fail "exit code $? of the resumed run"
    grep -q "^resumed  *at step" "$work/resumed.log" || fail "the second run did not resume"
    whole=$(hash_of "$work/whole.log") resumed=$(hash_of "$work/resumed.log")
    echo "never interrupted $whole, resumed $resumed; $(grep '^resumed' "$work/resumed.log")"
    { [ -n "$whole" ] && [ "$whole" = "$resumed" ]; } || fail "the parameters differ"
    [ "$(grep '^test accuracy' "$work/whole.log")" = "$(grep '^test accuracy' "$work/resumed.log")" ] || fail "the test results differ"
    ;;
  *) fail "unknown scenario $scenario" ;;
esac
