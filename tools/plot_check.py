#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One HTML page of a run of cluster_check, from its report.json.

    tools/plot_check.py runs/cluster_check

The page needs nothing beside it, no network and no script. This program needs nothing but Python.

Exit codes: 0 written, 64 a mistake in the call, 65 a report that cannot be used, 73 the page cannot be
written.
"""

import itertools
import json
import math
import os
import sys

from run_page import chart, page
from scaling.command_line import Parser, exit_code, writing
from scaling.numbers import DataError, read_text
from scaling.report import table, text, write_page

TITLES = {"health": "Health", "gpu": "One GPU", "collectives": "All ranks", "training": "Training"}
VERDICTS = {"fail": "FAIL", "unchecked": "no limit"}  # of a row; others are shown as they are
STYLE = (
    page.STYLE
    + """
td:last-child { white-space: normal; } figure { max-width: 44rem; }
.pass { color: #1a6b2d; } .fail { color: #b00020; font-weight: bold; }
.heat { display: block; margin: -.25rem -.45rem; padding: .25rem .45rem; }
"""
)


def value(number):
    return "n/a" if number is None else chart.shown(number)


def counted(number, noun):
    return f"{number} {noun}{'' if number == 1 else 's'}"


def marked(verdict):
    return f'<span class="{text(verdict)}">{text(VERDICTS.get(verdict, verdict))}</span>'


def place(report, rank):
    """As the table of cluster_check names it."""
    if rank < 0:
        return "all ranks"
    info = report["ranks"][rank]
    device = info["device"] + (f", {info['gpu']}" if info["gpu"] else "")
    return f"rank {rank} ({device}) on node {info['host']}"


def summary(report):
    ranks = report["ranks"]
    nodes = len({info["host"] for info in ranks})
    first = ranks[0]
    facts = (
        f"{counted(len(ranks), 'rank')} on {counted(nodes, 'node')}, {first['gpu'] or 'CPU'}, communicator "
        f"{first['backend']}, started by {first['launch']}. {report['started']} UTC, "
        f"{report['seconds']:.0f} s. Thresholds: {report['thresholds']}."
        + (" A quick run." if report["quick"] else "")
    )
    verdict = "pass" if report["passed"] else "fail"
    failures = "".join(f'<li class="fail">{text(failure)}</li>' for failure in report["failures"])
    return [
        f'<p class="{verdict}">{text(report["summary"])}.</p><p>{text(facts)}</p>',
        f"<ul>{failures}</ul>" if failures else "",
    ]


def checks(report):
    """A table for each group. One rank has one value."""
    is_alone = len(report["ranks"]) == 1
    result = []
    for group, lines in itertools.groupby(report["checks"], lambda line: line["group"]):
        head = ["check", *(["value"] if is_alone else ["lowest", "median", "highest"])]
        rows = []
        for line in lines:
            values = [line["lowest"]] if is_alone else [line["lowest"], line["median"], line["highest"]]
            rows.append(
                [text(line["name"]), *map(value, values), text(line["unit"]), text(line["threshold"])]
                + [marked(line["verdict"]), *([] if is_alone else [text(line["worst"])]), text(line["text"])]
            )
        texts = ["unit", "threshold", "verdict", *([] if is_alone else ["worst"]), "details"]
        columns = {0, *range(len(head), len(head) + len(texts))}
        result += [f"<h2>{text(TITLES.get(group, group))}</h2>", table(head + texts, rows, columns)]
    return result


def size_label(power):
    """10 -> 1 KiB."""
    return f"{1 << power % 10} {('B', 'KiB', 'MiB', 'GiB')[power // 10]}"


def bandwidths(points):
    """Bus bandwidth over the size, both axes logarithmic."""
    points = [point for point in points if point["busbw_gb_per_s"] > 0 and point["bytes"] > 0]
    sizes = sorted({point["bytes"] for point in points})
    if len(sizes) < 2:
        return ""
    rates = [math.log10(point["busbw_gb_per_s"]) for point in points]
    low = math.floor(min(rates))
    high = max(math.ceil(max(rates)), low + 1)
    x = chart.Axis(sizes[0], sizes[-1], chart.LEFT, chart.RIGHT, 10, log=True)
    y = chart.Axis(10.0**low, 10.0**high, chart.BOTTOM, chart.TOP, 7, log=True)
    powers = [power for power in range(2, 40, 4) if sizes[0] <= 1 << power <= sizes[-1]]
    x.ticks = [1 << power for power in powers]
    parts = chart.frame("bus bandwidth", x, y, [size_label(power) for power in powers], "size")
    keys = []
    for number, operation in enumerate(dict.fromkeys(point["operation"] for point in points)):
        of_it = [(p["bytes"], p["busbw_gb_per_s"]) for p in points if p["operation"] == operation]
        stroke, dash = chart.pen(number)
        parts += chart.lines(of_it, stroke, dash, x, y, 1) + chart.marks(of_it, stroke, x, y, operation)
        keys.append(chart.key(operation, *chart.pen(number)))
    caption = f"<figcaption><b>bus bandwidth [GB/s]</b> {''.join(keys)}</figcaption>"
    return f"<figure>{caption}{''.join(parts)}</svg></figure>"


def collectives(report):
    points = report["collectives"]
    if not points:
        return []
    rows = [
        [text(point["operation"]), f"{point['bytes']:,}"]
        + [value(point[column]) for column in ("microseconds", "algbw_gb_per_s", "busbw_gb_per_s")]
        for point in points
    ]
    head = ["operation", "bytes", "us", "algbw GB/s", "busbw GB/s"]
    return ["<h2>Collectives by size</h2>", bandwidths(points), table(head, rows, {0})]


def pairs(report):
    rates = report["pairs"]["gb_per_s"]
    if not rates:
        return []
    fastest = max(max(row) for row in rates)

    def cell(start, end):
        rate = rates[start][end]
        dark = 0.6 * (1 - rate / fastest) if fastest > 0 else 0
        red = f'<span class="heat" style="background:rgba(214,39,40,{dark:.2f})">{value(rate)}</span>'
        return "–" if start == end else red

    ranks = range(len(rates))
    return [
        "<h2>Send and receive between pairs</h2><p>GB/s from the row's rank to the column's, "
        f"{report['pairs']['bytes'] >> 20} MiB. Disjoint pairs send at the same time. Darker is slower.</p>",
        table(["", *ranks], [[start, *(cell(start, end) for end in ranks)] for start in ranks]),
    ]


def make(report):
    """The parts of the page."""
    ranks = [
        [rank, text(info["host"]), info["local_rank"], text(info["device"]), text(info["gpu"])]
        for rank, info in enumerate(report["ranks"])
    ]
    rows = [
        [text(f"{row['group']}.{row['name']}"), text(place(report, row["rank"])), value(row["value"])]
        + [text(row["unit"]), marked(row["verdict"]), text(row["text"])]
        for row in report["rows"]
    ]
    return [
        *summary(report),
        *checks(report),
        *collectives(report),
        *pairs(report),
        "<h2>Ranks</h2>",
        table(["rank", "node", "local rank", "device", "GPU"], ranks, {1, 3, 4}),
        f"<h2>Versions of rank 0</h2><pre>{text(report['versions'])}</pre>",
        f"<h2>All values</h2><details><summary>{counted(len(rows), 'row')}</summary>",
        table(["check", "place", "value", "unit", "verdict", "details"], rows, {0, 1, 3, 4, 5}),
        "</details>",
    ]


def main(arguments):
    parser = Parser(__doc__)
    parser.add_argument("folder", metavar="FOLDER", help="cluster_check's output=FOLDER")
    parser.add_argument("--output", metavar="FILE", help="the page (report.html in the folder)")
    options = parser.parse_args(arguments)
    path = os.path.join(options.folder, "report.json")
    content = read_text(path)
    try:
        parts = make(json.loads(content))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: not a report of this cluster_check ({type(error).__name__}: {error}); fix: run it again"
        ) from None
    output = options.output or os.path.join(options.folder, "report.html")
    with writing(output):
        write_page(output, "cluster_check", parts, STYLE)
    print(f"page: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
