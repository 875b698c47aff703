# SPDX-License-Identifier: Apache-2.0
"""Saves a small network for images of 32 x 32 pixels as TorchScript.

usage: torchscript_net.py FILE
"""

import sys

import torch

torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3, stride=2),
    torch.nn.BatchNorm2d(8),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(8 * 15 * 15, 10),
)
torch.jit.script(net).save(sys.argv[1])
