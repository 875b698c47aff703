# SPDX-License-Identifier: Apache-2.0
"""Both rules are tuned alike and get the same seeds, steps are read from evaluations, and the end of a failed
run's log is told. A small program takes the trainer's place."""

import contextlib
import csv
import importlib.machinery
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import unittest

from study_support import ROOT

PROGRAM = os.path.join(ROOT, "benchmarks", "optimizer_curves")
sys.dont_write_bytecode = True
LOADER = importlib.machinery.SourceFileLoader("optimizer_curves", PROGRAM)
optimizer_curves = importlib.util.module_from_spec(importlib.util.spec_from_loader(LOADER.name, LOADER))
LOADER.exec_module(optimizer_curves)
Run = optimizer_curves.Run

# AdamW's loss falls by 1 a step, Muon's by 2. A rate of 4e-3 is best, or AdamW's is `best`.
TRAINER = r"""#!{python}
import csv, math, os, sys
o = dict(argument.split("=", 1) for argument in sys.argv[1:])
rate, seed, steps = float(o["lr_schedule.lr"]), int(o["sampler.seed"]), int(o["train.max_steps"])
if rate > float(o.get("limit", 1)):
    print("step 2 is not finite (train.non_finite=error): the loss of rank 0 is nan")
    sys.exit(70)
if o["optimizer.type"] == "muon" and seed == int(o.get("fails", 0)):
    print("the first cause")
    sys.exit(3)
muon = o["optimizer.type"] == "muon"
best = 4e-3 if muon else float(o.get("best", 4e-3))
os.makedirs(o["metrics.dir"] + "/run")
with open(o["metrics.dir"] + "/run/evals.csv", "w") as f:
    writer = csv.writer(f)
    writer.writerow(["step", "eval_loss"])
    for step in range(2, steps + 1, 2):
        loss = 100 - step * (2 if muon else 1) + abs(math.log2(rate / best)) + seed / 10
        writer.writerow([step, loss])
"""


class Curves(unittest.TestCase):
    def test_steps_are_those_of_the_first_evaluation_that_is_not_above_the_loss(self):
        runs = [Run("muon", 1e-3, seed, {10: 4.0 + seed, 20: 2.0 + seed, 30: 1.5 + seed}) for seed in (0, 1)]
        self.assertEqual(optimizer_curves.mean_curve(runs), {10: 4.5, 20: 2.5, 30: 2.0})
        self.assertEqual(optimizer_curves.steps_to(runs[0].curve, 2.0), 20)
        self.assertEqual(optimizer_curves.steps_cell(runs, 2.0), "30 (20, never)")

    def test_rates_are_added_at_the_end_that_is_best(self):
        def added(adamw, muon):
            losses = dict(adamw=adamw, muon=muon)
            return optimizer_curves.next_rates(
                [
                    Run(rule, rate, 1, {10: loss})
                    for rule in losses
                    for rate, loss in zip((1e-3, 2e-3, 4e-3), losses[rule])
                ]
            )

        self.assertEqual(added([3, 1, 2], [3, 2, 4]), [])
        self.assertEqual(added([3, 2, 1], [3, 2, 4]), [8e-3])
        self.assertEqual(added([1, 2, 3], [3, 2, 1]), [5e-4, 8e-3])

    def test_a_rule_that_diverges_with_every_rate_has_no_best_one(self):
        with self.assertRaisesRegex(RuntimeError, "Muon diverged with every rate"):
            optimizer_curves.best([Run("muon", 1e-3, 1)], "muon")


class Study(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.build, self.out = (os.path.join(folder.name, name) for name in ("build", "out"))
        os.makedirs(os.path.join(self.build, "examples"))
        trainer = os.path.join(self.build, "examples", "gpt2_ddp")
        with open(trainer, "w") as f:
            f.write(TRAINER.replace("{python}", sys.executable))
        os.chmod(trainer, 0o755)

    def study(self, *arguments):
        """(exit code, what is printed, what is said of failures)"""
        command = [sys.executable, PROGRAM, "--device", "cpu", "--rates", "2e-3,4e-3,8e-3", "--steps", "20"]
        command += ["--warmup", "2", "--eval-every", "2", "--jobs", "3", *arguments]
        done = subprocess.run(
            [*command[:-1], self.build, "tokens", self.out, command[-1]],
            capture_output=True,
            encoding="utf-8",
        )
        return done.returncode, done.stdout, done.stderr

    def test_both_rules_are_tuned_then_run_from_the_same_seeds(self):
        code, printed, _ = self.study("--target", "90.3", "best=1e-3")
        self.assertEqual(code, 0)
        self.assertIn("| 0.001 | 80.1000 | 62.1000 |", printed)
        self.assertIn("| 0.0005 | 81.1000 | 63.1000 |", printed)
        self.assertIn(
            "| AdamW | 0.001 | 80.3000 | 0.1000 | 80.2000 | 80.4000 | 20 (20, 20, never) | 10 (10, 10, 12) |",
            printed,
        )
        self.assertIn("| Muon | 0.004 | 60.3000 | 0.1000 | 60.2000 | 60.4000 | 10 (10, 10, 12) | 6", printed)
        with open(os.path.join(self.out, "table.md")) as f:
            self.assertEqual(f.read(), printed)
        with open(os.path.join(self.out, "curves.csv"), newline="") as f:
            rows = list(csv.DictReader(f))
        self.assertEqual(len(rows), (2 * 5 + 2 * 3) * 10)
        self.assertEqual({row["seed"] for row in rows if row["rule"] == "adamw"}, {"1", "2", "3", "4"})
        self.assertEqual({row["seed"] for row in rows if row["rule"] == "muon"}, {"1", "2", "3", "4"})

    def test_a_best_rate_at_the_end_is_told_and_is_no_success(self):
        code, printed, _ = self.study("--extend", "1", "best=1e-3")
        self.assertEqual(code, 1)
        self.assertIn("the rules are not tuned", printed)

    def test_a_rate_may_diverge_and_is_no_best_one(self):
        code, printed, _ = self.study("limit=5e-3")
        self.assertEqual(code, 0)
        self.assertIn("| 0.008 | diverged | diverged |", printed)

    def test_the_end_of_the_log_of_a_failed_run_is_told(self):
        code, _, failures = self.study("fails=3")
        self.assertEqual(code, 1)
        self.assertIn("muon_0.004_seed3 ended with 3", failures)
        self.assertIn("    the first cause\n", failures)


class Usage(unittest.TestCase):
    def test_mistakes_are_named_before_anything_runs(self):
        for arguments, message in (
            (["--rates", "1e-3,x,2e-3"], "--rates 1e-3,x,2e-3: numbers"),
            (["--rates", "1e-3,2e-3"], "at least three rates"),
            (["--seeds", "0"], "--seeds and --jobs"),
            (["--steps", "40", "--warmup", "40"], "more than --warmup"),
            (["--schedule", "step"], "there are cosine, linear"),
        ):
            sys.argv = [PROGRAM, "--device", "cpu", *arguments, "build", "tokens", "out"]
            with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit) as ended:
                optimizer_curves.parse()
            self.assertEqual(ended.exception.code, 64)
            self.assertIn(message, said.getvalue())


if __name__ == "__main__":
    unittest.main()
