#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A trainer whose steps are CUDA graphs ends with the parameters and the losses of one whose steps are
# eager, bit for bit. Usage: captured_trainer_test.sh LAUNCHER RANKS PROGRAM ARGUMENT…
set -u
# shellcheck source=tests/distributed/trainer_test_lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../distributed/trainer_test_lib.sh"
launcher=$1 ranks=$2 program=$3
shift 3

for mode in off on; do
  "$launcher" --gpus --verbose --ranks "$ranks" -- "$program" "$@" context.device=cuda metrics.dir= \
    train.deterministic=true train.cuda_graph=$mode > "$work/$mode.log" 2>&1
  code=$?
  [ $code != 77 ] || { cat "$work/$mode.log"; exit 77; }
  [ $code = 0 ] || fail "exit code $code with train.cuda_graph=$mode"
  sed -i 's/^\[0\] //' "$work/$mode.log"
done
results() { sed -n -e '/^train loss/p' -e '/^eval loss/p' -e '/^token accuracy/p' -e '/^test accuracy/p' "$1"; }

eager=$(hash_of "$work/off.log") captured=$(hash_of "$work/on.log")
echo "eager $eager, captured $captured"
results "$work/on.log"
grep "is a CUDA graph now" "$work/on.log" || fail "nothing was captured"
! grep -q "without a CUDA graph" "$work/on.log" || fail "a step was not captured"
{ [ -n "$eager" ] && [ "$eager" = "$captured" ]; } || fail "the parameters differ"
[ "$(results "$work/off.log")" = "$(results "$work/on.log")" ] || fail "losses differ: $(results "$work/off.log")"
