# SPDX-License-Identifier: Apache-2.0
"""Measured rows: kept in one JSON file that later calls add to, and written as CSV and as the table of the
docs."""

import csv
import itertools
import json
import os

import step_profile
from rows import PEER_TITLES, PEERS, ROWS

BEGIN = "<!-- compare_pytorch: the lines up to the end mark are generated -->"
END = "<!-- compare_pytorch: end -->"


UNITS = dict(img_s="img/s per GPU", seq_s="seq/s per GPU", tok_s="tok/s per GPU", images_s="images/s")


def unit(row):
    return UNITS.get(row.unit, row.unit)


def load(path):
    if not os.path.exists(path):
        return {}
    with open(path) as f:
        return json.load(f)


def save(path, records):
    """Whole or not at all: written aside and renamed."""
    with open(path + ".part", "w") as f:
        json.dump(records, f, indent=1, sort_keys=True)
    os.replace(path + ".part", path)


def key(name, gpus):
    return f"{name}/{gpus}"


def merge(records, name, gpus, record):
    """A new record takes the place of an older one of the same row; a row that could not be run leaves an
    older measured one as it is."""
    if "sides" in record or "sides" not in records.get(key(name, gpus), {}):
        records[key(name, gpus)] = dict(record, row=name, gpus=gpus)


def in_order(records):
    """(row, number of GPUs, record) in the order of ROWS."""
    for name, row in ROWS.items():
        for gpus in row.gpus:
            if key(name, gpus) in records:
                yield name, row, gpus, records[key(name, gpus)]


def peers_of(record):
    return [name for name in PEERS if name in record["sides"]]


def ours_of(record):
    return [name for name in record["sides"] if name not in PEERS]


def best(row, gpus, record, names):
    """The side of `names` with the best figure; None where all failed."""
    values = {name: row.value(record["sides"][name], gpus) for name in names}
    values = {name: value for name, value in values.items() if value is not None}
    return (max if row.higher_is_better() else min)(values, key=values.get, default=None)


def number(row, value):
    return f"{value:,.0f}" if row.unit in UNITS else f"{value:.3f}" if value < 10 else f"{value:,.2f}"


def goal_text(row, gpus, which):
    goal = row.goals.get(gpus)
    if goal is None:
        return ""
    value = getattr(goal, which)
    return f"{value:g} x one GPU" if goal.of_one_gpu else f"{value:,g}"


def same_machine(a, b):
    """Also where one call saw fewer of its GPUs than the other."""
    return all(
        a["machine"].get(key) == b["machine"].get(key) for key in {*a["machine"], *b["machine"]} - {"gpus"}
    )


def reached(row, gpus, record, records):
    """Our best figure in the terms of the row's goal, as text."""
    value = row.value(record["sides"][best(row, gpus, record, ours_of(record))], gpus)
    goal = row.goals.get(gpus)
    single = records.get(key(record["row"], 1), {})
    if goal is None or not goal.of_one_gpu or "sides" not in single or not same_machine(record, single):
        return number(row, value)
    alone = row.value(single["sides"][best(row, 1, single, ours_of(single))], 1)
    return f"{number(row, value)} ({value / alone:.3f} x one GPU)"


def figure(row, gpus, record, side):
    measured = record["sides"].get(side, {})
    if "error" in measured:
        return "failed"
    return number(row, row.value(measured, gpus)) if measured else ""


def gain(row, ours, theirs):
    return f"{ours / theirs if row.higher_is_better() else theirs / ours:.2f}"


def speed_table(records):
    measured = set().union(*(record.get("sides", {}) for record in records.values()))
    peers = [name for name in PEERS if name in measured]
    head = [
        "",
        "GPUs",
        "before",
        "libddp",
        *(PEER_TITLES[name] for name in peers),
        "libddp x best of these",
        "must",
        "aim",
        "emulated / libddp",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for _, row, gpus, record in in_order(records):
        title = f"{row.title}, {unit(row)}"
        if "sides" not in record:
            cells = [title, str(gpus), record["not_run"]]
            lines.append("| " + " | ".join(cells + [""] * (len(head) - len(cells))) + " |")
            continue
        ours, theirs = (best(row, gpus, record, names) for names in (ours_of(record), peers_of(record)))
        values = [row.value(record["sides"][side], gpus) for side in (ours, theirs) if side]
        cells = [
            title,
            str(gpus),
            figure(row, gpus, record, "before"),
            reached(row, gpus, record, records) if ours else "failed",
        ]
        cells += [figure(row, gpus, record, peer) for peer in peers]
        cells += [
            gain(row, *values) if len(values) == 2 else "",
            goal_text(row, gpus, "must"),
            goal_text(row, gpus, "aim"),
        ]
        cells.append(
            f"{record['emulated_ms'] / record['sides'][ours]['ms']:.3f}"
            if ours and "emulated_ms" in record
            else ""
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def also_asked(records):
    """What was asked of rows beyond their own unit: (text, GPUs, reached, must, aim)."""
    for name, row, gpus, record in in_order(records):
        ours = best(row, gpus, record, ours_of(record)) if "sides" in record else None
        side = record["sides"][ours] if ours else {}
        if "emulated_ms" in record and "ms" in side:
            yield (
                f"{row.title}: emulated step / ours",
                gpus,
                f"{record['emulated_ms'] / side['ms']:.3f}",
                ">= 0.92",
                ">= 0.98",
            )
        eager = record.get("sides", {}).get("eager", {})
        if name == "resnet50" and gpus == 1 and side.get("peak_mib") and eager.get("peak_mib"):
            mib, eager_mib = side["peak_mib"], eager["peak_mib"]
            ratio = f"{mib / eager_mib:.3f} ({mib:,} / {eager_mib:,} MiB)"
            yield f"{row.title}: peak memory / PyTorch eager's", gpus, ratio, "<= 1", "<= 0.85"
        if name == "resnet50" and gpus > 1 and "exposed_comm_ms" in side:
            share = f"{side['exposed_comm_ms'] / side['ms']:.2%} ({side['exposed_comm_ms']:.3f} ms)"
            yield f"{row.title}: exposed communication of a step", gpus, share, "<= 1.5%", "<= 0.5%"
        if "extra_us" in side:
            extra = " / ".join(f"{us:.1f} us ({mode})" for mode, us in side["extra_us"].items())
            goal = "<= 4 us (eager), 2 us (graph)"
            yield "all-reduce below 4 MiB: largest excess over NCCL's time", gpus, extra, goal, ""
        if "step=graph" in side.get("settings", "") and "host_us" in side:
            waits = f", {side['profile']['waits']:g} waits for the device" if "profile" in side else ""
            yield (
                f"{row.title}: host CPU time per replayed step",
                gpus,
                f"{side['host_us']:.0f} us{waits}",
                "<= 50 us, 0 waits",
                "",
            )


def asked_table(records):
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in also_asked(records)]
    return (
        ["", "| further goals | GPUs | reached | must | aim |", "|---|---|---|---|---|", *lines, ""]
        if lines
        else [""]
    )


def side_columns(side):
    """Of a side that has a step's time."""
    profile = side.get("profile", {})
    host = f"{side['host_us']:,.0f}" if "host_us" in side else ""
    return [
        f"{side['ms']:.3f}",
        host,
        str(profile.get("kernels", "")),
        f"{profile['busy_us'] / 1000:.3f}" if profile else "",
        f"{side['peak_mib']:,}",
        str(side.get("sm_mhz", "")),
        str(side.get("power_w", "")),
        side["settings"],
    ]


def side_table(records):
    head = [
        "",
        "GPUs",
        "",
        "ms",
        "host us",
        "kernels",
        "device busy ms",
        "peak MiB",
        "SM MHz",
        "W",
        "settings",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for _, row, gpus, record in in_order(records):
        for side_name, side in record.get("sides", {}).items():
            if "ms" in side:
                title = PEER_TITLES.get(side_name, side_name)
                lines.append("| " + " | ".join([row.title, str(gpus), title] + side_columns(side)) + " |")
    return lines


def on_gpus(gpus):
    return f"{gpus} GPU{'s' if gpus > 1 else ''}"


def in_rounds(record):
    return f"{record['rounds']} rounds" if record["rounds"] > 1 else "1 run per side"


def remark_lines(records):
    """A table of the sides' remarks and errors; empty without any."""
    lines = []
    for _, row, gpus, record in in_order(records):
        for side_name, side in record.get("sides", {}).items():
            if "remark" in side or "error" in side:
                said = side.get("remark") or side["error"]
                lines.append(f"| {row.title} | {gpus} | {PEER_TITLES.get(side_name, side_name)} | {said} |")
    return ["| remarks | GPUs | side |  |", "|---|---|---|---|", *lines, ""] if lines else []


def profile_tables(records):
    lines = []
    for _, row, gpus, record in in_order(records):
        profiles = {
            PEER_TITLES.get(n, n): s["profile"] for n, s in record.get("sides", {}).items() if "profile" in s
        }
        if profiles:
            lines += [
                "",
                f"{row.title}, {on_gpus(gpus)}:",
                "",
                step_profile.table(profiles, row.least_us(gpus)),
            ]
    return lines


def machine_lines(records):
    """A table of the machine, the commit and the time of each row."""
    calls = {}
    for name, _, gpus, record in in_order(records):
        if "sides" in record:
            m = record["machine"]
            about = " | ".join(
                map(
                    str,
                    (
                        m.get("gpu", "CPU"),
                        m.get("driver", "-"),
                        m.get("max_sm_mhz", "-"),
                        m.get("power_limit_w", "-"),
                        m["torch"],
                        m["cuda"],
                        m.get("cudnn", "-"),
                        m.get("nccl", "-"),
                        m["commit"],
                        in_rounds(record),
                        record["when"],
                    ),
                )
            )
            calls.setdefault(about, []).append(f"{name} on {gpus}")
    head = [
        "measured",
        "device",
        "driver",
        "max MHz",
        "max W",
        "PyTorch",
        "CUDA",
        "cuDNN",
        "NCCL",
        "commit",
        "rounds",
        "when",
    ]
    lines = [f"| {', '.join(rows)} | {about} |" for about, rows in calls.items()]
    return ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines] if lines else []


def markdown(records):
    parts = [
        speed_table(records),
        asked_table(records),
        remark_lines(records),
        machine_lines(records),
        ["", "Every side of each row, with the cost of a step:", ""],
        side_table(records),
    ]
    profiles = profile_tables(records)
    if profiles:
        parts += [
            [
                "",
                "GPU time of a step by class of kernel (`benchmarks/step_profile.py`). Profiling makes a "
                "step a few percent longer.",
                "A GEMM is a convolution or a linear layer. `benchmarks/roofline.py` computes the roofline.",
            ],
            profiles,
        ]
    return "\n".join(itertools.chain.from_iterable(parts))


def write_table(path, records):
    """Puts the tables between the marks of the document at `path`."""
    with open(path) as f:
        text = f.read()
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise ValueError(f"{path} lacks the marks {BEGIN} and {END}, in this order")
    text = text[:begin] + BEGIN + "\n\n" + markdown(records) + "\n\n" + text[end:]
    with open(path + ".part", "w") as f:
        f.write(text)
    os.replace(path + ".part", path)


CSV_FIELDS = [
    "row",
    "gpus",
    "side",
    "ms",
    "value",
    "unit",
    "must",
    "aim",
    "peak_mib",
    "host_us",
    "host_ms",
    "exposed_comm_ms",
    "kernels",
    "busy_us",
    "sm_mhz",
    "power_w",
    "celsius",
    "emulated_ms",
    "rounds",
    "when",
    "gpu",
    "commit",
    "settings",
    "remark",
    "error",
    "not_run",
]


def write_csv(path, records):
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, CSV_FIELDS, extrasaction="ignore")
        writer.writeheader()
        for name, row, gpus, record in in_order(records):
            common = dict(
                row=name,
                gpus=gpus,
                unit=row.unit,
                must=goal_text(row, gpus, "must"),
                aim=goal_text(row, gpus, "aim"),
                **{k: record.get(k, "") for k in ("emulated_ms", "rounds", "when", "not_run")},
            )
            common.update(
                gpu=record.get("machine", {}).get("gpu", ""),
                commit=record.get("machine", {}).get("commit", ""),
            )
            for side_name, side in record.get("sides", {"": {}}).items():
                value = row.value(side, gpus)
                value = {} if value is None else {"value": round(value, 4)}
                profile = {k: side["profile"][k] for k in ("kernels", "busy_us")} if "profile" in side else {}
                writer.writerow({**common, **side, **value, **profile, "side": side_name})
