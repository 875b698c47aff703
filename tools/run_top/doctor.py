# SPDX-License-Identifier: Apache-2.0
"""Asks a running job which rank the others wait for: SIGUSR2 to rank 0, which writes doctor.json into the run
folder. Of a run that has ended, the report that it left."""

import os
import signal
import socket
import time

from scaling.numbers import DataError

from . import view
from .folder import Owner, find_run, machine, read_json

ANSWER_SECONDS = 10
LOOK_SECONDS = 0.1
CLOCK_SECONDS = 5  # by which the clocks of hosts and file servers may differ
FILE = "doctor.json"
PENDING = ("enqueued", "started", "failed")
UNKNOWN_STEP = -3  # a program that trains and announces no step


def report_of(path):
    """(file, report) of the run in `path`, fresh if it runs."""
    run = find_run(path)
    file = os.path.join(run, FILE)
    record, is_alive = Owner(run).read(time.monotonic())
    before = identity(file)
    # A killed process leaves its record, and another one may have its id by now.
    if record and is_alive is not False and not is_newer(record.get("process"), os.path.join(run, ".owner")):
        ask(record)
        wait_for_another(file, before)
    elif before is None:
        raise DataError(
            f"{file}: there is none, and the run has ended; fix: ask while the run hangs. A run that fails "
            "leaves a report where it has several ranks"
        )
    report = read_json(file)
    if not report or not isinstance(report.get("verdict"), dict):
        raise DataError(f"{file}: not a report of a run; fix: ask again while the run hangs")
    return file, report


def identity(file):
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def ask(record):
    """Sends the signal to the owner of the run folder, the process of rank 0."""
    process, host = record.get("process"), record.get("host", "?")
    by_hand = f"`kill -USR2 {process}` on host {host}"
    if not isinstance(process, int) or process <= 0:
        raise DataError("the record .owner is damaged; fix: ask again in two seconds")
    if record.get("machine") != machine() or host != socket.gethostname():
        raise DataError(
            f"the process of rank 0 is on host {host}; fix: call this program there, or {by_hand}"
        )
    if not catches_signal(process):
        raise DataError(
            f"process {process} of rank 0 does not run, or handles no SIGUSR2 and would end; fix: use "
            "ddp::run or StopSignalHandlers in the program"
        )
    try:
        os.kill(process, signal.SIGUSR2)
    except OSError as error:
        raise DataError(
            f"process {process} of rank 0 cannot be asked: {error.strerror}; fix: its user may, by {by_hand}"
        ) from None


def is_newer(process, file):
    """Whether the process of this host began after its owner, which writes the file every two seconds."""
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])  # since the boot
        with open("/proc/uptime", encoding="ascii") as uptime:
            boot = time.time() - float(uptime.read().split()[0])
        return boot + ticks / os.sysconf("SC_CLK_TCK") > os.stat(file).st_mtime + CLOCK_SECONDS
    except (OSError, ValueError, IndexError):
        return False


def catches_signal(process):
    """Whether the process has a handler for SIGUSR2; without one the signal would end the process."""
    try:
        with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as status:
            masks = dict(line.split(":", 1) for line in status if ":" in line)
        return bool(int(masks["SigCgt"], 16) >> (signal.SIGUSR2 - 1) & 1)
    except (OSError, KeyError, ValueError):
        return False


def wait_for_another(file, before):
    end = time.monotonic() + ANSWER_SECONDS
    while identity(file) in (None, before):
        if time.monotonic() >= end:
            raise DataError(
                f"{file}: rank 0 wrote no report within {ANSWER_SECONDS} s; fix: see whether its process is "
                "stopped (state T in `ps`). A run of one rank writes none: it waits for no other"
            )
        time.sleep(LOOK_SECONDS)


def text_of(file, report, now, width=None):
    """The first cause of a job that failed, the verdict, and one line a rank; wrapped at `width` cells."""
    verdict = report["verdict"]
    certain = ", certain" if verdict.get("certain") is True else ""
    age = now - report["time"] if isinstance(report.get("time"), (int, float)) else 0
    # The cause comes first: where the program failed, the verdict only says who waited at that moment.
    lines = [f"first cause: {report['first_cause']}"] if "first_cause" in report else []
    lines += [f"doctor: {verdict.get('text', '?')}", f"        ({verdict.get('kind', '?')}{certain})", ""]
    ranks = report.get("ranks")
    lines += [rank_line(rank) for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    lines += ["", f"every rank's last collectives: {file} ({max(0, age):.0f} s old)", ""]
    parts = [
        part for line in lines for part in (view.wrapped(line, width) if width else [view.visible(line)])
    ]
    return os.linesep.join(parts)


def rank_line(rank):
    words = f"rank {rank.get('rank', '?')} ({rank.get('host', '?')}) {step_words(rank.get('step'))}"
    if rank.get("where"):
        words += f" in {rank['where']}"
    if rank.get("answered") is not True:
        return f"{words}, last seen {seconds(rank.get('silent_ms'))} ago: no answer"
    if rank.get("control_plane_call"):
        words += f"; in the control plane's {rank['control_plane_call']}"
    for group in rank.get("communicators") or []:
        pending = next((entry for entry in calls_of(group) if entry.get("state") in PENDING), None)
        if pending:
            words += f"; in {call_words(pending)} since {seconds(pending.get('enqueued_ms'))}"
    return words


def calls_of(group):
    """Replays first: eager calls may queue behind them."""
    for graph in group.get("graphs") or []:
        if "waited_ms" in graph:
            for entry in graph.get("collectives") or []:
                yield {**entry, "enqueued_ms": graph["waited_ms"]}
    yield from group.get("collectives") or []


def call_words(entry):
    name, _, rest = str(entry.get("operation", "?")).partition(" ")
    label = f", {entry['label']}" if entry.get("label") else ""
    return f"{name} #{entry.get('number', '?')} {rest}{label}"


def step_words(step):
    if not isinstance(step, int) or step == UNKNOWN_STEP:
        return "at an unknown step"
    return f"at step {step}" if step >= 0 else "before the first step"


def seconds(milliseconds):
    return f"{milliseconds / 1000:.1f} s" if isinstance(milliseconds, (int, float)) else "?"
