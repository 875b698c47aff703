# SPDX-License-Identifier: Apache-2.0
"""A rank that was stopped until the others gave it up wakes, and names itself.

usage: wake_test.py BUILD PROGRAM
"""

import signal
import sys
import tempfile
import time

from fault_runs import RANKS, SETTINGS, Start

build, program = sys.argv[1:]


def wake(victim):
    with tempfile.TemporaryDirectory() as folder:
        faults = [
            "fault.phase=forward",
            "fault.signal=STOP",
            f"fault.victim={victim}",
            f"fault.folder={folder}",
        ]
        words = [program, *SETTINGS, "metrics.dir=", f"checkpoint.dir={folder}/checkpoint"]
        start = Start(build, folder, [*words, *faults], timeout=40)
        while start.running() and not start.deed():
            time.sleep(0.005)
        start.wait_for_end([rank for rank in range(RANKS) if rank != victim], time.monotonic() + 20)
        start.ranks.kill(victim, signal.SIGCONT)
        start.end()
        text = start.output[victim]
        print(text)
        assert start.codes == [76] * RANKS, start.codes
        first_cause = [line for line in text.splitlines() if "first cause: " in line]
        assert len(first_cause) == 1 and f"first cause: rank {victim} (" in first_cause[0], first_cause
        assert "this process was stopped for " in first_cause[0], first_cause


for rank in (0, 1):
    wake(rank)
