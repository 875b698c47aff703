#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exports the small ResNet of this folder: cifar_net.pt2, for images of 32x32 pixels and 10 classes, with
random weights.

usage: make_archive.py OUT.pt2

The archive is in training mode; libddp derives the evaluation. Stack traces keep the lines of this file
alone, so the archive is small and has no path of the machine that made it.
"""

import sys

import torch
from torch import nn


class Block(nn.Module):
    """Two 3x3 convolutions with batch normalization beside a shortcut."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class CifarNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 56, 2))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(56, num_classes)

    def forward(self, images):
        x = self.blocks(torch.relu(self.bn(self.conv(images))))
        return self.head(self.dropout(x.mean((2, 3))))


def strip_stack_traces(program):
    for node in program.graph.nodes:
        lines = (node.meta.get("stack_trace") or "").splitlines()
        mine = [i for i, line in enumerate(lines) if "make_archive.py" in line][-1:]
        node.meta["stack_trace"] = "\n".join(
            '  File "make_archive.py"' + lines[i].rsplit('"', 1)[1] + "\n" + lines[i + 1]
            for i in mine
            if i + 1 < len(lines)
        )


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.manual_seed(0)
    net = CifarNet().train()
    program = torch.export.export(
        net, (torch.randn(2, 3, 32, 32),), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    strip_stack_traces(program)
    torch.export.save(program, sys.argv[1])


if __name__ == "__main__":
    main()
