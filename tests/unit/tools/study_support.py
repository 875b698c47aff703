# SPDX-License-Identifier: Apache-2.0
"""What the tests of the study tools share."""

import contextlib
import importlib.util
import io
import os
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path.insert(0, os.path.join(ROOT, "tools"))
from scaling.command_line import exit_code  # noqa: E402

# The beginning of a small program that takes turns as benchmarks/interleaved.py tells.
TURNS = r"""#!{python}
import json, os, sys, time
o = dict(argument.split("=", 1) for argument in sys.argv[1:])
def wait(what):
    while not os.path.exists(f"{o['gate']}/{o['name']}.{what}"):
        time.sleep(0.001)
def answer(what, value):
    with open(f"{o['gate']}/{o['name']}.{what}.part", "w") as f:
        f.write(repr(value))
    os.rename(f"{o['gate']}/{o['name']}.{what}.part", f"{o['gate']}/{o['name']}.{what}")
"""


def need(*modules):
    """Ends with 77 (skipped) where one of the packages is missing."""
    for module in modules:
        try:
            __import__(module)
        except ImportError:
            print(f"skipped: {module} is not installed")
            sys.exit(77)


class ToolTest(unittest.TestCase):
    """Calls a tool's main() in a temporary folder."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name

    def need(self, *modules):
        """Skips this test alone where one of the packages is missing."""
        for module in modules:
            if importlib.util.find_spec(module) is None:
                self.skipTest(f"{module} is not installed")

    def call(self, main, *arguments, code=0):
        """What the tool prints. In this process: importing pandas and matplotlib again costs seconds."""
        printed = io.StringIO()
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                result = exit_code(main, list(arguments))
        except SystemExit as end:  # argparse
            result = end.code
        finally:
            os.chdir(ROOT)
        self.assertEqual(result, code, printed.getvalue())
        return printed.getvalue()

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def read(self, name):
        with open(os.path.join(self.folder, name), encoding="utf-8") as file:
            return file.read()


STEP_COLUMNS = [
    "step",
    "epoch",
    "step_ms",
    "images_per_second",
    "exposed_comm_ms",
    "loader_wait_ms",
    "peak_memory_gib",
    "interval_seconds",
    "energy_j",
]
EPOCH_COLUMNS = [
    "job_id",
    "commit",
    "gpu_type",
    "nodes",
    "gpus",
    "ranks",
    "precision",
    "global_batch_size",
    "bucket_cap_mb",
    "repeat",
    "steps_per_epoch",
    "epoch",
    "gpu_utilisation_percent",
]


def write_csv(path, columns, rows):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        for row in [columns, *rows]:
            file.write(",".join(map(str, row)) + "\n")


def write_run(
    folder, name, ranks, step_ms, repeat=1, batch=48, exposed_ms=1.0, wait_ms=0.0, energy_j="", log_every=10
):
    """A run whose warm-up (steps up to 10) is ten times slower; intervals of log_every steps."""
    rows = []
    for step in range(log_every, 51, log_every):
        ms = 10 * step_ms if step <= 10 else step_ms
        seconds = log_every * ms / 1000
        rows.append([step, 0.5, ms, batch * 1000 / ms, exposed_ms, wait_ms, 2.5, seconds, energy_j])
    path = os.path.join(folder, name)
    write_csv(os.path.join(path, "steps.csv"), STEP_COLUMNS, rows)
    write_csv(
        os.path.join(path, "epochs.csv"),
        EPOCH_COLUMNS,
        [["7", "abc", "cpu", 1, 0, ranks, "fp32", batch, 25, repeat, 100, 0, ""]],
    )
    with open(os.path.join(path, "exit_code"), "w", encoding="utf-8") as file:
        file.write("0\n")
