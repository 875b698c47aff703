#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Disturbs healthy CPU jobs and expects that no check calls them sick.

Two jobs run at a time, each one of JOBS, with the sentinel in every step and the replay check in every
tenth. Meanwhile ranks are stopped for less than the time after which a silent one counts as lost, all ranks
of a job are stopped for longer (scontrol suspend), reports are asked for (SIGUSR2), processes that only
compute take the cores, and a loader sleeps. It holds that

- each job ends with 0, and with the bits of the first job of its name;
- no job prints a first cause, a difference, or a verdict that nobody asked for.

usage: false_alarms.py --build DIR [--minutes 5] [--jobs 2] [--seed N]
Prints a line for each job, and counts. Exit code 1: one of these did not hold.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

from fault_runs import LAUNCHER, PROGRAM, read, state_of

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HEARTBEAT_MS, MISSES = 300, 10
SHORT_STOP = 0.5 * HEARTBEAT_MS * MISSES / 1000  # beside the time that a loaded machine takes
REPLAY_EVERY = 10
COMMON = [
    "context.device=cpu",
    f"context.control_plane.heartbeat_interval_ms={HEARTBEAT_MS}",
    f"context.control_plane.heartbeat_misses={MISSES}",
    "ddp.desync_check_every=1",
    "loader.num_workers=1",
]
REPLAYED = [f"train.replay_check_every={REPLAY_EVERY}", "train.deterministic=true"]
RESNET = [
    "data.path=data/cifar10-sample",
    "data.image_size=16",
    "train.batch_size=4",
    "optimizer.momentum=0.9",
]


def trainer(name, *words):
    return [os.path.join("examples", name), *COMMON, *REPLAYED, "checkpoint.dir={folder}/checkpoint", *words]


# The program's words below the build folder, its ranks and its steps.
JOBS = {
    "resnet18": (trainer("resnet_ddp", *RESNET, "data.num_samples=640", "train.max_steps=120"), 2, 120),
    "gpt2": (trainer("gpt2_ddp", "--config=gpt2_sample", "train.max_steps=400"), 3, 400),
    "gpt2 zero1": (
        trainer("gpt2_ddp", "--config=gpt2_sample", "train.max_steps=400", "optimizer.zero1=true"),
        3,
        400,
    ),
    "lora": (
        trainer("lora_ddp", "--config=lora_tiny", "train.max_steps=60", "tokens.max_seq_len=128"),
        2,
        60,
    ),
    "bert": (trainer("bert_ddp", "--config=bert_sample", "train.max_steps=400"), 2, 400),
    "own loop, slow loader": (
        [
            PROGRAM,
            *COMMON,
            "fault.folder={folder}",
            "fault.load_ms=300",
            "ddp.bucket_cap_mb=0.06",
            "checkpoint.dir={folder}/checkpoint",
            "train.batch_size=8",
            "train.max_steps=300",
        ],
        4,
        300,
    ),
}
HASH = r"^(?:\[0\] )?(?:the state's hash is (\w+)|parameters +([0-9a-f]{16}), equal on all)"
ALARM = r"first cause|the replicas differ|computed other gradients|Traceback|terminate called"


class Failure(Exception):
    """A promise that did not hold."""


class Job:
    """One run of a job's program."""

    def __init__(self, name, build, folder):
        self.name, self.folder = name, folder
        words, self.num_ranks, self.num_steps = JOBS[name]
        words = [word.format(folder=folder) for word in words]
        for i, word in enumerate(words):
            if word.startswith("--config="):
                words[i] = f"--config=examples/configs/{word[9:]}.yaml"
        words.append(f"metrics.dir={folder}/metrics")
        launch = [
            os.path.join(build, LAUNCHER),
            "--ranks",
            str(self.num_ranks),
            "--timeout",
            "1500",
            "--verbose",
            "--",
        ]
        self.log = os.path.join(folder, "launch.log")
        self.asked = 0  # reports
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*launch, os.path.join(build, words[0]), *words[1:]],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.program = os.path.basename(words[0])

    def ranks(self):
        """The process ids of the ranks."""
        found, parents = [], [self.process.pid]
        while parents:
            pid = parents.pop()
            for task in os.listdir(f"/proc/{pid}/task") if os.path.isdir(f"/proc/{pid}/task") else []:
                for child in map(int, read(f"/proc/{pid}/task/{task}/children").split()):
                    parents.append(child)
                    if os.path.basename(read(f"/proc/{child}/cmdline").split("\0")[0]) == self.program:
                        found.append(child)
        return found

    @staticmethod
    def listens(pid):
        """Whether the process has a handler of SIGUSR2, which would end it before."""
        caught = re.search(r"^SigCgt:\s*(\w+)", read(f"/proc/{pid}/status"), re.M)
        return caught is not None and int(caught.group(1), 16) >> (signal.SIGUSR2 - 1) & 1

    def signal(self, pids, number):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if state_of(pid):
                    os.kill(pid, number)

    def check(self, first_hash):
        """Returns the hash of the state."""
        text = read(self.log)
        if self.process.returncode != 0:
            raise Failure(f"the launcher ended with {self.process.returncode}")
        alarm = re.search(f".*({ALARM}).*", text)
        if alarm:
            raise Failure(alarm.group(0))
        verdicts = len(re.findall(r"doctor: ", text))
        if verdicts > self.asked:
            raise Failure(f"{verdicts} verdicts, {self.asked} were asked for")
        found = re.search(HASH, text, re.M)
        if not found:
            raise Failure("no hash of the state")
        result = found.group(1) or found.group(2)
        if first_hash not in (None, result):
            raise Failure(f"the hash is {result}, earlier {first_hash}")
        return result


class Tormentor:
    """Disturbs the running jobs."""

    def __init__(self, rng, counts):
        self.rng, self.counts = rng, counts

    def torment(self, job):
        """One disturbance. Returns once it is over."""
        ranks = job.ranks()
        if len(ranks) != job.num_ranks or not all(map(job.listens, ranks)):
            return
        kind = self.rng.choice(["stop of one rank", "stop of all ranks", "report", "load", "pause"])
        if kind == "stop of one rank":
            victim = [self.rng.choice(ranks)]
            self.stop(job, victim, self.rng.uniform(0.1, SHORT_STOP))
        elif kind == "stop of all ranks":
            self.rng.shuffle(ranks)
            self.stop(job, ranks, self.rng.choice([0.5, 2, 5, 12]))
        elif kind == "report":
            job.asked += 1
            job.signal([self.rng.choice(ranks)], signal.SIGUSR2)
        elif kind == "load":
            loads = [
                subprocess.Popen([sys.executable, "-c", "while True: pass"])
                for _ in range(self.rng.randint(1, 4))
            ]
            time.sleep(self.rng.uniform(0.5, 6))
            for load in loads:
                load.kill()
                load.wait()
        self.counts[kind] += 1

    def stop(self, job, pids, seconds):
        job.signal(pids, signal.SIGSTOP)
        time.sleep(seconds)
        job.signal(pids, signal.SIGCONT)


class Runs:
    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.counts, self.hashes, self.lock = collections.Counter(), {}, threading.Lock()
        self.end = time.monotonic() + 60 * options.minutes
        self.failed = threading.Event()

    def run(self, name, number, seed):
        rng = random.Random(seed)
        folder = os.path.join(self.folder, f"job{number}")
        os.makedirs(folder)
        job = Job(name, self.options.build, folder)
        tormentor = Tormentor(rng, collections.Counter())
        try:
            while job.process.poll() is None and not self.failed.is_set():
                tormentor.torment(job)
                time.sleep(rng.uniform(0, 3))
        finally:
            job.process.terminate()
            job.process.wait()
        if self.failed.is_set():
            return
        try:
            found = job.check(self.hashes.get(name))
        except Failure as failure:
            self.failed.set()
            raise Failure(f"job {number} ({name}): {failure}\n{read(job.log)[-8000:]}") from failure
        with self.lock:
            self.hashes.setdefault(name, found)
            self.counts.update(tormentor.counts)
            self.counts.update({"jobs": 1, "steps, each compared between ranks": job.num_steps})
            if any(word.startswith("train.replay_check") for word in JOBS[name][0]):
                self.counts["steps that ran twice"] += job.num_steps // REPLAY_EVERY
        print(f"job {number} ({name}): hash {found}, disturbed {tormentor.counts.total()} times", flush=True)
        shutil.rmtree(folder)

    def run_some(self, worker):
        rng = random.Random(f"{self.options.seed} {worker}")
        for number in range(worker, 1000000, self.options.jobs):
            if time.monotonic() > self.end or self.failed.is_set():
                return
            self.run(rng.choice(list(JOBS)), number, rng.random())


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", default="build", help="the build folder")
    parser.add_argument("--minutes", type=float, default=5, help="no job begins after this time")
    parser.add_argument("--jobs", type=int, default=2, help="jobs at a time")
    parser.add_argument("--seed", type=int, default=None, help="of the random choices (printed)")
    options = parser.parse_args()
    options.build = os.path.abspath(options.build)
    if options.seed is None:
        options.seed = random.randrange(1 << 32)
    return options


def main():
    options = parse()
    print(f"seed {options.seed}", flush=True)
    folder = tempfile.mkdtemp(prefix="false_alarms_")
    runs = Runs(options, folder)
    try:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(runs.run_some, range(options.jobs)))
        return 0
    except Failure as failure:
        print(f"FAILED in {failure}")
        return 1
    finally:
        for name, count in sorted(runs.counts.items()):
            print(f"{name:<40}{count:>8}")
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
