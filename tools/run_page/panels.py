# SPDX-License-Identifier: Apache-2.0
"""Which column belongs in which chart, decided by its name alone: users log columns of their own."""

from dataclasses import dataclass, field

SECTIONS = ("Curves", "Rates", "Time of a step", "Resources")
UNITS = {"_ms": "ms", "_gib": "GiB", "_j": "J", "_w": "W", "_seconds": "s", "_percent": "%"}
WORDS = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "exposed_comm": "exposed communication",
    "loader_wait": "data wait",
    "interval": "time of a logging interval",
    "epoch": "time of an epoch",
    "gpu_utilisation": "GPU utilisation",
}
PREFIXES = ("train_", "eval_", "test_", "val_", "valid_", "peak_")  # of one quantity, which share a chart


def unit_of(column):
    """(the column's name without its unit, unit)."""
    stem, rate, of_rank = column.partition("_per_second")
    if rate and of_rank in ("", "_per_rank"):
        return stem, f"{stem}/s" + (" per rank" if of_rank else "")
    ending = next((ending for ending in UNITS if column.endswith(ending)), "")
    return column.removesuffix(ending), UNITS.get(ending, "")


def words(column):
    """exposed_comm_ms -> exposed communication."""
    stem, unit = unit_of(column)
    return "throughput" if "/s" in unit else WORDS.get(stem, stem.replace("_", " "))


@dataclass
class Panel:
    """A chart. `series` are (index of the run, label, name of the file without its ending, points)."""

    section: str
    title: str
    unit: str
    series: list = field(default_factory=list)

    def labels(self):
        return list(dict.fromkeys(label for _, label, _, _ in self.series))


def place(table, column):
    """(section, title, unit) of the column's chart."""
    unit = unit_of(column)[1]
    shared = next((column.removeprefix(prefix) for prefix in PREFIXES if column.startswith(prefix)), column)
    if "/s" in unit:
        return "Rates", words(column), unit
    if unit == "ms":
        return "Time of a step", "step and its parts" if table == "steps" else f"times in {table}", unit
    if unit in ("J", "s"):  # a sum over a row's interval, which differs between files
        return "Resources", f"{words(column)} ({table})", unit
    return "Resources" if unit in ("GiB", "W") or column.startswith("gpu_") else "Curves", words(shared), unit


def make_panels(runs):
    """By section, each in the order in which the files name its columns."""
    panels = {}
    for index, run in enumerate(runs):
        taken = set()
        for table, column, points in run.series:
            where = place(table, column)
            label = words(column) + (f" ({table})" if column in taken else "")
            taken.add(column)
            panels.setdefault(where, Panel(*where)).series.append((index, label, table, points))
    return sorted(panels.values(), key=lambda panel: SECTIONS.index(panel.section))
