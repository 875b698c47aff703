#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares every Python file with ruff's layout and rules in pyproject.toml. Other versions of ruff lay lines out
# differently, so the version that pyproject.toml names is installed into .venv if it is missing.
#
# usage: scripts/check_python.sh
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
answer_help "$@"
cd "$DDP_ROOT"

version=$(sed -n 's/^required-version = "==\(.*\)"$/\1/p' pyproject.toml)
[ -n "$version" ] || die "pyproject.toml names no version of ruff (required-version)"
ruff=
for candidate in ruff "$DDP_VENV/bin/ruff"; do
  if [ "$("$candidate" --version 2>/dev/null)" = "ruff $version" ]; then
    ruff=$candidate
    break
  fi
done
if [ -z "$ruff" ]; then
  pip_install "ruff==$version"
  ruff=$DDP_VENV/bin/ruff
fi
# Programs without .py in their names are found by their first line.
mapfile -t files < <({ git ls-files '*.py'; git grep -IlE '^#!.*python' -- ':!*.*'; } | sort -u)
[ ${#files[@]} -gt 0 ] || die "git ls-files lists no sources: is this a git checkout that belongs to you (safe.directory)?"
"$ruff" format --no-cache --check --quiet "${files[@]}" ||
  die "some files have another layout; run: $ruff format . (and see what changes with $ruff format --diff .)"
"$ruff" check --no-cache --quiet "${files[@]}" ||
  die "correct the lines above; $ruff check --fix . corrects some of them, and pyproject.toml says which rules count"
say "${#files[@]} Python files are formatted and keep the rules"
