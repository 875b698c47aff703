#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes resnet.json: what torchvision's ResNets give on weights and images made by a formula that
tests/unit/models/formula.hpp repeats. Needs torch, torchvision and numpy.

usage: make_resnet_golden.py [OUT]     (default: resnet.json beside this file)
"""

import json
import math
import os
import sys

import numpy as np
import torch
import torchvision

NAMES = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
MASK = 0xFFFFFFFF


def fnv1a(data: bytes) -> int:
    h = 2166136261
    for byte in data:
        h = ((h ^ byte) * 16777619) & MASK
    return h


def uniform(name: str, shape) -> torch.Tensor:
    """float32 in [-0.5, 0.5), exact in 24 bits: a 32-bit mix of the name's hash and the flat index."""
    count = math.prod(shape)
    x = np.uint32(fnv1a(name.encode())) + np.arange(count, dtype=np.uint32) * np.uint32(2654435761)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    u = (x >> np.uint32(8)).astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)
    return torch.from_numpy(u.reshape(tuple(shape)).copy())


def fill(model):
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("num_batches_tracked"):
                continue
            u = uniform(name, tensor.shape)
            if tensor.dim() > 1:  # variance 2 / fan_in
                fan_in = tensor[0].numel()
                tensor.copy_(u * np.float32(math.sqrt(24.0 / fan_in)))
            elif name.endswith(".weight"):  # of a normalisation
                tensor.copy_(u * 0.25 + 1.0)
            elif name.endswith("running_var"):
                tensor.copy_(u * 0.5 + 1.0)
            else:
                tensor.copy_(u * 0.25)


def make(name, stem, num_classes=10):
    model = getattr(torchvision.models, name)(num_classes=num_classes)
    if stem == "cifar":
        model.conv1 = torch.nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
        model.maxpool = torch.nn.Identity()
    fill(model)
    return model


def keys(model):
    return [f"{k} {list(v.shape)}" for k, v in model.state_dict().items()]


def eval_case(name, stem, size):
    model = make(name, stem).eval()
    with torch.no_grad():
        out = model(uniform("input", (2, 3, size, size)) * 4)
    listed = keys(model)
    case = {
        "model": name,
        "stem": stem,
        "size": size,
        "output": out.flatten().tolist(),
        "num_keys": len(listed),
        "keys_fnv1a": fnv1a("\n".join(listed).encode()),
    }
    if name in ("resnet18", "resnet50") and stem == "imagenet":
        case["keys"] = listed
    return case


def train_case(name, stem, size):
    # float64: gradients pass through batch statistics of few values, which amplify float32's roundings, and
    # those are other ones on other processors.
    model = make(name, stem).double().train()
    out = model(uniform("input", (4, 3, size, size)).double() * 4)
    loss = torch.nn.functional.cross_entropy(out, torch.tensor([1, 3, 5, 7]), label_smoothing=0.1)
    loss.backward()
    grads = {
        k: {"norm": p.grad.double().norm().item(), "first": p.grad.flatten()[:4].tolist()}
        for k, p in model.named_parameters()
    }
    stats = {k: v.double().norm().item() for k, v in model.named_buffers()}
    return {"model": name, "stem": stem, "size": size, "loss": loss.item(), "grads": grads, "buffers": stats}


def init_case(name, zero_init_residual):
    torch.manual_seed(1234)
    model = getattr(torchvision.models, name)(num_classes=10, zero_init_residual=zero_init_residual)
    return {
        "model": name,
        "zero_init_residual": zero_init_residual,
        "sums": {
            k: [p.double().sum().item(), p.double().abs().sum().item()] for k, p in model.named_parameters()
        },
    }


def main(out):
    torch.set_num_threads(1)
    golden = {
        "versions": {"torch": torch.__version__, "torchvision": torchvision.__version__},
        "eval": [eval_case(n, "imagenet", 64) for n in NAMES] + [eval_case("resnet18", "cifar", 32)],
        "train": [train_case("resnet18", "imagenet", 64), train_case("resnet50", "imagenet", 64)],
        "init": [init_case("resnet18", False), init_case("resnet50", True)],
    }
    # One grad, buffer or sum a line keeps differences readable.
    with open(out, "w") as f:
        text = json.dumps(golden, indent=1)
        f.write(text + "\n")


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    main(sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "resnet.json"))
