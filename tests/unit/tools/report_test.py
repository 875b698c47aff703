# SPDX-License-Identifier: Apache-2.0
"""The checks of the report's sources: they pass, and each kind of mistake is named."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import unittest

from study_support import ROOT, ToolTest

REPORT = os.path.join(ROOT, "docs", "report")
sys.path.insert(0, REPORT)
from check import FILES, check, units_of  # noqa: E402


class Sources(ToolTest):
    def setUp(self):
        super().setUp()
        shutil.copytree(os.path.join(REPORT, "data"), os.path.join(self.folder, "data"))
        shutil.copy(os.path.join(REPORT, "report.typ"), self.folder)

    def replace(self, name, old, new):
        text = self.read(name)
        self.assertIn(old, text)
        self.write(name, text.replace(old, new, 1))

    def problem(self, expression):
        """The only problem must match."""
        problems = check(self.folder, ROOT)
        self.assertEqual(len(problems), 1, problems)
        self.assertRegex(problems[0], expression)

    def append(self, text):
        self.write("report.typ", self.read("report.typ") + text)

    def test_the_sources_are_sound(self):
        self.assertEqual(check(REPORT, ROOT), [])

    def test_every_data_file_is_read(self):
        self.assertEqual(
            sorted(os.listdir(os.path.join(REPORT, "data"))), sorted(name + ".csv" for name in FILES)
        )

    def test_an_unknown_value(self):
        for path in (
            "results/resnet51/libddp",
            "results/resnet50-1/speed",
            "result/resnet50-1/libddp",
            "nothing",
            "results/resnet50-1",
        ):
            with self.subTest(path):
                self.setUp()
                self.append(f'#n("{path}")\n')
                self.problem(rf"^report\.typ:\d+: #n: no such value: '{path}'$")

    def test_an_unknown_row(self):
        self.append('#efficiency-of("weak-resnet50-3")\n')
        self.problem(r"no such row in data/scaling\.csv: \"weak-resnet50-3\"")

    def test_a_value_that_awaits_a_measurement(self):
        self.append('#n("scaling/weak-resnet50-8/time")\n')
        self.problem("is empty, because nothing was measured")

    def test_numbers_of_the_text(self):
        for text, word in (
            ("It takes 27.674 ms.", r"27\.674"),
            ("0.98", r"0\.98"),
            ("`steps=8`", "steps=8"),
            ('#text("9594")', "9594"),
            ("ResNet-51", "ResNet-51"),
            ("$T_2$", "T_2"),
        ):
            with self.subTest(text):
                self.setUp()
                self.append(f"\n{text}\n")
                self.problem(f"^report.typ: ['`].*{word}.*['`] (is a number of its own|has a number)")

    def test_names_and_comments_may_have_digits(self):
        self.append("\n// 27.674 ms\n\nResNet-50's step (bf16) on an H200, $T_1$, `NCCL_NVLS_ENABLE=0`.\n")
        self.assertEqual(check(self.folder, ROOT), [])

    def test_a_value_that_differs_from_its_page(self):
        self.replace("data/results.csv", ",9594,", ",9252,")
        self.problem(
            r"^data/results\.csv: libddp of resnet50-1 is 9252, which does not stand in "
            r"docs/performance_tables\.md"
        )

    def test_part_of_a_number_is_another_number(self):
        self.replace("data/results.csv", ",9594,", ",959,")
        self.problem("libddp of resnet50-1 is 959, which does not stand in")

    def test_a_value_that_differs_from_its_commit(self):
        if (
            subprocess.run(
                ["git", "cat-file", "-e", "b14fe6e0"], cwd=ROOT, capture_output=True, check=False
            ).returncode
            != 0
        ):
            self.skipTest("this checkout lacks the commit")
        self.replace("data/ablation.csv", ",47.9,", ",48.9,")
        self.problem(r"without of fused is 48\.9, which does not stand in commit b14fe6e0")

    def test_values_of_two_rows_are_exchanged(self):
        text = self.read("data/results.csv")
        for first, second in (("9594", "9324"), ("523693", "4763")):
            swapped = text.replace(first, "first").replace(second, first).replace("first", second)
            self.write("data/results.csv", swapped)
            problems = check(self.folder, ROOT)
            self.assertTrue(
                any("do not stand together in a row, a column or a paragraph" in each for each in problems),
                f"{first}, {second}: {problems}",
            )

    def test_units_of_a_page(self):
        page = "one\ntwo\n\n- three\n  four\n- five\n| a | b |\n| 1 | 2 |\nsix"
        units = [re.sub(r"\s+", " ", unit).strip() for unit in units_of(page)]
        self.assertEqual(
            [unit for unit in units if unit],
            ["one two", "- three four", "- five", "| a | b |", "| 1 | 2 |", "a 1", "b 2", "six"],
        )

    def test_values_of_a_missing_commit_are_counted(self):
        self.replace("data/runs.csv", "commit b14fe6e0", "commit 0000000000")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self.assertEqual(check(self.folder, ROOT), [])
        self.assertRegex(printed.getvalue(), r"^[1-9]\d* values not compared: commit missing$")

    def test_a_page_that_does_not_exist(self):
        self.replace(
            "data/runs.csv",
            "docs/notes/tried.md docs/notes/figures.md",
            "docs/tried.md docs/notes/figures.md docs/notes/tried.md",
        )
        self.problem("names the page docs/tried.md, which does not exist")

    def test_an_unknown_run(self):
        self.replace("data/hardware.csv", ",optimizers\n", ",optimiser\n")
        self.problem("names the run 'optimiser', which data/runs.csv lacks")

    def test_a_run_without_values(self):
        self.append_row("runs.csv", "unused,nothing,H200,1,5,,docs/performance.md,true")
        self.problem("no value comes from the run unused")

    def test_a_figure_that_the_text_does_not_use(self):
        self.append_row("figures.csv", "unused,clock,1980,MHz,resnet50")
        self.problem("the text does not use unused")

    def append_row(self, name, row):
        self.write(f"data/{name}", self.read(f"data/{name}") + row + "\n")

    def test_the_form_of_the_files(self):
        for row, expression in (
            ("short,cell", "has 2 cells, the first line 5"),
            ("bn-read,twice,0.9,ms,resnet50", "'bn-read' is empty or stands twice"),
            (",no key,0.9,ms,resnet50", "'' is empty or stands twice"),
            ("spaced, clock,0.9,ms,resnet50", "begins or ends with a space"),
        ):
            with self.subTest(row):
                self.setUp()
                self.append_row("figures.csv", row)
                self.problem(expression)

    def test_a_cell_that_is_no_number(self):
        self.replace("data/scaling.csv", ",30.65,", ",about 30.65,")
        self.problem("time is 'about 30.65', which is no number")

    def test_an_awaited_row_needs_a_command(self):
        text = self.read("data/scaling.csv")
        self.write("data/scaling.csv", re.sub(r"(?m)^(weak-resnet50-8,.*),[^,]*$", r"\1,", text))
        self.problem("weak-resnet50-8 awaits a measurement, but names no command")

    def test_an_unknown_choice(self):
        self.replace("data/scaling.csv", "weak-gpt2-2,weak,", "weak-gpt2-2,week,")
        self.problem("kind is 'week', not one of weak, strong")


if __name__ == "__main__":
    unittest.main()
