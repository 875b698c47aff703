# SPDX-License-Identifier: Apache-2.0
"""cluster_check as a user runs it: what it prints, its JSON and page (tools/plot_check.py), thresholds, exit
codes.

usage: cluster_check_test.py full|quick|fails|thresholds|refuses|gpu LAUNCHER PROGRAM RANKS
  full        all checks on CPU ranks, the whole JSON
  quick       --quick leaves out what it promises to leave out
  fails       a threshold that nothing meets: exit code 1, each row with its rank and node
  thresholds  --write-thresholds, then a run against the file
  refuses     wrong arguments and wrong threshold files: a message, exit code 64, nothing runs
  gpu         --quick on GPUs
"""

import html.parser
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile

scenario, launcher, program, ranks = sys.argv[1:]
RANKS = int(ranks)
HOST = socket.gethostname()
PLOT_CHECK = pathlib.Path(__file__).resolve().parents[2] / "tools" / "plot_check.py"


def run(*arguments, code=0, output=(), device="cpu", environment=()):
    """Starts the ranks; rank 0 must write every text of `output`. Returns all output. The launcher hides
    variables of Slurm, so `environment` is set behind it."""
    launch = ["--launch", "env"] if RANKS == 1 and device == "cpu" else []
    launch += ["--gpus"] if device == "cuda" else []
    expected = []
    for text in output:
        expected += ["--expect-output", "0:" + text]
    done = subprocess.run(
        [
            launcher,
            "--ranks",
            ranks,
            "--timeout",
            "200",
            *launch,
            "--expect-exit",
            f"*:{code}",
            *expected,
            "--",
            "/usr/bin/env",
            *environment,
            program,
            f"device={device}",
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout)
    if done.returncode == 77:
        sys.exit(77)
    assert done.returncode == 0, f"the launcher ended with {done.returncode}"
    return done.stdout


def report():
    return json.loads(pathlib.Path("out/report.json").read_text())


def rows(data, name):
    return [row for row in data["rows"] if f"{row['group']}.{row['name']}" == name]


class Page(html.parser.HTMLParser):
    """Text of the page; refuses scripts and whatever a browser would load."""

    def __init__(self):
        super().__init__()
        self.text = ""

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "img", "link", "iframe"), tag
        assert not {"src", "href"} & {name for name, _ in attrs}, attrs

    def handle_data(self, data):
        self.text += data


def page():
    subprocess.run([sys.executable, PLOT_CHECK, "out"], check=True)
    parser = Page()
    parser.feed(pathlib.Path("out/report.html").read_text())
    return parser.text


def full():
    run("output=out", output=["all checks passed", "wrote out/report.json"])
    data = report()
    assert data["passed"] and data["failures"] == [] and data["thresholds"] == "cpu" and not data["quick"]
    # A host without GPUs cannot count them, and one rank has no collectives.
    not_measured = [*([] if RANKS > 1 else ["collectives.wrong_sums"]), "health.distinct_gpu_counts"]
    if rows(data, "health.distinct_gpu_counts")[0]["value"] is None:
        assert data["thresholds_not_measured"] == not_measured and data["thresholds_met"] == 7 - len(
            not_measured
        ), data["thresholds_not_measured"]
    assert [rank["host"] for rank in data["ranks"]] == [HOST] * RANKS
    per_rank = [
        "gpu.gemm_fp32_512",
        "gpu.device_copy",
        "training.encoder_fp32",
        "training.encoder_bf16",
        "training.resnet",
    ]
    for name in per_rank:
        found = rows(data, name)
        assert sorted(row["rank"] for row in found) == list(range(RANKS)), name
        assert all(row["value"] > 0 and row["node"] == HOST for row in found), name
    for name in ("health.open_files", "health.clock_skew", "health.shm_free"):
        assert [row["rank"] for row in rows(data, name)] == [0], name  # one row a node
    for row in rows(data, "health.nvlinks_down"):
        assert row["value"] is None and row["verdict"] == "n/a", row
    assert {row["verdict"] for row in rows(data, "health.open_files")} == {"pass"}
    check_collectives(data)
    # Training trains: the loss of the one batch falls.
    assert [row["value"] for row in rows(data, "training.not_learning")] == [0] * RANKS
    for name in ("training.encoder_fp32", "training.encoder_bf16", "training.resnet"):
        first, last = map(float, re.search(r"loss (\S+) to (\S+)", rows(data, name)[0]["text"]).groups())
        assert last < first, (name, first, last)
    text = page()
    assert "all checks passed: " in text and "encoder_bf16" in text and HOST in text


def check_collectives(data):
    """By the definitions of nccl-tests. One rank has none: nothing would move."""
    found = [row for row in data["rows"] if row["group"] == "collectives"]
    if RANKS == 1:
        assert [(row["name"], row["verdict"], row["text"]) for row in found] == [
            ("all_reduce_busbw", "n/a", "one rank")
        ], found
        assert data["collectives"] == [] and data["pairs"]["gb_per_s"] == []
        return
    assert [row["value"] for row in rows(data, "collectives.wrong_sums")] == [0]
    (latency,) = rows(data, "collectives.all_reduce_latency")
    assert latency["value"] > 0
    (links,) = rows(data, "collectives.pair_percent_below_median")
    assert re.search(rf"slowest: rank \d on {HOST} to rank \d on {HOST}, ", links["text"]), links
    factors = {
        "all_reduce": 2 * (RANKS - 1) / RANKS,
        "all_gather": (RANKS - 1) / RANKS,
        "reduce_scatter": (RANKS - 1) / RANKS,
    }
    assert {point["operation"] for point in data["collectives"]} == set(factors)
    for point in data["collectives"]:
        algbw = point["bytes"] / point["microseconds"] / 1000
        assert abs(point["algbw_gb_per_s"] - algbw) < 1e-6 * algbw, point
        assert abs(point["busbw_gb_per_s"] - algbw * factors[point["operation"]]) < 1e-6 * algbw, point
    assert {1 << 10, 1 << 24} <= {point["bytes"] for point in data["collectives"]}
    pairs = data["pairs"]["gb_per_s"]
    assert len(pairs) == RANKS
    for i, row in enumerate(pairs):
        assert all((value > 0) == (i != j) for j, value in enumerate(row)), pairs


def quick():
    run("--quick", "output=out", output=["all checks passed"])
    data = report()
    names = {f"{row['group']}.{row['name']}" for row in data["rows"]}
    assert data["quick"] and "training.encoder_bf16" in names and "health.open_files" in names
    assert not {"training.resnet", "training.encoder_fp32", "collectives.pair_same_node"} & names
    assert len(data["collectives"]) == 4 and data["pairs"]["gb_per_s"] == []


def fails():
    pathlib.Path("strict.yaml").write_text("health:\n  open_files: 1e12\ngpu:\n  device_copy: 1e9\n")
    node = f"rank 0 (cpu) on node {HOST}"
    every = [f"TB/s, must be at least 1e+09: rank {rank} (cpu) on node {HOST}" for rank in range(RANKS)]
    output = run(
        "--quick",
        "thresholds=strict.yaml",
        "output=out",
        code=1,
        output=[
            "FAILED health.open_files = ",
            node,
            "FAILED gpu.device_copy",
            *every,
            f"{RANKS + 1} rows failed",
        ],
    )
    assert "all checks passed" not in output
    data = report()
    assert not data["passed"] and len(data["failures"]) == RANKS + 1
    assert [row["verdict"] for row in rows(data, "gpu.device_copy")] == ["fail"] * RANKS
    assert f"{RANKS + 1} rows failed" in page()
    # A run that dies leaves no verdict of an earlier one, and a file that cannot be written hides no failure.
    page()
    pathlib.Path("out/report.json").write_text('{"passed": true}')
    run(
        "thresholds=strict.yaml",
        "output=out",
        "--write-thresholds",
        "/proc/none/own.yaml",
        code=73,
        output=["--write-thresholds: cannot write"],
    )
    assert not pathlib.Path("out/report.json").exists() and not pathlib.Path("out/report.html").exists()


def thresholds():
    run("--quick", "output=", "--write-thresholds", "own.yaml", output=["wrote own.yaml"])
    text = pathlib.Path("own.yaml").read_text()
    for line in (
        "wrong_sums: 0",
        "all_reduce_latency: ",
        "device_copy: ",
        "encoder_bf16: ",
        "open_files: 1024",
    ):
        assert line in text, text
    # Two CPU runs may differ by more than the margins: the file is loosened as a person would.
    loose = re.sub(
        r"(device_copy|encoder_bf16|gemm_fp32_512|all_reduce_busbw): (\S+)",
        lambda found: f"{found[1]}: {float(found[2]) / 20:.3g}",
        text,
    )
    loose = re.sub(
        r"(all_reduce_latency): (\S+)", lambda found: f"{found[1]}: {float(found[2]) * 50:.6g}", loose
    )
    assert loose != text
    pathlib.Path("loose.yaml").write_text(loose)
    # What someone else put in the place of the files: no pipe is waited for, and nothing goes through a link.
    os.makedirs("out")
    os.mkfifo("out/report.html")
    os.mkfifo("pipe")
    pathlib.Path("mine").write_text("mine")
    os.symlink("../mine", "out/report.json")
    run(
        "--quick",
        "output=out",
        "thresholds=loose.yaml",
        "--write-thresholds",
        "pipe",
        code=73,
        output=["all checks passed", "thresholds: loose.yaml", "--write-thresholds: cannot write pipe"],
    )
    assert pathlib.Path("mine").read_text() == "mine" and "all checks passed" in page() and report()["passed"]
    judged = [row for row in report()["rows"] if row["verdict"] == "pass"]
    assert {"device_copy", "encoder_bf16", "all_reduce_latency"} <= {row["name"] for row in judged}


def refuses():
    pathlib.Path("unknown.yaml").write_text("gpu:\n  device_copie: 3\n")
    pathlib.Path("section.yaml").write_text("gpus:\n  device_copy: 3\n")
    pathlib.Path("text.yaml").write_text("gpu:\n  device_copy: fast\n")
    pathlib.Path("negative.yaml").write_text("gpu:\n  device_copy: -3\n")
    pathlib.Path("empty.yaml").write_text("gpu:\n")
    for argument, message in (
        ("thresholds=unknown.yaml", "gpu.device_copie"),
        ("thresholds=section.yaml", "gpus"),
        ("thresholds=text.yaml", "device_copy"),
        ("thresholds=b200", "cpu"),
        ("devices=cpu", "unknown key"),
        ("device=tpu", "auto, cpu or cuda"),
        # Messages of the library name keys of section context.
        ("context.device=tpu", "context.device=tpu: expected one of auto, cpu, cuda"),
        ("context.devise=cpu", "did you mean context.device?"),
        ("context.communicator.backend=nccl", "context.communicator.backend=nccl: NCCL reduces CUDA tensors"),
        ("--fast", "unknown argument"),
        ("--write-thresholds", "a file must follow"),
        ("thresholds=", "write none"),
        ("thresholds=.", "neither a file"),
        ("thresholds=empty.yaml", "sets no limit"),
        ("thresholds=negative.yaml", "thresholds=negative.yaml: "),
    ):
        output = run("output=out", argument, code=64, output=[message])
        assert "checking" not in output, output
    run("output=out", "--write-thresholds", "--quick", code=64, output=["a file must follow"])
    assert not pathlib.Path("out").exists()
    pathlib.Path("file").write_text("")
    run("--quick", "output=file/below", code=73, output=["cannot write file/below/report.json"])
    # A node whose GPUs are gone is no CPU node, even if somebody hides them.
    for environment, sign in (
        (["SLURM_GPUS_ON_NODE=8", "CUDA_VISIBLE_DEVICES="], "SLURM_GPUS_ON_NODE is set"),
        (["CUDA_VISIBLE_DEVICES=7777"], "CUDA_VISIBLE_DEVICES is set (7777)"),  # no host has so many
    ):
        output = run(
            "device=auto",
            "output=out",
            code=64,
            environment=environment,
            output=["device=auto finds no usable GPU on", sign],
        )
        assert "checking" not in output, output


def gpu():
    run("--quick", "thresholds=none", "output=out", device="cuda", output=["no threshold was checked"])
    data = report()
    assert [row["value"] for row in rows(data, "training.not_learning")] == [0] * RANKS
    assert [row["value"] for row in rows(data, "health.gpus_missing")] == [0]
    for name in ("gpu.gemm_bf16_8192", "gpu.device_copy", "training.encoder_bf16"):
        assert [row["rank"] for row in rows(data, name)] == list(range(RANKS)), name
        assert all(row["value"] > 0 for row in rows(data, name)), name
    assert all(rank["gpu"] and rank["device"].startswith("cuda") for rank in data["ranks"])


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    {"full": full, "quick": quick, "fails": fails, "thresholds": thresholds, "refuses": refuses, "gpu": gpu}[
        scenario
    ]()
    os.chdir("/")
