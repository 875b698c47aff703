# SPDX-License-Identifier: Apache-2.0
"""What a run folder says about its run: State. Every call of Follower.read() reads only what the run
added."""

import csv
import math
import os
import socket
import statistics
import time
from dataclasses import dataclass, field

from run_page.files import (
    FIX,
    KNOWN_COLUMNS,
    KNOWN_EPOCH_COLUMNS,
    add_row,
    constants_of,
    json_row,
    number,
    numbers,
)
from scaling.files import regular
from scaling.numbers import DataError

from . import gpus

BEAT_SECONDS = 2  # an owner counts so often
WATCH_SECONDS = 10  # an owner whose counter stands still for this long is dead
QUIET_INTERVALS = 5  # a run without a row for so many intervals is quiet,
QUIET_SECONDS = 30  # and never before this time
RECENT_ROWS = 20  # are kept whole; the usual interval is their median
LOG_BYTES = 64 * 1024  # read from the log's end
LOG_LINES = 200
RANK_TEXTS = (
    "host",
    "device",
    "gpu_type",
    "pci_bus_id",
    "slow_because",
)  # of a rank; its other columns are numbers
MARKS = ("settings.txt", "steps.jsonl", "steps.csv", "ranks.json", "log.txt")  # of a run folder


@dataclass
class State:
    """One look at a run. None: not known."""

    run: str
    status: str  # running, quiet, dead, finished, ended, unknown
    reason: str
    owner: str | None = None
    step: int | None = None
    max_steps: int | None = None
    epoch: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    step_ms: float | None = None
    rate: float | None = None
    unit: str = "samples"
    exposed_comm_ms: float | None = None
    loader_wait_ms: float | None = None
    eta_seconds: float | None = None
    row_age_seconds: float | None = None
    mfu: float | None = None
    slowest_rank: int | None = None
    constants: dict = field(default_factory=dict)  # of run.json, as texts
    custom: dict = field(default_factory=dict)  # the program's own metrics in the last row
    evaluation: dict = field(default_factory=dict)
    ranks: list = field(default_factory=list)
    losses: list = field(default_factory=list)  # (step, loss) of the rows
    log: list = field(default_factory=list)

    def record(self):
        """For --json: all but the curve and the log."""
        return {key: value for key, value in vars(self).items() if key not in ("losses", "log")}


class Rows:
    """The last rows of <name>.jsonl, else of <name>.csv, which grow while the run trains, and the losses of
    all rows."""

    def __init__(self, folder, name, x="step"):
        self._x = x
        self._paths = [os.path.join(folder, name + ending) for ending in (".jsonl", ".csv")]
        self._start(None)

    def _start(self, path):
        self._path, self._offset, self._file = path, 0, None
        self._columns = None  # of a CSV file
        self.rows, self.losses = [], []

    def read(self):
        path, file = next(((path, file) for path in self._paths if (file := open_file(path))), (None, None))
        if file is None:
            self._start(None)
            return self.rows
        with file:
            status = os.fstat(file.fileno())
            if path != self._path or status.st_ino != self._file or status.st_size < self._offset:
                self._start(path)  # another file: a resumed run wrote it again
            self._file = status.st_ino
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # unfinished
                    break
                self._offset += len(line)
                self._add(numbers(self._cells(line.decode("utf-8", "replace")) or {}))
        return self.rows

    def _add(self, row):
        add_row(self.rows, self._x, row)
        del self.rows[:-RECENT_ROWS]
        last = self.rows[-1] if self.rows else {}
        while self.losses and self.losses[-1][0] >= last[self._x]:
            self.losses.pop()
        if "loss" in last:
            self.losses.append((last[self._x], last["loss"]))

    def _cells(self, line):
        if self._path.endswith(".jsonl"):
            return json_row(line)
        try:
            cells = next(csv.reader([line]), [])
        except csv.Error:
            return None
        if self._columns is None:
            self._columns = cells
            return None
        return dict(zip(self._columns, cells))


def open_file(path):
    """None where there is none: a run removes its owner's record, and replaces files when it resumes."""
    try:
        return open(path, "rb", opener=regular)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; fix: ask its owner for the right to read it, or {FIX}"
        ) from None


def read_json(path):
    """A JSON object; empty where it is damaged, None where it is missing."""
    file = open_file(path)
    if file is None:
        return None
    with file:
        return json_row(file.read().decode("utf-8", "replace")) or {}


class Owner:
    """Whether the process that owns the folder lives, by its record .owner (docs/semantics_training.md)."""

    def __init__(self, folder):
        self._path = os.path.join(folder, ".owner")
        self._record = {}  # the last one that was not damaged
        self._counter = None
        self._changed = None  # when the counter was last seen to move; None: not yet

    def read(self, now):
        """(record, whether its process lives). None: no record, or nobody knows yet."""
        record = read_json(self._path)
        if record is None:
            self._record, self._counter = {}, None
            return None, None
        self._record = record = record or self._record  # a damaged one may be one that is being written
        here = machine()
        is_here = here and record.get("machine") == here and record.get("host") == socket.gethostname()
        exists = process_exists(record.get("process")) if is_here else None
        if exists is not None:
            return record, exists
        counter = (record.get("start"), record.get("beats"))
        if self._counter is None or self._counter[0] != counter:
            moved = self._counter is not None
            self._counter = (counter, now)
            self._changed = now if moved else None
        alive = True if self._changed is not None else None
        return record, False if now - self._counter[1] >= WATCH_SECONDS else alive


def machine():
    """The scope in which a process id is unique, as a folder's owner writes it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip() + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def process_exists(process):
    if not isinstance(process, int) or process <= 0:
        return None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def modified(path):
    try:
        return os.path.getmtime(path)
    except OSError:
        return None


def ranks_of(record):
    """The rows of ranks.json with what a rank may have: finite numbers, and texts. A row without a rank is
    damaged."""

    def usable(row):
        texts = {key: row[key] for key in RANK_TEXTS if isinstance(row.get(key), str)}
        finite = {
            key: value
            for key, value in numbers(row).items()
            if math.isfinite(value) and key not in RANK_TEXTS
        }
        return {**texts, **finite, "rank": row["rank"]}

    rows = record.get("ranks")
    if not isinstance(rows, list):
        return []
    return [usable(row) for row in rows if isinstance(row, dict) and isinstance(row.get("rank"), int)]


def count_of(cell):
    """A cell as an integer; None where it is not a finite number."""
    value = number(cell)
    return int(value) if value is not None and math.isfinite(value) else None


def find_run(path):
    """The run folder itself, or the newest run in a folder of runs."""
    if not os.path.isdir(path) or not os.access(path, os.R_OK | os.X_OK):
        raise DataError(f"{path}: there is no such folder, or no right to read it; fix: {FIX}")

    def newest_mark(folder):
        ages = (modified(os.path.join(folder, name)) for name in MARKS)
        return max((age for age in ages if age is not None), default=None)

    if newest_mark(path) is not None:
        return path
    runs = []
    for entry in os.scandir(path):
        age = newest_mark(entry.path) if entry.is_dir() else None
        if age is not None:
            runs.append((age, entry.path))
    if not runs:
        raise DataError(
            f"{path}: not the folder of a run, and no run is in it: none of {', '.join(MARKS)} is there; "
            f"fix: {FIX}"
        )
    return max(runs)[1]


class Follower:
    """Reads a run folder again and again. `nvml` refreshes the numbers of ranks on this host."""

    def __init__(self, path, nvml):
        self.path = find_run(path)
        self._steps = Rows(self.path, "steps")
        self._evaluations = Rows(self.path, "evals")
        self._epochs = Rows(self.path, "epochs", "epoch")
        self._owner = Owner(self.path)
        self._nvml = nvml

    def read(self):
        rows = self._steps.read()
        ranks = read_json(os.path.join(self.path, "ranks.json")) or {}
        run = read_json(os.path.join(self.path, "run.json")) or {}
        owner, is_alive = self._owner.read(time.monotonic())
        last = rows[-1] if rows else {}
        state = State(
            run=self.path,
            status="",
            reason="",
            owner=owner_words(owner),
            step=int(last["step"]) if rows else None,
            max_steps=count_of(ranks.get("max_steps", run.get("num_steps"))),
            constants=constants_of(run),
            row_age_seconds=max(0, time.time() - last["time"]) if "time" in last else None,
            evaluation=self._evaluation(),
            ranks=self._refreshed(ranks_of(ranks)),
            losses=self._steps.losses,
            log=self._log(),
        )
        for name in (
            "epoch",
            "loss",
            "accuracy",
            "lr",
            "grad_norm",
            "step_ms",
            "exposed_comm_ms",
            "loader_wait_ms",
            "mfu",
        ):
            setattr(state, name, last.get(name))
        rate = next((column for column in last if column.endswith("_per_second")), None)
        if rate:
            state.rate, state.unit = last[rate], rate.removesuffix("_per_second")
        state.custom = own_metrics(last, KNOWN_COLUMNS | {rate, f"{rate}_per_rank"})
        for rank in state.ranks:
            rank["rate"] = rank.pop(f"{state.unit}_per_second", None)
        state.slowest_rank = slowest(state.ranks)
        state.status, state.reason = status(state, owner, is_alive, usual_interval(rows))
        if state.status in ("running", "quiet") and state.max_steps and state.step_ms:
            state.eta_seconds = (state.max_steps - state.step) * state.step_ms / 1000
        return state

    def _evaluation(self):
        """Of the last evaluation between epochs, else of the last epoch."""
        evaluations, epochs = self._evaluations.read(), self._epochs.read()
        row = (evaluations or epochs or [{}])[-1]
        known = KNOWN_COLUMNS if evaluations else KNOWN_EPOCH_COLUMNS
        rates = {column for column in row if not evaluations and column.endswith("_per_second")}
        return {
            **{
                column: value
                for column, value in row.items()
                if column in ("step", "epoch") or column.startswith(("eval_", "test_"))
            },
            **own_metrics(row, known | rates),
        }

    def _refreshed(self, ranks):
        host = socket.gethostname()
        here = [rank for rank in ranks if rank.get("host") == host]
        now = self._nvml.read() if any(rank.get("pci_bus_id") for rank in here) else []
        for rank in here:
            for gpu in now:
                if gpus.same_bus_id(rank.get("pci_bus_id"), gpu.get("pci_bus_id")):
                    rank.update({key: value for key, value in gpu.items() if key != "device"})
                    break
        # A step ends on all ranks together.
        step_ms = max((rank["step_ms"] for rank in ranks if "step_ms" in rank), default=None)
        for rank in ranks:
            wait = rank.get("exposed_comm_ms")
            rank["busy_ms"] = None if wait is None or step_ms is None else max(0, step_ms - wait)
        return ranks

    def _log(self):
        file = open_file(os.path.join(self.path, "log.txt"))
        if file is None:
            return []
        with file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]


def owner_words(owner):
    if owner is None:
        return None
    if not owner:
        return "an owner whose record .owner is damaged"
    job = f", job {owner['job']}" if owner.get("job") else ""
    return f"host {owner.get('host', '?')}{job}, process {owner.get('process', '?')}"


def own_metrics(row, known):
    """The columns that the program added to a row."""
    return {column: value for column, value in row.items() if column not in known}


def usual_interval(rows):
    """Median seconds between the last rows."""
    times = [row["time"] for row in rows[-RECENT_ROWS:] if "time" in row]
    gaps = [later - earlier for earlier, later in zip(times, times[1:])]
    return statistics.median(gaps) if gaps else None


def slowest(ranks):
    """The rank that is busy longest: the others wait for it in their reductions. None for one rank."""
    known = [rank for rank in ranks if rank["busy_ms"] is not None]
    return max(known, key=lambda rank: rank["busy_ms"])["rank"] if len(known) > 1 else None


def status(state, owner, is_alive, interval):
    """(word, sentence). The owner's record decides: a run removes it at its end, a killed one cannot."""
    done = "before the first row"
    if state.step is not None:
        done = f"after step {state.step}" + (f" of {state.max_steps}" if state.max_steps else "")
    if owner is None:
        if state.max_steps and state.step == state.max_steps:
            return "finished", "the run made its last step"
        return "ended", f"{done}: stopped, failed, or without more steps"
    if is_alive is None:
        return "unknown", f"watching for at most {WATCH_SECONDS} s whether {state.owner} still counts"
    if not is_alive:
        return "dead", f"killed {done}: {state.owner} no longer runs"
    if state.row_age_seconds is None:
        return "running", "" if state.step is not None else "no row yet"
    limit = max(QUIET_SECONDS, QUIET_INTERVALS * (interval or 0))
    started = number(owner.get("beats"))  # 0 at the start of the owner, which may have resumed an earlier run
    started = math.inf if started is None else BEAT_SECONDS * started
    is_resumed = started + BEAT_SECONDS < state.row_age_seconds
    if min(started, state.row_age_seconds) > limit:
        usual = f" (usual: {interval:.0f} s)" if interval else ""
        since = (
            f"since this start, about {started:.0f} s ago"
            if is_resumed
            else f"for {state.row_age_seconds:.0f} s"
        )
        return "quiet", f"no row {since}{usual}: an evaluation, a save, or a hang"
    return "running", "no row since this start" if is_resumed else ""
