#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""From the CSV files of studies to figures and one HTML report.

    tools/plot_scaling.py runs/resnet50_strong runs/resnet50_weak
    tools/plot_scaling.py runs/resnet50_weak --before runs/resnet50_weak_old --output runs/report

Each folder is a study's (tools/study.py made it), or any folder whose sub-folders are runs: then --kind
says what was held fixed. Rows whose global batches contradict the kind end with 65. Written:
<output>/report.html, which needs nothing beside it, every figure as PNG and SVG, and merged.csv with one row
a run. Needs pandas and matplotlib.

Exit codes: 0 written, 64 a mistake in the call, 65 data that cannot be used (the message names the file
and the column), 73 the report cannot be written.
"""

import dataclasses
import itertools
import json
import os
import re
import shlex
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
# pylint: disable=wrong-import-position
from scaling import numbers  # noqa: E402
from scaling.command_line import EXIT_MISTAKE, Parser, exit_code, writing  # noqa: E402
from scaling.files import replace_file  # noqa: E402

SYSTEM_UNKNOWN = "not described: tools/system_report.py writes SYSTEM.md"


# A run's folder as tools/study.py names it: n002_ddp.bucket_cap_mb-25_amp.dtype-bf16_r1. A setting begins
# behind a "_" with its section, which a value cannot be mistaken for.
RUN_NAME = re.compile(r"n\d+_(.+)_r\d+")
SETTING = r"(?:lr_schedule|[a-z0-9]+)(?:\.[a-z0-9_]+)+"
VARIED = re.compile(rf"({SETTING})-(.+?)(?:_(?={SETTING}-)|$)")
PLAN_KEYS = (
    "name",
    "title",
    "kind",
    "program",
    "device",
    "batch",
    "steps",
    "warmup_steps",
    "vary",
    "command",
    "runs",
)


def varied_of_name(name):
    """What a sensitivity run's folder says was varied; empty where it says nothing."""
    match = RUN_NAME.fullmatch(name)
    settings = dict(VARIED.findall(match[1])) if match else {}
    return (
        settings
        if match and "_".join(f"{key}-{value}" for key, value in settings.items()) == match[1]
        else {}
    )


class Study:
    """A study's folder with its numbers."""

    def __init__(self, path, kind=None):
        self.path = os.path.normpath(path)
        if not os.path.isdir(path):
            raise numbers.DataError(f"{path}: there is no such folder")
        plan = self._read_plan(kind)
        self.name, self.kind, self.program = plan["name"], plan["kind"], plan["program"]
        self.stem = self.name  # of the figures' files
        self.title, self.device, self.vary = plan["title"], plan["device"], plan["vary"]
        self.steps, self.warmup_steps, self.command = plan["steps"], plan["warmup_steps"], plan["command"]
        self.label = os.path.basename(self.path)
        self.notes = []
        self.runs = self._read_runs(plan)
        units = {run.unit for run in self.runs}
        if len(units) > 1:
            raise numbers.DataError(f"{path}: runs count in different units: {', '.join(sorted(units))}")
        self.unit = units.pop()
        numbers.check_kind(path, self.kind, self.runs)
        self.varied = {name: run["varied"] for name, run in plan["runs"].items()}
        self.points = numbers.make_points(self.runs, self.kind, self.varied)
        self.kind_text = {
            "strong": f"global batch {plan['batch'] or '?'}",
            "sensitivity": "settings varied",
            "weak": f"{plan['batch'] or '?'} samples a {'GPU' if self.device == 'cuda' else 'rank'}",
        }[self.kind]
        self.subtitle = f"{self.title}; {self.kind_text}"
        self.yaml = self._text("study.yaml")
        self.system = self._text("SYSTEM.md") or SYSTEM_UNKNOWN
        self.run_commands = [
            f"{run.name}: {self._text(run.name + '/command.txt').strip()}" for run in self.runs
        ]

    def _text(self, name):
        return numbers.read_optional(os.path.join(self.path, name))

    def _read_plan(self, kind):
        try:
            plan = json.loads(self._text("study.json") or "null")
        except ValueError as error:
            raise numbers.DataError(f"{self.path}/study.json: not JSON: {error}") from None
        if plan:
            lacking = [key for key in PLAN_KEYS if not isinstance(plan, dict) or key not in plan]
            if lacking:
                raise numbers.DataError(
                    f"{self.path}/study.json: {lacking[0]} is missing: tools/study.py did not write this file"
                )
            return plan
        if not kind:
            raise numbers.DataError(
                f"{self.path}: there is no study.json; fix: give the kind of the study: "
                "--kind strong, weak or sensitivity"
            )
        runs = sorted(
            name
            for name in os.listdir(self.path)
            if os.path.exists(os.path.join(self.path, name, "steps.csv"))
        )
        label = os.path.basename(self.path)
        varied = {name: varied_of_name(name) if kind == "sensitivity" else {} for name in runs}
        keys = {tuple(settings) for settings in varied.values()}
        if kind == "sensitivity" and (keys == {()} or len(keys) > 1):
            raise numbers.DataError(
                f"{self.path}: there is no study.json, and the names of the runs' folders differ in the "
                "varied settings; "
                "fix: name them n<ranks>_<setting>-<value>_r<repeat>, as slurm/sensitivity.sbatch does"
            )
        return {
            "name": label,
            "title": label,
            "kind": kind,
            "program": "?",
            "device": "cuda",
            "batch": 0,
            "steps": 0,
            "warmup_steps": 1,
            "command": "",
            "vary": {key: [] for key in itertools.chain.from_iterable(keys)},
            "runs": {name: {"varied": varied[name]} for name in runs},
        }

    def _read_runs(self, plan):
        """Finished runs; what is missing becomes a note, what is damaged an error."""
        runs, missing = [], []
        for name in plan["runs"]:
            folder = os.path.join(self.path, name)
            code = self._text(f"{name}/exit_code").strip()
            if code == "0" or (not code and "repeats" not in plan):
                runs.append(numbers.read_run(self.path, name, self.warmup_steps))
            else:
                missing.append(
                    name
                    + (f" (exit code {code})" if code else " (never ended)" if os.path.isdir(folder) else "")
                )
        if not runs:
            raise numbers.DataError(
                f"{self.path}: no run succeeded; tools/study.py --status lists the states"
            )
        if missing:
            self.notes.append(
                f"{len(missing)} of {len(plan['runs'])} runs are not in these figures: {', '.join(missing)}"
            )
        repeats = {}
        for run in runs:
            repeats.setdefault((run.ranks, tuple(plan["runs"][run.name]["varied"].items())), []).append(run)
        few = sorted({key[0] for key, members in repeats.items() if len(members) < 3})
        if few:
            self.notes.append(f"fewer than 3 repeats at {', '.join(map(str, few))}: no median to rely on")
        return runs


def matching_points(before, after):
    """Points that both studies have."""
    if before.unit != after.unit:
        raise numbers.DataError(
            f"{before.path} counts {before.unit}s and {after.path} {after.unit}s: they cannot be compared"
        )
    pairs = []
    for new in after.points:
        for old in before.points:
            if (old.ranks, old.varied) == (new.ranks, new.varied):
                pairs.append((old, new))
    if not pairs:
        raise numbers.DataError(f"{before.path} and {after.path} have no point in common")
    return pairs


def merge(studies, output, pandas):
    """One row a run of every study."""
    rows = []
    for study in studies:
        about = {"study": study.name, "kind": study.kind, "folder": study.path}
        for run in study.runs:
            varied = " ".join(f"{key}={value}" for key, value in study.varied[run.name].items())
            rows.append({**about, "varied": varied, **dataclasses.asdict(run)})
    frame = pandas.DataFrame(rows)
    replace_file(os.path.join(output, "merged.csv"), frame.to_csv(index=False))
    return frame


def print_summary(frame):
    """The medians, as the report has them."""
    columns = {
        "rate": "units/s",
        "step_ms": "ms/step",
        "exposed_comm_ms": "exposed ms",
        "joules_per_unit": "J/unit",
    }
    table = (
        frame.groupby(["folder", "kind", "ranks", "varied"])[list(columns)]
        .median(numeric_only=True)
        .rename(columns=columns)
    )
    print(table.round(3).to_string())


def name_figures(studies):
    """Figures of two studies of one name are two files."""
    taken = set()
    for study in studies:
        number = 1
        while study.stem in taken:
            number += 1
            study.stem = f"{study.name}_{number}"
        taken.add(study.stem)


def parse(arguments):
    parser = Parser(__doc__)
    parser.add_argument("studies", nargs="+", help="study folders")
    parser.add_argument("--before", help="folder of an earlier study, compared with the first")
    parser.add_argument(
        "--kind", choices=("strong", "weak", "sensitivity"), help="of folders without study.json"
    )
    parser.add_argument("--output", help="folder of the report (report/ in the first study's folder)")
    return parser.parse_args(arguments)


def main(arguments):
    options = parse(arguments)
    try:
        import pandas
        from scaling import figures, report
    except ImportError as error:
        print(
            f"error: this needs pandas and matplotlib ({error}): pip install pandas matplotlib",
            file=sys.stderr,
        )
        return EXIT_MISTAKE
    studies = [Study(path, options.kind) for path in options.studies]
    name_figures(studies)
    before = Study(options.before, options.kind) if options.before else None
    pairs = matching_points(before, studies[0]) if before else []
    output = options.output or os.path.join(options.studies[0], "report")
    everything = studies + ([before] if before else [])
    with writing(output):
        os.makedirs(output, exist_ok=True)
        sections = [report.study_section(study, output, figures.draw(study, output)) for study in studies]
        if before:
            if before.label == studies[0].label:
                before.label, studies[0].label = before.path, studies[0].path
            sections.insert(
                0,
                report.pairs_section(
                    before, studies[0], pairs, output, figures.before_after(before, studies[0], pairs, output)
                ),
            )
        frame = merge(everything, output, pandas)
        command = "tools/plot_scaling.py " + " ".join(shlex.quote(word) for word in arguments)
        report.write(
            os.path.join(output, "report.html"),
            sections,
            {study.path: study.system for study in everything},
            command,
        )
    print_summary(frame)
    for study in everything:
        for note in study.notes:
            print(f"note: {study.path}: {note}")
    print(f"report: {os.path.join(output, 'report.html')}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
