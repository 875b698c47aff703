#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes optimizer_golden.json: parameters and state after steps of torch.optim on the CPU.

Weights and gradients come from exact formulas that tests/unit/optim/optimizer_golden.hpp repeats,
so the file holds results only. Run:  python tests/golden/make_optimizer_golden.py
"""

import json
import pathlib

import torch

SHAPES = {"conv.weight": (4, 3, 3, 3), "fc.weight": (7, 5), "fc.bias": (33,), "late.weight": (6, 2)}
NUM_STEPS = 100
KEPT = (1, 10, 24, NUM_STEPS)  # steps after which parameters are written; state: after the last
LATE_STEP = 3  # late.weight has no gradient before


def formula(shape, a, b, modulus):
    n = 1
    for d in shape:
        n *= d
    values = [((i * a + b) % modulus - modulus // 2) / 64.0 for i in range(n)]
    return torch.tensor(values, dtype=torch.float32).reshape(shape)


def lr_at(step):
    return 0.0625 / (1 + step % 8)


def make(cls, options):
    parameters = {
        name: formula(shape, 29, 17 * k, 101).requires_grad_()
        for k, (name, shape) in enumerate(SHAPES.items())
    }
    decay = [p for p in parameters.values() if p.dim() > 1]
    no_decay = [p for p in parameters.values() if p.dim() <= 1]
    if options.pop("no_decay_on_bias", False):
        groups = [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}]
    else:
        groups = [{"params": list(parameters.values())}]
    return parameters, cls(groups, lr=0.1, **options)


def run(cls, options):
    parameters, optimizer = make(cls, dict(options))
    snapshots = {}
    for step in range(NUM_STEPS):
        for k, (name, p) in enumerate(parameters.items()):
            late = name.startswith("late") and step < LATE_STEP
            p.grad = None if late else formula(p.shape, 37, 13 * k + 101 * step, 257)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        optimizer.step()
        if step + 1 in KEPT:
            snapshots[str(step + 1)] = {n: p.detach().flatten().tolist() for n, p in parameters.items()}
    state = {}
    for name, p in parameters.items():
        for slot, value in optimizer.state[p].items():
            if value is not None:
                state[f"state.{name}.{slot}"] = torch.as_tensor(value).flatten().tolist()
    return {"options": options, "parameters": snapshots, "state": state}


CASES = {
    "sgd": (torch.optim.SGD, {}),
    "sgd_weight_decay": (torch.optim.SGD, {"weight_decay": 0.01}),
    "sgd_momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 5e-4}),
    "sgd_dampening": (torch.optim.SGD, {"momentum": 0.8, "dampening": 0.3}),
    "sgd_nesterov": (
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 5e-4, "nesterov": True, "no_decay_on_bias": True},
    ),
    "adam": (torch.optim.Adam, {"weight_decay": 0.01, "eps": 1e-6}),
    "adam_amsgrad": (torch.optim.Adam, {"betas": (0.8, 0.95), "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.05, "no_decay_on_bias": True}),
    "adamw_amsgrad": (torch.optim.AdamW, {"weight_decay": 0.05, "amsgrad": True}),
}

if __name__ == "__main__":
    result = {"torch": torch.__version__, "cases": {n: run(c, o) for n, (c, o) in CASES.items()}}
    path = pathlib.Path(__file__).parent / "optimizer_golden.json"
    path.write_text(json.dumps(result, separators=(",", ":")) + "\n")
