# SPDX-License-Identifier: Apache-2.0
"""What a figure depends on besides the programs: GPUs, driver, libraries, and clocks and power while it was
taken."""

import os
import shutil
import statistics
import subprocess
import threading
import time

import torch

HERE = os.path.dirname(os.path.abspath(__file__))


def first_line(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=HERE)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def first_gpu():
    """The first GPU that the programs see, as nvidia-smi names it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"


def query(fields):
    return first_line(
        ["nvidia-smi", "-i", first_gpu(), f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    )


def num_gpus():
    return torch.cuda.device_count()


def describe():
    """Of this host and this checkout, as strings and numbers for the results file."""
    about = dict(
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        cpus=os.cpu_count(),
        commit=first_line(["git", "describe", "--always", "--dirty", "--abbrev=12"]),
        gpus=torch.cuda.device_count(),
    )
    if torch.cuda.is_available():
        driver, power_limit, clock = (
            query("driver_version,power.limit,clocks.max.sm").split(", ") + ["", "", ""]
        )[:3]
        about.update(
            gpu=torch.cuda.get_device_name(0),
            driver=driver,
            power_limit_w=power_limit,
            max_sm_mhz=clock,
            cudnn=torch.backends.cudnn.version(),
            nccl=".".join(map(str, torch.cuda.nccl.version())),
        )
    return about


class Sampler:
    """Clock and power of the first GPU some five times a second while the `with` block runs; nothing without
    nvidia-smi."""

    FIELDS = "clocks.sm,power.draw.instant,temperature.gpu"

    def __enter__(self):
        self.samples, self.process = [], None
        if torch.cuda.is_available() and shutil.which("nvidia-smi"):
            self.process = subprocess.Popen(
                [
                    "nvidia-smi",
                    "-i",
                    first_gpu(),
                    f"--query-gpu={self.FIELDS}",
                    "--format=csv,noheader,nounits",
                    "-lms",
                    "200",
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            threading.Thread(target=self.read, daemon=True).start()
        return self

    def read(self):
        for line in self.process.stdout:
            try:
                self.samples.append((time.monotonic(), *map(float, line.split(","))))
            except ValueError:
                pass  # a field that this GPU does not have

    def __exit__(self, *_):
        if self.process:
            self.process.terminate()
            self.process.wait()

    def within(self, windows):
        """Medians of the samples in (begin, end) windows of the monotonic clock."""
        inside = []
        for sample in self.samples:
            if any(begin <= sample[0] <= end for begin, end in windows):
                inside.append(sample)
        if not inside:
            return {}
        clock, power, temperature = (statistics.median(column) for column in list(zip(*inside))[1:])
        return dict(sm_mhz=round(clock), power_w=round(power), celsius=round(temperature))
