# SPDX-License-Identifier: Apache-2.0
"""The figures of studies: PNG and SVG, in black, grey and one blue, readable without colour."""

import collections
import io
import math
import os
import textwrap

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from .files import replace_file
from .numbers import percent
from .report import FONT

SIZE = 9  # points of all text but the headline; SVG figures have this size in the report
WIDTH, HEIGHT = 3.75, 3.1  # inches: three of them side by side in the report
CHARACTER, LINE = 0.068, 0.16  # inches
INK, GREY, BLUE = "#111111", "#8a8a8a", "#1f4e8c"
IDEAL = {"color": GREY, "linestyle": "--", "linewidth": 1.4, "label": "ideal"}
plt.rcParams.update(
    {
        "figure.figsize": (WIDTH, HEIGHT),
        "savefig.dpi": 250,
        "font.size": SIZE,
        "font.sans-serif": ["DejaVu Sans"],
        "axes.labelsize": SIZE,
        "axes.titlesize": SIZE,
        "xtick.labelsize": SIZE,
        "ytick.labelsize": SIZE,
        "legend.fontsize": SIZE,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.7,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "svg.fonttype": "none",  # the reader's font, as in the page
        "svg.hashsalt": "libddp",
    }
)


def number_text(value, _=None):
    """1234567 -> 1.23M; keeps three digits."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}" if abs(value) >= 0.01 or value == 0 else "<0.01"


def plain(text):
    """A user's text, in which a dollar begins no formula."""
    return text.replace("$", r"\$")


def save(figure, axes, study, folder, name, headline, columns=2):
    """Headline, what was measured, and the legend stand above the axes, where they hide nothing."""
    handles, labels = axes.get_legend_handles_labels()
    height = figure.get_figheight()
    subtitle = f"{study.subtitle}; {repeats_text(study.points)}"
    words = textwrap.wrap(subtitle, int((figure.get_figwidth() - 0.1) / CHARACTER))
    legend_top = 0.32 + LINE * len(words)  # inches
    top = legend_top + 0.05 + 0.19 * math.ceil(len(handles) / columns)
    figure.tight_layout(rect=(0, 0, 1, 1 - top / height))
    left = 0.05 / figure.get_figwidth()
    figure.text(left, 1 - 0.05 / height, plain(headline), ha="left", va="top", fontsize=11, fontweight="bold")
    figure.text(
        left,
        1 - 0.27 / height,
        plain("\n".join(words)),
        ha="left",
        va="top",
        color="#444444",
        linespacing=1.2,
    )
    if handles:
        figure.legend(
            handles,
            labels,
            loc="upper left",
            bbox_to_anchor=(left, 1 - legend_top / height),
            ncols=columns,
            borderpad=0,
            borderaxespad=0,
            handlelength=1.8,
            columnspacing=1.2,
            labelspacing=0.3,
        )
    for ending in ("png", "svg"):
        drawn = io.BytesIO()
        figure.savefig(drawn, format=ending, metadata={"Date": None} if ending == "svg" else None)
        data = drawn.getvalue()
        if ending == "svg":
            data = data.replace(b"'DejaVu Sans', sans-serif", FONT.encode())
        replace_file(os.path.join(folder, f"{study.stem}_{name}.{ending}"), data)
    plt.close(figure)
    return f"{study.stem}_{name}"


def ranks_axis(axes, ranks, device):
    """Logarithmic, with a tick at every measured number and no other."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ranks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(min(ranks) / 1.3, max(ranks) * 1.32)
    axes.set_xlabel("GPUs" if device == "cuda" else "CPU ranks")


def error_line(axes, points, name, label, **style):
    """Medians with bars from the lowest to the highest repeat."""
    known = [(point.ranks, getattr(point, name)) for point in points if getattr(point, name) is not None]
    x = [ranks for ranks, _ in known]
    y = [value.median for _, value in known]
    bars = [
        [value.median - value.low for _, value in known],
        [value.high - value.median for _, value in known],
    ]
    style = {"color": BLUE, "marker": "o", "markersize": 4.5, "capsize": 3, **style}
    axes.errorbar(x, y, yerr=bars, label=label, **style)
    return known


def annotate(axes, x, y, label, side):
    """Beside a point: left of a line that rises, below one that is nearly level."""
    offset, align = {"left": ((-6, 5), "right"), "below": ((0, -15), "center")}[side]
    axes.annotate(label, (x, y), textcoords="offset points", xytext=offset, ha=align, color=INK)


def repeats_text(points):
    counts = sorted({point.rate.count for point in points})
    if counts == [1]:
        return "one run a point"
    numbers = "–".join(map(str, sorted({counts[0], counts[-1]})))
    return f"medians of {numbers} runs, bars from lowest to highest"


def beside_ideal(study, folder, points, value, ideal, name, headline, label):
    """Medians of `value`, and the line that perfect scaling would give, on logarithmic axes."""
    ranks = [point.ranks for point in points]
    figure, axes = plt.subplots()
    axes.plot(ranks, ideal, **IDEAL)
    error_line(axes, points, value, "measured")
    ends = []
    for spread in (getattr(point, value) for point in points):
        ends += [spread.low, spread.high]
    log_values(axes, ideal + ends)
    ranks_axis(axes, ranks, study.device)
    axes.set_ylabel(label)
    return save(figure, axes, study, folder, name, headline)


def throughput(study, folder):
    points, base = study.points, study.points[0]
    ideal = [base.rate.median * point.ranks / base.ranks for point in points]
    return beside_ideal(
        study, folder, points, "rate", ideal, "throughput", "Throughput", f"throughput [{study.unit}s/s]"
    )


def log_values(axes, values):
    """A logarithmic y axis whose few ticks are round numbers in plain writing."""
    low, high = min(values), max(values)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.25, high * 1.25)
    for steps in ((1, 10), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        ticks = {step * 10.0**power for power in range(-12, 13) for step in steps}
        ticks = sorted(tick for tick in ticks if low / 1.25 <= tick <= high * 1.25)
        if len(ticks) >= 4:
            break
    else:  # less than an octave or two: equal steps
        ticks = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]).tick_values(low / 1.25, high * 1.25)
        ticks = [tick for tick in ticks if low / 1.25 <= tick <= high * 1.25]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(number_text))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def speed_up(study, folder):
    unit = "GPU" if study.device == "cuda" else "rank"
    return beside_ideal(
        study,
        folder,
        study.points,
        "speed_up",
        [point.ranks for point in study.points],
        "speed_up",
        "Speed-up",
        f"speed-up [× one {unit}]",
    )


def efficiency(study, folder):
    points, ranks = study.points, [point.ranks for point in study.points]
    figure, axes = plt.subplots()
    axes.axhline(100, **IDEAL)
    shares = [Percent(point.ranks, point.efficiency.map(lambda value: 100 * value)) for point in points]
    error_line(axes, shares, "value", "measured")
    for point in shares:
        annotate(
            axes,
            point.ranks,
            point.value.low,
            percent(point.value.median / 100, ""),
            side="below" if point.value.low > 15 else "left",
        )
    axes.set_ylim(0, max(112, 1.12 * max(point.value.high for point in shares)))
    ranks_axis(axes, ranks, study.device)
    axes.set_ylabel(f"{study.kind} efficiency [%]")
    return save(figure, axes, study, folder, "efficiency", f"{study.kind.capitalize()} efficiency")


class Percent:
    """A point with one other value."""

    def __init__(self, ranks, value):
        self.ranks, self.value, self.varied = ranks, value, {}


def epoch_time(study, folder):
    points = [point for point in study.points if point.epoch_seconds]
    if not points:
        return None
    base = points[0]
    ideal = [base.epoch_seconds.median * base.ranks / point.ranks for point in points]
    return beside_ideal(
        study, folder, points, "epoch_seconds", ideal, "epoch_time", "Time per epoch", "time per epoch [s]"
    )


def waits(study, folder):
    """Exposed communication and loader wait as shares of the step."""
    points = [point for point in study.points if point.exposed_comm_ms]
    if not points:
        return None
    ranks = [point.ranks for point in points]
    figure, axes = plt.subplots()
    shares = [Percent(point.ranks, point.exposed_percent) for point in points]
    error_line(axes, shares, "value", "exposed communication")
    for point, share in zip(points, shares):
        annotate(
            axes,
            point.ranks,
            share.value.high,
            f"{number_text(point.exposed_comm_ms.median)} ms",
            side="left",
        )
    loader = [
        Percent(point.ranks, point.loader_wait_ms.map(lambda ms, t=point.step_ms.median: 100 * ms / t))
        for point in points
        if point.loader_wait_ms
    ]
    if loader:
        error_line(
            axes,
            loader,
            "value",
            "wait for the loader",
            color=INK,
            marker="s",
            linestyle=":",
            markerfacecolor="white",
        )
    top = max([share.value.high for share in shares + loader] + [10])
    axes.axhline(10, color=GREY, linestyle="--", linewidth=1.2, label="bound by it from here")
    axes.set_ylim(0, 1.12 * top)
    ranks_axis(axes, ranks, study.device)
    axes.set_ylabel("share of the step [%]")
    return save(figure, axes, study, folder, "exposed_communication", "Exposed communication", columns=1)


def energy(study, folder):
    points = [point for point in study.points if point.joules_per_unit]
    if not points:
        return None
    ranks = [point.ranks for point in points]
    figure, axes = plt.subplots()
    error_line(axes, points, "joules_per_unit", "measured")
    axes.axhline(points[0].joules_per_unit.median, **IDEAL)
    axes.set_ylim(0, 1.25 * max(point.joules_per_unit.high for point in points))
    ranks_axis(axes, ranks, study.device)
    axes.set_ylabel(f"GPU energy [J/{study.unit}]")
    return save(figure, axes, study, folder, "energy", "Energy")


def sensitivity(study, folder):
    """A panel for each number of ranks: throughput of every combination, best on top."""
    counts = sorted({point.ranks for point in study.points})
    rows = max(collections.Counter(point.ranks for point in study.points).values())
    label = max(len(varied_text(point.varied)) for point in study.points) * CHARACTER
    figure, panels = plt.subplots(
        1, len(counts), figsize=(len(counts) * (label + 2.6), 1.7 + 0.24 * rows), squeeze=False
    )
    for axes, n in zip(panels[0], counts):
        points = sorted((p for p in study.points if p.ranks == n), key=lambda p: p.rate.median)
        y = range(len(points))
        bars = [[p.rate.median - p.rate.low for p in points], [p.rate.high - p.rate.median for p in points]]
        axes.errorbar(
            [p.rate.median for p in points],
            y,
            xerr=bars,
            color=BLUE,
            marker="o",
            markersize=5,
            capsize=3,
            linestyle="none",
            linewidth=1.4,
        )
        axes.set_yticks(list(y), [plain(varied_text(p.varied)) for p in points])
        axes.set_ylim(-0.7, len(points) - 0.3)
        axes.set_xlim(0, 1.08 * max(p.rate.high for p in points))
        axes.xaxis.set_major_formatter(FuncFormatter(number_text))
        axes.set_xlabel(f"throughput [{study.unit}s/s]")
        axes.set_title(point_label(Percent(n, None), study.device), loc="right")
    return save(figure, panels[0][0], study, folder, "sensitivity", "Sensitivity")


def before_after(before, after, pairs, folder):
    """Throughput of two studies at the points both have, and how much the second is faster."""
    figure, axes = plt.subplots(figsize=(max(WIDTH, 0.8 + 1.0 * len(pairs)), HEIGHT + 0.6 * bool(after.vary)))
    width = 0.38
    for shift, study, index, style in (
        (-width / 2, before, 0, {"color": "#c9c9c9", "hatch": "//"}),
        (width / 2, after, 1, {"color": BLUE}),
    ):
        points = [pair[index] for pair in pairs]
        bars = [[p.rate.median - p.rate.low for p in points], [p.rate.high - p.rate.median for p in points]]
        axes.bar(
            [i + shift for i in range(len(points))],
            [p.rate.median for p in points],
            width,
            yerr=bars,
            capsize=4,
            edgecolor=INK,
            linewidth=0.7,
            error_kw={"linewidth": 1.2},
            label=plain(study.label),
            **style,
        )
    top = max(max(old.rate.high, new.rate.high) for old, new in pairs)
    for i, (old, new) in enumerate(pairs):
        axes.annotate(
            f"×{new.rate.median / old.rate.median:.2f}",
            (i, max(old.rate.high, new.rate.high)),
            ha="center",
            textcoords="offset points",
            xytext=(0, 6),
        )
    axes.set_ylim(0, 1.15 * top)
    axes.set_xticks(range(len(pairs)), [point_label(new, after.device) for _, new in pairs])
    axes.yaxis.set_major_formatter(FuncFormatter(number_text))
    axes.set_ylabel(f"throughput [{after.unit}s/s]")
    axes.grid(axis="x", visible=False)
    return save(figure, axes, after, folder, "before_after", "Before and after", columns=1)


def point_label(point, device):
    label = f"{point.ranks} {'GPU' if device == 'cuda' else 'rank'}{'s' if point.ranks > 1 else ''}"
    return "\n".join([label, *plain(varied_text(point.varied)).split(", ")]) if point.varied else label


def varied_text(varied):
    """{"ddp.bucket_cap_mb": "25", …} -> "bucket_cap_mb 25, …"."""
    return ", ".join(f"{key.split('.')[-1]} {value}" for key, value in varied.items())


def draw(study, folder):
    """All figures of a study; the names of those drawn."""
    drawn = (
        [sensitivity]
        if study.kind == "sensitivity"
        else [throughput, efficiency, speed_up, epoch_time, waits, energy]
    )
    names = [figure(study, folder) for figure in drawn]
    return [name for name in names if name]
