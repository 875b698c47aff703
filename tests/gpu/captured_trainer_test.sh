#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A trainer whose steps are CUDA graphs ends with the parameters and the losses of one whose steps are
# eager, bit for bit; with loader.device_resident=on also of one whose images the CPU makes.
# Usage: captured_trainer_test.sh LAUNCHER RANKS PROGRAM ARGUMENT…
set -u
# shellcheck source=tests/distributed/trainer_test_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../distributed/trainer_test_lib.sh"
launcher=$1 ranks=$2 program=$3
shift 3

run() { # run NAME ARGUMENT…
  local name=$1 code
  shift
  "$launcher" --gpus --verbose --ranks "$ranks" -- "$program" "$@" context.device=cuda metrics.dir= \
    train.deterministic=true > "$work/$name.log" 2>&1
  code=$?
  [ $code != 77 ] || { cat "$work/$name.log"; exit 77; }
  [ $code = 0 ] || fail "exit code $code of run $name"
  sed -i 's/^\[0\] //' "$work/$name.log"
}
results() { sed -n -e '/^train loss/p' -e '/^eval loss/p' -e '/^token accuracy/p' -e '/^test accuracy/p' "$1"; }
same_as_captured() { # same_as_captured NAME
  echo "$1 $(hash_of "$work/$1.log"), captured $captured"
  { [ -n "$captured" ] && [ "$(hash_of "$work/$1.log")" = "$captured" ]; } || fail "the parameters differ"
  [ "$(results "$work/$1.log")" = "$(results "$work/on.log")" ] || fail "losses differ: $(results "$work/$1.log")"
}

for mode in off on; do
  run $mode "$@" train.cuda_graph=$mode
done
captured=$(hash_of "$work/on.log")
results "$work/on.log"
grep "captured .* as a CUDA graph" "$work/on.log"
grep -q "captured the training step as a CUDA graph" "$work/on.log" || fail "the training step was not captured"
! grep -q "without a CUDA graph" "$work/on.log" || fail "a step was not captured"
same_as_captured off
case " $* " in *" loader.device_resident=on "*)
  run host "$@" train.cuda_graph=off loader.device_resident=off
  same_as_captured host
esac
