#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A live view of a run, or of this host's GPUs.

    tools/ddp_top.py runs/2026-11-26_23-03-25     a run's folder, here or on a shared file system
    tools/ddp_top.py runs                         the newest run in that folder
    tools/ddp_top.py                              the GPUs of this host
    tools/ddp_top.py runs --doctor                asks a hanging run which rank the others wait for

It shows the state of the run (running, quiet, dead, finished, ended), step, loss, rates, waits, the slowest
rank, each rank's GPU and the last lines of the log. A dash is a number that nobody reports. Numbers of ranks
are those of the last logging step (ranks.json), those of GPUs on this host are fresh. docs/running.md
explains each.

Keys: q quits, s sorts by the next column, r reverses, up and down pick a rank. This program needs nothing but
Python.

Exit codes: 0 shown, 64 a mistake in the call, 65 a folder that cannot be used (the message names it), 73 the
output cannot be written.
"""

import json
import locale
import math
import os
import shutil
import socket
import sys
import time

from run_top import doctor, view
from run_top.folder import Follower, find_run
from run_top.gpus import Nvml
from scaling.command_line import Parser, WriteError, exit_code
from scaling.numbers import DataError

LOOK_SECONDS = 0.5  # between two looks of --once at an owner on another host


class Run:
    columns = view.COLUMNS

    def __init__(self, path):
        self._path, self._nvml = path, Nvml()
        self._follower = Follower(path, self._nvml)

    def read(self):
        """Of a folder of runs the newest: once the run that was shown has ended, a later one takes its
        place."""
        state = self._follower.read()
        if (
            state.status in ("dead", "finished", "ended")
            and (newest := find_run(self._path)) != self._follower.path
        ):
            self._follower = Follower(newest, self._nvml)
            state = self._follower.read()
        return state

    def read_once(self):
        """Waits until it is known whether the run lives: an owner on another host counts every two
        seconds."""
        state = self.read()
        while state.status == "unknown":
            time.sleep(LOOK_SECONDS)
            state = self.read()
        return state

    def draw(self, state, width, height=None, choice=None, is_ascii=False):
        return view.draw(state, width, height, choice, is_ascii)

    def ranks_of(self, state):
        return state.ranks

    def record(self, state):
        return state.record()


class Host:
    columns = view.HOST_COLUMNS

    def __init__(self):
        self._nvml = Nvml()
        self._name = socket.gethostname()
        if not self.read():
            raise DataError(
                "this host has no GPU that NVIDIA's driver reports; fix: name the folder of a run"
            )

    def read(self):
        return self._nvml.read()

    def read_once(self):
        time.sleep(LOOK_SECONDS)  # NVLink's rate needs two looks
        return self.read()

    def draw(self, state, width, height=None, choice=None, is_ascii=False):
        return view.draw_host(state, self._name, width, height, choice, is_ascii)

    def ranks_of(self, state):
        return [{"rank": index, **record} for index, record in enumerate(state)]

    def record(self, state):
        return {"host": self._name, "gpus": state}


def as_json(value):
    """JSON has no NaN: a number that is not finite becomes a text, as in steps.jsonl."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_text(text):
    """Prints and flushes. A reader that closed its pipe has seen enough."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # Python flushes the rest once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise WriteError(
                f"standard output: cannot write: {error.strerror}; fix: make room there, or name another file"
            ) from None


def main(arguments):
    parser = Parser(__doc__)
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="folder of a run, or of runs: the newest (none: this host's GPUs)",
    )
    parser.add_argument(
        "--doctor", action="store_true", help="print which rank the others wait for; the running job goes on"
    )
    parser.add_argument("--once", action="store_true", help="print plain text once")
    parser.add_argument("--json", action="store_true", help="print one record in JSON")
    parser.add_argument(
        "--interval", type=float, default=2, metavar="S", help="seconds between two readings (2)"
    )
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters alone")
    options = parser.parse_args(arguments)
    if not 0.1 <= options.interval <= 3600:
        parser.error(
            f"--interval {options.interval:g} is not 0.1 to 3600 seconds; fix: give a number in between"
        )
    if options.doctor:
        if not options.run:
            parser.error("--doctor needs the folder of a run; fix: name it")
        file, report = doctor.report_of(options.run)
        print_text(
            json.dumps(as_json(report), allow_nan=False) + "\n"
            if options.json
            else doctor.text_of(
                file,
                report,
                time.time(),
                shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else None,
            )
        )
        return 0
    is_live = not options.once and not options.json
    if is_live and not (sys.stdin.isatty() and sys.stdout.isatty()):
        parser.error("the live view needs a terminal; fix: add --once for plain text or --json for a record")
    source = Run(options.run) if options.run else Host()
    locale.setlocale(locale.LC_ALL, "")
    is_ascii = options.ascii or "utf" not in (sys.stdout.encoding or "").lower()
    if options.json:
        print_text(json.dumps(as_json(source.record(source.read_once())), allow_nan=False) + "\n")
    elif options.once:
        columns = shutil.get_terminal_size((80, 24)).columns
        print_text(view.text_of(source.draw(source.read_once(), columns, is_ascii=is_ascii)))
    else:
        from run_top import screen

        if not screen.show(source, view.Choice(), options.interval, is_ascii):
            parser.error(
                f"TERM={os.environ.get('TERM', '')} is a terminal that curses does not know; fix: set "
                "TERM=xterm, or add --once"
            )
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a log may have characters that the terminal's encoding lacks
    try:
        sys.exit(exit_code(main, sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(0)
