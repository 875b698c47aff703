# SPDX-License-Identifier: Apache-2.0
"""The numbers of a study. Every definition here is that of docs/performance.md, "Scaling studies";
nothing beyond Python's own library is needed."""

import csv
import io
import json
import math
import os
import re
import statistics
from dataclasses import dataclass

from .files import regular

# A run is bound by what its step waits for, where that is at least this share of the step.
BOUND_SHARE = 0.10

# Throughput columns of the metrics, and what one unit is called.
UNITS = {"tokens_per_second": "token", "images_per_second": "image", "samples_per_second": "sample"}


class DataError(Exception):
    """Files that cannot be used; exit code 65."""


# --- definitions -------------------------------------------------------------------------------------
def speed_up(base_ms, step_ms):
    """T_1 / T_N at the same global batch."""
    return base_ms / step_ms


def strong_efficiency(base_ms, ranks, step_ms, base_ranks=1):
    """T_1 / (N T_N); without a point of one GPU, T_1 is that of the smallest point times its GPUs."""
    return base_ms * base_ranks / (ranks * step_ms)


def weak_efficiency(base_rate, ranks, rate, base_ranks=1):
    """rate_N / (N rate_1); without a point of one GPU, rate_1 is a GPU's share at the smallest point."""
    return rate * base_ranks / (ranks * base_rate)


def bottleneck(step_ms, exposed_comm_ms, loader_wait_ms):
    """compute, communication or input: what at least a tenth of the step is spent waiting for, and of two the
    longer wait. What is unknown is not a wait."""
    waits = {"communication": exposed_comm_ms, "input": loader_wait_ms}
    waits = {name: ms for name, ms in waits.items() if ms is not None and ms >= BOUND_SHARE * step_ms}
    return max(waits, key=waits.get) if waits else "compute"


@dataclass
class Spread:
    """Median and extremes of a point's repeats."""

    median: float
    low: float
    high: float
    count: int

    def map(self, function):
        """Of a monotone function of the value; a falling one swaps the ends."""
        ends = sorted((function(self.low), function(self.high)))
        return Spread(function(self.median), ends[0], ends[1], self.count)


def spread(values):
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(statistics.median(known), min(known), max(known), len(known))


def percent(share, unit=" %"):
    """0.4 -> "40.0 %": every share that a tool prints, with one decimal. In a column whose head has the unit,
    `unit` is empty."""
    return f"{100 * share:.1f}{unit}"


# --- a run -------------------------------------------------------------------------------------------
@dataclass
class RunNumbers:
    name: str
    ranks: int
    repeat: int
    nodes: int
    unit: str
    rate: float  # of all ranks, units a second
    step_ms: float
    exposed_comm_ms: float | None
    loader_wait_ms: float | None
    joules_per_unit: float | None
    epoch_seconds: float | None
    memory_gib: float | None
    mfu: float | None  # share of the GPUs' peak
    gpu_utilisation_percent: float | None
    global_batch_size: float | None
    bottleneck: str
    precision: str
    bucket_cap_mb: str
    gpu_type: str
    job_id: str
    commit: str


FLOAT = re.compile(r"-?\d+(\.\d+)?e[+-]\d+")  # a number with an exponent; no commit has a sign in it
LARGEST_WHOLE = 1e15  # a whole number is written with an exponent from here on
LINE = ""  # of a row; no column is named so


def read_bytes(path):
    try:
        with open(path, "rb", opener=regular) as file:
            return file.read()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; fix: give the right to read the file, or remove it"
        ) from None


def decoded(path, data):
    """UTF-8 text of a file with these bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{1 + data.count(10, 0, error.start)}: not UTF-8 text: byte 0x{data[error.start]:02x}; "
            "fix: remove the damaged line"
        ) from None


def read_text(path):
    return decoded(path, read_bytes(path))


def read_optional(path):
    """Text with whatever bytes; empty where there is no file."""
    return read_bytes(path).decode("utf-8", "replace") if os.path.lexists(path) else ""


def csv_lines(path, text):
    """[(line, cells)] of a CSV file with this text."""
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        return [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not CSV: {error}") from None


def read_csv(path, columns):
    """Rows as dictionaries, with their LINE. A file that is missing or empty, a missing column: DataError
    that names it."""
    rows = csv_lines(path, read_text(path))
    if not rows or not rows[0][1]:
        raise DataError(f"{path}: the file is empty: the run wrote nothing")
    header = rows[0][1]
    for column in columns:
        if column not in header:
            raise DataError(f"{path}: the column {column} is missing; the file has {', '.join(header)}")
    table = []
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise DataError(f"{path}:{line}: {len(row)} cells below {len(header)} columns")
        table.append({**dict(zip(header, row)), LINE: line})
    if not table:
        raise DataError(f"{path}: there are no rows below the header")
    return table


def number(path, row, column):
    """The cell as a number; None where it is empty."""
    text = row[column]
    if text == "":
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise DataError(f"{path}:{row[LINE]}: {column} is {text!r}, not a number")
    return value


def positive(path, row, column):
    """A cell that must hold a number above 0."""
    value = number(path, row, column)
    if value is None or value <= 0:
        raise DataError(f"{path}:{row[LINE]}: {column} is {row[column]!r}, not a number above 0")
    return value


def unit_column(path, header):
    for column in UNITS:
        if column in header:
            return column
    raise DataError(f"{path}: there is no throughput column; one of {', '.join(UNITS)} is needed")


def measured_intervals(path, warmup_steps):
    """The logging intervals that lie behind the warm-up, and the throughput column. An interval ends at
    its row's step and begins at or behind the row before."""
    rows = read_csv(
        path, ["step", "step_ms", "exposed_comm_ms", "loader_wait_ms", "interval_seconds", "energy_j"]
    )
    column = unit_column(path, rows[0])
    intervals, before = [], 0
    for row in rows:
        if before >= warmup_steps and row["step_ms"] != "" and row[column] != "":
            intervals.append(row)
        before = positive(path, row, "step")
    if not intervals:
        raise DataError(
            f"{path}: no logging interval follows the {warmup_steps} steps of warm-up; fix: more steps, "
            "or a smaller log_every"
        )
    return intervals, column


def _mean(pairs):
    """Of (value, weight); None where a value is unknown."""
    pairs = list(pairs)
    if any(value is None for value, _ in pairs):
        return None
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


EPOCH_COLUMNS = (
    "ranks nodes repeat precision global_batch_size bucket_cap_mb gpu_type gpu_utilisation_percent "
    "steps_per_epoch job_id commit"
).split()


def constant_text(value):
    """A constant's text, which is the same from a CSV and a JSON file: a whole number has no .0 and no
    exponent, and no digit is rounded. Empty for null."""
    if value is None:
        return ""
    if isinstance(value, str) and FLOAT.fullmatch(value):
        value = float(value)
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < LARGEST_WHOLE
    return f"{value:.0f}" if is_whole else str(value)


def is_newer(record, row):
    """Whether the start that wrote this run.json began after this row was written. False if one of the two
    times is unknown."""
    try:
        return float(record["started"]) > float(row["time"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return False


def read_constants(folder, name):
    """(file, its texts by EPOCH_COLUMNS): the last epoch's row, or run.json if its start is later or the run
    has no epochs. The two are not mixed: the row may be of other ranks."""
    path = os.path.join(folder, name, "epochs.csv")
    run_path = os.path.join(folder, name, "run.json")
    row, record = None, None
    if os.path.lexists(path) or not os.path.lexists(run_path):
        row = read_csv(path, EPOCH_COLUMNS)[-1]
    if os.path.lexists(run_path):
        try:
            record = json.loads(read_text(run_path))
        except ValueError:
            pass
    if row is not None and not (isinstance(record, dict) and is_newer(record, row)):
        return path, row
    if not isinstance(record, dict):
        raise DataError(f"{run_path}: not a JSON object; fix: repeat the run")
    texts = {column: constant_text(record.get(column)) for column in EPOCH_COLUMNS}
    return run_path, {LINE: 1, **texts}


def read_run(folder, name, warmup_steps):
    """A finished run's numbers, without its warm-up."""
    steps_path = os.path.join(folder, name, "steps.csv")
    intervals, column = measured_intervals(steps_path, warmup_steps)
    epochs_path, last = read_constants(folder, name)

    def values(column):
        return [number(steps_path, row, column) for row in intervals]

    seconds = [positive(steps_path, row, "interval_seconds") for row in intervals]
    steps = [1000 * s / positive(steps_path, row, "step_ms") for s, row in zip(seconds, intervals)]
    step_ms = 1000 * sum(seconds) / sum(steps)
    rate = _mean(zip(values(column), seconds))
    energy = values("energy_j")
    exposed = _mean((ms, 1) for ms in values("exposed_comm_ms"))  # of each logged step alone
    wait = _mean(zip(values("loader_wait_ms"), steps))
    shares = [number(steps_path, row, "mfu") if "mfu" in row else None for row in intervals]
    memory = [number(steps_path, row, "peak_memory_gib") for row in intervals if "peak_memory_gib" in row]
    epoch_steps = number(epochs_path, last, "steps_per_epoch")
    ranks = int(positive(epochs_path, last, "ranks"))
    if ranks < 1 or rate <= 0:
        raise DataError(
            f"{os.path.join(folder, name)}: {ranks} rank(s) at {rate} per second is not a measurement"
        )
    return RunNumbers(
        name=name,
        ranks=ranks,
        repeat=int(number(epochs_path, last, "repeat") or 1),
        nodes=int(number(epochs_path, last, "nodes") or 1),
        unit=UNITS[column],
        rate=rate,
        step_ms=step_ms,
        exposed_comm_ms=exposed,
        loader_wait_ms=wait,
        joules_per_unit=None if any(e is None for e in energy) else sum(energy) / (rate * sum(seconds)),
        epoch_seconds=epoch_steps * step_ms / 1000 if epoch_steps else None,
        memory_gib=max((m for m in memory if m is not None), default=None),
        mfu=_mean(zip(shares, seconds)),
        gpu_utilisation_percent=number(epochs_path, last, "gpu_utilisation_percent"),
        global_batch_size=number(epochs_path, last, "global_batch_size"),
        bottleneck=bottleneck(step_ms, exposed, wait),
        precision=last["precision"],
        bucket_cap_mb=last["bucket_cap_mb"],
        gpu_type=last["gpu_type"],
        job_id=last["job_id"],
        commit=last["commit"],
    )


# --- a study -----------------------------------------------------------------------------------------
@dataclass
class Point:
    """All repeats of one number of ranks, and in sensitivity studies of one combination of settings."""

    ranks: int
    varied: dict
    runs: list
    rate: Spread = None
    step_ms: Spread = None
    exposed_comm_ms: Spread = None
    exposed_percent: Spread = None
    loader_wait_ms: Spread = None
    joules_per_unit: Spread = None
    epoch_seconds: Spread = None
    memory_gib: Spread = None
    mfu: Spread = None
    speed_up: Spread = None
    efficiency: Spread = None

    @property
    def bottleneck(self):
        """The class of most repeats."""
        return statistics.mode(run.bottleneck for run in self.runs)


def check_kind(path, kind, runs):
    """Whether the rows hold constant what the kind of the study says: strong the global batch, weak a rank's
    share of it. Otherwise the efficiencies would be other numbers than their names say."""
    known = [run for run in runs if run.global_batch_size]
    if kind == "sensitivity" or not known:
        return
    held = "global_batch_size" if kind == "strong" else "global_batch_size / ranks"
    base = min(known, key=lambda run: run.ranks)
    for run in known:
        same = run.global_batch_size == base.global_batch_size
        if kind == "weak":  # without a division, which rounds
            same = run.global_batch_size * base.ranks == base.global_batch_size * run.ranks
        if not same:
            raise DataError(
                f"{path}: the kind of the study is {kind}, which holds {held} constant, but {base.name} has "
                f"global_batch_size {base.global_batch_size:g} of {base.ranks} ranks and {run.name} "
                f"{run.global_batch_size:g} of {run.ranks}; fix: give the other kind, or leave out the runs "
                "of another batch"
            )


def make_points(runs, kind, varied=None):
    """Points in ascending order of ranks. `varied`: run name -> settings."""
    varied = varied or {}
    groups = {}
    for run in runs:
        settings = varied.get(run.name, {})
        groups.setdefault((run.ranks, tuple(settings.items())), []).append(run)
    points = []
    for (ranks, settings), members in sorted(groups.items(), key=lambda item: item[0][0]):
        point = Point(ranks, dict(settings), members)
        for name in (
            "rate",
            "step_ms",
            "exposed_comm_ms",
            "loader_wait_ms",
            "joules_per_unit",
            "epoch_seconds",
            "memory_gib",
            "mfu",
        ):
            setattr(point, name, spread([getattr(run, name) for run in members]))
        point.exposed_percent = spread(
            [
                None if run.exposed_comm_ms is None else 100 * run.exposed_comm_ms / run.step_ms
                for run in members
            ]
        )
        points.append(point)
    if points and kind != "sensitivity":
        base = points[0]
        for point in points:
            _compare(point, base, kind)
    return points


def _compare(point, base, kind):
    """Against the smallest point's median: the spread is the point's own."""
    if kind == "strong":
        point.speed_up = point.step_ms.map(lambda ms: speed_up(base.step_ms.median, ms) * base.ranks)
        point.efficiency = point.step_ms.map(
            lambda ms: strong_efficiency(base.step_ms.median, point.ranks, ms, base.ranks)
        )
    else:
        point.speed_up = point.rate.map(lambda rate: rate / base.rate.median * base.ranks)
        point.efficiency = point.rate.map(
            lambda rate: weak_efficiency(base.rate.median, point.ranks, rate, base.ranks)
        )
