#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Breaks the code on purpose, one mutation at a time, and expects a test to fail.

    tests/mutations/run.sh                      all mutations that no earlier call has caught
    tests/mutations/run.sh reduce 'data_tar*'   those of a table, and those whose names match
    tests/mutations/run.sh --again reduce       the same, and also those that an earlier call has caught
    tests/mutations/run.sh --check              only compares the tables with the sources; builds nothing

A table, <area>.yaml, is a list of mutations. A comment names the page and the section whose promises the
mutations below it break. Each promise has one mutation.

    # semantics_collectives.md: Backends and checks
    - name: comm_mean_not_divided
      why: what goes wrong (optional)
      expect: [communicator_r2]
      edits:
      - file: libddp/src/comm/mpi/mpi_communicator.cpp
        old: |2
            if (op == ReduceOp::Avg && !divides_first) {
        new: |2
            if (false) {

`expect` holds regular expressions of whole test names; one of these tests must fail. `old` holds whole lines
that occur exactly once in the file. The 2 behind the bar keeps the indentation of the first line.

Mutations are built and tested in a copy of the sources below build-mutations/. Only the programs of the
expected tests are built. build-mutations/results.txt remembers what was caught. A later call skips a
remembered mutation as long as its entry and the sources are the same. Texts (*.md) do not count as sources.

Exit codes: 0 all mutations are caught, 77 none survived but some were not tried (their tests are skipped
here, or PyYAML is missing), else 1.
"""

import argparse
import fnmatch
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TABLES = Path(__file__).resolve().parent
ROOT = TABLES.parents[1]
WORK = ROOT / "build-mutations"
NOT_TRIED = 77
MUTATED_SECONDS = 120  # a test that hangs is a failing test


class TableError(Exception):
    """An entry is malformed, or its old text does not occur exactly once."""


@dataclass(frozen=True)
class Edit:
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutation:
    table: str
    name: str
    expect: tuple
    edits: tuple


# --- tables --------------------------------------------------------------------------------------
def mutation_from(table, entry):
    if not isinstance(entry, dict) or not set(entry) - {"why"} == {"name", "expect", "edits"}:
        raise TableError(
            f"{table}: an entry needs name, expect and edits, and may have why; found {entry!r:.100}"
        )
    name, expect = entry["name"], entry["expect"]
    if not isinstance(expect, list) or not expect or not all(isinstance(text, str) for text in expect):
        raise TableError(
            f"{table}: {name}: expect is {expect!r}; give a list of regular expressions of test names"
        )
    edits = entry["edits"] if isinstance(entry["edits"], list) else []
    for edit in edits:
        if not isinstance(edit, dict) or set(edit) != {"file", "old", "new"}:
            raise TableError(f"{table}: {name}: an edit has exactly file, old and new; found {edit!r:.100}")
        if not edit["old"] or edit["old"] == edit["new"]:
            raise TableError(f"{table}: {name}: an edit of {edit['file']} changes nothing")
    if not edits:
        raise TableError(f"{table}: {name}: edits is empty; give at least one edit")
    return Mutation(table, name, tuple(expect), tuple(Edit(**edit) for edit in edits))


def read_tables():
    try:
        import yaml  # pylint: disable=import-outside-toplevel
    except ImportError:
        print("error: PyYAML is missing; fix: pip install pyyaml", file=sys.stderr)
        sys.exit(NOT_TRIED)
    mutations, tables = [], {}
    for path in sorted(TABLES.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        try:
            entries = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError as error:
            raise TableError(f"{path.name}: {error}") from error
        for entry in entries or []:
            mutation = mutation_from(path.stem, entry)
            if mutation.name in tables:
                raise TableError(
                    f"{path.stem}: {mutation.name} also stands in {tables[mutation.name]}; choose another "
                    "name"
                )
            tables[mutation.name] = path.stem
            mutations.append(mutation)
    return mutations


def is_named(mutation, word):
    return word == mutation.table or fnmatch.fnmatchcase(mutation.name, word)


def select(mutations, wanted):
    if not wanted:
        return mutations
    for word in wanted:
        if not any(is_named(m, word) for m in mutations):
            raise TableError(f"no table and no mutation is named {word}")
    return [m for m in mutations if any(is_named(m, word) for word in wanted)]


def mutated_files(mutation, root):
    """The texts of the files that `mutation` changes, before and after, by path."""
    places = {}
    texts = {}
    for edit in mutation.edits:
        if not (root / edit.file).is_file():
            raise TableError(f"{edit.file} does not exist")
        text = texts.setdefault(edit.file, (root / edit.file).read_text(encoding="utf-8"))
        found = [match.span() for match in re.finditer("^" + re.escape(edit.old), text, re.MULTILINE)]
        if len(found) != 1:
            count = f"occurs {len(found)} times" if found else "is gone"
            raise TableError(f"{edit.file}: the old text {count}: {edit.old.strip()!r:.80}")
        places.setdefault(edit.file, []).append((*found[0], edit.new))
    changed = {}
    for file, replacements in places.items():
        text = texts[file]
        for begin, end, new in sorted(replacements, reverse=True):
            text = text[:begin] + new + text[end:]
        changed[file] = (texts[file], text)
    return changed


# --- tests of a build folder -----------------------------------------------------------------------
def registered_tests(folder):
    """Names and commands of CTest's tests. `ctest --show-only` leaves out commands of unbuilt programs."""
    tests = {}
    path = folder / "CTestTestfile.cmake"
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        if line.startswith("add_test("):
            name, *command = shlex.split(line[len("add_test(") : -1])
            tests[name.strip("[]=")] = command
        elif below := re.fullmatch(r'subdirs\("(.*)"\)', line):
            tests.update(registered_tests(folder / below[1]))
    return tests


def tests_of(mutation, registered):
    return [name for name in registered if any(re.fullmatch(pattern, name) for pattern in mutation.expect)]


def starts_programs(command, build):
    return any(word.startswith(f"{build.resolve()}/") for word in command)


def is_compiled(mutation):
    return any(edit.file.endswith((".cpp", ".hpp", ".cu", ".cuh")) for edit in mutation.edits)


def has_all_parts(build):
    """Whether the build registers all tests. Without CUDA it lacks those of GPUs."""
    parts = build / "ddp_parts.txt"
    text = parts.read_text(encoding="utf-8") if parts.is_file() else ""
    return "CUDA=TRUE\n" in text and "MPI=TRUE\n" in text


def check(mutations, build):
    registered = registered_tests(build) if has_all_parts(build) else {}
    problems = []
    for mutation in mutations:
        try:
            mutated_files(mutation, ROOT)
        except TableError as error:
            problems.append(f"{mutation.table}: {mutation.name}: {error}")
        for pattern in mutation.expect if registered else []:
            if not any(re.fullmatch(pattern, name) for name in registered):
                problems.append(f"{mutation.table}: {mutation.name}: no test is named {pattern}")
        tests = tests_of(mutation, registered)
        if tests and is_compiled(mutation) and not any(starts_programs(registered[t], build) for t in tests):
            problems.append(
                f"{mutation.table}: {mutation.name}: the commands of its tests name no program, so none "
                "would be built"
            )
    for problem in problems:
        print(problem, file=sys.stderr)
    compared = (
        "sources and test names" if registered else "sources; the test names need a build with CUDA and MPI"
    )
    print(f"{len(mutations)} mutations, compared with the {compared}")
    return 1 if problems else 0


# --- the copy below build-mutations/ ---------------------------------------------------------------
class Results:
    """The results of earlier calls, one line each. Each line is written at once, so an interrupted call loses
    none."""

    def __init__(self, path, sources, again):
        self._path = path
        self._sources = sources
        known = path.read_text(encoding="utf-8").splitlines() if path.is_file() and not again else []
        self._keys = {line.split()[0] for line in known if line}

    def _key(self, *what):
        return hashlib.sha256(repr((self._sources, what)).encode()).hexdigest()[:20]

    def has(self, *what):
        return self._key(*what) in self._keys

    def add(self, label, *what):
        self._keys.add(self._key(*what))
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(f"{self._key(*what)} {label}\n")


class SourceCopy:
    """A copy of the sources with its own build folder."""

    def __init__(self):
        self.root = WORK / "source"
        self.build_folder = self.root / "build"
        self.log = WORK / "log.txt"
        self.root.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        self.digest = self._copy()
        self._configure()
        self.tests = registered_tests(self.build_folder)
        self._targets = self._ninja_targets()

    def _copy(self):
        """Copies the files that differ. Their new time stamps also replace objects of an interrupted
        mutation."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        files = {file for file in listed.split("\0") if file and (ROOT / file).is_file()}
        digest = hashlib.sha256()
        for file in sorted(files):
            content, target = (ROOT / file).read_bytes(), self.root / file
            if not target.is_file() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
                shutil.copymode(ROOT / file, target)
            if not file.endswith(".md") and (ROOT / file).parent != TABLES:
                digest.update(repr((file, hashlib.sha256(content).hexdigest())).encode())
        for folder, below, names in os.walk(self.root):
            if folder == str(self.root) and self.build_folder.name in below:
                below.remove(self.build_folder.name)
            for path in [Path(folder, name) for name in names]:
                if str(path.relative_to(self.root)) not in files:
                    path.unlink()  # removed from the checkout
        return digest.hexdigest()

    def run(self, command, limit=None):
        """Exit code and output. After `limit` seconds, or at an interrupt, it ends the command's whole
        process group."""
        with open(self.log, "ab") as log:
            begin = log.tell()
            child = subprocess.Popen(
                command,
                cwd=self.build_folder if self.build_folder.is_dir() else self.root,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = child.wait(limit)
            except subprocess.TimeoutExpired:
                code = 124
            finally:
                self._end(child)
        with open(self.log, "rb") as log:
            log.seek(begin)
            return code, log.read().decode(errors="replace")

    @staticmethod
    def _end(child):
        for number in (signal.SIGTERM, signal.SIGKILL):
            if child.poll() is None:
                os.killpg(child.pid, number)
                try:
                    child.wait(5)
                except subprocess.TimeoutExpired:
                    pass

    def _in_setup(self, script, *arguments):
        """Runs `script` after setup.sh, whose `configure` also sets the variables of ccache."""
        configured = (
            'source "$0/scripts/setup.sh"; '
            f"configure -DDDP_BUILD_TESTS=ON -DDDP_BUILD_EXAMPLES=ON && {script}"
        )
        return self.run(["bash", "-c", configured, str(self.root), *arguments])[0] == 0

    def _configure(self):
        # Configure does nothing where its arguments are the same.
        if not self._in_setup('cmake "$DDP_BUILD"'):
            raise TableError(f"the copy in {self.root} cannot be configured: see {self.log}")

    def _ninja_targets(self):
        text = (self.build_folder / "build.ninja").read_text(encoding="utf-8", errors="replace")
        return set(re.findall("^build ([^:| ]+)", text, re.MULTILINE))

    def build(self, tests):
        """Builds the programs that `tests` start. A test may be a script and start none."""
        words = set()
        for test in tests:
            words.update(os.path.realpath(word) for word in self.tests[test] if word.startswith("/"))
        inside = {os.path.relpath(word, os.path.realpath(self.build_folder)) for word in words}
        programs = sorted(inside & self._targets)
        return not programs or self._in_setup(
            'cmake --build "$DDP_BUILD" --parallel "${DDP_BUILD_JOBS:-$(build_jobs)}" --target "$@"',
            *programs,
        )

    def test(self, tests, limit=None):
        """Returns passed, failed, or skipped where not all tests ran."""
        names = "^(" + "|".join(re.escape(test) for test in tests) + ")$"
        code, output = self.run(["ctest", "-R", names, "--no-tests=error", "--stop-on-failure"], limit)
        return "failed" if code != 0 else "skipped" if "***Skipped" in output else "passed"


class Runner:
    def __init__(self, again):
        self.copy = SourceCopy()
        self.results = Results(WORK / "results.txt", self.copy.digest, again)

    def was_caught(self, mutation):
        return self.results.has(mutation)

    def unmutated(self, tests):
        """How the tests end without a mutation. Only a test that passes here can catch one."""
        if self.results.has("unmutated", *tests):
            return "passed"
        outcome = self.copy.test(tests) if self.copy.build(tests) else "not built"
        if outcome == "passed":
            self.results.add("unmutated " + " ".join(tests), "unmutated", *tests)
        return outcome

    def mutated(self, mutation, tests):
        changed = mutated_files(mutation, self.copy.root)
        try:
            for file, (_, text) in changed.items():
                (self.copy.root / file).write_text(text, encoding="utf-8")
            return self.copy.test(tests, MUTATED_SECONDS) if self.copy.build(tests) else "not built"
        finally:
            for file, (text, _) in changed.items():
                (self.copy.root / file).write_text(text, encoding="utf-8")

    def attempt(self, mutation):
        with open(self.copy.log, "a", encoding="utf-8") as log:
            log.write(f"### {mutation.name}\n")
        tests = tests_of(mutation, self.copy.tests)
        if not tests:
            return "not tried: this build has none of its tests"
        outcome = self.unmutated(tests)
        if outcome == "skipped":
            return "not tried: its tests are skipped here"
        if outcome != "passed":
            return (
                "NOT RUN: its tests fail without it"
                if outcome == "failed"
                else "NOT RUN: its tests do not build without it"
            )
        try:
            outcome = self.mutated(mutation, tests)
        except TableError as error:
            return f"NOT RUN: {error}"
        if outcome == "failed":
            self.results.add(mutation.name, mutation)
            return "caught"
        return "NOT RUN: the mutated code does not build" if outcome == "not built" else "SURVIVED"


def run_all(mutations, again):
    print("==> copying and configuring (log: build-mutations/log.txt)", flush=True)
    runner = Runner(again)
    remaining = [mutation for mutation in mutations if not runner.was_caught(mutation)]
    caught = len(mutations) - len(remaining)
    not_tried = 0
    if caught:
        print(f"==> {caught} of {len(mutations)} were caught by earlier calls")
    for mutation in remaining:
        started = time.monotonic()
        result = runner.attempt(mutation)
        caught += result == "caught"
        not_tried += result.startswith("not tried")
        print(f"{mutation.name:<56} {time.monotonic() - started:5.0f} s  {result}", flush=True)
    print(f"==> {caught} of {len(mutations)} mutations caught, {not_tried} not tried")
    if caught + not_tried != len(mutations):
        return 1
    return NOT_TRIED if not_tried else 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="tables, and names or patterns of mutations (all)")
    parser.add_argument("--again", action="store_true", help="forget what earlier calls caught")
    parser.add_argument(
        "--check", action="store_true", help="compare the tables with the sources and the test names"
    )
    parser.add_argument(
        "--build", type=Path, default=ROOT / "build", help="the build folder whose test names --check takes"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # restores the mutated files
    try:
        mutations = select(read_tables(), options.names)
        return check(mutations, options.build) if options.check else run_all(mutations, options.again)
    except TableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
