# SPDX-License-Identifier: Apache-2.0
"""The page of one or several runs: HTML with its charts as SVG. It has no script and loads nothing."""

import datetime
import itertools
import statistics

from scaling.report import table, text, value_text

from .chart import draw, pen, run_keys, shown
from .panels import make_panels, unit_of, words

STYLE = """
html { background: #fff; color-scheme: light; } figure { margin: 0; }
figure > svg { width: 100%; height: auto; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(30rem, 100%), 1fr));
  gap: 1.4rem 1rem; align-items: end; }
.charts > * { min-width: 0; }
figcaption { color: #111; font-size: 13px; padding-left: 3.3rem; }
figcaption b { margin-right: .8rem; font-size: 14px; }
svg text { font-size: 12px; fill: #333; } .grid { stroke: #e3e3e3; } .axis { stroke: #777; fill: none; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.key { display: inline-block; margin-right: .9rem; }
span svg, td svg { vertical-align: middle; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 6rem; }
"""


def of_runs(head, runs, rows):
    """A table of texts with one column a run."""
    rows = [[text(name), *map(text, cells)] for name, cells in rows]
    return (
        table([head, *run_keys(runs)], rows, text_columns=set(range(len(runs) + 1)))
        if rows
        else "<p>None.</p>"
    )


def chosen(runs, keys_of, differ=False):
    """[(key, value of each run)] of settings and facts."""
    names = dict.fromkeys(itertools.chain.from_iterable(keys_of(run) for run in runs))
    known = [{**run.facts, **run.settings} for run in runs]
    rows = [(name, [of_run.get(name, "–") for of_run in known]) for name in names]
    return [row for row in rows if not differ or len(set(row[1])) > 1]


def summary(runs):
    """How far each run came, and where."""
    rows = []
    for name, run in zip(run_keys(runs), runs):
        first = last = took = "–"
        if run.times:
            first = datetime.datetime.fromtimestamp(run.times[0], datetime.timezone.utc)
            last = datetime.datetime.fromtimestamp(run.times[-1], datetime.timezone.utc)
            took = str(last - first).partition(".")[0]
        facts = [
            text(run.facts.get(fact, "–")) for fact in ("ranks", "gpu_type", "precision", "global_batch_size")
        ]
        rows.append(
            [name, f"{run.last:,.0f} {run.x}s", *facts, *(str(time)[:19] for time in (first, last)), took]
        )
    return table(
        [
            "run",
            "logged until",
            "ranks",
            "device",
            "precision",
            "global batch",
            "first row (UTC)",
            "last row (UTC)",
            "time between",
        ],
        rows,
        text_columns={0, 3, 4},
    )


def values(runs):
    """Of each column the last value of each run, with the lowest and the highest."""
    rows = {}
    for index, run in enumerate(runs):
        for source, column, points in run.series:
            numbers = [value for _, value in points]
            cells = rows.setdefault((text(source), text(column)), ["–"] * len(runs))
            cells[index] = (
                f"{shown(numbers[-1])} <small>[{shown(min(numbers))} – {shown(max(numbers))}]</small>"
            )
    return table(
        ["file", "column", *run_keys(runs)],
        [[*head, *cells] for head, cells in rows.items()],
        text_columns={0, 1},
    )


def parts(run):
    """{part of a step: median ms over the rows of steps}, the whole step first; nothing without step_ms."""
    medians = {}
    for source, column, points in run.series:
        if source == "steps" and unit_of(column)[1] == "ms":
            medians[words(column)] = statistics.median(value for _, value in points)
    step = medians.pop("step", 0)
    return {"step": step, **medians, "the rest": max(0, step - sum(medians.values()))} if step else {}


def parts_table(runs):
    """With bars of the parts' shares."""
    all_parts = [parts(run) for run in runs]
    rows = {part: [text(part), *["–"] * len(runs)] for part in itertools.chain.from_iterable(all_parts)}
    for index, found in enumerate(all_parts):
        for part, ms in found.items():
            share = ms / found["step"]
            width, colour = 100 * min(share, 1), pen(index)[0]
            bar = (
                '<svg width="104" height="10">'
                f'<rect x="4" width="{width:.1f}" height="10" fill="{colour}"/></svg>'
            )
            rows[part][1 + index] = f"{value_text(ms, 4)} ms <small>{share:.1%}</small>{bar}"
    return (
        table(["part of a step, median", *run_keys(runs)], list(rows.values()), text_columns={0})
        if rows
        else ""
    )


def charts(runs, smooth):
    result = (
        [f"<p>Lines are means of the last {smooth} rows of steps; the rows themselves are faint.</p>"]
        if smooth > 1
        else []
    )
    for section, panels in itertools.groupby(make_panels(runs), lambda panel: panel.section):
        figures = [draw(panel, runs, smooth) for panel in panels] + (
            [parts_table(runs)] if section == "Time of a step" else []
        )
        result += [f'<h2>{section}</h2><div class="charts">', *figures, "</div>"]
    return result


def make(runs, smooth, command):
    """The parts of the page."""
    result = [summary(runs)]
    for run in runs:
        result += [f"<p><b>Note:</b> {text(run.label)}: {text(note)}</p>" for note in run.notes]
    if len(runs) > 1:
        # A command line repeats the settings.
        differ = chosen(runs, lambda run: [*(run.facts.keys() - {"command"}), *run.settings], differ=True)
        result += ["<h2>Settings that differ between the runs</h2>", of_runs("setting", runs, differ)]
    result += [
        *charts(runs, smooth),
        "<h2>Values</h2><p>The last value [lowest – highest].</p>",
        values(runs),
        "<h2>Configuration</h2><h3>Settings that differ from their defaults</h3>",
        of_runs("setting", runs, chosen(runs, lambda run: run.changed)),
        "<details><summary>All settings</summary>",
        of_runs("setting", runs, chosen(runs, lambda run: run.settings)),
        "</details>",
        "<h2>System</h2><p>Constants of the run, from run.json and the rows of epochs.</p>",
        of_runs("", runs, chosen(runs, lambda run: run.facts)),
    ]
    for run in runs:
        for name in ("command.txt", "SYSTEM.md", "../SYSTEM.md"):  # as tools/study.py leaves them
            if run.text(name):
                result.append(
                    f"<details><summary>{text(run.label)}: "
                    f"{name}</summary><pre>{text(run.text(name))}</pre></details>"
                )
    return [*result, f"<h2>This page</h2><pre>{text(command)}</pre>"]
