# SPDX-License-Identifier: Apache-2.0
"""Emulated steps: programs that replay a step's convolutions, passes and byte counts as one CUDA graph on
random data. They say what the chip allows in this call, at these clocks. They are no part of this project; a
folder holds them:

  resnet50_probe   `resnet50_probe bf16 plain net` prints {"t": "net", "name": "R1_s2d", "step_sustained_ms":
                   …}
  resnet18_probe   `resnet18_probe net` prints {"t": "net", "N": batch, "name": DESIGN, "b2b_us": …}, for
                   BATCHES and ONLY
"""

import json
import os
import subprocess

RESNET50 = "R1_s2d"
RESNET18 = "one_mg_side_pdl_split_lazy"
TIMEOUT = float(os.environ.get("EMULATED_TIMEOUT", "150"))


def lines(command, environment):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT, env=dict(os.environ, **environment)
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-300:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"t":"net"')]


def step_ms(folder, probe, batch_size):
    """Milliseconds of the emulated step of `probe` at `batch_size`."""
    program = os.path.join(folder, f"{probe}_probe")
    if probe == "resnet50":
        found = [
            line["step_sustained_ms"]
            for line in lines([program, "bf16", "plain", "net"], {})
            if line["name"] == RESNET50
        ]
    else:
        environment = dict(BATCHES=str(batch_size), STEM3="0", ONLY=RESNET18)
        found = [
            line["b2b_us"] / 1000
            for line in lines([program, "net"], environment)
            if line["name"] == RESNET18 and line["N"] == batch_size
        ]
    if not found:
        raise RuntimeError(f"{program} printed no step of batch {batch_size}")
    return found[0]
