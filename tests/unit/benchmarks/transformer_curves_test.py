# SPDX-License-Identifier: Apache-2.0
"""Curves of libddp's transformers that are too far from PyTorch's are a failure, and so are missing ones."""

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest

from study_support import ROOT

PROGRAM = os.path.join(ROOT, "benchmarks", "transformer_curves")
sys.dont_write_bytecode = True
LOADER = importlib.machinery.SourceFileLoader("transformer_curves", PROGRAM)
transformer_curves = importlib.util.module_from_spec(importlib.util.spec_from_loader(LOADER.name, LOADER))
LOADER.exec_module(transformer_curves)

CURVES = dict(
    eager=[4.0, 2.0],
    compile=[4.0, 2.5],
    eager_fp32=[5.0, 3.0],
    fused=[4.0, 1.0],
    plain=[4.5, 2.0],
    fp32=[5.0, 3.25],
)


class Verdict(unittest.TestCase):
    def test_a_side_may_be_twice_as_far_as_compile_and_no_further(self):
        text, near = transformer_curves.verdict(CURVES)
        self.assertEqual(
            text,
            "largest distance: compile from eager 0.5000, fused from eager 1.0000, plain from eager 0.5000, "
            "fp32 from eager_fp32 0.2500; allowed 1.0000",
        )
        self.assertTrue(near)
        for side, curve in dict(fused=[4.0, 0.99], plain=[2.9, 2.0], fp32=[5.0, 4.1]).items():
            self.assertFalse(transformer_curves.verdict(CURVES | {side: curve})[1], side)

    def test_references_alone_are_no_success(self):
        def without(*sides):
            return transformer_curves.verdict(
                {name: curve for name, curve in CURVES.items() if name not in sides}
            )

        for side in "eager", "compile":
            self.assertEqual(without(side), (f"nothing to compare without {side}", False))
        self.assertEqual(
            without("fused", "plain", "fp32"), ("nothing to compare without a side of libddp", False)
        )
        self.assertEqual(
            without("eager_fp32", "plain"),
            ("largest distance: compile from eager 0.5000, fused from eager 1.0000; allowed 1.0000", True),
        )

    def test_small_models_agree_in_every_step(self):
        self.assertTrue(transformer_curves.tiny_verdict(dict(eager_fp32=[4.0, 2.0], fp32=[4.00003, 2.0]))[1])
        self.assertFalse(transformer_curves.tiny_verdict(dict(eager_fp32=[4.0, 2.0], fp32=[4.0, 2.00003]))[1])
        self.assertFalse(transformer_curves.tiny_verdict(dict(eager_fp32=[4.0, 2.0], fp32=[4.0]))[1])
        self.assertFalse(transformer_curves.tiny_verdict(dict(eager_fp32=[4.0, 2.0]))[1])

    def test_a_loss_that_is_no_number_is_an_error(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "steps.csv"), "w") as f:
                f.write("step,loss\n1,2.5\n2,nan\n")
            with self.assertRaisesRegex(ValueError, "the loss of step 2 is nan"):
                transformer_curves.curves.read_losses(folder)


class Usage(unittest.TestCase):
    def message(self, *options):
        result = subprocess.run(
            [sys.executable, PROGRAM, *options, "build", "data", "out"],
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        self.assertEqual(result.returncode, 64)
        return result.stderr

    def test_mistakes_are_named_before_anything_runs(self):
        self.assertIn("--models t5: there are gpt2, bert, vit", self.message("--models", "gpt2,t5"))
        self.assertIn("--sides slow: there are eager, compile, ", self.message("--sides", "slow"))
        self.assertIn("--sides fused: there are eager_fp32, fp32", self.message("--tiny", "--sides", "fused"))
        self.assertIn("at least one whole window", self.message("--steps", "9"))


if __name__ == "__main__":
    unittest.main()
