# SPDX-License-Identifier: Apache-2.0
"""A U-Net of plain modules for pytorch_resnet.py (model=unet): four levels of two convolutions with batch
norms, and skip connections. It gives each image the mean of its pixels' class scores."""

import torch
from torch import nn


def two_convolutions(inputs, outputs):
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, num_classes=1000, widths=(64, 128, 256, 512)):
        super().__init__()
        self.down = nn.ModuleList(two_convolutions(i, o) for i, o in zip((3, *widths), widths))
        self.pool = nn.MaxPool2d(2)
        pairs = list(zip(widths[:0:-1], widths[-2::-1]))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, stride=2) for i, o in pairs)
        self.up = nn.ModuleList(two_convolutions(2 * o, o) for _, o in pairs)
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, x):
        kept = []
        for level, layers in enumerate(self.down):
            x = layers(self.pool(x) if level else x)
            kept.append(x)
        kept.pop()
        for grow, layers in zip(self.grow, self.up):
            x = layers(torch.cat([kept.pop(), grow(x)], 1))
        return self.head(x).mean((2, 3))


def unet(num_classes=1000):
    return UNet(num_classes)
