#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the reference: README, docs/ and every public symbol as one static site with search. Open
# build/reference/index.html in a browser. A public symbol without a comment, any other warning of Doxygen and a link
# that leads nowhere are errors.
#
# usage: scripts/build_reference.sh
#   DOXYGEN   the program (default: doxygen; 1.9.4 or newer)
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
answer_help "$@"
cd -P "$DDP_ROOT"  # Doxygen resolves links in paths
: "${DOXYGEN:=doxygen}"

if ! has "$DOXYGEN"; then
  if [ "${DDP_SKIP_PACKAGES:-0}" = 1 ]; then
    warn "$DOXYGEN is not installed, and DDP_SKIP_PACKAGES=1 forbids to install it: the reference was not built"
    exit 0
  fi
  apt_get update || true
  apt_get install -y --no-install-recommends doxygen || true
  has "$DOXYGEN" || die "$DOXYGEN is not installed; as root: apt-get install doxygen"
fi
version=$("$DOXYGEN" --version)
version=${version%% *}
version_at_least "$version" 1.9.4 || die "$DOXYGEN is version $version; the reference needs 1.9.4 or newer"

# The tree on the left shows the pages in this order, then those of other folders.
first=(README.md docs/README.md docs/tutorial.md docs/running.md docs/coming_from.md docs/recipes/README.md
  docs/architecture.md docs/one_step.md docs/semantics.md docs/semantics_collectives.md docs/semantics_graphs.md
  docs/semantics_training.md docs/metrics.md docs/configuration.md docs/language_models.md data/README.md)
# Maps of source folders are for readers of the sources. Pages link to them as files.
mapfile -t other < <(git ls-files --cached --others --exclude-standard 'docs/*.md' '*.md' ':!libddp/*')
mapfile -t headers < <(git ls-files --cached --others --exclude-standard 'libddp/include/ddp/*.hpp' 'libddp/ops/include/*.hpp' \
  'models/include/*.hpp' ':!*/detail/*')
[ ${#headers[@]} -gt 0 ] || die "git ls-files lists no headers: is this a git checkout that belongs to you (safe.directory)?"
mapfile -t input < <(printf '%s\n' "${first[@]}" "${other[@]}" docs/reference/namespaces.dox "${headers[@]}" |
  awk '!seen[$0]++')

site=$DDP_BUILD/reference
rm -rf "$site" && mkdir -p "$site"
say "Doxygen $version: ${#headers[@]} headers"
FILTERED=$(mktemp -d)
export FILTERED
trap 'rm -rf "$FILTERED"' EXIT
python3 docs/reference/filter.py "$FILTERED" "${input[@]}"
settings() {
  cat docs/reference/Doxyfile
  echo "PROJECT_NUMBER=$(sed -n 's/^project(.* VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)"
  echo "INPUT=${input[*]}"
  echo "INPUT_FILTER=\"sh -c 'cat \$FILTERED\${0#\$PWD}'\""
  echo "USE_MDFILE_AS_MAINPAGE=$PWD/README.md"
  ! version_at_least "$version" 1.9.5 || echo "HTML_COLORSTYLE=LIGHT"
}
if ! settings | "$DOXYGEN" - 2>"$FILTERED/errors"; then
  sed "s|$PWD/||g" "$FILTERED/errors" | awk '!seen[$0]++' >&2  # inherited members are reported again
  die "the reference has errors: see above"
fi
python3 docs/reference/finish.py "$site" || die "the reference has broken links: see above"
say "the reference is in ${site#"$PWD/"}/index.html"
