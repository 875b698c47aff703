# SPDX-License-Identifier: Apache-2.0
"""The page of one or several runs: HTML with its charts as SVG. It has no script and loads nothing."""

import datetime
import itertools
import statistics

from scaling import markdown
from scaling.numbers import percent
from scaling.report import table, text, value_text

from .chart import draw, pen, run_keys, shown
from .panels import make_panels, unit_of, words

STYLE = """
html { background: #fff; color-scheme: light; } figure { margin: 0; max-width: 42rem; }
figure > svg { width: 100%; height: auto; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr));
  gap: 1.4rem 1rem; align-items: end; }
.charts > * { min-width: 0; } .charts > div, .charts > div + figure { align-self: start; }
.charts table { margin: 0; } h1 + h2 { margin-top: 1.2rem; }
figcaption { color: #111; font-size: 13px; padding-left: 3.3rem; }
figcaption b { margin-right: .8rem; font-size: 14px; }
svg text { font-size: 12px; fill: #333; } .grid { stroke: #e3e3e3; } .axis { stroke: #777; fill: none; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.key { display: inline-block; margin-right: .9rem; }
span svg, td svg { vertical-align: middle; }
td.text { white-space: normal; overflow-wrap: anywhere; min-width: 6rem; }
"""

SYSTEM_FILES = ("SYSTEM.md", "../SYSTEM.md")  # as tools/study.py leaves them
# What the system table always has: (name, constant of run.json, name in SYSTEM.md).
SYSTEM = (
    ("host", "host", None),
    ("CPU", "cpu", "CPU"),
    ("device", "gpu_type", None),
    ("NVIDIA driver", "driver", "NVIDIA driver"),
    ("LibTorch", "LibTorch", "LibTorch"),
    ("CUDA", "CUDA", "CUDA toolkit"),
    ("NCCL", "NCCL", "NCCL headers"),
    ("command", "command", None),
)


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


def utc(time):
    return str(datetime.datetime.fromtimestamp(time, datetime.timezone.utc))[:19]


def results(run):
    """{name: text} of what a run came to, how fast, and where. What is not known is left out."""
    series = {(table, column): [y for _, y in points] for table, column, points in run.series}

    def first_known(reduce, show, *places):
        return next((show(reduce(series[place])) for place in places if place in series), None)

    def last(show, *places):
        return first_known(lambda values: values[-1], show, *places)

    places = [
        place for place in series if place[1].endswith("_per_second") and place[0] in ("steps", "epochs")
    ]
    unit = unit_of(places[0][1])[1] if places else ""
    step_parts = parts(run)
    exposed = step_parts.get(words("exposed_comm_ms"))
    found = {
        "logged until": f"{run.last:,.0f} {run.x}s",
        "loss": last(shown, ("steps", "loss"), ("epochs", "train_loss")),
        "accuracy": last(percent, ("steps", "accuracy"), ("epochs", "train_accuracy")),
        "evaluation loss": last(shown, ("evals", "eval_loss"), ("epochs", "test_loss")),
        "evaluation accuracy": last(percent, ("evals", "eval_accuracy"), ("epochs", "test_accuracy")),
        "throughput": first_known(statistics.median, lambda rate: f"{shown(rate)} {unit}", *places[:1]),
        "exposed communication": None
        if exposed is None
        else f"{percent(exposed / step_parts['step'])} of the step",
        "MFU": first_known(statistics.median, percent, ("steps", "mfu")),
        "ranks": run.facts.get("ranks"),
        "device": run.facts.get("gpu_type"),
        "precision": run.facts.get("precision"),
        "global batch": run.facts.get("global_batch_size"),
    }
    if run.times:
        took = datetime.timedelta(seconds=round(run.times[-1] - run.times[0]))
        found |= {"first row (UTC)": utc(run.times[0]), "time to the last row": str(took)}
    return {name: value for name, value in found.items() if value is not None}


def results_table(runs):
    """Rows in the order of results(), from the runs that know them."""
    found = [results(run) for run in runs]
    names = dict.fromkeys(itertools.chain.from_iterable(found))
    rows = [(name, [of_run.get(name, "–") for of_run in found]) for name in names]
    return of_runs("", runs, rows)


def system(runs):
    """The constants of the runs, those of SYSTEM first. SYSTEM.md knows what an older run.json lacks."""
    known = []
    for run in runs:
        described = {}
        for name in SYSTEM_FILES:
            described |= markdown.pairs(run.text(name))
        facts = {name: run.facts.get(key) or described.get(other, "–") for name, key, other in SYSTEM}
        if facts["command"] == "–" and run.text("command.txt"):
            facts["command"] = run.text("command.txt").strip()
        shown_keys = {"device", *(key for _, key, _ in SYSTEM)}  # gpu_type says more than device
        known.append(facts | {key: value for key, value in run.facts.items() if key not in shown_keys})
    names = dict.fromkeys(itertools.chain.from_iterable(known))
    return of_runs("", runs, [(name, [of_run.get(name, "–") for of_run in known]) for name in names])


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
            rows[part][1 + index] = f"{value_text(ms, 4)} ms <small>{percent(share)}</small>{bar}"
    return (
        table(["part of a step, median", *run_keys(runs)], list(rows.values()), text_columns={0})
        if rows
        else ""
    )


def charts(runs, smooth):
    """Figures by section. What a single run came to stands beside the first one."""
    result = (
        [f"<p>Lines are means of the last {smooth} rows of steps; the rows themselves are faint.</p>"]
        if smooth > 1
        else []
    )
    beside = [f"<div>{results_table(runs)}</div>"] if len(runs) == 1 else []
    for section, panels in itertools.groupby(make_panels(runs), lambda panel: panel.section):
        figures = beside + [draw(panel, runs, smooth) for panel in panels]
        figures += [parts_table(runs)] if section == "Time of a step" else []
        result += [f'<h2>{section}</h2><div class="charts">', *figures, "</div>"]
        beside = []
    return result


def make(runs, smooth, command):
    """The parts of the page."""
    result = []
    for run in runs:
        result += [f"<p><b>Note:</b> {text(run.label)}: {text(note)}</p>" for note in run.notes]
    if len(runs) > 1:
        differ = chosen(runs, lambda run: [*run.facts, *run.settings], differ=True)
        differ = [row for row in differ if row[0] != "command"]  # which repeats the settings
        result += [results_table(runs), "<h2>Settings that differ between the runs</h2>"]
        result.append(of_runs("setting", runs, differ))
    result += [
        *charts(runs, smooth),
        "<h2>Values</h2><p>The last value [lowest – highest].</p>",
        values(runs),
        "<h2>Configuration</h2><h3>Settings that differ from their defaults</h3>",
        of_runs("setting", runs, chosen(runs, lambda run: run.changed)),
        "<details><summary>All settings</summary>",
        of_runs("setting", runs, chosen(runs, lambda run: run.settings)),
        "</details>",
        "<h2>System</h2>",
        system(runs),
    ]
    for run in runs:
        for name in ("command.txt", *SYSTEM_FILES):
            if run.text(name):
                body = run.text(name)
                body = markdown.to_html(body, 3) if name.endswith(".md") else f"<pre>{text(body)}</pre>"
                result.append(f"<details><summary>{text(run.label)}: {name}</summary>{body}</details>")
    return [*result, f"<h2>This page</h2><pre>{text(command)}</pre>"]
