# SPDX-License-Identifier: Apache-2.0
"""The job files of slurm/ by themselves: which settings the program is started with."""

import os
import subprocess
import unittest

from study_support import ROOT

from imitated_slurm import StudyCase


class JobFiles(StudyCase):
    def job(self, file, *arguments, rank=0, code=0, restarts=0):
        """Runs a job file as Slurm does, its program as one rank of two."""
        environment = {
            **os.environ,
            "PATH": os.path.join(self.folder, "bin") + ":" + os.environ["PATH"],
            "FAKE": self.fake,
            "DDP_RUNS": self.out,
            "DDP_PROGRAM": os.path.join(self.folder, "build/examples/resnet_ddp"),
            "SLURM_SUBMIT_DIR": ROOT,
            "SLURM_JOB_ID": f"5{rank}",
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS": "2",
            "SLURM_JOB_NODELIST": "nodes",
            "SLURM_PROCID": str(rank),
            "DDP_PROFILE_STEPS": "7:3",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        environment.pop("SLURM_ARRAY_JOB_ID", None)
        done = subprocess.run(
            ["bash", os.path.join(ROOT, "slurm", file), *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=environment,
        )
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)

    def settings(self, run):
        """What the program of a run goes by: the last of each setting."""
        return dict(
            word.split("=", 1) for word in self.read(f"{run}/arguments.txt").splitlines() if "=" in word
        )

    def test_a_training_has_the_folders_of_its_job(self):
        self.job("lora_ddp.sbatch", "--config", "x.yaml")
        settings = self.settings("out/50")
        self.assertEqual(
            {key: settings[key] for key in ("checkpoint.dir", "metrics.dir", "metrics.run_name")},
            {
                "checkpoint.dir": f"{self.out}/50/checkpoint",
                "metrics.dir": self.out,
                "metrics.run_name": "50",
            },
        )

    def test_a_training_keeps_the_folders_its_caller_names(self):
        for file in ("lora_ddp.sbatch", "resnet_ddp.sbatch"):
            for given in ("a folder/checkpoint", ""):  # the empty one saves nothing
                self.job(file, "--config", "x.yaml", "run.mode=evaluate", f"checkpoint.dir={given}")
                settings = self.settings("out/50")
                self.assertEqual(
                    (settings["checkpoint.dir"], settings["metrics.run_name"]), (given, "50"), file
                )
            own = os.path.join(self.folder, "own")
            self.job(file, f"metrics.dir={own}")
            self.assertEqual(self.settings("own/50")["checkpoint.dir"], f"{self.out}/50/checkpoint")
            self.job(file, f"metrics.dir={own}", "metrics.run_name=mine")
            self.assertEqual(self.settings("own/mine")["checkpoint.dir"], f"{self.out}/50/checkpoint")
            # The job's own files stay where whoever waits for it looks.
            self.assertEqual(self.read("out/50/exit_code"), "0\n")

    def test_the_folder_of_another_user_is_refused(self):
        target = os.path.join(self.folder, "target")
        os.makedirs(target)
        os.makedirs(self.out)
        os.symlink(target, os.path.join(self.out, "50"))
        self.job("lora_ddp.sbatch", "--config", "x.yaml", code=64)
        if os.geteuid() == 0:  # only root gives files away
            os.remove(os.path.join(self.out, "50"))
            os.makedirs(os.path.join(self.out, "50"))
            os.chown(os.path.join(self.out, "50"), 1000, 1000)
            self.job("lora_ddp.sbatch", "--config", "x.yaml", code=64)
            target = os.path.join(self.out, "50")
        self.assertEqual(os.listdir(target), [])

    def ends(self, *words, checkpoint=None, saves=False):
        """Each of `words` is one start's: its exit code and what it prints. Returns which were requeued. With
        `saves` each start leaves a newer checkpoint."""
        requeued = []
        calls = os.path.join(self.fake, "scontrol.txt")
        for restarts, word in enumerate(words):
            if os.path.exists(calls):
                os.remove(calls)
            if saves:
                os.makedirs(os.path.join(checkpoint, f"step_{restarts + 1}"))
            code, _, text = word.partition(" ")
            self.write("fake/50", f"{code}\n{text}\n")
            folder = [] if checkpoint is None else [f"checkpoint.dir={checkpoint}"]
            self.job("resnet_ddp.sbatch", "--config", "x.yaml", *folder, code=int(code), restarts=restarts)
            requeued.append(os.path.exists(calls) and "requeue 50" in self.read("fake/scontrol.txt"))
        return requeued

    CAUSE = (
        "first cause: rank 1 (node{}) failed at step 5 in forward: its connection closed without a message"
    )

    def test_a_job_that_ends_in_one_place_is_not_requeued_for_ever(self):
        lost = [f"76 {self.CAUSE.format(node)}" for node in (1, 2, 3)]
        self.assertEqual(self.ends(*lost), [True, True, False])
        self.assertIn("3 times in a row at the same checkpoint", self.read("out/50/slurm.log"))
        # Who submits it again without removing the file has not mended it.
        self.assertEqual(self.ends(lost[0]), [False])

    def test_slurm_may_have_requeued_the_job_itself(self):
        self.write("fake/scontrol_error", "Job is pending execution for job 50\n")
        self.assertEqual(self.ends("76 lost"), [True])
        self.assertIn("Slurm had requeued the job already\n", self.read("out/50/slurm.log"))
        self.assertNotIn("could not requeue", self.read("out/50/slurm.log"))
        self.write("fake/scontrol_error", "Access/permission denied for job 50\n")
        self.assertEqual(self.ends("76 lost"), [True])
        self.assertIn(
            "scontrol could not requeue the job: Access/permission denied for job 50\n",
            self.read("out/50/slurm.log"),
        )

    def test_another_cause_or_a_newer_checkpoint_is_progress(self):
        lost = f"76 {self.CAUSE.format(1)}"
        other = lost.replace("step 5", "step 6")
        self.assertEqual(self.ends(lost, lost, other), [True] * 3)
        checkpoint = os.path.join(self.folder, "kept", "checkpoint")
        for step in (8, 9, 10):
            os.makedirs(os.path.join(checkpoint, f"step_{step}"))
            self.assertEqual(self.ends(lost, checkpoint=checkpoint), [True])
        self.assertEqual(self.ends(lost, lost, checkpoint=checkpoint), [True, False])

    def test_a_stop_signal_while_ranks_start_or_end_is_no_failure(self):
        self.assertEqual(self.ends("143 ", "138 "), [True] * 2)
        self.assertEqual(self.ends("139 "), [False])  # a crash

    def test_a_stop_that_saved_is_never_counted(self):
        self.assertEqual(
            self.ends("75 stopped", "137 ", "75 stopped", "75 stopped", "137 ", "137 "), [True] * 5 + [False]
        )

    def test_a_job_that_makes_progress_is_requeued_however_often_it_starts(self):
        for word in ("75 stopped", f"76 {self.CAUSE.format(1)}", "137 "):
            checkpoint = os.path.join(self.folder, word.split()[0], "checkpoint")
            self.assertEqual(self.ends(*[word] * 25, checkpoint=checkpoint, saves=True), [True] * 25, word)
        # A program with checkpoints of its own says by 75 that it has saved.
        self.assertEqual(self.ends(*["75 stopped"] * 25), [True] * 25)

    def test_starts_without_progress_are_counted_whatever_ended_them(self):
        checkpoint = os.path.join(self.folder, "kept", "checkpoint")
        os.makedirs(os.path.join(checkpoint, "step_8"))
        words = [f"76 {self.CAUSE.format(1).replace('step 5', f'step {step}')}" for step in range(19)]
        self.assertEqual(
            self.ends(*words, "75 stopped", "75 stopped", checkpoint=checkpoint), [True] * 19 + [False] * 2
        )
        self.assertIn(
            "20 starts in a row without a newer checkpoint (DDP_MAX_RESTARTS=20)",
            self.read("out/50/slurm.log"),
        )
        os.makedirs(os.path.join(checkpoint, "step_9"))
        self.assertEqual(self.ends("75 stopped", words[0], "75 stopped", checkpoint=checkpoint), [True] * 3)

    def test_a_measured_run_keeps_the_folders_of_its_study(self):
        self.job(
            "strong_scaling.sbatch",
            "checkpoint.dir=y",
            f"metrics.dir={self.folder}/own",
            "metrics.run_name=mine",
        )
        settings = self.settings("out/n002_r1")
        self.assertEqual((settings["checkpoint.dir"], settings["metrics.run_name"]), ("", "n002_r1"))

    def profile(self, tool, *arguments):
        """The job file of a profiler with an imitated tool: what rank 0 and rank 1 of it start."""
        started = []
        for rank in (0, 1):
            self.write(f"bin/{tool}", '#!/usr/bin/env bash\necho "$@" >"$FAKE/profiler.txt"\n')
            os.chmod(os.path.join(self.folder, "bin", tool), 0o755)
            self.job(f"profile_{tool}.sbatch", *arguments, rank=rank)
            path = os.path.join(self.fake, "profiler.txt")
            started.append(
                self.read("fake/profiler.txt")
                if os.path.exists(path)
                else self.read(f"out/5{rank}/arguments.txt")
            )
            if os.path.exists(path):
                os.remove(path)
        return started

    def test_a_profile_evaluates_and_saves_nothing(self):
        for tool in ("nsys", "ncu"):
            for text in self.profile(tool, "--config", "x.yaml", "checkpoint.dir=y"):
                words = text.split()
                self.assertEqual(
                    [word for word in words if word.startswith("checkpoint.dir=")][-1], "checkpoint.dir="
                )
                for setting in (
                    "lr_schedule.warmup_steps=0",
                    "train.eval_first=false",
                    "train.eval_every=0",
                    "train.eval_every_steps=0",
                ):
                    self.assertIn(setting, words)

    def test_the_profilers_get_the_window_of_steps(self):
        first, second = self.profile("nsys", "--config", "x.yaml")
        self.assertIn("--capture-range=cudaProfilerApi", first)
        for text in (
            "resnet_ddp --config x.yaml",
            "metrics.nvtx=true",
            "metrics.trace_first_step=7 metrics.trace_steps=3",
            "train.max_steps=11",
        ):
            self.assertIn(text, first)
            self.assertIn(text, second)  # a report of every rank

    def test_of_several_ranks_ncu_profiles_the_first(self):
        first, second = self.profile("ncu", "--config", "x.yaml")
        self.assertIn("--profile-from-start off", first)
        self.assertIn("resnet_ddp --config x.yaml metrics.nvtx=true", first)
        self.assertNotIn("profile", second.replace("resnet_ddp", ""))
        self.assertEqual(second.splitlines()[:3], ["--config", "x.yaml", "metrics.nvtx=true"])


if __name__ == "__main__":
    unittest.main()
