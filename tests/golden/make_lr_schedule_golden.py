#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes lr_schedule_golden.json: learning rates of torch.optim.lr_scheduler, step by step.

Run:  python tests/golden/make_lr_schedule_golden.py
"""

import json
import pathlib
import warnings

import torch
from torch.optim import lr_scheduler as s

warnings.filterwarnings("ignore")


def rates(lr, make, num_steps):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = make(optimizer)
    out = []
    for _ in range(num_steps):
        out.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return out


def warmup_then(optimizer, start_factor, warmup, after):
    first = s.LinearLR(optimizer, start_factor=start_factor, total_iters=warmup)
    return s.SequentialLR(optimizer, [first, after(optimizer)], milestones=[warmup])


CASES = {
    "step": ({"type": "step", "lr": 0.3, "step_size": 7, "gamma": 0.1}, lambda o: s.StepLR(o, 7, 0.1), 30),
    "multi_step": (
        {"type": "multi_step", "lr": 0.3, "milestones": [3, 4, 11, 11], "gamma": 0.5},
        lambda o: s.MultiStepLR(o, [3, 4, 11, 11], 0.5),
        20,
    ),
    "cosine": (
        {"type": "cosine", "lr": 0.4, "total_steps": 50, "min_lr": 0.01},
        lambda o: s.CosineAnnealingLR(o, 50, 0.01),
        51,
    ),
    "linear": (
        {"type": "linear", "lr": 0.4, "total_steps": 50, "min_lr": 0.1},
        lambda o: s.LinearLR(o, 1.0, 0.25, 50),
        60,
    ),
    "warmup_cosine": (
        {"type": "cosine", "lr": 0.4, "total_steps": 50, "warmup_steps": 10, "warmup_start_factor": 0.05},
        lambda o: warmup_then(o, 0.05, 10, lambda o: s.CosineAnnealingLR(o, 40)),
        51,
    ),
    "warmup_linear": (
        {
            "type": "linear",
            "lr": 0.4,
            "total_steps": 50,
            "warmup_steps": 10,
            "warmup_start_factor": 0.05,
            "min_lr": 0.1,
        },
        lambda o: warmup_then(o, 0.05, 10, lambda o: s.LinearLR(o, 1.0, 0.25, 40)),
        55,
    ),
    "one_cycle": (
        {"type": "one_cycle", "lr": 0.5, "total_steps": 97},
        lambda o: s.OneCycleLR(o, 0.5, 97),
        97,
    ),
    "one_cycle_linear": (
        {
            "type": "one_cycle",
            "lr": 0.5,
            "total_steps": 100,
            "pct_start": 0.2,
            "div_factor": 10.0,
            "final_div_factor": 100.0,
            "linear_anneal": True,
        },
        lambda o: s.OneCycleLR(
            o, 0.5, 100, pct_start=0.2, div_factor=10.0, final_div_factor=100.0, anneal_strategy="linear"
        ),
        100,
    ),
    "one_cycle_three_phase": (
        {"type": "one_cycle", "lr": 0.5, "total_steps": 80, "three_phase": True},
        lambda o: s.OneCycleLR(o, 0.5, 80, three_phase=True),
        80,
    ),
    "one_cycle_two_steps": (
        {"type": "one_cycle", "lr": 0.5, "total_steps": 2},
        lambda o: s.OneCycleLR(o, 0.5, 2),
        2,
    ),
}

if __name__ == "__main__":
    cases = {
        name: {"options": options, "lr": rates(options["lr"], make, n)}
        for name, (options, make, n) in CASES.items()
    }
    path = pathlib.Path(__file__).parent / "lr_schedule_golden.json"
    path.write_text(json.dumps({"torch": torch.__version__, "cases": cases}, separators=(",", ":")) + "\n")
