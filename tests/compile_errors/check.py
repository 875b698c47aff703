#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles a file of wrong code and compares the compiler's errors with its comments "// error: SENTENCE".

usage: check.py compile_commands.json FILE
"""

import collections
import json
import os
import re
import shlex
import subprocess
import sys

MAX_LINES = 16  # of one mistake, notes and the instantiations behind it included


def compile_file(commands, path):
    """What the compiler prints for a file, by the flags of the build."""
    with open(commands, encoding="utf-8") as file:
        entry = next(e for e in json.load(file) if os.path.samefile(e["file"], path))
    words = shlex.split(entry["command"])
    del words[words.index("-o") : words.index("-o") + 2]
    words[words.index("-c")] = "-fsyntax-only"
    result = subprocess.run(
        words,
        cwd=entry["directory"],
        env=os.environ | {"LC_ALL": "C"},
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    return result.returncode, result.stderr


def main():
    commands, path = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        expected = re.findall(r"^ *// error: (.*)$", file.read(), re.MULTILINE)
    status, text = compile_file(commands, path)
    errors = re.findall(r" error: (.*)$", text, re.MULTILINE)
    problems = []
    for error in errors:
        if not any(sentence in error for sentence in expected):
            problems.append(f"no comment has: {error}")
    for sentence, count in collections.Counter(expected).items():
        found = sum(sentence in error for error in errors)
        if found != count:
            problems.append(f"{count} comments, but {found} errors have: {sentence}")
    num_lines = text.count("\n")
    if not expected or status == 0:
        problems.append(f"the compiler ended with {status}, {len(expected)} errors are expected")
    if num_lines > MAX_LINES * len(expected):
        problems.append(f"{num_lines} lines for {len(expected)} mistakes; {MAX_LINES} are allowed for each")
    print(f"{num_lines} lines for {len(expected)} mistakes")
    if problems:
        sys.exit("\n".join([text, *problems]))


if __name__ == "__main__":
    main()
