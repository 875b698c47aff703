# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: every CSV and JSONL file that counts steps or epochs, the settings, and what describes
the run. Columns are taken from the files. A run that still writes or was killed is read as far as its files
go."""

import bisect
import itertools
import json
import math
import os
import re

from scaling.numbers import DataError, constant_text, csv_lines, decoded, is_newer, read_bytes, read_text

SETTING = re.compile(r"([* ]) (\S+) *(.*)")  # of settings.txt; a star marks what differs from the default
# Of the numbers that are drawn: those of axes must not underflow or overflow.
SMALLEST, LARGEST = (1e-300, 1e300)
LATEST = 4e9  # a time in seconds, in the year 2096
# Of rows of steps and evaluations; the others are the program's own metrics.
KNOWN_COLUMNS = set(
    "step epoch loss accuracy lr grad_norm step_ms exposed_comm_ms loader_wait_ms peak_memory_gib "
    "interval_seconds energy_j tflops_per_rank mfu time eval_loss eval_accuracy".split()
)
# The same of rows of epochs.
KNOWN_EPOCH_COLUMNS = KNOWN_COLUMNS | set(
    "job_id commit gpu_type nodes gpus ranks precision global_batch_size batch_size_per_gpu bucket_cap_mb "
    "repeat steps_per_epoch epoch_steps train_loss train_accuracy test_loss test_accuracy epoch_seconds "
    "gpu_utilisation_percent power_w memory_gib".split()
)
FIX = "name the folder of a run, metrics.dir/<run>"


def number(cell):
    """A cell as a number: NaN where it is not finite or too large, 0 where it is too small; None where it is
    empty or text."""
    if isinstance(cell, bool):
        return None
    try:
        value = float(cell)
    except (TypeError, ValueError):
        return None
    except OverflowError:  # an integer of more than 308 digits
        return math.nan
    if abs(value) < SMALLEST:
        return 0.0
    return value if abs(value) <= LARGEST else math.nan


def json_row(line):
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_rows(path):
    """(columns, rows as {column: cell}, numbers of the lines that cannot be read)."""
    data = read_bytes(path)
    end = data.rfind(b"\n") + 1  # every writer ends its lines: the rest is cut, maybe inside a character
    text = decoded(path, data[:end])
    if path.endswith(".csv"):
        lines = [line for line in csv_lines(path, text) if line[1]]
        columns = lines[0][1] if lines else []
        lines = [
            (line, dict(zip(columns, cells)) if len(cells) == len(columns) else None)
            for line, cells in lines[1:]
        ]
    else:
        lines = [(line, json_row(content)) for line, content in enumerate(text.split("\n")[:-1], 1)]
        columns = list(dict.fromkeys(itertools.chain.from_iterable(row or () for _, row in lines)))
    bad = [line for line, row in lines if row is None] + ([text.count("\n") + 1] if data[end:] else [])
    return columns, [row for _, row in lines if row is not None], bad


def numbers(row):
    """The cells that are numbers."""
    return {column: value for column, cell in row.items() if (value := number(cell)) is not None}


def add_row(rows, x, row):
    """Rows ascend by `x`, and one without it does not count. Where a resumed run went back, its later rows
    count."""
    if not math.isfinite(row.get(x, math.nan)):
        return
    if not 0 <= row.get("time", 0) <= LATEST:  # a user's own file may have milliseconds
        del row["time"]
    while rows and rows[-1][x] > row[x]:
        rows.pop()
    if rows and rows[-1][x] == row[x]:
        rows[-1].update(row)
    else:
        rows.append(row)


def constants_of(record):
    """The texts of run.json, which has a run's constants from its start on. Numbers have the texts that they
    have in a row of epochs. None or damaged: empty."""
    facts = {}
    for key, value in (record or {}).items():
        if isinstance(value, str) and value:
            facts[key] = value
        elif number(value) is not None and key != "started":
            facts[key] = constant_text(value)
    return facts


class Table:
    """The rows of one file by ascending step (or epoch)."""

    def __init__(self, path):
        self.file = os.path.basename(path)
        self.name = os.path.splitext(self.file)[0]
        columns, rows, self.bad_lines = read_rows(path)
        self.x = next((column for column in ("step", "epoch") if column in columns), None)
        # The columns in front of it describe the run.
        first = columns.index("epoch") if self.x == "epoch" and rows else 0
        self.facts = {
            column: constant_text(rows[-1][column])
            for column in columns[:first]
            if rows[-1].get(column) not in (None, "")
        }
        self.last_row = rows[-1] if rows else {}
        self.rows = []
        for row in rows:
            add_row(self.rows, self.x, numbers(row))
        for row in self.rows:
            seconds = row.get("interval_seconds", 0)
            if "energy_j" in row and seconds > 0:
                row.setdefault("power_w", row["energy_j"] / seconds)
        used = set().union(*self.rows) - {"step", "epoch", "time"}
        names = dict.fromkeys([*columns[first:], "power_w"])
        self.columns = [column for column in names if column in used]

    def notes(self):
        result = []
        if self.bad_lines:
            listed = ", ".join(map(str, self.bad_lines))
            result.append(f"{self.file}: lines that cannot be read are left out: {listed}")
        for column in self.columns:
            bad = [row[self.x] for row in self.rows if not math.isfinite(row.get(column, 0))]
            if bad:
                result.append(
                    f"{self.file}: {column} is not finite in {len(bad)} of {len(self.rows)} rows, first at "
                    f"{self.x} {bad[0]:g}"
                )
        return result


class Run:
    """All that a page shows of one run."""

    def __init__(self, path):
        self.path = os.path.normpath(path)
        self.label = os.path.basename(os.path.abspath(path))
        self.tables = self._read_tables()
        self.settings, self.changed = self._read_settings()
        record = json_row(self.text("run.json")) or {}
        constants = constants_of(record)
        self.facts, self.notes, rows = dict(constants), [], {"step": [], "epoch": []}
        for table in self.tables:
            # An earlier start may have written the last epoch, for example on fewer ranks.
            newer = constants if is_newer(record, table.last_row) else {}
            self.facts.update({**table.facts, **newer})
            self.notes += table.notes()
            rows[table.x] += table.rows
        self.x = "step" if rows["step"] else "epoch"
        self.last = max(row[self.x] for row in rows[self.x])
        self.times = sorted(row["time"] for row in rows["step"] + rows["epoch"] if "time" in row)
        self._clock = sorted((row["time"], row["step"]) for row in rows["step"] if "time" in row)
        self.series = []  # (file without ending, column, its finite values as [(step, value)])
        for table in self.tables:
            for column in table.columns:
                points = self._points(table, column)
                if points:
                    self.series.append((table.name, column, points))

    def text(self, name):
        path = os.path.join(self.path, name)
        return read_text(path) if os.path.lexists(path) else ""

    def _read_settings(self):
        """{setting: its text}, and the settings that differ from their defaults."""
        settings, changed = {}, []
        for line in self.text("settings.txt").splitlines():
            if match := SETTING.fullmatch(line):
                star, key, value = match.groups()
                settings[key] = value.strip() or "(empty)"
                if star == "*":
                    changed.append(key)
        return settings, changed

    def _read_tables(self):
        if not os.path.isdir(self.path) or not os.access(self.path, os.R_OK | os.X_OK):
            raise DataError(f"{self.path}: there is no such folder, or no right to read it; fix: {FIX}")
        tables = {}
        names = sorted(os.listdir(self.path), key=lambda name: (not name.startswith("steps."), name))
        for name in names:
            if name.endswith((".csv", ".jsonl")):
                table = Table(os.path.join(self.path, name))
                known = tables.get(table.name)
                # Of equals JSONL, the later name.
                if table.x and (known is None or len(table.rows) >= len(known.rows)):
                    tables[table.name] = table
        if not tables and "settings.txt" not in names:
            inside = [name for name in names if os.path.exists(os.path.join(self.path, name, "settings.txt"))]
            raise DataError(
                f"{self.path}: not the folder of a run: no CSV or JSONL file in it has a column step or "
                f"epoch; fix: {'name a run in it: ' + ', '.join(inside[-5:]) if inside else FIX}"
            )
        if not any(table.rows for table in tables.values()):
            raise DataError(
                f"{self.path}: the run has logged nothing yet; fix: wait for its first logging step "
                "(metrics.log_every)"
            )
        return list(tables.values())

    def _points(self, table, column):
        return [
            (self.position(table, row), row[column])
            for row in table.rows
            if math.isfinite(row.get(column, math.nan))
        ]

    def position(self, table, row):
        """The step; an epoch lies at its end."""
        if table.x == self.x:
            return row[table.x]
        if row.get("steps_per_epoch", 0) > 0:
            return min((row["epoch"] + 1) * row["steps_per_epoch"], self.last)
        known = bisect.bisect_right(self._clock, (row.get("time", math.inf), math.inf))
        return self._clock[known - 1][1] if known else self.last
