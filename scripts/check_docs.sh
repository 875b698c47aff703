#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Documentation in step with the files: links lead somewhere, files named in commands exist, and every
# source file carries its licence line. (docs/configuration.md against the code is a ctest:
# docs_configuration.)
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$DDP_ROOT"
failed=0

# files pattern…: what git knows of it; none at all means that git did not work, not that all is well.
files() {
  local list
  list=$(git ls-files "$@") || true
  [ -n "$list" ] || die "git ls-files lists no $*: is this a git checkout that belongs to you (safe.directory)?"
  echo "$list"
}
pages=$(files '*.md')
sources=$(files '*.hpp' '*.cpp' '*.cmake' '*CMakeLists.txt' '*.sh' '*.py' '*.sbatch' '*.cu' '*.cuh')
with_commands=$pages$'\n'$(files 'examples/*.cpp' 'examples/configs/*' 'slurm/*' 'tools/*.cpp' quickstart.sh test.sh)

# Links to files in the repository.
while IFS=: read -r file link; do
  target=$(dirname "$file")/${link%%#*}
  [ -e "$target" ] || { warn "$file links to $link, which does not exist"; failed=1; }
done < <(while read -r file; do
  grep -oE '\]\([^)]+\)' "$file" | sed -E 's/^\]\((.*)\)$/\1/' | grep -vE '^(https?:|#|mailto:)' |
    sed "s|^|$file:|" || true
done <<<"$pages")

# Paths in text and commands, as seen from the repository's top. A name without an extension may be a
# program of that source; build/… is made later, slurm/env.sh by the reader.
while IFS=: read -r file line path; do
  path=$(sed -E 's/^[^A-Za-z.]//; s/[.]+$//' <<<"$path")
  case $path in *[\<\*]*) continue ;; esac
  [ -e "$path" ] && continue
  [[ $path != ./* ]] && [ -e "$path.cpp" ] && continue
  git check-ignore -q "$path" && continue
  warn "$file:$line names $path, which does not exist"
  failed=1
done < <(tr '\n' '\0' <<<"$with_commands" | xargs -0 grep -HnoE \
  '(^|[^A-Za-z0-9_./<>*-])(\./)?(examples|scripts|slurm|benchmarks|tests|tools|cmake|\.ci)/[A-Za-z0-9_./*<>-]*')

while read -r file; do
  head -n 3 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' ||
    { warn "$file has no SPDX line"; failed=1; }
done <<<"$sources"

[ $failed = 0 ] || die "the documentation does not match: see the warnings above"
say "the documentation matches the code"
