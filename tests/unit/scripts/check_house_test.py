# SPDX-License-Identifier: Apache-2.0
"""scripts/check_house.py in small checkouts: what is at its limit passes, and what is one above is found."""

import os
import subprocess
import sys
import unittest
from unittest import mock

from study_support import ROOT, ToolTest

sys.path.insert(0, os.path.join(ROOT, "scripts"))
import check_house as house

IDENTITY = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
}


def repeated(text, number):
    return "".join(text.replace("#", str(i)) for i in range(number))


def function(name, lines, form):
    return form.format(name=name, body="  call();\n" * (lines - 2))


class House(ToolTest):
    maxDiff = None

    def setUp(self):
        super().setUp()
        self.git("init", "--quiet")

    def git(self, *arguments):
        subprocess.run(["git", *arguments], cwd=self.folder, env={**os.environ, **IDENTITY}, check=True)

    def commit(self, subject):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", subject)

    def check(self, code, folder="."):
        """(what is above its limit, the totals)"""
        lines = self.call(house.main, os.path.join(self.folder, folder), code=code).splitlines()
        return sorted(lines[:-1]), lines[-1]

    def write_code(self, more):
        methods, members = house.METHODS_PER_CLASS + more, house.MEMBERS_PER_CLASS + more
        # Overloads are two methods. A const version, a deleted function and the definition of a declared
        # one are none.
        self.write(
            "libddp/src/wide.hpp",
            "namespace ddp {\nclass Wide {\n  void twice();\n  void twice() const;\n"
            "  void twice(int);\n  Wide(const Wide&) = delete;\n"
            + repeated("  void method#();\n", methods - 2)
            + repeated("  int member#_;\n", members)
            + "};\ninline void Wide::twice(int number) {}\n}\n",
        )
        self.write("libddp/src/wide.cpp", "namespace ddp {\nvoid Wide::twice() {}\n}\n")
        self.write(
            "tools/longest.cpp",
            function("longest", house.FUNCTION_LINES + more, "void {name}() {{\n{body}}}\n"),
        )
        self.write(
            "examples/kernel.cu",
            function("kernel", house.FUNCTION_LINES + more, "void {name}() {{\n{body}}}\n"),
        )
        self.write(
            "tools/longest.py",
            function("longest", house.FUNCTION_LINES + more, "def {name}():\n  call()\n{body}"),
        )
        self.write("tools/wide.py", "class Wide:\n" + repeated("  def method#(self): pass\n", methods))
        # Classes of unnamed namespaces in two files are two classes, and functions of tests may be longer.
        for name in "first", "second":
            self.write(
                f"tools/{name}.cpp",
                "namespace {\nstruct Local {\n"
                + repeated(f"  int {name}#;\n", house.MEMBERS_PER_CLASS)
                + "};\n}\n",
            )
        self.write(
            "tests/case.cpp", function("longer", house.FUNCTION_LINES + 10, "void {name}() {{\n{body}}}\n")
        )

    def write_files(self, more):
        self.write("tests/longest.cpp", "//\n" * (house.FILE_LINES + more))
        self.write("slurm/longest.sh", "#\n" * (house.FILE_LINES + more))
        for number in range(house.SOURCES_PER_FOLDER + more):
            self.write(f"models/crowd/source{number}.cpp", "//\n")
        self.write("models/crowd/header.hpp", "//\n")
        for folder, lines in ("ddp", house.PUBLIC_HEADER_LINES), ("ddp/detail", house.DETAIL_HEADER_LINES):
            for number in range(10):
                self.write(f"libddp/ops/include/{folder}/header{number}.hpp", "//\n" * (lines // 10))
            self.write(f"libddp/include/{folder}/rest.hpp", "//\n" * (lines % 10 + more))

    def write_pages(self, more):
        self.write("docs/longest.md", "text\n" * (house.PAGE_LINES + more))
        wide = "é" * (house.PROSE_COLUMNS + 1)  # characters count, not bytes
        self.write("docs/notes/widest.md", f"{wide[1 - more :]}\n| {wide} |\n```\n{wide}\n```\n    {wide}\n")
        for path, lines in house.LINES_OF_PAGES.items():
            self.write(path, "text\n" * (lines + more))
        self.write("docs/configuration.md", "text\n" * 1000)

    def write_all(self, more):
        self.write_code(more)
        self.write_files(more)
        self.write_pages(more)
        self.commit("s" * (house.SUBJECT_CHARACTERS + more))

    def test_what_is_at_its_limit_passes(self):
        self.write_all(0)
        above, totals = self.check(0)
        self.assertEqual(above, [])
        self.assertIn("==> 0 above their limits, of 4 classes, ", totals)
        self.assertIn("4 pages, 1 commit subjects, 4500 lines of public headers", totals)

    def test_what_is_above_its_limit_is_found(self):
        self.write_all(1)
        above, totals = self.check(1)
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        self.assertEqual(
            above,
            sorted(
                [
                    "class ddp::Wide (libddp/src/wide.hpp): 31 methods, limit 30",
                    "class ddp::Wide (libddp/src/wide.hpp): 26 data members, limit 25",
                    "class Wide (tools/wide.py): 31 methods, limit 30",
                    "function longest (tools/longest.cpp:1): 61 lines, limit 60",
                    "function longest (tools/longest.py:1): 61 lines, limit 60",
                    "function kernel (examples/kernel.cu:1): 61 lines, limit 60",
                    "file tests/longest.cpp: 501 lines, limit 500",
                    "file slurm/longest.sh: 501 lines, limit 500",
                    "folder models/crowd: 26 sources, limit 25",
                    "public headers: 4501 lines, limit 4500",
                    "headers below detail/: 1701 lines, limit 1700",
                    "page CHANGELOG.md: 41 lines, limit 40",
                    "page README.md: 111 lines, limit 110",
                    "page docs/longest.md: 301 lines, limit 300",
                    "prose docs/notes/widest.md:1: 121 columns, limit 120",
                    f"subject of commit {commit}: 73 characters, limit 72",
                ]
            ),
        )
        self.assertIn("==> 16 above their limits", totals)

    def test_only_the_newest_subjects_count(self):
        self.write("a.py", "")
        self.commit("s" * (house.SUBJECT_CHARACTERS + 1))
        with mock.patch.object(house, "NUM_COMMITS", 2):
            self.commit("Second")
            self.assertEqual(len(self.check(1)[0]), 1)
            self.commit("Third")
            self.assertEqual(self.check(0)[0], [])

    def test_a_shallow_clone_has_no_subjects(self):
        self.write("a.py", "")
        self.commit("s" * (house.SUBJECT_CHARACTERS + 1))
        self.git("clone", "--quiet", "--depth", "1", f"file://{self.folder}", f"{self.folder}/shallow")
        above, totals = self.check(0, "shallow")
        self.assertEqual(above, [])
        self.assertIn("0 commit subjects", totals)

    def test_without_ctags_the_rest_is_measured(self):
        self.write_all(1)
        with (
            mock.patch.object(house, "find_ctags", return_value=None),
            mock.patch.object(house, "install_ctags", return_value=None),
        ):
            printed = self.call(house.main, self.folder, code=1)
        self.assertIn(
            "warning: Universal Ctags is not installed: classes and functions of C++ were not measured",
            printed,
        )
        self.assertIn("file tests/longest.cpp", printed)
        self.assertNotIn("class ddp::Wide", printed)

    def test_a_folder_without_tracked_files_is_refused(self):
        self.call(
            house.main,
            self.folder,
            code="error: git ls-files lists no file: is this a git checkout that belongs to "
            "you (safe.directory)?",
        )


if __name__ == "__main__":
    if not house.find_ctags():
        print("skipped: Universal Ctags is not installed")
        sys.exit(77)
    unittest.main()
