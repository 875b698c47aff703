# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# The common part of all jobs; the sbatch files source it. A job begins with one of these:
#
#   start_job PROGRAM         training: run_dir=runs/<job id>, one folder for all restarts
#   start_study_run NAME DEFAULTS…
#                             run of a study: run_dir=$DDP_RUNS/NAME, measured again at each start. Files of an
#                             earlier start move to run_dir/attempt-<n>/. Fills `defaults` for run_job
#
# and ends with `run_job SETTINGS…`, which starts the ranks, keeps their exit code, requeues and exits.
# For a training, SETTINGS may contain checkpoint.dir, metrics.dir and metrics.run_name; otherwise the job sets them.
# The words of the array `wrapper` precede the program on each rank. `measured` holds settings of measured runs. With
# checkpoints=no (studies and profiles) the job saves no checkpoints and keeps all files in run_dir.
#
# tools/study.py sets DDP_WORK_DIR for a program that was given by its path. The ranks run there, and the job adds no
# settings that such a program may lack: tools/study.py gives all of them.

wrapper=()
measured=(lr_schedule.warmup_steps=0 train.eval_first=false train.eval_every=0 train.eval_every_steps=0)
checkpoints=yes

_enter_job() {
  local runs=${DDP_RUNS:-} given_program=${DDP_PROGRAM:-}
  if [ -f slurm/env.sh ]; then
    set +u  # modules and activation scripts use variables that may be unset
    # shellcheck disable=SC1091
    source slurm/env.sh
    set -u
  fi
  # Values given with the submission take precedence over those of the site.
  DDP_RUNS=${runs:-${DDP_RUNS:-}}
  DDP_PROGRAM=${given_program:-${DDP_PROGRAM:-}}
  job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}
  job=${job:-$SLURM_JOB_ID}
  restarts=${SLURM_RESTART_COUNT:-0}
}

# _is_own FOLDER: whether it is no link and belongs to this user. File systems may map users, so a new file's owner
# decides if the ids differ.
_is_own() {
  local made owner
  [ ! -L "$1" ] || return 1
  [ ! -O "$1" ] || return 0
  made=$(mktemp "$1/.try_XXXXXXXX") || return 1
  owner=$(stat -c %u "$made")
  rm -f "$made"
  [ "$owner" = "$(stat -c %u "$1")" ]
}

# _log_to FOLDER: sends the output of the rest of the job to a log there.
_log_to() {
  run_dir=$1
  mkdir -p "$run_dir" || exit 73
  if ! _is_own "$run_dir"; then  # the log, command.txt and exit_code could go through links of another user
    echo "job $job: the run folder $run_dir is a link, or belongs to another user; fix: name another folder (DDP_RUNS)"
    exit 64
  fi
  echo "job $job: see $run_dir/slurm.log"
  exec >>"$run_dir/slurm.log" 2>&1
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
  export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
  echo "$(date +%FT%T) start $restarts of job $job: $SLURM_JOB_NUM_NODES node(s) $SLURM_JOB_NODELIST," \
    "$SLURM_NTASKS task(s), ${SLURM_GPUS_ON_NODE:-0} GPU(s) per node"
  if [ -n "${SLURM_GPUS_ON_NODE:-}" ] && [ "${SLURM_NTASKS_PER_NODE:-$SLURM_GPUS_ON_NODE}" != "$SLURM_GPUS_ON_NODE" ]; then
    echo "warning: ${SLURM_NTASKS_PER_NODE} task(s) for $SLURM_GPUS_ON_NODE GPU(s) per node: sbatch --ntasks-per-node=$SLURM_GPUS_ON_NODE"
  fi
}

# _find_program build/examples/NAME: there, else in share/ddp of an install tree, else on PATH (a copy of slurm/ elsewhere).
_find_program() {
  local name=${1##*/}
  if [ ! -e "$1" ] && [ -e "examples/$name" ]; then
    echo "examples/$name"
  elif [ ! -e "$1" ] && command -v "$name" >/dev/null; then
    command -v "$name"
  else
    echo "$1"
  fi
}

# run_tool NAME ARGUMENTS…: the tool NAME.py of the repository, or libddp-NAME on PATH, as an install tree has it.
run_tool() {
  local name=$1
  shift
  if [ -e "tools/$name.py" ]; then python3 "tools/$name.py" "$@"; else "libddp-${name//_/-}" "$@"; fi
}

start_job() {
  _enter_job
  program=${DDP_PROGRAM:-$(_find_program "$1")}
  _log_to "${DDP_RUNS:-runs}/$job"
  run_name=$job
}

start_study_run() {
  local file attempt=1
  _enter_job
  checkpoints=no
  run_name=$1
  shift
  # shellcheck disable=SC2034  # the sbatch files use it
  defaults=()
  # shellcheck disable=SC2034
  [ -n "${DDP_WORK_DIR:-}" ] || defaults=("$@" "${measured[@]}")
  program=${DDP_PROGRAM:-$(_find_program build/examples/resnet_ddp)}
  DDP_RUNS=${DDP_RUNS:-runs/$SLURM_JOB_NAME}
  # Figures of one start must not be mixed with those of another.
  if compgen -G "$DDP_RUNS/$run_name/*.*" >/dev/null; then
    while [ -e "$DDP_RUNS/$run_name/attempt-$attempt" ]; do attempt=$((attempt + 1)); done
    mkdir -p "$DDP_RUNS/$run_name/attempt-$attempt"
    for file in "$DDP_RUNS/$run_name"/*; do
      case $file in */attempt-*) ;; *) mv "$file" "$DDP_RUNS/$run_name/attempt-$attempt/" ;; esac
    done
  fi
  _log_to "$DDP_RUNS/$run_name"
  if [ ! -e "$DDP_RUNS/SYSTEM.md" ]; then
    run_tool system_report --build "${DDP_PROGRAM_BUILD:-$(dirname "$(dirname "$program")")}" --program "$program" \
      --output "$DDP_RUNS/SYSTEM.md" ||
      echo "warning: tools/system_report.py could not describe the machine"
  fi
}

_field() { scontrol show job -o "$SLURM_JOB_ID" 2>/dev/null | tr ' ' '\n' | sed -n "s/^$1=//p"; }

# _to_seconds [days-]hours:minutes:seconds
_to_seconds() {
  local days=0 rest=$1 hours minutes seconds
  [[ $rest != *-* ]] || { days=${rest%%-*} rest=${rest#*-}; }
  IFS=: read -r hours minutes seconds <<<"$rest"
  echo $((10#$days * 86400 + 10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds))
}

# While the script of a cancelled job still runs, Slurm reports it as COMPLETING. It does so after the time limit too,
# and then the job shall be requeued.
_is_cancelled() {
  local limit
  case $(_field JobState) in
    CANCELLED) return 0 ;;
    COMPLETING) ;;
    *) return 1 ;;
  esac
  limit=$(_field TimeLimit)
  [[ $limit != *:*:* ]] || [ "$(_to_seconds "$(_field RunTime)")" -lt "$(_to_seconds "$limit")" ]
}

# _leaves_open KEY SETTINGS…: whether SETTINGS do not set KEY. A configuration file does not count, because its folder
# would be the same for all jobs.
_leaves_open() {
  local key=$1 word
  shift
  for word in "$@"; do [[ $word != "$key="* ]] || return 1; done
}

# _setting KEY SETTINGS…: prints the value of the last setting of KEY.
_setting() {
  local key=$1 word value=
  shift
  for word in "$@"; do [[ $word != "$key="* ]] || value=${word#*=}; done
  echo "$value"
}

# A job is not requeued after this many starts in a row without progress that had the same first cause. DDP_MAX_RESTARTS
# limits those with any causes.
_most_ends_in_place=3

# _count_ends CODE FOLDER LOG LINES: prints how many starts in a row ended at the newest checkpoint in FOLDER, and how many
# of them, up to this one, had the first cause that LOG reports after its first LINES lines. A stop that saved (75) has no
# cause. The file next to FOLDER has the checkpoint's step and one line per start, so that a job with another id finds it.
_count_ends() {
  local code=$1 folder=${2%/} log=$3 lines=$4 file step cause old_step='' saved='saved on request' ends=() same=0 i
  file=${folder:-$run_dir/checkpoint}.requeues
  step=$(find "$folder" -maxdepth 1 -name 'step_[0-9]*' 2>/dev/null | sed -n 's|.*/step_\([0-9]*\).*|\1|p' | sort -n | tail -1)
  # Host names differ between starts, so they are removed.
  cause=$(tail -n +"$((lines + 1))" "$log" | sed -n 's/.*first cause: //p' | head -1 | sed -E 's/(rank [0-9]+) \([^)]*\)/\1/g')
  if [ "$code" = 75 ]; then
    # A program with checkpoints of its own has saved too, although nothing is found here.
    [ -n "$step" ] || { echo 0 0; return; }
    cause=$saved
  fi
  [ ! -e "$file" ] || { IFS= read -r old_step; mapfile -t ends; } <"$file"
  [ "$old_step" = "$step" ] || ends=()
  ends+=("$cause")
  mkdir -p "$(dirname "$file")" && printf '%s\n' "$step" "${ends[@]}" >"$file.new" && mv "$file.new" "$file" >&2
  for ((i = ${#ends[@]} - 1; i >= 0 && code != 75; --i)); do
    [ "${ends[i]}" != "$saved" ] || continue
    [ "${ends[i]}" = "$cause" ] || break
    same=$((same + 1))
  done
  echo "${#ends[@]} $same"
}

# After preemption or the failure of a node Slurm requeues the job itself.
_requeue() {
  local answer
  answer=$(scontrol requeue "$SLURM_JOB_ID" 2>&1) && return
  case $answer in
    *"pending execution"*) echo "Slurm had requeued the job already" ;;
    *) echo "scontrol could not requeue the job: $answer" ;;
  esac
}

run_job() {
  local code requeue=no folder lines starts=0 same=0 stuck='' most=${DDP_MAX_RESTARTS:-20}
  # Preemption and scancel send TERM to the tasks too. The shell must outlive them.
  trap 'echo "$(date +%FT%T) the batch shell caught a signal"' TERM USR1
  if [ $checkpoints = yes ]; then
    # A training may be resumed, so it must find its checkpoint again.
    _leaves_open checkpoint.dir "$@" && set -- "$@" "checkpoint.dir=$run_dir/checkpoint"
    _leaves_open metrics.dir "$@" && set -- "$@" "metrics.dir=$(dirname "$run_dir")"
    _leaves_open metrics.run_name "$@" && set -- "$@" "metrics.run_name=$run_name"
  else  # measured: figures are read from run_dir, whatever SETTINGS say
    [ -n "${DDP_WORK_DIR:-}" ] || set -- "$@" checkpoint.dir=
    set -- "$@" "metrics.dir=$(dirname "$run_dir")" "metrics.run_name=$run_name"
  fi
  printf '%q ' "${wrapper[@]}" "$program" "$@" >"$run_dir/command.txt"

  folder=$(_setting checkpoint.dir "$@")
  lines=$(wc -l <"$run_dir/slurm.log")

  # The ranks share their secret through MPI (pmix) or a 0600 file (DDP_SRUN_MPI=none): no DDP_SECRET is needed.
  # --wait: the ranks end each other and log the cause, so Slurm must not kill them early.
  srun --mpi="${DDP_SRUN_MPI:-pmix}" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait=120 \
    ${DDP_WORK_DIR:+"--chdir=$DDP_WORK_DIR"} "${wrapper[@]}" "$program" "$@"
  code=$?

  case $code in
    0) echo "$(date +%FT%T) done" ;;
    75) requeue="saved on request" ;;
    76 | 137) requeue="a peer was lost" ;;
    # USR1 or TERM ended a rank that had not yet begun to handle stop requests, or that had saved and was ending.
    138 | 143) requeue="a stop signal met a rank that was starting or ending" ;;
    *) echo "$(date +%FT%T) failed with exit code $code: not requeued" ;;
  esac
  # scancel ends the tasks with TERM, as preemption does. A cancelled job must not be requeued although it saved.
  if [ "$requeue" != no ] && _is_cancelled; then
    echo "$(date +%FT%T) exit code $code ($requeue), but Slurm is ending the job (scancel): not requeued"
    requeue=no
  fi
  if [ "$requeue" != no ]; then
    read -r starts same < <(_count_ends "$code" "$folder" "$run_dir/slurm.log" "$lines")
  fi
  if [ "$same" -ge "$_most_ends_in_place" ]; then
    stuck="$same times in a row at the same checkpoint with the same first cause"
  elif [ "$starts" -ge "$most" ]; then
    stuck="$starts starts in a row without a newer checkpoint (DDP_MAX_RESTARTS=$most)"
  fi
  if [ -n "$stuck" ]; then
    echo "$(date +%FT%T) exit code $code ($requeue), $stuck: not requeued; to continue, fix the cause and submit the job" \
      "again, or remove ${folder:-$run_dir/checkpoint}.requeues"
  elif [ "$requeue" != no ]; then
    echo "$(date +%FT%T) exit code $code ($requeue): requeued"
    _requeue
  fi
  echo "$code" >"$run_dir/exit_code"  # written last: its presence means that the run's files are complete
  exit "$code"
}

# run_profile FIRST:NUMBER SETTINGS…: run_job for a window of steps and one more step. The trace's window starts and
# stops the profiler (cudaProfilerStart, cudaProfilerStop).
run_profile() {
  local first=${1%%:*} number=${1##*:}
  shift
  checkpoints=no
  run_job "$@" metrics.nvtx=true metrics.trace_first_step="$first" metrics.trace_steps="$number" \
    train.max_steps=$((first + number + 1)) train.epochs=0 "${measured[@]}"
}
