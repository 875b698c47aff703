# SPDX-License-Identifier: Apache-2.0
"""The Markdown of SYSTEM.md as HTML: headings, tables, fenced text and paragraphs."""

import html
import re

DIVIDER = re.compile(r"\|( *:?-+:? *\|)+")
HEADING = re.compile(r"(#+) (.*)")


def cells_of(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def is_table(line):
    return line.startswith("|") and line.rstrip().endswith("|")


def pairs(text):
    """{name: value} of the tables with two columns."""
    rows = (cells_of(line) for line in text.splitlines() if is_table(line) and not DIVIDER.fullmatch(line))
    return {row[0]: row[1] for row in rows if len(row) == 2 and row[0]}


def _table(lines):
    """A head without words is left out."""
    rows = [cells_of(line) for line in lines if not DIVIDER.fullmatch(line)]
    tags = ["th"] + ["td"] * (len(rows) - 1)
    return "".join(
        "<tr>" + "".join(f"<{tag} class=text>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(tags, rows)
        if any(row)
    )


def to_html(text, level=1):
    """`level` is that of the first heading; the others follow."""
    parts, lines = [], text.splitlines()
    while lines:
        line = lines.pop(0)
        if line.startswith("```"):
            end = next((i for i, other in enumerate(lines) if other.startswith("```")), len(lines))
            parts.append(f"<pre>{html.escape(chr(10).join(lines[:end]))}</pre>")
            del lines[: end + 1]
        elif is_table(line):
            end = next((i for i, other in enumerate(lines) if not is_table(other)), len(lines))
            parts.append(f"<table>{_table([line, *lines[:end]])}</table>")
            del lines[:end]
        elif heading := HEADING.fullmatch(line):
            tag = f"h{min(6, len(heading[1]) + level - 1)}"
            parts.append(f"<{tag}>{html.escape(heading[2])}</{tag}>")
        elif line.strip():
            parts.append(f"<p>{html.escape(line)}</p>")
    return "\n".join(parts)
