#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copies those libraries of LibTorch and CUDA that libddp's programs load, with the licences of their packages.
# TREE/libddp is an install tree with -DDDP_TORCH_BESIDE=ON, or a wheel's folder.
#
# usage: packaging/docker/copy_libraries.sh SITE TREE
#   SITE   Python's site-packages, with torch and nvidia
#   TREE   gets torch/lib and nvidia/*/lib beside libddp, and licences/
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/setup.sh"
answer_help "$@"
if [ $# != 2 ] || [ ! -d "$1/torch/lib" ] || [ ! -d "$2/libddp/lib" ]; then
  echo "error: SITE must have torch/lib, and TREE libddp/lib; fix: packaging/docker/copy_libraries.sh SITE TREE" >&2
  exit 64
fi
site=$(realpath "$1")
tree=$(realpath "$2")

# The loader itself says which libraries are needed: for this it finds them through links.
ln -sfn "$site/torch" "$tree/torch"
ln -sfn "$site/nvidia" "$tree/nvidia"
found=$(ldd "$tree"/libddp/bin/* "$tree"/libddp/lib/*.so*)
rm "$tree/torch" "$tree/nvidia"
! grep 'not found' <<<"$found" || die "a library is missing: see above"
mapfile -t libraries < <(sed -nE "s#.* => $tree/.*/(torch|nvidia/[^/]+)/lib/([^ ]+) .*#\\1/lib/\\2#p" <<<"$found" | sort -u)
[ ${#libraries[@]} -gt 0 ] || die "the programs in $tree/libddp load nothing of LibTorch: build them with -DDDP_TORCH_BESIDE=ON"
cd "$site"
# cuDNN loads its parts by name, and LibTorch the compiler of kernels.
if grep -q libtorch_cuda <<<"$found"; then
  libraries+=(nvidia/cudnn/lib/libcudnn*.so* nvidia/cu13/lib/libnvrtc{,-builtins}.so.13* torch/lib/libcaffe2_nvrtc.so)
fi
for library in "${libraries[@]}"; do
  install -D "$library" "$tree/$library"
done

# Each package of pip lists its files. Licences are in its *.dist-info.
for library in "${libraries[@]}"; do
  record=$(grep -lF "$library," ./*.dist-info/RECORD) || die "no package of pip lists $library: its licence is unknown"
  package=$(basename "$(dirname "${record%%$'\n'*}")" .dist-info)
  [ ! -e "$tree/licences/$package" ] || continue
  mkdir -p "$tree/licences/$package"
  mapfile -t texts < <(find "$package.dist-info" -type f \( -iname '*licen*' -o -iname '*notice*' -o -iname '*copying*' \))
  [ ${#texts[@]} -gt 0 ] || texts=("$package.dist-info/METADATA")  # it names the licence
  cp "${texts[@]}" "$tree/licences/$package"
done
