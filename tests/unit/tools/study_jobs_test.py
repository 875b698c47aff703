# SPDX-License-Identifier: Apache-2.0
"""Studies from submission to finished runs with the real job files, an imitated Slurm and an imitated
program."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import unittest

from study_support import ROOT, need

from imitated_slurm import STUDY, TOOL, StudyCase

need("yaml")

SENSITIVITY = """kind: sensitivity
program: gpt2_ddp
cpu_ranks: [2]
vary:
  ddp.bucket_cap_mb: [1, 25]
  amp.dtype: ["off", bf16, fp16]
repeats: 2
steps: 8
settings:
  model.layers: 2
"""


# A program of the user's own: in a folder of theirs, with few settings, some of them off by default.
OWN = """kind: weak
program: build/train
config: own.yaml
cpu_ranks: [1, 2]
batch_size_per_gpu: 4
batch_size_setting: loop.batch
steps_setting: loop.steps
repeats: 1
steps: 8
settings:
  data.path: here
"""
OWN_HELP = """loop
  loop.batch=1
  loop.steps=5
  data.path=
  train.eval_every=1
      Epochs between evaluations.
  train.epochs=0
  lr_schedule.warmup_steps=0
  metrics.log_every=10
  context.device=auto
  checkpoint.dir=
"""


class OwnProgram(StudyCase):
    def setUp(self):
        super().setUp()
        os.makedirs(os.path.join(self.folder, "project/build"))
        self.write("project/build/CMakeCache.txt", "CMAKE_BUILD_TYPE:STRING=Debug\n")
        self.write("project/own.yaml", "lr_schedule:\n  warmup_steps: 3\n")
        with open(os.path.join(self.folder, "build/examples/resnet_ddp"), encoding="utf-8") as file:
            self.write(
                "project/build/train", file.read() + 'open(folder + "/cwd.txt", "w").write(os.getcwd())\n'
            )
        os.chmod(os.path.join(self.folder, "project/build/train"), 0o755)
        self.write("bin/mpirun", '#!/bin/sh\nshift 2\nexec "$@"\n')
        os.chmod(os.path.join(self.folder, "bin/mpirun"), 0o755)
        self.write("project/study.yaml", OWN)
        self.write("fake/help", OWN_HELP)

    def own(self, *options, code=0):
        """Calls the tool in the folder of the project, as its user does."""
        environment = {
            **os.environ,
            "PATH": os.path.join(self.folder, "bin") + ":" + os.environ["PATH"],
            "FAKE": self.fake,
        }
        for name in ("DDP_RUNS", "DDP_PROGRAM", "SLURM_JOB_ID"):
            environment.pop(name, None)
        done = subprocess.run(
            [sys.executable, TOOL, "study.yaml", *options],
            cwd=os.path.join(self.folder, "project"),
            capture_output=True,
            text=True,
            env=environment,
        )
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def check_runs(self):
        project = os.path.join(self.folder, "project")
        for name in ("n001_r1", "n002_r1"):
            run = f"project/runs/study/{name}"
            self.assertEqual(
                self.read(f"{run}/arguments.txt").split(),
                [
                    "--config",
                    "own.yaml",
                    "train.eval_every=0",  # it evaluates by default
                    "lr_schedule.warmup_steps=0",  # its configuration has one
                    "data.path=here",
                    "context.device=cpu",
                    "loop.steps=8",
                    "metrics.log_every=1",
                    "loop.batch=4",
                    "metrics.repeat=1",
                    f"metrics.dir={project}/runs/study",
                    f"metrics.run_name={name}",
                ],
            )
            self.assertEqual(self.read(f"{run}/cwd.txt"), os.path.realpath(project))
        self.assertIn("| build type | Debug |", self.read("project/runs/study/SYSTEM.md"))

    def test_a_program_given_by_its_path_gets_the_settings_it_has(self):
        self.assertIn("report: ", self.own("--local"))
        self.check_runs()
        shutil.rmtree(os.path.join(self.folder, "project/runs"))
        self.own()
        self.check_runs()
        self.assertIn("# 2 done", self.own("--status"))

    def test_an_absolute_path_and_what_the_program_lacks(self):
        program = os.path.join(self.folder, "project/build/train")
        self.write("project/study.yaml", OWN.replace("build/train", program))
        self.assertIn(f"mpirun -n 2 {program} --config", self.own("--local", "--dry-run"))
        self.write("project/study.yaml", OWN.replace("steps_setting: loop.steps\n", ""))
        self.assertRegex(
            self.own("--local", code=64), "has no setting train.max_steps.*; fix: steps_setting names"
        )
        self.write("project/study.yaml", OWN.replace("build/train", "./nothing"))
        self.assertIn("fix: build it, or give its path from the folder", self.own("--local", code=64))
        self.write("project/study.yaml", OWN)
        self.write("fake/help", "no settings\n")
        self.assertRegex(
            self.own(code=64), "build/train --help all: it prints no settings; fix: give a program"
        )
        self.assertFalse(os.path.exists(os.path.join(self.folder, "project/runs")))

    def test_data_is_prepared_in_the_folder_of_the_call(self):
        self.write("project/study.yaml", OWN + "prepare:\n  here: mkdir here\n")
        self.own("--local", "--max-ranks", "1")
        self.assertTrue(os.path.isdir(os.path.join(self.folder, "project/here")))
        self.assertEqual(list(json.loads(self.read("project/runs/study/study.json"))["runs"]), ["n001_r1"])


class Jobs(StudyCase):
    def test_a_study_is_submitted_and_done(self):
        self.assertEqual(set(self.states().values()), {"missing"})
        out = self.study()
        self.assertIn("4 runs: 0 done, 0 in the queue, 4 to start", out)
        self.assertEqual(self.states(), dict.fromkeys(("n001_r1", "n001_r2", "n004_r1", "n004_r2"), "done"))
        self.check_arguments()
        self.assertIn("loader.global_batch_size=8", self.read("out/n004_r1/arguments.txt"))
        calls = self.read("fake/sbatch.txt").splitlines()
        self.assertEqual(len(calls), 2)
        self.assertIn("--nodes=2 --ntasks-per-node=2", calls[1])
        self.assertIn("--array=1-2%1", calls[1])
        self.assertNotIn("gpus", calls[1])
        # What --dry-run prints is what was submitted, and the copy of the job file is what it makes.
        printed = self.study("--dry-run").splitlines()
        self.assertEqual([line.partition(" sbatch ")[2] for line in printed[1:3]], calls)
        copy = self.read("out/strong_scaling.sbatch")
        os.remove(os.path.join(self.out, "strong_scaling.sbatch"))
        subprocess.run(["bash", "-c", printed[0]], check=True, cwd=ROOT)
        self.assertEqual(self.read("out/strong_scaling.sbatch"), copy)
        self.assertNotIn("#SBATCH --gpus-per-node", self.read("out/strong_scaling.sbatch"))
        self.assertIn("# Machine", self.read("out/SYSTEM.md"))
        self.assertIn("0 to start", self.study())
        self.assertEqual(len(self.read("fake/sbatch.txt").splitlines()), 2)

    def test_what_failed_or_was_lost_is_submitted_again_and_nothing_else(self):
        self.write("fake/n004_r2", "3")
        self.study()
        self.assertIn("n004_r2", self.read("out/n004_r2/arguments.txt"))
        states = self.states()
        self.assertEqual(states.pop("n004_r2"), "failed")
        self.assertEqual(set(states.values()), {"done"})
        # Killed without a word: begun, no exit code, not in the queue.
        os.remove(os.path.join(self.out, "n001_r1", "exit_code"))
        # Ended well and wrote nothing.
        self.write("out/n001_r2/epochs.csv", "header\n")
        self.assertEqual(
            self.states(), {"n001_r1": "lost", "n001_r2": "failed", "n004_r1": "done", "n004_r2": "failed"}
        )
        os.remove(os.path.join(self.fake, "n004_r2"))
        out = self.study()
        self.assertIn("restart: n004_r2, failed (exit code 3)", out)
        calls = self.read("fake/sbatch.txt").splitlines()
        self.assertIn("--array=1-2%1", calls[2])
        self.assertIn("--array=2%1", calls[3])
        self.assertEqual(set(self.states().values()), {"done"})
        # The first start's files are kept, and not mixed with the second's.
        self.assertEqual(self.read("out/n004_r2/attempt-1/exit_code"), "3\n")
        self.assertEqual(self.read("out/n004_r2/steps.csv").count("step,"), 1)
        self.assertFalse(os.path.exists(os.path.join(self.out, "n004_r1", "attempt-1")))

    def test_what_is_in_the_queue_is_left_alone(self):
        self.write("fake/hold", "")
        self.study()
        self.assertEqual(set(self.states().values()), {"queued"})
        self.assertIn("4 in the queue, 0 to start", self.study())
        self.assertEqual(len(self.read("fake/sbatch.txt").splitlines()), 2)
        # Slurm that does not answer is no empty queue.
        self.write("fake/squeue_fails", "")
        self.assertIn("squeue failed: slurm_load_jobs error", self.study(code=64))
        self.assertEqual(len(self.read("fake/sbatch.txt").splitlines()), 2)

    def test_a_job_that_cannot_be_noted_is_named(self):
        os.makedirs(os.path.join(self.out, "strong_scaling.sbatch"))
        self.assertRegex(
            self.study(code=73), f"error: {self.out}/strong_scaling.sbatch: cannot write: .*Is a directory"
        )
        self.assertFalse(os.path.exists(os.path.join(self.fake, "sbatch.txt")))
        os.rmdir(os.path.join(self.out, "strong_scaling.sbatch"))
        # The folder is lost while Slurm takes the first job.
        self.write("bin/sbatch", f"#!/bin/sh\nmkdir '{self.out}/submissions.jsonl'\necho 102\n")
        self.assertIn(
            "job 102 was submitted, but this cannot be recorded here: Is a directory; fix: scancel 102",
            self.study(code=73),
        )

    def test_a_lost_peer_is_requeued_by_the_job(self):
        self.write("fake/n001_r2", "76")
        self.study()
        self.assertIn("requeue 1012", self.read("fake/scontrol.txt"))
        self.assertIn("exit code 76 (a peer was lost): requeued", self.read("out/n001_r2/slurm.log"))
        self.assertNotIn("requeue 1011", self.read("fake/scontrol.txt"))

    def test_the_array_of_a_sensitivity_study_is_its_product(self):
        self.write("study.yaml", SENSITIVITY)
        self.study()
        plan = self.plan()
        self.assertEqual(len(plan), 12)
        self.assertEqual(set(self.states().values()), {"done"})
        self.check_arguments()
        self.assertEqual(
            plan["n002_ddp.bucket_cap_mb-25_amp.dtype-bf16_r2"]["varied"],
            {"ddp.bucket_cap_mb": "25", "amp.dtype": "bf16"},
        )

    def test_other_settings_do_not_join_measured_runs(self):
        self.study()
        self.write("study.yaml", STUDY.replace("steps: 8", "steps: 9"))
        self.assertIn("holds a run with other settings", self.study(code=64))
        # What failed may be mended; the first two were done with the settings that stay.
        for name in ("n004_r1", "n004_r2"):
            self.write(f"out/{name}/exit_code", "64\n")
        self.write("study.yaml", STUDY.replace("[1, 4]", "[4]").replace("steps: 8", "steps: 9"))
        self.assertIn("2 runs: 0 done, 0 in the queue, 2 to start", self.study())
        self.assertIn("train.max_steps=9", self.read("out/n004_r1/arguments.txt"))
        self.write("study.yaml", STUDY.replace("[1, 4]", "[1]").replace("repeats: 2", "repeats: 3"))
        self.assertIn("3 runs: 2 done, 0 in the queue, 1 to start", self.study())

    def test_an_edited_study_does_not_join_the_runs_of_the_old_one(self):
        self.study()
        for old, new, said in (
            ("global_batch_size: 8", "global_batch_size: 16", "batch was 8 and now is 16"),
            ("resnet_ddp", "gpt2_ddp", "program was resnet_ddp and now is gpt2_ddp"),
            ("steps: 8", "steps: 8\nwarmup_steps: 3", "warmup_steps was 1 and now is 3"),
        ):
            # Also where none of the done runs is one of the new study.
            for ranks in ("[1, 4]", "[2]"):
                self.write("study.yaml", STUDY.replace(old, new).replace("[1, 4]", ranks))
                out = self.study(code=64)
                self.assertIn(said, out)
                self.assertIn("give another --output", out)
        self.write(
            "study.yaml",
            STUDY.replace("global_batch_size: 8", "batch_size_per_gpu: 8").replace("strong", "weak"),
        )
        self.assertIn("kind was strong and now is weak", self.study(code=64))
        self.assertEqual(json.loads(self.read("out/study.json"))["batch"], 8)
        self.write("study.yaml", STUDY.replace("[1, 4]", "[2]"))
        self.assertIn("2 runs: 0 done", self.study())
        self.assertEqual(len(self.plan()), 6)
        self.check_arguments()

    def test_one_start_at_a_time(self):
        self.write("study.yaml", STUDY.replace("[1, 4]", "[1]"))
        self.study("--local")
        os.remove(os.path.join(self.out, "n001_r1", "exit_code"))
        self.assertEqual(self.states()["n001_r1"], "lost")
        with open(os.path.join(self.out, "lock"), encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.assertIn("is in use by another tools/study.py", self.study("--local", code=64))
            self.assertIn("is in use by another tools/study.py", self.study(code=64))
            self.assertEqual(self.states(), {"n001_r1": "running", "n001_r2": "done"})
        self.assertFalse(os.path.exists(os.path.join(self.out, "n001_r1", "attempt-1")))
        self.study("--local")
        self.assertEqual(set(self.states().values()), {"done"})

    def test_the_hint_names_the_same_folders(self):
        self.assertIn(f"study.yaml --output {self.out} --build {self.folder}/build --status", self.study())

    def test_the_build_folder_is_seen_from_the_caller(self):
        environment = {**os.environ, "FAKE": self.fake}
        done = subprocess.run(
            [
                sys.executable,
                TOOL,
                "study.yaml",
                "--output",
                "out",
                "--build",
                "build",
                "--local",
                "--dry-run",
            ],
            cwd=self.folder,
            capture_output=True,
            text=True,
            env=environment,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"{self.folder}/build/examples/resnet_ddp", done.stdout.splitlines()[0])

    def test_a_repeat_that_is_none_of_the_study(self):
        for repeat in ("0", "3", "-1"):
            self.assertIn("has the repeats 1 to 2", self.study(f"--repeat={repeat}", code=64))
        self.assertIn("2 to start", self.study("--repeat", "2"))

    def test_settings_that_the_program_lacks_are_told_before_submission(self):
        self.write("study.yaml", STUDY + "settings:\n  loader.num_wokers: 1\n")
        known = [
            "train.eval_first",
            "train.eval_every",
            "train.eval_every_steps",
            "context.device",
            "train.max_steps",
            "train.epochs",
            "metrics.log_every",
            "loader.num_workers",
            "lr_schedule.warmup_steps",
            "train.grad_accum_steps",
        ]
        self.write("fake/help", "loader\n" + "".join(f"  {key}=1\n      a text\n" for key in known))
        self.assertRegex(
            self.study(code=64),
            "study.yaml: resnet_ddp has no setting loader.num_wokers, did you mean loader.num_workers",
        )
        self.assertFalse(os.path.exists(self.out))
        self.write("study.yaml", STUDY + "settings:\n  loader.num_workers: 1\n")
        self.assertRegex(
            self.study(code=64),
            "has no setting loader.global_batch_size.*; fix: global_batch_size_setting or batch_size_setting "
            "names the program's own",
        )
        known.append("loader.global_batch_size")
        self.write("fake/help", "loader\n" + "".join(f"  {key}=1\n      a text\n" for key in known))
        self.study()

    def test_what_is_missing_is_prepared_once(self):
        data = os.path.join(self.folder, "data")
        study = STUDY.replace("[1, 4]", "[1]") + f"prepare:\n  {data}: "
        self.write("study.yaml", study + "mkdir /nonexistent/folder\n")
        self.assertIn(
            f"mkdir /nonexistent/folder ended with 1 and left no {data}", self.study("--local", code=64)
        )
        self.write("study.yaml", study + "no_such_command\n")
        self.assertIn("no_such_command: No such file", self.study("--local", code=64))
        self.assertEqual(set(self.states().values()), {"missing"})
        self.write("study.yaml", study + f"mkdir {data}\n")
        self.assertIn("is missing: mkdir", self.study("--local"))
        self.assertEqual(set(self.states().values()), {"done"})
        self.write("fake/n001_r1", "1")
        os.remove(os.path.join(self.out, "n001_r1", "exit_code"))
        self.assertNotIn("is missing", self.study("--local", code=1))

    def test_no_program_and_no_slurm_are_said(self):
        os.remove(os.path.join(self.folder, "build/examples/resnet_ddp"))
        self.assertIn("there is no program", self.study("--local", code=64))
        self.assertIn("there is no program", self.study(code=64))
        self.assertFalse(os.path.exists(os.path.join(self.fake, "sbatch.txt")))
        self.assertFalse(os.path.exists(self.out))


if __name__ == "__main__":
    unittest.main()
