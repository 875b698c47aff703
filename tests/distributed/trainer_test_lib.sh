# SPDX-License-Identifier: Apache-2.0
# What the tests of the trainers share. Sourced; sets `work`, a folder that goes with the test.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1

fail() {
  echo "FAILED: $*"
  tail -n 40 "$work"/*.log
  exit 1
}

hash_of() { sed -n 's/^parameters *\([0-9a-f]\{16\}\), equal on all.*/\1/p' "$1"; }

check_resumed() { # check_resumed LINE: resumed.log ends as whole.log, never interrupted, does; LINE begins its evaluation
  local whole resumed
  grep -q "^resumed  *at step" "$work/resumed.log" || fail "the second run did not resume"
  whole=$(hash_of "$work/whole.log") resumed=$(hash_of "$work/resumed.log")
  echo "never interrupted $whole, resumed $resumed; $(grep '^resumed' "$work/resumed.log")"
  { [ -n "$whole" ] && [ "$whole" = "$resumed" ]; } || fail "the parameters differ"
  [ "$(grep "^$1" "$work/whole.log")" = "$(grep "^$1" "$work/resumed.log")" ] || fail "the evaluations differ"
}

descendants() {
  local child
  for child in $(pgrep -P "$1"); do
    descendants "$child"
    echo "$child"
  done
}

wait_for() { # wait_for PID COMMAND…: until it succeeds, while the run goes on
  local pid=$1 tries
  shift
  for tries in $(seq 1200); do
    "$@" > /dev/null && return 0
    kill -0 "$pid" 2> /dev/null || fail "the run ended before: $*"
    sleep 0.05
  done
  fail "$tries tries: $*"
}

wait_for_checkpoint() { # wait_for_checkpoint PID
  wait_for "$1" compgen -G "$work/checkpoints/step_*"
}

stop_run() { # stop_run PID CODE: SIGTERM to the ranks (their launcher itself would kill them soon after)
  local targets code
  targets=$(descendants "$1")
  # shellcheck disable=SC2086
  kill -TERM ${targets:-$1}
  wait "$1"
  code=$?
  [ $code = "$2" ] || fail "exit code $code after SIGTERM, expected $2"
}

kill_when_saved() { # kill_when_saved PID
  wait_for_checkpoint "$1"
  # shellcheck disable=SC2046
  kill -9 $(descendants "$1") "$1"
  wait "$1" 2> /dev/null
}

# check_cut_run LINE SETTING…: a run killed after a save and resumed ends as one that was never interrupted. LINE is that of
# check_resumed. Needs `run`.
check_cut_run() {
  local line=$1 saving
  shift
  saving=("$@" checkpoint.dir="$work/checkpoints" checkpoint.every_steps=4 checkpoint.stop_check_seconds=0.05)
  (run "$work/whole.log" "$@") || fail "exit code $?"
  (run "$work/cut.log" "${saving[@]}") &
  kill_when_saved $!
  (run "$work/resumed.log" "${saving[@]}") || fail "exit code $? of the resumed run"
  check_resumed "$line"
}

# check_resumes SETTING…: check_cut_run of an image classifier. Each rank saves a random state of its own. Needs `ranks` too.
check_resumes() {
  local states
  check_cut_run "test accuracy" "$@"
  if [ "$ranks" -gt 1 ]; then
    states=$(find "$work/checkpoints" -name rank_00000.safetensors | sort | head -n 1)
    [ -s "${states/rank_00000/rank_00001}" ] || fail "no random state of rank 1"
    ! cmp -s "$states" "${states/rank_00000/rank_00001}" || fail "both ranks drop the same"
  fi
}
