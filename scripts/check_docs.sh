#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares documentation with the files: links lead to files, files named in commands exist, and every source file
# has its licence line. (The test docs_configuration compares docs/configuration.md with the code.)
#
# usage: scripts/check_docs.sh
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
answer_help "$@"
cd "$DDP_ROOT"
failed=0

# files PATTERN…: prints the tracked files that match. No file at all is an error, because then git did not work.
files() {
  local list
  list=$(git ls-files "$@") || true
  [ -n "$list" ] || die "git ls-files lists no $*: is this a git checkout that belongs to you (safe.directory)?"
  echo "$list"
}
pages=$(files '*.md')
sources=$(files '*.hpp' '*.cpp' '*.cmake' '*CMakeLists.txt' '*.sh' '*.py' '*.sbatch' '*.cu' '*.cuh')
with_commands=$pages$'\n'$(files 'examples/*.cpp' 'examples/configs/*' 'slurm/*' 'tools/*.cpp' '.github/*' quickstart.sh \
  test.sh)

# Links to files in the repository.
while IFS=: read -r file link; do
  target=$(dirname "$file")/${link%%#*}
  [ -e "$target" ] || { warn "$file links to $link, which does not exist"; failed=1; }
done < <(while read -r file; do
  grep -oE '\]\([^) ]+\)' "$file" | sed -E 's/^\]\((.*)\)$/\1/' | grep -vE '^(https?:|#|mailto:)' |
    sed "s|^|$file:|" || true
done <<<"$pages")

# Paths in text and commands, relative to the top of the repository. A name without an extension may be a program with a
# source of that name. build/… is made later, and slurm/env.sh by the reader.
while IFS=: read -r file line path; do
  path=$(sed -E 's/^[^A-Za-z.]//; s/[.]+$//' <<<"$path")
  case $path in *[\<\*]*) continue ;; esac
  [ -e "$path" ] && continue
  [[ $path != ./* ]] && [ -e "$path.cpp" ] && continue
  git check-ignore -q "$path" && continue
  warn "$file:$line names $path, which does not exist"
  failed=1
done < <(tr '\n' '\0' <<<"$with_commands" | xargs -0 grep -HnoE \
  '(^|[^A-Za-z0-9_./<>*-])(\./)?(examples|scripts|slurm|benchmarks|tests|tools|cmake|packaging|\.ci)/[A-Za-z0-9_./*<>-]*')

# Each recipe is in the index and has a page with the commands of the program's comment.
while read -r program; do
  name=$(basename "$program" .cpp)
  page=docs/recipes/$name.md
  if ! grep -qF "](../../$program)" "$page" || ! grep -qF "]($name.md)" docs/recipes/README.md; then
    warn "$program needs a page $page that links to it, and a line in docs/recipes/README.md"
    failed=1
  fi
  while read -r command; do
    grep -qF -- "$command" "$page" || { warn "$page lacks the command '$command' of $program"; failed=1; }
  done < <(sed -n 's|^//   ||p' "$program")
done < <(files 'examples/recipes/*.cpp')

while read -r file; do
  head -n 3 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' ||
    { warn "$file has no SPDX line"; failed=1; }
done <<<"$sources"

[ $failed = 0 ] || die "documentation does not match the files: see the warnings above"
say "documentation matches the files"
