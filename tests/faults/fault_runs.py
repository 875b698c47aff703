# SPDX-License-Identifier: Apache-2.0
"""Starts kill_program as several ranks and observes their processes. kill_matrix.py and soak.py use it."""

import os
import re
import signal
import subprocess
import time

RANKS = 4
SAVE_EVERY = 5
STEPS = 24
SETTINGS = [
    "context.device=cpu",
    "ddp.bucket_cap_mb=0.06",
    "optimizer.type=adamw",
    "train.batch_size=8",
    "loader.num_workers=1",
    "metrics.log_every=8",
    f"train.max_steps={STEPS}",
    f"checkpoint.every_steps={SAVE_EVERY}",
    "checkpoint.every_minutes=0",
    "checkpoint.keep_last=20",
    "checkpoint.stop_check_seconds=0.02",
    "context.control_plane.heartbeat_interval_ms=300",
    "context.control_plane.heartbeat_misses=5",
]
PROGRAM = os.path.join("tests", "faults", "kill_program")
LAUNCHER = os.path.join("tests", "support", "ddp_test_launch")


def read(path):
    """The text of a file, or an empty one if there is no such file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def state_of(pid):
    """R, S, T (stopped) … as in /proc, or an empty text once the process has ended."""
    state = read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1]
    return state[0] if state and state[0] not in "ZX" else ""


def committed(folder):
    """The steps of the checkpoints in `folder`, oldest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(name[5:15]) for name in names if re.fullmatch(r"step_\d{10}(\.\d+)?", name))


def unfinished(folder):
    """Names of saves and removals in `folder` that were begun and not finished."""
    return sorted(name for name in os.listdir(folder) if name.startswith((".saving_", ".removing_")))


class Ranks:
    """The processes of one start. Each writes its id into `folder`."""

    def __init__(self, folder):
        self.folder = folder
        for name in os.listdir(folder):
            if name == "deed" or name.endswith(".pid"):
                os.remove(os.path.join(folder, name))
        self.pids, self.joined = {}, 0  # joined: when the newest rank was seen

    def find(self):
        """The process id of each rank that has started. Ids are kept after a process has ended."""
        for rank in range(RANKS):
            text = read(os.path.join(self.folder, f"rank_{rank}.pid"))
            if rank not in self.pids and text.endswith("\n"):
                self.pids[rank] = int(text)
                self.joined = time.monotonic()
        return self.pids

    def alive(self, ranks):
        """Those of `ranks` whose process runs, or has not started yet."""
        pids = self.find()
        return [rank for rank in ranks if rank not in pids or state_of(pids[rank])]

    def state(self, rank):
        return state_of(self.find()[rank]) if rank in self.find() else ""

    def kill(self, rank, number=signal.SIGKILL):
        """Returns whether there was a process to send the signal to."""
        if not self.state(rank):
            return False
        try:
            os.kill(self.pids[rank], number)
        except ProcessLookupError:
            return False
        return True


class Start:
    """One start of the program under ddp_test_launch, which leaves no process behind."""

    def __init__(self, build, folder, program_words, timeout, grace=20):
        self.folder = folder
        self.ranks = Ranks(folder)
        self.log = open(os.path.join(folder, "launch.log"), "w+", encoding="utf-8", errors="replace")
        command = [
            os.path.join(build, LAUNCHER),
            "--ranks",
            str(RANKS),
            "--timeout",
            str(timeout),
            "--grace",
            str(grace),
            "--verbose",
            "--",
            *program_words,
        ]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def running(self):
        return self.process.poll() is None

    def deed(self):
        """When the signal was sent, on the clock of time.monotonic(); 0 before."""
        return int(read(os.path.join(self.folder, "deed")) or 0) / 1e9

    def wait_for_end(self, ranks, deadline):
        """Waits until the processes of `ranks` have ended, and returns when that was."""
        while self.running() and time.monotonic() < deadline and self.ranks.alive(ranks):
            time.sleep(0.01)
        return time.monotonic()

    def end(self):
        """Waits for the launcher. Sets codes, output (both by rank) and complaints."""
        self.process.wait()
        self.log.seek(0)
        text = self.log.read()
        self.log.close()
        # The launcher expects 0 and reports every other exit code.
        codes = dict(re.findall(r"^ddp_test_launch: rank (\d+): exit code (\d+)", text, re.M))
        self.codes = [int(codes.get(str(rank), 0)) for rank in range(RANKS)]
        self.complaints = [
            line
            for line in re.findall(r"^ddp_test_launch: (.*)", text, re.M)
            if not re.match(r"rank \d+: exit code", line)
        ]
        if self.process.returncode not in (0, 1):
            self.complaints.append(f"the launcher ended with {self.process.returncode}")
        self.output = ["\n".join(re.findall(rf"^\[{rank}\] (.*)", text, re.M)) for rank in range(RANKS)]
        return self
