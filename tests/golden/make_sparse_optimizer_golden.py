#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes sparse_optimizer_golden.json: weights and state after 20 sparse steps of torch.optim on the CPU.

tests/unit/optim/sparse_optimizer_test.cpp repeats the exact formulas of weights and gradients.
Run:  python tests/golden/make_sparse_optimizer_golden.py
"""

import json
import pathlib

import torch

ROWS, WIDTH, NUM_STEPS = 7, 5, 20
CASES = {
    "sgd": (torch.optim.SGD, {}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.125, "initial_accumulator_value": 0.25}),
    "sparse_adam": (torch.optim.SparseAdam, {"betas": (0.75, 0.9)}),
}


def formula(shape, a, b, modulus):
    count = shape[0] * shape[1]
    values = [((i * a + b) % modulus - modulus // 2) / 64.0 for i in range(count)]
    return torch.tensor(values, dtype=torch.float32).reshape(shape)


def gradient(step):
    """Rows step, step + 2 and step + 3 modulo ROWS; every fifth step has none."""
    rows = [] if step % 5 == 4 else [(step + offset) % ROWS for offset in (0, 2, 3)]
    values = formula((len(rows), WIDTH), 37, 101 * step, 257)
    return torch.sparse_coo_tensor([rows], values, (ROWS, WIDTH))


golden = {}
for name, (optimizer_class, options) in CASES.items():
    weight = formula((ROWS, WIDTH), 29, 0, 101).requires_grad_()
    optimizer = optimizer_class([weight], lr=0.0625, **options)
    for step in range(NUM_STEPS):
        weight.grad = gradient(step)
        optimizer.step()
    state = {
        key: torch.as_tensor(value).flatten().tolist()
        for key, value in optimizer.state[weight].items()
        if value is not None
    }
    golden[name] = {"weight": weight.detach().flatten().tolist(), "state": state}
path = pathlib.Path(__file__).with_name("sparse_optimizer_golden.json")
path.write_text(json.dumps(golden) + "\n")
