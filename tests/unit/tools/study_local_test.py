# SPDX-License-Identifier: Apache-2.0
"""Studies on one host, without Slurm, with an imitated program."""

import os
import unittest

from imitated_slurm import STUDY, StudyCase
from study_support import need

need("yaml")


class Local(StudyCase):
    def test_without_slurm_on_one_host(self):
        self.write("study.yaml", STUDY.replace("[1, 4]", "[1]"))
        self.write("fake/n001_r1", "7")
        out = self.study("--local", code=1)
        self.assertRegex(out, r"\[1/2\] n001_r1: failed \(exit code 7\)")
        os.remove(os.path.join(self.fake, "n001_r1"))
        out = self.study("--local")
        self.assertRegex(out, r"\[1/1\] n001_r1: done")
        self.check_arguments()
        self.assertEqual(self.read("out/n001_r1/attempt-1/exit_code"), "7\n")
        self.assertIn("# Machine", self.read("out/SYSTEM.md"))

    def test_a_host_with_too_few_gpus_says_what_it_leaves_out(self):
        self.write("bin/nvidia-smi", "#!/bin/sh\necho 'GPU 0: one'\n")
        os.chmod(os.path.join(self.folder, "bin/nvidia-smi"), 0o755)
        self.write("study.yaml", STUDY.replace("cpu_ranks: [1, 4]", "gpus: [1, 4]"))
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        self.assertIn("left out: 4 GPUs, this host has 1", self.study("--local"))
        self.assertEqual(self.states(), {"n001_r1": "done", "n001_r2": "done", "n004_r1": "missing", "n004_r2": "missing"})
        self.assertIn("what is left needs at least 4 GPU(s), and this host has 1", self.study("--local", code=64))


if __name__ == "__main__":
    unittest.main()
