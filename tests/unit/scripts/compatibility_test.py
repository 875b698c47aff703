# SPDX-License-Identifier: Apache-2.0
"""Files that each release wrote (tests/golden/runs) are read by the tools of today, and docs/compatibility.md
names the releases."""

import os
import re
import shutil
import unittest

from study_support import ROOT, ToolTest

import export_metrics
import plot_run
import system_report
from run_page.files import Run
from run_top.folder import Follower
from scaling import numbers

GOLDEN = os.path.join(ROOT, "tests", "golden", "runs")


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


class OldRuns(ToolTest):
    """Ten steps of ResNet-18 in two epochs, and their evaluations."""

    def setUp(self):
        super().setUp()
        self.runs = {}
        for release in sorted(os.listdir(GOLDEN)):
            self.runs[release] = os.path.join(self.folder, release)
            shutil.copytree(os.path.join(GOLDEN, release), self.runs[release])

    def test_the_page_of_a_run(self):
        for folder in self.runs.values():
            for kind in "csv", "jsonl":  # each alone
                part = f"{folder}-{kind}"
                other = shutil.ignore_patterns("*.jsonl" if kind == "csv" else "*.csv")
                shutil.copytree(folder, part, ignore=other)
                self.check_page(part)

    def check_page(self, folder):
        self.assertEqual(self.call(plot_run.main, folder), f"page: {folder}/run.html\n")
        series = {(source, column): points for source, column, points in Run(folder).series}
        self.assertEqual([step for step, _ in series["steps", "loss"]], [2, 4, 6, 8, 10])
        self.assertAlmostEqual(series["steps", "loss"][-1][1], 7.92578, 4)
        self.assertEqual(len(series["epochs", "test_accuracy"]), 2)

    def test_the_live_view(self):
        for folder in self.runs.values():
            state = Follower(folder, None).read()
            self.assertEqual((state.step, state.max_steps, state.status), (10, 10, "finished"))
            self.assertEqual(state.unit, "images")
            self.assertAlmostEqual(state.evaluation["test_accuracy"], 0.1)
            self.assertEqual([rank["host"] for rank in state.ranks], ["node1"])

    def test_a_study(self):
        for release in self.runs:
            run = numbers.read_run(self.folder, release, 4)
            self.assertEqual((run.ranks, run.global_batch_size, run.unit), (1, 16, "image"))
            self.assertAlmostEqual(run.step_ms, 188.2, 1)

    def test_an_export(self):
        for folder in self.runs.values():
            rows = list(export_metrics.rows_of(Run(folder)))
            self.assertGreaterEqual(len(rows), 5)
            self.assertEqual(export_metrics.parameters_of(Run(folder))["train.batch_size"], "16 samples")

    def test_a_report_of_a_bug(self):
        for folder in self.runs.values():
            text = self.call(system_report.main, "--run", folder)
            for line in (
                "| program | `resnet_ddp` |",
                "| host | `node1` |",
                "\ntrain.epochs=2 epochs\n",
                "step 10/10 | eval loss 101.5786",
            ):
                self.assertIn(line, text)
            self.assertNotIn("train.grad_accum_steps", text)
            with open(os.path.join(folder, "log.txt"), "a", encoding="utf-8") as file:
                file.write("[23:01:08.503] [error] rank 1 (node2) vanished\n" + "[x] [info] later\n" * 30)
            os.remove(os.path.join(folder, "run.json"))
            text = self.call(system_report.main, "--run", self.folder)
            self.assertEqual(text.count("rank 1 (node2) vanished"), 1)
        self.assertIn("there is no such folder", self.call(system_report.main, "--run", "none", code=65))


class Page(unittest.TestCase):
    def setUp(self):
        self.releases = re.findall(
            r"^\| (\d+\.\d+) \| ([\d., ]+) \|", read("docs/compatibility.md"), re.MULTILINE
        )

    def test_each_release_has_golden_files(self):
        self.assertEqual([release for release, _ in self.releases], sorted(os.listdir(GOLDEN), reverse=True))
        version = re.search(r"project\(ddp VERSION (\d+\.\d+)", read("CMakeLists.txt"))[1]
        self.assertEqual(self.releases[0][0], version)

    def test_all_files_name_one_version(self):
        version = re.search(r"project\(ddp VERSION ([\d.]+)", read("CMakeLists.txt"))[1]
        for path, pattern in (
            ("CITATION.cff", r"^version: (\S+)$"),
            ("packaging/spack/package.py", r'version\("([^"]+)"\)'),
            ("CHANGELOG.md", r"^## (\S+)"),
        ):
            self.assertEqual(re.search(pattern, read(path), re.MULTILINE)[1], version, path)

    def test_the_newest_release_names_the_versions_that_were_tried(self):
        tried = re.findall(r"^\| (\d+\.\d+)\.\d+ \|", read("docs/libtorch_versions.md"), re.MULTILINE)
        self.assertEqual(self.releases[0][1].split(", "), tried)


if __name__ == "__main__":
    unittest.main()
