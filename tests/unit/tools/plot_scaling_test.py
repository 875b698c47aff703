# SPDX-License-Identifier: Apache-2.0
"""From CSV files to the report: what is written, what it says, and which mistakes end with 65."""

import csv
import json
import os
import re
import unittest

from study_support import ToolTest, need, write_run

need("pandas", "matplotlib")
import plot_scaling  # noqa: E402

TIMES = {1: [1000, 800, 900], 2: [500, 450, 475], 4: [300, 250, 450]}


def make_study(folder, kind, factor=1.0, **more):
    runs = {}
    for ranks, milliseconds in TIMES.items():
        for repeat, step_ms in enumerate(milliseconds, 1):
            name = f"n{ranks:03d}_r{repeat}"
            batch = 48 if kind == "strong" else 48 * ranks
            write_run(
                folder,
                name,
                ranks,
                factor * step_ms,
                repeat,
                batch=batch,
                exposed_ms=0 if ranks == 1 else 60,
                **more,
            )
            with open(os.path.join(folder, name, "command.txt"), "w", encoding="utf-8") as file:
                file.write(f"mpirun -n {ranks} program repeat={repeat} a<b\n")
            runs[name] = {"ranks": ranks, "repeat": repeat, "varied": {}, "arguments": []}
    plan = {
        "name": os.path.basename(folder),
        "title": "Test",
        "kind": kind,
        "program": "resnet_ddp",
        "device": "cpu",
        "batch": 48,
        "steps": 50,
        "warmup_steps": 10,
        "repeats": 3,
        "vary": {},
        "command": "tools/study.py test.yaml --local",
        "runs": runs,
    }
    with open(os.path.join(folder, "study.json"), "w", encoding="utf-8") as file:
        json.dump(plan, file)
    with open(os.path.join(folder, "SYSTEM.md"), "w", encoding="utf-8") as file:
        file.write("# Machine\nabacus\n\n| | |\n|---|---|\n| memory | 5 GiB |\n")


class Reports(ToolTest):
    def plot(self, *arguments, code=0):
        return self.call(plot_scaling.main, *arguments, code=code)

    def study(self, name, kind="strong", **more):
        make_study(os.path.join(self.folder, name), kind, **more)
        return name

    def test_one_command_from_csv_to_report(self):
        out = self.plot(self.study("s"), self.study("w", "weak", energy_j=24))
        self.assertIn("report: s/report/report.html", out)
        files = set(os.listdir(os.path.join(self.folder, "s/report")))
        figures = {
            f"{study}_{figure}"
            for study in "sw"
            for figure in ("throughput", "efficiency", "speed_up", "epoch_time", "exposed_communication")
        } | {"w_energy"}
        self.assertEqual(
            files,
            {"report.html", "merged.csv"} | {f"{name}.{end}" for name in figures for end in ("png", "svg")},
        )
        page = self.read("s/report/report.html")
        # Nothing beside it is needed, and nothing from elsewhere.
        self.assertEqual(len(re.findall(r'<img [^>]*src="data:image/svg\+xml;base64,', page)), len(figures))
        self.assertNotRegex(page, r'(src|href)="(?!data:)')
        for text in (
            "abacus",
            "mpirun -n 4 program repeat=3 a&lt;b",
            "tools/study.py test.yaml --local",
            "tools/plot_scaling.py s w",
            "communication</td>",
            "<b>Efficiency</b> is the speed-up divided by the number of GPUs.",
            "<td>3<br><small>",
            "<h4>Machine</h4>",  # SYSTEM.md is rendered
            "<table><tr><td class=text>memory</td><td class=text>5 GiB</td>",
        ):
            self.assertIn(text, page)
        # 900 / (4 * 300), with the extremes of four ranks. Shares have one decimal everywhere.
        self.assertIn("75.0<br><small>[50.0 – 90.0]</small>", page)
        self.assertIn("<td>20.0<br><small>[13.3 – 24.0]</small>", page)  # 60 of 300 ms, exposed
        # What no run knows has no column.
        heads = re.findall(r"<table><tr>(.*?)</tr>", page)
        self.assertEqual(
            [("J/image" in head, "MFU" in head) for head in heads[:2]], [(False, False), (True, False)]
        )
        with open(os.path.join(self.folder, "s/report/merged.csv"), encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        self.assertEqual(len(rows), 18)
        self.assertEqual({(row["study"], row["kind"]) for row in rows}, {("s", "strong"), ("w", "weak")})
        self.assertEqual([row["repeat"] for row in rows[:3]], ["1", "2", "3"])

    def test_all_text_of_figures_has_the_font_and_size_of_the_page(self):
        self.study("s")
        plan = json.loads(self.read("s/study.json"))
        plan["title"] = "A title that is too long for one line, " * 3
        self.write("s/study.json", json.dumps(plan))
        self.plot("s", "--before", "s")
        for name in ("s_throughput", "s_efficiency", "s_exposed_communication", "s_before_after"):
            svg = self.read(f"s/report/{name}.svg")
            # The headline, and everything else.
            self.assertEqual(set(re.findall(r"([\d.]+)px", svg)), {"11", "9"}, name)
            self.assertEqual(svg.count("system-ui, sans-serif"), svg.count("<text "))
            self.assertNotIn("DejaVu", svg)
            # Shown in its own size, where a pixel of the file is a point.
            width = float(re.search(r'<svg [^>]*width="([\d.]+)pt"', svg)[1])
            self.assertLessEqual(width / 72, 3.8 if "before" not in name else 8)
        self.assertNotRegex(self.read("s/report/report.html"), r"<img [^>]*(width|class)=")

    def test_before_and_after(self):
        self.plot(self.study("new"), "--before", self.study("old", factor=1.5), "--output", "out")
        self.assertIn("new_before_after.svg", os.listdir(os.path.join(self.folder, "out")))
        self.assertIn("<td>1.500</td>", self.read("out/report.html"))

    def test_two_folders_of_one_study_stay_apart(self):
        for folder, factor in (("a/s", 1.0), ("b/s", 2.0)):
            os.makedirs(os.path.join(self.folder, folder))
            self.study(folder, factor=factor)
        out = self.plot("a/s", "--before", "b/s", "--output", "out")
        self.assertRegex(out, r"a/s +strong 1 .* 900\.0")
        self.assertRegex(out, r"b/s +strong 1 .* 1800\.0")
        out = self.plot("a/s", "b/s", "--output", "both")
        files = os.listdir(os.path.join(self.folder, "both"))
        self.assertIn("s_throughput.svg", files)
        self.assertIn("s_2_throughput.svg", files)
        self.assertNotEqual(self.read("both/s_throughput.svg"), self.read("both/s_2_throughput.svg"))

    def test_a_sensitivity_study_without_its_plan(self):
        for name, step_ms in (
            ("n002_ddp.comm_hook-bf16_compress_lr_schedule.warmup_steps-0_r1", 100),
            ("n002_ddp.comm_hook-none_lr_schedule.warmup_steps-0_r1", 200),
        ):
            write_run(os.path.join(self.folder, "s"), name, 2, step_ms)
        self.plot("s", "--kind", "sensitivity")
        with open(os.path.join(self.folder, "s/report/merged.csv"), encoding="utf-8") as file:
            self.assertEqual(
                [row["varied"] for row in csv.DictReader(file)],
                [
                    "ddp.comm_hook=bf16_compress lr_schedule.warmup_steps=0",
                    "ddp.comm_hook=none lr_schedule.warmup_steps=0",
                ],
            )
        page = self.read("s/report/report.html")
        self.assertIn("<td>bf16_compress</td>", page)
        write_run(os.path.join(self.folder, "s"), "other", 2, 100)
        self.assertIn("differ in the varied settings", self.plot("s", "--kind", "sensitivity", code=65))

    def test_a_dollar_is_a_dollar(self):
        self.study("s")
        plan = json.loads(self.read("s/study.json"))
        plan["title"] = r"$10 and $\\frac"
        with open(os.path.join(self.folder, "s/study.json"), "w", encoding="utf-8") as file:
            json.dump(plan, file)
        self.plot("s")

    def test_missing_runs_are_told(self):
        self.study("s")
        for name in ("n004_r2", "n004_r3"):
            os.remove(os.path.join(self.folder, "s", name, "exit_code"))
        out = self.plot("s")
        self.assertIn(
            "2 of 9 runs are not in these figures: n004_r2 (never ended), n004_r3 (never ended)", out
        )
        self.assertIn("fewer than 3 repeats at 4", out)
        self.assertIn("fewer than 3 repeats at 4", self.read("s/report/report.html"))

    def test_a_folder_of_runs_alone_needs_the_kind(self):
        write_run(os.path.join(self.folder, "runs"), "a", 1, 100)
        write_run(os.path.join(self.folder, "runs"), "b", 2, 60)
        self.assertIn("--kind", self.plot("runs", code=65))
        self.assertIn("report:", self.plot("runs", "--kind", "strong"))

    def test_a_kind_that_the_rows_contradict_ends_with_65(self):
        self.study("strong")
        self.study("weak", "weak")
        for name, other, parts in (
            ("strong", "weak", ("n001_r1 has global_batch_size 48 of 1 ranks", "n002_r1 48 of 2")),
            ("weak", "strong", ("n001_r1 has global_batch_size 48 of 1 ranks", "n002_r1 96 of 2")),
        ):
            plan = os.path.join(self.folder, name, "study.json")
            text = self.read(f"{name}/study.json")
            self.write(f"{name}/study.json", text.replace(f'"kind": "{name}"', f'"kind": "{other}"'))
            for arguments in ((), ("--kind", other)):
                out = self.plot(name, *arguments, code=65)
                for part in (f"the kind of the study is {other}", *parts, "fix: "):
                    self.assertIn(part, out)
                if os.path.exists(plan):
                    os.remove(plan)
            self.assertFalse(os.path.exists(os.path.join(self.folder, name, "report")))
            self.assertIn("report:", self.plot(name, "--kind", name))

    def test_bad_files_end_with_65_and_their_names(self):
        self.study("s")
        path = os.path.join(self.folder, "s/n002_r1/steps.csv")
        text = self.read("s/n002_r1/steps.csv")
        for bad, message in (
            (
                text.replace("interval_seconds", "seconds"),
                "s/n002_r1/steps.csv: the column interval_seconds is missing",
            ),
            ("", "s/n002_r1/steps.csv: the file is empty"),
            (text.splitlines()[0] + "\n", "s/n002_r1/steps.csv: there are no rows below the header"),
        ):
            with open(path, "w", encoding="utf-8") as file:
                file.write(bad)
            self.assertIn(message, self.plot("s", code=65))
        rows = [line.split(",") for line in text.splitlines()]
        for column, value, message in (
            ("step", "", "step is '', not a number above 0"),
            ("interval_seconds", "", "interval_seconds is '', not a number above 0"),
            ("step_ms", "0", "step_ms is '0', not a number above 0"),
            ("exposed_comm_ms", "a", "exposed_comm_ms is 'a', not a number"),
            ("images_per_second", "nan", "images_per_second is 'nan', not a number"),
        ):
            changed = [list(row) for row in rows]
            changed[3][rows[0].index(column)] = value
            with open(path, "w", encoding="utf-8") as file:
                file.write("".join(",".join(row) + "\n" for row in changed))
            self.assertIn("s/n002_r1/steps.csv:4: " + message, self.plot("s", code=65))
        with open(path, "wb") as file:
            file.write(text.encode().replace(b"0.5", b"0.\xff", 1))
        self.assertIn("s/n002_r1/steps.csv:2: not UTF-8 text: byte 0xff", self.plot("s", code=65))
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        plan = self.read("s/study.json")
        for bad, message in (
            ('{"name": 3}', "study.json: title is missing"),
            ("[1]", "study.json: name is missing"),
            ("{", "not JSON"),
        ):
            with open(os.path.join(self.folder, "s/study.json"), "w", encoding="utf-8") as file:
                file.write(bad)
            self.assertIn(message, self.plot("s", code=65))
        with open(os.path.join(self.folder, "s/study.json"), "w", encoding="utf-8") as file:
            file.write(plan)
        self.assertFalse(os.path.exists(os.path.join(self.folder, "s/report")))
        self.assertIn("none: there is no such folder", self.plot("none", code=65))
        self.assertIn("usage", self.plot(code=64))

    def test_studies_without_a_common_point(self):
        self.study("s")
        write_run(os.path.join(self.folder, "other"), "a", 64, 100)
        self.assertIn(
            "have no point in common", self.plot("s", "--before", "other", "--kind", "strong", code=65)
        )

    def test_an_output_that_cannot_be_written_ends_with_73(self):
        self.study("s")
        self.write("file", "")
        os.makedirs(os.path.join(self.folder, "late/merged.csv"))  # the figures are there by then
        os.makedirs(os.path.join(self.folder, "last/report.html"))
        for output, named, why in (
            ("file", "file", "File exists"),
            ("file/sub", "file/sub", "Not a directory"),
            ("late", "late/merged.csv", "Is a directory"),
            ("last", "last/report.html", "Is a directory"),
        ):
            self.assertRegex(
                self.plot("s", "--output", output, code=73),
                f"^error: {named}: cannot write: {why}; fix: name another folder",
            )

    def test_nothing_is_written_before_all_is_read(self):
        self.study("s")
        self.plot("s", "--before", "none", code=65)
        self.assertFalse(os.path.exists(os.path.join(self.folder, "s/report")))


if __name__ == "__main__":
    unittest.main()
