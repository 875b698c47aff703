# SPDX-License-Identifier: Apache-2.0
"""ddp_top --doctor: what it asks whom, and what it prints."""

import json
import os
import subprocess
import sys
import time
import unittest
from unittest import mock

from top_support import Top

from run_top import doctor

# Rank 0: writes a report when it is asked.
ANSWERING = """
import json, os, signal, sys
def answer(*_):
    with open("new.json", "w") as file:
        json.dump(json.loads(sys.argv[1]), file)
    os.replace("new.json", "doctor.json")
signal.signal(signal.SIGUSR2, answer)
print(flush=True)
while True:
    signal.pause()
"""

CALL = {
    "number": 12,
    "operation": "all_reduce (sum of 8 Float, 32 bytes)",
    "label": "bucket 4: a … b",
    "state": "started",
    "enqueued_ms": 31400,
}
REPORT = {
    "time": 1.0,
    "reason": "request",
    "verdict": {"kind": "absent", "certain": False, "ranks": [1], "text": "rank 1 (n1) did not enter it"},
    "ranks": [
        {
            "rank": 0,
            "host": "n0",
            "answered": True,
            "step": 5,
            "where": "backward",
            "communicators": [{"communicator": "world", "collectives": [{"state": "ended"}, CALL]}],
        },
        {
            "rank": 1,
            "host": "n1",
            "answered": True,
            "step": -1,
            "where": "save",
            "control_plane_call": "all_gather of 'save'",
            "communicators": [
                {
                    "communicator": "world",
                    "collectives": [CALL],
                    "graphs": [{"waited_ms": 2000, "collectives": [{**CALL, "number": 3}]}],
                }
            ],
        },
        {"rank": 2, "host": "n1", "answered": False, "silent_ms": 8100, "step": -3, "where": ""},
    ],
}


class Doctor(Top):
    def start(self, program, *arguments):
        folder = os.path.join(self.folder, "run")
        child = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], cwd=folder, stdout=subprocess.PIPE
        )
        self.addCleanup(child.communicate)
        self.addCleanup(child.kill)
        child.stdout.readline()
        self.own({"process": child.pid})
        return child

    def test_it_asks_rank_0_and_prints_its_answer(self):
        self.make_run()
        self.write("run/doctor.json", json.dumps({"verdict": {"text": "an old one"}}))
        self.start(ANSWERING, json.dumps({**REPORT, "time": time.time()}))
        lines = self.top("run", "--doctor").splitlines()
        self.assertEqual(
            lines[:2], ["doctor: rank 1 (n1) did not enter it", "        (absent)"], "\n".join(lines)
        )
        self.assertEqual(
            lines[3:6],
            [
                "rank 0 (n0) at step 5 in backward; in all_reduce #12 (sum of 8 Float, 32 bytes), bucket 4: a … b "
                "since 31.4 s",
                "rank 1 (n1) before the first step in save; in the control plane's all_gather of 'save'; in "
                "all_reduce #3 (sum of 8 Float, 32 bytes), bucket 4: a … b since 2.0 s",
                "rank 2 (n1) at an unknown step, last seen 8.1 s ago: no answer",
            ],
        )
        self.assertIn("run/doctor.json (0 s old)", lines[-1])
        self.assertEqual(json.loads(self.top("run", "--doctor", "--json"))["verdict"], REPORT["verdict"])

    def test_a_run_that_has_ended_shows_the_report_that_it_left(self):
        self.make_run()
        self.assertIn("there is none, and the run has ended", self.top("run", "--doctor", code=65))
        self.write("run/doctor.json", json.dumps({**REPORT, "first_cause": "rank 0 failed"}))
        text = self.top("run", "--doctor")
        self.assertIn("rank 1 (n1) did not enter it", text)
        self.assertIn("first cause: rank 0 failed", text)

    def test_whom_it_does_not_ask(self):
        self.make_run(owner={"host": "n9", "machine": "other", "process": 4711})
        self.assertIn("`kill -USR2 4711` on host n9", self.top("run", "--doctor", code=65))
        child = self.start("print(flush=True); input()")  # the signal would end it
        self.assertIn("handles no SIGUSR2 and would end", self.top("run", "--doctor", code=65))
        self.assertIsNone(child.poll())
        child.kill()
        child.wait()
        self.assertIn("does not run", self.top("run", "--doctor", code=65))
        self.own({"process": "x"})
        self.assertIn(".owner is damaged", self.top("run", "--doctor", code=65))
        self.assertIn("--doctor needs the folder of a run", self.top("--doctor", code=64))

    def test_no_answer(self):
        self.make_run()
        self.start(ANSWERING.replace('os.replace("new.json", "doctor.json")', "pass"), json.dumps(REPORT))
        with mock.patch.object(doctor, "ANSWER_SECONDS", 0.3):
            self.assertIn("rank 0 wrote no report within 0.3 s", self.top("run", "--doctor", code=65))

    def test_damaged_reports(self):
        self.make_run()
        for text in ("", "{", "[]", '{"verdict": 1}'):
            self.write("run/doctor.json", text)
            self.assertIn("not a report of a run", self.top("run", "--doctor", code=65))
        for ranks in (None, 7, [1], [{}], [{"communicators": None}]):
            self.write("run/doctor.json", json.dumps({"verdict": {}, "ranks": ranks}))
            self.assertIn("doctor: ?", self.top("run", "--doctor"))


if __name__ == "__main__":
    unittest.main()
