# SPDX-License-Identifier: Apache-2.0
"""Folders that other users can write to: no tool follows a link, waits at a named pipe or reads a device that
stands in the place of a file. And no tool prints what controls a terminal."""

import contextlib
import itertools
import json
import os
import signal
import stat
import sys
import unittest
from unittest import mock

from study_support import ToolTest, write_run

import ddp_top
import export_metrics
import plot_check
import plot_run
import system_report
from imitated_slurm import STUDY, StudyCase
from plot_check_test import report
from scaling import files
from scaling.command_line import exit_code
from scaling.terminal import Printable, printable

SECRET = "SECRET 9999\n"
RUN_FILES = (
    "settings.txt",
    "run.json",
    "steps.csv",
    "steps.jsonl",
    "evals.jsonl",
    "epochs.csv",
    "command.txt",
    "SYSTEM.md",
    "../SYSTEM.md",
)
TOP_FILES = (".owner", "steps.jsonl", "evals.jsonl", "epochs.jsonl", "ranks.json", "run.json", "log.txt")
STUDY_FILES = (
    "study.json",
    "study.yaml",
    "SYSTEM.md",
    "n001_r1/steps.csv",
    "n001_r1/epochs.csv",
    "n001_r1/command.txt",
    "n001_r1/exit_code",
)
REPORT_FILES = ("report.html", "merged.csv", "s_throughput.png", "s_throughput.svg")


@contextlib.contextmanager
def limited(seconds=20):
    def expired(*_):
        raise TimeoutError("the tool waits")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Planted(ToolTest):
    """`plants`: what stands in the place of a file."""

    plants = ("link", "link to nothing", "link to /dev/zero", "pipe")

    def setUp(self):
        super().setUp()
        self.write("secret", SECRET)

    def plant(self, name, kind):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.lexists(path):
            os.remove(path)
        if kind == "pipe":
            os.mkfifo(path)
        else:
            os.symlink(
                {
                    "link": self.folder + "/secret",
                    "link to nothing": self.folder + "/new",
                    "link to /dev/zero": "/dev/zero",
                }[kind],
                path,
            )
        return path

    def outcome(self, main, *arguments):
        """(exit code, what is printed); a tool that waits fails."""
        with limited():
            return self.called(main, *arguments)

    def called(self, main, *arguments):
        results = []

        def noted(words):
            results.append(exit_code(main, words))
            return 0

        printed = self.call(noted, *arguments)
        return results[0], printed

    def check_read(self, main, arguments, planted, kind):
        code, printed = self.outcome(main, *arguments)
        self.assertIn(code, (0, 65), printed)
        if code:
            self.assertIn(os.path.basename(planted), printed)
        self.assertNotIn("SECRET", printed)
        for path, _, names in os.walk(self.folder):
            for name in names:
                file = os.path.join(path, name)
                if name != "secret" and os.path.isfile(file) and not os.path.islink(file):
                    with open(file, encoding="utf-8", errors="replace") as content:
                        self.assertNotIn("SECRET", content.read(), f"{file}, {kind}")

    def check_written(self, main, arguments, planted, codes=(0, 73)):
        code, printed = self.outcome(main, *arguments)
        self.assertIn(code, codes, printed)
        self.assertEqual(self.read("secret"), SECRET)
        self.assertFalse(os.path.exists(self.folder + "/new"))
        if code == 0:
            self.assertTrue(stat.S_ISREG(os.lstat(planted).st_mode), planted)

    def each(self, names, check):
        """check(name, kind, its number) for each file and each kind of plant."""
        for number, (name, kind) in enumerate(itertools.product(names, self.plants)):
            with self.subTest(name=name, kind=kind):
                check(name, kind, number)


class Runs(Planted):
    def make_run(self, name):
        self.write(f"{name}/settings.txt", "* train.epochs  2 epochs\n")
        self.write(f"{name}/log.txt", "[12:00:00.000] [info] a line\n")
        self.write(f"{name}/steps.csv", "step,loss,time\n10,0.5,7\n")
        return name

    def test_plot_run_and_export_metrics_read_no_planted_file(self):
        def check(name, kind, number):
            run = self.make_run(f"{number}/run")
            planted = self.plant(f"{run}/{name}", kind)
            for main in (plot_run.main, lambda words: export_metrics.main([*words, "--to", "wandb"])):
                with mock.patch.dict(sys.modules, {"wandb": mock.MagicMock()}):
                    self.check_read(main, [run], planted, kind)

        self.each(RUN_FILES, check)

    def test_plot_check_reads_no_planted_file(self):
        self.each(
            ["report.json"],
            lambda name, kind, number: self.check_read(
                plot_check.main, [f"{number}"], self.plant(f"{number}/{name}", kind), kind
            ),
        )

    def test_ddp_top_reads_no_planted_file(self):
        def check(name, kind, number):
            run = self.make_run(f"{number}/run")
            planted = self.plant(f"{run}/{name}", kind)
            for option in ("--once", "--json"):
                self.check_read(ddp_top.main, [run, option], planted, kind)

        self.each(TOP_FILES, check)

    def test_pages_and_stores_are_not_written_through_links(self):
        run = self.make_run("run")
        self.each(
            ["run.html"],
            lambda name, kind, _: self.check_written(plot_run.main, [run], self.plant(f"{run}/{name}", kind)),
        )
        self.write("check/report.json", json.dumps(report()))
        self.each(
            ["report.html"],
            lambda name, kind, _: self.check_written(
                plot_check.main, ["check"], self.plant(f"check/{name}", kind)
            ),
        )
        self.each(
            ["SYSTEM.md"],
            lambda name, kind, _: self.check_written(
                system_report.main, ["--output", name], self.plant(name, kind)
            ),
        )
        with mock.patch.dict(sys.modules, {"mlflow": mock.MagicMock()}):
            self.each(
                ["mlflow.db"],
                lambda name, kind, _: self.check_written(
                    export_metrics.main, [run, "--to", "mlflow"], self.plant(name, kind), codes=(73,)
                ),
            )


class Studies(Planted):
    def test_plot_scaling_reads_and_writes_through_no_planted_file(self):
        self.need("pandas", "matplotlib")
        import plot_scaling

        def make_study(name):
            folder = os.path.join(self.folder, name)
            write_run(folder, "n001_r1", 1, 100)
            keys = {
                "name": "s",
                "title": "T",
                "kind": "strong",
                "program": "p",
                "device": "cpu",
                "batch": 48,
                "steps": 50,
                "warmup_steps": 10,
                "repeats": 1,
                "vary": {},
                "command": "c",
                "runs": {"n001_r1": {"ranks": 1, "repeat": 1, "varied": {}, "arguments": []}},
            }
            self.write(f"{name}/study.json", json.dumps(keys))
            return name

        def check(name, kind, number):
            study = make_study(f"read{number}")
            planted = self.plant(f"{study}/{name}", kind)
            with (
                mock.patch.object(plot_scaling, "print_summary"),
                mock.patch("scaling.figures.draw", return_value=[]),
            ):
                if "study.yaml" in name or "SYSTEM" in name or "command" in name:
                    # Without its figures.
                    self.check_read(lambda words: plot_scaling.Study(words[0]) and 0, [study], planted, kind)
                else:
                    self.check_read(plot_scaling.main, [study, "--kind", "strong"], planted, kind)

        self.each(STUDY_FILES, check)
        study = make_study("s")
        with mock.patch.object(Planted, "plants", ("link",)):  # a page takes a second to draw
            self.each(
                REPORT_FILES,
                lambda name, kind, _: self.check_written(
                    plot_scaling.main, [study], self.plant(f"{study}/report/{name}", kind)
                ),
            )


class Starts(StudyCase, Planted):
    """tools/study.py, which appends to files and starts programs that write."""

    plants = ("link",)  # a start takes half a second

    def test_no_file_of_a_study_is_a_planted_one(self):
        self.need("yaml")
        text = STUDY.replace("[1, 4]", "[1]").replace("repeats: 2", "repeats: 1")
        self.write("study.yaml", text)
        names = (
            "lock",
            "study.json",
            "study.yaml",
            "SYSTEM.md",
            "submissions.jsonl",
            "n001_r1/command.txt",
            "n001_r1/log.txt",
            "n001_r1/exit_code",
        )

        def check(name, kind, number):
            self.out = os.path.join(self.folder, f"{kind}{number}")
            self.write(f"{kind}{number}/SYSTEM.md", "known")  # takes a second to make
            self.plant(f"{kind}{number}/{name}", kind)
            self.assertIn(self.start("--local", timeout=30).returncode, (0, 65, 73))
            self.assertEqual(self.read("secret"), SECRET)
            self.assertFalse(os.path.exists(self.folder + "/new"))

        self.each(names, check)
        self.plants = ("pipe",)
        self.each(("lock", "n001_r1/log.txt"), check)

    def test_the_folder_of_another_user_is_refused(self):
        self.need("yaml")
        self.write("study.yaml", STUDY.replace("[1, 4]", "[1]"))
        os.makedirs(self.folder + "/target")
        os.symlink(self.folder + "/target", self.folder + "/linked")
        self.out = self.folder + "/linked"
        self.assertIn(
            "linked: cannot write: it is a symbolic link; fix: name another folder",
            self.study("--local", code=73),
        )
        if os.geteuid() == 0:  # only root gives files away
            self.out = self.folder + "/other"
            os.makedirs(self.out)
            os.chown(self.out, 1000, 1000)
            self.assertIn(
                "other: cannot write: it belongs to user 1000; fix: name another folder",
                self.study("--local", code=73),
            )
            self.assertEqual(os.listdir(self.out), [])


class Files(unittest.TestCase):
    def test_a_device_is_not_replaced(self):
        with self.assertRaisesRegex(OSError, "it is not a regular file"):
            files.replace_file("/dev/full", "text")
        self.assertTrue(stat.S_ISCHR(os.stat("/dev/full").st_mode))


class Terminal(ToolTest):
    ESCAPE = "\x1b[31m\u009b2J\u202e"

    def test_printable(self):
        for text in ("plain", "a\tb\nc", "Größe, 模型, модель 🙂"):
            self.assertEqual(printable(text), text)
        self.assertEqual(printable("\x1b[2J\x9b\r\x7f\u202e\udc80"), "\\x1b[2J\\x9b\\r\\x7f\\u202e\\udc80")

    def test_no_tool_prints_what_controls_a_terminal(self):
        bad = f"a{self.ESCAPE}b"
        self.write(f"{bad}/settings.txt", "")
        self.write(f"{bad}/steps.csv", f"step,{bad},time\n10,nan,7\n20,1,8\n")
        self.write(f"{bad}/log.txt", f"[error] {bad}\n")
        self.write(
            f"cut/{bad}.csv", "step,loss\n1,\udcff".encode("utf-8", "surrogateescape").decode("latin-1")
        )
        self.write("bad.yaml", f'"{bad}": 1\n')
        calls = [
            (plot_run.main, [bad], 0),
            (plot_run.main, [bad + "/none"], 65),
            (plot_run.main, [bad, "--" + bad], 64),
            (plot_check.main, [bad], 65),
            (ddp_top.main, [bad, "--once"], 0),
            (ddp_top.main, [bad, "--json"], 0),
            (ddp_top.main, [bad + "/none", "--once"], 65),
            (export_metrics.main, [bad + "/none", "--to", "wandb"], 65),
            (system_report.main, ["--output", bad], 73),
        ]
        for main, arguments, code in calls:
            with self.subTest(arguments=arguments):
                printed = self.call(main, *arguments, code=code)
                self.assertIn("b", printed)
                for character in self.ESCAPE[0], "\u009b", "\u202e":
                    self.assertNotIn(character, printed)
        self.assertIn("note: " + printable(bad), self.call(plot_run.main, bad))

    def test_a_study_that_names_controls(self):
        self.need("yaml")
        import study

        self.write("bad.yaml", '"a\\e[31m": 1\n')
        printed = self.call(study.main, os.path.join(self.folder, "bad.yaml"), code=64)
        self.assertIn("a\\x1b[31m: no such key", printed)

    def test_a_guarded_stream_is_the_stream(self):
        stream = Printable(sys.stdout)
        self.assertEqual(
            (stream.fileno(), stream.isatty(), stream.encoding),
            (sys.stdout.fileno(), sys.stdout.isatty(), sys.stdout.encoding),
        )


if __name__ == "__main__":
    unittest.main()
