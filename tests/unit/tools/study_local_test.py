# SPDX-License-Identifier: Apache-2.0
"""Studies on one host, without Slurm, with an imitated program."""

import os
import unittest

from study_support import need

from imitated_slurm import STUDY, StudyCase

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

    def test_each_cpu_rank_has_as_many_threads_at_every_point(self):
        self.write("bin/mpirun", '#!/bin/sh\nshift 2\nexec "$@"\n')
        os.chmod(os.path.join(self.folder, "bin/mpirun"), 0o755)
        self.write("study.yaml", STUDY + "cpus_per_rank: 3\n")
        os.environ.pop("OMP_NUM_THREADS", None)
        self.study("--local")
        for name in ("n001_r1", "n004_r1"):
            self.assertRegex(self.read(f"out/{name}/command.txt"), "^OMP_NUM_THREADS=3 ")

    def failed_run(self, log):
        """What is printed of a run that failed with this log."""
        self.write("study.yaml", STUDY.replace("[1, 4]", "[1]").replace("repeats: 2", "repeats: 1"))
        self.write("fake/n001_r1", "64\n" + log)
        lines = self.study("--local", code=1).splitlines()
        begin = next(number for number, line in enumerate(lines) if line.startswith("[1/1] n001_r1: failed"))
        return [line[4:] for line in lines[begin + 1 :] if line.startswith("    ")]

    def test_of_a_failed_run_the_errors_come_first(self):
        launcher = [f"mpirun's own words, line {number}" for number in range(12)]
        refused = "[error] argument: lora.rank=100000: expected integer from 0 to 65536"
        log = [
            "[12:00:00.100] [info] reading",
            f"[12:00:01.000] {refused}",
            f"[12:00:01.001] {refused}",
            "[12:00:01.002] [error] rank 1 failed",
        ]
        self.assertEqual(self.failed_run("\n".join(log + launcher)), [log[1], log[3]] + launcher[-8:])
        # Also where the end of the log holds them: each line once.
        self.assertEqual(
            self.failed_run("\n".join(log + launcher[:2])), [log[1], log[3], log[0]] + launcher[:2]
        )
        self.assertEqual(self.failed_run("\n".join(launcher)), launcher[-8:])

    def test_of_many_errors_the_first_and_the_last_are_shown(self):
        log = [f"[12:00:0{number}.000] [error] error {number}" for number in range(10)]
        self.assertEqual(self.failed_run("\n".join(log)), log[:4] + ["… 2 more errors …"] + log[-4:])

    def test_a_folder_that_cannot_be_written_ends_with_73(self):
        self.write("study.yaml", STUDY.replace("[1, 4]", "[1]"))
        self.write("file", "")
        for out, why in (
            (f"{self.folder}/file", "File exists"),
            (f"{self.folder}/file/sub", "Not a directory"),
        ):
            self.out = out
            for options in (["--local"], []):
                self.assertRegex(
                    self.study(*options, code=73),
                    f"^error: {self.out}: cannot write: {why}; fix: name another folder",
                )
        self.out = os.path.join(self.folder, "out")
        os.makedirs(os.path.join(self.out, "study.yaml"))
        self.assertRegex(
            self.study("--local", code=73), f"(?m)^error: {self.out}/study.yaml: cannot write: Is a directory"
        )
        self.assertFalse(os.path.exists(os.path.join(self.fake, "sbatch.txt")))

    def test_a_launcher_that_is_not_there_is_said_before_anything_is_written(self):
        self.write("study.yaml", STUDY.replace("[1, 4]", "[4]"))
        self.assertRegex(
            self.study("--local", "--launcher", "ddp_test_launch", code=64),
            "/ddp_test_launch, which starts 4 ranks",
        )
        self.assertFalse(os.path.exists(self.out))

    def test_a_host_with_too_few_gpus_says_what_it_leaves_out(self):
        self.write("bin/nvidia-smi", "#!/bin/sh\necho 'GPU 0: one'\n")
        os.chmod(os.path.join(self.folder, "bin/nvidia-smi"), 0o755)
        self.write("study.yaml", STUDY.replace("cpu_ranks: [1, 4]", "gpus: [1, 4]"))
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        self.assertIn("skipped: 4 GPUs, this host has 1", self.study("--local"))
        self.assertEqual(
            self.states(), {"n001_r1": "done", "n001_r2": "done", "n004_r1": "missing", "n004_r2": "missing"}
        )
        self.assertIn(
            "the remaining runs need at least 4 GPU(s), and this host has 1", self.study("--local", code=64)
        )


if __name__ == "__main__":
    unittest.main()
