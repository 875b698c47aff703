#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Breaks the code on purpose, one patch at a time, and expects the named test to fail. Works in a copy
# below build-mutations/, so the checkout stays as it is. Usage: run.sh [name or glob …]
#
# A patch begins with "# expects: <regular expression of ctest names>"; more such lines may follow and
# mean that one of the tests must fail. Exit code: 0 where all are caught, 77 where none survived but
# some could not be tried, for their tests were skipped (they need GPUs that are not here), else 1.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=scripts/setup.sh
source "$here/../../scripts/setup.sh"

work=$DDP_ROOT/build-mutations
source_copy=$work/source
DDP_BUILD=$source_copy/build
log=$work/log.txt
mkdir -p "$source_copy"

# Copies what differs, with a new time stamp: a second run compiles only what changed, and also what an
# earlier run left mutated, in the file or in its object.
copy_sources() {
  local file
  (cd "$DDP_ROOT" && git ls-files -z --cached --others --exclude-standard) | while IFS= read -r -d '' file; do
    [ -f "$DDP_ROOT/$file" ] || continue
    cmp -s "$DDP_ROOT/$file" "$source_copy/$file" && continue
    mkdir -p "$(dirname "$source_copy/$file")"
    rm -f "$source_copy/$file"
    cp --preserve=mode "$DDP_ROOT/$file" "$source_copy/$file"
  done
}

expected_tests() { sed -n 's/^# expects: *//p' "$1" | paste -sd'|'; }

# The programs that the tests start, as targets of the build. Read from CTest's files: `ctest
# --show-only` leaves out the commands of programs that do not exist yet.
programs_of() {
  find "$DDP_BUILD" -name CTestTestfile.cmake -exec grep -h '^add_test(' {} + | python3 -c '
import os, re, shlex, sys
build, wanted = os.path.realpath(sys.argv[1]) + "/", re.compile(sys.argv[2])
names = set()
for line in sys.stdin:
    name, *command = shlex.split(line.strip()[len("add_test("):-1])
    for word in command if wanted.search(name.strip("[]=")) else []:
        path = os.path.realpath(word)
        if word.startswith("/") and path.startswith(build) and not os.path.isdir(path):
            names.add(path[len(build):])
try:  # a folder that a test will make is no target
    names &= set(re.findall("^build ([^:| ]+)", open(build + "build.ninja").read(), re.M))
except FileNotFoundError:
    pass
for name in sorted(names):
    print(name)' "$DDP_BUILD" "$1"
}

build_tests() {
  local programs
  mapfile -t programs < <(programs_of "$1")
  [ ${#programs[@]} -gt 0 ] || return 0  # scripts alone
  cmake --build "$DDP_BUILD" --parallel "${DDP_BUILD_JOBS:-$(build_jobs)}" --target "${programs[@]}" >>"$log" 2>&1
}

run_tests() {  # expression [seconds]: a test that hangs is a failing test
  (cd "$DDP_BUILD" && timeout -k 5 "${2:-1200}" ctest -R "$1" --no-tests=error --stop-on-failure >>"$log" 2>&1)
}

row() { printf '%-52s %-9s %-7s %-9s %5s s\n' "$@"; }

# Whether of the present mutation's tests none ran.
all_skipped() {
  local results
  results=$(tac "$log" | sed '/^### /q')
  grep -q '[*]Skipped' <<<"$results" && ! grep -q ' Passed ' <<<"$results"
}

# mutate patch: prints a row; 0 where the mutation was caught, 77 where its tests were skipped.
mutate() {
  local patch=$1 name tests started=$SECONDS result built=- applied=yes
  name=$(basename "$patch" .patch)
  tests=$(expected_tests "$patch")
  echo "### $name: $tests" >>"$log"
  if [ -z "$tests" ] || ! grep -q '^# expects:' <(head -n 1 "$patch"); then
    row "$name" "no expects" - "NOT RUN" 0
    return 1
  fi
  mutated=$patch
  if ! apply_patch "$patch" >>"$log" 2>&1; then
    applied=NO result="NOT RUN"
  elif ! build_tests "$tests"; then
    built=NO result="NOT RUN"
  elif run_tests "$tests" 120; then
    built=yes result="SURVIVED"
    all_skipped && result="skipped"
  else
    built=yes result="caught"
  fi
  copy_back "$patch"
  mutated=
  row "$name" "$applied" "$built" "$result" $((SECONDS - started))
  case $result in caught) return 0 ;; skipped) return 77 ;; *) return 1 ;; esac
}

# git's own: `patch` is not on every system. The copy lies inside the checkout, whose repository git
# must not find: it would leave out the files that this repository ignores.
apply_patch() {
  (cd "$source_copy" && GIT_CEILING_DIRECTORIES=$work git apply -C1 -p1 "$1")
}

# Restores the files of a patch, with a new time stamp: the build must see that they changed back.
copy_back() {
  local file
  sed -n 's#^[-+][-+][-+] [ab]/##p' "$1" | sort -u | while read -r file; do
    if [ -e "$DDP_ROOT/$file" ]; then
      cp "$DDP_ROOT/$file" "$source_copy/$file"
    else
      rm -f "$source_copy/$file"
    fi
  done
}

patches=()
if [ $# = 0 ]; then
  patches=("$here"/*.patch)
else
  for wanted in "$@"; do
    for patch in "$here"/${wanted%.patch}.patch; do patches+=("$patch"); done
  done
fi
[ -e "${patches[0]:-}" ] || die "no patches named ${*:-*} in $here"

# Stopped in the middle of a mutation: the copy must not stay broken, with objects that look current.
mutated=
trap '[ -z "$mutated" ] || copy_back "$mutated"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

: >"$log"
say "copying and configuring (log: build-mutations/log.txt)"
copy_sources
install_packages
install_python_parts
root=$DDP_ROOT DDP_ROOT=$source_copy
configure -DDDP_BUILD_TESTS=ON -DDDP_BUILD_EXAMPLES=ON >>"$log" 2>&1 || die "configuration failed: see $log"
cmake "$DDP_BUILD" >>"$log" 2>&1  # tests that are new since the last run
DDP_ROOT=$root
mpi_settings
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

all=$(for patch in "${patches[@]}"; do expected_tests "$patch"; done | sort -u | paste -sd'|')
say "building and running the named tests without mutation"
build_tests "$all" || die "the unmutated tests do not build: see $log"
run_tests "$all" || die "a named test fails without any mutation: see $log"

row mutation applied built result time
caught=0 skipped=0
for patch in "${patches[@]}"; do
  mutate "$patch" && code=0 || code=$?
  case $code in 0) caught=$((caught + 1)) ;; 77) skipped=$((skipped + 1)) ;; esac
done
say "$caught of ${#patches[@]} mutations caught"
[ $skipped = 0 ] || warn "$skipped were not tried: their tests were skipped here (see $log), as those of GPUs are where none is"
[ $((caught + skipped)) = ${#patches[@]} ] || exit 1
[ $skipped = 0 ] || exit 77
