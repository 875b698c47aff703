# SPDX-License-Identifier: Apache-2.0
"""Checks the sources of the report. Needs Python alone.

- The CSV files are well formed, and each row names a run of runs.csv.
- Each value stands on a page of its run, or in the message of its commit (where git has the commit). Values
that belong
  together stand in one row, one column or one paragraph.
- report.typ names existing, measured values, and has no number of its own.
"""

import csv
import io
import os
import re
import subprocess

# Columns of measured values. Empty: not measured. One line or one column of a table, or one paragraph, of a
# run's pages holds all values of a group: two rows with exchanged values do not pass.
GROUPS = {
    "hardware": (("value",),),
    "results": (("libddp", "eager", "compile", "graph", "compile_graph"), ("peak_libddp",), ("peak_peer",)),
    "scaling": (("base_low", "base_high"), ("time", "exposed_ms"), ("alone",), ("peer_base", "peer_time")),
    "profiles": (
        ("ms", "host_us", "mhz", "watts"),
        ("kernels",),
        ("busy_us", "span_us"),
        ("exposed_ms",),
        ("roofline_us",),
    ),
    "classes": (
        (
            "optimizer",
            "attention",
            "norm",
            "wgrad",
            "dgrad",
            "fprop",
            "gemm",
            "activation",
            "thin",
            "rotary",
            "quantise",
            "layout",
            "pool",
            "loss",
            "embedding",
            "copies",
            "reductions",
            "elementwise",
            "other",
            "collectives",
        ),
    ),
    "ablation": (("without", "with"),),
    "figures": (("value",),),
    "timeline": (("begin", "end"),),
}
VALUES = {name: sum(groups, ()) for name, groups in GROUPS.items()}
FILES = ("runs", *VALUES)
CHOICES = {
    ("results", "better"): ("higher", "lower"),
    ("ablation", "better"): ("higher", "lower"),
    ("results", "same_call"): ("yes", "no"),
    ("ablation", "same_call"): ("yes", "no"),
    ("scaling", "same_call"): ("yes", "no"),
    ("scaling", "kind"): ("weak", "strong"),
}
# Words of the text that have digits and are no measurement: names, formats, symbols, and settings in code
# marks.
WORDS = set(
    "ResNet-18 ResNet-50 GPT-2 ViT-B/16 Qwen2 Qwen2-7B CIFAR-10 H100 H200 bf16 FP8 float32 ZeRO-1 C++20 "
    "T_1 3x3".split()
)
CODE = {"NCCL_NVLS_ENABLE=0"}

PATH = r'"([^"\n]*)"'
# The macros that read values: what each argument must be.
MACROS = {
    "n": "number",
    "ratio": "number",
    "percent": "number",
    "difference": "number",
    "word": "cell",
    "from": "cell",
}
KEYS = {
    "efficiency-of": "scaling",
    "peer-efficiency-of": "scaling",
    "effect": "ablation",
    "loss-of": "scaling",
    "run-ref": "runs",
}
CALL = re.compile(r"#(" + "|".join([*MACROS, *KEYS]) + r")\(([^()]*)\)")


def read_tables(folder, problems):
    """{file: {key: row}}; what is wrong with the form of a file goes to problems."""
    tables = {}
    for name in FILES:
        where = f"data/{name}.csv"
        with open(os.path.join(folder, where), encoding="utf-8", newline="") as file:
            lines = list(csv.reader(io.StringIO(file.read()), strict=True))
        head, rows = lines[0], {}
        if head[0] != "key" or len(set(head)) != len(head):
            problems.append(f"{where}: the first line must name different columns, the first one 'key'")
        for row in lines[1:]:
            if len(row) != len(head):
                problems.append(f"{where}: {row[:1]} has {len(row)} cells, the first line {len(head)}")
            elif row[0] in rows or not row[0]:
                problems.append(f"{where}: the key '{row[0]}' is empty or stands twice")
            elif any(cell != cell.strip() for cell in row):
                problems.append(f"{where}: a cell of {row[0]} begins or ends with a space")
            else:
                rows[row[0]] = dict(zip(head, row))
        tables[name] = rows
    return tables


def check_columns(tables, problems):
    used = set()
    for name, columns in VALUES.items():
        for key, row in tables[name].items():
            where = f"data/{name}.csv: {key}"
            if row["run"] not in tables["runs"]:
                problems.append(f"{where} names the run '{row['run']}', which data/runs.csv lacks")
            used.add(row["run"])
            for column in columns:
                if (
                    row[column]
                    and name != "hardware"
                    and not re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", row[column])
                ):
                    problems.append(f"{where}: {column} is '{row[column]}', which is no number")
            if name == "scaling" and not row["time"] and not row["command"]:
                problems.append(f"{where} awaits a measurement, but names no command")
            for (file, column), choices in CHOICES.items():
                if file == name and row[column] not in choices:
                    problems.append(f"{where}: {column} is '{row[column]}', not one of {', '.join(choices)}")
    problems += [
        f"data/runs.csv: no value comes from the run {key}" for key in tables["runs"] if key not in used
    ]


def text_of_run(root, run, problems):
    """The text in which the values of a run must stand; None: a commit that this checkout lacks."""
    if run["page"].startswith("commit "):
        command = ["git", "show", "--no-patch", "--format=%B", run["page"].split()[1]]
        try:
            shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return shown.stdout.replace(",", "")
    texts = []
    for page in run["page"].split():
        try:
            with open(os.path.join(root, page), encoding="utf-8") as file:
                texts.append(file.read())
        except OSError:
            problems.append(f"data/runs.csv: {run['key']} names the page {page}, which does not exist")
    return "\n".join(texts).replace(",", "")


def units_of(text):
    """The parts of a page whose numbers belong together: paragraphs, list items, and rows and columns of
    tables."""
    units, columns, paragraph = [], [], []

    def end():
        units.append(" ".join(paragraph))
        units.extend(" ".join(column) for column in columns)
        paragraph.clear()
        columns.clear()

    for line in text.splitlines():
        line = line.strip()
        if line.startswith("|"):
            if not columns:
                end()
            units.append(line)
            cells = line.strip("|").split("|")
            columns.extend([] for _ in range(len(cells) - len(columns)))
            for column, cell in zip(columns, cells):
                column.append(cell)
            continue
        if columns or not line or re.match(r"[-*] |\d+\. |#|```", line):
            end()
        paragraph.append(line)
    end()
    return units


def stands_in(value, unit):
    return re.search(rf"(?<![\d.]){re.escape(value)}(?!\d|\.\d)", unit)  # 251 is no part of 9251


def check_pages(root, tables, problems):
    """Returns how many values were not compared, because git lacks their commit."""
    texts = {key: text_of_run(root, run, problems) for key, run in tables["runs"].items()}
    units = {key: units_of(text) for key, text in texts.items() if text is not None}
    skipped = 0
    for name, groups in GROUPS.items():
        for key, row in tables[name].items():
            run = tables["runs"][row["run"]]
            for group in groups:
                values = {column: row[column] for column in group if row[column]}
                if row["run"] not in units:
                    skipped += len(values)
                elif values:
                    check_group(f"data/{name}.csv", key, values, units[row["run"]], run, problems)
    return skipped


def check_group(where, key, values, units, run, problems):
    """One unit must hold all values of the group."""

    def holds_all(unit):
        return all(stands_in(value, unit) for value in values.values())

    if any(map(holds_all, units)):
        return
    for column, value in values.items():
        if not any(stands_in(value, unit) for unit in units):
            problems.append(
                f"{where}: {column} of {key} is {value}, which does not stand in {run['page']}; fix: make "
                "the two equal"
            )
            return
    named = ", ".join(f"{column} {value}" for column, value in values.items())
    problems.append(
        f"{where}: {named} of {key} do not stand together in a row, a column or a paragraph of "
        f"{run['page']}; fix: make the two equal"
    )


def check_text(source, tables, problems):
    """source: the text of report.typ."""
    named = set()
    source = re.sub(r"^\s*//.*$", "", source, flags=re.MULTILINE)
    for call in CALL.finditer(source):
        macro, arguments = call[1], re.findall(PATH, call[2])
        line = source.count("\n", 0, call.start()) + 1
        where = f"report.typ:{line}: #{macro}"
        if macro in KEYS:
            named.add((KEYS[macro], arguments[0] if arguments else ""))
            if not arguments or arguments[0] not in tables[KEYS[macro]]:
                problems.append(f"{where}: no such row in data/{KEYS[macro]}.csv: {call[2]}")
            continue
        for path in arguments or [""]:
            name, key, column, *_ = (path + "/run" if macro == "from" else path).split("/") + ["", "", ""]
            row = tables.get(name, {}).get(key)
            named.add((name, key))
            if row is None or column not in row:
                problems.append(f"{where}: no such value: '{path}'")
            elif MACROS[macro] == "number" and not row[column]:
                problems.append(f"{where}: '{path}' is empty, because nothing was measured")
    text = CALL.sub("", source)
    text = re.sub(r"^#import .*$|<[a-z-]+>|@[a-z-]+", "", text, flags=re.MULTILINE)
    for code in re.findall(r"`([^`]*)`", text):
        if re.search(r"\d", code) and code not in CODE:
            problems.append(
                f"report.typ: `{code}` has a number; fix: name a value of data/*.csv, or add "
                "the setting to CODE in check.py"
            )
    text = re.sub(r"`[^`]*`", "", text)
    for word in re.findall(r"\S*\d\S*", text):
        if word.strip(".,:;()*_$'\"").removesuffix("'s") not in WORDS:
            problems.append(
                f"report.typ: '{word}' is a number of its own; fix: name a value of data/*.csv, "
                "or add the name to WORDS in check.py"
            )
    unused = [key for key in tables["figures"] if ("figures", key) not in named]
    problems += [f"data/figures.csv: the text does not use {key}" for key in unused]


def check(folder, root):
    """The problems of the report's sources in `folder` as sentences. root: where the pages of runs.csv
    are."""
    problems = []
    tables = read_tables(folder, problems)
    if not problems:
        check_columns(tables, problems)
    if not problems:
        skipped = check_pages(root, tables, problems)
        if skipped:
            print(f"{skipped} values not compared: commit missing")
        with open(os.path.join(folder, "report.typ"), encoding="utf-8") as file:
            check_text(file.read(), tables, problems)
    return problems
