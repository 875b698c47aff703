#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks that Clang (14 or newer) accepts the sources and public headers of libddp and ddp_tokens: syntax only, after a
# build, with the build's options.
#
# usage: scripts/check_clang.sh [--each]
#   --each    each source by itself, as a build without the scripts compiles it: units of several files hide missing
#             includes. Takes 10 minutes on 2 cores; without it, a minute
#   CLANG     the compiler (default: clang++)
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
answer_help "$@"
each=${1:-}
[ -z "$each" ] || [ "$each" = --each ] || die "unknown option $each: use --each, or none"
cd "$DDP_ROOT"
: "${CLANG:=clang++}"

if ! has "$CLANG"; then
  if [ "${DDP_SKIP_PACKAGES:-0}" = 1 ]; then
    warn "$CLANG is not installed, and DDP_SKIP_PACKAGES=1 forbids to install it: nothing was checked with Clang"
    exit 0
  fi
  apt_get update || true
  # libclang-rt-dev: libFuzzer and the sanitizers, for scripts/fuzz.sh
  apt_get install -y --no-install-recommends clang libclang-rt-dev || die "$CLANG is not installed; as root: apt-get install clang"
fi
[ -e "$DDP_BUILD/compile_commands.json" ] || die "there is no build whose options could be used; run: ./test.sh"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git ls-files 'libddp/include/*.hpp' 'libddp/ops/include/*.hpp' | sed 's|.*/include/\(.*\)|#include "\1"|' >"$work/ddp.cpp"
git ls-files 'models/include/models/tokens/*.hpp' | sed 's|models/include/\(.*\)|#include "\1"|' >"$work/ddp_tokens.cpp"
# Prints one command per line: the build's own, without options that only GCC knows or that write a file. The file
# with all headers of a target gets that target's options.
python3 - "$DDP_BUILD/compile_commands.json" "$CLANG" "$work" "$each" >"$work/commands" <<'PYTHON'
import json, pathlib, re, shlex, shutil, subprocess, sys

database, clang, work, each = sys.argv[1:]
check = [clang, "-fsyntax-only", "-w"]

def options_of(entry, copy):
    words = iter(shlex.split(entry["command"])[1:])
    for word in words:
        if word in ("-o", "-c"):
            next(words)
        elif word == "-include":  # Clang does not read what GCC has precompiled beside it
            original = next(words)
            if not copy.exists():
                shutil.copyfile(original, copy)
            yield from (word, str(copy))
        elif not word.startswith("-W"):
            yield word

def sources_of(file):
    if not each or not file.endswith(".cxx"):
        return [file]
    return re.findall('^#include "(.*)"', pathlib.Path(file).read_text(encoding="utf-8"), re.MULTILINE)

def print_commands(entries, copy):
    for entry in entries:
        options = [*options_of(entry, copy)]
        pch = pathlib.Path(f"{copy}.pch")
        if copy.exists() and not pch.exists():
            bare = [word for word in options if word not in ("-include", str(copy))]
            subprocess.run([clang, "-w", "-x", "c++-header", *bare, str(copy), "-o", str(pch)], check=True)
        for file in sources_of(entry["file"]):
            print(shlex.join([*check, *options, file]))

entries = [e for e in json.load(open(database, encoding="utf-8"))
           if e["file"].endswith((".cpp", ".cxx")) and "cmake_pch" not in e["file"]]
targets = {name: [e for e in entries if f"/{folder}/CMakeFiles/{name}.dir/" in "/" + e["output"]]
           for folder, name in (("libddp", "ddp_core"), ("libddp", "ddp_ops"), ("libddp", "ddp"),
                                ("models/tokens", "ddp_tokens"))}
for name in ("ddp_core", "ddp", "ddp_tokens"):
    if not targets[name]:
        sys.exit(f"{database} names no sources of {name}")
for name in ("ddp", "ddp_tokens"):
    targets[name].append({**targets[name][0], "file": f"{work}/{name}.cpp"})
for name in targets:
    print_commands(targets[name], pathlib.Path(f"{work}/{name}.hxx"))
PYTHON
say "$("$CLANG" --version | head -n 1): $(wc -l <"$work/commands") units"
tr '\n' '\0' <"$work/commands" | xargs -0 -P "$(nproc)" -I{} bash -c '{}' || die "Clang found errors: see above"
say "Clang found no errors"
