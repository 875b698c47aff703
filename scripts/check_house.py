#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures classes, functions, files, folders, headers, pages and commit subjects against the limits below.

Prints one line per thing above its limit, then the totals. The exit code is 1 if anything is above its limit.
Universal Ctags finds classes and functions of C++. It is installed if it is missing, and without it these
classes and functions are not measured.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from typing import NamedTuple

# A class with more methods probably does two things. Private methods and overloads count.
METHODS_PER_CLASS = 30
# So does a class with more data members. Members of a nested struct count for that struct.
MEMBERS_PER_CLASS = 25
# A function should fit on one screen.
FUNCTION_LINES = 60
# A source, test or script should be readable in one sitting.
FILE_LINES = 500
# Public headers are what users read and what must stay compatible. Their lines are added up.
PUBLIC_HEADER_LINES = 4500
# Headers below detail/ are installed, but are no interface. Their lines are added up too.
DETAIL_HEADER_LINES = 1700
# A reader should see at a glance what a folder of sources contains.
SOURCES_PER_FOLDER = 25
# A longer page should be two pages with one subject each. README is what a reader sees first, and CHANGELOG
# what a user reads before an update.
PAGE_LINES = 300
LINES_OF_PAGES = {"README.md": 110, "CHANGELOG.md": 40}
# Prose must be readable in a terminal and in the two halves of a comparison. Tables and code may be wider.
PROSE_COLUMNS = 120
# `git log --oneline` cuts longer subjects.
SUBJECT_CHARACTERS = 72
# Older subjects cannot change any more, so only this many commits are read.
NUM_COMMITS = 50

CPP = (".cpp", ".hpp", ".h", ".cu", ".cuh")
SCRIPTS = (".py", ".sh", ".sbatch")
# Classes and functions are measured in these folders. A test is as long as its story.
CODE = re.compile(r"(libddp|models|examples|tools|benchmarks)/")
CROWDED = re.compile(r"(libddp/src|libddp/ops|models|tests)/")
HEADERS = re.compile(r"libddp/(\w+/)?include/")
PAGES = re.compile(r"docs/.*\.md|[A-Z]+\.md")
# It is generated.
PAGES_OF_ANY_LENGTH = ("docs/configuration.md",)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Measure(NamedTuple):
    thing: str
    number: int
    unit: str
    limit: int


def fail(message):
    sys.exit(f"error: {message}")


def git(*arguments):
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def tracked_files():
    names = [name for name in git("ls-files", "-z").split("\0") if os.path.isfile(name)]
    if not names:
        fail("git ls-files lists no file: is this a git checkout that belongs to you (safe.directory)?")
    return names


def lines_of(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().splitlines()


# --- classes and functions ---------------------------------------------------------------------
def find_ctags():
    """Debian calls the program ctags-universal too, because `ctags` may be another one."""
    for name in "ctags-universal", "ctags":
        if shutil.which(name):
            done = subprocess.run([name, "--version"], capture_output=True, text=True, check=False)
            if "Universal Ctags" in done.stdout:
                return name
    return None


def install_ctags():
    command = ["bash", "-c", 'source "$0/scripts/setup.sh" && install_packages', ROOT]
    subprocess.run(command, stdout=sys.stderr, check=False)
    return find_ctags()


def read_tags(ctags, paths):
    """Classes, data members and functions of C++ and CUDA files, as Universal Ctags describes them."""
    command = [
        ctags,
        "--options=NONE",
        "--output-format=json",
        "--fields=+SsZKne",
        "--languages=C++,CUDA",
        "--map-C++=+.h",
        "--map-CUDA=+.cuh",
        "--kinds-C++=cspfm",
        "--kinds-CUDA=cspfm",
        "--fields-C++=+{properties}",
        "--fields-CUDA=+{properties}",
        "-f-",
        "-L-",
    ]
    done = subprocess.run(command, input="\n".join(paths), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        fail(f"{ctags} cannot read the sources: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def class_bodies(tags):
    """(full name of the class, path) -> (first line, last line) of each body with this name in this file."""
    bodies = defaultdict(list)
    for tag in tags:
        if tag["kind"] in ("class", "struct"):
            name = f"{tag['scope']}::{tag['name']}" if "scope" in tag else tag["name"]
            bodies[name, tag["path"]].append((tag["line"], tag.get("end", tag["line"])))
    return bodies


def is_counted(tag, bodies):
    """A deleted function is no method, and a definition outside of the class is no further one."""
    if "delete" in tag.get("properties", "").split(","):
        return False
    return any(first <= tag["line"] <= last for first, last in bodies)


def measure_cpp_classes(tags):
    bodies, methods, members = class_bodies(tags), defaultdict(set), defaultdict(set)
    for tag in tags:
        owner = tag.get("scope"), tag["path"]
        if not is_counted(tag, bodies.get(owner, ())):
            continue
        if tag["kind"] == "member":
            members[owner].add(tag["name"])
        elif tag["kind"] in ("prototype", "function"):  # a getter and its const version are one method
            methods[owner].add((tag["name"], tag.get("signature", "").removesuffix(" const")))
    for owner in bodies:
        thing = f"class {readable(owner[0])} ({owner[1]})"
        yield Measure(thing, len(methods[owner]), "methods", METHODS_PER_CLASS)
        yield Measure(thing, len(members[owner]), "data members", MEMBERS_PER_CLASS)


def readable(name):
    """Ctags numbers the unnamed namespaces and structs."""
    return re.sub(r"__anon\w+", "(unnamed)", name).replace("(unnamed)::", "")


def measure_cpp_functions(tags):
    for tag in tags:
        if tag["kind"] == "function" and "end" in tag:
            yield function_measure(tag["name"], tag["path"], tag["line"], tag["end"])


def function_measure(name, path, first, last):
    return Measure(f"function {name} ({path}:{first})", last - first + 1, "lines", FUNCTION_LINES)


def measure_python(paths):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for path in paths:
        for node in ast.walk(ast.parse("\n".join(lines_of(path)), path)):
            if isinstance(node, functions):
                yield function_measure(node.name, path, node.lineno, node.end_lineno)
            elif isinstance(node, ast.ClassDef):
                methods = sum(isinstance(part, functions) for part in node.body)
                yield Measure(f"class {node.name} ({path})", methods, "methods", METHODS_PER_CLASS)


def measure_code(files, ctags):
    code = [path for path in files if CODE.match(path)]
    yield from measure_python([path for path in code if path.endswith(".py")])
    if ctags:
        tags = read_tags(ctags, [path for path in code if path.endswith(CPP)])
        yield from measure_cpp_classes(tags)
        yield from measure_cpp_functions(tags)


# --- files, folders and headers ----------------------------------------------------------------
def measure_files(files):
    for path in files:
        if path.endswith(CPP + SCRIPTS):
            yield Measure(f"file {path}", len(lines_of(path)), "lines", FILE_LINES)


def measure_folders(files):
    sources = (path for path in files if CROWDED.match(path) and path.endswith((".cpp", ".cu", ".py", ".sh")))
    for folder, number in sorted(Counter(map(os.path.dirname, sources)).items()):
        yield Measure(f"folder {folder}", number, "sources", SOURCES_PER_FOLDER)


def measure_headers(files):
    public = detail = 0
    for path in files:
        if HEADERS.match(path) and path.endswith((".hpp", ".h")):
            number = len(lines_of(path))
            if "/detail/" in path:
                detail += number
            else:
                public += number
    yield Measure("public headers", public, "lines", PUBLIC_HEADER_LINES)
    yield Measure("headers below detail/", detail, "lines", DETAIL_HEADER_LINES)


# --- pages and commits -------------------------------------------------------------------------
def prose(lines):
    """(number, line) of each line that is neither in a block of code nor in a table."""
    in_code = False
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith("    ") and not line.lstrip().startswith("|"):
            yield number, line


def measure_pages(files):
    for path in filter(PAGES.fullmatch, files):
        lines = lines_of(path)
        if path not in PAGES_OF_ANY_LENGTH:
            yield Measure(f"page {path}", len(lines), "lines", LINES_OF_PAGES.get(path, PAGE_LINES))
        for number, line in prose(lines):
            yield Measure(f"prose {path}:{number}", len(line), "columns", PROSE_COLUMNS)


def measure_subjects():
    if git("rev-parse", "--is-shallow-repository").strip() == "true":
        return  # a shallow clone does not know which commits are new
    for line in git("log", f"--max-count={NUM_COMMITS}", "--no-merges", "--format=%h %s").splitlines():
        commit, subject = line.split(" ", 1)
        yield Measure(f"subject of commit {commit}", len(subject), "characters", SUBJECT_CHARACTERS)


# --- the answer --------------------------------------------------------------------------------
def totals(measures):
    """The number of measured things of each kind, and the lines of headers."""
    kinds = Counter(kind for kind, _ in {(m.thing.split()[0], m.thing) for m in measures})
    lines = {m.thing: m.number for m in measures}
    plural = {
        "class": "classes",
        "function": "functions",
        "file": "files",
        "folder": "folders",
        "page": "pages",
        "subject": "commit subjects",
    }
    parts = [f"{kinds[kind]} {name}" for kind, name in plural.items()]
    parts += [f"{lines[name]} lines of {name}" for name in ("public headers", "headers below detail/")]
    return ", ".join(parts)


def main(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "checkout", nargs="?", default=ROOT, help="a git checkout (default: that of this file)"
    )
    os.chdir(parser.parse_args(arguments).checkout)
    ctags = find_ctags() or install_ctags()
    if not ctags:
        print(
            "warning: Universal Ctags is not installed: classes and functions of C++ were not measured; "
            "as root: apt-get install universal-ctags",
            file=sys.stderr,
        )
    files = tracked_files()
    measures = [
        *measure_code(files, ctags),
        *measure_files(files),
        *measure_folders(files),
        *measure_headers(files),
        *measure_pages(files),
        *measure_subjects(),
    ]
    above = [measure for measure in measures if measure.number > measure.limit]
    for measure in above:
        print(f"{measure.thing}: {measure.number} {measure.unit}, limit {measure.limit}")
    print(f"==> {len(above)} above their limits, of {totals(measures)}")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
