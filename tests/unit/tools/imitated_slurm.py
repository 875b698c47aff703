# SPDX-License-Identifier: Apache-2.0
"""An imitated Slurm (sbatch runs the array at once, srun starts one task) and an imitated program that writes
CSV files or fails, for tests of whole studies and of the job files."""

import json
import os
import subprocess
import sys

from study_support import EPOCH_COLUMNS, ROOT, STEP_COLUMNS, ToolTest

TOOL = os.path.join(ROOT, "tools", "study.py")

# The imitated commands keep what they saw in $FAKE.
SBATCH = r"""#!/usr/bin/env bash
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
    SLURM_SUBMIT_DIR=$PWD SLURM_JOB_ID=$job$task SLURM_ARRAY_JOB_ID=$job \
      SLURM_ARRAY_TASK_ID=$task SLURM_JOB_NAME=$name SLURM_JOB_NUM_NODES=$nodes \
      SLURM_JOB_NODELIST=nodes SLURM_NTASKS=$((nodes * per_node)) \
      SLURM_NTASKS_PER_NODE=$per_node bash "$script" "$@" >"$FAKE/$job.$task.out" 2>&1
    sed -i "/^$job|$task|/d" "$FAKE/queue"
  done
done
echo "$job"
"""
SRUN = r"""#!/usr/bin/env bash
while [[ $1 == --* ]]; do
  case $1 in --chdir=*) cd "${1#*=}" ;; esac
  shift
done
exec "$@"
"""
SQUEUE = r"""#!/usr/bin/env bash
if [ -e "$FAKE/squeue_fails" ]; then
  echo "slurm_load_jobs error: Unable to contact slurm controller" >&2
  exit 1
fi
cat "$FAKE/queue" 2>/dev/null
exit 0
"""
SCONTROL = r"""#!/usr/bin/env bash
echo "$*" >>"$FAKE/scontrol.txt"
if [ -e "$FAKE/scontrol_error" ]; then
  cat "$FAKE/scontrol_error" >&2
  exit 1
fi
"""
# Fails with the code in $FAKE/<run name> where there is one, and says what stands behind it there.
PROGRAM = rf'''#!{sys.executable}
import os, sys
if sys.argv[1:] == ["--help", "all"]:
    print(open(os.path.join(os.environ["FAKE"], "help")).read())
    sys.exit(0)
settings = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
name = settings["metrics.run_name"]
folder = os.path.join(settings["metrics.dir"], name)
os.makedirs(folder, exist_ok=True)
open(os.path.join(folder, "arguments.txt"), "w").write("\n".join(sys.argv[1:]))
with open(os.path.join(folder, "steps.csv"), "a") as file:
    file.write("{",".join(STEP_COLUMNS)}\n")
code = os.path.join(os.environ["FAKE"], name)
if os.path.exists(code):
    code, _, words = open(code).read().partition("\n")
    print(words)
    sys.exit(int(code))
with open(os.path.join(folder, "steps.csv"), "a") as file:
    for step in (4, 8):
        file.write(f"{{step}},0,100,480,1,0,1,0.4,\n")
with open(os.path.join(folder, "epochs.csv"), "w") as file:
    repeat = settings.get("metrics.repeat", "1")
    file.write("{",".join(EPOCH_COLUMNS)}\n7,abc,cpu,1,0,1,fp32,48,25,{{}},10,0,\n".format(repeat))
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


class StudyCase(ToolTest):
    """A folder with study.yaml, the imitated commands and programs."""

    def setUp(self):
        super().setUp()
        self.fake = os.path.join(self.folder, "fake")
        self.out = os.path.join(self.folder, "out")
        commands = {"sbatch": SBATCH, "srun": SRUN, "squeue": SQUEUE, "scontrol": SCONTROL}
        programs = {f"build/examples/{name}": PROGRAM for name in ("resnet_ddp", "gpt2_ddp")}
        for name, text in {**{f"bin/{name}": text for name, text in commands.items()}, **programs}.items():
            self.write(name, text)
            os.chmod(os.path.join(self.folder, name), 0o755)
        os.makedirs(self.fake)
        self.write("study.yaml", STUDY)

    def start(self, *options, timeout=None):
        environment = {
            **os.environ,
            "PATH": os.path.join(self.folder, "bin") + ":" + os.environ["PATH"],
            "FAKE": self.fake,
        }
        for name in ("DDP_RUNS", "DDP_PROGRAM", "SLURM_JOB_ID"):
            environment.pop(name, None)
        return subprocess.run(
            [
                sys.executable,
                TOOL,
                os.path.join(self.folder, "study.yaml"),
                "--output",
                self.out,
                "--build",
                os.path.join(self.folder, "build"),
                *options,
            ],
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout,
        )

    def study(self, *options, code=0):
        done = self.start(*options)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def states(self):
        return {
            line.split()[0]: line.split()[1]
            for line in self.study("--status").splitlines()
            if not line.startswith("#")
        }

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
