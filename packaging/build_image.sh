#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds a container image of the trainers with docker, podman or buildah, whichever is found first.
#
# usage: packaging/build_image.sh cpu|cuda [--base IMAGE] [--tag NAME] [--tool TOOL] [-- arguments of TOOL]
#   --base IMAGE   image to start from (default: debian:12; ubuntu:24.04 works too)
#   --tag NAME     name of the new image (default: libddp:cpu or libddp:cuda)
#   --tool TOOL    docker, podman or buildah
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh"
answer_help "$@"

usage() {
  printf 'error: %s; fix: packaging/build_image.sh --help lists the arguments\n' "$*" >&2
  exit 64
}
target=${1:-}
case $target in
  cpu | cuda) shift ;;
  *) usage "the first argument must be cpu or cuda, not '$target'" ;;
esac
base=debian:12
tag=libddp:$target
tool=
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    --base | --tag | --tool) [ $# -gt 1 ] || usage "$1 needs a value" ;;
    *) usage "there is no option $1" ;;
  esac
  printf -v "${1#--}" '%s' "$2"
  shift 2
done
[ $# = 0 ] || shift  # --
works() { has "$1" && "$1" info >/dev/null 2>&1; }
case $tool in
  '')
    for tool in docker podman buildah ''; do
      [ -z "$tool" ] || ! works "$tool" || break
    done
    [ -n "$tool" ] || die "none of docker, podman and buildah works here; fix: install one (Debian: apt-get install buildah)"
    ;;
  docker | podman | buildah) works "$tool" || usage "--tool $tool is not installed, or its daemon does not run" ;;
  *) usage "--tool must be docker, podman or buildah, not '$tool'" ;;
esac

started=$SECONDS
"$tool" build --build-arg "BASE=$base" --target "$target" --tag "$tag" --file "$DDP_ROOT/packaging/docker/Dockerfile" \
  "$@" "$DDP_ROOT" || die "the image could not be built: see above"
say "$tag is built after $((SECONDS - started)) s"
"$tool" images "$tag"
