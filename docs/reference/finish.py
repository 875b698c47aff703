#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Completes the site of scripts/build_reference.sh: copies the files that its pages link to, then checks all
links and the names of libddp in the pages' code.

usage: finish.py SITE (from the top of the repository)

Pages link to a file that has no page as files/PATH.txt, a picture as files/PATH (see filter.py). A relative
link that leads to no file or to no anchor is an error. So is `ddp::x` or `models::x` in a page if no header
names x, and a setting as in `train.max_steps=9` or `train.max_steps` that docs/configuration.md lacks. So is
a call of ctx.x(), model.x() or ->x() if no header names x.
"""

import pathlib
import re
import shutil
import subprocess
import sys
from urllib.parse import unquote

site = pathlib.Path(sys.argv[1])
texts = {path.name: path.read_text(encoding="utf-8") for path in site.glob("*.html")}
anchors = {name: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for name, text in texts.items()}
errors, copied, count = [], set(), 0
for page, text in sorted(texts.items()):
    for link in re.findall(r'\b(?:href|src)="([^"]*)"', text):
        if re.match(r"[a-z]+:|$", link):
            continue
        count += 1
        name, _, anchor = unquote(link).partition("#")
        if name.startswith("files/") and name not in copied:
            source = pathlib.Path(name.removeprefix("files/").removesuffix(".txt"))
            if source.is_file():
                (site / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, site / name)
                copied.add(name)
        if name and not (site / name).is_file():
            errors.append(f"{page} links to {link}: no such file")
        elif anchor and (name or page) in anchors and anchor not in anchors[name or page]:
            errors.append(f"{page} links to {link}: no such anchor")


def git_files(*patterns):
    names = subprocess.run(
        ["git", "ls-files", *patterns], check=True, capture_output=True, text=True
    ).stdout.split()
    return ((name, pathlib.Path(name).read_text(encoding="utf-8")) for name in names)


FILE_ENDINGS = {"hpp", "cpp", "py", "json", "yaml", "csv", "md", "safetensors"}
words = {"ddp", "pch", "models", "pretrained", "tokens"}  # CMake's targets
for _, text in git_files(
    "libddp/include/*.hpp", "libddp/ops/include/*.hpp", "models/include/*.hpp", ":!*/detail/*"
):
    words.update(re.findall(r"\w+", text))
settings = pathlib.Path("docs/configuration.md").read_text(encoding="utf-8")
keys = set(re.findall(r"^\| `([\w.]+)`", settings, re.MULTILINE))
sections = {key.split(".")[0] for key in keys}
for page, text in git_files("README.md", "docs/*.md"):
    for code in re.findall(r"`([^`\n]+)`", text):
        for name in re.findall(r"\b(?:ddp|models)::(\w+)", code):
            if name not in words:
                errors.append(f"{page} names {name} in `{code}`, which no public header has")
        for key in re.findall(r"(?<!\S)([a-z]\w*\.\w[\w.]*)(?==|$)", code):
            last = key.rpartition(".")[2]
            # For example optimizer.step, or a file such as model.cpp.
            is_other = f"{key}=" not in code and (last in words or last in FILE_ENDINGS)
            if key.split(".")[0] in sections and key not in keys and not is_other:
                errors.append(f"{page} names the setting {key}, which docs/configuration.md lacks")
        for name in re.findall(r"(?:\b(?:ctx|model)\.|->)(\w+)\(", code):
            if name not in words:
                errors.append(f"{page} calls {name} in `{code}`, which no public header has")
print(f"{len(texts)} pages, {count} links, {len(copied)} copied files")
if errors:
    sys.exit("\n".join(sorted(set(errors))))
