# SPDX-License-Identifier: Apache-2.0
"""The folder of a study: what was planned, what was submitted, what each run came to."""

import contextlib
import fcntl
import json
import os
import subprocess
import time

from .files import linked, make_own_folder, regular, replace_file
from .numbers import read_optional, read_text
from .plan import StudyError

DONE = "done"

# What all runs of a folder have in common; its report takes it from the plan.
SHARED = ("kind", "program", "device", "batch", "warmup_steps")


class StudyFolder:
    """study.json, study.yaml, submissions.jsonl, SYSTEM.md, report/ and a folder for each run."""

    def __init__(self, study, path):
        self.study, self.path = study, path
        self._queued = None

    def run_path(self, run):
        return os.path.join(self.path, run.name)

    def plan(self):
        study, runs = self.study, {}
        for group in study.groups:
            for run in group.runs:
                runs[run.name] = {
                    "ranks": run.ranks,
                    "repeat": run.repeat,
                    "varied": run.varied,
                    "arguments": study.arguments(group) + run.settings,
                }
        return {
            "name": study.name,
            "title": study.title,
            "kind": study.kind,
            "program": study.program,
            "device": study.device,
            "batch": study.batch,
            "steps": study.steps,
            "warmup_steps": study.warmup_steps,
            "repeats": study.repeats,
            "vary": study.vary,
            "command": f"tools/study.py {study.path}",
            "runs": runs,
        }

    def save(self, command, kept):
        """Writes the plan. Runs named in `kept` (done, or in the queue) must be those of the plan before;
        others are begun anew with whatever settings they have now."""
        plan = self.plan()
        plan["command"] = command
        file = os.path.join(self.path, "study.json")
        if os.path.lexists(file):
            old = json.loads(read_text(file))
            # Runs that this file no longer has stay known where their folders are still there, or Slurm has
            # them.
            left = {
                name: run
                for name, run in old["runs"].items()
                if name not in plan["runs"]
                and (os.path.isdir(os.path.join(self.path, name)) or name in self.queued())
            }
            changed = [key for key in SHARED if old.get(key) != plan[key]]
            if changed and (left or any(name in kept for name in old["runs"])):
                raise StudyError(
                    f"{self.path} holds runs of another study: "
                    + ", ".join(f"{key} was {old.get(key)} and now is {plan[key]}" for key in changed)
                    + f"; fix: give another --output, or remove {self.path}"
                )
            for name, run in plan["runs"].items():
                before = old["runs"].get(name)
                if before and name in kept and before["arguments"] != run["arguments"]:
                    raise StudyError(
                        f"{self.path}/{name} holds a run with other settings "
                        f"({' '.join(before['arguments'])}); "
                        f"fix: give another --output, or remove {self.path}"
                    )
            plan["runs"] = {**left, **plan["runs"]}
        make_own_folder(self.path)
        with open(self.study.path, encoding="utf-8", opener=linked) as source:
            replace_file(os.path.join(self.path, "study.yaml"), source.read())
        replace_file(file, json.dumps(plan, indent=1))

    # --- the one start at a time -----------------------------------------------------------------
    @contextlib.contextmanager
    def start(self):
        """Holds the folder while runs are started: a second start would move the files of live runs."""
        make_own_folder(self.path)
        with open(os.path.join(self.path, "lock"), "a", encoding="utf-8", opener=regular) as file:
            for attempt in range(10):  # a look by in_use() holds it for a moment
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if attempt == 9:
                        raise StudyError(
                            f"{self.path} is in use by another tools/study.py; fix: wait for its end, or "
                            "give another --output"
                        ) from None
                    time.sleep(0.05)
            self._queued = None  # asked anew: another start may just have ended
            yield

    def in_use(self):
        """Whether a start is under way."""
        try:
            with open(os.path.join(self.path, "lock"), encoding="utf-8", opener=regular) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    # --- submissions ---------------------------------------------------------------------------
    def record_submission(self, job_id, command, runs):
        tasks = {str(run.task): run.name for run in runs}
        path = os.path.join(self.path, "submissions.jsonl")
        with open(path, "a", encoding="utf-8", opener=regular) as file:
            file.write(json.dumps({"job": job_id, "command": command, "runs": tasks}) + "\n")

    def queued(self):
        """{run name: Slurm's state} of the study's runs that Slurm still knows."""
        if self._queued is None:
            self._queued = {}
            submissions = read_optional(os.path.join(self.path, "submissions.jsonl")).splitlines()
            in_queue = squeue() if submissions else {}
            for submission in map(json.loads, submissions):
                for task, name in submission["runs"].items():
                    state = in_queue.get((submission["job"], task))
                    if state:
                        self._queued[name] = state
        return self._queued

    # --- runs ----------------------------------------------------------------------------------
    def state(self, run):
        """(state, explanation): done, running, queued, failed, lost (begun, never ended) or missing."""
        path = self.run_path(run)
        queued = self.queued().get(run.name)
        if queued:
            return (
                "queued" if queued in ("PENDING", "CONFIGURING", "REQUEUED") else "running"
            ), queued.lower()
        code = read_optional(os.path.join(path, "exit_code")).strip()
        if code == "0":
            if data_rows(os.path.join(path, "steps.csv")) > 0 and (
                data_rows(os.path.join(path, "epochs.csv")) > 0
                or os.path.lexists(os.path.join(path, "run.json"))
            ):
                return DONE, ""
            return "failed", "ended with 0 but wrote no CSV rows"
        if code:
            return "failed", f"exit code {code}"
        if os.path.isdir(path) and os.listdir(path):
            return "lost", "begun, never ended"
        return "missing", ""


def data_rows(csv_path):
    """Lines below the header."""
    return max(0, sum(1 for line in read_optional(csv_path).splitlines() if line.strip()) - 1)


def squeue():
    """{(job id, array task): state} of the user's jobs; an error where Slurm does not answer, for a
    run that is taken for lost is submitted twice."""
    try:
        done = subprocess.run(
            ["squeue", "--me", "--noheader", "--array", "--format=%F|%K|%T"], capture_output=True, text=True
        )
    except FileNotFoundError:
        raise StudyError(
            "the study was submitted to Slurm, and squeue, which reports its state, is not installed here; "
            "fix: run this where Slurm is"
        ) from None
    if done.returncode != 0:
        raise StudyError(f"squeue failed: {done.stderr.strip()}")
    rows = (line.strip().split("|") for line in done.stdout.splitlines() if line.count("|") == 2)
    return {(job, task): state for job, task, state in rows}
