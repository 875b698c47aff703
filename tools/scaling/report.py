# SPDX-License-Identifier: Apache-2.0
"""One HTML page of studies: it carries its figures and needs nothing beside it."""

import base64
import html
import os

from . import markdown
from .files import regular, replace_file
from .numbers import BOUND_SHARE, percent

FONT = "system-ui, sans-serif"  # of the page and of its figures
STYLE = (
    f"body {{ font: 15px/1.5 {FONT}; "
    """color: #111; max-width: 74rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
h3, h4, h5, h6 { font-size: 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; line-height: 1.3; display: block;
  overflow-x: auto; }
th, td { padding: .25rem .3rem; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top;
  white-space: nowrap; }
th { border-bottom: 2px solid #888; white-space: normal; vertical-align: bottom; line-height: 1.2; }
td.text, th.text { text-align: left; }
th div { width: min-content; margin-left: auto; } th.text div { margin-left: 0; }
td small { white-space: normal; }
.figures { display: flex; flex-wrap: wrap; gap: .6rem; align-items: start; } .figures img { max-width: 100%; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: bold; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f5f5; padding: .7rem;
  overflow-x: auto; font-size: 12.5px; }
small, figcaption { color: #555; }
"""
)

DEFINITIONS = f"""
<ul>
<li><b>Values</b> are the median of a point's runs, with the lowest and the highest run in brackets. The
steps of warm-up do not count.</li>
<li><b>Throughput</b> is the number of samples (images, tokens) that all ranks process in a second.</li>
<li><b>Speed-up</b> says how many times faster a point is than a single GPU (or CPU rank). A strong study
divides the step times, because the global batch stays the same. A weak study divides the throughputs,
because the batch grows with the number of GPUs.</li>
<li><b>Efficiency</b> is the speed-up divided by the number of GPUs. At 100.0 % twice as many GPUs are twice
as fast. If the study has no point with a single GPU, its smallest point counts as 100.0 %.</li>
<li><b>Exposed communication</b> is the time in which a step waits for the reduction of gradients, because no
computation hides it. It is measured in the logged steps, and is the mean of the ranks.</li>
<li><b>Loader wait</b> is the time in which a step waits for its next batch.</li>
<li><b>Bound by</b> names what the step waits for longest: communication, or input (the loader). If it waits
less than {percent(BOUND_SHARE)} of its time for either, the step is bound by compute. A host that launches
kernels too slowly counts as compute too, and shows as low GPU utilisation.</li>
<li><b>J/image, J/token</b> is the energy of all GPUs for one sample, by the GPUs' own counters (NVML).</li>
<li><b>MFU</b> (model FLOPs utilisation) is the share of the GPU's peak speed that the model's own
computation uses (docs/metrics.md).</li>
<li><b>GPU utilisation</b> is the share of time in which a GPU runs any kernel, as NVIDIA's driver reports
it.</li>
</ul>
"""


def text(value):
    return html.escape(str(value))


def value_text(value, digits=3):
    """1,234.5 with `digits` significant digits below a thousand; a dash where unknown."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= 0.01 or value == 0 else "&lt;0.01"


def spread_text(spread, factor=1.0, digits=3):
    if spread is None:
        return "–"
    median = value_text(factor * spread.median, digits)
    low, high = value_text(factor * spread.low, digits), value_text(factor * spread.high, digits)
    return median if low == high else f"{median}<br><small>[{low} – {high}]</small>"


def percent_text(spread):
    """A spread of shares, for a column whose head has the unit."""
    if spread is None:
        return "–"
    median, low, high = (percent(value, "") for value in (spread.median, spread.low, spread.high))
    return median if low == high else f"{median}<br><small>[{low} – {high}]</small>"


def table(header, rows, text_columns=()):
    def cells(tag, row):
        return "".join(
            f"<{tag}{' class=text' if i in text_columns else ''}>{cell}</{tag}>" for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', header)}</tr>{body}</table>"


def figure(folder, name):
    with open(os.path.join(folder, f"{name}.svg"), "rb", opener=regular) as file:
        data = base64.b64encode(file.read()).decode()
    return f'<img alt="{text(name)}" src="data:image/svg+xml;base64,{data}">'


def point_cells(study, point):
    """{head: cell}"""
    run = point.runs[0]
    utilisation = [r.gpu_utilisation_percent for r in point.runs if r.gpu_utilisation_percent is not None]
    mean = sum(utilisation) / len(utilisation) if utilisation else None
    exposed = point.exposed_percent
    cells = {
        "GPUs" if study.device == "cuda" else "ranks": point.ranks,
        "nodes": run.nodes,
        **{
            text(key).replace(".", ".<wbr>").replace("_", "_<wbr>"): text(value)
            for key, value in point.varied.items()
        },
        "global batch": value_text(run.global_batch_size, 6),
        f"{study.unit}s/s": spread_text(point.rate, digits=4),
        "ms/step": spread_text(point.step_ms, digits=4),
        "speed-up": spread_text(point.speed_up),
        "efficiency [%]": percent_text(point.efficiency),
        "bound by": point.bottleneck,
        "s/epoch": spread_text(point.epoch_seconds),
        "exposed comm. [ms]": spread_text(point.exposed_comm_ms),
        "exposed comm. [%&nbsp;of&nbsp;step]": percent_text(
            exposed.map(lambda value: value / 100) if exposed else None
        ),
        "loader wait [ms]": spread_text(point.loader_wait_ms, digits=2),
        f"J/{study.unit}": spread_text(point.joules_per_unit),
        "peak GiB": value_text(point.memory_gib.high if point.memory_gib else None),
        "MFU [%]": percent_text(point.mfu),
        "GPU util. [%]": "–" if mean is None else percent(mean / 100, ""),
        "runs": len(point.runs),
    }
    if study.kind == "sensitivity":
        del cells["speed-up"], cells["efficiency [%]"]
    return cells


def points_table(study):
    """What no point knows has no column."""
    rows = [point_cells(study, point) for point in study.points]
    header = [head for head in rows[0] if any(row[head] != "–" for row in rows)]
    cells = [[row[head] for head in header] for row in rows]
    narrow = [f"<div>{head}</div>" for head in header]
    return table(narrow, cells, text_columns={header.index("bound by")})


def study_section(study, folder, figures):
    parts = [f"<h2>{text(study.title)}: {study.kind} ({text(study.kind_text)})</h2>"]
    info = sorted({(run.gpu_type, run.precision) for point in study.points for run in point.runs})
    parts.append(
        "<p>"
        + "; ".join(", ".join(text(each) for each in pair if each) for pair in info)
        + f"; program {text(study.program)}; {study.steps} steps a run, the first {study.warmup_steps} of "
        "them warm-up.</p>"
    )
    for note in study.notes:
        parts.append(f"<p><b>Note:</b> {text(note)}</p>")
    parts.append(points_table(study))
    parts.append('<div class="figures">' + "".join(figure(folder, name) for name in figures) + "</div>")
    parts.append(f"<h3>Command</h3><pre>{text(study.command)}</pre>")
    if study.yaml:
        name = text(os.path.basename(study.path))
        parts.append(
            f"<details open><summary>{name}/study.yaml</summary><pre>{text(study.yaml)}</pre></details>"
        )
    parts.append(
        "<details><summary>Commands of all runs</summary><pre>"
        + text("\n".join(study.run_commands))
        + "</pre></details>"
    )
    return "\n".join(parts)


def commits_of(study):
    return sorted({run.commit[:12] for point in study.points for run in point.runs})


def pairs_section(before, after, pairs, folder, name):
    header = [
        "GPUs" if after.device == "cuda" else "ranks",
        f"before [{after.unit}s/s]",
        f"after [{after.unit}s/s]",
        "after / before",
    ]
    rows = []
    for old, new in pairs:
        varied = [text(f"{key} {value}") for key, value in new.varied.items()]
        rows.append(
            [
                ", ".join([f"{new.ranks}", *varied]),
                spread_text(old.rate, digits=4),
                spread_text(new.rate, digits=4),
                f"{new.rate.median / old.rate.median:.3f}",
            ]
        )
    commits = [", ".join(commits_of(study)) for study in (before, after)]
    return (
        f"<h2>{text(after.title)}: before and after</h2><p>before: {text(before.path)} (commit "
        f"{commits[0]}); after: {text(after.path)} (commit {commits[1]})</p>"
        + table(header, rows)
        + '<div class="figures">'
        + figure(folder, name)
        + "</div>"
    )


def write_page(path, title, parts, style=""):
    """A whole page; `style` is added to STYLE."""
    replace_file(
        path,
        "\n".join(
            [
                f"<!doctype html><html lang=en><meta charset=utf-8><title>{text(title)}</title>",
                f"<style>{STYLE}{style}</style><h1>{text(title)}</h1>",
                *parts,
                "</html>\n",
            ]
        ),
    )


def write(path, sections, systems, command):
    """`systems`: {study folder: text of its SYSTEM.md}."""
    parts = [*sections, "<h2>Definitions</h2>", DEFINITIONS, "<h2>Machine</h2>"]
    for folder, described in systems.items():
        parts.append(f"<h3>{text(folder)}</h3>{markdown.to_html(described, 4)}")
    parts.append(f"<h2>This report</h2><pre>{text(command)}</pre>")
    write_page(path, "libddp: scaling report", parts)
