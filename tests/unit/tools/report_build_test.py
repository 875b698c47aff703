# SPDX-License-Identifier: Apache-2.0
"""The report as its reader gets it: report.pdf and report.html. Needs the package typst."""

import csv
import html
import os
import re
import shutil
import subprocess
import sys
import unittest

from study_support import ROOT, ToolTest, need

need("typst")
import typst  # noqa: E402
from scaling.numbers import speed_up, strong_efficiency, weak_efficiency  # noqa: E402

REPORT = os.path.join(ROOT, "docs", "report")
SOURCES = ("report.typ", "layout.typ", "figures.typ", "plots.typ", "report.css", "check.py", "build.py")
BUILD = os.path.join(REPORT, "build.py")


class Build(ToolTest):
    def build(self, *arguments, program=BUILD, code=0):
        done = subprocess.run(
            [sys.executable, program, *arguments],
            capture_output=True,
            text=True,
            cwd=self.folder,
            timeout=120,
            check=False,
        )
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def copy_sources(self):
        """A report of our own, whose pages are still those of the repository."""
        copy = os.path.join(self.folder, "docs", "report")
        shutil.copytree(os.path.join(REPORT, "data"), os.path.join(copy, "data"))
        for name in SOURCES:
            shutil.copy(os.path.join(REPORT, name), copy)
        return copy

    def page_of(self, folder):
        return typst.Compiler(os.path.join(folder, "report.typ")).compile(format="html").decode()

    def rows_of(self, folder):
        """The cells of all tables' rows as text."""
        rows = re.findall(r"<tr>(.*?)</tr>", self.page_of(folder), re.DOTALL)
        result = []
        for row in rows:
            cells = re.findall(r"<td.*?>(.*?)</td>", row, re.DOTALL)
            result.append([html.unescape(re.sub("<.*?>", "", cell)).strip() for cell in cells])
        return result

    def edit(self, name, key, **values):
        """Sets columns of a row, whatever was measured last."""
        path = os.path.join(self.folder, "docs", "report", "data", f"{name}.csv")
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        next(row for row in rows if row["key"] == key).update(values)
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)

    def test_builds_both_files_without_warnings(self):
        printed = self.build("--output", "out")
        self.assertNotIn("warning", printed)
        with open(os.path.join(self.folder, "out", "report.pdf"), "rb") as file:
            self.assertTrue(file.read().startswith(b"%PDF-"))
        page = self.read("out/report.html")
        self.assertEqual(page.count("<figcaption>"), 13)
        self.assertEqual(page.count("<svg"), 5)
        self.assertEqual(page.count("<table"), 8)
        self.assertIn("font-variant-numeric", page)  # report.css
        self.assertNotRegex(page, r'(src|href)="(?!#)')  # needs nothing beside it

    def test_has_four_to_six_pages(self):
        self.assertIn(len(typst.compile(os.path.join(REPORT, "report.typ"), format="png", ppi=10)), (4, 5, 6))

    def test_efficiencies_are_those_of_scaling_studies(self):
        with open(os.path.join(REPORT, "data", "scaling.csv"), encoding="utf-8", newline="") as file:
            measured = [row for row in csv.DictReader(file) if row["time"]]
        shown = self.rows_of(REPORT)
        self.assertEqual({row["kind"] for row in measured}, {"weak", "strong"})
        for row in measured:
            time, gpus, base = float(row["time"]), int(row["gpus"]), float(row["base_low"])
            if row["kind"] == "weak":  # rates: the batch of all GPUs over the time
                bases = [float(row[column]) for column in ("base_low", "base_high") if row[column]]
                expected = [
                    " to ".join(f"{weak_efficiency(1 / base, gpus, gpus / time):.3f}" for base in bases)
                ]
                if row["peer_time"]:
                    peer_base, peer_time = float(row["peer_base"]), float(row["peer_time"])
                    expected.append(f"{weak_efficiency(1 / peer_base, gpus, gpus / peer_time):.3f}")
            else:
                expected = [f"{speed_up(base, time):.2f}", f"{strong_efficiency(base, gpus, time):.3f}"]
            cells = next(cells for cells in shown if cells[:3] == [row["study"], row["setting"], row["gpus"]])
            for number in expected:
                self.assertIn(number, [cell.lstrip("~") for cell in cells], row["key"])

    def test_a_measurement_moves_from_the_awaited_rows_into_the_table(self):
        copy = self.copy_sources()
        study = ["ResNet-50", "128 images per GPU"]
        before = [cells[2:] for cells in self.rows_of(copy) if cells[:2] == study]
        self.assertEqual(before[1:], [["awaits 4, 8, 12 GPUs"]])
        self.edit("scaling", "weak-resnet50-4", time="31.24")
        after = [cells[2:] for cells in self.rows_of(copy) if cells[:2] == study]
        self.assertEqual(
            after,
            [before[0], ["4", "29.99 ms", "31.24 ms", "0.960", "–", "–", "[10]"], ["awaits 8, 12 GPUs"]],
        )

    def bound(self, folder, workload, gpus="1"):
        """What the table of bottlenecks says of libddp's step."""
        return next(cells[-2] for cells in self.rows_of(folder) if cells[:3] == [workload, "libddp", gpus])

    def test_bottlenecks(self):
        copy = self.copy_sources()
        self.assertEqual(self.bound(copy, "GPT-2 124M"), "compute")
        self.assertEqual(self.bound(copy, "ResNet-50", "2"), "both")
        self.edit("profiles", "vit-1", span_us="")
        self.assertEqual(self.bound(copy, "ViT-B/16"), "awaits a profile")
        self.edit("profiles", "gpt2-1", busy_us="30700", span_us="34500")  # 11 % without a kernel
        self.assertEqual(self.bound(copy, "GPT-2 124M"), "host")
        self.edit("profiles", "resnet50-2", ms="27.466", exposed_ms="2.9")
        self.assertEqual(self.bound(copy, "ResNet-50", "2"), "communication")
        self.edit("profiles", "bert-1", busy_us="30700", span_us="30730", exposed_ms="")
        self.edit("classes", "bert-1", gemm="10000", activation="60000")
        self.assertEqual(self.bound(copy, "BERT-base"), "memory")

    def test_an_unknown_value_ends_the_compilation(self):
        copy = self.copy_sources()
        for call, message in (
            ('n("results/resnet51/libddp")', "no such value in data/results.csv"),
            ('n("a/b")', "a path is file/key/column"),
            ('n("scaling/weak-resnet50-8/time")', "not measured"),
        ):
            self.write("docs/report/wrong.typ", f'#import "figures.typ": *\n#{call}\n')
            with self.assertRaises(typst.TypstError) as caught:
                typst.compile(os.path.join(copy, "wrong.typ"), format="pdf")
            self.assertIn(message, caught.exception.diagnostic)

    def test_wrong_sources_and_calls(self):
        copy = self.copy_sources()
        program = os.path.join(copy, "build.py")
        wrong = '\n#n("results/resnet51/libddp") takes 27.674 ms\n'
        self.write("docs/report/report.typ", self.read("docs/report/report.typ") + wrong)
        for arguments in ((), ("--check",)):
            printed = self.build(*arguments, program=program, code=65)
            self.assertIn("no such value: 'results/resnet51/libddp'", printed)
            self.assertIn("'27.674' is a number of its own", printed)
        self.assertFalse(os.path.exists(os.path.join(copy, "report.pdf")))
        self.assertIn("usage:", self.build("--format", code=64))
        self.assertIn("sound", self.build("--check"))
        self.write("file", "")
        self.assertIn("cannot write", self.build("--output", "file", code=73))


if __name__ == "__main__":
    unittest.main()
