#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Documentation in step with the files: links lead somewhere and every source file carries its licence
# line. (docs/configuration.md against the code is a ctest: docs_configuration.)
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$DDP_ROOT"
failed=0

# Links to files in the repository.
while IFS=: read -r file link; do
  target=$(dirname "$file")/${link%%#*}
  [ -e "$target" ] || { warn "$file links to $link, which does not exist"; failed=1; }
done < <(git ls-files '*.md' | while read -r file; do
  grep -oE '\]\([^)]+\)' "$file" | sed -E 's/^\]\((.*)\)$/\1/' | grep -vE '^(https?:|#|mailto:)' |
    sed "s|^|$file:|" || true
done)

while read -r file; do
  head -n 3 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' ||
    { warn "$file has no SPDX line"; failed=1; }
done < <(git ls-files '*.hpp' '*.cpp' '*.cu' '*.cuh' '*.cmake' '*CMakeLists.txt' '*.sh' '*.py' '*.sbatch')

[ $failed = 0 ] || die "documentation and files: see the warnings above"
say "documentation is in step with the code"
