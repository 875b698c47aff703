#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares every C++ and CUDA file with .clang-format. Other versions of clang-format wrap lines differently, so
# version 14 is installed into .venv if it is missing.
#
# usage: scripts/check_format.sh
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
answer_help "$@"
cd "$DDP_ROOT"

format=
for candidate in clang-format-14 clang-format "$DDP_VENV/bin/clang-format"; do
  if "$candidate" --version 2>/dev/null | grep -q 'version 14\.'; then
    format=$candidate
    break
  fi
done
if [ -z "$format" ]; then
  pip_install clang-format==14.0.6
  format=$DDP_VENV/bin/clang-format
fi
mapfile -t files < <(git ls-files '*.hpp' '*.cpp' '*.cu' '*.cuh')
[ ${#files[@]} -gt 0 ] || die "git ls-files lists no sources: is this a git checkout that belongs to you (safe.directory)?"
"$format" --dry-run --Werror "${files[@]}" || die "run: $format -i on the files above"
say "${#files[@]} files are formatted"
