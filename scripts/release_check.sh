#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Does everything of a release but publish it: compares the versions, runs all tests, builds and tries wheel and image,
# and looks at the licences of what is passed on. Then it prints what is left to do by hand.
#
# usage: scripts/release_check.sh [STEP…]
#   STEP   some of: versions golden tree ci slow licences wheel image gpu (default: all)
set -uo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
answer_help "$@"
cd "$DDP_ROOT" || exit
version=$(sed -n 's/^project(ddp VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
release=${version%.*}
steps=(versions golden tree ci slow licences wheel image gpu)
[ $# -gt 0 ] || set -- "${steps[@]}"
for step in "$@"; do
  [[ " ${steps[*]} " == *" $step "* ]] || { echo "error: there is no step $step; fix: take of ${steps[*]}" >&2; exit 64; }
done

# names FILE PATTERN WHAT: the file must have a line that matches.
names() {
  grep -qE "$2" "$1" || { warn "$1 does not name $3"; return 1; }
}

check_versions() {
  local failed=0
  names CITATION.cff "^version: ${version//./\\.}\$" "version: $version" || failed=1
  names packaging/spack/package.py "version\\(\"${version//./\\.}\"" "version(\"$version\")" || failed=1
  names docs/compatibility.md "^\\| ${release//./\\.} \\|" "release $release" || failed=1
  names CHANGELOG.md "^## ${version//./\\.} \\([0-9]{4}-[0-9]{2}-[0-9]{2}\\)" "$version with a date" || failed=1
  if git rev-parse -q --verify "refs/tags/v$version" >/dev/null; then
    warn "the tag v$version exists: raise the version in CMakeLists.txt"
    failed=1
  fi
  return $failed
}

# Files that this release writes, for the tests of all later ones.
check_golden() {
  [ -d "tests/golden/runs/$release" ] || {
    warn "tests/golden/runs/$release is missing: copy the run folder of ten steps, as the older ones are (host node1)"
    return 1
  }
  git diff --quiet "$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || echo HEAD)" --no-renames --diff-filter=MD -- \
    tests/golden/runs tests/golden/checkpoints || { warn "golden files of an earlier release were changed"; return 1; }
}

check_tree() { [ -z "$(git status --porcelain)" ] || { git status --short; return 1; }; }
check_ci() { .ci/run; }
check_slow() { ./test.sh -L slow; }

# The install tree has a licence for each library of others in it.
check_licences() {
  local tree library absent=0
  tree=$(mktemp -d)
  cmake --install "$DDP_BUILD" --prefix "$tree" >/dev/null || { rm -rf "$tree"; warn "run ./test.sh first"; return 1; }
  ls "$tree"/share/doc/*/licences
  for library in spdlog fmt nlohmann xxhash yaml-cpp turbojpeg png webp; do
    compgen -G "$tree/share/doc/*/licences/*$library*.txt" >/dev/null || { warn "no licence of $library"; absent=1; }
  done
  [ -n "$(find "$tree/share/doc" -name LICENSE)" ] || { warn "no licence of libddp"; absent=1; }
  rm -rf "$tree"
  return $absent
}

check_wheel() {
  rm -f build-wheel/dist/libddp-*.whl
  packaging/build_wheel.sh && packaging/try_wheel.sh build-wheel/dist/libddp-"$version"-*.whl
}

check_image() {
  has docker && docker info >/dev/null 2>&1 || has podman || return 77
  packaging/build_image.sh cpu && packaging/try_image.sh libddp:cpu
}

check_gpu() {
  local gpus
  gpus=$(num_gpus)
  [ "$gpus" -gt 0 ] || return 77
  DDP_REQUIRE_GPUS=$gpus ./test.sh -L gpu
}

passed=() failed=() open=()
for step in "$@"; do
  say "$step"
  ("check_$step")
  case $? in
    0) passed+=("$step") ;;
    77) open+=("$step") && warn "$step cannot be done on this machine" ;;
    *) failed+=("$step") ;;
  esac
done
say "passed: ${passed[*]:-none}; failed: ${failed[*]:-none}; open: ${open[*]:-none}"
[ ${#failed[@]} = 0 ] || exit 1
cat <<END
Left to do, in this order:
  the steps above that are open, on a machine that has what they need
  git tag -a v$version -m "libddp $version" && git push origin v$version
  a release page of v$version with the lines of CHANGELOG.md, build-wheel/dist/*.whl and their checksums (sha256sum)
  docker push of libddp:cpu and libddp:cuda
  scripts/build_reference.sh, and its folder build/reference where readers find it
  the next version in CMakeLists.txt, CITATION.cff and packaging/spack/package.py; "(unreleased)" in CHANGELOG.md
END
