#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One HTML page of one or several runs: curves, rates, a step's parts, configuration and system.

    tools/plot_run.py --latest
    tools/plot_run.py runs/2026-11-26_23-03-25
    tools/plot_run.py runs/lr_1 runs/lr_2 --smooth 10 --output sweep.html

A run is the folder that a program logs to: metrics.dir/<run>. Every numeric column of its CSV and JSONL files
is drawn, a user's own columns too. A run that still trains, or was killed, is drawn as far as its files go.
The page needs nothing beside it, no network and no script. This program needs nothing but Python.

Exit codes: 0 written, 64 a mistake in the call, 65 a folder or file that cannot be used (the message names
it), 73 the page cannot be written.
"""

import os
import shlex
import sys

from run_page import page
from run_page.files import Run
from run_top.folder import find_run
from scaling.command_line import Parser, exit_code, writing
from scaling.report import write_page


def main(arguments):
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--latest", action="store_true", help="draw the newest run in each folder RUN (default: runs)"
    )
    parser.add_argument("--output", metavar="FILE", help="the page (run.html in the first run's folder)")
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="N", help="draw means of the last N rows of steps (1: none)"
    )
    parser.add_argument("--title", help="of the page (the runs' names)")
    options = parser.parse_args(arguments)
    if options.smooth < 1:
        parser.error(f"--smooth {options.smooth} is not a number of rows; fix: give 1 (no smoothing) or more")
    if not options.runs and not options.latest:
        parser.error("no RUN is named; fix: name the folder of a run, or give --latest")
    paths = [find_run(path) for path in options.runs or ["runs"]] if options.latest else options.runs
    runs = [Run(path) for path in paths]
    labels = [run.label for run in runs]
    for run in runs:
        run.label = run.path if labels.count(run.label) > 1 else run.label
    output = options.output or os.path.join(paths[0], "run.html")
    command = "tools/plot_run.py " + " ".join(shlex.quote(word) for word in arguments)
    parts = page.make(runs, options.smooth, command)
    with writing(output):
        os.makedirs(os.path.dirname(output) or ".", exist_ok=True)
        write_page(output, options.title or ", ".join(run.label for run in runs), parts, page.STYLE)
    for run in runs:
        for note in run.notes:
            print(f"note: {run.path}: {note}")
    print(f"page: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
