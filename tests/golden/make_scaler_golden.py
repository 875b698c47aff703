#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes scaler_golden.json: traces of torch.amp.GradScaler on the CPU with infs at chosen steps.

Each optimizer has one parameter of 4 elements; the loss is sum(parameter * coefficients), so the
gradient is coefficients * scale. Run:  python tests/golden/make_scaler_golden.py
"""

import json
import pathlib

import torch

LR = 0.0625


def coefficients(step, k):
    return [((i * 7 + step * 5 + k * 3) % 23 - 11) / 16.0 for i in range(4)]


def run(options, num_steps, infs, unscale_first, num_optimizers):
    """infs: {step: [(optimizer, element, "inf" | "-inf" | "nan")]}"""
    scaler = torch.amp.GradScaler("cpu", **options)
    parameters = [torch.ones(4, requires_grad=True) for _ in range(num_optimizers)]
    optimizers = [torch.optim.SGD([p], lr=LR) for p in parameters]
    trace = []
    for step in range(num_steps):
        loss = torch.zeros(())
        for k, (p, optimizer) in enumerate(zip(parameters, optimizers)):
            optimizer.zero_grad()
            loss = loss + (p * torch.tensor(coefficients(step, k))).sum()
        scaled = scaler.scale(loss)
        before = scaler.get_scale()
        scaled.backward()
        for k, element, value in infs.get(step, []):
            parameters[k].grad[element] = float(value)
        for k, optimizer in enumerate(optimizers):
            if (step + k) % unscale_first == 0:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        trace.append(
            {
                "scale_before": before,
                "parameters": [p.detach().tolist() for p in parameters],
                "state": scaler.state_dict(),
            }
        )
    return {
        "options": options,
        "num_optimizers": num_optimizers,
        "unscale_first": unscale_first,
        "infs": {str(s): v for s, v in infs.items()},
        "trace": trace,
    }


CASES = {
    "defaults_with_infs": run(
        dict(init_scale=65536.0, growth_interval=4),
        24,
        {0: [(0, 0, "inf")], 1: [(0, 3, "nan")], 9: [(0, 2, "-inf")], 10: [(0, 1, "inf")]},
        2,
        1,
    ),
    "odd_factors": run(
        dict(init_scale=1000.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=3),
        24,
        {2: [(0, 1, "inf")], 3: [(0, 0, "nan")], 14: [(0, 3, "inf")]},
        3,
        1,
    ),
    "two_optimizers": run(
        dict(init_scale=256.0, growth_interval=2),
        20,
        {3: [(0, 1, "inf")], 6: [(1, 2, "nan")], 11: [(0, 0, "inf"), (1, 0, "inf")]},
        2,
        2,
    ),
    "growth_stays_finite": run(dict(init_scale=2.0**124, growth_interval=1), 6, {}, 1, 1),
}

if __name__ == "__main__":
    path = pathlib.Path(__file__).parent / "scaler_golden.json"
    path.write_text(json.dumps({"torch": torch.__version__, "cases": CASES}, separators=(",", ":")) + "\n")
