# SPDX-License-Identifier: Apache-2.0
"""Rows that programs of their own measure: each function gives the sides of its row, with `value` in the
row's unit and what else is to be said as `remark`, and of how many rounds they are."""

import csv
import functools
import glob
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import interleaved
import photographs
from rows import PEERS, ROWS

ROOT = os.path.dirname(interleaved.HERE)
TIMEOUT = float(os.environ.get("PROGRAM_TIMEOUT", "300"))


def measure(o, name, gpus):
    """(sides, number of rounds)"""
    try:
        return globals()[name](o, gpus)
    except interleaved.ERRORS as error:  # before any side was run
        return dict(libddp=interleaved.failure(error)), 0


def run(command, gpus, log):
    """The output of a program on `gpus` ranks, which is also kept in `log`."""
    environment = dict(os.environ, NCCL_NVLS_ENABLE="0", OMP_NUM_THREADS="1")
    with open(log, "w") as f:
        process = subprocess.Popen(
            interleaved.launcher(command[0], gpus) + command,
            stdout=f,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
        )
        try:
            code = process.wait(TIMEOUT)
        finally:
            interleaved.end(process)
    with open(log) as f:
        text = f.read()
    if code != 0:
        raise RuntimeError(f"{os.path.basename(command[0])} ended with {code}: see {log}")
    return text


def side(function, *arguments):
    """What `function` gives, or why it failed: one side's failure is not the other's."""
    try:
        return function(*arguments)
    except interleaved.ERRORS as error:
        return interleaved.failure(error)


def in_turn(functions, rounds):
    """By name what each function gave in each round, all of them in turn from alternating ends; one that
    failed is left out of what follows."""
    runs = {name: [] for name in functions}
    for index in range(rounds):
        for name in list(functions)[:: 1 if index % 2 == 0 else -1]:
            if not any("error" in run for run in runs[name]):
                runs[name].append(side(functions[name]))
    return runs


def program(o, name):
    return os.path.join(os.path.abspath(o.build), name)


def log_path(o, name):
    return os.path.join(os.path.abspath(o.out), "logs", f"{name}.log")


# ---- all_reduce

ALL_REDUCE_ROUNDS = 21


def all_reduce(o, gpus):
    def ours():
        return worst_all_reduce(
            run(
                [program(o, "benchmarks/bench_all_reduce"), f"rounds={ALL_REDUCE_ROUNDS}"],
                gpus,
                log_path(o, f"all_reduce_{gpus}"),
            )
        )

    return dict(libddp=side(ours)), ALL_REDUCE_ROUNDS


def all_reduce_times(text):
    """bench_all_reduce's lines: (mode, bytes, NCCL's us, ours)."""
    lines = [line.split() for line in text.splitlines() if re.match(r"(eager|graph)\s+\d+\s", line)]
    return [(mode, int(size), float(theirs), float(mine)) for mode, size, theirs, mine, *_ in lines]


def worst_all_reduce(text):
    """`extra_us` by mode is what was asked below 4 MiB."""
    rows = all_reduce_times(text)
    large = [(theirs / mine, mode, size) for mode, size, theirs, mine in rows if size >= 4 << 20]
    small = [(mine - theirs, mode, size) for mode, size, theirs, mine in rows if size < 4 << 20]
    if not large or not small:
        raise ValueError("bench_all_reduce printed no times from both sides of 4 MiB")
    ratio, mode, size = min(large)
    extra, small_mode, small_size = max(small)
    extra_us = {}
    for us, of_mode, _ in sorted(small, key=lambda row: row[1]):
        extra_us[of_mode] = max(us, extra_us.get(of_mode, us))
    return dict(
        value=ratio,
        extra_us=extra_us,
        remark=f"least at {size >> 20} MiB ({mode}); below 4 MiB at most {extra:.1f} us more "
        f"({small_mode}, {small_size >> 10} KiB)",
    )


# ---- cifar10

# Ours, by name: settings of resnet_ddp beside those of its configuration.
CIFAR10_SIDES = {"libddp": ["train.cuda_graph=on"], "libddp_eager": ["train.cuda_graph=off"]}


def cifar10(o, gpus):
    """Both sides' clocks run from the end of the first step to the end of the last evaluation, of which there
    is one after each epoch; what comes before them is untimed, and so is a run of one epoch on several GPUs,
    which leaves a plan. One line of our log an epoch: the device is waited for there anyway."""
    batch, eval_batch = f"batch_size={512 // gpus}", f"eval_batch_size={1000 if gpus == 1 else 1250}"
    data = os.path.abspath(o.cifar10)

    plan = os.path.join(os.path.abspath(o.out), "logs", f"cifar10_{gpus}.plan.json")
    plan_file = [f"context.plan_file={plan}"] if gpus > 1 else []
    pathlib.Path(plan).unlink(missing_ok=True)  # of another call

    def resnet_ddp(name, settings):
        folder = os.path.join(os.path.abspath(o.out), "logs", f"cifar10_{gpus}.{name}")
        text = run(
            [
                program(o, "examples/resnet_ddp"),
                "--config",
                os.path.join(ROOT, "examples/configs/cifar10_resnet18_cifar_stem.yaml"),
                f"data.path={data}",
                f"train.{batch}",
                f"train.{eval_batch}",
                "checkpoint.dir=",
                f"metrics.dir={folder}",
                "metrics.run_name=run",
                "metrics.progress=plain",
                f"metrics.log_every={50000 // 512}",
                "train.eval_first=true",
            ]
            + settings
            + plan_file,
            gpus,
            log_path(o, f"cifar10_{gpus}.{name}"),
        )
        return folder, text

    def ours(name):
        # How to cut the buckets is measured once, not in the steps that are timed.
        if plan_file and not os.path.exists(plan):
            resnet_ddp("plan", CIFAR10_SIDES[name] + ["train.epochs=1"])
            os.stat(plan)  # raises where it left none
        folder, text = resnet_ddp(name, CIFAR10_SIDES[name])
        return dict(seconds_of_run(folder), accuracy=re.findall(r"test accuracy\s+([\d.]+ %)", text)[-1])

    def theirs(name):
        script = os.path.join(interleaved.HERE, "pytorch_resnet.py")
        peer = [script, "model=resnet18", f"cifar10={data}", "stem=cifar", batch, eval_batch]
        peer += ["epochs=24", "label_smoothing=0.1", *PEERS[name], *([] if gpus > 1 else ["wrap=false"])]
        said = json.loads(run(peer, gpus, log_path(o, f"cifar10_{gpus}.{name}")).strip().splitlines()[-1])
        return dict(
            value=said["seconds"],
            train_seconds=said["train_seconds"],
            accuracy=f"{100 * said['accuracy']:.2f} %",
        )

    functions = {name: functools.partial(ours, name) for name in CIFAR10_SIDES}
    functions.update({name: functools.partial(theirs, name) for name in o.peers})
    measured = in_turn(functions, o.program_rounds)
    return {name: about_runs(runs) for name, runs in measured.items()}, o.program_rounds


def about_runs(runs):
    """The run of the median time, with the accuracies of all."""
    if "error" in runs[-1]:
        return runs[-1]
    by_time = sorted(runs, key=lambda run: run["value"])
    middle = by_time[(len(runs) - 1) // 2]
    spread = f", {by_time[0]['value']:.2f} to {by_time[-1]['value']:.2f} s" if len(runs) > 1 else ""
    return dict(
        value=middle["value"],
        remark=f"test accuracy {', '.join(run['accuracy'] for run in runs)}, training alone "
        f"{middle['train_seconds']:.2f} s{spread}",
    )


def seconds_of_run(folder):
    """From the end of the first step to the end of the last epoch with its evaluation, and of that without
    evaluations, by what the run wrote. Before it are the first step and, with train.eval_first, an
    evaluation, in which cuDNN chooses its plans."""

    def read(name):
        paths = sorted(glob.glob(os.path.join(folder, "**", name), recursive=True), key=os.path.getmtime)
        if not paths:
            raise ValueError(f"{folder} holds no {name}")
        with open(paths[-1], newline="") as f:
            return list(csv.DictReader(f))

    first, epochs = read("steps.csv")[0], read("epochs.csv")
    return dict(
        value=float(epochs[-1]["time"]) - (float(first["time"]) - float(first["interval_seconds"])),
        train_seconds=sum(float(epoch["epoch_seconds"]) for epoch in epochs),
    )


# ---- resnet50_jpeg, jpeg_loader


def num_workers(gpus):
    """Of a GPU: as many as there are processors for it."""
    return max(1, len(os.sched_getaffinity(0)) // gpus)


def resnet50_jpeg(o, gpus):
    """Steps fed by the loader beside steps on a resident batch, round by round. A round begins with some
    steps that are not timed, which use up what the loader made while others ran."""
    row = ROWS["resnet50"]
    own = list(row.ours(gpus).values())[-1]
    bench = [program(o, "benchmarks/bench_resnet")] + row.settings(gpus, own) + own + o.set
    workers = num_workers(gpus)
    with tempfile.TemporaryDirectory() as folder:
        fed = bench + [
            f"data={photographs.prepare(o.photographs, folder)}",
            f"num_workers={workers}",
            "lead_in=10",
        ]
        sides = dict(synthetic=bench, libddp=fed, libddp_nvjpeg=fed + ["jpeg_decoder=nvjpeg"])
        measured = interleaved.run(
            sides, gpus, log_path(o, f"resnet50_jpeg_{gpus}")[:-4], o.rounds, keep_going=True
        )
    return fed_against_synthetic(measured, workers), o.rounds


def fed_against_synthetic(measured, workers):
    """The sides of the row: what is fed by the rate of what is not."""
    synthetic = measured.pop("synthetic")
    if "error" in synthetic:
        return dict.fromkeys(measured, synthetic)
    sides = {}
    for name, fed in measured.items():
        sides[name] = (
            fed
            if "error" in fed
            else dict(
                value=synthetic["ms"] / fed["ms"],
                remark=f"{fed['ms']:.2f} ms per step from JPEG with {workers} threads per GPU, "
                f"{synthetic['ms']:.2f} ms on a resident batch",
            )
        )
    return sides


def jpeg_loader(o, gpus):
    """Batches alone. A round of ours begins with some that are not timed, as above; of PyTorch's it begins
    without processes, and those that they make at first are not timed either (pytorch_loader.py)."""
    workers = num_workers(gpus)
    with tempfile.TemporaryDirectory() as folder:
        common = [
            f"data={photographs.prepare(o.photographs, folder)}",
            "image_size=224",
            f"batch_size={LOADER_BATCH}",
            f"num_workers={workers}",
        ]
        ours = (
            [program(o, "benchmarks/bench_resnet"), "step=load", "steps=60", "lead_in=10", "warmup=10"]
            + common
            + o.set
        )
        sides = dict(libddp=ours, libddp_nvjpeg=ours + ["jpeg_decoder=nvjpeg"])
        if o.peers:
            sides["eager"] = [os.path.join(interleaved.HERE, "pytorch_loader.py")] + common + o.set
        measured = interleaved.run(
            sides, gpus, log_path(o, f"jpeg_loader_{gpus}")[:-4], o.rounds, keep_going=True
        )
    return {name: loading_rate(name, result, workers) for name, result in measured.items()}, o.rounds


LOADER_BATCH = 256


def loading_rate(name, measured, workers):
    if "error" in measured:
        return measured
    rates = [
        LOADER_BATCH / ms * 1000
        for ms in (measured["ms"], max(measured["rounds_ms"]), min(measured["rounds_ms"]))
    ]
    who = f"DataLoader and PIL, {workers} processes" if name in PEERS else f"{workers} threads"
    return dict(value=rates[0], remark=f"{who}, {rates[1]:,.0f} to {rates[2]:,.0f} images/s")


if __name__ == "__main__":
    sys.exit(__doc__)
