#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sends random signals to random ranks of small jobs, which slurm/job.sh starts again by its own rules.

Imitated commands stand for srun (four CPU ranks under MPI; the exit code is the highest of the ranks) and
scontrol (a requeue is a start with the next SLURM_RESTART_COUNT). Signals are KILL, TERM and STOP. A stopped
rank continues before the others give it up, or is killed or woken after they have ended. It holds that

- each start ends with 0, 75, 76, 137 or 143 within its time, and leaves no process. (143: TERM met a rank
  that had saved and was ending);
- job.sh requeues each start that did not end with 0, unless it counts starts without progress. It then names
  a file, which is removed, as its message says;
- no start loses a committed step, and each resumes from the newest checkpoint;
- each job ends with the undisturbed job's bits.

usage: soak.py --build DIR [--minutes 5] [--seed N]
Prints a line for each job, and counts. Exit code 1: one of these did not hold.
"""

import argparse
import collections
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from fault_runs import PROGRAM, RANKS, SETTINGS, Ranks, Start, committed, read

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
STEPS = 60
START_SECONDS = 40  # for one start, which takes about four
RENDEZVOUS_SECONDS = 8  # for ranks that wait for one that never comes
SRUN = '#!/bin/sh\nexec "{python}" "{script}" --as-srun --build "{build}" --folder "{folder}" -- "$@"\n'
SCONTROL = """#!/bin/sh
case $1 in
  requeue) echo "$2" >>"{folder}/requeued" ;;
  show) echo "JobState=RUNNING RunTime=00:00:01 TimeLimit=01:00:00" ;;
esac
"""


class Failure(Exception):
    """A promise that did not hold."""


def run_as_srun(options):
    """Starts the ranks as srun does, and prints what they print."""
    words = options.words
    while words and words[0].startswith("--"):
        words = words[1:]
    start = Start(options.build, options.folder, words, START_SECONDS, grace=START_SECONDS).end()
    for text in start.output:
        print(text)
    print(f"srun: exit codes {start.codes}")
    for complaint in start.complaints:
        print(f"srun: {complaint}")
    # mpirun ends with a rank that is lost in MPI_Init, and takes the others along. srun waits for its tasks.
    mpirun_ended = bool(start.complaints) and all(
        re.match(r"the launcher ended|rank \d+: did not end by itself", text) for text in start.complaints
    )
    have_met = any(" ranks on 1 node (" in text for text in start.output)
    if mpirun_ended and not have_met and 137 in start.codes:
        return 137
    # A start that hangs or leaves a process ends with a code that is never requeued.
    return 1 if start.complaints else max(start.codes)


class Tormentor:
    """Sends signals to the ranks of one start."""

    def __init__(self, rng, ranks, counts):
        self.rng, self.ranks, self.counts = rng, ranks, counts

    def torment(self, is_over):
        while not self.sleep(self.rng.uniform(0, 4), is_over):
            rank = self.rng.randrange(RANKS)
            kind = self.rng.choice(["KILL", "TERM", "STOP and CONT", "STOP and KILL", "STOP and wake"])
            if self.ranks.kill(rank, getattr(signal, "SIG" + kind[:4])):
                self.counts[kind] += 1
                self.end_stop(rank, kind, is_over)

    def end_stop(self, rank, kind, is_over):
        others = [other for other in range(RANKS) if other != rank]
        if kind == "STOP and CONT":  # shorter than the time after which a silent rank counts as lost
            self.sleep(0.5, is_over)
        elif kind.startswith("STOP"):
            limit = time.monotonic() + START_SECONDS / 2
            while self.ranks.alive(others) and time.monotonic() < limit and not self.sleep(0.05, is_over):
                pass
        if kind.startswith("STOP"):
            self.ranks.kill(rank, signal.SIGKILL if kind == "STOP and KILL" else signal.SIGCONT)

    @staticmethod
    def sleep(seconds, is_over):
        """Returns whether the start ended meanwhile."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not is_over():
            time.sleep(0.01)
        return is_over()


class Soak:
    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.rng = random.Random(options.seed)
        self.counts = collections.Counter()
        self.runs, self.ranks_folder = os.path.join(folder, "runs"), os.path.join(folder, "ranks")
        commands = os.path.join(folder, "bin")
        for name in (commands, self.ranks_folder):
            os.makedirs(name)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            path = os.path.join(commands, name)
            with open(path, "w", encoding="utf-8") as file:
                file.write(
                    text.format(
                        python=sys.executable,
                        script=os.path.abspath(__file__),
                        build=options.build,
                        folder=self.ranks_folder,
                    )
                )
            os.chmod(path, 0o755)
        self.environment = {
            **os.environ,
            "PATH": commands + ":" + os.environ["PATH"],
            "DDP_RUNS": self.runs,
            "DDP_PROGRAM": os.path.join(options.build, PROGRAM),
            "SLURM_SUBMIT_DIR": ROOT,
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "here",
            "SLURM_NTASKS": str(RANKS),
            "SLURM_CPUS_PER_TASK": "1",
        }
        for name in ("SLURM_ARRAY_JOB_ID", "SLURM_GPUS_ON_NODE", "DDP_MAX_RESTARTS"):
            self.environment.pop(name, None)

    def log_of(self, job):
        return os.path.join(self.runs, str(job), "slurm.log")

    def start(self, job, restarts, disturbed):
        """One start of the job. Returns its exit code and whether it was requeued."""
        requeued = os.path.join(self.ranks_folder, "requeued")
        if os.path.exists(requeued):
            os.remove(requeued)
        ranks = Ranks(self.ranks_folder)
        settings = [
            *SETTINGS,
            f"train.max_steps={STEPS}",
            "fault.step_ms=20",
            f"context.control_plane.rendezvous_timeout_ms={1000 * RENDEZVOUS_SECONDS}",
            f"fault.folder={self.ranks_folder}",
        ]
        environment = {**self.environment, "SLURM_JOB_ID": str(job), "SLURM_RESTART_COUNT": str(restarts)}
        process = subprocess.Popen(
            ["bash", os.path.join(ROOT, "slurm", "resnet_ddp.sbatch"), *settings],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        try:
            if disturbed:
                Tormentor(self.rng, ranks, self.counts).torment(lambda: process.poll() is not None)
            code = process.wait(3 * START_SECONDS)
        finally:
            process.kill()
        return code, os.path.exists(requeued)

    def run(self, job, disturbed):
        """All starts of a job. Returns their number and the last one's hash."""
        folder = os.path.join(self.runs, str(job), "checkpoint")
        for restarts in range(100):
            before = (committed(folder) or [0])[-1]
            known = len(read(self.log_of(job)))
            code, requeued = self.start(job, restarts, disturbed)
            self.counts[f"exit code {code}"] += 1
            text = read(self.log_of(job))[known:]
            after = (committed(folder) or [0])[-1]
            self.check_steps(text, before, after)
            if code == 0:
                found = re.findall(r"the state's hash is (\w+)", text)
                return restarts + 1, found[-1] if found else None
            if not requeued:
                self.give_up(code, text, folder)
        raise Failure("100 starts did not complete the job")

    @staticmethod
    def check_steps(text, before, after):
        begun = re.search(r"training begins at step (\d+)", text)
        if begun and int(begun.group(1)) != before:
            raise Failure(f"resumed at step {begun.group(1)}, but the newest checkpoint was of step {before}")
        if after < before:
            raise Failure(f"the checkpoint of step {before} is lost: the newest is of step {after}")

    def give_up(self, code, text, folder):
        """What a user does whose job was not requeued for lack of progress."""
        if code not in (75, 76, 137, 143) or "not requeued; to continue, fix the cause" not in text:
            raise Failure(f"a start ended with {code} and was not requeued")
        self.counts["gave up without progress"] += 1
        os.remove(folder + ".requeues")

    def soak(self):
        starts, reference = self.run(1, disturbed=False)
        print(f"undisturbed: hash {reference}", flush=True)
        if reference is None or starts != 1:
            raise Failure("the undisturbed job failed")
        end = time.monotonic() + 60 * self.options.minutes
        for job in range(2, 1000000):
            if time.monotonic() > end:
                break
            self.counts["jobs"] += 1
            self.job = job
            starts, found = self.run(job, disturbed=True)
            self.counts["starts"] += starts
            print(f"job {job}: {starts} starts, hash {found}", flush=True)
            if found != reference:
                raise Failure(f"the hash is {found}, undisturbed {reference}")
            if not self.options.keep:
                shutil.rmtree(os.path.join(self.runs, str(job)))

    def report(self):
        for name, count in sorted(self.counts.items()):
            print(f"{name:<26}{count:>6}")


def parse():
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--build", default="build", help="the build folder")
    parser.add_argument("--minutes", type=float, default=5, help="no job begins after this time")
    parser.add_argument("--seed", type=int, default=None, help="of the random choices (printed)")
    parser.add_argument("--keep", action="store_true", help="keep the jobs' folders and print where they are")
    parser.add_argument("--as-srun", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.build = os.path.abspath(options.build)
    if options.seed is None:
        options.seed = random.randrange(1 << 32)
    return options


def main():
    options = parse()
    if options.as_srun:
        return run_as_srun(options)
    print(f"seed {options.seed}", flush=True)
    folder = tempfile.mkdtemp(prefix="soak_")
    soak = Soak(options, folder)
    soak.job = 1
    try:
        soak.soak()
        return 0
    except Failure as failure:
        print(f"FAILED in job {soak.job}: {failure}\n{read(soak.log_of(soak.job))[-12000:]}")
        return 1
    finally:
        soak.report()
        if options.keep:
            print(f"folders of the jobs: {soak.runs}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
