# SPDX-License-Identifier: Apache-2.0
"""ddp_top --doctor on a run of three ranks: while rank 1 sleeps, and after the job has failed.

usage: doctor_test.py LAUNCHER PROGRAM
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
launcher, program = sys.argv[1:]
ABSENT = (") did not enter all_reduce #", "; ranks 0, 2 wait since ")


def start(folder, *settings, code):
    command = [launcher, "--ranks", "3", "--timeout", "60", "--expect-exit", f"*:{code}", "--", program]
    return subprocess.Popen(
        [*command, "program.fault=sleeps", f"metrics.dir={folder}", "metrics.run_name=run", *settings]
    )


def doctor(run, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / "tools/ddp_top.py", run, "--doctor", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def is_asleep(log):
    """Whether the ranks wait for rank 1: they have made their steps."""
    try:
        return "step 3 |" in log.read_text(encoding="utf-8")
    except OSError:
        return False


with tempfile.TemporaryDirectory() as folder:
    run = os.path.join(folder, "run")
    job = start(folder, "metrics.log_every=1", code=0)
    end = time.monotonic() + 50
    while not is_asleep(pathlib.Path(run, "log.txt")):
        assert time.monotonic() < end and job.poll() is None, "the job did not begin"
        time.sleep(0.05)
    time.sleep(2)
    text = doctor(run)
    print(text)
    assert text.startswith("doctor: rank 1 ("), text
    assert all(part in text for part in ABSENT), text
    assert job.wait() == 0, "the job did not go on"

    job = start(folder, "context.communicator.timeout_ms=3000", code=76)
    assert job.wait() == 0
    report = json.loads(doctor(run, "--json"))
    assert report["reason"] == "failure" and report["verdict"]["kind"] == "absent", report["verdict"]
    assert all(part in report["verdict"]["text"] for part in ABSENT), report["verdict"]
    ranks = report["ranks"]
    assert [rank["answered"] for rank in ranks] == [True] * 3
    calls = ranks[1]["communicators"][0]["collectives"]
    assert {call["state"] for call in calls} == {"ended"}
    assert any(call.get("label", "").startswith("bucket 0: ") for call in calls), calls
    waiting = [call for rank in ranks for call in rank["communicators"][0]["collectives"]]
    assert any(call["state"] == "failed" for call in waiting), waiting
