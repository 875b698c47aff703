#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fuzzes the reader of exported archives (tests/export/fuzz_program.cpp) with libFuzzer under the address and
# undefined-behaviour sanitizers. Needs clang++ and a build. The corpus stays in build-fuzz/.
#
# usage: scripts/fuzz_export.sh SECONDS [ARCHIVE.pt2 …]   (archives: more seeds)
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
answer_help "$@"
[ $# -ge 1 ] || die "usage: scripts/fuzz_export.sh SECONDS [ARCHIVE.pt2 …]"
cd "$DDP_ROOT"
install_python_parts
torch=$LIBTORCH_ROOT
mkdir -p build-fuzz/corpus
say "building build-fuzz/fuzz_export"
sources=(tests/export/fuzz_program.cpp libddp/src/export/*.cpp libddp/src/core/{file_mapping,file_ops,file_content,text}.cpp
  libddp/src/ops/{checkpoint,weight_copies}.cpp)
objects=()
for source in "${sources[@]}"; do
  object=build-fuzz/$(basename "${source%.cpp}").o
  objects+=("$object")
  [ "$object" -nt "$source" ] || clang++ -std=c++20 -O1 -g1 -fPIC -c "$source" -o "$object" -D_GLIBCXX_USE_CXX11_ABI=1 \
    -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize=vptr,function -DFMT_HEADER_ONLY -DSPDLOG_FMT_EXTERNAL \
    -Ilibddp/include -Ilibddp/src -Itests -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include"
done
clang++ -fsanitize=fuzzer,address,undefined "${objects[@]}" -o build-fuzz/fuzz_export -L"$torch/lib" -ltorch -ltorch_cpu \
  -lc10 -lssl -lcrypto -lxxhash -Wl,-rpath,"$torch/lib"
for archive in tests/golden/exported/*/model.pt2 "${@:2}"; do
  name=$(echo "$archive" | tr '/' '_')
  cp "$archive" "build-fuzz/corpus/$name"
  unzip -p "$archive" '*/models/model.json' >"build-fuzz/corpus/$name.json"
done
say "fuzzing for $1 s"
ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=0 build-fuzz/fuzz_export build-fuzz/corpus -max_total_time="$1" \
  -max_len=400000 -timeout=20 -rss_limit_mb=6000 -artifact_prefix=build-fuzz/ -print_final_stats=1
