# SPDX-License-Identifier: Apache-2.0
"""Which column belongs in which chart, decided by its name alone: users log columns of their own."""

import re
from dataclasses import dataclass, field

from .files import KNOWN_EPOCH_COLUMNS

SECTIONS = ("Curves", "Own metrics", "Rates", "Time of a step", "Resources")
LIBRARY_TABLES = ("steps", "evals", "epochs")
# Sums over intervals, which may differ in length: step_ms and power_w show the same per step and per second.
NOT_DRAWN = ("interval_seconds", "energy_j", "epoch_steps")
UNITS = {"_ms": "ms", "_gib": "GiB", "_j": "J", "_w": "W", "_seconds": "s", "_percent": "%"}
WORDS = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "exposed_comm": "exposed communication",
    "loader_wait": "data wait",
    "epoch": "time of an epoch",
    "gpu_utilisation": "GPU utilisation",
    "mfu": "MFU",
    "tflops_per_rank": "model FLOP rate",
}
RATE_UNITS = {"mfu": "of the peak", "tflops_per_rank": "TFLOP/s per rank"}
PREFIXES = ("train_", "eval_", "test_", "val_", "valid_", "peak_")  # of one quantity, which share a chart


def unit_of(column):
    """(the column's name without its unit, unit)."""
    stem, rate, of_rank = column.partition("_per_second")
    if rate and of_rank in ("", "_per_rank"):
        return stem, f"{stem}/s" + (" per rank" if of_rank else "")
    if column in RATE_UNITS:
        return column, RATE_UNITS[column]
    ending = next((ending for ending in UNITS if column.endswith(ending)), "")
    return column.removesuffix(ending), UNITS.get(ending, "")


def words(column):
    """exposed_comm_ms -> exposed communication."""
    stem, unit = unit_of(column)
    if stem in WORDS:
        return WORDS[stem]
    return "throughput" if "/s" in unit else stem.replace("_", " ")


@dataclass
class Panel:
    """A chart. `series` are (index of the run, label, name of the file without its ending, points)."""

    section: str
    title: str
    unit: str
    series: list = field(default_factory=list)

    def labels(self):
        return list(dict.fromkeys(label for _, label, _, _ in self.series))


def own_quantity(column):
    """What an own metric measures: loss for d_loss, g_loss and loss/d, accuracy for accuracy@5."""
    stem = re.sub(r"(?<=.)([@/].*|_\d+)$", "", column)
    return stem.rpartition("_")[2] or stem


def place(table, column):
    """(section, title, unit) of the column's chart."""
    unit = unit_of(column)[1]
    shared = next((column.removeprefix(prefix) for prefix in PREFIXES if column.startswith(prefix)), column)
    if "/s" in unit or column in RATE_UNITS:
        return "Rates", words(column), unit
    if unit == "ms":
        return "Time of a step", "step and its parts" if table == "steps" else f"times in {table}", unit
    if unit in ("J", "s"):  # a sum over a row's interval, which differs between files
        return "Resources", f"{words(column)} ({table})", unit
    if unit in ("GiB", "W") or column.startswith("gpu_"):
        return "Resources", words(shared), unit
    if table in LIBRARY_TABLES and column in KNOWN_EPOCH_COLUMNS:
        return "Curves", words(shared), unit
    return "Own metrics", own_quantity(shared), unit


def make_panels(runs):
    """By section, each in the order in which the files name its columns."""
    panels = {}
    for index, run in enumerate(runs):
        taken = set()
        for table, column, points in run.series:
            if column in NOT_DRAWN:
                continue
            where = place(table, column)
            label = words(column) + (f" ({table})" if column in taken else "")
            taken.add(column)
            panels.setdefault(where, Panel(*where)).series.append((index, label, table, points))
    for panel in panels.values():
        if panel.section == "Own metrics" and len(panel.labels()) == 1:
            panel.title = panel.labels()[0]
    return sorted(panels.values(), key=lambda panel: SECTIONS.index(panel.section))
