#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fuzzes the readers of files and messages from outside with libFuzzer, under the address and undefined-behaviour
# sanitizers. Builds tests/fuzz/ with Clang in build-fuzz/ (only what changed), repeats all inputs of
# tests/fuzz/corpus/, then tries new ones. New inputs stay in build-fuzz/corpus/TARGET, and inputs that fail in
# build-fuzz/findings/.
#
# usage: scripts/fuzz.sh [--list] SECONDS [TARGET…]
#   SECONDS      for all targets together; 0 only repeats the corpora
#   TARGET       one of those that --list prints (default: all)
#   CLANG        the compiler (default: clang++). Without libFuzzer nothing is done, and this is said
#   DDP_FUZZ_JOBS  targets at a time (default: one per core)
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
answer_help "$@"
cd "$DDP_ROOT"
: "${CLANG:=clang++}"

mapfile -t targets < <(git ls-files 'tests/fuzz/*_fuzz.cpp' | sed 's|.*/||; s|_fuzz.cpp$||')
if [ "${1:-}" = --list ]; then
  printf '%s\n' "${targets[@]}"
  exit 0
fi
[[ "${1:-}" =~ ^[0-9]+$ ]] || die "usage: scripts/fuzz.sh [--list] SECONDS [TARGET…]"
seconds=$1
if [ $# -gt 1 ]; then
  for target in "${@:2}"; do
    [[ " ${targets[*]} " == *" $target "* ]] || die "unknown target $target; --list prints the targets"
  done
  targets=("${@:2}")
fi

work=$(mktemp -d)
memory=$(mktemp -d -p /dev/shm 2>/dev/null) || memory=$work
trap 'rm -rf "$work" "$memory"' EXIT
echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' >"$work/probe.cpp"
if ! "$CLANG" -fsanitize=fuzzer,address "$work/probe.cpp" -o "$work/probe" 2>"$work/why"; then
  say "skipped: $CLANG cannot link a libFuzzer program ($(tail -n 1 "$work/why"));" \
    "on Debian or Ubuntu: apt-get install clang libclang-rt-dev"
  exit 0
fi

install_packages
install_python_parts
DDP_BUILD=$DDP_ROOT/build-fuzz
launcher=()
if wants_ccache "$DDP_BUILD/.configured"; then
  launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros,include_file_mtime,include_file_ctime}
  export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$DDP_ROOT} CCACHE_NOHASHDIR=${CCACHE_NOHASHDIR:-1}
fi
started=$SECONDS
cmake --preset fuzz -DCMAKE_CXX_COMPILER="$(command -v "$CLANG")" "${launcher[@]}" >"$work/log" ||
  { cat "$work/log"; die "configuration failed: see above"; }
[ -f "$DDP_BUILD/.configured" ] || echo "${launcher[*]:-without a cache}" >"$DDP_BUILD/.configured"
build "${targets[@]/#/fuzz_}"
say "built after $((SECONDS - started)) s"

# Prints one line of results. Findings do not stop the other targets.
fuzz() {
  local target=$1 log=$work/$1.log seeds=(tests/fuzz/corpus/"$1") found=$DDP_BUILD/corpus/$1 limits
  [ "$target" != exported ] || seeds+=(tests/golden/exported)
  mkdir -p "$found" "$DDP_BUILD/findings" "$memory/$target"
  limits=(-max_total_time="$each")
  [ "$each" -gt 0 ] || limits=(-runs=0)
  # A size field must not allocate more than this at once.
  if TMPDIR=$memory/$target OMP_NUM_THREADS=1 UBSAN_OPTIONS=print_stacktrace=1 \
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=0 \
    "$DDP_BUILD/bin/fuzz_$target" "$found" "${seeds[@]}" "${limits[@]}" -max_len=200000 -timeout=25 \
    -rss_limit_mb=4000 -malloc_limit_mb=1500 -artifact_prefix="$DDP_BUILD/findings/$target-" -print_final_stats=1 \
    >"$log" 2>&1; then
    awk -v target="$target" '/ cov: / { edges = $4; if ($2 == "NEW" || $2 == "REDUCE") last = $1 }
      /number_of_executed_units/ { runs = $2 }
      END { sub("#", "", last); printf "%-16s %9d runs, %6d edges, last new input at run %s\n", target, runs, edges, last }' \
      "$log"
  else
    grep -vE '^#[0-9]+\s+(NEW|REDUCE|pulse|RELOAD)|^INFO|^Dictionary' "$log" | tail -n 60
    warn "$target failed; repeat it with: build-fuzz/bin/fuzz_$target build-fuzz/findings/$target-…"
    touch "$work/failed"
  fi
}

jobs=${DDP_FUZZ_JOBS:-$(getconf _NPROCESSORS_ONLN)}
each=$((seconds * jobs / ${#targets[@]}))
[ "$seconds" -eq 0 ] || [ "$each" -gt 0 ] || each=1
say "fuzzing ${#targets[@]} targets, $jobs at a time, $each s each"
for target in "${targets[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n || true; done
  fuzz "$target" &
done
wait
[ ! -e "$work/failed" ] || die "some targets failed: see above"
