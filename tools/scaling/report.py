# SPDX-License-Identifier: Apache-2.0
"""One HTML page of studies: it carries its figures and needs nothing beside it."""

import base64
import html
import os

from .files import regular, replace_file
from .numbers import BOUND_SHARE

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111; max-width: 74rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc; }
h3 { font-size: 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: .25rem .45rem; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top;
  white-space: nowrap; }
th { border-bottom: 2px solid #888; white-space: normal; vertical-align: bottom; line-height: 1.2; }
td.text, th.text { text-align: left; }
.figures { display: flex; flex-wrap: wrap; gap: .6rem; } .figures img { width: 24rem; max-width: 100%; }
.figures img.wide { width: 100%; }
details { margin: .6rem 0; } summary { cursor: pointer; font-weight: bold; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f5f5; padding: .7rem;
  overflow-x: auto; font-size: 12.5px; }
small, figcaption { color: #555; }
"""

DEFINITIONS = f"""
<ul>
<li><b>throughput</b>: samples (images, tokens) of all ranks / wall time, without the steps of warm-up</li>
<li><b>strong efficiency</b>: T<sub>1</sub> / (N T<sub>N</sub>), the global batch fixed;
<b>weak efficiency</b>: rate<sub>N</sub> / (N rate<sub>1</sub>), the batch of a rank fixed.
T<sub>1</sub> and rate<sub>1</sub> are the smallest point's median
(times, or through, its ranks where that is not one rank)</li>
<li><b>speed-up</b>: T<sub>1</sub> / T<sub>N</sub> (strong), rate<sub>N</sub> / rate<sub>1</sub> (weak)</li>
<li><b>exposed communication</b>: wait for reductions that nothing hid, in the logged steps,
mean of ranks</li>
<li><b>J/image, J/token</b>: energy counters of all GPUs (NVML) / what they processed in that time</li>
<li><b>MFU</b>: FLOPs of the model that a GPU computes in a second / the GPU's peak (docs/metrics.md)</li>
<li><b>bound by</b>: communication or input (the loader) where the step waits for it
at least {BOUND_SHARE:.0%} of its time, of both the longer wait; else compute, which includes a host that
launches too slowly: GPU utilisation tells</li>
<li>values: median of the repeats [lowest – highest]</li>
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
    wide = ' class="wide"' if name.endswith("_sensitivity") else ""
    return f'<img{wide} alt="{text(name)}" src="data:image/svg+xml;base64,{data}">'


def points_table(study):
    scaled = study.kind != "sensitivity"
    header = ["GPUs" if study.device == "cuda" else "ranks", "nodes"] + [
        text(key).replace(".", ".<wbr>").replace("_", "_<wbr>") for key in study.vary
    ]
    header += ["global batch", f"{study.unit}s/s", "ms/step"] + (
        ["speed-up", "efficiency [%]"] if scaled else []
    )
    header += [
        "bound by",
        "s/epoch",
        "exposed comm. [ms]",
        "exposed comm. [% of step]",
        "loader wait [ms]",
        f"J/{study.unit}",
        "peak GiB",
        "MFU [%]",
        "GPU util. [%]",
        "runs",
    ]
    rows = []
    for p in study.points:
        run = p.runs[0]
        utilisation = [r.gpu_utilisation_percent for r in p.runs if r.gpu_utilisation_percent is not None]
        row = [p.ranks, run.nodes] + [text(value) for value in p.varied.values()]
        row += [
            value_text(run.global_batch_size, 6),
            spread_text(p.rate, digits=4),
            spread_text(p.step_ms, digits=4),
        ]
        if scaled:
            row += [spread_text(p.speed_up), spread_text(p.efficiency, 100)]
        row += [
            p.bottleneck,
            spread_text(p.epoch_seconds),
            spread_text(p.exposed_comm_ms),
            spread_text(p.exposed_percent, digits=2),
            spread_text(p.loader_wait_ms, digits=2),
            spread_text(p.joules_per_unit),
            value_text(p.memory_gib.high if p.memory_gib else None),
            spread_text(p.mfu, 100),
            value_text(sum(utilisation) / len(utilisation) if utilisation else None),
            len(p.runs),
        ]
        rows.append(row)
    return table(header, rows, text_columns={header.index("bound by")})


def study_section(study, folder, figures):
    parts = [f"<h2>{text(study.title)}: {study.kind} ({text(study.kind_text)})</h2>"]
    info = sorted({(run.gpu_type, run.precision) for point in study.points for run in point.runs})
    parts.append(
        "<p>"
        + "; ".join(f"{text(gpu)}, {text(precision)}" for gpu, precision in info)
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
        parts.append(f"<h3>{text(folder)}</h3><pre>{text(described)}</pre>")
    parts.append(f"<h2>This report</h2><pre>{text(command)}</pre>")
    write_page(path, "libddp: scaling report", parts)
