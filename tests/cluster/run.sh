#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The sbatch file on a running Slurm cluster, with CPU ranks.
# usage: tests/cluster/run.sh [nodes, default 4] [tasks a node, 1]
# Not part of ctest. Needs sbatch, a folder that all nodes see (this checkout) and build/examples/.
# Prints a table of the cases; a case's logs stay in runs/<job id>/.
set -uo pipefail
case ${1:-} in -h | --help) sed -n '3,6s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
CDPATH="" cd -- "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
nodes=${1:-4}
tasks=${2:-1}
failed=0
config=(--config examples/configs/quickstart.yaml loader.num_workers=1 metrics.log_every=1)

row() { printf '%-34s %-8s %-10s %s\n' "$@"; }

# submit [sbatch options --] settings …: prints the job id. The jobs name no GPUs: --gpus-per-node=0
# overrides the file where the cluster knows GPUs; elsewhere a copy without that line is submitted.
submit() {
  local options=()
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  sed '/^#SBATCH --gpus-per-node/d' slurm/resnet_ddp.sbatch >runs/.no_gpus.sbatch
  sbatch --parsable --ntasks-per-node="$tasks" --cpus-per-task=1 --output=runs/slurm-%j.out \
    "${options[@]}" runs/.no_gpus.sbatch "${config[@]}" "$@"
}

state() { scontrol show job "$1" 2>/dev/null | grep -o "$2=[^ ]*" | cut -d= -f2; }

# wait_until job seconds pattern: until the log holds the pattern.
wait_until() {
  for _ in $(seq "$(($2 * 2))"); do
    grep -qE -- "$3" "runs/$1/slurm.log" 2>/dev/null && return 0
    sleep 0.5
  done
  return 1
}

# wait_end job seconds: until the job has left the queue for good.
wait_end() {
  for _ in $(seq "$(($2 * 2))"); do
    case $(state "$1" JobState) in COMPLETED | FAILED | CANCELLED | TIMEOUT | NODE_FAIL) return 0 ;; esac
    sleep 0.5
  done
  scancel "$1"
  return 1
}

# check name job condition…
check() {
  local name=$1 job=$2 result=ok
  shift 2
  "$@" || { result=FAILED; failed=1; }
  row "$name" "$job" "$result" "$(state "$job" JobState) $(state "$job" ExitCode)"
}

parameter_hash() { grep '^parameters' "runs/$1/slurm.log" | tail -n 1 | awk '{print $2}'; }

case_success() {
  local job
  job=$(submit --nodes="$1" -- train.max_steps=12 train.epochs=0)
  wait_end "$job" 300
  check "success, $1 node(s)" "$job" test "$(state "$job" ExitCode) $(parameter_hash "$job" | wc -w)" = "0:0 1"
}

# The whole run undisturbed, for the hash that the disturbed ones must reach.
case_reference() {
  reference_job=$(submit --nodes="$nodes" -- train.max_steps=40 train.epochs=0)
  wait_end "$reference_job" 400
  reference=$(parameter_hash "$reference_job")
  check "reference, 40 steps" "$reference_job" test -n "$reference"
}

# Slurm's own warning signal reaches the tasks: agreed checkpoint, 75, requeue, same end.
case_signal() {
  local job
  job=$(submit --nodes="$nodes" -- train.max_steps=40 train.epochs=0)
  wait_until "$job" 120 'step +1[0-9]/' && scancel --signal=USR1 "$job"
  wait_until "$job" 120 'exit code 75 .*: requeued'
  wait_end "$job" 400
  check "USR1: saved, 75, requeued" "$job" grep -q 'exit code 75' "runs/$job/slurm.log"
  check "  the same parameters as reference" "$job" test "$(parameter_hash "$job")" = "$reference"
}

# scancel ends the job for good, though its ranks save and end with 75 as they do before a requeue.
case_scancel() {
  local job
  job=$(submit --nodes="$nodes" -- train.max_steps=400 train.epochs=0)
  wait_until "$job" 120 'step +1[0-9]/' && scancel "$job"
  wait_until "$job" 60 'exit code [0-9]+ .*(not requeued|: requeued)'
  sleep 3  # a requeue that was asked for shows by now
  check "scancel: saved, not requeued" "$job" grep -q 'exit code 75 .*scancel.: not requeued' "runs/$job/slurm.log"
  check "  stays cancelled" "$job" test "$(state "$job" JobState)" = CANCELLED
  scancel "$job" 2>/dev/null
}

# One rank is killed: the first-cause line is in the log, the job is requeued and comes to the end.
case_killed_rank() {
  local job victim
  job=$(submit --nodes="$nodes" -- train.max_steps=40 train.epochs=0 checkpoint.every_steps=5)
  wait_until "$job" 120 'step +1[0-9]/'
  victim=$(pgrep -f "metrics.run_name=$job" | while read -r pid; do
    tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | grep -qx "SLURM_PROCID=$((nodes * tasks - 1))" &&
      tr '\0' '\n' <"/proc/$pid/environ" | grep -q '^PMIX_RANK=' && echo "$pid"
  done | head -n 1)
  [ -n "$victim" ] && kill -KILL "$victim"
  wait_until "$job" 120 'a peer was lost'
  wait_end "$job" 400
  check "SIGKILL of a rank: first-cause line" "$job" grep -qE "rank $((nodes * tasks - 1)) .*failed" "runs/$job/slurm.log"
  check "  requeued, same parameters" "$job" test "$(parameter_hash "$job")" = "$reference"
}

# A checkpoint.dir that the caller names is taken: without it `require` finds no checkpoint.
case_given_checkpoint() {
  local job
  job=$(submit --nodes="$nodes" -- train.max_steps=40 train.epochs=0 checkpoint.resume=require \
    "checkpoint.dir=runs/$reference_job/checkpoint")
  wait_end "$job" 120
  check "the caller's checkpoint.dir" "$job" test "$(state "$job" ExitCode) $(parameter_hash "$job")" = "0:0 $reference"
}

# A setting that is wrong ends the job with its exit code and without a requeue.
case_settings() {
  local job
  job=$(submit --nodes="$nodes" -- train.batch_sise=3)
  wait_end "$job" 120
  check "unknown key: 64, not requeued" "$job" test "$(state "$job" ExitCode)" = 64:0
}

mkdir -p runs
command -v sbatch >/dev/null || { echo "error: no sbatch here" >&2; exit 1; }
row case job result "state and exit code"
case_success 1
case_success "$nodes"
case_reference
case_signal
case_scancel
case_killed_rank
case_given_checkpoint
case_settings
exit $failed
