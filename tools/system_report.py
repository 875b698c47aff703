#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Describes this machine as Markdown: GPUs, their links, InfiniBand, CPU, memory, versions.

    tools/system_report.py [--output SYSTEM.md] [--build build] [--program PROGRAM]
    tools/system_report.py --run runs     for a report of a bug: also the newest run in the folder runs

Needs nothing but Python; what a machine has not, or a tool that is not installed, is said in one line.

Exit codes: 0 described, 64 a mistake in the call, 65 there is no such run, 73 the file cannot be written.
"""

import datetime
import glob
import json
import os
import platform
import re
import shutil
import subprocess
import sys

from run_page.files import SETTING
from run_top.folder import find_run
from scaling.command_line import Parser, WriteError, exit_code
from scaling.files import linked, replace_file
from scaling.numbers import constant_text, read_optional

UNKNOWN = "unknown"
LOG_LINES = 20  # of a run: its last warnings and errors, and as many of its last lines


def run(*command):
    """What a command prints; empty where it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace", opener=linked) as file:
            return file.read().strip()
    except OSError:
        return ""


def first(pattern, text, default=""):
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1).strip() if match else default


def code(text):
    return f"```\n{text}\n```"


def system_section():
    lscpu = run("lscpu")
    memory = int(first(r"^MemTotal:\s+(\d+)", read("/proc/meminfo"), "0")) / 2**20
    release = first(r'^PRETTY_NAME="?([^"\n]+)', read("/etc/os-release"), platform.system())
    rows = [
        ("operating system", f"{release}, Linux {platform.release()}"),
        (
            "CPU",
            first(r"^Model name:\s+(.+)", lscpu)
            or first(r"^model name\s+:\s+(.+)", read("/proc/cpuinfo"), platform.machine()),
        ),
        (
            "sockets × cores × threads",
            " × ".join(
                first(rf"^{name}:\s+(\S+)", lscpu, UNKNOWN)
                for name in (r"Socket\(s\)", r"Core\(s\) per socket", r"Thread\(s\) per core")
            ),
        ),
        ("CPUs this process may use", str(len(os.sched_getaffinity(0)))),
        ("NUMA nodes", first(r"^NUMA node\(s\):\s+(\S+)", lscpu, UNKNOWN)),
        ("frequency governor", read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or UNKNOWN),
        ("memory", f"{memory:.1f} GiB"),
    ]
    return ["## System", "", *table(rows)]


def table(rows):
    return ["| | |", "|---|---|"] + [f"| {name} | {value} |" for name, value in rows]


def gpu_section():
    lines = ["## GPUs", ""]
    fields = (
        "index,name,memory.total,power.limit,clocks.max.sm,clocks.max.memory,pcie.link.gen.max,"
        "pcie.link.width.max,"
        "ecc.mode.current,persistence_mode,compute_mode"
    )
    listing = run("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")
    if not listing:
        return lines + ["none is seen (no nvidia-smi, or it finds no GPU)"]
    lines += [
        "| GPU | name | memory | power limit | SM clock | memory clock | PCIe | ECC | persistence | compute "
        "mode |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in listing.splitlines():
        cells = [cell.strip() for cell in row.split(",")] + [UNKNOWN] * 11
        lines.append(f"| {' | '.join(cells[:6])} | gen {cells[6]} x{cells[7]} | {' | '.join(cells[8:11])} |")
    mig = first(r"MIG Mode\s*\n\s*Current\s*:\s*(\S+)", run("nvidia-smi", "-q"), UNKNOWN)
    return lines + ["", f"MIG: {mig}"]


def links_section():
    lines = ["## Links between GPUs", ""]
    topology = run("nvidia-smi", "topo", "-m")
    topology = re.sub(r"\x1b\[[0-9;]*m", "", topology)
    lines += [code(topology) if topology else "no topology (no nvidia-smi)", ""]
    nvlink = run("nvidia-smi", "nvlink", "--status")
    speeds = {}
    for text in re.findall(r"Link \d+: (\S+ GB/s)", nvlink):
        speeds[text] = speeds.get(text, 0) + 1
    gpus = max(1, len(re.findall(r"^GPU \d+", nvlink, re.MULTILINE)))
    lines.append(
        "NVLink: "
        + (", ".join(f"{count / gpus:g} links of {speed} a GPU" for speed, count in speeds.items()) or "none")
    )
    return lines


def network_section():
    lines = ["## Network", ""]
    devices = []
    for path in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        device, port = path.split("/")[4], path.split("/")[-1]
        devices.append(
            (
                f"{device} port {port}",
                f"{read(path + '/link_layer')}, {read(path + '/rate')}, "
                f"{read(path + '/state').split(': ')[-1]}, firmware "
                f"{read(f'/sys/class/infiniband/{device}/fw_ver') or UNKNOWN}",
            )
        )
    lines += table(devices) if devices else ["InfiniBand and RoCE: none"]
    interfaces = []
    for path in sorted(glob.glob("/sys/class/net/*")):
        name, speed = os.path.basename(path), read(path + "/speed")
        if name != "lo":
            interfaces.append(
                f"{name} ({speed + ' Mbit/s' if speed.isdigit() else 'speed unknown'}, "
                f"{read(path + '/operstate')})"
            )
    return lines + ["", "Ethernet: " + (", ".join(interfaces) or "none")]


def cache_value(build, name):
    return first(rf"^{re.escape(name)}:[^=]*=(.*)$", read(os.path.join(build, "CMakeCache.txt")))


def torch_version(build):
    root = cache_value(build, "LIBTORCH_USED_ROOT") or os.environ.get("LIBTORCH_ROOT", "")
    return (
        read(os.path.join(root, "build-version"))
        or first(r"""^__version__ = ['"]([^'"]+)""", read(os.path.join(root, "version.py")))
        or cache_value(build, "LIBTORCH_USED_VERSION")
        or UNKNOWN
    )


def nccl_version(build):
    header = ""
    for folder in (cache_value(build, "NCCL_INCLUDE_DIR"), "/usr/include", "/usr/local/cuda/include"):
        header = header or read(os.path.join(folder, "nccl.h")) if folder else header
    parts = [first(rf"#define NCCL_{name}\s+(\d+)", header) for name in ("MAJOR", "MINOR", "PATCH")]
    return ".".join(parts) if all(parts) else UNKNOWN


def libddp_version():
    """Of the checkout that holds this file."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return first(r"^project\([^)]*\bVERSION\s+([\d.]+)", read(os.path.join(here, "CMakeLists.txt")))


def program_versions(program):
    """{library: version} as a program of ddp::run prints them."""
    lines = (run(program, "--version") if program else "").splitlines()
    return dict(line.split(maxsplit=1) for line in lines if len(line.split(maxsplit=1)) == 2)


def versions_section(build, program=""):
    here = os.path.dirname(os.path.abspath(__file__))
    linked_with = program_versions(program)
    own = linked_with.get("libddp", "")
    commit = run("git", "-C", here, "rev-parse", "HEAD")
    if commit and run("git", "-C", here, "status", "--porcelain", "--untracked-files=no"):
        commit += " with changes"
    rows = [
        ("libddp", libddp_version() or own.split(" ")[0] or UNKNOWN),
        ("libddp's commit", commit or first(r"\(commit (.+)\)", own) or UNKNOWN),
        ("LibTorch", linked_with.get("LibTorch") or torch_version(build)),
        (
            "NVIDIA driver",
            run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or "none",
        ),
        ("CUDA toolkit", first(r"release ([\d.]+)", run("nvcc", "--version"), "none")),
        ("NCCL headers", nccl_version(build)),
        ("MPI", (run("mpirun", "--version") or "none").split("\n")[0]),
        ("Slurm", run("sinfo", "--version") or "none"),
        (
            "compiler",
            (run(cache_value(build, "CMAKE_CXX_COMPILER") or "c++", "--version") or UNKNOWN).split("\n")[0],
        ),
        ("build type", cache_value(build, "CMAKE_BUILD_TYPE") or UNKNOWN),
        ("Python", platform.python_version()),
    ]
    return ["## Versions", "", *table(rows)]


def environment_section():
    names = sorted(
        name
        for name in os.environ
        if re.match(r"(NCCL|OMP|OMPI_MCA|UCX|CUDA|FI)_", name) or name in ("KMP_AFFINITY",)
    )
    lines = ["## Environment", ""]
    if not names:
        return lines + ["nothing that begins with NCCL_, OMP_, OMPI_MCA_, UCX_, FI_ or CUDA_ is set"]
    return lines + [code("\n".join(f"{name}={os.environ[name]}" for name in names))]


def run_section(path):
    """What made a run, what its settings changed, and how it ended."""
    folder = find_run(path)
    lines = [f"## Run {os.path.basename(os.path.abspath(folder))}", ""]
    try:
        constants = json.loads(read_optional(os.path.join(folder, "run.json")) or "{}")
    except ValueError:
        constants = {}
    if isinstance(constants, dict) and constants:
        lines += table([(name, f"`{constant_text(value)}`") for name, value in constants.items()])
    settings = map(SETTING.fullmatch, read_optional(os.path.join(folder, "settings.txt")).splitlines())
    changed = [f"{setting[2]}={setting[3]}" for setting in settings if setting and setting[1] == "*"]
    log = read_optional(os.path.join(folder, "log.txt")).splitlines()
    serious = [line for line in log if re.search(r"\[(warning|error|critical)\]", line)]
    for title, texts in (
        ("Changed settings", changed),
        ("Last warnings and errors", serious[-LOG_LINES:]),
        ("Last lines of the log", log[-LOG_LINES:]),
    ):
        lines += ["", f"{title}:", "", code("\n".join(texts) or "none")]
    return lines


def main(arguments):
    parser = Parser(__doc__)
    parser.add_argument("--output", help="file to write; without it, standard output")
    parser.add_argument("--build", default="build", help="build folder, for the versions it was made with")
    parser.add_argument(
        "--program", default="", help="a program of ddp::run, for the versions it is linked with"
    )
    parser.add_argument("--run", help="folder of a run, or of runs (then the newest): describe it too")
    options = parser.parse_args(arguments)
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    sections = [
        system_section(),
        gpu_section(),
        links_section(),
        network_section(),
        versions_section(options.build, options.program),
        environment_section(),
    ]
    if options.run:
        sections.append(run_section(options.run))
    text = (
        f"# Machine\n\nDescribed on {now}.\n\n" + "\n\n".join("\n".join(lines) for lines in sections) + "\n"
    )
    if not options.output:
        sys.stdout.write(text)
        return 0
    try:
        # Several jobs of a study may begin at once; none may read half a file.
        replace_file(options.output, text)
    except OSError as error:
        raise WriteError(f"{options.output} cannot be written: {error.strerror}") from None
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
