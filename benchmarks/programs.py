# SPDX-License-Identifier: Apache-2.0
"""Rows that a program of its own measures, start to end: each function gives the sides of its row, with `value` in
the row's unit and what else is to be said as `remark`."""
import csv
import glob
import json
import os
import re
import subprocess
import sys
import tempfile

import interleaved
import photographs
from rows import PEERS

ROOT = os.path.dirname(interleaved.HERE)
TIMEOUT = float(os.environ.get("PROGRAM_TIMEOUT", "300"))


def measure(o, name, gpus):
    return globals()[name](o, gpus)


def run(command, gpus, log):
    """The output of a program on `gpus` ranks, which is also kept in `log`."""
    environment = dict(os.environ, NCCL_NVLS_ENABLE="0", OMP_NUM_THREADS="1")
    with open(log, "w") as f:
        done = subprocess.run(interleaved.launcher(command[0], gpus) + command, stdout=f, stderr=subprocess.STDOUT, env=environment,
                              cwd=ROOT, timeout=TIMEOUT)
    with open(log) as f:
        text = f.read()
    if done.returncode != 0:
        raise RuntimeError(f"{os.path.basename(command[0])} ended with {done.returncode}: see {log}")
    return text


def side(function, *arguments):
    """What `function` gives, or why it failed: one side's failure is not the other's."""
    try:
        return function(*arguments)
    except interleaved.ERRORS as error:
        return dict(error=str(error))


def program(o, name):
    return os.path.join(os.path.abspath(o.build), name)


def log_path(o, name):
    return os.path.join(os.path.abspath(o.out), "logs", f"{name}.log")


# ---- all_reduce

def all_reduce(o, gpus):
    def ours():
        return worst_all_reduce(run([program(o, "benchmarks/bench_all_reduce")], gpus, log_path(o, f"all_reduce_{gpus}")))
    return dict(libddp=side(ours))


def worst_all_reduce(text):
    """From bench_all_reduce's lines: mode, bytes, NCCL's us, ours, …"""
    lines = [line.split() for line in text.splitlines() if re.match(r"(eager|graph)\s+\d+\s", line)]
    rows = [(mode, int(size), float(theirs), float(mine)) for mode, size, theirs, mine, *_ in lines]
    large = [(theirs / mine, mode, size) for mode, size, theirs, mine in rows if size >= 4 << 20]
    small = [(mine - theirs, mode, size) for mode, size, theirs, mine in rows if size < 4 << 20]
    if not large or not small:
        raise ValueError("bench_all_reduce printed no times from both sides of 4 MiB")
    ratio, mode, size = min(large)
    extra, small_mode, small_size = max(small)
    return dict(value=ratio, remark=f"least at {size >> 20} MiB ({mode}); below 4 MiB at most {extra:.1f} us more "
                                    f"({small_mode}, {small_size >> 10} KiB)")


# ---- cifar10

# Ours, by name: settings of resnet_ddp. Weights and gradients in bf16 as in the rows of steps, and buckets as there.
CIFAR10_BEST = ["model.dtype=bf16", "ddp.fp32_grads=false"]
CIFAR10_HIDDEN = ["ddp.bucket_cap_mb=auto", "context.communicator.nccl_max_ctas=8", "context.communicator.nccl_algorithm=symmetric"]
CIFAR10_SIDES = {"libddp": CIFAR10_BEST + ["train.cuda_graph=on"], "libddp_eager": CIFAR10_BEST + ["train.cuda_graph=off"]}


def cifar10(o, gpus):
    """Both sides' clocks run from the end of the first step to the end of the last evaluation, of which there is one after
    each epoch; what comes before them is untimed. One line of our log an epoch: the device is waited for there anyway."""
    batch, eval_batch = f"batch_size={512 // gpus}", f"eval_batch_size={1000 if gpus == 1 else 1250}"
    data = os.path.abspath(o.cifar10)

    def ours(name):
        folder = os.path.join(os.path.abspath(o.out), "logs", f"cifar10_{gpus}.{name}")
        text = run([program(o, "examples/resnet_ddp"), "--config", os.path.join(ROOT, "examples/configs/cifar10_resnet18_cifar_stem.yaml"),
                    f"data.path={data}", f"train.{batch}", f"train.{eval_batch}", "checkpoint.dir=", f"metrics.dir={folder}",
                    "metrics.run_name=run", "metrics.progress=plain", f"metrics.log_every={50000 // 512}", "train.eval_first=true"]
                   + CIFAR10_SIDES[name] + (CIFAR10_HIDDEN if gpus > 1 else []), gpus, log_path(o, f"cifar10_{gpus}.{name}"))
        return about_run(seconds_of_run(folder), re.findall(r"test accuracy\s+([\d.]+ %)", text)[-1])

    def theirs(name):
        peer = [os.path.join(interleaved.HERE, "pytorch_resnet.py"), "model=resnet18", f"cifar10={data}", "stem=cifar", batch, eval_batch,
                "epochs=24", "label_smoothing=0.1"] + PEERS[name] + ([] if gpus > 1 else ["wrap=false"])
        said = json.loads(run(peer, gpus, log_path(o, f"cifar10_{gpus}.{name}")).strip().splitlines()[-1])
        return about_run(dict(said, value=said["seconds"]), f"{100 * said['accuracy']:.2f} %")

    sides = {name: side(ours, name) for name in CIFAR10_SIDES}
    sides.update({name: side(theirs, name) for name in o.peers})
    return sides


def about_run(seconds, accuracy):
    return dict(value=seconds["value"], remark=f"test accuracy {accuracy}, training alone {seconds['train_seconds']:.2f} s")


def seconds_of_run(folder):
    """From the end of the first step to the end of the last epoch with its evaluation, and of that without evaluations, by
    what the run wrote. Before it are the first step and, with train.eval_first, an evaluation, in which cuDNN chooses its plans."""
    def read(name):
        paths = sorted(glob.glob(os.path.join(folder, "**", name), recursive=True), key=os.path.getmtime)
        if not paths:
            raise ValueError(f"{folder} holds no {name}")
        with open(paths[-1], newline="") as f:
            return list(csv.DictReader(f))

    first, epochs = read("steps.csv")[0], read("epochs.csv")
    return dict(value=float(epochs[-1]["time"]) - (float(first["time"]) - float(first["interval_seconds"])),
                train_seconds=sum(float(epoch["epoch_seconds"]) for epoch in epochs))


# ---- resnet50_jpeg

def resnet50_jpeg(o, gpus):
    """Steps fed by the loader beside steps on a resident batch, round by round. A round begins with some steps that are
    not timed, which use up what the loader made while others ran."""
    bench = [program(o, "benchmarks/bench_resnet"), "model=resnet50", "image_size=224", "batch_size=256", "step=graph", "param_dtype=bf16",
             "fp32_grads=false", "steps=60", "warmup=15"] + o.set
    workers = max(1, len(os.sched_getaffinity(0)) // gpus)
    with tempfile.TemporaryDirectory() as folder:
        fed = bench + [f"data={photographs.prepare(o.photographs, folder)}", f"num_workers={workers}", "lead_in=10"]
        sides = dict(synthetic=bench, libddp=fed, libddp_nvjpeg=fed + ["jpeg_decoder=nvjpeg"])
        measured = interleaved.run(sides, gpus, log_path(o, f"resnet50_jpeg_{gpus}")[:-4], o.rounds,
                                   keep_going=True)
    return fed_against_synthetic(measured, workers)


def fed_against_synthetic(measured, workers):
    """The sides of the row: what is fed by the rate of what is not."""
    synthetic = measured.pop("synthetic")
    if "error" in synthetic:
        return {name: synthetic for name in measured}
    sides = {}
    for name, fed in measured.items():
        sides[name] = fed if "error" in fed else dict(
            value=synthetic["ms"] / fed["ms"],
            remark=f"{fed['ms']:.2f} ms a step from JPEG with {workers} threads a GPU, {synthetic['ms']:.2f} ms on a resident batch")
    return sides


if __name__ == "__main__":
    sys.exit(__doc__)
