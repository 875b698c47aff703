#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sends a signal to one rank of a small training run at each of twelve places, and starts the run again.

A cell is a place, a signal and a victim: forward.KILL.0, rename.STOP.3. Four CPU ranks run under MPI,
and save after every fifth step. A cell promises:

- All ranks end within the bound after the signal, and no process of the job is left.

  | signal | place | bound | exit codes |
  |---|---|---|---|
  | KILL | rendezvous | 8 s after the last rank's start | victim 137, others 76 |
  | KILL | others | 4 s | victim 137, others 76 |
  | STOP | rendezvous | as KILL | others 76; the script then kills the victim (137) |
  | STOP | others | 5.5 s | as at the rendezvous |
  | TERM | before the first step | 5 s | all 75: there is nothing to save |
  | TERM | others | 4 s | all 75, saved |

  At the rendezvous 4 s are rendezvous_timeout_ms. For STOP 1.5 s are the heartbeats that may be missed.
- The lowest rank that survives prints the first cause, which names the victim, and in a step also the step.
- A signal before the first step leaves the checkpoints as they were. After KILL and STOP the newest
  checkpoint is the one before the signal, or the complete one whose save the signal met. After TERM it is the
  step that the message names.
- The second start resumes from the newest checkpoint, completes, and leaves no unfinished save.
- It ends with the undisturbed run's bits: parameters, buffers and the optimizer's state.

usage: kill_matrix.py --build DIR [--phases forward,save] [--signals KILL] [--victims 0,1] [CELL PATTERN…]
Prints a line for each cell and a table. Exit code 1: a cell failed. --break spoils one thing of each cell:
every cell must then fail.
"""

import argparse
import concurrent.futures
import fnmatch
import itertools
import os
import re
import shutil
import sys
import tempfile
import time

from fault_runs import PROGRAM, RANKS, SAVE_EVERY, SETTINGS, STEPS, Start, committed, read, unfinished

# The order of a run. The places before the first step are passed by a start that will resume.
BEFORE_STEPS = ["rendezvous", "meeting", "check", "broadcast"]
IN_STEP = ["forward", "first_bucket", "last_bucket", "optimizer"]
IN_SAVE = ["save", "written", "rename", "commit"]
PHASES = BEFORE_STEPS + IN_STEP + IN_SAVE
SIGNALS = ["KILL", "TERM", "STOP"]
VICTIMS = [0, 1, RANKS - 1]  # the first, a middle one, the last
FAULT_STEP, FAULT_SAVE = 8, 10
BREAKS = ["bound", "codes", "cause", "checkpoints", "resume", "bits"]
RENDEZVOUS_SECONDS = 4


class Cell:
    """One cell: what it runs, and what it expects."""

    def __init__(self, phase, sig, victim):
        self.phase, self.signal, self.victim = phase, sig, victim
        self.name = f"{phase}.{sig}.{victim}"
        self.survivors = [rank for rank in range(RANKS) if rank != victim]

    def bound(self):
        if self.signal == "TERM":
            return 5 if self.phase in BEFORE_STEPS else 4
        if self.phase == "rendezvous":
            return RENDEZVOUS_SECONDS + 4
        return 4 if self.signal == "KILL" else 5.5

    def codes(self):
        if self.signal == "TERM":
            return [75] * RANKS
        return [137 if rank == self.victim else 76 for rank in range(RANKS)]

    def speaker(self):
        """The rank that prints the first cause."""
        return 0 if self.signal == "TERM" else self.survivors[0]

    def cause(self):
        """A pattern that the first-cause line matches."""
        rank = self.victim
        if self.signal == "TERM":
            stopped = rf"rank {rank} was asked to stop: stopped after \d+ steps, saved in"
            early = rf"first cause: rank {rank} \(.*a stop was requested, and there is nothing to save yet"
            # Ranks that met quickly may have begun to train when the request is noticed.
            if self.phase == "rendezvous":
                return f"{early}|{stopped}"
            return early if self.phase in BEFORE_STEPS else stopped
        if self.phase == "rendezvous":
            return rf"did not end within {RENDEZVOUS_SECONDS}000 ms.*missing: rank {rank}\b"
        place = rf" at step ({FAULT_STEP}|{FAULT_STEP + 1})" if self.phase in IN_STEP else ""
        if self.phase in IN_STEP and rank != 0:  # nobody knows where rank 0 was
            place = rf" at step {FAULT_STEP} in " + self.phase.replace("first_bucket", "backward").replace(
                "last_bucket", "backward"
            )
        why = {"KILL": "its connection closed", "STOP": "no sign of life for 1500 ms"}[self.signal]
        noticed = "" if rank else ".*; step and place are those of the rank that noticed"
        return rf"first cause: rank {rank} \(.*\) failed{place}.*: {why}{noticed}"

    def newest(self, log):
        """The steps that the newest checkpoint may have. `log` is what the speaker printed."""
        if self.signal == "TERM":
            saved = re.search(r"stopped after (\d+) steps, saved in", log)
            return [int(saved.group(1))] if saved else [SAVE_EVERY]
        if self.phase == "commit":
            return [FAULT_SAVE]
        if self.phase == "rename" and self.victim != 0:
            return [SAVE_EVERY, FAULT_SAVE]  # rank 0 renames after another rank got the signal
        return [SAVE_EVERY]


class Bench:
    """Runs cells below a folder. `reference` is the folder of the undisturbed run."""

    def __init__(self, options, folder, reference):
        self.options, self.folder, self.reference = options, folder, reference
        self.hash = None

    def start(self, folder, *settings, timeout=40):
        words = [
            self.options.program,
            *SETTINGS,
            "metrics.dir=",
            f"checkpoint.dir={folder}/checkpoint",
            f"fault.folder={folder}",
            f"fault.step={FAULT_STEP}",
            f"fault.save={FAULT_SAVE}",
            *(["optimizer.zero1=true"] if self.options.zero1 else []),
            *settings,
        ]
        return Start(self.options.build, folder, words, timeout)

    def make_reference(self):
        os.makedirs(self.reference, exist_ok=True)
        shutil.rmtree(os.path.join(self.reference, "checkpoint"), ignore_errors=True)
        start = self.start(self.reference).end()
        if start.codes != [0] * RANKS or start.complaints or hash_in(start) is None:
            sys.exit("kill_matrix: the undisturbed run failed:\n" + self.read_reference())

    def read_reference(self):
        return read(os.path.join(self.reference, "launch.log"))

    def use_reference(self):
        self.hash = (re.findall(r"the state's hash is (\w+)", self.read_reference()) or [None])[-1]
        if self.hash is None:
            sys.exit(f"kill_matrix: no undisturbed run in {self.reference}")

    def disturb(self, cell, folder):
        """The first start. Returns it and the seconds from the signal to the end of all ranks."""
        settings = [f"fault.phase={cell.phase}", f"fault.signal={cell.signal}", f"fault.victim={cell.victim}"]
        if cell.phase == "rendezvous":
            settings.append(f"context.control_plane.rendezvous_timeout_ms={1000 * RENDEZVOUS_SECONDS}")
        if cell.signal == "TERM":
            settings.append("fault.step_ms=50")  # the run must not be complete before it is asked
        start = self.start(folder, *settings)
        while start.running() and not start.deed():
            time.sleep(0.005)
        stopped = cell.signal == "STOP"
        ended = start.wait_for_end(cell.survivors if stopped else range(RANKS), time.monotonic() + 20)
        if stopped:
            frozen = start.ranks.state(cell.victim) == "T"
            start.ranks.kill(cell.victim)
        start.end()
        if stopped and not frozen:
            start.complaints.append("the stopped rank was not stopped any more")
        # Ranks that wait for one that never comes count from their own start.
        begun = max(start.deed(), start.ranks.joined if cell.phase == "rendezvous" else 0)
        return start, ended - begun if start.deed() else float("inf")

    def run(self, cell):
        """Returns the problems (empty: passed), and a text with figures."""
        folder = tempfile.mkdtemp(prefix=cell.name + "_", dir=self.folder)
        if cell.phase in BEFORE_STEPS:
            name = os.path.join("checkpoint", f"step_{SAVE_EVERY:010}")
            shutil.copytree(os.path.join(self.reference, name), os.path.join(folder, name))
        first, seconds = self.disturb(cell, folder)
        os.rename(os.path.join(folder, "launch.log"), os.path.join(folder, "first.log"))
        problems, cause = self.check_first(cell, folder, first, seconds)
        codes = ",".join(map(str, first.codes))
        if not problems:
            problems += self.check_second(folder)
        if problems and not self.options.spoil:
            for name in ("first.log", "launch.log"):
                lines = read(os.path.join(folder, name)).splitlines()
                problems += [f"{name}: {line}" for line in lines[-40:]]
        if not self.options.keep:
            shutil.rmtree(folder)
        return problems, f"ended after {seconds:.2f} s of {cell.bound()} s, {codes}: {cause}"

    def check_first(self, cell, folder, start, seconds):
        spoilt = self.options.spoil
        problems = list(start.complaints)
        bound = 0 if spoilt == "bound" else cell.bound()
        if not start.deed():
            problems.append("the signal was never sent")
        if seconds > bound:
            problems.append(f"ended after {seconds:.2f} s, more than {bound} s")
        expected = [77] * RANKS if spoilt == "codes" else cell.codes()
        if start.codes != expected:
            problems.append(f"exit codes {start.codes}, expected {expected}")
        log = start.output[cell.speaker()]
        pattern = (Cell(cell.phase, cell.signal, 2) if spoilt == "cause" else cell).cause()
        cause = re.search(pattern, log, re.S if cell.phase == "rendezvous" else 0)
        if cause is None:
            problems.append(f"rank {cell.speaker()} did not print the cause /{pattern}/")
        newest = [-1] if spoilt == "checkpoints" else cell.newest(log)
        steps = committed(os.path.join(folder, "checkpoint"))
        if not steps or steps[-1] not in newest:
            problems.append(f"checkpoints of steps {steps}, the newest should be one of {newest}")
        return problems, " ".join(cause.group(0).split())[:90] if cause else "no cause"

    def check_second(self, folder):
        checkpoints = os.path.join(folder, "checkpoint")
        newest = committed(checkpoints)[-1]
        if self.options.spoil == "resume":
            shutil.rmtree(checkpoints)
        other = ["optimizer.weight_decay=0.5"] if self.options.spoil == "bits" else []
        start = self.start(folder, *other).end()
        problems = [f"second start: {complaint}" for complaint in start.complaints]
        if start.codes != [0] * RANKS:
            problems.append(f"second start: exit codes {start.codes}")
        if f"training begins at step {newest}\n" not in start.output[0] + "\n":
            problems.append(f"second start: did not resume at step {newest}")
        if committed(checkpoints)[-1:] != [STEPS] or unfinished(checkpoints):
            problems.append(f"second start: left {sorted(os.listdir(checkpoints))}")
        if hash_in(start) != self.hash:
            problems.append(f"second start: the state's hash is {hash_in(start)}, undisturbed {self.hash}")
        return problems


def hash_in(start):
    found = re.search(r"the state's hash is (\w+)", start.output[0])
    return found.group(1) if found else None


def select(options):
    def is_wanted(cell):
        return any(fnmatch.fnmatch(cell.name, pattern) for pattern in options.patterns or ["*"])

    cells = itertools.starmap(Cell, itertools.product(options.phases, options.signals, options.victims))
    return [cell for cell in cells if is_wanted(cell)]


def print_table(results):
    """Passed cells of each place and signal, and the longest cell."""

    def passed(phase, sig):
        return [not problems for cell, problems, _ in results if (cell.phase, cell.signal) == (phase, sig)]

    print(f"\n{'place':<14}" + "".join(f"{sig:>10}" for sig in SIGNALS))
    for phase in PHASES:
        row = [passed(phase, sig) for sig in SIGNALS]
        if any(row):
            counts = [f"{sum(part)}/{len(part)}" if part else "-" for part in row]
            print(f"{phase:<14}" + "".join(f"{count:>10}" for count in counts))
    longest = max(results, key=lambda result: result[2])
    failed = [cell.name for cell, problems, _ in results if problems]
    print(
        f"{len(results) - len(failed)} of {len(results)} cells passed, "
        f"longest {longest[0].name} {longest[2]:.1f} s"
    )
    if failed:
        print("failed: " + " ".join(failed))


def run_timed(bench, cell):
    begun = time.monotonic()
    problems, figures = bench.run(cell)
    return cell, problems, figures, time.monotonic() - begun


def run_cells(bench, cells):
    results = []
    pool = concurrent.futures.ThreadPoolExecutor(bench.options.jobs)
    for cell, problems, figures, seconds in pool.map(lambda cell: run_timed(bench, cell), cells):
        results.append((cell, problems, seconds))
        print(f"{'FAILED' if problems else 'ok':<7}{cell.name:<21}{seconds:5.1f} s  {figures}", flush=True)
        for problem in problems:
            print(f"       {problem}", flush=True)
    return results


def list_of(known, kind=str):
    """Reads an option's values, separated by commas."""

    def parse_list(text):
        values = [kind(value) for value in text.split(",")]
        if not set(values) <= set(known):
            raise argparse.ArgumentTypeError(f"{text} is not a list of {known}")
        return values

    return parse_list


def parse():
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("patterns", nargs="*", help="names of cells with *, as in 'forward.*.0'")
    parser.add_argument("--build", default="build", help="the build folder")
    parser.add_argument("--program", help=f"the program of the ranks (default: {PROGRAM} there)")
    parser.add_argument("--phases", type=list_of(PHASES), default=PHASES)
    parser.add_argument("--signals", type=list_of(SIGNALS), default=SIGNALS)
    parser.add_argument("--victims", type=list_of(VICTIMS, int), default=VICTIMS)
    parser.add_argument("--list", action="store_true", help="only print the names of the selected cells")
    parser.add_argument("--repeat", type=int, default=1, help="times that each cell runs")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; the bounds allow 2 on 2 cores")
    parser.add_argument("--zero1", action="store_true", help="each rank has and saves a part of the state")
    parser.add_argument("--keep", action="store_true", help="keep the cells' folders and name them")
    parser.add_argument("--reference", help="folder of an undisturbed run made by --make-reference")
    parser.add_argument("--make-reference", metavar="FOLDER", help="only make the undisturbed run there")
    parser.add_argument("--break", dest="spoil", choices=BREAKS, help="spoil this; every cell must fail")
    return parser.parse_args()


def main():
    options = parse()
    cells = select(options) * options.repeat
    if options.list or not cells:
        print("\n".join(cell.name for cell in cells))
        return 0 if cells else 64
    options.build = os.path.abspath(options.build)
    options.program = options.program or os.path.join(options.build, PROGRAM)
    folder = tempfile.mkdtemp(prefix="kill_matrix_")
    try:
        reference = options.make_reference or options.reference or f"{folder}/whole"
        bench = Bench(options, folder, os.path.abspath(reference))
        if not options.reference:
            bench.make_reference()
        if options.make_reference:
            return 0
        bench.use_reference()
        results = run_cells(bench, cells)
        print_table(results)
        return 1 if any(problems for _, problems, _ in results) else 0
    finally:
        if options.keep:
            print(f"folders of the cells: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
