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

loss_falls() { # loss_falls LOG SHARE: the last epoch's training loss is below SHARE of the first one's
  sed -n 's/^train loss *\([0-9.]*\) in this run.s first epoch, \([0-9.]*\) in its last/\1 \2/p' "$1" |
    awk '{ found = 1; print "loss", $1, "->", $2; exit !($2 < '"$2"' * $1) } END { if (!found) exit 1 }' ||
    fail "the loss did not fall"
}

# same_curve REFERENCE NAME FILE WRONG: the runs of these names have the same steps and, to 1e-5, the same losses in
# FILE (sums are taken in another order, in fp32). WRONG is awk's condition of a wrong number of lines.
same_curve() {
  local reference=$work/runs/$1/$3 file=$work/runs/$2/$3
  paste -d, <(cut -d, -f1,3 "$reference") <(cut -d, -f1,3 "$file") |
    awk -F, 'NR > 1 { d = $2 - $4; if ($1 != $3 || d * d > 1e-10 * $2 * $2) wrong = 1; worst = d * d > worst ? d * d : worst }
             END { print "'"$2 $3"'", NR - 1, "rows, largest difference", sqrt(worst); exit wrong || ('"$4"') }' ||
    fail "$2: another curve than one process's: $(paste "$reference" "$file")"
}

# refused CODE TEXT ARGUMENT…: the run of the settings `refusing` and ARGUMENT… ends with CODE and says TEXT. Needs `run`.
refused() {
  local expected=$1 text=$2 code
  shift 2
  (run "$work/refused.log" "${refusing[@]}" "$@")
  code=$?
  [ $code = "$expected" ] || fail "exit code $code with $*, expected $expected"
  grep -qF -- "$text" "$work/refused.log" || fail "with $*: no message '$text'"
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

# check_use SETTING…: run.mode=evaluate gives what training printed at its end, on one rank and on `ranks`. The
# probabilities that run.mode=classify prints for all test images give the same loss and accuracy. Needs `run_on`, `ranks` and
# `data`, tar shards with a folder per class. Leaves three classes in $work/data and a checkpoint in $work/checkpoints.
check_use() {
  local split number tested settings images
  for split in train test; do
    mkdir -p "$work/data/$split"
    tar xf "$data/$split-000.tar" -C "$work/data/$split" || fail "tar"
    find "$work/data/$split" -mindepth 1 -maxdepth 1 ! -name cat ! -name deer ! -name ship -exec rm -r {} +
  done
  images=("$work"/data/test/*/*.jpg)
  rm "${images[0]}" # an odd number: no padding
  images=("${images[@]:1}")
  [ $((${#images[@]} % 2)) = 1 ] || fail "${#images[@]} images"
  data=$work/data
  settings=(data.num_samples=0 data.image_size=16 data.eval_resize=20 model.ema_decay=0.5 "$@" checkpoint.dir="$work/checkpoints")
  (run_on "$ranks" "$work/trained.log" "${settings[@]}") || fail "exit code $?"
  tested=$(grep "^test accuracy .*, by the averages" "$work/trained.log")
  for number in 1 "$ranks"; do
    (run_on "$number" "$work/evaluated.log" "${settings[@]}" run.mode=evaluate) || fail "exit code $? of the evaluation"
    [ "$(grep "^test accuracy" "$work/evaluated.log")" = "$tested" ] || fail "the evaluation on $number ranks differs"
    grep -q "^evaluated  *$work/checkpoints after step" "$work/evaluated.log" || fail "the checkpoint is not named"
    sed -n '/^classes /,$s/^.* \([0-9.]*\) % of \([0-9]*\)  [a-z]*$/\2 \1/p' "$work/evaluated.log" |
      awk -v tested="$tested" '{ n += $1; correct += $1 * $2 / 100 }
        END { split(tested, word); print NR, "classes:", correct, "of", n; d = 100 * correct / n - word[3]
              exit !(NR == 3 && n == word[6] && d < 0.01 && d > -0.01) }' || fail "the classes do not add up"
    (run_on "$number" "$work/classified.log" "${settings[@]}" run.mode=classify "${images[@]}") || fail "exit code $? of run.mode=classify"
    # A percentage has two decimals. An image's first line is its most probable class.
    awk -v tested="$tested" '
      /\/test\/.*\.jpg$/ { sub(".*/test/", ""); sub("/.*", ""); class = $0; n++; first = 1; next }
      class != "" { total += $1; correct += first && $3 == class; first = 0; if ($3 == class) loss -= log($1 / 100) }
      END { split(tested, word); sub("\\).*", "", word[9]); print "loss", loss / n, "and", word[9] ";", correct, "of", n
            d = loss / n - word[9]; a = 100 * correct / n - word[3]; t = total / n - 100
            exit !(n == word[6] && d < 1e-3 && d > -1e-3 && a < 0.01 && a > -0.01 && t < 0.03 && t > -0.03) }
      ' "$work/classified.log" || fail "other probabilities on $number ranks"
  done
  [ "$(find "$work/checkpoints" -maxdepth 1 -name 'step_*' | wc -l)" = 1 ] || fail "a run that does not train saved"
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
