# SPDX-License-Identifier: Apache-2.0
"""Studies from submission to finished runs with the real job files, an imitated Slurm (sbatch runs the array
at once, srun starts one task) and an imitated program that writes CSV files or fails."""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import unittest

from study_support import EPOCH_COLUMNS, ROOT, STEP_COLUMNS, need

need("yaml")

TOOL = os.path.join(ROOT, "tools", "study.py")

# The imitated commands keep what they saw in $FAKE.
SBATCH = r'''#!/usr/bin/env bash
echo "$*" >>"$FAKE/sbatch.txt"
nodes=1 per_node=1 array=1 name=job
while [[ $1 == --* ]]; do
  case $1 in
    --nodes=*) nodes=${1#*=} ;;
    --ntasks-per-node=*) per_node=${1#*=} ;;
    --array=*) array=${1#*=} ;;
    --job-name=*) name=${1#*=} ;;
  esac
  shift
done
job=$(($(cat "$FAKE/jobs" 2>/dev/null || echo 100) + 1))
echo "$job" >"$FAKE/jobs"
script=$1
shift
for part in $(tr ',' ' ' <<<"${array%%%*}"); do
  for task in $(seq "${part%%-*}" "${part##*-}"); do
    echo "$job|$task|PENDING" >>"$FAKE/queue"
    [ -e "$FAKE/hold" ] && continue
    SLURM_SUBMIT_DIR=$PWD SLURM_JOB_ID=$job$task SLURM_ARRAY_JOB_ID=$job SLURM_ARRAY_TASK_ID=$task SLURM_JOB_NAME=$name \
      SLURM_JOB_NUM_NODES=$nodes SLURM_JOB_NODELIST=nodes SLURM_NTASKS=$((nodes * per_node)) \
      SLURM_NTASKS_PER_NODE=$per_node bash "$script" "$@" >"$FAKE/$job.$task.out" 2>&1
    sed -i "/^$job|$task|/d" "$FAKE/queue"
  done
done
echo "$job"
'''
SRUN = r'''#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
'''
SQUEUE = r'''#!/usr/bin/env bash
[ ! -e "$FAKE/squeue_fails" ] || { echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; }
cat "$FAKE/queue" 2>/dev/null
exit 0
'''
SCONTROL = r'''#!/usr/bin/env bash
echo "$*" >>"$FAKE/scontrol.txt"
'''
# Fails with the code in $FAKE/<run name> where there is one.
PROGRAM = rf'''#!{sys.executable}
import os, sys
if sys.argv[1:] == ["--help"]:
    print(open(os.path.join(os.environ["FAKE"], "help")).read())
    sys.exit(0)
settings = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
name = settings["metrics.run_name"]
folder = os.path.join(settings["metrics.dir"], name)
os.makedirs(folder, exist_ok=True)
open(os.path.join(folder, "arguments.txt"), "w").write("\n".join(sys.argv[1:]))
with open(os.path.join(folder, "steps.csv"), "a") as file:
    file.write("{','.join(STEP_COLUMNS)}\n")
code = os.path.join(os.environ["FAKE"], name)
if os.path.exists(code):
    sys.exit(int(open(code).read()))
with open(os.path.join(folder, "steps.csv"), "a") as file:
    for step in (4, 8):
        file.write(f"{{step}},0,100,480,1,0,1,0.4,\n")
with open(os.path.join(folder, "epochs.csv"), "w") as file:
    file.write("{','.join(EPOCH_COLUMNS)}\n7,abc,cpu,1,0,1,fp32,48,25,{{}},10,0,\n".format(settings.get("metrics.repeat", "1")))
'''

STUDY = """kind: strong
program: resnet_ddp
config: examples/configs/quickstart.yaml
cpu_ranks: [1, 4]
per_node: 2
global_batch_size: 8
repeats: 2
steps: 8
"""
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


class Jobs(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name
        self.fake = os.path.join(self.folder, "fake")
        self.out = os.path.join(self.folder, "out")
        commands = {"sbatch": SBATCH, "srun": SRUN, "squeue": SQUEUE, "scontrol": SCONTROL}
        programs = {f"build/examples/{name}": PROGRAM for name in ("resnet_ddp", "gpt2_ddp")}
        for name, text in {**{f"bin/{name}": text for name, text in commands.items()}, **programs}.items():
            self.write(name, text)
            os.chmod(os.path.join(self.folder, name), 0o755)
        os.makedirs(self.fake)
        self.write("study.yaml", STUDY)

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def read(self, name):
        with open(os.path.join(self.folder, name), encoding="utf-8") as file:
            return file.read()

    def study(self, *options, code=0):
        environment = {**os.environ, "PATH": os.path.join(self.folder, "bin") + ":" + os.environ["PATH"], "FAKE": self.fake}
        for name in ("DDP_RUNS", "DDP_PROGRAM", "SLURM_JOB_ID"):
            environment.pop(name, None)
        done = subprocess.run([sys.executable, TOOL, os.path.join(self.folder, "study.yaml"), "--output", self.out, "--build",
                               os.path.join(self.folder, "build"), *options], capture_output=True, text=True, env=environment)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def states(self):
        return {line.split()[0]: line.split()[1] for line in self.study("--status").splitlines() if not line.startswith("#")}

    def plan(self):
        return json.loads(self.read("out/study.json"))["runs"]

    def check_arguments(self):
        """What each program was started with is what the plan says, and its own repeat."""
        for name, run in self.plan().items():
            words = self.read(f"out/{name}/arguments.txt").splitlines()
            settings = dict(word.split("=", 1) for word in words if "=" in word)  # the last one wins
            for word in run["arguments"]:
                if "=" in word:
                    key, value = word.split("=", 1)
                    self.assertEqual(settings[key], value, name)
            self.assertEqual(settings["metrics.repeat"], str(run["repeat"]), name)
            self.assertEqual(settings["checkpoint.dir"], "", name)
            self.assertEqual(settings["metrics.run_name"], name)

    def test_a_study_is_submitted_and_done(self):
        self.assertEqual(set(self.states().values()), {"missing"})
        out = self.study()
        self.assertIn("4 runs: 0 done, 0 in the queue, 4 to start", out)
        self.assertEqual(self.states(), {name: "done" for name in ("n001_r1", "n001_r2", "n004_r1", "n004_r2")})
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
        self.assertEqual(self.states(), {"n001_r1": "lost", "n001_r2": "failed", "n004_r1": "done", "n004_r2": "failed"})
        os.remove(os.path.join(self.fake, "n004_r2"))
        out = self.study()
        self.assertIn("again: n004_r2, failed (exit code 3)", out)
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

    def test_a_lost_peer_is_requeued_by_the_job(self):
        self.write("fake/n001_r2", "76")
        self.study()
        self.assertIn("requeue 1012", self.read("fake/scontrol.txt"))
        self.assertIn("exit code 76 (a peer was lost): back into the queue", self.read("out/n001_r2/slurm.log"))
        self.assertNotIn("requeue 1011", self.read("fake/scontrol.txt"))

    def test_the_array_of_a_sensitivity_study_is_its_product(self):
        self.write("study.yaml", SENSITIVITY)
        self.study()
        plan = self.plan()
        self.assertEqual(len(plan), 12)
        self.assertEqual(set(self.states().values()), {"done"})
        self.check_arguments()
        self.assertEqual(plan["n002_ddp.bucket_cap_mb-25_amp.dtype-bf16_r2"]["varied"],
                         {"ddp.bucket_cap_mb": "25", "amp.dtype": "bf16"})

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
        for old, new, said in (("global_batch_size: 8", "global_batch_size: 16", "batch was 8 and is 16"),
                               ("resnet_ddp", "gpt2_ddp", "program was resnet_ddp and is gpt2_ddp"),
                               ("steps: 8", "steps: 8\nwarmup_steps: 3", "warmup_steps was 1 and is 3")):
            # Also where none of the done runs is one of the new study.
            for ranks in ("[1, 4]", "[2]"):
                self.write("study.yaml", STUDY.replace(old, new).replace("[1, 4]", ranks))
                out = self.study(code=64)
                self.assertIn(said, out)
                self.assertIn("give another --output", out)
        self.write("study.yaml", STUDY.replace("global_batch_size: 8", "batch_size_per_gpu: 8").replace("strong", "weak"))
        self.assertIn("kind was strong and is weak", self.study(code=64))
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
            self.assertIn("is in use by another start", self.study("--local", code=64))
            self.assertIn("is in use by another start", self.study(code=64))
            self.assertEqual(self.states(), {"n001_r1": "running", "n001_r2": "done"})
        self.assertFalse(os.path.exists(os.path.join(self.out, "n001_r1", "attempt-1")))
        self.study("--local")
        self.assertEqual(set(self.states().values()), {"done"})

    def test_the_hint_names_the_same_folders(self):
        self.assertIn(f"study.yaml --output {self.out} --build {self.folder}/build --status", self.study())

    def test_the_build_folder_is_seen_from_the_caller(self):
        environment = {**os.environ, "FAKE": self.fake}
        done = subprocess.run([sys.executable, TOOL, "study.yaml", "--output", "out", "--build", "build", "--local", "--dry-run"],
                              cwd=self.folder, capture_output=True, text=True, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(f"{self.folder}/build/examples/resnet_ddp", done.stdout.splitlines()[0])

    def test_a_repeat_that_is_none_of_the_study(self):
        for repeat in ("0", "3", "-1"):
            self.assertIn("has the repeats 1 to 2", self.study(f"--repeat={repeat}", code=64))
        self.assertIn("2 to start", self.study("--repeat", "2"))

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

    def test_settings_that_the_program_lacks_are_told_before_submission(self):
        self.write("study.yaml", STUDY + "settings:\n  loader.num_wokers: 1\n")
        known = ["train.eval_first", "train.eval_every", "train.eval_every_steps", "context.device", "train.max_steps", "train.epochs",
                 "metrics.log_every", "loader.num_workers", "lr_schedule.warmup_steps"]
        self.write("fake/help", "loader\n" + "".join(f"  {key}=1\n      a text\n" for key in known))
        self.assertRegex(self.study(code=64), "study.yaml: resnet_ddp has no setting loader.num_wokers, did you mean loader.num_workers")
        self.assertFalse(os.path.exists(self.out))
        self.write("study.yaml", STUDY + "settings:\n  loader.num_workers: 1\n")
        self.study()

    def test_what_is_missing_is_prepared_once(self):
        data = os.path.join(self.folder, "data")
        study = STUDY.replace("[1, 4]", "[1]") + f"prepare:\n  {data}: "
        self.write("study.yaml", study + "mkdir /nonexistent/folder\n")
        self.assertIn(f"mkdir /nonexistent/folder ended with 1 and left no {data}", self.study("--local", code=64))
        self.write("study.yaml", study + "no_such_command\n")
        self.assertIn("no_such_command: No such file", self.study("--local", code=64))
        self.assertEqual(set(self.states().values()), {"missing"})
        self.write("study.yaml", study + f"mkdir {data}\n")
        self.assertIn("is missing: mkdir", self.study("--local"))
        self.assertEqual(set(self.states().values()), {"done"})
        self.write("fake/n001_r1", "1")
        os.remove(os.path.join(self.out, "n001_r1", "exit_code"))
        self.assertNotIn("is missing", self.study("--local", code=1))

    def test_a_profile_evaluates_and_saves_nothing(self):
        for tool in ("nsys", "ncu"):
            for text in self.profile(tool, "--config", "x.yaml", "checkpoint.dir=y"):
                words = text.split()
                self.assertEqual([word for word in words if word.startswith("checkpoint.dir=")][-1], "checkpoint.dir=")
                for setting in ("lr_schedule.warmup_steps=0", "train.eval_first=false", "train.eval_every=0", "train.eval_every_steps=0"):
                    self.assertIn(setting, words)

    def profile(self, tool, *arguments):
        """The job file of a profiler with an imitated tool: what rank 0 and rank 1 of it start."""
        started = []
        for rank in (0, 1):
            self.write(f"bin/{tool}", '#!/usr/bin/env bash\necho "$@" >"$FAKE/profiler.txt"\n')
            os.chmod(os.path.join(self.folder, "bin", tool), 0o755)
            environment = {**os.environ, "PATH": os.path.join(self.folder, "bin") + ":" + os.environ["PATH"], "FAKE": self.fake,
                           "DDP_RUNS": self.out, "DDP_PROGRAM": os.path.join(self.folder, "build/examples/resnet_ddp"),
                           "SLURM_SUBMIT_DIR": ROOT, "SLURM_JOB_ID": f"5{rank}", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "2",
                           "SLURM_JOB_NODELIST": "nodes", "SLURM_PROCID": str(rank), "DDP_PROFILE_STEPS": "7:3"}
            environment.pop("SLURM_ARRAY_JOB_ID", None)
            done = subprocess.run(["bash", os.path.join(ROOT, "slurm", f"profile_{tool}.sbatch"), *arguments], cwd=ROOT,
                                  capture_output=True, text=True, env=environment)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            path = os.path.join(self.fake, "profiler.txt")
            started.append(self.read("fake/profiler.txt") if os.path.exists(path) else self.read(f"out/5{rank}/arguments.txt"))
            if os.path.exists(path):
                os.remove(path)
        return started

    def test_the_profilers_get_the_window_of_steps(self):
        first, second = self.profile("nsys", "--config", "x.yaml")
        self.assertIn("--capture-range=cudaProfilerApi", first)
        for text in ("resnet_ddp --config x.yaml", "metrics.nvtx=true", "metrics.trace_first_step=7 metrics.trace_steps=3",
                     "train.max_steps=11"):
            self.assertIn(text, first)
            self.assertIn(text, second)  # a report of every rank

    def test_of_several_ranks_ncu_profiles_the_first(self):
        first, second = self.profile("ncu", "--config", "x.yaml")
        self.assertIn("--profile-from-start off", first)
        self.assertIn("resnet_ddp --config x.yaml metrics.nvtx=true", first)
        self.assertNotIn("profile", second.replace("resnet_ddp", ""))
        self.assertEqual(second.splitlines()[:3], ["--config", "x.yaml", "metrics.nvtx=true"])

    def test_no_program_and_no_slurm_are_said(self):
        os.remove(os.path.join(self.folder, "build/examples/resnet_ddp"))
        self.assertIn("there is no program", self.study("--local", code=64))
        self.assertIn("there is no program", self.study(code=64))
        self.assertFalse(os.path.exists(os.path.join(self.fake, "sbatch.txt")))
        self.assertFalse(os.path.exists(self.out))


if __name__ == "__main__":
    unittest.main()
