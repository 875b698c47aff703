#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Short scaling studies on the GPUs of this host, within a time budget, packed into one file.
#
# usage: tools/gpu_studies.sh OUT [STUDY.yaml ...]         without names: slurm/studies/short_*.yaml
#
#   BUILD=build           build folder
#   BUDGET=280            seconds; the studies take turns, repeat by repeat, and what does not fit stays out
#   LAUNCHER=...          of several ranks: auto, torchrun, mpirun, ddp_test_launch (the default where it is built)
#   RUNS=runs             folder of the studies' folders; a second call goes on with what is missing
#
# Writes OUT/studies.tar.gz (the studies' folders) and OUT/report.html where pandas and matplotlib are there;
# elsewhere unpack the archive into runs/ and call tools/plot_scaling.py.
set -uo pipefail
case ${1:-} in -h | --help) sed -n '3,14s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
[ $# -ge 1 ] || { sed -n '3,14s/^# \{0,1\}//p' "$0" >&2; exit 64; }
mkdir -p "$1" || exit 73
out=$(cd "$1" && pwd)
shift
root=$(CDPATH="" cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1
[ $# -gt 0 ] || set -- slurm/studies/short_*.yaml
build=${BUILD:-build} runs=${RUNS:-runs} begin=$SECONDS failed=0
gpus=$(nvidia-smi -L | wc -l)
[ "$gpus" -gt 0 ] || { echo "error: nvidia-smi lists no GPU" >&2; exit 69; }
launcher=${LAUNCHER:-auto}
[ -n "${LAUNCHER:-}" ] || [ ! -x "$build/tests/support/ddp_test_launch" ] || launcher=ddp_test_launch

# The build finds LibTorch and CUDA's libraries beside this Python, also where it was made elsewhere.
site=$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null) &&
  export LD_LIBRARY_PATH=$site/torch/lib:$site/nvidia/cu13/lib:$site/nvidia/nccl/lib:$site/nvidia/cudnn/lib:$build/lib:${LD_LIBRARY_PATH:-}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

for repeat in 1 2 3; do
  for study in "$@"; do
    name=$(basename "$study" .yaml)
    repeats=$(sed -n 's/^repeats: *\([0-9]*\).*/\1/p' "$study")
    [ $repeat -le "${repeats:-3}" ] || continue
    left=$((${BUDGET:-280} - (SECONDS - begin)))
    if [ $left -lt 10 ]; then
      echo "no time left for repeat $repeat of $name"
      continue
    fi
    echo "== $name, repeat $repeat ($((SECONDS - begin)) s)"
    timeout -k 15 $left tools/study.py "$study" --local --max-ranks "$gpus" --launcher "$launcher" --build "$build" --output "$runs/$name" --repeat $repeat || failed=1
  done
done

folders=()
for study in "$@"; do
  folder=$runs/$(basename "$study" .yaml)
  tools/study.py "$study" --output "$folder" --status | tail -n 1
  [ -d "$folder" ] && folders+=("$folder")
done
tar -czf "$out/studies.tar.gz" -C "$runs" "${folders[@]#"$runs"/}" || failed=1
if python3 -c 'import pandas, matplotlib' 2>/dev/null; then
  tools/plot_scaling.py "${folders[@]}" --output "$runs/short_report" && cp "$runs/short_report/report.html" "$out/" || failed=1
fi
echo "$((SECONDS - begin)) s; $(du -h "$out/studies.tar.gz" | cut -f1) in $out/studies.tar.gz"
exit $failed
